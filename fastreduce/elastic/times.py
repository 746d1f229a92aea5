"""Times: all that follows from the one knob, `timeout=` of `fastreduce.elastic.join`."""

from __future__ import annotations

from typing import NamedTuple

TIMEOUT = 30.0
START_SECONDS = 600.0  # for the first to come to the store: some import and compile for long
LOOK_SECONDS = 0.1
PARTS = 10
MEETING = 2  # those who are met may themselves wait for the lost for one timeout


class Times(NamedTuple):
    """In seconds.

    Args:
        timeout: what the user gives: how long a collective, a connection or an answer of the store may take, and how
            long a process may go without a beat.
    """

    timeout: float

    @property
    def look(self) -> float:
        """Between two looks for processes that have ended on the same host, left, or said that a collective failed."""
        return min(LOOK_SECONDS, self.beat)

    @property
    def beat(self) -> float:
        """Between two beats of a process."""
        return self.timeout / PARTS

    @property
    def meeting(self) -> float:
        """For the members of a generation that has ended to come to a meeting."""
        return MEETING * self.timeout

    @property
    def left_out(self) -> float:
        """After which one is left out that beats, and comes neither to a collective nor to the meeting."""
        return self.timeout + self.meeting

    def told(self) -> dict[str, str]:
        """What they are, by name, for people."""
        return {
            "timeout": f"{self.timeout:g} s: the one knob, fastreduce.elastic.join(ddp, timeout={self.timeout:g})",
            "a process that ended": f"{self.look:g} s until it is lost, on the same host, or where it has left",
            "a beat": f"every {self.beat:g} s (timeout / {PARTS})",
            "no beat": f"{self.timeout:g} s (timeout) until it is lost: on another host, or stopped",
            "a collective": f"{self.timeout:g} s (timeout), and so for connecting and for an answer of the store",
            "no answer": f"{self.left_out:g} s ({1 + MEETING} × timeout) until it is left out, if it beats",
            "the beginning": f"{START_SECONDS:g} s, always, for the first ones to come",
        }
