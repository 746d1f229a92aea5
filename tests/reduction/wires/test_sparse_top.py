"""Top-k by itself: a bucket's way, whose averages and residuals are told bit for bit by what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fastreduce import SettingError, TopK, TransportError, note_applied
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.residuals import error_feedback, staged_rows
from fastreduce.reduction.residuals.bucket_residuals import SlotResiduals
from fastreduce.reduction.wires import sparse_top
from fastreduce.transports import Transport
from tests.support import bucket_pipelines
from tests.support.bucket_pipelines import CPU, Buckets
from tests.support.models import assert_same_bits
from tests.support.thread_ranks import in_threads, on_nodes

SETTING = TopK(ratio=0.05, min_numel=100)
SHAPES = ((30, 40), (7,), (3, 5), (50, 64))  # two that travel in part, and two whole
COUNTS = (60, 0, 0, 160)
LONG = torch.bfloat16, torch.float64


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def trained(ranks: int | Sequence[Transport], steps: int, grads: Any = gradients, **options: Any) -> list[Any]:
    return bucket_pipelines.trained(ranks, SETTING, SHAPES, steps, grads, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_sent_and_what_is_kept_are_the_gradient_and_what_was_kept(ranks: int):
    found = trained(ranks, 6)
    for step in range(6):
        for i, count in enumerate(COUNTS):
            total = torch.zeros(SHAPES[i])
            for rank in range(ranks):
                before = found[rank][1][step - 1][i] if step else torch.zeros(SHAPES[i])
                whole, left = gradients(rank, step)[i] + before, found[rank][1][step][i]
                sent = whole - left
                assert ((sent == 0) | (left == 0)).all(), "an element is sent as it is, or kept as it is"
                assert int((left == 0).sum()) == (count or whole.numel())
                if count:
                    assert sent[sent != 0].abs().min() >= left.abs().max(), "the largest ones are sent"
                total = total + sent
            for rank in range(ranks):
                assert_same_bits(
                    found[rank][0][step][i], total * torch.tensor(1 / ranks), f"step {step}, parameter {i}"
                )


def test_bits_are_those_of_each_parameter_alone_on_any_transport_and_in_every_run():
    expected = trained(3, 4)
    for found in (
        trained(3, 4),
        trained(3, 4, groups=((3,), (2, 0), (1,))),
        trained(on_nodes((2, 1)), 4),
    ):
        for rank in range(3):
            assert_same_bits(found[rank][:2], expected[rank][:2])


def test_of_equal_magnitudes_the_first_are_sent():
    def grads(rank: int, step: int) -> list[Tensor]:
        return [torch.full(shape, (-1.0) ** rank) for shape in SHAPES]

    for rank, (_, kept, _) in enumerate(trained(2, 2, grads)):
        for i, count in enumerate(COUNTS):
            if count:
                for step in range(2):  # what was kept in the first step is larger than what came to the others
                    left = kept[step][i].flatten() * (-1.0) ** rank
                    expected = torch.full_like(left, step + 1.0)
                    expected[step * count : (step + 1) * count] = 0
                    expected[: step * count] = step
                    assert_same_bits(left.abs(), expected)


def test_what_travels_whole_has_the_bits_of_none():
    averages = trained(2, 2)[0][0]
    for step in range(2):
        for i in (1, 2):
            assert_same_bits(averages[step][i], gradients(0, step)[i] * 0.5 + gradients(1, step)[i] * 0.5)


def test_what_was_kept_of_what_travels_whole_is_sent_once():
    """By a setting that ran before this one; where the step's averages are thrown away, it stays."""
    kept = torch.arange(7.0)

    def run(rank: int, transport: Transport) -> list[Tensor]:
        bucket, found = Buckets(transport, SETTING, SHAPES), []
        if rank == 0:
            bucket.pipelines[0].put(1, SlotResiduals(kept, None, 1.0))
        for step in range(3):
            found.append(bucket.step(gradients(rank, step))[1])
            if step == 0:
                note_applied(bucket.parameters, 0.0)
            found.append(bucket.kept[1])
        return found

    first, second = in_threads(2, run)
    for step in range(3):
        owed = kept if step < 2 else torch.zeros(7)
        expected = (gradients(0, step)[1] + owed + gradients(1, step)[1]) * 0.5
        assert_same_bits([first[2 * step], second[2 * step]], [expected] * 2)
        assert_same_bits(first[2 * step + 1], kept if step == 0 else torch.zeros(7), f"kept, step {step}")
        assert not second[2 * step + 1].any()


@pytest.mark.parametrize("dtype", [torch.float16, *(pytest.param(d, marks=pytest.mark.long) for d in LONG)])
def test_gradients_of_other_dtypes(dtype: torch.dtype):
    """Chosen, summed and kept in FP32; averages are rounded to their own."""
    found = trained(2, 3, lambda rank, step: gradients(rank, step, dtype), dtype=dtype)
    same = trained(2, 3, lambda rank, step: [grad.float() for grad in gradients(rank, step, dtype)])
    for rank in range(2):
        assert_same_bits(found[rank][1], same[rank][1])
        assert_same_bits(found[rank][0], [[average.to(dtype) for average in step] for step in same[rank][0]])


def test_nothing_overflows_that_is_no_overflow_as_an_average():
    def grads(rank: int, step: int) -> list[Tensor]:
        made = [torch.zeros(shape) for shape in SHAPES]
        made[0][3, 4] = made[1][2] = 3e38
        return made

    averages, _, (pipeline,) = trained(2, 3, grads)[0]
    assert pipeline.finite
    for average in averages:
        assert average[0][3, 4] == average[1][2] == torch.tensor(3e38)


@pytest.mark.parametrize("where", [0, 1], ids=["in part", "whole"])
@pytest.mark.parametrize("bad", [1, 7])
def test_a_step_that_is_not_finite_leaves_residuals_alone(where: int, bad: int):
    """As many of its elements arrive as are sent."""

    def grads(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step if step < 2 else step - 1)
        if step == 2 and rank == 1:
            made = gradients(rank, 7)
            made[where].view(-1)[-bad:] = torch.tensor([torch.nan, -torch.inf] * 4)[:bad]
        return made

    found, without = trained(2, 4, grads), trained(2, 3)
    for rank in range(2):
        averages, kept, (pipeline,) = found[rank]
        assert (~averages[2][where].isfinite()).flatten().nonzero().flatten().tolist() == [
            averages[2][where].numel() - bad + i for i in range(bad)
        ]
        assert bool(pipeline.finite)
        assert_same_bits(kept[2], kept[1])
        assert_same_bits(kept[3], without[rank][1][2])
        assert_same_bits(averages[3], without[rank][0][2])


def test_more_that_is_not_finite_than_is_sent_spoils_no_residual():
    def run(rank: int, transport: Transport) -> None:
        bucket = Buckets(transport, SETTING, SHAPES)
        bucket.step(gradients(rank, 0))
        before = bucket.kept
        if rank:
            bucket.pipelines[0].run_broken()
            return
        averages = bucket.step(gradients(rank, 1))
        for average, count in zip(averages, COUNTS, strict=True):
            assert int((~average.isfinite()).sum()) == (count or average.numel())
        assert not bucket.pipelines[0].finite
        assert_same_bits(bucket.kept, before)

    in_threads(2, run)


def test_what_was_thrown_away_is_kept():
    def run(rank: int, transport: Transport) -> None:
        bucket = Buckets(transport, SETTING, SHAPES)
        bucket.step(gradients(rank, 0))
        before = bucket.kept
        bucket.step(gradients(rank, 1))
        note_applied(bucket.parameters, 0.0)
        assert_same_bits(bucket.kept, before)

    in_threads(2, run)


def test_where_the_host_may_not_wait_steps_have_the_same_bits():
    """As on a GPU, where only the device knows which row of residuals counts."""

    def grads(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step)
        if step == 2:
            made[0][3, 4] = torch.nan
        return made

    found = trained(2, 5, grads)
    late = lambda _: True  # noqa: E731
    with patch.object(staged_rows, "reads_late", late):
        seen = trained(2, 5, grads)
    with patch.object(staged_rows, "reads_late", late), patch.object(error_feedback, "reads_late", late):
        all_late = trained(2, 5, grads)
    for rank in range(2):
        assert_same_bits(seen[rank][:2], found[rank][:2])
        assert_same_bits(all_late[rank][:2], found[rank][:2])


def test_a_message_holds_values_places_and_what_travels_whole():
    for ranks in (1, 2, 3):
        _, _, (pipeline,) = trained(ranks, 1)[0]
        numbers = 2 * sum(COUNTS) + 16 + 16 + 16  # 7, 15 and 4 flags, at multiples of 16; 440 is none
        assert pipeline.sent_bytes == 4 * (numbers + 8) * (ranks - 1) == pipeline.wires.sent_by_stage["wire"]
        assert pipeline.wire.nbytes == 4 * (numbers + 8) * ranks


def test_places_that_a_peer_has_made_up_are_an_error_that_names_the_parameter():
    def run(rank: int, transport: Transport) -> None:
        bucket = Buckets(transport, SETTING, SHAPES)
        (pipeline,) = bucket.pipelines
        plain = pipeline.compress

        def compress(grads: Sequence[Tensor]) -> None:
            plain(grads)
            if rank:
                pipeline.wire.view(2, -1)[1].view(torch.int32)[sum(COUNTS) + 70] = 3200

        with patch.object(pipeline, "compress", compress), pytest.raises(TransportError) as caught:
            bucket.step(gradients(rank, 0))
        assert "topk: of parameter 'p3' in bucket 0 the places that rank 1 has sent" in str(caught.value)

    in_threads(2, run)


def test_a_parameter_whose_places_do_not_fit_is_refused_by_name():
    specs = [ParameterSpec("huge", 2**31, torch.float32, CPU)]
    plan = build_plan(specs, [[0]], alignment=16, shards=1)
    with pytest.raises(SettingError, match=r"'huge' has 2147483648 elements, and under 'topk:ratio=0\.001'"):
        sparse_top._divide(plan.buckets[0], TopK(0.001))
