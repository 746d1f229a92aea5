"""Medians of paired ratios, and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import quantile_test

Floats = NDArray[np.float64]
WORTHLESS = 0.98  # a step that takes no less of none's is not worth a setting


@dataclass(frozen=True)
class Estimate:
    """A median and its interval; NaN bounds where there are too few values for one."""

    median: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: a ratio that is a real difference."""
        return self.low > 1 or self.high < 1

    @property
    def bounds(self) -> str:
        """The interval behind a figure, as in " (0.78–0.84)"; "" where there is none."""
        return "" if np.isnan(self.low) else f" ({self.low:.2f}–{self.high:.2f})"

    def __str__(self) -> str:
        return f"{self.median:.2f}{self.bounds}"


def estimate_median(values: Sequence[float] | Floats) -> Estimate:
    """The median and its 95 % interval: order statistics, valid for any distribution, from 6 values on."""
    interval = quantile_test(values, q=1.0, p=0.5).confidence_interval(0.95)
    return Estimate(float(np.median(values)), float(interval.low), float(interval.high))


def say_ratio(ratio: Estimate, of: str = "") -> str:
    """As in 0.81× none (0.78–0.84)."""
    return f"{ratio.median:.2f}× {of}".rstrip() + ratio.bounds
