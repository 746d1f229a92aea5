"""What the installed torch can do that others cannot: marks of the tests that need it."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def _makes_streams() -> bool:
    """Its CUDA builds only where a driver is."""
    try:
        torch.Stream()
    except RuntimeError:
        return False
    return True


VERSION = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
needs_streams = pytest.mark.skipif(not _makes_streams(), reason="this torch makes no stream, for mixed_precision=")
has_bucket_cap_mb_list = pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's class has no bucket_cap_mb_list",
)
lacks_bf16_hook = pytest.mark.skipif(
    torch.version.cuda is not None and dist.is_nccl_available(),
    reason="this torch has its hook for BF16, over gloo too",
)
shards_bytes = pytest.mark.skipif(VERSION < (2, 12), reason="this torch's FSDP shards floating-point parameters only")
