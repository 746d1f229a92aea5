"""Are two trainings equal? Two one-sided tests (TOST), on differences that are paired by seed.

"No significant difference" is no answer: few seeds find none. Here equality is what has to be shown. The mean
difference is below the margin in magnitude, with 5 % risk of error, where its 90 % interval by Student's t lies inside
the margin (Schuirmann, J. Pharmacokin. Biopharm. 15, 1987); it is beyond the margin where that interval lies outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

RISK = 0.05
POWER = 0.8
MOST_SEEDS = 1000

Verdict = Literal["equal", "higher", "lower", "undecided"]


@dataclass(frozen=True)
class Equivalence:
    """A mean difference as a fraction of the baseline, its 90 % interval, and what follows.

    `seeds` is how many would decide, with a power of 80 % where the difference and its scatter are those seen; None
    where it is decided, or where seeds show no scatter. `of_zero`: the baseline is 0, of which there is no fraction.
    """

    difference: float
    low: float
    high: float
    verdict: Verdict
    seeds: int | None = None
    of_zero: bool = False


def compare(ours: Sequence[float], base: Sequence[float], margin: float) -> Equivalence:
    """Test the values of seeds against the baseline's of the same seeds.

    Args:
        ours: a value for each seed.
        base: the baseline's.
        margin: a fraction of the magnitude of the baseline's mean.
    """
    scale = abs(float(np.mean(base)))
    if list(ours) == list(base) and np.all(np.isfinite(base)):
        return Equivalence(0.0, 0.0, 0.0, "equal")
    if np.all(np.isfinite(base)) and not np.all(np.isfinite(ours)):
        return Equivalence(math.inf, math.inf, math.inf, "higher")
    if not scale:
        return Equivalence(math.nan, math.nan, math.nan, "undecided", of_zero=True)
    differences = (np.asarray(ours) - np.asarray(base)) / scale
    n, mean = len(differences), float(np.mean(differences))
    if n < 2 or not math.isfinite(mean):
        return Equivalence(mean, math.nan, math.nan, "undecided")
    scatter = float(np.std(differences, ddof=1))
    half = float(stdtrit(n - 1, 1 - RISK)) * scatter / math.sqrt(n)
    low, high = mean - half, mean + half
    if -margin < low and high < margin:
        return Equivalence(mean, low, high, "equal")
    if n < 4 and scatter <= 1e-9 * abs(mean):  # as of accuracies on a few samples: that tells nothing of chance
        return Equivalence(mean, math.nan, math.nan, "undecided")
    if low > margin:
        return Equivalence(mean, low, high, "higher")
    if high < -margin:
        return Equivalence(mean, low, high, "lower")
    return Equivalence(mean, low, high, "undecided", seeds_needed(mean, scatter, margin))


def seeds_needed(difference: float, scatter: float, margin: float) -> int:
    """How many seeds show that the difference is within the margin, or beyond it, wherever it seems to be.

    n with (t(1 - risk) + t(power)) · scatter / √n ≤ distance to the margin, which for equality has both sides
    (Chow, Shao, Wang and Lokhnygina, Sample Size Calculations in Clinical Research, 3.1). `MOST_SEEDS` + 1: more.
    """
    distance = abs(margin - abs(difference))
    power = 1 - (1 - POWER) / 2 if abs(difference) < margin else POWER
    for n in range(2, MOST_SEEDS + 1):
        quantiles = float(stdtrit(n - 1, 1 - RISK) + stdtrit(n - 1, power))
        if quantiles * scatter <= distance * math.sqrt(n):
            return n
    return MOST_SEEDS + 1
