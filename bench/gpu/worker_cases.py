"""What a worker process does: one case after the other, each with its end on disk before the next begins."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .lines import Lines

BROKEN = 3  # exit code of a worker whose CUDA context has failed: what follows in it would fail too


@dataclass(frozen=True)
class Case:
    """A thing to find out: `run` returns what is written down.

    `seconds` is what it is expected to take, kernels' first compilation included; what would not end within the
    budget is not begun. `alone` cases have a process of their own.
    """

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]
    alone: bool = False


class NotHere(Exception):
    """A case that this machine cannot run, and why."""


def why_too_late(case: Case, deadline: float) -> str:
    """Why a case is not begun now, or nothing."""
    left = max(0.0, deadline - time.time())
    return f"it takes about {case.seconds:.0f} s, and {left:.0f} s of the budget are left" * (case.seconds > left)


def work(phase: str, cases: Sequence[Case], lines: Lines, deadline: float) -> None:
    """Run cases in order; what fails is written down, and the next one runs. `deadline` is a time of `time.time`."""
    for case in cases:
        if why := why_too_late(case, deadline):
            lines.write(phase, case.name, "skipped", why=why)
            continue
        lines.write(phase, case.name, "begun")
        start = time.monotonic()
        try:
            result = case.run()
        except NotHere as reason:
            lines.write(phase, case.name, "skipped", why=str(reason))
        except Exception as error:
            where = traceback.format_exc()[-3000:]
            took = time.monotonic() - start
            lines.write(phase, case.name, "failed", why=f"{type(error).__name__}: {error}", trace=where, took=took)
        else:
            lines.write(phase, case.name, "done", result=result, took=time.monotonic() - start)
        gc.collect()
        if cuda_is_broken():
            os._exit(BROKEN)


def cuda_is_broken() -> bool:
    """Whether this process's CUDA context has failed; what was let go of the GPU's memory is free for others then."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
