"""Top-k's own kernels: what is largest by a sort, averages by hand, and the same bits from every backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels.slots import PlacesError
from fastreduce.ops import backends
from tests.support.models import assert_same_bits

BACKENDS = ("reference", "numba_cpu")
LONG = torch.bfloat16, torch.float64


def _sorted(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is taken, its places and what is left, by a stable sort of the bits of magnitudes."""
    magnitudes = values.abs().view(torch.int32)
    places = torch.sort(magnitudes, descending=True, stable=True).indices[:count].sort().values
    left = values.clone()
    left[places] = 0
    return values[places], places.int(), torch.where(left.isfinite(), left, 0.0)


def _inputs() -> dict[str, tuple[Tensor, int]]:
    torch.manual_seed(0)
    normal = torch.randn(20000)
    bad = normal[:6000].clone()
    bad[::50] = torch.nan
    bad[7::50] = -torch.inf
    return {
        "normal": (normal, 200),
        "many": (normal[:3000], 1400),
        "one": (normal[:1], 1),
        "the largest": (normal[:5000], 1),
        "of few magnitudes": (normal.round(), 300),
        "equal": (torch.full((20000,), -0.5), 100),
        "zeros": (torch.zeros(20000), 100),
        "hardly any": (torch.zeros(20000).index_fill_(0, torch.tensor([3, 19999]), 1.0), 100),
        "over all magnitudes": (normal * torch.logspace(-44, 38, 20000), 300),
        "subnormal": (normal * 1e-41, 300),
        "subnormal, and zeros": (normal * 1e-41 * (torch.arange(20000) > 17000), 300),
        "as many as are not zero": (normal * (torch.arange(20000) > 19699), 300),
        "not finite, all taken": (bad, 300),
        "not finite, some left": (bad, 60),
        "infinities alone": (torch.where(bad.isnan(), 1.0, bad), 60),
    }


@pytest.mark.parametrize("name", BACKENDS)
def test_the_largest_are_taken_and_of_equal_ones_the_first(name: str):
    take = backends.load(name).take_largest
    for about, (values, count) in _inputs().items():
        expected = _sorted(values, count)
        left, taken = values.clone(), torch.empty(count)
        places = torch.full((count,), -1, dtype=torch.int32)
        take(left, taken, places)
        assert_same_bits([taken, places, left], list(expected), about)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, *(pytest.param(d, marks=pytest.mark.long) for d in LONG)]
)
def test_averages_are_sums_in_rank_order_scaled_once(name: str, dtype: torch.dtype):
    average = backends.load(name).average_taken
    for ranks, numel, count in ((1, 7, 2), (2, 9000, 90), (3, 20000, 900), (5, 50, 20)):
        messages = _messages(ranks, numel, count)
        rows = messages.view(torch.int32)[:, count + 3 :][:, :count]
        total = np.zeros(numel, np.float32)
        for message, at in zip(messages, rows, strict=True):
            total[at.numpy()] += message[3:][:count].numpy()
        exact = torch.from_numpy(total * np.float32(1 / ranks)).to(dtype)
        for offset in (0, 1, 3):  # of an address
            made, finite = torch.empty(numel + 4, dtype=dtype)[offset:][:numel], torch.ones(1, dtype=torch.uint8)
            average(messages, 3, count + 3, count, 1 / ranks, made, finite)
            assert_same_bits(made, exact, f"{ranks} ranks, {numel} elements")
            assert finite


def _messages(ranks: int, numel: int, count: int) -> Tensor:
    """Values from 3 on, and places behind them."""
    messages = torch.randn(ranks, 2 * count + 5)
    for message in messages:
        message.view(torch.int32)[count + 3 :][:count] = torch.randperm(numel)[:count].sort().values.int()
    return messages


@pytest.mark.parametrize("name", BACKENDS)
def test_what_overflows_is_no_average_either(name: str):
    average, finite = backends.load(name).average_taken, torch.ones(1, dtype=torch.uint8)
    messages = _messages(3, 5000, 100)
    messages.view(torch.int32)[:, 103:][:, :100] = torch.arange(100).int()
    messages[:, 3] = 3e38
    messages[:, 4] = 65000.0
    made = torch.empty(5000)
    average(messages, 3, 103, 100, 1 / 3, made, finite)
    assert made[0] == pytest.approx(3e38, rel=1e-6) and made.isfinite().all() and finite
    half = torch.empty(5000, dtype=torch.float16)
    average(messages, 3, 103, 100, 1 / 3, half, finite)
    assert half[0].isinf() and half[1] == 64992 and not finite, "beyond FP16's range"
    for bad in (torch.nan, torch.inf):
        messages[2, 60], finite[0] = bad, 1
        average(messages, 3, 103, 100, 1 / 3, made, finite)
        assert not finite and (~made.isfinite()).nonzero().flatten().tolist() == [57]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("place", [-1, 5, 5000, 2**31 - 1])
def test_places_that_are_none_are_an_error(name: str, place: int):
    messages, made = _messages(3, 5000, 20), torch.zeros(5000)
    messages.view(torch.int32)[:, 23:][:, :20] = torch.arange(20).int()
    messages.view(torch.int32)[1, 23 + (0 if place < 0 else 19)] = place
    with pytest.raises(PlacesError, match=r"rank 1 .* within 5000 elements"):
        backends.load(name).average_taken(messages, 3, 23, 20, 1 / 3, made)
