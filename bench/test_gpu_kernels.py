"""Kernels on a GPU against torch's plain ways and a copy, over the gradients of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastreduce import backends

from . import operations
from .conftest import Size
from .operations import Case
from .paired import Contestant, alternate, record, seconds_on_device, seconds_on_host
from .shapes import CAPS
from .test_kernels import DTYPES, Options, alignment_of, case_id, check

BACKENDS = ("triton", "numba_cuda")
BIG = ("bert_large", "gpt2_xl", "llama_1b")
BIG_CAPS = (256 << 20,)  # bytes; elsewhere buckets are those of a step

CASES: list[tuple[str, str, Options]] = [
    *((operation, name, {"dtype": "fp16", "scale": 0.5}) for operation in ("flatten", "unflatten") for name in BIG),
    *((operation, "bert_large", {"dtype": "bf16", "scale": 0.5}) for operation in ("flatten", "unflatten")),
    *(
        (operation, "resnet50", {"grads": grads, "dtype": dtype, "scale": 0.5})
        for operation in ("flatten", "unflatten")
        for grads, dtype in (("fp32", "fp16"), ("fp32", "bf16"), ("bf16", "bf16"), ("bf16", "fp16"))
    ),
    *((operation, "tiny", {"dtype": "fp16", "scale": 0.5}) for operation in ("flatten", "unflatten")),
    *(
        ("reduce_shards", name, {"dtype": "fp16", "scale": 1 / ranks, "ranks": ranks})
        for name in ("bert_large", "resnet50")
        for ranks in (2, 8)
    ),
    *((operation, "bert_large", {}) for operation in ("flatten_fp16", "unflatten_fp16", "reduce_fp16")),
    *(
        (operation, name, {"grads": grads})
        for operation in ("quantize", "dequantize")
        for name, grads in (("bert_large", "fp32"), ("resnet50", "fp32"), ("resnet50", "bf16"), ("tiny", "fp32"))
    ),
    *(("quantize", name, {"error_feedback": True}) for name in ("bert_large", "resnet50")),
    *(("reduce_quantized", name, {}) for name in ("bert_large", "resnet50")),
    *(("unflatten_with_statistics", "resnet50", {"dtype": dtype, "scale": 0.5}) for dtype in ("fp16", "bf16")),
    ("dequantize_with_statistics", "resnet50", {}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gpu_kernel(
    benchmark: Any,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    size: Size,
    case: tuple[str, str, Options],
    backend: str,
) -> None:
    """Each kernel does a bucket in one launch; a copy, bucket by bucket, is what it is held against."""
    operation, name, options = case
    rehearsal = pytestconfig.getoption("--rehearse")
    device, clock = ("cpu", seconds_on_host) if rehearsal else ("cuda", seconds_on_device)
    kernels = backends.load(backend)
    monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, backend)
    options = {key: DTYPES.get(value, value) for key, value in options.items()}
    model = operations.model_of(
        "few" if rehearsal else name,
        alignment_of(operation),
        size.elements,
        device,
        options.pop("grads", torch.float32),
        BIG_CAPS if name in BIG else CAPS,
    )
    made: Case = getattr(operations, operation)(model, **options)
    check(made, kernels)

    sources = [torch.randn(each.bucket.total, device=device) for each in model]
    targets = [torch.zeros_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    contestants = {
        backend: Contestant(lambda: made.run(kernels), made.nbytes),
        **{way: Contestant(call, made.nbytes) for way, call in made.plain.items()},
        "copy": Contestant(copy, 2 * sum(source.nbytes for source in sources)),
    }
    benchmark.group = operation
    times = alternate(contestants, size.seconds, clock)
    record(benchmark, times, {name: contestant.nbytes for name, contestant in contestants.items()})
