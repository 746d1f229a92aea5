"""PowerSGD's own kernels: their bits, however work is cut, and the same from every backend."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels import torch_low_rank
from fastreduce.ops import backends
from tests.support.models import assert_same_bits


def _exact(left: Tensor, right: Tensor) -> Tensor:
    """In NumPy, which rounds each operation by itself."""
    total = left[:, :1].numpy() * right[0].numpy()
    for k in range(1, len(right)):
        total = total + left[:, k : k + 1].numpy() * right[k].numpy()
    return torch.from_numpy(np.ascontiguousarray(total))


@pytest.mark.parametrize("name", ["reference", "numba_cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_each_term_is_rounded_in_order_however_rows_are_cut(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    multiply = backends.load(name).multiply
    for rows, columns, rank, start in ((37, 50, 3, 5), (1, 1, 1, 0), (64, 257, 8, 130), (3, 7, 2, 0)):
        left, right = torch.randn(rows, rank), torch.randn(rank, start + columns + 4)
        exact = _exact(left, right[:, start : start + columns])
        for at_a_time in (1, 500, 1 << 17):
            with patch.object(torch_low_rank, "AT_A_TIME", at_a_time):
                made, finite = torch.empty(rows, columns, dtype=dtype), torch.ones(1, dtype=torch.uint8)
                multiply(left, right, start, made, finite)
                assert_same_bits(made, exact.to(dtype), f"{rows} by {columns}, {at_a_time} at a time")
                assert finite
        left[-1], right[:, start] = 1e3, 1e3
        multiply(left, right, start, made, finite)
        assert bool(finite) == (dtype is not torch.float16), "beyond FP16's range"


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_averages_may_lie_at_any_address_of_an_element(offset: int):
    left, right = torch.randn(9, 2), torch.randn(2, 33)
    made = torch.empty(9 * 33 + 4)[offset:][: 9 * 33].view(9, 33)
    backends.load("numba_cpu").multiply(left, right, 0, made)
    assert_same_bits(made, _exact(left, right))


@pytest.mark.parametrize("name", ["reference", "numba_cpu"])
def test_columns_become_orthonormal_or_zero_and_span_what_they_did(name: str):
    orthonormal = backends.load(name).orthonormal
    torch.manual_seed(0)
    columns = torch.randn(4, 64, 5, dtype=torch.float64)
    columns[0] *= torch.logspace(-30, 5, 5)  # of very different sizes
    columns[1, :, 2] = 0
    columns[2, :, 3] = 2 * columns[2, :, 0] - columns[2, :, 1]  # dependent
    columns[2] = columns[2].float()
    columns[3, :, 4] = columns[3, :, 0] + 1e-5 * columns[3, :, 4]  # nearly
    columns[3, 40:] = 0  # padded
    before, made = columns.clone(), columns
    orthonormal(made)
    products = made.transpose(1, 2) @ made
    kept = torch.ones(4, 5)
    kept[1, 2] = kept[2, 3] = 0
    assert (products - torch.diag_embed(kept)).abs().max() < 1e-14
    back = made @ (made.transpose(1, 2) @ before)
    assert ((back - before).norm(dim=1) <= 1e-6 * before.norm(dim=1)).all(), "what dependent columns hold is FP32's"
    assert not made[3, 40:].any()
    before[2, 7, 1] = torch.inf
    orthonormal(before)
    assert_same_bits(before[[0, 1, 3]], made[[0, 1, 3]])
    assert before[2].isnan().all()


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (2, 2), (64, 5), (1024, 9)])
def test_every_backend_makes_the_same_columns(rows: int, rank: int):
    torch.manual_seed(0)
    columns = torch.randn(3, rows, rank).double()
    columns[1, :, -1] = columns[1, :, 0]
    columns[2, 0, 0] = torch.nan
    made = []
    for name in ("reference", "numba_cpu"):
        made.append(columns.clone())
        backends.load(name).orthonormal(made[-1])
    assert_same_bits(made[1], made[0])
    with patch.object(torch_low_rank, "GRAM", 1):
        backends.load("reference").orthonormal(columns)
    assert_same_bits(columns, made[0])
