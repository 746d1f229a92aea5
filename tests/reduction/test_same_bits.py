"""The same bits on every rank, whatever the size of buckets and the transport, over random models and histories.

Of what our kernels sum, and of top-k: averages, and so parameters, follow from gradients and settings alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn

from fastreduce import GradientReducer
from fastreduce.policy import Policy
from fastreduce.transports import Transport, make_transport
from tests.support.histories import of_trainings
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.thread_ranks import in_threads, on_nodes

SIZES = ([1], [700], [4000, 20_000], [1 << 25])  # bytes of buckets
NODES = ((2, 2), (2, 1), (3, 2))  # ranks of each
RANKS = max(map(sum, NODES))
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEEDBACK = [f"{form}:error_feedback{kept}" for form in ("int8", "int4", "fp8") for kept in ("", "=8bit", "=bf16")]
SETTINGS = [
    *FEEDBACK,
    *(f"{setting},flat" for setting in FEEDBACK[::4]),
    "none:accumulate=fp32",
    "fp16",
    "bf16",
    "int4",
    "int8:rounding=stochastic,seed=3",
    "topk:ratio=0.1,min_numel=20",
    "ndim<2: fp16; *: int4:error_feedback=bf16",
]


@dataclass(frozen=True)
class Moment:
    """One step of a history."""

    seed: int
    magnitude: float
    spread: float  # a gradient's elements are so many orders of magnitude apart
    left_out: tuple[tuple[int, ...], ...]  # by rank, parameters that its loss does not contain
    bad: tuple[int, float] | None  # a parameter with such a number on rank 1
    micro_batches: int
    max_norm: float  # to which gradients are clipped
    ends: str  # "step"; "skip": averages are thrown away; "keep": they stay for the next step
    setting: str  # that begins with the step
    saved: bool  # a checkpoint ends the step


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _one_of(*usual_first: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(usual_first)


SHAPES: st.SearchStrategy[Shapes] = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(_one_of(1, 31, 128, 1300, 4096)),
            st.tuples(st.integers(0, 3000)),
            st.tuples(st.integers(1, 40), st.integers(1, 40)),
        ),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=6,
).map(lambda drawn: (((5,), torch.float32), *drawn))
MOMENTS = st.builds(
    Moment,
    seed=st.integers(0, 1 << 20),
    magnitude=_one_of(1.0, 1e-3, 100.0, 1e-20),
    spread=_one_of(0.0, 2.0, 6.0),
    left_out=_one_of(False, False, True).flatmap(
        lambda some: st.tuples(*[st.lists(st.integers(1, 6)).map(tuple) if some else st.just(())] * RANKS)
    ),
    bad=_one_of(None, None, None, (0, math.inf), (1, math.nan)),
    micro_batches=_one_of(1, 1, 1, 2),
    max_norm=_one_of(math.inf, math.inf, 0.1),
    ends=_one_of("step", "step", "step", "skip", "keep"),
    setting=_one_of("", "", "", *SETTINGS),
    saved=_one_of(False, False, False, True),
)
HISTORIES = st.lists(MOMENTS, min_size=3, max_size=6).map(tuple)


class Given(nn.Module):
    """A model whose gradients are what one says."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes])

    def loss(self, moment: Moment, rank: int, micro: int) -> Tensor:
        used = (i for i in range(len(self.values)) if i not in moment.left_out[rank])
        terms = [(self.values[i] * _gradient(self.values[i], i, moment, rank, micro)).sum().double() for i in used]
        return torch.stack(terms).sum()


def _gradient(like: Tensor, i: int, moment: Moment, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(((moment.seed * 8 + i) * 8 + rank) * 2 + micro)
    apart = 10 ** (-moment.spread * torch.rand(like.shape, generator=generator))
    found = torch.randn(like.shape, generator=generator) * apart * moment.magnitude
    # A rank that finds NaN in what had accumulated takes the averages below for thrown away, and its shards go by that.
    if moment.bad is not None and moment.bad[0] == i and rank == 1 and micro == moment.micro_batches - 1:
        found.view(-1)[:1] = moment.bad[1]
    return found.to(like.dtype)


def _train(
    rank: int,
    transport: Transport,
    shapes: Shapes,
    setting: str,
    history: Sequence[Moment],
    caps: Sequence[int],
    views: bool = False,
) -> list[list[Tensor | None]]:
    """By step, the averages; then the parameters."""
    parameters = list((model := Given(shapes)).values)
    names = [f"p{i}" for i in range(len(parameters))]
    reducer = GradientReducer(
        parameters, names, transport, Policy.of(setting), bucket_caps=caps, gradient_as_bucket_view=views
    )
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    found: list[list[Tensor | None]] = []
    for moment in history:
        if moment.setting:
            reducer.set_compression(moment.setting)
        for micro in range(moment.micro_batches):
            reducer.look()
            loss = model.loss(moment, rank, micro)
            if micro == moment.micro_batches - 1:
                reducer.switch_if_due()
                reducer.rebuild_buckets()
                reducer.arm()
            reducer.watch([loss])  # of local ones, too: what a backward adds to averages is no multiple of them
            loss.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in parameters])
        finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in parameters)
        if moment.ends == "step" and finite:
            torch.nn.utils.clip_grad_norm_(parameters, moment.max_norm, foreach=False)
            optimizer.step()
        if moment.ends != "keep" or not finite:
            optimizer.zero_grad()
            if moment.saved:
                reducer.load_state_dict(reducer.state_dict())
    reducer.remove_hooks()
    reducer.close()
    return [*found, [p.detach() for p in parameters]]


def _check(trainings: Sequence[Sequence[Any]]) -> None:
    """All ranks of all trainings of one history end each step with the same bits."""
    for training in trainings:
        for of_rank in training:
            assert_same_bits(of_rank, trainings[0][0])


# Between threads: one level, and two


COMPILING = 120.0  # seconds in which a rank may compile the kernels of settings that are new here, while others wait


def _search(examples: int) -> None:
    @of_trainings(examples)
    @given(
        st.sampled_from([*NODES, 2, 3]),
        SHAPES,
        st.sampled_from([*FEEDBACK, SETTINGS[-1]]),
        HISTORIES,
        st.permutations(SIZES),
    )
    def search(ranks: Any, shapes: Shapes, setting: str, history: Any, sizes: Sequence[list[int]]) -> None:
        _check(
            [
                in_threads(
                    ranks if isinstance(ranks, int) else on_nodes(ranks, COMPILING),
                    functools.partial(_train, shapes=shapes, setting=setting, history=history, caps=caps),
                    COMPILING,
                )
                for caps in sizes[:2]
            ]
        )

    search()


def test_the_size_of_buckets_does_not_tell():
    """Settings switched, checkpoints, skipped, clipped and accumulated steps, unused parameters, NaN; two levels."""
    _search(5)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_size_of_buckets_does_not_tell_over_many_histories():
    _search(300)


# On real ranks


def _over(
    rank: int,
    world_size: int,
    names: Sequence[str],
    sizes: Sequence[list[int]],
    shapes: Shapes,
    setting: str,
    history: Sequence[Moment],
) -> list[Any]:
    """A training over each transport, with buckets of a size of its own; of every other one gradients are views."""
    trainings = enumerate(zip(names, sizes, strict=True), start=len(shapes))
    return [
        _train(rank, make_transport(dist.group.WORLD, "cpu", name), shapes, setting, history, caps, number % 2 == 0)
        for number, (name, caps) in trainings
    ]


def _search_over(ranks: RankPool, names: Sequence[str], examples: int) -> None:
    @of_trainings(examples)
    @given(SHAPES, st.sampled_from(SETTINGS), HISTORIES, st.permutations(SIZES))
    def search(shapes: Shapes, setting: str, history: Any, sizes: Sequence[list[int]]) -> None:
        found = ranks.run(_over, names, sizes[: len(names)], shapes, setting, history)
        _check(list(zip(*found, strict=True)))

    search()


@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_the_transport_does_not_tell(ranks: RankPool, examples: int):
    """Piece by piece in shared memory, or as wires over gloo."""
    _search_over(ranks, ("shm", "gloo"), examples)


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("hosts", ["aab", "aaabb"])
def test_nor_does_the_size_of_buckets_over_two_levels_between_processes(hosts: str):
    """A node's third rank, beside a node of two, owns no column."""
    with RankPool(len(hosts), hosts=hosts) as pool:
        _search_over(pool, ("two_level", "two_level"), 60)
