"""Generations: who trains together from one loss or arrival to the next, and what they agreed on when they met."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import MismatchError, TransportError
from ..transports.messages import decode, numbers, of_types
from ..transports.store_client import StoreClient
from .presence import Presence

logger = logging.getLogger(__name__)

TELL_SECONDS = 30.0  # until those that wait for the first others say so
PAUSE_SECONDS = 0.005  # between two looks at a meeting
MOST = 1 << 40


class Stage(IntEnum):
    """Where a process stands when it comes to a meeting."""

    NEW = 0  # it has no state yet
    BETWEEN = 1  # two steps
    UNDER_WAY = 2  # it has local gradients, and not all averages
    WHOLE = 3  # it has all averages, and does not know whether all others have
    COUNTED = 4  # it has learned that they count, and applies them


class Note(NamedTuple):
    """What a process brings to a meeting: its stage, and how many steps it has committed, or others, if it is new."""

    step: int
    stage: Stage


class Generation(NamedTuple):
    """Who trains together.

    Args:
        number: counted from 1.
        members: processes, in the order of their ranks.
        notes: of the members that came from the generation before.
        out: all processes that were members once, and are no more.
        digest: of their model and settings.
    """

    number: int
    members: tuple[int, ...]
    notes: Mapping[int, Note]
    out: tuple[int, ...]
    digest: str

    @property
    def newcomers(self) -> list[int]:
        """Members that are to get the state."""
        return [member for member in self.members if self.note(member).stage is Stage.NEW]

    @property
    def source(self) -> int | None:
        """The member whose state they get; None where nobody has trained, and nobody can know."""
        old = [member for member in self.members if self.note(member).stage is not Stage.NEW]
        return old[0] if old else None

    def note(self, member: int) -> Note:
        """What a member brought."""
        return self.notes.get(member, Note(0, Stage.NEW))

    def counts(self, step: int) -> bool:
        """Whether averages of a step count that some members have, who have committed so many.

        They do where one member has committed it, since then all members had them all, or where all members that are in
        this step have them all.
        """
        notes = [note for note in self.notes.values() if note.stage is not Stage.NEW]
        return any(note.step > step for note in notes) or all(
            note.stage is Stage.WHOLE for note in notes if note.step == step
        )

    def encoded(self) -> str:
        """As `decoded` takes it."""
        notes = {str(member): [note.step, int(note.stage)] for member, note in self.notes.items()}
        return json.dumps([list(self.members), notes, list(self.out), self.digest])


def decoded(told: str, number: int) -> Generation:
    """What another process has written.

    Raises:
        TransportError: if it is no generation.
    """

    def check(value: Any) -> Generation:
        members, notes, out, digest = of_types(value, list, dict, list, str)
        by_member = {int(member): _note(note) for member, note in notes.items()}
        return Generation(number, tuple(numbers(members, MOST)), by_member, tuple(numbers(out, MOST)), digest)

    return decode(told, 0, check)


def _note(value: Any) -> Note:
    step, stage = of_types(value, int, int)
    return Note(step, Stage(stage))


class Meetings:
    """Where the members of a generation that has ended agree on the next one.

    1. Each leaves a note, and waits until all others have, or are gone, or twice the timeout has passed.
    2. Whoever finds that proposes the next generation: those that came, and, where all stand between the same two
       steps, those that have knocked. The store takes the first proposal, and all go by it.

    Args:
        presence: of this process.
    """

    def __init__(self, presence: Presence) -> None:
        self._presence, self._store = presence, presence.store

    def first(self, least: int, digest: str, seconds: float) -> Generation:
        """The generation that this process becomes a member of, with `least` members if it is the first.

        Raises:
            TransportError: if everybody who has trained is gone, or so many do not come.
            MismatchError: if its model or settings are not those of the members.
        """
        start, last, said = time.monotonic(), 0, False
        while True:
            last = self._latest(last)
            if last:
                found = self._read(last)
                assert found is not None
                if self._presence.id in found.members:
                    return found
                if found.digest != digest:
                    raise MismatchError(
                        f"process {self._presence.id} has another model, other settings, or another version of "
                        f"fastreduce, than the {len(found.members)} that train: build the same model with the same "
                        "settings, under the same version"
                    )
                gone = self._presence.gone(found.members)
                if len(gone) == len(found.members) and self._latest(last) == last:
                    raise TransportError(
                        f"process {self._presence.id} finds nobody whose state it could take: all {len(gone)} that "
                        "trained are gone. Start the job again, from a checkpoint; with a new store, or under another "
                        "TORCHELASTIC_RUN_ID, since this one remembers them"
                    )
            else:
                came = self._presence.knocked()
                gone = self._presence.gone(came)
                here = [number for number in came if number not in gone]
                if len(here) >= least:
                    self._propose(Generation(1, self._in_order(here), {}, (), digest))
                elif time.monotonic() - start > seconds:
                    ended = f"; {len(gone)} more came and ended" if gone else ""
                    raise TransportError(
                        f"{len(here)} of {least} processes came to the store within {seconds:g} s (WORLD_SIZE, or "
                        f"least= of fastreduce.elastic.join){ended}"
                    )
                elif not said and time.monotonic() - start > TELL_SECONDS:
                    said = True
                    if self._presence.id == min(here):  # one of them
                        logger.warning(
                            "%d of %d processes are here, %d came and ended; waiting for the others, for %g s in all",
                            len(here),
                            least,
                            len(gone),
                            seconds,
                        )
            time.sleep(10 * PAUSE_SECONDS)

    def next(self, before: Generation, note: Note) -> Generation:
        """The generation after `before`, of which this process is a member; each calls it when that one has ended.

        Raises:
            TransportError: if the others have gone on without this process, or the store does not answer.
        """
        number, start = before.number + 1, time.monotonic()
        here, me = self._store.at(f"generation {number}"), self._presence.id
        here.set(f"note of {me}", json.dumps([note.step, int(note.stage)]))
        while (found := self._read(number)) is None:
            missing = [before.members[i] for i in here.absent([f"note of {member}" for member in before.members])]
            gone = self._presence.gone(before.members)
            late = time.monotonic() - start > self._presence.times.meeting
            if late or set(missing) <= set(gone):
                self._propose(self._successor(before, here, {*missing, *gone}))
            else:
                time.sleep(PAUSE_SECONDS)
        self._note_latest(number)
        self._check_in(found)
        return found

    def check_after(self, before: Generation) -> None:
        """Raise if the others have gone on from `before` without this process; without the store nobody has.

        Raises:
            TransportError: as `next`.
        """
        try:
            found = self._read(before.number + 1)
        except TransportError:
            return
        if found is not None:
            self._check_in(found)

    def _check_in(self, found: Generation) -> None:
        me = self._presence.id
        if me not in found.members:
            raise TransportError(
                f"process {me} did not answer for {self._presence.times.timeout:g} s, and "
                f"{len(found.members)} other(s) have gone on without it: start it again, and it gets their state"
            )

    def _successor(self, before: Generation, here: StoreClient, lost: set[int]) -> Generation:
        stay = [member for member in before.members if member not in lost]
        told = here.read_all([f"note of {member}" for member in stay])
        notes = {member: decode(text, member, _note) for member, text in zip(stay, told, strict=True)}
        old = [note for note in notes.values() if note.stage is not Stage.NEW]
        out = (*before.out, *(member for member in before.members if member in lost))
        new: list[int] = []
        if len(set(old)) == 1 and old[0].stage is Stage.BETWEEN:
            new = self._presence.outside({*before.members, *before.out})
        return Generation(before.number + 1, self._in_order([*stay, *new]), notes, out, before.digest)

    def _in_order(self, members: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(members, key=lambda member: (self._presence.process(member).place, member)))

    def _propose(self, generation: Generation) -> None:
        self._store.at(f"generation {generation.number}").set_first("members", generation.encoded())
        self._note_latest(generation.number)

    def _read(self, number: int) -> Generation | None:
        told = self._store.at(f"generation {number}").read("members")
        return None if told is None else decoded(told, number)

    def _note_latest(self, number: int) -> None:
        self._store.set("latest", str(number))  # a slower process may write an earlier one over it

    def _latest(self, known: int) -> int:
        """The number of the last generation; 0 if there is none."""
        number = max(known, int(self._store.read("latest") or 0))
        while self._store.at(f"generation {number + 1}").has("members"):
            number += 1
        return number
