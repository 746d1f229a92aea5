"""FASTREDUCE_DEBUG=1: what ranks are about to do is held against each other, and nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import fastreduce.distributed as dist
from fastreduce.distributed import ReduceOp, functional
from tests.support.collective_cases import FUNCTIONS, all_kinds
from tests.support.ranks import RankPool, message, with_time

DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "shape": (lambda r: dist.all_reduce(torch.ones(2 + r)), ["all_reduce", "(2,)", "(3,)"]),
    "dtype": (lambda r: dist.broadcast(torch.ones(2).to([torch.float32, torch.float16][r])), ["float16", "float32"]),
    "op": (lambda r: dist.all_reduce(torch.ones(2), [ReduceOp.MAX, ReduceOp.MIN][r]), ["MAX", "MIN"]),
    "src": (lambda r: dist.broadcast(torch.ones(2), src=r), ["src=0", "src=1"]),
    "call": (lambda r: [dist.all_reduce, dist.broadcast][r](torch.ones(2)), ["all_reduce:", "broadcast:"]),
    "gather": (
        lambda r: dist.all_gather([torch.ones(1 + r)] * 2, torch.ones(1 + r)),
        ["all_gather", "(1,)", "(2,)"],
    ),
    "gradients": (
        lambda r: functional.all_reduce_sum(torch.ones(1, requires_grad=r == 0)),
        ["all_reduce_sum", "requires grad", "requires no grad"],
    ),
}


def _said(call: Callable[[], Any]) -> str:
    """What a call says in debug mode, behind which ranks go on."""
    os.environ["FASTREDUCE_DEBUG"] = "1"
    said = message(call)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    return said


def _different(rank: int, world_size: int, case: str) -> str:
    return _said(lambda: DIFFERENT[case][0](rank))


@pytest.mark.parametrize("case", DIFFERENT)
def test_debug_mode_finds_ranks_that_differ_before_the_call(ranks2: RankPool, case: str):
    first, second = ranks2.run(_different, case)
    assert first == second and first.startswith("MismatchError: ")
    for piece in ["rank 0 has", "rank 1 has", *DIFFERENT[case][1]]:
        assert piece in first


def _debugged(rank: int, world_size: int) -> None:
    os.environ["FASTREDUCE_DEBUG"] = "1"
    all_kinds(rank, world_size, torch.float32, "contiguous", True)
    dist.new_group([0, 1])
    for name in FUNCTIONS:
        leaf = torch.ones(world_size, 2, requires_grad=True)
        getattr(functional, name)(leaf).sum().backward()


def test_debug_mode_lets_everything_pass_that_is_right(ranks: RankPool):
    ranks.run(_debugged)


WRONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "op": (lambda: dist.all_reduce(torch.ones(2), "sum"), lambda: dist.all_reduce(torch.ones(2)), "unknown op 'sum'"),
    "src": (lambda: dist.broadcast(torch.ones(2), 7), lambda: dist.broadcast(torch.ones(2)), "src=7 is not in"),
    "tensor": (lambda: dist.all_reduce(None), lambda: dist.all_reduce(torch.ones(2)), "tensor 0 is a NoneType"),  # type: ignore[arg-type]
    "length": (
        lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
        lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1)),
        "1 tensors for a group of 2 ranks",
    ),
    "no list": (
        lambda: dist.scatter(torch.ones(1), [torch.ones(1)] * 2, 0),
        lambda: dist.scatter(torch.ones(1), [torch.ones(1)] * 2, 0),
        "scatter_list is [tensor([1.]), tensor([1.])]; rank 0 passes one",
    ),
    "ranks": (lambda: dist.new_group([0, 7]), lambda: dist.new_group([0, 1]), "ranks=[0, 7]; allowed"),
    "an input": (
        lambda: functional.all_reduce_sum(None),  # type: ignore[arg-type]
        lambda: functional.all_reduce_sum(torch.ones(2)),
        "the input is a NoneType",
    ),
    "parts": (
        lambda: functional.reduce_scatter_sum(torch.ones(3)),
        lambda: functional.reduce_scatter_sum(torch.ones(4)),
        "shape (3,) does not divide along axis 0 into 2 equal parts",
    ),
}


def _wrong(rank: int, world_size: int, case: str) -> str:
    return _said(WRONG[case][0 if rank else 1])


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(ranks2: RankPool, case: str):
    other, wrong = ranks2.run(_wrong, case)
    assert wrong.startswith(("SettingError: ", "TensorError: ")) and WRONG[case][2] in wrong, wrong
    assert other.startswith("MismatchError: ") and f"Error: {wrong.partition(': ')[2]}" in other, other


# Messages between two ranks, and parts of an all_to_all, which may differ in size between pairs of ranks.

SENDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    "shape": (
        lambda: dist.send(torch.ones(2), 1),
        lambda: dist.recv(torch.ones(3), 0),
        "shape (2,), torch.float32",
        "shape (3,), torch.float32",
    ),
    "dtype": (
        lambda: dist.send(torch.ones(2), 1, tag=7),
        lambda: dist.recv(torch.ones(2).half(), 0, tag=7),
        "shape (2,), torch.float32",
        "shape (2,), torch.float16",
    ),
    "any sender": (
        lambda: dist.send(torch.ones(4), 1),
        lambda: dist.recv(torch.ones(2, 2)),
        "shape (4,), torch.float32",
        "shape (2, 2), torch.float32",
    ),
    "all_to_all": (
        lambda: dist.all_to_all([torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(3)]),
        lambda: dist.all_to_all([torch.ones(2), torch.ones(1)], [torch.ones(1), torch.ones(1)]),
        "shape (3,), torch.float32",
        "shape (2,), torch.float32",
    ),
}


def _sends(rank: int, world_size: int, case: str) -> list[Any]:
    os.environ["FASTREDUCE_DEBUG"] = "1"
    said = message(SENDS[case][rank])
    came = torch.zeros(3)
    if rank == 0:
        dist.send(torch.arange(3.0), 1, tag=7)
        return [said, came.tolist()]
    return [said, dist.recv(came, tag=7) or came.tolist()]


@pytest.mark.parametrize("case", SENDS)
def test_both_ranks_learn_that_what_is_sent_is_not_what_is_taken(ranks2: RankPool, case: str):
    (first, _), (second, came) = ranks2.run(_sends, case)
    assert first == second and first.startswith("MismatchError: ranks differ in a ")
    _, _, sent, taken = SENDS[case]
    assert f"rank 0 sends {'rank 1 ' if case == 'all_to_all' else ''}{sent}, rank 1 takes {taken}" in first
    assert came == [0.0, 1.0, 2.0]


def _alone_with_it(rank: int, world_size: int, seconds: float) -> list[str]:
    os.environ["FASTREDUCE_DEBUG"] = "1"
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    tensor = torch.ones(2)
    calls: list[list[Callable[[], Any]]] = [
        [lambda: dist.send(tensor, 1, group, tag=1), lambda: dist.recv(tensor, 0, group, tag=2)],
        [lambda: dist.send(tensor, 1, group), lambda: None],
        [lambda: None, lambda: dist.recv(tensor, None, group)],
        [lambda: dist.send(tensor, 1, group), lambda: dist.all_reduce(tensor, group=group)],
        [lambda: dist.send(tensor, 1, group), lambda: dist.recv(tensor, 0, group)],
    ]
    said = []
    for pair in calls:
        said.append(message(pair[rank]))
        dist.barrier()
    dist.destroy_process_group(group)
    return said


@pytest.mark.long
def test_a_message_that_nobody_answers_is_an_error_in_time(ranks2: RankPool):
    with_time(lambda seconds: _check_alone(ranks2, seconds), 1.0)


def _check_alone(ranks2: RankPool, seconds: float) -> None:
    first, second = ranks2.run(_alone_with_it, seconds)
    to_1 = "TransportError: send on rank 0: rank 1 did not come to receive with tag {} within " + f"{seconds:g} s"
    assert first[:4] == [to_1.format(1), to_1.format(0), "no error", to_1.format(0)]
    assert second[:3] == [
        f"TransportError: recv on rank 1: rank 0 did not come to send with tag 2 within {seconds:g} s",
        "no error",
        f"TransportError: recv on rank 1: no rank came to send with tag 0 within {seconds:g} s",
    ]
    assert second[3] == f"TransportError: all_reduce on rank 1: of 2 ranks, rank 0 did not arrive within {seconds:g} s"
    assert first[4] == second[4] == "no error"
