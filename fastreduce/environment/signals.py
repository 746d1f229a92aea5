"""Which errors come from signals: their handlers run on the main thread between any two instructions."""

from __future__ import annotations

import signal
import traceback
from functools import partial
from typing import Any


def is_of_signal(error: BaseException) -> bool:
    """Whether it is Ctrl-C, or what the handler of another signal raised."""
    handlers = {_code_of(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
    frames = traceback.walk_tb(error.__traceback__)
    return not isinstance(error, Exception) or any(frame.f_code in handlers for frame, _ in frames)


def _code_of(handler: Any) -> Any:
    """What runs when it is called: of a function, of what a `partial` calls, or of an object's `__call__`."""
    while isinstance(handler, partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
