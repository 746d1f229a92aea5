"""Backwards that fail on some ranks, at any moment: what others get, and that the next step has its own averages."""

from __future__ import annotations

import random
import signal
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fastreduce
from fastreduce.errors import ReducerError, TensorError, TransportError
from fastreduce.reduction.gradients import Gradients
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.wires.flat import FlatWires
from fastreduce.reduction.wires.low_rank import LowRank
from tests.support.models import Boom, assert_same_bits, grads_of, in_a_backward, one_by_one, wrap
from tests.support.ranks import OVER_HOSTS, RankPool

X = torch.zeros(1, 4)


class _Layers(nn.Module):
    """The gradient of each bias is what the loss is multiplied by. Backward may raise in front of layer `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for layer in self.layers:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, at: int = -1) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(Boom.apply(x, i == at))  # type: ignore[no-untyped-call]
        return x


def _biases(ddp: Any) -> Tensor:
    return torch.stack([layer.bias.grad for layer in ddp.module.layers])


class _Failing:
    """Lets one call of a function raise, the `left`-th from now on, before it has done anything or behind it."""

    def __init__(self, owner: type, name: str, behind: bool = False) -> None:
        self._owner, self._name, self._function, self._behind = owner, name, getattr(owner, name), behind
        self.left = 0

    def __enter__(self) -> None:
        setattr(self._owner, self._name, lambda *args, **kwargs: self._call(*args, **kwargs))

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._function)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left != 0:
            return self._function(*args, **kwargs)
        if self._behind:
            self._function(*args, **kwargs)
        raise MemoryError("no memory left")


FAILURES = {
    "collected": (Gradients, "collect"),
    "begun": (BucketPipeline, "begin"),
    "finished": (BucketPipeline, "_finish", True),
}


def _fails(rank: int, world_size: int, where: str, options: dict[str, Any], seed: int) -> None:
    ddp, draw, failing = wrap("ours", _Layers(), **options), random.Random(seed), _Failing(*FAILURES[where])
    average = (world_size + 1) / 2
    for step in range(12):
        ddp.zero_grad()
        calls = [draw.randint(1, len(ddp.reducer.plan.buckets)) for _ in range(world_size)]
        # Behind the last step no forward makes up for it.
        who = [each for each in range(world_size) if draw.random() < 0.3 and step < 11]
        loss = (rank + 1) * 2.0**step * ddp(X).sum()
        if rank in who:
            failing.left = calls[rank]
            with failing, pytest.raises(MemoryError):
                loss.backward()
        else:
            loss.backward()
            found = _biases(ddp)
            right = found == 2.0**step * average
            assert (right | found.isnan() if who else right).all(), (rank, step, who, found)


@OVER_HOSTS
@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}], ids=["many", "one"])
def test_what_fails_on_some_ranks_leaves_none_a_step_behind(ranks: RankPool, where: str, options: dict[str, Any]):
    ranks.run(_fails, where, options, 1)


@pytest.mark.parametrize("compression", ["fp16", "int8:error_feedback", "powersgd:rank=1"])
def test_so_it_is_where_the_transport_is_gloos(ranks2: RankPool, compression: str):
    ranks2.run(_fails, "begun", {"bucket_cap_mb": 1e-5, "compression": compression, "transport": "gloo"}, 2)


def _fails_one_by_one(rank: int, world_size: int, where: str, at_end: bool) -> None:
    """`at_end`: nothing is launched before backward has ended, as where a model holds a SyncBatchNorm."""
    with one_by_one(), patch.object(fastreduce.DistributedDataParallel, "_meets_elsewhere", lambda _: at_end):
        _fails(rank, world_size, where, {"bucket_cap_mb": 1e-5}, 3)


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("at_end", [False, True], ids=["overlapping", "at the end"])
def test_so_it_is_where_buckets_are_reduced_one_by_one_as_on_a_gpu(ranks2: RankPool, where: str, at_end: bool):
    ranks2.run(_fails_one_by_one, where, at_end)


def _fails_amid(rank: int, world_size: int, owner: type, name: str, setting: str, transport: str | None) -> None:
    """Rank 0 fails between the two collectives of a bucket."""
    ddp, failing = wrap("ours", _Layers(), compression=setting, transport=transport), _Failing(owner, name)
    ddp(X).sum().backward()
    start, failing.left = time.monotonic(), 1
    with failing if rank == 0 else nullcontext(), pytest.raises(MemoryError if rank == 0 else TransportError):
        ddp(X).sum().backward()
    with pytest.raises(TransportError):
        ddp(X).sum().backward()
    assert time.monotonic() - start < 20
    ddp = wrap("ours", _Layers(), compression=setting, transport=transport)
    (ddp(X).sum() * (rank + 1)).backward()
    assert (_biases(ddp) == (world_size + 1) / 2).all()


@pytest.mark.parametrize(
    ("owner", "name", "setting", "transport"),
    [
        (FlatWires, "reduce_shards", "bf16", "gloo"),
        pytest.param(FlatWires, "reduce_shards", "bf16:rounding=stochastic", None, marks=pytest.mark.long),
        pytest.param(LowRank, "_project", "powersgd:rank=1,min_compression_rate=1", "gloo", marks=pytest.mark.long),
        pytest.param(LowRank, "_project", "powersgd:rank=1,min_compression_rate=1", None, marks=pytest.mark.long),
    ],
)
def test_what_fails_between_two_collectives_ends_the_connection_and_no_rank_waits(
    ranks2: RankPool, owner: type, name: str, setting: str, transport: str | None
):
    ranks2.run(_fails_amid, owner, name, setting, transport, timeout=60)


def _unused_behind(rank: int, world_size: int) -> None:
    """Rank 0's backward fails when the last layer's gradients have come, and then nobody uses that layer."""
    ddp = wrap("ours", _Layers(), find_unused_parameters=True)
    ddp(X).sum().backward()
    ddp.zero_grad()
    with pytest.raises(ValueError, match="boom") if rank == 0 else nullcontext():
        ddp(X, 2 if rank == 0 else -1).sum().backward()
    ddp.zero_grad()
    layers, ddp.module.layers = ddp.module.layers, ddp.module.layers[:3]
    ddp(X).sum().backward()
    assert layers[3].bias.grad is None and (layers[2].bias.grad == 1).all()


def test_what_a_backward_used_that_failed_is_not_used_in_the_next(ranks2: RankPool):
    ranks2.run(_unused_behind)


# Ctrl-C


class _Preempted(Exception):
    pass


def _preempt(*_: object) -> None:
    raise _Preempted


class _Handlers:
    """Handlers of a signal called one after the other, as Lightning has them."""

    def __call__(self, *_: object) -> None:
        partial(_preempt)()


def _interrupted(rank: int, world_size: int, transport: str, handler: Any, path: str) -> None:
    """Rank 0 waits amid a two-shot for rank 1 when a signal comes; both save a snapshot."""
    ddp = wrap("ours", _Layers(), transport=transport, compression="fp16")
    for _ in range(2):
        ddp(X).sum().backward()
    loss = ddp(X).sum()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    with pytest.raises((KeyboardInterrupt, _Preempted)) if rank == 0 else suppress(TransportError):
        loss.backward()
    if rank == 0:
        signal.signal(signal.SIGALRM, before)
    fastreduce.save_checkpoint(path, model=ddp)
    with pytest.raises(TransportError):
        ddp(X).sum().backward()
    wrap("ours", _Layers(), transport=transport)(X).sum().backward()


@pytest.mark.parametrize(
    ("transport", "handler"),
    [
        *((transport, signal.default_int_handler) for transport in ("gloo", "shm")),
        *(pytest.param("gloo", h, marks=pytest.mark.long) for h in (_preempt, partial(_preempt, "why"), _Handlers())),
    ],
    ids=["Ctrl-C, gloo", "Ctrl-C, shm", "an exception, gloo", "a partial function's, gloo", "an object's, gloo"],
)
def test_after_an_interrupt_amid_a_collective_a_snapshot_can_be_saved(
    ranks2: RankPool, transport: str, handler: Any, tmp_path: Path
):
    ranks2.run(_interrupted, transport, handler, str(tmp_path / "snapshot"), timeout=40)


def _handler_of(kind: type[BaseException]) -> Any:
    def handler(*_: object) -> None:
        raise kind("of the handler")

    return handler


def _interrupted_amid_buckets(rank: int, world_size: int, transport: str, kind: type[BaseException]) -> None:
    """Rank 0 waits in the exchange in which buckets are rebuilt when a signal comes, and goes on."""
    ddp = wrap("ours", _Layers(), transport=transport)
    ddp(X).sum().backward()
    before = signal.signal(signal.SIGALRM, _handler_of(kind))
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    with pytest.raises(
        kind if rank == 0 else TransportError, match="of the handler" if rank == 0 else f"over {transport}"
    ):
        ddp(X)
    signal.signal(signal.SIGALRM, before)
    with pytest.raises(TransportError, match="closed|was ended here" if rank == 0 else "closed|failed"):
        ddp(X).sum().backward()
    ddp = wrap("ours", _Layers(), transport=transport)
    (ddp(X).sum() * (rank + 1)).backward()
    assert (ddp.module.layers[0].bias.grad == 1.5).all()


@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        *((transport, KeyboardInterrupt) for transport in ("gloo", "shm")),
        *(pytest.param("gloo", kind, marks=pytest.mark.long) for kind in (RuntimeError, TimeoutError)),
    ],
)
def test_an_interrupt_amid_an_exchange_ends_the_connection_and_comes_out_as_it_is(
    ranks2: RankPool, transport: str, kind: type[BaseException]
):
    ranks2.run(_interrupted_amid_buckets, transport, kind, timeout=40)


def _interrupted_amid_buffers(rank: int, world_size: int, kind: type[BaseException]) -> None:
    """A signal comes on rank 0 when the buffers have been broadcast before a forward, and all go on."""
    ddp = wrap("ours", nn.BatchNorm1d(3))
    x = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        ddp(x).square().sum().backward()
    broadcast, before = dist._broadcast_coalesced, signal.signal(signal.SIGALRM, _handler_of(kind))

    def broadcast_and_interrupt(*arguments: Any) -> None:
        broadcast(*arguments)
        signal.raise_signal(signal.SIGALRM)

    doing = ddp.reducer.flight_record().doing
    if rank == 0:
        amid = patch.object(dist, "_broadcast_coalesced", broadcast_and_interrupt)
        with amid, pytest.raises(kind, match=r"^of the handler$"):
            ddp(x)
        assert ddp.reducer.flight_record().doing == doing, "it waits no more"
    else:
        ddp(x)
    signal.signal(signal.SIGALRM, before)
    (ddp(x).square().sum() * (rank + 1)).backward()


@pytest.mark.parametrize("kind", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.long)])
def test_an_interrupt_while_buffers_are_broadcast_comes_out_as_it_is(ranks2: RankPool, kind: type[BaseException]):
    ranks2.run(_interrupted_amid_buffers, kind, timeout=40)


# A user's hook


def _hook_fails(rank: int, world_size: int, caps: float, by_future: bool) -> None:
    ddp, step = wrap("ours", _Layers(), bucket_cap_mb=caps), 0

    def hook(state, bucket):
        if not by_future and not bucket.buffer().isfinite().all():
            raise FloatingPointError("not finite")

        def then(future: Any) -> Tensor:
            if by_future and rank == 0 and step == 2:
                raise FloatingPointError("not finite")
            return future.value()  # type: ignore[no-any-return]

        return default_hooks.allreduce_hook(None, bucket).then(then)

    ddp.register_comm_hook(None, hook)
    for step in range(6):
        ddp.zero_grad()
        scale = float("inf") if step == 2 and not by_future else (rank + 1) * 2.0**step
        loss = scale * ddp(X).sum()
        if step == 2 and (rank == 0 or not by_future):
            with pytest.raises((FloatingPointError, RuntimeError), match="not finite"):
                loss.backward()
        else:
            loss.backward()
            assert (_biases(ddp) == 2.0**step * (world_size + 1) / 2).all(), (rank, step)


@pytest.mark.parametrize("by_future", [False, True], ids=["refuses", "future"])
@pytest.mark.parametrize("caps", [1e-5, 25.0], ids=["many buckets", "one bucket"])
def test_a_hook_that_raises_spoils_that_step_alone(ranks2: RankPool, caps: float, by_future: bool):
    ranks2.run(_hook_fails, caps, by_future)


# Another backward through the same forward


def _retried(rank: int, world_size: int, who: list[int], warm: int) -> None:
    ddp = wrap("ours", _Layers(), bucket_cap_mb=1e-5)
    for _ in range(warm):
        ddp(X).sum().backward()
        ddp.zero_grad()
    x = X.clone().requires_grad_()
    loss = (rank + 1) * ddp(x).sum()
    if rank in who:
        boom = x.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(loss, x, retain_graph=True)
        boom.remove()
    loss.backward()
    assert (_biases(ddp) == (world_size + 1) / 2).all()

    ddp.zero_grad()
    loss = (rank + 1) * ddp(X, 1).sum()  # the gradients of later layers accumulate, and those of the first do not
    for why, error in (("boom", ValueError), ("an earlier backward through this forward raised", ReducerError)):
        with pytest.raises(error, match=why):
            loss.backward(retain_graph=True)
    with pytest.raises(ReducerError, match="an earlier"):
        loss.backward()
    ddp.zero_grad()
    ((rank + 1) * ddp(X).sum()).backward()
    assert (_biases(ddp) == (world_size + 1) / 2).all()


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("who", [[0], [0, 1]], ids=["one rank", "all"])
def test_a_backward_behind_one_that_raised_is_reduced_or_refused(ranks2: RankPool, who: list[int], warm: int):
    ranks2.run(_retried, who, warm)


def _bare(rank: int, world_size: int) -> None:
    """What the bare module brings behind a backward that raised is of no reduction."""
    ddp = wrap("ours", _Layers(), bucket_cap_mb=1e-5)
    for step in range(4):
        ddp.zero_grad()
        if rank == 0 and step == 2:
            with pytest.raises(ValueError, match="boom"):
                ddp(X, 3).sum().backward()  # before any gradient but the last layer's
            (1000 * ddp.module(X).sum()).backward()
        else:
            ((rank + 1) * ddp(X).sum()).backward()
            found, right = _biases(ddp), (world_size + 1) / 2
            if step == 2:  # the last layer's bucket was under way, and reads what is in `.grad`
                assert found[:3].isnan().all(), found
            else:
                assert (found == right).all(), (step, found)


def test_a_backward_of_the_bare_module_behind_one_that_raised_is_not_sent(ranks2: RankPool):
    ranks2.run(_bare)


def _raised_within(rank: int, world_size: int) -> None:
    ddp, kept = wrap("ours", _Layers(), bucket_cap_mb=1e-5), []

    def train() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="boom") as error:
                ddp(X, 1).sum().backward()
            kept.append(error)  # with its traceback, and the frames in that
            assert ddp.reducer.backward.has_raised
            ddp.zero_grad()
            ((rank + 1) * ddp(X).sum()).backward()
            assert (_biases(ddp) == (world_size + 1) / 2).all()

    in_a_backward(train)


def test_a_backward_that_raised_within_another_is_not_taken_for_one_under_way(ranks2: RankPool):
    ranks2.run(_raised_within)


# Between a forward and its backward


def _laid_out_between(rank: int, world_size: int, warm: int) -> None:
    ddp = wrap("ours", _Layers(), bucket_cap_mb=1e-5)
    for _ in range(warm):
        ddp(X).sum().backward()
    for between in (
        lambda: ddp.reducer.load_state_dict(ddp.reducer.state_dict()),
        lambda: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    ):
        ddp.zero_grad()
        loss = (rank + 1) * ddp(X).sum()
        between()
        loss.backward()
        assert (_biases(ddp) == (world_size + 1) / 2).all()


@pytest.mark.parametrize("warm", [0, 2])
def test_buckets_that_are_laid_out_between_forward_and_backward_are_reduced(ranks2: RankPool, warm: int):
    ranks2.run(_laid_out_between, warm)


def _unannounced(rank: int, world_size: int, views: bool) -> Any:
    """A sparse gradient where dense ones are expected, on one rank alone."""
    embedding = nn.Embedding(6, 3)
    nn.init.zeros_(embedding.weight)
    ddp = wrap("ours", embedding, gradient_as_bucket_view=views)
    for step in range(4):
        embedding.sparse = rank == 0 and step == 1
        loss = (rank + 1) * ddp(torch.arange(6)).sum()  # finds the gradient of the step before
        ddp.zero_grad()
        if embedding.sparse:
            with pytest.raises(TensorError, match="sparse"):
                loss.backward()
        else:
            loss.backward()
            assert step == 1 or (embedding.weight.grad == (world_size + 1) / 2).all()
    dist.barrier()
    return grads_of(embedding)


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_of_another_kind_on_one_rank_is_that_steps_error(ranks2: RankPool, views: bool):
    one, other = ranks2.run(_unannounced, views)
    assert_same_bits(one, other)


def _keeps(rank: int, world_size: int, caps: float) -> Any:
    """What is kept before a step that nobody applies, and behind the next, whose backward raises on rank 0."""
    ddp = wrap("ours", _Layers(), compression="int4:error_feedback", bucket_cap_mb=caps)
    optimizer, x = torch.optim.SGD(ddp.parameters(), lr=1e-3), torch.linspace(rank - 1, 2, 4)[None]
    for step in range(3):
        optimizer.zero_grad()
        ddp(x * 0.7**step).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    before = ddp.reducer.state_dict()["residuals"]
    ddp(3 * x).square().sum().backward()
    handle = next(ddp.parameters()).register_hook(lambda grad: grad / (1 // (rank > 0)))
    with nullcontext() if rank else pytest.raises(ZeroDivisionError):
        ddp(4 * x).square().sum().backward()
    handle.remove()
    optimizer.zero_grad()
    ddp(x)
    return before, ddp.reducer.state_dict()["residuals"]


@pytest.mark.parametrize("caps", [1e-5, 25.0])
def test_averages_that_were_thrown_away_behind_a_backward_that_raised_are_owed_no_more(ranks2: RankPool, caps: float):
    for before, after in ranks2.run(_keeps, caps):
        assert any(kept.any() for kept in before.values())
        assert_same_bits(after, before)
