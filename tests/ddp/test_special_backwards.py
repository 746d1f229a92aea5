"""Backwards that are not plain: checkpointed, raising, inside `autograd.grad`, creating graphs, under users' hooks."""

from __future__ import annotations

import _thread
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fastreduce import ReducerError
from tests.support.models import (
    EXACT,
    Branches,
    Breaking,
    Checkpointed,
    Grads,
    Heads,
    assert_same_bits,
    average_of_whole,
    batch,
    equal_on_all,
    grads_of,
    in_a_backward,
    mean_over_ranks,
    mlp,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import OVER_HOSTS, RankPool
from tests.support.threads import communication_threads, threads_left_over

# Checkpointing


@pytest.mark.parametrize(
    ("reentrant", "twice", "static"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[2] != (case[0] == case[1])))
        for case in product([False, True], repeat=3)
    ],
)
def test_checkpointed_layers_equal_torch_and_the_average(
    ranks_views: tuple[RankPool, bool], reentrant: bool, twice: bool, static: bool
):
    ranks, views = ranks_views
    results = ranks.run(_checkpointed, reentrant, twice, static, views)
    found = equal_on_all(results)
    for step, grads in enumerate(found):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, twice), step, range(ranks.world_size)))


def _checkpointed(rank: int, world_size: int, reentrant: bool, twice: bool, static: bool, views: bool) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        model = whole_(Checkpointed(reentrant, twice))
        fixed = static or (kind == "torch" and reentrant)  # torch needs it where a backward runs inside another
        model = wrap(kind, model, static_graph=fixed, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
        seen[kind] = []
        for step in range(4):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    return seen["ours"]


class Slots:
    __slots__ = ("__weakref__", "loss")

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "object": lambda loss: SimpleNamespace(loss=loss),
    "slots": Slots,
    "nested": lambda loss: {"all": [SimpleNamespace(inner=(Slots(loss), 1))]},
    "behind text": lambda loss: SimpleNamespace(text=list(map(str, range(5000))), inner=[{"deep": Slots(loss)}]),
    "beside what is gone": lambda loss: SimpleNamespace(gone=weakref.proxy(Slots(loss)), inner=Slots(loss)),
    "hidden": lambda _: None,
}


class CheckpointLast(nn.Module):
    """The inner backward of the checkpoint is the first to fire a hook, and ends before the others have."""

    def __init__(self, checkpoints: bool = True) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, kind: str = "tensor") -> Any:
        x = self.inner(self.first(x))
        self.seen[:] = [checkpoint(self.last, x, use_reentrant=True) if self.checkpoints else self.last(x)]
        return OUTPUTS[kind](self.seen[0])


@pytest.mark.parametrize("kind", [kind for kind in OUTPUTS if kind != "hidden"])
def test_a_reentrant_checkpoint_in_the_last_layers_does_not_end_the_backward_early(ranks2: RankPool, kind: str):
    for step, grads in enumerate(equal_on_all(ranks2.run(_checkpoint_last, kind))):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, False), step, range(2)))


def _checkpoint_last(rank: int, world_size: int, kind: str) -> list[Grads]:
    model = wrap("ours", whole_(CheckpointLast()))
    seen = []
    for step in range(3):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4), kind)
        (model.module.seen[0].sum() * EXACT).backward()
        seen.append(grads_of(model.module))
    return seen


def test_where_the_end_of_a_backward_cannot_be_known_is_an_error(ranks2: RankPool):
    """The forward returns nothing, and a checkpoint's inner backward is the first to fire a hook."""
    for rank, grads in enumerate(ranks2.run(_end_not_known, timeout=60)):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, False), 9, range(2)), f"rank {rank}")


def _end_not_known(rank: int, world_size: int) -> Grads:
    model = wrap("ours", whole_(CheckpointLast()))
    for step in range(2):
        model(whole_batch(rank, step, 3, 4), "hidden" if rank == 0 else "tensor")
        message = r"rank 0: parameter 'last\.\w+' received a gradient in a re-entrant checkpoint .*use_reentrant=False"
        with pytest.raises(ReducerError, match=message) if rank == 0 else nullcontext():
            model.module.seen[0].sum().backward()
    model.zero_grad()
    (model(whole_batch(rank, 9, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module)


def _in_a_thread_of_c(train: Callable[[], None]) -> None:
    """That is, one of which `threading` does not know."""
    ended = threading.Event()

    def train_and_end() -> None:
        train()
        ended.set()

    _thread.start_new_thread(train_and_end, ())
    assert ended.wait(60)


@pytest.mark.parametrize("where", [in_a_backward, _in_a_thread_of_c])
def test_forward_and_backward_within_another_backward_or_thread(ranks2: RankPool, where: Any):
    """The forward returns nothing, and yet the end is known: it is that of the innermost backward."""
    for step, grads in enumerate(equal_on_all(ranks2.run(_train_within, where, timeout=90))):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, False), step, range(2)))


def _train_within(rank: int, world_size: int, where: Callable[[Callable[[], None]], None]) -> list[Grads]:
    model = wrap("ours", whole_(CheckpointLast(checkpoints=False)))
    seen = []

    def train() -> None:
        for step in range(3):
            model.zero_grad()
            model(whole_batch(rank, step, 3, 4), "hidden")
            (model.module.seen[0].sum() * EXACT).backward()
            seen.append(grads_of(model.module))

    where(train)
    return seen


def test_an_evaluation_on_another_thread_leaves_the_backward_under_way_alone(ranks2: RankPool):
    for step, grads in enumerate(equal_on_all(ranks2.run(_evaluate_meanwhile, timeout=60))):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, False), step, range(2)))


def _evaluate_meanwhile(rank: int, world_size: int) -> list[Grads]:
    model = wrap("ours", whole_(CheckpointLast(checkpoints=False)), bucket_cap_mb=1e-6)
    seen = []

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(1, 4))

    def meanwhile(_: Tensor) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    for step in range(3):
        model.zero_grad()
        loss = model(whole_batch(rank, step, 3, 4)).sum() * EXACT
        if rank == 0:
            model.module.inner.weight.register_hook(meanwhile)
        loss.backward()
        seen.append(grads_of(model.module))
    return seen


@pytest.mark.parametrize("stops_early", [False, True])
def test_around_a_checkpoint_of_the_wrapper_too_there_is_one_backward(ranks2: RankPool, stops_early: bool):
    """Within it the forward runs again, after the first gradient: that is no new one."""
    found = equal_on_all(ranks2.run(_wrapper_in_a_checkpoint, stops_early, timeout=30))
    for step, grads in enumerate(found):
        assert_same_bits(grads, average_of_whole(lambda: Checkpointed(False, False), step, range(2)))


def _wrapper_in_a_checkpoint(rank: int, world_size: int, stops_early: bool) -> list[Grads]:
    model, seen = wrap("ours", whole_(Checkpointed(False, False)), bucket_cap_mb=1e-6), []
    for step in range(4):
        model.zero_grad()
        with set_checkpoint_early_stop(stops_early):
            output = checkpoint(model, whole_batch(rank, step, 3, 4), use_reentrant=False)
        (output.sum() * EXACT).backward()
        seen.append(grads_of(model.module))
    assert model.reducer.step == 4
    return seen


# Backwards that are not plain


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("skip", [False, True], ids=["alike", "at different depths"])
def test_a_backward_that_raises_on_all_ranks_leaves_nothing_behind(ranks2: RankPool, views: bool, skip: bool):
    results = ranks2.run(_broken, views, skip)
    for grads, _ in results:
        assert_same_bits(grads, average_of_whole(Breaking, 9, range(2)))
    assert results[0][1] > 0, "nothing had been launched: the test shows nothing"


def _broken(rank: int, world_size: int, views: bool, skip: bool) -> tuple[Grads, int]:
    model = wrap("ours", whole_(Breaking()), gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    with pytest.raises(ValueError, match="boom"):
        model(whole_batch(rank, 3, 3, 4), boom=True, skip=skip and rank == 0).sum().backward()
    launched = len(model.reducer.backward._launches.made)
    model.zero_grad()
    (model(whole_batch(rank, 9, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module), launched


@OVER_HOSTS
def test_a_backward_that_raises_on_one_rank_gives_the_others_nan_and_training_goes_on(ranks: RankPool):
    for poisoned, grads in ranks.run(_broken_on_one):
        assert poisoned
        assert_same_bits(grads, average_of_whole(Breaking, 9, range(ranks.world_size)))


def test_so_does_one_that_raises_under_a_communication_hook(ranks2: RankPool):
    for poisoned, grads in ranks2.run(_broken_on_one, True, timeout=30):
        assert poisoned
        assert_same_bits(grads, average_of_whole(Breaking, 9, range(2)))


def test_an_evaluation_after_one_that_raised_lets_the_others_go_on(ranks2: RankPool):
    ranks2.run(_evaluated_after_broken, timeout=30)


def _evaluated_after_broken(rank: int, world_size: int) -> None:
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    loss = model(whole_batch(rank, 0, 3, 4), boom=rank == 0).sum()
    with pytest.raises(ValueError, match="boom") if rank == 0 else nullcontext():
        loss.backward()
    with torch.no_grad():
        metric = model(whole_batch(rank, 1, 3, 4)).sum()
    dist.all_reduce(metric)


def _broken_on_one(rank: int, world_size: int, hook: bool = False) -> tuple[bool, Grads]:
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    if hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    model.zero_grad()
    poisoned = True
    loss = model(whole_batch(rank, 3, 3, 4), boom=rank == 0).sum()
    if rank == 0:
        with pytest.raises(ValueError, match="boom"):
            loss.backward()
    else:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        poisoned = bool(model.module.a.weight.grad.isnan().all())
    model.zero_grad()
    (model(whole_batch(rank, 9, 3, 4)).sum() * EXACT).backward()
    return poisoned, grads_of(model.module)


def test_a_wrapper_that_is_dropped_in_a_broken_state_leaves_nothing_and_does_not_disturb_the_next(ranks2: RankPool):
    for grads, threads in ranks2.run(_broken_and_dropped):
        assert_same_bits(grads, average_of_whole(Breaking, 9, range(2)))
        assert threads == 0


def _broken_and_dropped(rank: int, world_size: int) -> tuple[Grads, int]:
    """Rank 1 has sent more buckets than rank 0 when both raise and give the wrapper up."""
    before = communication_threads()
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in range(3):
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    with pytest.raises(ValueError, match="boom"):
        model(whole_batch(rank, 3, 3, 4), boom=True, skip=rank == 0).sum().backward()
    del model
    gc.collect()
    threads = threads_left_over(before)
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in (7, 8, 9):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module), threads


@OVER_HOSTS
def test_a_first_backward_that_raises_leaves_nothing_behind(ranks: RankPool):
    for grads in chain(
        ranks.run(_broken_first, (0, 1, 2)), ranks.run(_broken_first, (0,)), ranks.run(_broken_first, (1,))
    ):
        assert_same_bits(grads, average_of_whole(Breaking, 9, range(ranks.world_size)))


def _broken_first(rank: int, world_size: int, on: tuple[int, ...]) -> Grads:
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in range(2):
        with pytest.raises(ValueError, match="boom") if rank in on else nullcontext():
            model(whole_batch(rank, step, 3, 4), boom=rank in on).sum().backward()
    for step in (3, 4, 9):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module)


@OVER_HOSTS
def test_autograd_grad_reduces_nothing_and_the_backward_after_it_does(ranks: RankPool):
    results = ranks.run(_autograd_grad)
    for step, (inner, grads) in enumerate(equal_on_all([steps for steps, _ in results])):
        assert inner == [None] * 7
        assert_same_bits(grads, average_of_whole(Branches, step, range(ranks.world_size)))
    for _, equal in results:
        assert equal


def _autograd_grad(rank: int, world_size: int) -> tuple[list[tuple[list[Any], Grads]], bool]:
    model, seen, equal = wrap("ours", whole_(Branches()), bucket_cap_mb=1e-6), [], True
    for step in range(4):
        model.zero_grad()
        x = whole_batch(rank, step, 3, 4).requires_grad_()
        loss = model(x).sum() * EXACT
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        of_parameters = torch.autograd.grad(loss, list(model.module.parameters()), retain_graph=True)
        inner = [p.grad for p in model.module.parameters()]
        bare = whole_(Branches())
        expected = torch.autograd.grad(bare(x).sum() * EXACT, [x, *bare.parameters()])
        equal = equal and all(map(torch.equal, (of_input, *of_parameters), expected))
        loss.backward()
        seen.append((inner, grads_of(model.module)))
    return seen, equal


class SideOutput(nn.Module):
    """Keeps its loss to itself: no output hook runs in the backward of `side`."""

    side: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        self.side = y.sum() * EXACT
        return y * 2


@OVER_HOSTS
@pytest.mark.parametrize("grad_before", [False, True], ids=["alone", "after autograd.grad"])
def test_a_loss_that_is_no_output_of_the_forward_is_reduced_too(ranks: RankPool, grad_before: bool):
    for seen in ranks.run(_side, grad_before):
        for step, grads in enumerate(seen):
            model = whole_(SideOutput())
            for rank in range(ranks.world_size):
                model(whole_batch(rank, step, 3, 4))
                model.side.backward()
            assert_same_bits(
                grads, {n: g / ranks.world_size for n, g in grads_of(model).items() if g is not None}, f"step {step}"
            )


def _side(rank: int, world_size: int, grad_before: bool) -> list[Grads]:
    model, seen = wrap("ours", whole_(SideOutput()), bucket_cap_mb=1e-6), []
    for step in range(4):
        model.zero_grad()
        x = whole_batch(rank, step, 3, 4).requires_grad_()
        output = model(x)
        if grad_before:
            torch.autograd.grad(output.sum(), x, retain_graph=True)
        model.module.side.backward()
        seen.append(grads_of(model.module))
    return seen


def test_a_backward_that_creates_a_graph_is_averaged(ranks2: RankPool):
    equal_on_all(ranks2.run(_create_graph))


@pytest.mark.filterwarnings("ignore:Using backward")
def _create_graph(rank: int, world_size: int) -> list[Grads]:
    seen, ours = {}, wrap("ours", mlp(), bucket_cap_mb=1e-6)
    for model in (ours, copy.deepcopy(ours.module)):
        seen[type(model)] = found = list[Grads]()
        for step in range(3):
            model.zero_grad()
            x = batch(rank, step, 4, 20).requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()  # the gradient penalty
            found.append(grads_of(getattr(model, "module", model)))
            model.zero_grad()
            model(x).square().mean().backward(create_graph=True)
            found.append(grads_of(getattr(model, "module", model)))
            model.zero_grad()
    averages, alone = seen.values()
    assert_same_bits(averages, [mean_over_ranks(grads) for grads in alone], f"rank {rank}")
    return averages


@OVER_HOSTS
def test_outputs_in_containers_are_watched(ranks: RankPool):
    equal_on_all(ranks.run(_containers))


class _CheckpointedHeads(Heads):
    """Its last gradients come in a task of autograd within another: only the outputs' hooks tell where that begins."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        inner = self.second(x)
        return {"first": checkpoint(self.first, inner, use_reentrant=True), "rest": [inner]}


def _containers(rank: int, world_size: int) -> list[Grads]:
    seen = {}
    for model in (wrap("ours", whole_(_CheckpointedHeads())), whole_(_CheckpointedHeads())):
        seen[type(model)] = found = list[Grads]()
        for step in range(3):
            model.zero_grad()
            outputs = model(whole_batch(rank, step, 3, 4))
            ((outputs["first"] + outputs["rest"][0]).sum() * EXACT).backward()
            found.append(grads_of(getattr(model, "module", model)))
    averages, alone = seen.values()
    if world_size == 2:  # else its sums have other bits
        assert_same_bits(averages, [mean_over_ranks(grads) for grads in alone], f"rank {rank}")
    return averages


@OVER_HOSTS
def test_user_hooks_run_before_ours_and_what_they_leave_is_averaged(ranks: RankPool, views: bool):
    results = ranks.run(_user_hooks, views)
    mean = sum(range(1, ranks.world_size + 1)) / ranks.world_size
    for weight, bias, seen in results:
        assert (weight == mean).all()  # replaced by a post-accumulate hook: rank + 1
        assert (bias == 4 * mean).all()  # doubled twice by tensor hooks
        assert seen == [1.0, 1.0], "hooks of the user see the local gradient"


def _user_hooks(rank: int, world_size: int, views: bool) -> tuple[Tensor, Tensor, list[float]]:
    layer = nn.Linear(3, 2)
    model = wrap("ours", layer, gradient_as_bucket_view=views)
    seen: list[float] = []

    def replace(parameter: Tensor) -> None:
        parameter.grad = torch.full_like(parameter, rank + 1)

    def look(grad: Tensor) -> Tensor:
        seen.append(float(grad[0]) / (rank + 1))
        return grad * 2

    layer.weight.register_post_accumulate_grad_hook(replace)
    layer.bias.register_hook(look)
    layer.bias.register_hook(lambda grad: grad * 2)
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
    return layer.weight.grad.clone(), layer.bias.grad.clone(), seen  # type: ignore[union-attr]
