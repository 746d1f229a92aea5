"""AutogradStack: which backwards of autograd threads are in, by their frames: one that raised ends in silence."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from ..environment.frames import outwards, walking_frames

BACKWARD, FUNCTION = _engine_run_backward.__code__, BackwardCFunction.apply.__code__


def _calls(frame: FrameType) -> list[CodeType]:
    """Of a thread, by its innermost frame: the backwards and autograd functions that it is in, innermost first."""
    return [each.f_code for each in outwards(frame) if each.f_code in (BACKWARD, FUNCTION)]


class AutogradStack:
    """Knows the last forward and the last backward, and tells whether autograd has left it, and what is around it."""

    def __init__(self) -> None:
        self._forward_in = -1, 0  # a thread, and how many backwards it was in
        # What autograd calls at the end of the last backward, and holds as long as that goes on.
        self._end: Callable[[], object] = lambda: None

    def note_forward(self) -> None:
        """A forward has ended here, whose backward is to come."""
        around = _calls(sys._getframe()).count(BACKWARD) if torch._C._current_graph_task_id() != -1 else 0
        self._forward_in = threading.get_ident(), around

    def call_at_end(self, function: Callable[[], object], left: Callable[[object], object]) -> None:
        """Let autograd call it at the end of the backward that the caller is in, the last one from now on.

        `left` is called when autograd has left that backward, whether it raised or not, and with tensors on CPUs
        before who called it goes on.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        end = partial(function)  # no frame, as a traceback keeps it, holds one that is called from C
        self._end = weakref.ref(end, left)
        engine.queue_callback(end)

    def has_left_last(self, others: int) -> bool:
        """Whether autograd has left the last backward, where the caller is in `others`.

        A GPU's thread may hold one that raised a moment longer than its caller is in it.
        """
        if self._end() is None:
            return True
        with walking_frames():
            return sum(_calls(frame).count(BACKWARD) for frame in sys._current_frames().values()) == others

    def is_within_another(self) -> bool:
        """Whether this backward was begun within another that is not around the forward too, by an autograd function.

        So does a re-entrant checkpoint of some layers, whose backward ends before that of the whole.
        """
        thread, around = self._forward_in
        return is_within_another(around if thread == threading.get_ident() else None)


def is_within_another(around: int | None = None) -> bool:
    """Whether a backward was begun within another one, by an autograd function; `around` are known to be, if any."""
    if around is None:
        # The threads of devices, which autograd has started, run what was begun elsewhere.
        around = -1 if isinstance(threading.current_thread(), threading._DummyThread) else 0
    calls = _calls(sys._getframe())
    return calls.count(BACKWARD) > around + 1 and calls[1:2] == [FUNCTION]
