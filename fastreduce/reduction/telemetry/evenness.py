"""Do all ranks run the same program? What each does between two comparisons, side by side with the others.

A rank that leaves a backward out, or runs one in `no_sync` alone, averages with another step of the others from then
on, and a parameter that it has frozen counts as zeros: all goes on, and trains wrongly.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...errors import listed
from ...transports import Transport
from ...transports.messages import checked, numbers
from .flight_recorder import Counts, FlightRecorder

NAMED = 3  # parameters
WHAT = ("forward(s) to be averaged", "forward(s) in no_sync", "optimizer step(s)")


class Did(NamedTuple):
    """What one rank brings: what it did since the last comparison, and a number that tells which parameters train."""

    averages: int
    forwards: int
    unreduced: int
    optimizer_steps: int
    trained: int


DID = len(Did._fields)


class Evenness:
    """Compares what ranks have done.

    Args:
        recorder: of this rank.
        names: of the parameters that are averaged.
        parameters: these.
    """

    def __init__(self, recorder: FlightRecorder, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self._recorder, self._names, self._parameters = recorder, names, parameters
        self._before = recorder.counts
        self._told: list[int] = []  # of each rank, which parameters train, when that was told last

    def did(self) -> Did:
        """What this rank did since the last call."""
        now, before = self._recorder.counts, self._before
        self._before = now
        trained = bytes(parameter.requires_grad for parameter in self._parameters)
        return Did(*Counts(*(a - b for a, b in zip(now, before, strict=True))), zlib.crc32(trained))

    def compare(self, each: Sequence[Did], transport: Transport) -> list[str]:
        """In what ranks differ, as sentences, from what each of them did; every rank calls it at once.

        Raises:
            TransportError: if ranks have to tell each other more, and cannot.
        """
        notes = [] if len({did.averages for did in each}) > 1 else _uneven(each)  # some have joined
        trained = [did.trained for did in each]
        if len(set(trained)) > 1 and trained != self._told:
            count = len(self._names)
            mine = [i for i, parameter in enumerate(self._parameters) if not parameter.requires_grad]
            frozen = checked(transport.exchange(mine), lambda told: numbers(told, count), "frozen parameters")
            notes += [note for rank in range(len(each)) if (note := self._frozen(rank, frozen))]
        self._told = trained
        return notes

    def _frozen(self, rank: int, frozen: Sequence[Sequence[int]]) -> str:
        """What is frozen on a rank and on hardly any other."""
        count = {i: sum(i in each for each in frozen) for i in frozen[rank]}
        here = [repr(self._names[i]) for i, ranks in count.items() if 2 * ranks <= len(frozen)]
        what = f"rank {rank} has frozen {listed(here, NAMED)}, which other ranks train"
        return f"{what}: it counts as zeros in their averages" if here else ""


def _uneven(each: Sequence[Did]) -> list[str]:
    """A sentence for each rank that did something oftener, or less often, than others: of two ranks, for both."""
    notes = []
    for rank, did in enumerate(each):
        others = [other for i, other in enumerate(each) if i != rank]
        usual = [statistics.mode(other[1 + i] for other in others) for i in range(len(WHAT))]
        alike = [sum(other[1 + i] == did[1 + i] for other in others) for i in range(len(WHAT))]
        apart = [i for i in range(len(WHAT)) if did[1 + i] != usual[i] and 2 * alike[i] < len(others)]
        if apart:
            told = ", ".join(f"{did[1 + i]} {WHAT[i]} (others {usual[i]})" for i in apart)
            notes.append(
                f"rank {rank} is out of step: in the last {did.averages} averages it ran {told}: {_why(apart)}"
            )
    return notes


def _why(apart: Sequence[int]) -> str:
    if 1 in apart:
        return "not all were in no_sync at once"
    if 0 in apart:
        return "a forward had no backward, or evaluated without torch.no_grad()"
    return "not all run as many backwards for each of their optimizer's steps"
