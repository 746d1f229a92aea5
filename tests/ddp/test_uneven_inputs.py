"""Error feedback in `join()`: a rank without inputs left is as one that brings zeros, whatever the others apply."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fastreduce
from tests.support import tolerances
from tests.support.models import assert_same_bits, wrap
from tests.support.ranks import RankPool, run_ranks

SIZES = (300, 7, 130, 700)
STEPS = 8
SECONDS = 100.0


@dataclass(frozen=True)
class Loop:
    """What the ranks with inputs do in each step."""

    clip: float = math.inf
    skips: tuple[int, ...] = ()  # steps whose averages are thrown away
    bad: tuple[int, ...] = ()  # steps in which an average is infinite, and applied
    micro_batches: int = 1
    switch: str = ""  # a setting that begins with step 6
    inputs: tuple[int, ...] = (STEPS, 3, 5)  # steps for which each rank has some
    zero_late: bool = False  # gradients are zeroed at the beginning of a step, or between forward and backward


class Given(nn.Module):
    """A model whose gradients are what one says."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.values, gradients, strict=True)]).sum()


def _gradients(rank: int, step: int, loop: Loop, micro: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed((rank * 100 + step) * 10 + micro)
    found = [torch.randn(size, generator=generator) for size in SIZES]
    if step in loop.bad and rank == 0:
        found[0][5] = math.inf
    return found


def _train(
    rank: int, world_size: int, setting: str, cap: float, loop: Loop, joins: bool, behind: bool = False
) -> dict[str, Any]:
    """The averages of each step, and of two more in which all ranks have inputs again; and what was kept between.

    `joins`: in a join; else the others bring zeros. `behind`: another module joins first.
    """
    ddp: Any = fastreduce.DistributedDataParallel(Given(), compression=setting, bucket_cap_mb=cap)
    if loop.switch:
        ddp.set_compression(loop.switch, at=6)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    first = fastreduce.DistributedDataParallel(nn.Linear(1, 1)) if behind else None
    averages = []
    if behind:
        with ddp.join():  # what it counts is over with it
            ddp(_gradients(rank, 0, loop))

    def step(number: int, has_inputs: bool) -> None:
        if not loop.zero_late:
            optimizer.zero_grad()
        if first is not None:
            first(torch.ones(1)).sum().backward()
        for micro in range(loop.micro_batches):
            with ddp.no_sync() if micro < loop.micro_batches - 1 else contextlib.nullcontext():
                found = _gradients(rank, number, loop, micro)
                loss = ddp(found if has_inputs else [torch.zeros_like(each) for each in found])
                if loop.zero_late and micro == 0:
                    optimizer.zero_grad()
                loss.backward()
        averages.append([p.grad.clone() for p in ddp.parameters()])
        if number not in loop.skips:
            if loop.clip < math.inf:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), loop.clip)
            optimizer.step()

    context = Join([each for each in (first, ddp) if each is not None]) if joins else contextlib.nullcontext()
    with context:
        for number in range(STEPS):
            has_inputs = number < loop.inputs[rank]
            if has_inputs or not joins:
                step(number, has_inputs)
    kept = ddp.reducer.state_dict()
    for number in range(STEPS, STEPS + 2):
        step(number, True)
    return {"averages": averages, "kept": [kept["residuals"], kept["shard_residuals"]]}


LOOPS = {
    "applied": Loop(),
    "without any input": Loop(clip=1.0, inputs=(0, STEPS, 0)),
    "clipped": Loop(clip=1.0),
    "thrown away": Loop(skips=(2, 4, 5, 7)),
    "zeroed late": Loop(skips=(2, 4, 5, 7), zero_late=True),
    "infinite": Loop(bad=(4,)),
    "accumulated": Loop(clip=1.0, micro_batches=2),
    "switched": Loop(clip=1.0, switch="int4:error_feedback"),
    "switched off": Loop(clip=1.0, switch="none:accumulate=fp32"),
}


def _train_each(rank: int, world_size: int, setting: str, loop: Loop, behind: bool) -> list[dict[str, Any]]:
    """With zeros, and in a join under two sizes of buckets."""
    ways = ((25, False, False), (0.001, True, behind), (25, True, behind))
    return [_train(rank, world_size, setting, cap, loop, joins, after) for cap, joins, after in ways]


def _check(pool: RankPool, setting: str, loop: Loop, behind: bool = False) -> None:
    ranks, *in_joins = zip(*pool.run(_train_each, setting, loop, behind, timeout=3 * SECONDS), strict=True)
    for cap, joined in zip((0.001, 25), in_joins, strict=True):
        for one, all_along, inputs in zip(joined, ranks, loop.inputs, strict=False):
            averages = all_along["averages"]
            assert_same_bits(one["averages"], averages[:inputs] + averages[STEPS:])
        if cap == 25:
            assert_same_bits([one["kept"] for one in joined], [one["kept"] for one in ranks])


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, id=name, marks=[pytest.mark.long] * (name == "clipped")) for name, loop in LOOPS.items()],
)
def test_a_rank_that_has_joined_is_as_one_that_brings_zeros(ranks2: RankPool, loop: Loop):
    _check(ranks2, "int8:error_feedback", loop)


def test_behind_another_module_that_joins(ranks2: RankPool):
    _check(ranks2, "int4:error_feedback=8bit", Loop(clip=1.0), behind=True)


@pytest.mark.long
@pytest.mark.parametrize("setting", ["int8:error_feedback", "int4:error_feedback=8bit", "topk:ratio=0.1,min_numel=20"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_ranks_that_join_one_after_the_other(ranks3: RankPool, setting: str, loop: Loop):
    _check(ranks3, setting, loop)


def _clipped_at_last(rank: int, world_size: int, setting: str) -> tuple[list[Tensor], list[Tensor]]:
    """Norms and parameters behind a join in which rank 1 had no input, and the other clipped for the first time."""
    ddp: Any = fastreduce.DistributedDataParallel(Given(), compression=setting)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for number in range(0 if rank else 2):
            optimizer.zero_grad()
            ddp(_gradients(rank, number, Loop())).backward()
            ddp.clip_grad_norm_(1.0)
            optimizer.step()
    norms = []
    for number in range(2, 12):
        optimizer.zero_grad()
        ddp(_gradients(rank, number, Loop())).backward()
        norms.append(ddp.clip_grad_norm_(1.0))
        optimizer.step()
    return norms, [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_clipping_behind_a_join_is_the_same_on_a_rank_that_had_no_input(ranks2: RankPool, setting: str):
    """There the first norm was that of gradients that were read, elsewhere the sum of what the reduction had found."""
    first, second = ranks2.run(_clipped_at_last, setting, timeout=SECONDS)
    assert_same_bits(first, second)


def _warned(rank: int, world_size: int) -> None:
    layer = nn.Linear(4, 2)
    ddp = wrap("ours", layer)
    with warnings.catch_warnings(), ddp.join(divide_by_initial_world_size=False):
        warnings.simplefilter("error")
        for _ in range(3 + rank):
            ddp.zero_grad()
            (ddp(torch.ones(1, 4)) * (rank + 1)).sum().backward()
    assert (layer.bias.grad == (2.0 if rank else 1.5)).all()  # the second rank is alone in its last step


def test_join_warns_of_nothing():
    """PyTorch warns once in a process, so that fresh ones look."""
    run_ranks(_warned, 2)


def _joined_and_disabled(rank: int, world_size: int, divides: bool) -> list[float]:
    """By step, the averages of gradients 1 and 10: in a join, in one that is disabled, and without."""
    ddp, found = wrap("ours", nn.Linear(1, 1, bias=False)), []

    def steps(count: int) -> None:
        for _ in range(count):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 10.0**rank)).sum().backward()
            found.append(ddp.module.weight.grad.item())

    with ddp.join(divide_by_initial_world_size=divides):
        steps(2 + rank)
    with ddp.join(enable=False, divide_by_initial_world_size=divides):
        steps(3)
    steps(2)
    return found


@pytest.mark.parametrize("divides", [True, False])
def test_what_a_join_has_counted_is_over_with_it(ranks2: RankPool, divides: bool):
    """Rank 0 ends first: it has counted two ranks, rank 1 one in the end."""
    first, last = ranks2.run(_joined_and_disabled, divides)
    assert first == [5.5] * 7
    assert last == [5.5, 5.5, 5.0 if divides else 10.0] + [5.5] * 5


class _Branch(nn.Module):
    """The second layer is used where one says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        return self.second(self.first(x)) if whole else self.first(x)


def _used_by_who_joins(rank: int, world_size: int) -> list[float | None]:
    ddp, found = wrap("ours", _Branch(), find_unused_parameters=True), []
    with ddp.join():
        for _ in range(2 if rank == 0 else 5):
            ddp.zero_grad()
            ddp(torch.ones(1, 2), rank == 0).sum().backward()
            grad = ddp.module.second.bias.grad
            found.append(None if grad is None else grad[0].item())
    return found


def test_what_only_a_rank_that_has_joined_has_used_is_left_alone(ranks2: RankPool):
    """torch has zeros there."""
    assert ranks2.run(_used_by_who_joins) == [[0.5, 0.5], [0.5, 0.5, None, None, None]]


def _left_over_in_a_join(
    rank: int, world_size: int, setting: str, divides: bool, skips: bool, switched: str
) -> tuple[Tensor, Tensor]:
    """The sum of what was applied and that of exact averages, behind a switch that leaves something to ranks that join.

    Rank 1 alone goes on, and has nothing left: in two levels what is left is with the first ranks of nodes, and here
    its gradients were zeros. `switched`: where it accumulates on averages that the others leave without applying them,
    whether the switch was before the join, before another one that nobody leaves early, or within.
    """
    ddp, steps = wrap("ours", Given(), compression=setting), 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    exact, within = [torch.zeros(size, dtype=torch.float64) for size in SIZES], switched == "within"

    def step(there: Collection[int], count: int, skips: bool = False) -> None:
        nonlocal steps
        steps += 1
        grads = {r: [g * float(r != 1 or steps > 2 + within) for g in _gradients(r, steps, Loop())] for r in there}
        optimizer.zero_grad()
        ddp(grads[rank]).backward()
        if not skips:
            optimizer.step()
            for total, *each in zip(exact, *grads.values(), strict=True):
                total += torch.stack(each).double().sum(0) / count

    def accumulate(count: int) -> None:
        ddp(_gradients(1, steps + 1, Loop())).backward()
        optimizer.step()
        of_all = zip(*(_gradients(r, steps, Loop()) for r in everybody), strict=True)
        for total, own, each in zip(exact, _gradients(1, steps + 1, Loop()), of_all, strict=True):
            total += (torch.stack(each).double().mean(0) + own) / count

    everybody = range(world_size)
    step(everybody, world_size)
    step(everybody, world_size)
    ddp.set_compression("none", at=2 + within)
    if switched == "before another join":
        with ddp.join():
            step(everybody, world_size, skips=True)
    with ddp.join(divide_by_initial_world_size=divides):
        if within:
            step(everybody, world_size)
        if switched:
            optimizer.zero_grad()
            ddp(_gradients(rank, steps, Loop())).backward()
        if rank == 1 and switched:
            accumulate(world_size if divides else 1)
        elif rank == 1:
            step([1], world_size if divides else 1, skips)
    for _ in range(20):
        optimizer.zero_grad()
        ddp([torch.zeros(size) for size in SIZES]).backward()
        optimizer.step()
    return torch.cat([-p.detach() for p in ddp.module.values]), torch.cat(exact)


def _left_behind_an_even_join(rank: int, world_size: int) -> list[bool]:
    """Whether buckets carry anything on once what a switch left is applied, behind a join that nobody left early."""
    ddp = wrap("ours", Given(), compression=INT4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)

    def step(scale: float) -> None:
        optimizer.zero_grad()
        ddp([torch.full((size,), scale) for size in SIZES]).backward()
        optimizer.step()

    step(0.1 + rank)
    ddp.set_compression("none")
    with ddp.join():
        step(1.0)
    for _ in range(3):
        step(0.0)
    return [pipeline.remainder is not None for pipeline in ddp.reducer.pipelines]


def test_behind_a_join_nobody_watches_for_others(ranks2: RankPool):
    assert not any(itertools.chain(*ranks2.run(_left_behind_an_even_join)))


TOP_K, INT4 = "topk:ratio=0.1,min_numel=1", "int4:block=32,error_feedback"
WAYS = {
    "over those left": (False, False, ""),
    "skipped": (True, True, ""),
    "accumulated": (True, False, "before"),
    "accumulated, over those left": (False, False, "before"),
    "accumulated, switched in the join": (True, False, "within"),
    "accumulated, behind another join": (True, False, "before another join"),
}
PICKED = [
    ("aaa", TOP_K, "over those left"),
    ("aaa", INT4, "skipped"),
    ("aab", TOP_K, "skipped"),
    ("aab", INT4, "over those left"),
    ("aab", INT4, "accumulated"),
    ("aab", INT4, "accumulated, switched in the join"),
    ("aab", INT4, "accumulated, behind another join"),
]


@pytest.mark.parametrize(
    ("hosts", "setting", "divides", "skips", "switched"),
    [
        pytest.param(
            hosts,
            setting,
            *WAYS[way],
            id=f"{hosts}-{setting}-{way}",
            marks=[pytest.mark.long] * ((hosts, setting, way) not in PICKED),
        )
        for hosts, setting, way in itertools.product(["aaa", "aab"], [TOP_K, INT4], WAYS)
    ],
)
def test_what_a_switch_has_left_to_ranks_that_join_is_not_lost(
    ranks3: RankPool, ranks21: RankPool, hosts: str, setting: str, divides: bool, skips: bool, switched: str
):
    """They hear what becomes of it from a rank that has nothing left itself."""
    pool = ranks21 if hosts == "aab" else ranks3
    found = pool.run(_left_over_in_a_join, setting, divides, skips, switched)
    applied, exact = found[1]
    bound = tolerances.IN_CHANGING_LISTS
    assert float((applied.double() - exact).abs().max()) <= bound


def _joins_without_reductions(rank: int, world_size: int) -> float:
    """Joins in which only some ranks come to a forward, or to none with gradients: no rank may wait for the others."""
    ddp = wrap("ours", Given(), compression=INT4)

    def step() -> None:
        ddp(_gradients(rank, 1, Loop())).backward()

    step()
    step()
    with ddp.join(), torch.no_grad(), ddp.no_sync():
        for _ in range(2 + rank):
            ddp(_gradients(rank, 1, Loop()))
    with contextlib.suppress(RuntimeError), ddp.join(throw_on_early_termination=True):
        for _ in range(rank):
            step()
    with ddp.join():
        pass
    step()
    return sum(float(p.grad.sum()) for p in ddp.parameters())


def test_a_join_ends_where_nothing_is_reduced_in_it(ranks2: RankPool):
    first, second = ranks2.run(_joins_without_reductions, timeout=SECONDS)
    assert first == second
