"""Averages that are stored when the caller says so: `require_manual_backward_finalization`, of torch 2.15 on."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce.errors import ReducerError, SettingError
from tests.support.models import SETTINGS, Boom, Branches, assert_same_bits, batch, grads_of, mlp, wrap
from tests.support.ranks import OVER_HOSTS, RankPool

IN_TORCH = hasattr(TorchDDP, "finalize_backward")


def _by_hand(model: Any, required: bool = True) -> None:
    if IN_TORCH:
        model.require_manual_backward_finalization = required
    else:
        model.reducer._set_manual_finalization_required(required)


def _must_wait(model: Any) -> bool:
    return bool(model.should_finalize_after_backward if IN_TORCH else model.reducer._should_finalize_after_backward())


def _finalize(model: Any) -> None:
    (model.finalize_backward if IN_TORCH else model.reducer._finalize_backward_manual)()


# The law: training has the same bits


def _train(rank: int, kind: str, by_hand: bool, options: dict[str, Any], seed: int) -> list[Any]:
    """Steps of random shape: micro-steps that stay local, branches unused, and what comes before the averages."""
    torch.manual_seed(0)
    model, draw = wrap(kind, Branches(20), bucket_cap_mb=1e-3, **options), random.Random(seed)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(12):
        local, use, others = draw.randrange(3), draw.choice(["abc", "abc", "ab", "cb"]), draw.randrange(3)
        optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        hand = draw.random() < 0.8 and by_hand
        if by_hand:
            _by_hand(model, hand)
        for micro in range(local):
            with model.no_sync():
                model(batch(rank, 100 * step + micro, 4, 20)).square().mean().backward()
        model(batch(rank, step, 4, 20), use=use if rank == 0 else "abc").square().mean().backward()
        for _ in range(others):  # what the caller does before it wants averages
            dist.all_reduce(torch.ones(3))
        if hand:
            _finalize(model)
        if step % 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen.append(grads_of(model.module))
        optimizer.step()
    return [*seen, {name: p.detach().clone() for name, p in model.module.named_parameters()}]


def _same_training(rank: int, world_size: int, options: dict[str, Any], seed: int) -> None:
    expected = _train(rank, "ours", False, options, seed)
    assert_same_bits(_train(rank, "ours", True, options, seed), expected, f"rank {rank}")


PICKED = ("none", "fp16", "int8:error_feedback", "powersgd:rank=2")


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(setting, marks=[pytest.mark.long] * (setting not in PICKED))
        for setting in (*SETTINGS, "powersgd:rank=2")
    ],
)
def test_training_has_the_same_bits(ranks2: RankPool, setting: str):
    ranks2.run(_same_training, {"compression": setting}, 1)


@OVER_HOSTS
@pytest.mark.parametrize(
    ("transport", "views"),
    [
        pytest.param("gloo", False, id="gloo-own"),
        pytest.param("gloo", True, id="gloo-views", marks=pytest.mark.long),
        pytest.param(None, False, id="None-own", marks=pytest.mark.long),
        pytest.param(None, True, id="None-views"),
    ],
)
def test_training_has_the_same_bits_over_each_transport(ranks: RankPool, views: bool, transport: str | None):
    if ranks.world_size == 3 and transport is not None:
        pytest.skip("the transport is the hosts'")
    ranks.run(_same_training, {"transport": transport, "gradient_as_bucket_view": views}, 2)


def _beside_torch(rank: int, world_size: int, seed: int) -> None:
    options = {"find_unused_parameters": True}
    assert_same_bits(_train(rank, "ours", True, options, seed), _train(rank, "torch", True, options, seed))


@pytest.mark.skipif(not IN_TORCH, reason="torch's class has it from 2.15 on")
def test_training_equals_that_of_torchs_class(ranks2: RankPool):
    ranks2.run(_beside_torch, 3)


# When


def _backward_returns_first(rank: int, world_size: int) -> None:
    model, store = wrap("ours", mlp(), bucket_cap_mb=1e-3), dist.distributed_c10d._get_default_store()
    _by_hand(model)
    for step in range(3):
        loss = model(batch(rank, step, 4, 20)).sum()  # the second forward lays buckets out, by all ranks
        if rank == 1:
            store.wait([f"backward {step} has returned"])
        loss.backward()
        if rank == 0:
            store.set(f"backward {step} has returned", "")
        _finalize(model)


def test_backward_does_not_wait_for_other_ranks(ranks2: RankPool):
    ranks2.run(_backward_returns_first)


class _Embedded(nn.Module):
    """What stands before the wrapped model, whose backward comes last."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.before, self.model = nn.Linear(20, 20), wrap(kind, mlp(), bucket_cap_mb=1e-3, **options)

    def forward(self, x: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        inner = self.before(x)
        inner.register_hook(hook)
        return self.model(inner)  # type: ignore[no-any-return]


def _train_in_hooks(rank: int, setting: str, in_hook: bool) -> tuple[list[Any], list[bool]]:
    """With the optimizer's step within backward, where that may be."""
    torch.manual_seed(0)
    whole, waits = _Embedded("ours", compression=setting), list[bool]()
    model = whole.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _by_hand(model)

    def apply(_: object = None) -> None:
        if done or (model.reducer.backward.is_here and waits[-1]):
            return
        done.append(True)
        _finalize(model)
        seen.append(grads_of(model.module))
        optimizer.step()
        optimizer.zero_grad()

    seen: list[Any] = []
    for step in range(5):
        done: list[bool] = []
        out = whole(batch(rank, step, 4, 20), apply if in_hook else lambda _: None)
        waits.append(_must_wait(model))
        out.square().mean().backward()
        assert bool(done) == (in_hook and not waits[-1])
        apply()
    return [*seen, dict(model.module.state_dict())], waits


def _in_hooks(rank: int, world_size: int, setting: str) -> None:
    found, waits = _train_in_hooks(rank, setting, True)
    assert waits == [True, False, False, False, False]
    assert_same_bits(found, _train_in_hooks(rank, setting, False)[0])


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_a_hook_may_ask_for_averages_once_all_gradients_are_there(ranks2: RankPool, setting: str):
    ranks2.run(_in_hooks, setting)


def _waits(rank: int, world_size: int) -> None:
    for options, use, expected in (
        ({}, "abc", [True, False, False]),
        ({}, "ab", [True, True, True]),  # what comes cannot be known before the end
        ({"find_unused_parameters": True}, "abc", [True, True, True]),
    ):
        model, found = wrap("ours", Branches(), **options), []
        assert not _must_wait(model)
        _by_hand(model)
        for _ in range(3):
            out = model(torch.ones(2, 4), use=use)
            found.append(_must_wait(model))
            out.sum().backward()
            _finalize(model)
        assert found == expected, (options, use, found)


def test_who_asks_is_told_whether_to_wait_for_the_end(ranks2: RankPool):
    ranks2.run(_waits)


def _waits_for_thawed(rank: int, world_size: int) -> None:
    module, found = Branches(), []
    module.a.requires_grad_(False)
    model = wrap("ours", module)
    _by_hand(model)
    for step in range(4):
        module.a.requires_grad_(step >= 2)
        out = model(torch.ones(2, 4))
        found.append(_must_wait(model))
        out.sum().backward()
        _finalize(model)
    assert found == [True, False, True, False]


def test_what_was_unfrozen_is_waited_for_once(ranks2: RankPool):
    ranks2.run(_waits_for_thawed)


# Misuse: each is an error, and the step goes on


def _misused(rank: int, world_size: int) -> None:
    model: Any = wrap("ours", Branches(), compression="int8:error_feedback", bucket_cap_mb=1e-6)
    x = torch.full((3, 4), rank + 1.0)

    def refused(does: Callable[[], object], why: str, error: type[Exception] = ReducerError) -> None:
        with pytest.raises(error, match=why):
            does()

    def backward(**forward: Any) -> None:
        model(x, **forward).sum().backward()

    refused(lambda: _finalize(model), "without require_manual_backward_finalization")
    _by_hand(model)
    refused(lambda: _finalize(model), "without a backward")
    out = model(x)
    refused(lambda: _by_hand(model, False), "before the forward")
    refused(lambda: _finalize(model), "without a backward")
    early = model.module.a.weight.register_hook(lambda _: refused(lambda: _finalize(model), "within the first"))
    out.sum().backward(retain_graph=True)
    early.remove()
    refused(lambda: _by_hand(model, False), "before the forward")
    refused(model._check_reducer_finalized, "awaits its averages")
    refused(lambda: model(x), "awaits its averages")
    with model.no_sync():
        refused(lambda: model(x), "awaits its averages")
    with torch.no_grad():
        model(x)
    refused(lambda: out.sum().backward(), "'[abc].*' received a gradient between")
    refused(lambda: model.set_compression("fp16"), "in a backward", SettingError)
    refused(lambda: model.clip_grad_norm_(1.0), "awaits its averages")
    refused(lambda: model.reducer.load_state_dict(model.reducer.state_dict()), "awaits its averages")
    _finalize(model)
    refused(lambda: _finalize(model), "without a backward")
    model._check_reducer_finalized()

    model.zero_grad()
    early = model.module.a.weight.register_hook(
        lambda _: refused(lambda: _finalize(model), r"no gradient yet to \d+ parameters, the first of them '\w")
    )
    backward()
    early.remove()
    _finalize(model)
    with model.no_sync():
        backward()
        refused(lambda: _finalize(model), "without a backward")
    refused(lambda: _finalize(model), "without a backward")
    loss = model(x).sum()
    torch.autograd.grad(loss, [model.module.trunk.weight], retain_graph=True)
    refused(lambda: _finalize(model), "without a backward")
    loss.backward()
    _finalize(model)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    boom = model.module.trunk.weight.register_hook(lambda _: 1 // 0)
    refused(backward, "zero", ZeroDivisionError)
    boom.remove()
    refused(lambda: _finalize(model), "raised before its end")
    model.zero_grad()
    backward()  # of every rank's, so that all dropped the broken one
    _finalize(model)
    _by_hand(model, False)
    model.zero_grad()
    backward()
    refused(lambda: _finalize(model), "without require_manual_backward_finalization")


def test_each_misuse_is_an_error_that_says_what_to_do(ranks2: RankPool):
    ranks2.run(_misused)


def _one_raises(rank: int, world_size: int) -> None:
    """A backward that raises on one rank, where the others await its averages by hand."""

    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, raises: bool) -> Tensor:
            return self.last(Boom.apply(self.first(x), raises))  # type: ignore[no-untyped-call, no-any-return]

    model = wrap("ours", Raising(), bucket_cap_mb=1e-6)
    _by_hand(model)
    for step in range(4):
        model.zero_grad()
        raises = step in (0, 2) and rank == step // 2
        loss = model(torch.ones(2, 4), raises).sum()
        if raises:
            with pytest.raises(ValueError, match="boom"):
                loss.backward()
            continue
        loss.backward()
        _finalize(model)
        broken = not all(p.grad.isfinite().all() for p in model.parameters())
        assert broken == (step in (0, 2))


def test_a_backward_that_raises_on_one_rank_is_made_up_for(ranks2: RankPool):
    ranks2.run(_one_raises)


def _pickled(rank: int, world_size: int) -> None:
    model = wrap("ours", Branches())
    _by_hand(model)
    again = pickle.loads(pickle.dumps(model))
    again(torch.full((2, 4), rank + 1.0)).sum().backward()
    _finalize(again)
    mine = grads_of(again.module)["trunk.bias"]
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, mine)
    assert_same_bits(told[1:], told[:-1])


@pytest.mark.skipif(not IN_TORCH, reason="torch's class keeps it from 2.15 on")
def test_a_pickle_keeps_it(ranks2: RankPool):
    ranks2.run(_pickled)
