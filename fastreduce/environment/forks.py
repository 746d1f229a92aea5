"""What belongs to the process that made it: a fork has neither its threads nor its place among the ranks."""

from __future__ import annotations

import os

from ..errors import TransportError


class Owner:
    """The process that makes one."""

    def __init__(self) -> None:
        self.process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is it, and no fork."""
        return self.process == os.getpid()

    def check(self, what: str) -> None:
        """Raise in a fork.

        Raises:
            TransportError: saying what was called there.
        """
        if not self.is_here:
            raise TransportError(
                f"{what} in process {os.getpid()}, a fork of process {self.process}, which alone is a rank: reduce "
                "there, or in processes that begin by themselves (spawn) and join a process group of their own."
            )
