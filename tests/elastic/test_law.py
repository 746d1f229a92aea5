"""One process whose group fails again and again: what reaches the optimizer is what would have without."""

from __future__ import annotations

import gc
import math
import random
import re
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import (
    Compression,
    DistributedDataParallel,
    FastreduceError,
    NotInitializedError,
    ReducerError,
    SettingError,
    Shadow,
    SyncBatchNorm,
    TransportError,
    elastic,
)
from fastreduce.elastic.generations import Generation, Note, Stage, decoded
from fastreduce.reduction.saved_residuals import save
from fastreduce.transports import LocalTransport, Transport, Work, local_ranks
from tests.support.tolerances import APPLIED, error_bound

STEPS = 30


class Failing(LocalTransport):
    """A rank alone whose collectives fail by chance, before anything has moved or after."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        self._fail()
        work = super().all_to_all(received, wire)
        self._fail()
        return work

    def all_gather(self, wire: Tensor) -> Work:
        self._fail()
        return super().all_gather(wire)

    def check(self) -> None:
        """As on a GPU, averages that were enqueued may turn out not to be those of all."""
        self._fail()

    def _fail(self) -> None:
        if self._chance.random() < 0.04:
            raise TransportError("by chance")


class Group:
    """Who regroups with itself alone."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.transport: Transport = Failing(chance)
        self.regrouped = {"counted": 0, "again": 0, "under way": 0}

    def before_forward(self, step: int) -> None:
        pass

    def commit(self) -> None:
        if self._chance.random() < 0.4:
            raise TransportError("by chance")

    def check_member(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def regroup(self, step: int, whole: bool) -> bool:
        self.transport = Failing(self._chance)
        counts = whole and self._chance.random() < 0.5
        self.regrouped["counted" if counts else "again" if whole else "under way"] += 1
        return counts


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20), nn.Linear(20, 5))


@pytest.mark.parametrize("setting", ["none", "fp16", "int8", "int8:error_feedback", "topk:ratio=0.1,min_numel=50"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_what_was_applied_and_what_is_kept_are_all_gradients(setting: str, seed: int):
    chance = random.Random(seed)
    model = _model()
    ddp = DistributedDataParallel(model, elastic=True, compression=setting, bucket_cap_mb=0.002)
    group = ddp.reducer.group = Group(chance)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    applied = {name: torch.zeros_like(sum_) for name, sum_ in exact.items()}
    bounds = {name: torch.zeros(sum_.numel(), dtype=torch.float64) for name, sum_ in exact.items()}
    for step in range(STEPS):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        local = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        for (name, parameter), grad in zip(model.named_parameters(), local, strict=True):
            exact[name] += grad
            applied[name] += parameter.grad
            feedback = Compression.parse(setting).error_feedback
            bounds[name] += APPLIED * grad.abs().max() if feedback else error_bound(setting, [grad])
        optimizer.step()
        assert ddp.reducer.step == step + 1
    assert all(group.regrouped.values()) or setting in ("none", "fp16"), group.regrouped  # alone they move nothing
    kept = ddp.reducer.state_dict()["residuals"]
    for name, sum_ in exact.items():
        there = applied[name] + (kept[name].view_as(sum_) if name in kept else 0)
        assert ((there - sum_).flatten().abs() <= bounds[name]).all(), name


class FailsOnce(Group):
    """A rank alone, of whose commits one fails, so that its step is made again."""

    def __init__(self, at: int) -> None:
        super().__init__(random.Random(0))
        self.transport, self._commits_until = LocalTransport(), at

    def commit(self) -> None:
        self._commits_until -= 1
        if self._commits_until == -1:
            raise TransportError("once")

    def regroup(self, step: int, whole: bool) -> bool:
        self.transport = LocalTransport()
        return False


class FailsAtTheSecond(LocalTransport):
    """A rank alone, whose second collective fails."""

    calls = 0

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        self.calls += 1
        if self.calls == 2:
            raise TransportError("once")
        return super().all_to_all(received, wire)


@pytest.mark.parametrize("bucket_mb", [25, 1e-4], ids=["one bucket", "many"])
def test_what_earlier_steps_and_generations_had_is_let_go_of(bucket_mb: float):
    """At once: connections stay open else, and gradients take memory, until Python collects its garbage."""
    ddp: Any = DistributedDataParallel(_model(), elastic=True, compression="int8", bucket_cap_mb=bucket_mb)
    ddp.reducer.group = group = FailsOnce(at=STEPS)
    group.transport = FailsAtTheSecond()
    had: list[weakref.ref[object]] = [weakref.ref(group.transport)]
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1, 40)).sum().backward()
            had.append(weakref.ref(ddp.module[0].weight.grad))
    finally:
        gc.enable()
    assert [each() is None for each in had] == [True, True, True, False]


@pytest.mark.parametrize("ends", ["kept, skipped", "kept, kept, skipped", "kept, applied", "skipped, kept, skipped"])
def test_averages_that_are_kept_amid_a_step_that_is_made_again_are_known_to_be_there(ends: str):
    """What is thrown away later is not owed, and what was before it is."""
    history = ["applied", *ends.split(", "), "applied"]
    model = _model()
    ddp = DistributedDataParallel(model, elastic=True, compression="int8:error_feedback")
    ddp.reducer.group = FailsOnce(at=len(history) - 2)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    due, exact, applied = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(3))
    for step, end in enumerate(history):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(step))
        local = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        due = {name: sum_ + grad for (name, sum_), grad in zip(due.items(), local, strict=True)}
        ddp(x).square().mean().backward()
        if end == "kept":
            continue
        if end == "applied":
            exact = {name: sum_ + due[name] for name, sum_ in exact.items()}
            applied = {name: applied[name] + parameter.grad for name, parameter in model.named_parameters()}
            optimizer.step()
        optimizer.zero_grad()
        due = {name: torch.zeros_like(sum_) for name, sum_ in due.items()}
    kept = ddp.reducer.state_dict()["residuals"]
    for name, sum_ in exact.items():
        short = sum_ - applied[name] - kept[name].view_as(sum_)
        assert short.abs().max() <= APPLIED * sum_.abs().max(), name


class BusyGpu:
    """A stream that comes to its end after some looks."""

    def __init__(self) -> None:
        self.looks, self.synchronized = 0, 0

    def record_event(self) -> BusyGpu:
        return self

    def query(self) -> bool:
        self.looks += 1
        return self.looks % 5 == 0

    def synchronize(self, device: object) -> None:
        self.synchronized += 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_host_waits_for_a_gpu_before_a_commit_and_looks_whether_it_waits_in_vain(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    gpu, seen = BusyGpu(), list[str]()

    class Watched(LocalTransport):
        def check(self) -> None:
            if fails and gpu.looks == 3 and not gpu.synchronized:
                seen.append("aborted")
                raise TransportError("rank 1 is lost")

    class Once(Group):
        def commit(self) -> None:
            seen.append(f"commit behind {gpu.looks} looks")

        def regroup(self, step: int, whole: bool) -> bool:
            seen.append(f"regroup, whole={whole}")
            return False

    ddp = DistributedDataParallel(_model(), elastic=True)
    group = ddp.reducer.group = Once(random.Random(0))  # type: ignore[attr-defined]
    group.transport = Watched()
    ddp.reducer.follow()  # type: ignore[attr-defined]
    make_streams = ddp.reducer.buckets._make_streams

    def as_on_a_gpu() -> None:
        make_streams()
        by_device = ddp.reducer.buckets.streams.by_device
        by_device[torch.device("cuda", 0)] = by_device[torch.device("cpu")]

    monkeypatch.setattr(ddp.reducer.buckets, "_make_streams", as_on_a_gpu)
    as_on_a_gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    ddp(torch.ones(2, 40)).sum().backward()
    assert seen == (
        ["aborted", "regroup, whole=False", "commit behind 5 looks"] if fails else ["commit behind 5 looks"]
    )
    assert gpu.synchronized == fails  # before gradients are put back
    monkeypatch.undo()


def test_who_is_left_keeps_its_residuals_and_those_of_its_shard():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = []
    for transport in local_ranks(3):
        ddp = DistributedDataParallel(_model(), elastic=True, compression="int8:error_feedback")
        group = ddp.reducer.group = Group(random.Random(0))  # type: ignore[attr-defined]
        group.transport, group.commit = transport, lambda: None  # type: ignore[method-assign]
        ranks.append((ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), group))

    def train(rank: int) -> None:
        ddp, optimizer, _ = ranks[rank]
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(x).square().mean().backward()
            optimizer.step()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(train, range(3)))
    left = [ranks[0], ranks[2]]
    kept = []
    for (ddp, _, group), transport in zip(left, local_ranks(2), strict=True):
        reducer = ddp.reducer
        kept.append(save(reducer.plan, reducer.pipelines, 0, 3, "", folded=True)["residuals"])
        group.transport = transport
        ddp(torch.ones(2, 40))
    for (ddp, _, _), before in zip(left, kept, strict=True):
        after = ddp.reducer.state_dict()
        assert ddp.reducer.transport.world_size == 2
        assert not any(pipeline.feedback.shard_residual.any() for pipeline in ddp.reducer.pipelines)
        assert all(torch.equal(after["residuals"][name], value) and value.any() for name, value in before.items())


class Torn(nn.Module):
    """Parameters on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


NEW, BETWEEN, UNDER_WAY, WHOLE, COUNTED = Stage


@pytest.mark.parametrize(
    ("notes", "step", "counts"),
    [
        ([(7, WHOLE), (7, WHOLE)], 7, True),
        ([(7, WHOLE), (7, UNDER_WAY)], 7, False),
        ([(7, WHOLE), (7, BETWEEN)], 7, False),  # it has not begun the step
        ([(7, WHOLE), (8, UNDER_WAY)], 7, True),  # one has committed it
        ([(7, WHOLE), (8, BETWEEN)], 7, True),
        ([(7, WHOLE), (8, COUNTED)], 7, True),  # it learned so in a meeting before
        ([(7, WHOLE), (7, NEW)], 7, True),  # it has no averages, and will get the state
        ([(7, WHOLE), (8, UNDER_WAY)], 8, False),
    ],
)
def test_averages_count_that_one_has_committed_or_all_have(notes: list[tuple[int, Stage]], step: int, counts: bool):
    by_member = {member: Note(*note) for member, note in enumerate(notes)}
    generation = Generation(3, tuple(by_member), by_member, (), "")
    assert generation.counts(step) == counts
    assert decoded(generation.encoded(), 3) == generation


@pytest.mark.parametrize("told", ["[]", "[[0, 0], {}, [], 1]", '[[1], {"1": [0, 9]}, [], ""]', '{"__reduce__": 1}'])
def test_what_is_no_generation_is_refused(told: str):
    with pytest.raises(TransportError, match="no message of fastreduce"):
        decoded(told, 1)


def test_what_cannot_lose_a_rank_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    def refused(match: str, module: nn.Module | None = None, **options: object) -> None:
        with pytest.raises(SettingError, match=match):
            DistributedDataParallel(module or _model(), elastic=True, **options)

    refused("transport='nccl' on cpu: allowed: 'gloo' or 'shm'", transport="nccl")
    refused("parameters on cpu, meta: allowed: a module on the CPU, or on one GPU", Torn())
    refused("warm_up", compression="int8:warm_up=10")
    refused("powersgd", compression="powersgd")
    refused("gradient_as_bucket_view", gradient_as_bucket_view=True)
    refused("SyncBatchNorm", nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3)))
    refused("sparse", nn.EmbeddingBag(5, 3, sparse=True))
    ddp = DistributedDataParallel(_model(), elastic=True)
    refused("process_group", process_group=dist.group.WORLD)
    with pytest.raises(NotInitializedError, match=r"fastreduce\.elastic\.join"):
        ddp(torch.ones(2, 40))
    with pytest.raises(SettingError, match="set_compression"):
        ddp.set_compression("fp16")
    with pytest.raises(SettingError, match="Shadow and elastic=True"):
        Shadow(ddp, ["int8"])
    with pytest.raises(SettingError, match="communication hook"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    def join(match: str, *args: object, kind: type[FastreduceError] = SettingError, **options: object) -> None:
        with pytest.raises(kind, match=match):
            elastic.join(*(args or (ddp,)), **options)

    join("elastic=True", _model())
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    join("a store that outlives each rank")
    for timeout in (0, "5", timedelta(seconds=5), math.inf, math.nan, None):
        join(re.escape(f"timeout={timeout!r}: allowed: seconds, a number above 0"), timeout=timeout)
    for least in (0, "2", 1.5):
        join(re.escape(f"least={least!r}: allowed: whole numbers from 1 on"), least=least)
    join("store=29500: allowed: a torch", store=29500)
    join("has no state", store="127.0.0.1:1", epoch=3)
    join("host:port", store="somewhere")
    join("host:port, up to 65535", store="127.0.0.1:65536")
    for size in ("-2", "0"):
        monkeypatch.setenv("WORLD_SIZE", size)
        join(f"WORLD_SIZE='{size}': allowed: whole numbers from 1 on")


def test_a_backward_that_raised_cannot_be_left_out_on_one_rank():
    model = _model()
    ddp = DistributedDataParallel(model, elastic=True)
    ddp.reducer.group = Group(random.Random(0))  # type: ignore[attr-defined]
    out = ddp(torch.ones(2, 40))
    handle = model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    handle.remove()
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ReducerError, match="end this process"):
            ddp(torch.ones(2, 40))


def test_who_catches_that_a_step_cannot_be_made_again_does_not_go_on():
    """Its averages may be half of other ranks', and nobody has counted the step."""
    ddp = DistributedDataParallel(_model(), elastic=True)
    group = ddp.reducer.group = Group(random.Random(0))  # type: ignore[attr-defined]
    ddp(torch.ones(2, 40)).sum().backward()

    def fail(*_: object, **__: object) -> Any:
        raise TransportError("the store is gone")

    group.commit, group.regroup = fail, fail  # type: ignore[method-assign,assignment]
    out = ddp(torch.ones(2, 40)).sum()
    with pytest.raises(TransportError, match="the store is gone"):
        out.backward()
    assert ddp.reducer.step == 1
    with pytest.raises(ReducerError, match="end this process"):
        ddp(torch.ones(2, 40))


def test_one_process_alone_trains_and_leaves():
    store = dist.HashStore()
    model = _model()
    ddp = DistributedDataParallel(model, elastic=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    members = elastic.join(ddp, store=store, least=1, timeout=5, optimizer=optimizer)
    before = model[0].weight.detach().clone()
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert (members.rank, members.size, members.step, members.generation) == (0, 1, 1, 1)
    assert not torch.equal(model[0].weight, before)
    members.leave()
    with pytest.raises(TransportError, match="has left"):
        ddp(torch.ones(2, 40))
