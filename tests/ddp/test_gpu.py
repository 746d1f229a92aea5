"""Steps on a real GPU: the same bits as on CPUs, in the order of streams, with no host that waits, in CUDA graphs.

One rank always; two and four share the GPU under NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later). Without a GPU
the cases that need no stream run on the CPU, with Triton's interpreter and a stand-in for NCCL.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce
from fastreduce import hooks
from fastreduce.ops.backends import ENVIRONMENT_VARIABLE
from fastreduce.reduction.telemetry.flight_record import StepFlight
from fastreduce.transports import GlooTransport, NcclTransport
from tests.support import gpu_pools
from tests.support.gpu_pools import HAS_GPU, MANY
from tests.support.models import SETTINGS, Grads, assert_same_bits, batch, grads_of, one_by_one
from tests.support.nccl_cases import OnGpu, OnHost, Place, run_case, world
from tests.support.ranks import RankPool

KERNELS = ("triton", "numba_cuda") if HAS_GPU else ("triton",)
BY_NAME = "rows.0: fp16; rows.[124]: int4:error_feedback; *: none:accumulate=fp32"
MORE = ("fp8", "fp8:rounding=stochastic", "int8:rounding=stochastic", BY_NAME)
CHOSEN = (*SETTINGS, *MORE) if HAS_GPU else ("none", "bf16:accumulate=wire", "int8:error_feedback")
# In mid-run, each for two steps.
SWITCHED = ("int8:error_feedback", "none:accumulate=fp32", "int4:error_feedback", "fp8:rounding=stochastic", BY_NAME)
SECONDS = 100.0  # CUDA, NCCL and kernels start in every rank, where several share a GPU one after the other
CAPTURED = (
    "none",
    "fp16",
    "int8:error_feedback",
    "fp8",
    "int4:error_feedback",
    "bf16:rounding=stochastic",
    "int8:rounding=stochastic",
    "*.bias: fp16; *: int4:error_feedback",
)
STEPS = 20  # of a case, where ranks share a GPU

pytestmark = [pytest.mark.timeout(240), *([pytest.mark.gpu] if HAS_GPU else [])]
long_without_a_gpu = pytest.mark.gpu if HAS_GPU else pytest.mark.long
on_gpu_only = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return OnGpu() if HAS_GPU else OnHost(str(tmp_path_factory.mktemp("nccl")))


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Pools by number of ranks; without a GPU, of ranks under Triton's interpreter."""
    environment = {} if HAS_GPU else {"TRITON_INTERPRET": "1", ENVIRONMENT_VARIABLE: "triton"}
    with patch.dict(os.environ, environment), gpu_pools.pools_by_size() as of_size:
        yield of_size


ranks, several = gpu_pools.of_each([1, *MANY] if HAS_GPU else MANY), gpu_pools.of_each(MANY)


def run_step_case(rank: int, size: int, case: Callable[..., Any], place: Place, *args: Any) -> Any:
    """`run_case`, and without a GPU buckets are reduced one by one all the same."""
    with contextlib.nullcontext() if HAS_GPU else one_by_one():
        return run_case(rank, size, case, place, *args)


class Known(nn.Module):
    """Parameters whose gradients are what forward is given, bit for bit, on any device."""

    def __init__(self, sizes: tuple[int, ...] = (700, 3, 2049, 64, 129, 1000, 17)) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, given: list[Tensor]) -> Tensor:
        return sum(((row * each).sum() for row, each in zip(self.rows, given, strict=True)), torch.tensor(0.0))


def _given(model: Known, rank: int, step: int, device: torch.device) -> list[Tensor]:
    return [batch(rank, 100 * step + i, len(row)).to(device) for i, row in enumerate(model.rows)]


def _steps(ddp: Any, rank: int, device: torch.device) -> list[Grads]:
    seen: list[Grads] = []
    for step in range(4):
        ddp.zero_grad()
        ddp(_given(ddp.module, rank, step, device)).backward()
        seen.append({name: None if grad is None else grad.cpu() for name, grad in grads_of(ddp.module).items()})
    return seen


def _bits(rank: int, size: int, place: Place, setting: str, kernels: str) -> None:
    """Averaged by Numba's CPU kernels over gloo, and by this device's kernels over NCCL."""
    if size > 2 and (setting == "none" or setting.endswith("wire")):
        return  # the transports sum themselves, each in an order of its own
    with patch.dict(os.environ, {ENVIRONMENT_VARIABLE: "numba_cpu"}):
        ddp = fastreduce.DistributedDataParallel(Known(), compression=setting, transport=GlooTransport(world()))
        expected = _steps(ddp, rank, torch.device("cpu"))
        ddp.reducer.close()
    for views in (False, True):
        with patch.dict(os.environ, {ENVIRONMENT_VARIABLE: kernels}):
            ddp = fastreduce.DistributedDataParallel(
                Known().to(place.device),
                compression=setting,
                transport=NcclTransport(world()),
                gradient_as_bucket_view=views,
            )
            assert_same_bits(_steps(ddp, rank, place.device), expected, f"{setting}, {kernels}, views={views}")
            ddp.reducer.close()


@pytest.mark.parametrize(
    "setting",
    [pytest.param(setting, marks=[long_without_a_gpu] * setting.endswith("wire")) for setting in CHOSEN],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_averages_have_the_bits_of_the_cpus(kernels: str, setting: str, ranks: RankPool, place: Place):
    ranks.run(run_step_case, _bits, place, setting, kernels, timeout=SECONDS)


def _switched(rank: int, size: int, place: Place, kernels: str) -> None:
    """Residuals move along, or into the next gradients; a step that is left out is made up for."""
    found: list[list[Grads]] = []
    cpu = torch.device("cpu")
    for backend, device, transport in (("numba_cpu", cpu, GlooTransport), (kernels, place.device, NcclTransport)):
        with patch.dict(os.environ, {ENVIRONMENT_VARIABLE: backend}):
            ddp = fastreduce.DistributedDataParallel(
                Known().to(device), compression="none:accumulate=fp32", transport=transport(world())
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            found.append([])
            for step in range(2 * len(SWITCHED)):
                if step % 2 == 0:
                    ddp.set_compression(SWITCHED[step // 2])
                optimizer.zero_grad()
                ddp(_given(ddp.module, rank, step, device)).backward()
                found[-1].append({n: None if grad is None else grad.cpu() for n, grad in grads_of(ddp.module).items()})
                if step % 3:
                    optimizer.step()
            ddp.reducer.close()
    assert_same_bits(found[1], found[0])


@long_without_a_gpu
@pytest.mark.parametrize("kernels", KERNELS)
def test_another_setting_in_mid_run_has_the_bits_of_the_cpus(kernels: str, ranks: RankPool, place: Place):
    ranks.run(run_step_case, _switched, place, kernels, timeout=SECONDS)


def _check_flight(step: StepFlight, buckets: int, where: str) -> None:
    """Every bucket came to every point, one after the other, before the step ended."""
    assert step.seconds is not None and [each.bucket for each in step.buckets] == list(range(buckets)), where
    for each in step.buckets:
        points = (each.compress, each.compressed, each.exchanged, each.summed, each.reduced, each.decompressed)
        times = [time for time in (*points, step.seconds) if time is not None]
        assert each.ready is not None and len(times) == 7, f"{where}: {each}"
        assert times == sorted(times) and times[0] < times[-2], f"{where}: {each}"


def _recorded(rank: int, size: int, place: Place, directory: str) -> None:
    """Of traced steps a GPU's points are known, which are events on its stream, and lie where the host's steps lie."""
    ddp = fastreduce.DistributedDataParallel(
        Known((500,) * 6).to(place.device),
        compression="int8",
        transport=NcclTransport(world()),
        bucket_cap_mb=0.003,
    )
    ddp.reducer.trace_to(Path(directory), rank)
    _steps(ddp, rank, place.device)
    _steps(ddp, rank, place.device)
    record, buckets = ddp.reducer.flight_record(), len(ddp.reducer.pipelines)
    ddp.reducer.close()
    assert buckets > 2
    for step in record.steps[3:-1]:  # buckets are rebuilt after the first, and timed from the one after that on
        _check_flight(step, buckets, f"{size} ranks, step {step.step}")
    slices = [e for e in json.loads(Path(directory, f"rank{rank}.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for name in ("compress", "wire stage 1", "sum", "wire stage 2", "decompress"):
        of_step = [e["args"]["step"] for e in slices if e["name"] == name]
        assert sum(step >= 3 for step in of_step) == 5 * buckets, name
    backward = {e["args"]["step"]: e["ts"] for e in slices if e["name"] == "backward"}
    assert all(e["ts"] >= backward[e["args"]["step"]] for e in slices if e["name"] == "compress")


@pytest.mark.long
def test_a_flight_record_and_a_trace_know_when_the_device_was_where(ranks: RankPool, place: Place, tmp_path: Path):
    ranks.run(run_step_case, _recorded, place, str(tmp_path), timeout=SECONDS)


def _many_buckets(rank: int, size: int, place: Place, steps: int) -> None:
    model = Known((257,) * 40).to(place.device)
    ddp = fastreduce.DistributedDataParallel(model, transport=NcclTransport(world()), bucket_cap_mb=0.0005)
    busy = torch.randn(600, 600, device=place.device) if HAS_GPU else None
    wrong = torch.zeros((), device=place.device)
    for step in range(steps):
        ddp.zero_grad()
        given = [torch.full((257,), float((rank + 1) * (step + i)), device=place.device) for i in range(40)]
        loss = ddp(given)
        if busy is not None and step % 3:
            loss = loss + 0 * (busy @ busy).sum()
        loss.backward()
        for i, row in enumerate(model.rows):
            assert row.grad is not None
            wrong += (row.grad != (size + 1) / 2 * (step + i)).sum()
    assert len(ddp.reducer.pipelines) > 20
    assert int(wrong) == 0
    ddp.reducer.close()


@pytest.mark.long
def test_overlapping_buckets_sum_exactly(ranks: RankPool, place: Place):
    steps = 4 if not HAS_GPU else 300 if ranks.world_size == 1 else STEPS
    ranks.run(run_step_case, _many_buckets, place, steps, timeout=SECONDS)


class Net(nn.Module):
    """Convolutions, a norm whose statistics ranks share, and two branches of which a forward takes one or both."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), norm(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = norm(8)

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for name in use:
            x = x + getattr(self, name)(x)
        return self.last(x)


def _sync_batchnorm(rank: int, size: int, place: Place) -> None:
    """Ranks use different branches, so their buckets fill in different orders around the norms' collectives."""
    torch.manual_seed(0)
    plain = Net(fastreduce.SyncBatchNorm).to(place.device)
    group = dist.new_group(backend="nccl") if HAS_GPU else world()
    ours = fastreduce.DistributedDataParallel(
        copy.deepcopy(plain), process_group=group, transport=NcclTransport(group), bucket_cap_mb=0.0005
    )
    torchs = TorchDDP(copy.deepcopy(plain), process_group=group, find_unused_parameters=True)
    for step in range(6):
        use = ["a", "b", "ab"][(rank + step) % 3]
        x = batch(rank, step, 4, 3, 10, 10).to(place.device)
        for ddp in (ours, torchs):
            ddp.zero_grad()
            ddp(x, use).square().sum().backward()
        for (name, a), b in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=f"step {step}, {name}")
    ours.reducer.close()


def test_sync_batchnorm_and_branches_that_differ_between_ranks(several: RankPool, place: Place):
    several.run(run_step_case, _sync_batchnorm, place, timeout=SECONDS)


def _hook_for_torch(rank: int, size: int, place: Place, setting: str) -> None:
    groups = {"cpu": world(), "cuda": dist.new_group(backend="nccl") if HAS_GPU else world()}
    found = []
    for kernels, device in (("numba_cpu", torch.device("cpu")), ("triton", place.device)):
        group = groups[device.type]
        transport = GlooTransport if kernels == "numba_cpu" else NcclTransport
        with (
            patch.dict(os.environ, {ENVIRONMENT_VARIABLE: kernels}),
            patch.object(hooks, "make_transport", lambda group, _, transport=transport: transport(group)),
        ):
            ddp = TorchDDP(Known().to(device), process_group=group)
            ddp.register_comm_hook(hooks.CompressState(setting, process_group=group), hooks.compress)
            found.append(_steps(ddp, rank, device))
    assert_same_bits(found[1], found[0])


@pytest.mark.long
@pytest.mark.parametrize("setting", ["fp16", "int8:error_feedback"])
def test_the_hook_for_torchs_class(setting: str, several: RankPool, place: Place):
    several.run(run_step_case, _hook_for_torch, place, setting, timeout=SECONDS)


# With a GPU only


# What was asked for: a cached block that is larger by less than 1 MiB is given whole, and counts as allocated whole.
ASKED = "requested_bytes.all.allocated"


def _unwatched_steps(rank: int, size: int, place: OnGpu) -> None:
    """From the fourth step on nothing waits on the host, and nothing of a gradient's size is allocated.

    With an optimizer: of averages that nobody applies error feedback measures what became of them.
    """
    for setting in (*SETTINGS, *MORE):
        model = Known((300_000,) * 8).to(place.device)
        ddp = fastreduce.DistributedDataParallel(
            model, compression=setting, transport=NcclTransport(world()), bucket_cap_mb=2
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = _given(model, rank, 0, place.device)
        for step in range(6):
            optimizer.step()  # before the first one nothing
            optimizer.zero_grad(set_to_none=False)
            loss = ddp(given)
            if step < 4:
                loss.backward()
                continue
            asked = torch.cuda.memory_stats()[ASKED]
            torch.cuda.set_sync_debug_mode("error")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            # Autograd makes the gradients, once.
            made = torch.cuda.memory_stats()[ASKED] - asked
            assert made <= 8 * 300_000 * 4 + 500_000, f"{setting}: {made} bytes"
        ddp.reducer.close()


@on_gpu_only
def test_a_step_neither_waits_nor_allocates(ranks: RankPool, place: Place):
    ranks.run(run_step_case, _unwatched_steps, place, timeout=SECONDS)


def _unwatched_training(rank: int, size: int, place: OnGpu) -> None:
    """Nor where an optimizer steps and gradients have been multiplied, which error feedback knows or measures."""
    for setting in ("int8:error_feedback", "fp8:error_feedback", "int4:error_feedback"):
        model = Known((3000,) * 8).to(place.device)
        ddp = fastreduce.DistributedDataParallel(
            model, compression=setting, transport=NcclTransport(world()), bucket_cap_mb=0.03
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = _given(model, rank, 0, place.device)
        for step in range(8):
            torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
            try:
                optimizer.zero_grad(set_to_none=False)
                ddp(given).backward()
                if step % 4 == 0:
                    ddp.clip_grad_norm_(1.0)
                elif step % 4 == 1:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                elif step % 4 == 2:
                    model.rows[3].grad *= 0.5  # type: ignore[operator]
                if step % 4 < 3:
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        ddp.reducer.close()


@on_gpu_only
def test_neither_waits_error_feedback_for_what_became_of_gradients(ranks: RankPool, place: Place):
    ranks.run(run_step_case, _unwatched_training, place, timeout=SECONDS)


def _graph(rank: int, size: int, place: OnGpu, setting: str, directory: str) -> None:
    """A step is captured after some have been run, and replayed on other inputs: the bits of a step that is not."""

    def wrap() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(place.device)
        return fastreduce.DistributedDataParallel(
            model,
            compression=setting,
            transport=NcclTransport(world()),
            gradient_as_bucket_view=True,
            bucket_cap_mb=0.05,
        )

    stream = torch.cuda.Stream()
    x = torch.empty(8, 64, device=place.device)
    with torch.cuda.stream(stream):  # what autograd knows of a parameter's stream is from when it is wrapped
        captured, plain = wrap(), wrap()
        optimizers = [torch.optim.SGD(ddp.parameters(), lr=1e-4) for ddp in (captured, plain)]
        if setting == "fp16":  # a trace waits for the device in each step, and must not in this one
            captured.reducer.trace_to(Path(directory), rank)
        for step in range(12):  # the first ten are timed
            for ddp, optimizer in zip((captured, plain), optimizers, strict=True):
                x.copy_(batch(rank, step, 8, 64))
                ddp.zero_grad(set_to_none=False)
                ddp(x).square().sum().backward()
                optimizer.step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        captured.zero_grad(set_to_none=False)
        with torch.cuda.graph(graph, stream=stream):
            captured.zero_grad(set_to_none=False)
            captured(x).square().sum().backward()
        for step in range(12, 20):
            x.copy_(batch(rank, step, 8, 64))
            graph.replay()
            plain.zero_grad(set_to_none=False)
            plain(x).square().sum().backward()
            stream.synchronize()
            assert_same_bits(grads_of(captured.module), grads_of(plain.module), f"{setting}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
    for ddp in (captured, plain):
        ddp.reducer.close()


@on_gpu_only
@pytest.mark.parametrize("setting", CAPTURED)
def test_a_step_in_a_cuda_graph(setting: str, ranks: RankPool, place: Place, tmp_path: Path):
    ranks.run(run_step_case, _graph, place, setting, str(tmp_path), timeout=SECONDS)


SCRIPT = """
import torch, fastreduce.distributed as dist
from fastreduce import DistributedDataParallel as DDP
dist.init_process_group(backend="nccl", world_size=1, rank=0)
ones = torch.ones(3, device="cuda")
dist.all_reduce(ones)
ddp = DDP(torch.nn.Linear(3, 2).cuda(), device_ids=[0], compression="fp16")
ddp(torch.ones(4, 3, device="cuda")).sum().backward()
print(ones.tolist(), ddp.module.weight.grad.tolist())
dist.destroy_process_group()
"""


@on_gpu_only
def test_a_script_for_one_gpu():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[1.0, 1.0, 1.0] [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]"


def test_this_file_is_in_the_run_for_gpus():
    assert Path(__file__).name in (Path(__file__).parents[2] / "bench" / "gpu" / "phases.py").read_text()
