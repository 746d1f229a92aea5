"""The loss curves that are drawn of trainings: means over stretches, since single batches are too noisy to compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STRETCHES = 40


def means_over_stretches(
    losses: Sequence[Sequence[float]], least: int = STRETCHES
) -> tuple[list[NDArray[np.intp]], NDArray[np.float64]]:
    """The steps of the shortest training in stretches, and the mean of each training's losses over each.

    Stretches have nearly one length, so that noise is alike all along; there are `least` of them or more, but no more
    than steps. Means are `[trainings, stretches]`.
    """
    steps = min(map(len, losses))
    parts = np.array_split(np.arange(steps), steps // max(1, steps // least))
    return parts, np.array([[np.take(each, part).mean() for part in parts] for each in losses])
