"""torch's own FSDP2 tests, which its wheel leaves out: out of a checkout of its sources, made to run on CPU ranks.

They are the methods of `FSDPTest`s and `FSDPTestMultiThread`s in files `test_fully_shard_*.py` of the folder
CONFORMANCE_SOURCES. Skips are lifted, what would be CUDA is the CPU, and ranks are processes, as many as WORLD_SIZE
says.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastreduce.fsdp
from fastreduce import SettingError
from fastreduce.fsdp.reduce_scatter import CompressedReduceScatter
from fastreduce.fsdp.torch_fsdp import when_training_begins

from . import shim

FOLDER = Path(os.environ["CONFORMANCE_SOURCES"])
_common: Any = importlib.import_module("torch.testing._internal.common_fsdp")
tests = importlib.import_module("torch.testing._internal.common_distributed")


@functools.cache
def _cases() -> dict[str, Any]:
    """Name of a test → its class."""
    sys.path.insert(0, str(FOLDER))
    found = {}
    kinds = (_common.FSDPTest, _common.FSDPTestMultiThread)
    with shim.skips_lifted():
        for path in sorted(FOLDER.glob("test_fully_shard_*.py")):
            try:
                module = importlib.import_module(path.stem)
            except Exception as error:  # another version of torch's
                print(f"{path.name} cannot be imported: {error}", file=sys.stderr)
                continue
            for name, kind in vars(module).items():
                if inspect.isclass(kind) and issubclass(kind, kinds) and kind.__module__ == path.stem:
                    short = path.stem.removeprefix("test_fully_shard_")
                    found |= {f"{short}.{name}.{test}": kind for test in dir(kind) if test.startswith("test_")}
    return found


def names() -> list[str]:
    """Of the tests."""
    return list(_cases())


def warm_up() -> None:
    """Load our kernels, before ranks are forked: no thread is started by it."""
    shim.warm_up()


def install(which: str) -> None:
    """Map CUDA to the CPU in this process, and let `which` reduce the gradients of models that are sharded."""
    shim.map_devices()
    torch.accelerator.device_count = lambda: int(os.environ["WORLD_SIZE"])
    if which == "fastreduce":
        when_training_begins(_reduce)
        _count(CompressedReduceScatter)


def _reduce(model: nn.Module) -> None:
    try:
        fastreduce.fsdp.compress(model, "none")
    except SettingError as refused:
        raise unittest.SkipTest(f"refused: {refused}") from refused


def _count(ours: Any) -> None:
    """Let those who count torch's reduce-scatters find one, of no meaning, for each of ours."""
    reduce = ours.__call__

    @functools.wraps(reduce)
    def reduce_and_tell(self: Any, **told: Any) -> None:
        reduce(self, **told)
        ranks = told["group"].size()
        if ranks > 1:
            dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(ranks), group=told["group"])

    ours.__call__ = reduce_and_tell


def call(test: str, rank: int, rendezvous: str) -> None:
    """Run one test as this rank, as torch's `FSDPTest._run` does."""
    kind = _cases()[test]
    kind.world_size = property(lambda self: int(os.environ["WORLD_SIZE"]))
    case = kind(test.rpartition(".")[2])
    case.rank, case.file_name = rank, rendezvous
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", world_size=case.world_size, rank=rank)
    dist.barrier()
    shim.common_utils.set_rng_seed(shim.common_utils.SEED)
    getattr(case, case._testMethodName)()
    dist.barrier()
    dist.destroy_process_group()
