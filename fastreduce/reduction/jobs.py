"""A job is a bucket's work in parts, so that what waits for other ranks holds nothing else up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

Part = Callable[[], "Part | None"]
"""One part of a job; returns the next one, if there is one.

The first one starts transfers. Where what has come is summed and sent on, the second one waits for it, and starts the
last transfers. The last one waits for the rest, and does what is to be done then.
"""


Told = Callable[["BaseException | None"], None]
"""What is to know that a job counts as ended, and what it raised: on the thread and the stream that ended it."""


def do_all(part: Part | None) -> None:
    """This part, and those that follow it."""
    while part is not None:
        part = part()


class Pending(Protocol):
    """Work under way."""

    def begun(self) -> None:
        """Wait until its collectives have been started; raises what that raised."""

    def result(self) -> None:
        """Wait for its end; raises what it raised."""

    def cancel(self) -> object:
        """Leave it out if it has not begun."""

    @property
    def done(self) -> bool:
        """Whether the host's part of it has ended, as it has where that failed."""


class Begun:
    """A job whose first part has been done; the rest is done where its result is asked for."""

    def __init__(self, rest: Part | None) -> None:
        self._rest = rest

    def begun(self) -> None:
        """It has."""

    def result(self) -> None:
        """Do the rest, once; raises what it raises."""
        rest, self._rest = self._rest, None
        do_all(rest)

    def cancel(self) -> None:
        """It is too late."""

    @property
    def done(self) -> bool:
        """Whether there is no rest, or it has been asked for."""
        return self._rest is None


DONE = Begun(None)


class StreamJob:
    """A job on threads, part by part."""

    def __init__(self, begin: Part, told: Told | None = None) -> None:
        self._next: Part | None = begin
        self._told = told
        self._begun: Future[None] = Future()
        self._ended: Future[None] = Future()

    def begin(self, then: Callable[[StreamJob], None]) -> None:
        """Do the first part, unless cancelled, and `then`, if others follow, before it is known to have begun."""
        if not self._begun.set_running_or_notify_cancel():
            self._next = None
            self._ended.cancel()
            return
        try:
            follows = self._advance()
        except BaseException as error:
            self._begun.set_exception(error)
            self._end(error)
            return
        if follows:
            then(self)
        self._begun.set_result(None)
        if not follows:
            self._end(None)

    def go_on(self) -> bool:
        """Do the next part; returns whether another follows."""
        try:
            follows = self._advance()
        except BaseException as error:
            self._end(error)
            return False
        if not follows:
            self._end(None)
        return follows

    def finish(self) -> None:
        """Do all parts that are left."""
        while self.go_on():
            pass

    def _advance(self) -> bool:
        part, self._next = self._next, None  # what has ended keeps no bucket, and so no model, alive
        assert part is not None
        self._next = part()
        return self._next is not None

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
        told, self._told = self._told, None
        if told is not None:
            told(error)

    @property
    def done(self) -> bool:
        """Whether all parts have ended."""
        return self._ended.done()

    def begun(self) -> None:
        """Wait until the first part has ended; raises what it raised."""
        self._begun.result()

    def result(self) -> None:
        """Wait until all parts have ended; raises what they raised."""
        self._ended.result()

    def cancel(self) -> None:
        """Leave it out if it has not begun."""
        self._begun.cancel()


class Failed:
    """Work that has raised: in its first part, or in a later one, where it `has_begun`."""

    def __init__(self, error: BaseException, has_begun: bool = False) -> None:
        self.error, self._has_begun = error, has_begun

    def begun(self) -> None:
        """Raise what its first part raised."""
        if not self._has_begun:
            raise self.error

    def result(self) -> None:
        """Raise what it raised."""
        raise self.error

    def cancel(self) -> None:
        """It is too late."""

    @property
    def done(self) -> bool:
        """It has failed."""
        return True


def at_once(begin: Part, told: Told | None = None) -> Pending:
    """Do all parts; what they raise comes with the result, and that others may begin behind the first one stays so."""
    ended = _at_once(begin)
    if told is not None:
        told(ended.error if isinstance(ended, Failed) else None)
    return ended


def _at_once(begin: Part) -> Pending:
    try:
        rest = begin()
    except BaseException as error:
        return Failed(error)
    try:
        do_all(rest)
    except BaseException as error:
        return Failed(error, has_begun=True)
    return DONE
