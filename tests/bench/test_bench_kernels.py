"""Kernel benchmarks: what a backend's row is held against is run by whom the row names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.kernels import operations
from bench.kernels.kernel_cases import REFERENCE, WITHOUT, Case, check, model_of
from fastreduce import ops


@pytest.mark.parametrize(
    ("operation", "kernel", "options"),
    [
        ("unflatten_with_statistics", "unflatten", {"dtype": torch.float16, "scale": 0.5}),
        ("dequantize_with_statistics", "dequantize", {}),
    ],
)
def test_the_pass_without_statistics_is_that_of_the_same_backend(
    operation: str, kernel: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Numba CUDA's was Triton's, which is chosen for CUDA tensors where nobody names another."""
    calls: Counter[str] = Counter()

    def counted(*arguments: Any, **more: Any) -> None:
        calls[kernel] += 1
        getattr(REFERENCE, kernel)(*arguments, **more)

    def chosen(*_: object) -> Any:
        raise AssertionError("a backend was chosen that no row names")

    monkeypatch.setattr(ops, "choose", chosen)
    mine = replace(REFERENCE, name="mine", **{kernel: counted})
    model = model_of("few", 128, 1000)
    made: Case = getattr(operations, operation)(model, **options)
    ways: dict[str, Callable[[], Any]] = made.ways(mine)
    assert list(ways) == [WITHOUT, "without, foreach_norm, isfinite"]
    for way in ways.values():
        calls.clear()
        way()
        assert calls[kernel] == len(model)
    check(made, mine)
