"""Loads the simulated device, before torch asks for CUDA's hooks, and gives torch.cuda, torch's NCCL and CuPy's to it.

Imported by `site/sitecustomize.py` in processes that get `environment()` of `launching.py`. Only what fastreduce, its
tests and torch's wrappers use is there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

EXTENSION = Path(os.environ["SIMULATED_GPU"])
DEVICES = int(os.environ.get("SIMULATED_GPUS", "2"))
RACES_FILE = os.environ.get("SIMULATED_GPU_RACES")
LONGEST = 200  # races that are kept
FRAMES = 25
MEMORY = 1 << 34
ROOT = Path(__file__).parents[2]

ctypes.CDLL(str(EXTENSION), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(EXTENSION.stem, EXTENSION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device = _load()

_races: dict[str, None] = {}


def races() -> list[str]:
    """What was found since the last call: two accesses without an order between them, and where the later one is."""
    found = list(_races)
    _races.clear()
    return found


def _stack() -> str:
    """Where the project's own code is, the innermost frame last."""
    lines = []
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and "site-packages" not in path.parts:
            lines.append(f"    {path.relative_to(ROOT)}:{frame.lineno} {frame.name}")
    return "\n".join(lines[-FRAMES:])


def _on_race(text: str) -> None:
    race = f"{text}\n{_stack()}"
    if race in _races or len(_races) == LONGEST:
        return
    _races[race] = None
    if RACES_FILE:
        with open(RACES_FILE, "a") as file:
            file.write(race + "\n")


def _index(where: Any) -> int:
    if isinstance(where, int):
        index: int | None = where if where >= 0 else None
    else:
        index = None if where is None else torch.device(where).index
    return device.get_device() if index is None else index


# Streams and events


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """Its address, of which `_of_address` makes device and number; 0 for a default stream."""
        return self.stream_id and self.stream_id << 8 | self.device_index

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device=torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.cuda.current_stream())
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds; torch's own takes no subclass."""
        return 1e3 * (end.seconds - self.seconds)

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or torch.cuda.current_stream())


def _of_address(address: int) -> tuple[int, int]:
    return (address & 255, address >> 8) if address else (device.get_device(), 0)


def _current_stream(where: Any = None) -> Stream:
    number, index, kind = device.current_stream(_index(where))
    return Stream(stream_id=number, device_index=index, device_type=kind)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        device.set_stream(stream.stream_id, stream.device_index, stream.device_type)


class CUDAGraph:
    """Capturing refuses what CUDA refuses meanwhile, and runs what is captured at once; there is no replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, *_: Any, **__: Any) -> None:
        device.set_capturing(True)

    def capture_end(self) -> None:
        device.set_capturing(False)

    def replay(self) -> None:
        raise RuntimeError("the simulated device replays no graphs")

    def reset(self) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return 0, 0


def _install_threads() -> None:
    """Who has joined a thread knows of all that it has waited for."""
    thread: Any = threading.Thread
    run, join = thread._bootstrap_inner, thread.join

    def _bootstrap_inner(self: Any) -> None:
        self.simulated_actor = device.this_thread()
        run(self)

    def join_(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive() and hasattr(self, "simulated_actor"):
            device.follow_thread(self.simulated_actor)

    thread._bootstrap_inner, thread.join = _bootstrap_inner, join_


# torch.cuda


def _properties(where: Any = None) -> types.SimpleNamespace:
    """Those of a GPU on which all kernels are allowed."""
    return types.SimpleNamespace(
        name="Simulated",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        L2_cache_size=50 << 20,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        uuid=f"GPU-{_index(where)}",
    )


def _memory_stats(where: Any = None) -> dict[str, int]:
    """Of all devices together."""
    return {
        "allocated_bytes.all.current": device.allocated(),
        "allocated_bytes.all.peak": device.peak(),
        "allocation.all.allocated": device.allocations(),
        "num_alloc_retries": 0,
        "requested_bytes.all.allocated": device.requested(),
        "reserved_bytes.all.current": device.allocated(),
        "reserved_bytes.all.peak": device.peak(),
    }


def _set(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _lazy_init() -> None:
    torch.cuda._initialized = True  # type: ignore[attr-defined]


def _install_cuda() -> None:
    cuda: Any = torch.cuda
    _set(
        torch._C,
        _cuda_canDeviceAccessPeer=lambda a, b: True,
        _cuda_emptyCache=lambda: None,
        _cuda_exchangeDevice=device.exchange_device,
        _cuda_getCompiledVersion=lambda: 13000,
        _cuda_getCurrentRawStream=lambda index: device.current_stream(index)[0],
        _cuda_getCurrentStream=device.current_stream,
        _cuda_getDefaultStream=lambda index: (0, index, 1),
        _cuda_getDevice=device.get_device,
        _cuda_getDeviceCount=lambda: DEVICES,
        _cuda_get_sync_debug_mode=device.get_sync_debug_mode,
        _cuda_hasPrimaryContext=lambda index: True,
        _cuda_isCurrentStreamCapturing=device.is_capturing,
        _cuda_isInBadFork=lambda: False,
        _cuda_maybeExchangeDevice=device.exchange_device,
        _cuda_setDevice=device.set_device,
        _cuda_setStream=lambda stream_id, device_index, device_type: device.set_stream(
            stream_id, device_index, device_type
        ),
        _cuda_set_sync_debug_mode=device.set_sync_debug_mode,
        _cuda_synchronize=lambda: device.synchronize(-1),
        _host_emptyCache=lambda: None,
        _nccl_version=lambda: (2 << 32) | (32 << 16) | 3,
        _nccl_version_suffix=lambda: b"",
    )
    _set(
        cuda,
        CUDAGraph=CUDAGraph,
        Event=Event,
        ExternalStream=Stream,
        Stream=Stream,
        _exchange_device=device.exchange_device,
        _get_device_index=lambda where, optional=False, allow_cpu=False: _index(where),
        _cudart=types.SimpleNamespace(),
        _is_compiled=lambda: True,
        _lazy_init=_lazy_init,
        _maybe_exchange_device=device.exchange_device,
        _sleep=lambda cycles: None,
        can_device_access_peer=lambda a, b: True,
        current_stream=_current_stream,
        default_generators=(torch.default_generator,) * DEVICES,
        default_stream=lambda where=None: Stream(stream_id=0, device_index=_index(where), device_type=1),
        device_count=lambda: DEVICES,
        get_device_capability=lambda where=None: (9, 0),
        get_device_name=lambda where=None: "Simulated",
        get_device_properties=_properties,
        get_rng_state=lambda where=None: torch.get_rng_state(),
        is_available=lambda: True,
        is_bf16_supported=lambda *_: True,
        is_current_stream_capturing=device.is_capturing,
        is_initialized=lambda: cuda._initialized or device.allocations() > 0,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        max_memory_allocated=lambda where=None: device.peak(),
        mem_get_info=lambda where=None: (MEMORY, MEMORY),
        memory_allocated=lambda where=None: device.allocated(),
        memory_reserved=lambda where=None: device.allocated(),
        memory_stats=_memory_stats,
        reset_peak_memory_stats=lambda where=None: device.reset_peak(),
        set_rng_state=lambda state, where=None: None,
        set_stream=_set_stream,
        synchronize=lambda where=None: device.synchronize(_index(where)),
    )
    _set(cuda.graphs, CUDAGraph=CUDAGraph, is_current_stream_capturing=device.is_capturing)
    for name in ("default_generators", "get_rng_state", "manual_seed_all", "set_rng_state"):
        setattr(cuda.random, name, getattr(cuda, name))
    _set(cuda.streams, Event=Event, Stream=Stream)
    for name in ("max_memory_allocated", "memory_allocated", "memory_stats", "reset_peak_memory_stats"):
        setattr(cuda.memory, name, getattr(cuda, name))
    torch.version.cuda = "13.0"


def _install_storages() -> None:
    """Storages' own methods know real devices only: here they go through tensors of bytes."""
    storage: Any = torch.UntypedStorage
    resize, clone, copy, cpu = storage.resize_, storage.clone, storage.copy_, storage.cpu
    to: Any = torch.storage._to  # type: ignore[attr-defined]

    def on_device(each: Any) -> bool:
        return each.device.type == "cuda"

    def as_bytes(each: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=each.device).set_(each, 0, (each.nbytes(),))

    def resize_(self: Any, size: int) -> Any:
        if not on_device(self):
            return resize(self, size)
        device.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,)), size)
        return self

    def copy_(self: Any, other: Any, non_blocking: bool | None = None) -> Any:
        if not on_device(self) and not on_device(other):
            return copy(self, other, non_blocking)
        as_bytes(self).copy_(as_bytes(other))
        return self

    def _to(self: Any, where: Any, non_blocking: bool = False) -> Any:
        if not on_device(self) and torch.device(where).type != "cuda":
            return to(self, where, non_blocking)
        return as_bytes(self).to(where, copy=True).untyped_storage()

    storage.resize_, storage.copy_ = resize_, copy_
    torch.storage._to = _to  # type: ignore[attr-defined]
    storage.clone = lambda self: as_bytes(self).clone().untyped_storage() if on_device(self) else clone(self)
    storage.cpu = lambda self: as_bytes(self).cpu().untyped_storage() if on_device(self) else cpu(self)


# Process groups

_kept: list[Any] = []  # torch's groups hold backends' C++ parts only


class ProcessGroupNCCL(device.Nccl):  # type: ignore[name-defined]
    """Torch's, over gloo."""

    class Options:
        """Those that torch sets."""

        _timeout = distributed_c10d.default_pg_timeout
        is_high_priority_stream = False
        split_from, split_color = None, 0
        global_ranks_in_group: tuple[int, ...] = ()
        group_name = ""
        config = types.SimpleNamespace()

    uid, bound_device_id = 0, None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        below = dist.PrefixStore("under nccl", store)
        self.gloo: Any = dist.ProcessGroupGloo(below, rank, size, timeout=options._timeout)
        super().__init__(rank, size, self.gloo, "nccl")
        self.options = options
        _kept.append(self)

    def _set_sequence_number_for_group(self) -> None:
        self.gloo._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return self.gloo._get_sequence_number_for_group()

    def _is_initialized(self) -> bool:
        return True

    def comm_split_count(self) -> int:
        return 0

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("ProcessGroup nccl does not support monitoredBarrier")

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is nothing to do for it."""

    abort = shutdown = _shutdown = eager_connect_single_device = _nothing
    _set_default_timeout = _group_start = _group_end = _nothing


def _install_groups() -> None:
    group: Any = dist.ProcessGroup
    register = group._register_backend

    def _register_backend(self: Any, where: torch.device, kind: Any, backend: Any = None) -> None:
        """Gloo's kernels would not see that these are no CUDA tensors."""
        if where.type == "cuda" and isinstance(backend, dist.ProcessGroupGloo):
            backend, kind = device.Nccl(backend.rank(), backend.size(), backend, "gloo"), group.BackendType.CUSTOM
            _kept.append(backend)
        register(self, where, kind, backend)

    group._register_backend = _register_backend
    for module in (dist, distributed_c10d, torch._C._distributed_c10d):
        _set(module, ProcessGroupNCCL=ProcessGroupNCCL)
    _set(distributed_c10d, _NCCL_AVAILABLE=True)


# CuPy's NCCL


class _CupyNccl(types.ModuleType):
    """`cupy.cuda.nccl`: the tests' stand-in, once it is asked for, with the memory that it works on told."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "NcclCommunicator" in vars(self):
            raise AttributeError(name)
        from tests.support import nccl_stand_in

        nccl_stand_in.directory = tempfile.gettempdir()
        names = {key: value for key, value in vars(nccl_stand_in).items() if not key.startswith("__")}
        vars(self).update(names, NcclCommunicator=_communicator(nccl_stand_in.NcclCommunicator))
        return vars(self)[name]


def _communicator(base: Any) -> Any:
    class NcclCommunicator(base):  # type: ignore[valid-type]
        def allReduce(self, sent: int, received: int, count: int, dtype: int, op: int, stream: int) -> None:
            device.touch([sent], [received], "cupy:allReduce", *_of_address(stream))
            super().allReduce(sent, received, count, dtype, op, stream)

        def allGather(self, sent: int, received: int, count: int, dtype: int, stream: int) -> None:
            device.touch([sent], [received], "cupy:allGather", *_of_address(stream))
            super().allGather(sent, received, count, dtype, stream)

        def send(self, sent: int, count: int, dtype: int, peer: int, stream: int) -> None:
            device.touch([sent] if count else [], [], "cupy:send", *_of_address(stream))
            super().send(sent, count, dtype, peer, stream)

        def recv(self, received: int, count: int, dtype: int, peer: int, stream: int) -> None:
            device.touch([], [received] if count else [], "cupy:recv", *_of_address(stream))
            super().recv(received, count, dtype, peer, stream)

    return NcclCommunicator


def as_kernel(call: Any) -> Any:
    """A function that stands for a GPU's kernel: where its host waits, which that would not, nothing is ordered."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = device.allow_waits(True)
        try:
            return call(*args, **kwargs)
        finally:
            device.allow_waits(before)

    return run


def _let_interpreter_wait() -> None:
    """Triton's interpreter copies to the host."""
    from triton.runtime import interpreter

    interpreter.GridExecutor.__call__ = as_kernel(interpreter.GridExecutor.__call__)


device.set_device_count(DEVICES)
device.set_callbacks(_stack, _on_race)
_install_cuda()
_install_storages()
_install_groups()
_install_threads()
sys.modules["cupy.cuda.nccl"] = _CupyNccl("cupy.cuda.nccl")
if os.environ.get("SIMULATED_GPU_DEFAULT") == "1":
    torch.set_default_device("cuda")
if os.environ.get("TRITON_INTERPRET") == "1":
    _let_interpreter_wait()
