"""Our environment variables, each looked at by the code that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..environment import stacks
from ..environment.variables import folder_asked_for, switch
from ..ops.backends import kernels_asked_for
from ..policy import setting_asked_for
from ..run import replacement
from ..transports import transport_asked_for
from .launch.nodes import limit_seconds

CHECKS: Mapping[str, Callable[[], object]] = {
    "FASTREDUCE_COMPRESSION": setting_asked_for,
    "FASTREDUCE_COUNTERS": partial(folder_asked_for, "FASTREDUCE_COUNTERS"),
    "FASTREDUCE_DEBUG": partial(switch, "FASTREDUCE_DEBUG"),
    "FASTREDUCE_DUMP_SIGNAL": stacks.signal_asked_for,
    "FASTREDUCE_KERNELS": kernels_asked_for,
    "FASTREDUCE_NODE_SECONDS": limit_seconds,
    "FASTREDUCE_SEED": replacement.seed,
    "FASTREDUCE_TRACE": partial(folder_asked_for, "FASTREDUCE_TRACE"),
    "FASTREDUCE_TRANSPORT": transport_asked_for,
}
"""By variable, what raises a ValueError that says what is allowed; FASTREDUCE_HOST is any name."""


def check_variables() -> None:
    """Look at all of them, before anything is started that would fail by one.

    Raises:
        ValueError: naming the variable, what it says, and what is allowed.
    """
    for check in CHECKS.values():
        check()
