"""torch's own DDP tests, made to run without a GPU: CUDA placement means the CPU, and skips are lifted.

Importing this module imports torch's tests. `install` then patches this process for good, so it is called
in a rank of its own. torch's class is run under the same shim, as the baseline.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.overrides import TorchFunctionMode

from fastreduce import DistributedDataParallel as OurDDP
from fastreduce import SyncBatchNorm
from fastreduce.compression import NoCompression
from fastreduce.reduction import pipeline
from fastreduce.transports import LocalTransport

CLASSES: dict[str, type[TorchDDP]] = {"torch": TorchDDP, "fastreduce": OurDDP}
CPU = torch.device("cpu")


def _identity(*args: Any, **_: Any) -> Any:
    """A decorator, or what makes one, that changes nothing."""
    return args[0] if args and inspect.isfunction(args[0]) else lambda function: function


@contextlib.contextmanager
def skips_lifted() -> Iterator[None]:
    """What is imported within has no tests that are skipped for want of a GPU."""
    from torch.testing._internal import common_distributed

    with contextlib.ExitStack() as stack:
        for name in ("skip", "skipIf", "skipUnless"):
            stack.enter_context(mock.patch.object(unittest, name, _identity))
        for name in ("skip_if_lt_x_gpu", "skip_if_no_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
            stack.enter_context(mock.patch.object(common_distributed, name, _identity))
        yield


def _import_tests() -> Any:
    try:
        importlib.import_module("expecttest")
    except ImportError:  # torch's TestCase derives from it; no DDP test uses it
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stand_in
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", "2")
    os.environ.setdefault("TEMP_DIR", "/nonexistent")
    with skips_lifted():
        return importlib.import_module("torch.testing._internal.distributed.distributed_test")


tests = _import_tests()
common_utils = importlib.import_module("torch.testing._internal.common_utils")
_Backend: Any = tests.TestDistBackend
_Base: Any = tests.DistributedTest._DistTestBase


class Case(_Backend, _Base):  # type: ignore[misc]
    """All of torch's distributed tests, each to be called on every rank."""

    def runTest(self) -> None:
        """unittest wants it."""


def warm_up() -> None:
    """Load our kernels, before ranks are forked: no thread is started by it."""
    pipeline.warm_up(torch.float32, CPU, NoCompression(), LocalTransport())


def names() -> list[str]:
    """Names of the tests that construct a DistributedDataParallel, themselves or in a helper that they call."""
    functions = {name: f for name, f in vars(_Base).items() if inspect.isfunction(f)}
    sources = {name: inspect.getsource(inspect.unwrap(f)) for name, f in functions.items()}
    constructs = re.compile(r"\bDistributedDataParallel\(|\bDistributedDataParallel\._")

    @functools.cache
    def uses(name: str) -> bool:
        called = set(re.findall(r"self\.(_\w+)\(", sources[name])) - {name}
        return bool(constructs.search(sources[name])) or any(uses(other) for other in called if other in sources)

    return [name for name in functions if name.startswith("test_") and uses(name)]


def install(which: str) -> None:
    """Map CUDA to the CPU in this process, and put the class `which` in the place of torch's."""
    map_devices()
    for ddp in {TorchDDP, CLASSES[which]}:
        ddp.__init__ = _without_devices(ddp.__init__)  # type: ignore[method-assign]
    for module in (nn.parallel, tests):  # not torch.nn.parallel.distributed: Dynamo looks there
        module.DistributedDataParallel = CLASSES[which]
    TorchDDP._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[method-assign]  # it refuses the CPU
    tests.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}
    tests.Barrier.sync.__func__.__defaults__ = (None, 60)  # wait_for, timeout: machines may be busy


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def without_devices(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        init(self, module, None, None, *args[2:], **kwargs)

    return without_devices


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, (str, torch.device)) and str(device).startswith("cuda"):
        return CPU
    return device


def _on_cpu_too(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": _on_cpu(kwargs["device"])} if "device" in kwargs else kwargs


class _ToCPU(TorchFunctionMode):
    """Every `device=` is the CPU, and so is what `.to` and `.cuda` are given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _on_cpu_too(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and isinstance(args[0], int):
            return CPU
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        return func(*args, **kwargs)


class _Nothing:
    """A stream, an event or a context without effect."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def _no_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def map_devices() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    cuda: Any = torch.cuda
    cuda.device_count = lambda: world_size
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "manual_seed"):  # each its own function: Dynamo wants that
        setattr(cuda, name, lambda *_, **__: None)
    cuda.stream = cuda.device = _no_context
    for owner, name in itertools.product((cuda, torch, torch.accelerator), ("Stream", "Event", "current_stream")):
        if hasattr(owner, name):
            setattr(owner, name, type(name, (_Nothing,), {}))
    module: Any = nn.Module
    to = module.to
    module.cuda = lambda self, *_: self
    module.to = lambda self, *args, **kwargs: to(self, *map(_on_cpu, args), **_on_cpu_too(kwargs))
    _ToCPU().__enter__()
    owners: tuple[Any, ...] = (nn, nn.modules, nn.modules.batchnorm)
    for owner in owners:
        owner.SyncBatchNorm = SyncBatchNorm  # torch's has no kernels for the CPU


# Sizes in tests that would run for minutes on a CPU.
SMALLER = {"test_ddp_uneven_inputs": {1000: 40}}


def _shrink(test: str) -> None:
    function: Any = inspect.unwrap(getattr(_Base, test))
    code = function.__code__
    constants = tuple(SMALLER[test].get(c, c) if type(c) is int else c for c in code.co_consts)
    function.__code__ = code.replace(co_consts=constants)


def call(test: str, rank: int, rendezvous: str) -> None:
    """Run one test as this rank, as torch's `TestDistBackend._run` does."""
    if test in SMALLER:
        _shrink(test)
    case = Case(test)
    case.rank, case.file_name = rank, rendezvous
    seconds = tests.CUSTOM_PG_TIMEOUT.get(test, tests.default_pg_timeout)
    dist.init_process_group(
        "gloo",
        init_method=case.init_method,
        world_size=int(case.world_size),
        rank=rank,
        timeout=tests.timedelta(seconds=seconds),
    )
    case._barrier()
    common_utils.set_rng_seed(common_utils.SEED)
    getattr(case, test)()
    case._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
