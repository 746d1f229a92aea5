"""PowerSGD by itself: products, bases, and a bucket's way, against the method written out in FP64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fastreduce import PowerSGD, note_applied
from fastreduce.reduction.residuals import error_feedback, rows, staged_rows
from fastreduce.reduction.residuals.bucket_residuals import SlotResiduals
from fastreduce.reduction.wires.low_rank import LowRank
from fastreduce.transports import LocalTransport, Transport
from tests.support import bucket_pipelines, tolerances
from tests.support.bucket_pipelines import Buckets
from tests.support.models import assert_same_bits
from tests.support.thread_ranks import in_threads, on_nodes

SHAPES = ((48, 40), (7,), (3, 5), (30, 64))  # two matrices, and what travels whole


def gradients(rank: int, step: int) -> list[Tensor]:
    """What ranks have in common, of rank 4, with a little noise of each one's own."""
    made = []
    for i, shape in enumerate(SHAPES):
        common = torch.Generator().manual_seed(i)
        noise = torch.Generator().manual_seed(1000 * step + 10 * rank + i + 100)
        size = (shape[0], 4), (4, shape[-1])
        whole = torch.randn(size[0], generator=common) @ torch.randn(size[1], generator=common)
        whole = whole if len(shape) == 2 else whole[:, 0]
        made.append(whole + 0.1 * torch.randn(shape, generator=noise))
    return made


def trained(
    ranks: int | Sequence[Transport],
    setting: PowerSGD,
    steps: int,
    grads: Any = gradients,
    shapes: Any = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    return bucket_pipelines.trained(ranks, setting, shapes, steps, grads, dtype=dtype)


# Steps


def _paper(ranks: int, steps: int, starts: list[Tensor]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Averages of each step and residuals' means after it, in FP64, with another way to orthonormal columns."""
    rights = [torch.zeros_like(start.double()) for start in starts]
    debts = [[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(ranks)]
    averages, kept = [], []
    for step in range(steps):
        found = []
        for i in range(len(SHAPES)):
            made = [gradients(r, step)[i].double() + debts[r][i] for r in range(ranks)]
            mean = sum(made) / ranks
            position = {0: 0, 3: 1}.get(i)
            if position is None:
                found.append(mean)
                continue
            begin = starts[position].double()
            if rights[position].any():
                begin = begin + _same_signs(torch.linalg.qr(rights[position])[0], rights[position])
            basis = torch.linalg.qr(mean @ begin)[0]
            rights[position] = mean.T @ _same_signs(basis, mean @ begin)
            found.append(basis @ basis.T @ mean)
            for r in range(ranks):
                debts[r][i] = made[r] - found[i]  # the method's own: with the same mean as ours
        averages.append(found)
        kept.append([sum(debts[r][i] for r in range(ranks)) / ranks for i in range(len(SHAPES))])
    return averages, kept


def _same_signs(basis: Tensor, columns: Tensor) -> Tensor:
    """As Cholesky's factor has it: with a positive diagonal."""
    return basis * torch.linalg.qr(columns)[1].diagonal().sign()


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_those_of_the_method_and_the_same_bits_on_every_rank(ranks: int):
    setting = PowerSGD(rank=4)
    first, *others = trained(ranks, setting, 4)
    made: Any = first[2][0].wires
    starts = [made._first_ones[matrix.right] for matrix in made._matrices]
    assert [matrix.position for matrix in made._matrices] == [0, 3]
    averages, kept = _paper(ranks, 4, starts)
    means = [[sum(of[1][step][i].double() for of in (first, *others)) / ranks for i in range(4)] for step in range(4)]
    for step in range(4):
        for i in range(4):
            size = max(float(gradients(0, 0)[i].abs().max()), float(kept[step][i].abs().max()))
            assert (first[0][step][i] - averages[step][i]).abs().max() <= tolerances.LOW_RANK * size, (step, i)
            assert (means[step][i] - kept[step][i]).abs().max() <= tolerances.LOW_RANK * size, (step, i)
    assert any(step[0].any() for step in kept)
    again = trained(ranks, setting, 4)
    for other in (*others, *again):
        assert_same_bits(other[0], first[0])
    assert_same_bits([of[1] for of in again], [first[1], *(of[1] for of in others)])


def test_what_travels_whole_has_the_bits_of_none():
    averages = trained(2, PowerSGD(), 2)[0][0]
    for step in range(2):
        for i in (1, 2):
            total = gradients(0, step)[i] * 0.5 + gradients(1, step)[i] * 0.5
            assert_same_bits(averages[step][i], total)


def test_on_several_hosts_all_ranks_reduce_as_equals():
    """A column of a flat is no matrix."""
    expected, found = trained(3, PowerSGD(), 3), trained(on_nodes((2, 1)), PowerSGD(), 3)
    for rank in range(3):
        assert_same_bits(found[rank][:2], expected[rank][:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype: torch.dtype):
    """Of rank 4, they are sent whole, but for FP32's and their own rounding."""

    def grads(rank: int, step: int) -> list[Tensor]:
        return _exact(rank, dtype)

    (averages, _, (pipeline,)), _ = trained(2, PowerSGD(), 2, grads, dtype=dtype)
    assert pipeline.wire.dtype is torch.float32
    for i in range(4):
        exact = (grads(0, 0)[i].double() + grads(1, 0)[i].double()) / 2
        share = tolerances.LOW_RANK + 2 * torch.finfo(dtype).eps
        assert (averages[0][i].double() - exact).abs().max() <= share * exact.abs().max(), i
        assert averages[0][i].dtype is dtype


def _exact(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Of rank 2 on each rank: whole numbers, which every dtype holds."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for shape in SHAPES:
        left = torch.randint(-3, 4, (shape[0], 2), generator=generator).double()
        right = torch.randint(-3, 4, (2, shape[-1]), generator=generator).double()
        made.append((left @ right if len(shape) == 2 else left[:, 0]).to(dtype))
    return made


def test_zeros_and_matrices_of_lower_rank_are_exact_and_leave_a_start():
    def grads(rank: int, step: int) -> list[Tensor]:
        if step < 2:
            return [torch.zeros(shape) for shape in SHAPES]
        return _exact(rank if step > 2 else 0, torch.float32)

    (averages, _, _), _ = trained(2, PowerSGD(), 5, grads)
    for step in range(2):
        assert not any(average.any() for average in averages[step])
    for step in range(2, 5):
        for i in range(4):
            exact = (grads(0, step)[i] + grads(1, step)[i]) / 2
            assert (averages[step][i] - exact).abs().max() <= tolerances.LOW_RANK * exact.abs().max(), (step, i)


def test_what_was_kept_of_what_travels_whole_is_sent_once():
    """By a setting that ran before this one; where the step's averages are thrown away, it stays."""
    kept = torch.arange(7.0)

    def run(rank: int, transport: Transport) -> list[Tensor]:
        bucket, found = Buckets(transport, PowerSGD(), SHAPES), []
        if rank == 0:
            bucket.pipelines[0].put(1, SlotResiduals(kept, None, 1.0))
        for step in range(4):
            found.append(bucket.step(gradients(rank, step))[1])
            if step == 0:
                note_applied(bucket.parameters, 0.0)
            found.append(bucket.kept[1])
        return found

    first, second = in_threads(2, run)
    for step in range(4):
        exact = gradients(0, step)[1] * 0.5 + gradients(1, step)[1] * 0.5
        for found in (first, second):
            owed = kept * 0.5 if step < 2 else 0.0
            assert (found[2 * step] - exact - owed).abs().max() <= tolerances.LOW_RANK
        assert_same_bits(first[2 * step + 1], kept if step == 0 else torch.zeros(7), f"kept, step {step}")
        assert not second[2 * step + 1].any()


def test_nothing_overflows_that_is_no_overflow_as_an_average():
    def grads(rank: int, step: int) -> list[Tensor]:
        made = [torch.zeros(shape) for shape in SHAPES]
        made[0][3, 4] = made[1][2] = 3e38
        return made

    (averages, _, (pipeline,)), _ = trained(2, PowerSGD(), 3, grads)
    assert pipeline.finite
    for average in averages:
        assert float(average[0][3, 4]) == pytest.approx(3e38, rel=1e-5) and average[1][2] == torch.tensor(3e38)


@pytest.mark.parametrize("where", [0, 1], ids=["matrix", "small"])
def test_a_step_that_is_not_finite_leaves_residuals_and_factors_alone(where: int):
    def grads(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step if step < 2 else step - 1)
        if step == 2 and rank == 1:
            made = gradients(rank, 7)
            made[where].view(-1)[5] = torch.inf
        return made

    found, without = trained(2, PowerSGD(rank=1), 4, grads), trained(2, PowerSGD(rank=1), 3)
    for rank in range(2):
        averages, kept, (pipeline,) = found[rank]
        assert not averages[2][where].isfinite().any() or where == 1
        assert not averages[2][where].view(-1)[5].isfinite() and bool(pipeline.finite)
        assert_same_bits(kept[2], kept[1])
        assert_same_bits(kept[3], without[rank][1][2])
        assert all(each.isfinite().all() for each in (*kept[3], *averages[3]))
    assert_same_bits(found[0][0][3], without[0][0][2], "the warm start too was that of the step before")


def test_a_rank_whose_backward_raised_leaves_no_half_average():
    def run(rank: int, transport: Transport) -> None:
        bucket = Buckets(transport, PowerSGD(), SHAPES)
        bucket.step(gradients(rank, 0))
        before = bucket.kept
        if rank:
            bucket.pipelines[0].run_broken()
            return
        assert not any(average.isfinite().any() for average in bucket.step(gradients(rank, 1)))
        assert_same_bits(bucket.kept, before)

    in_threads(2, run)


def test_where_the_host_may_not_wait_steps_have_the_same_bits():
    """As on a GPU, where only the device knows which row of residuals counts."""

    def grads(rank: int, step: int) -> list[Tensor]:
        made = gradients(rank, step)
        if step == 2:
            made[0][3, 4] = torch.nan
        return made

    found = trained(2, PowerSGD(rank=2), 5, grads)
    with patch.object(staged_rows, "reads_late", lambda _: True):
        late = trained(2, PowerSGD(rank=2), 5, grads)
    for rank in range(2):
        assert_same_bits(late[rank][:2], found[rank][:2])
    with (
        patch.object(staged_rows, "reads_late", lambda _: True),
        patch.object(error_feedback, "reads_late", lambda _: True),
        patch.object(rows, "reads_late", lambda _: True),
    ):
        late = trained(2, PowerSGD(rank=2), 5, grads)
    for rank in range(2):
        for step in range(5):
            for one, other in zip(late[rank][1][step], found[rank][1][step], strict=True):
                assert (one - other).abs().max() <= tolerances.LOW_RANK


def test_factors_of_a_lower_rank_take_the_place_of_all():
    wires = Buckets(LocalTransport(), PowerSGD(rank=2), ((12, 10),)).pipelines[0].wires
    assert isinstance(wires, LowRank)
    for rank in (2, 1):
        wires.go_on(0, torch.ones(rank, 10))
    found = wires.factor(0)
    assert found is not None and found.tolist() == [[1.0] * 10, [0.0] * 10]


# What is known to go wrong


def test_what_ranks_differ_by_does_not_pile_up():
    """With the average in place of each rank's own factors, what is kept would grow by 1 with every step."""

    def grads(rank: int, step: int) -> list[Tensor]:
        noise = torch.randn(12, 10, generator=torch.Generator().manual_seed(2 * step + rank))
        return [noise + (-1.0) ** rank * torch.ones(12, 10)]

    found = trained(2, PowerSGD(rank=2, min_compression_rate=1), 200, grads, shapes=((12, 10),))
    for rank in range(2):
        assert found[rank][1][-1][0].abs().max() < 60, "as far as no basis has come by"


@pytest.mark.long
def test_a_direction_that_factors_have_lost_comes_back():
    """The known counterexample: with a warm start alone, what the first gradients lacked is never sent.

    At first there is one direction, which the factors then hold exactly; a hundredth of it in another one comes later.
    """
    small, steps = 0.01, 250

    def grads(step: int) -> list[Tensor]:
        return [torch.diag(torch.tensor([1.0, small if step else 0.0] + [0.0] * 10))]

    def owed(stirred: bool) -> list[float]:
        def train(rank: int, transport: Transport) -> list[float]:
            bucket, found = Buckets(transport, PowerSGD(rank=1), ((12, 12),)), []
            for step in range(steps):
                bucket.step(grads(step))
                found.append(float(bucket.kept[0][1, 1]))
                if not stirred and isinstance(low_rank := bucket.pipelines[0].wires, LowRank):
                    low_rank._first_ones.zero_()
            return found

        return in_threads(2, train)[0]

    assert owed(False)[-1] == pytest.approx((steps - 1) * small, rel=1e-3), "nothing of it was ever applied"
    assert 0.5 < max(owed(True)) <= 2, "sent where what is owed of it is as large as a step of the other one, or two"
