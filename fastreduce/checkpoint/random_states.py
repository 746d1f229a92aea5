"""The states of random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .snapshot_file import State


def take() -> State:
    """Those of Python, NumPy, torch and, where it is used, this rank's CUDA device."""
    numpy: Any = np.random.get_state()
    name, keys, *rest = numpy
    states: State = {"python": random.getstate(), "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_back(states: State) -> None:
    """Go on from what `take` gave."""
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
