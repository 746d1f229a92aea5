"""Membership: one process's place among those who train together, and what it does when one is lost or comes."""

from __future__ import annotations

import hashlib
import logging
import statistics
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from ..ddp import DistributedDataParallel
from ..ddp.elastic_reducer import ElasticReducer
from ..environment.exits import Exit, each_at_exit
from ..errors import BackendUnavailableError, MismatchError, ReducerError, SettingError, TransportError
from ..reduction.agreement import check_agreement
from ..reduction.arrivals import weakly
from ..reduction.telemetry.flight_record import Phase
from ..transports import GlooTransport, LocalTransport, NcclTransport, ShmTransport, Transport
from ..transports.connections import abort_beside
from ..transports.messages import checked
from ..transports.ranks import Subgroup
from ..transports.store_client import StoreClient
from ..version import __version__
from . import state
from .generations import Generation, Meetings, Note, Stage
from .presence import Presence
from .sampler import BatchSampler
from .times import Times

logger = logging.getLogger(__name__)

MOST_IN_VAIN = 5  # generations of the same members that end without a step


class Membership:
    """The group of an elastic reducer (`ddp.elastic_reducer.ElasticGroup`).

    Args:
        ddp: what it reduces.
        parts: what else has a state, by name.
        store: the job's part of the store.
        timeout: after which a process that does not answer is lost.
        place: where this one wants to stand among the others.
        asked: the transport that was asked for.
        backwards: synchronised ones of a turn; who comes is let in after a multiple of so many.

    Attributes:
        transport: what moves wires among those who train. On GPUs that is NCCL; commits, words and states go over gloo
            or shared memory, which hosts wait for.
        generation: who they are.
        changes: called whenever they are others.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parts: Mapping[str, Any],
        store: StoreClient,
        timeout: timedelta,
        place: int,
        asked: str | None,
        backwards: int,
    ) -> None:
        self._ddp, self._parts, self._store, self._timeout, self._asked = ddp, dict(parts), store, timeout, asked
        self._has_state, self._backwards = False, backwards
        self._samplers = {name: part for name, part in parts.items() if isinstance(part, BatchSampler)}
        self._description = {"the version of fastreduce": __version__, **ddp._description}
        self._description |= {name: repr(each) for name, each in self._samplers.items()}
        self._description["backwards"] = str(backwards)
        told = [asked, *self._description.items()]
        self._digest = digest = hashlib.sha256(repr(told).encode()).hexdigest()
        times = Times(timeout.total_seconds())
        self._presence = Presence(store, times, place, digest, asked or "", weakly(self.abort))
        self._end = weakref.finalize(self, self._presence.leave)
        for sampler in self._samplers.values():
            sampler.join(self._presence.id)
        self._end.atexit = False  # the list of exits says when
        self._meetings = Meetings(self._presence)
        self.generation = Generation(0, (), {}, (), digest)
        self._someone_waits, self._left = False, False
        self._why = ""  # the last generation has not connected
        self._in_vain = 0  # generations of the same members since the last step
        self._compares_at: int | None = None  # before the forward of this step, since somebody has come
        self.changes: list[Callable[[], object]] = []
        self._commit = torch.zeros(2, device="cpu")
        self.transport: Transport = LocalTransport()
        self._control: Transport = self.transport  # between hosts
        self._group: Subgroup | None = None
        _alive.add(self)

    @property
    def rank(self) -> int:
        """This process among those who train."""
        return self.generation.members.index(self._presence.id)

    @property
    def size(self) -> int:
        """How many train."""
        return len(self.generation.members)

    @property
    def step(self) -> int:
        """How many steps this process has committed."""
        return self._reducer.step

    def leave(self) -> None:
        """Take part no more; the others go on."""
        if not self._left:
            self._left = True
            self._end()
            self.transport.close()
            self._control.close()

    @property
    def _reducer(self) -> ElasticReducer:
        assert isinstance(self._ddp.reducer, ElasticReducer)
        return self._ddp.reducer

    # What the reducer asks

    def before_forward(self, step: int) -> None:
        """Between two steps: let in who waits, if all have found at the last commit that somebody does."""
        self._check_here()
        if self._compares_at == step:
            self._compare(step)
        if self._someone_waits:
            self._regroup(Note(step, Stage.BETWEEN))

    def commit(self) -> None:
        """Return when all members have called it, which know then whether somebody waits to come in."""
        self._check_here()
        known = {*self.generation.members, *self.generation.out}
        for sampler in self._samplers.values():
            sampler.bring(self.generation.members)
        self._commit[0], self._commit[1] = 1.0, float(not self._presence.waiting <= known)
        self._control.all_reduce(self._commit).wait()
        self._someone_waits = bool(self._commit[1] > 0) and (self.step + 1) % self._backwards == 0
        self._count()

    def check_member(self) -> None:
        """Raise if the others have gone on without this process (`ddp.elastic_reducer.ElasticGroup`).

        Raises:
            TransportError: if they have.
        """
        self._meetings.check_after(self.generation)

    def abort(self, generation: int | None = None) -> None:
        """End what is under way, here and on the peers, connecting included; of one generation, if it is the last.

        That may take so long that the main thread has others by then.
        """
        control, transport, group = self._control, self.transport, self._group
        if generation is not None and self.generation.number != generation:
            return
        control.abort()
        transport.abort()
        if group is not None:
            abort_beside(group)

    def regroup(self, step: int, whole: bool) -> bool:
        """Meet those who are left (`ddp.elastic_reducer.ElasticGroup`).

        Raises:
            TransportError: also if the step fails again and again, and nobody is lost.
        """
        self._check_here()
        return self._regroup(Note(step, Stage.WHOLE if whole else Stage.UNDER_WAY))

    # How it is done

    def enter(self, least: int, seconds: float) -> None:
        """Become a member, and take the others' state.

        Raises:
            TransportError: see `fastreduce.elastic.join`.
        """
        recorder = self._reducer.recorder
        before = recorder.phase
        recorder.enter(Phase.WAITING)  # it may be long, and be asked what it does
        try:
            self.generation = self._meetings.first(least, self._digest, seconds)
            self._share_samples()
            if not self._connected():
                self._regroup(self._own_note())
            self._reducer.follow()
        finally:
            recorder.enter(before)

    def _compare(self, step: int) -> None:
        """Say so where who has come has other parameters than the rest after its first turn."""
        self._compares_at = None
        try:
            told = checked(self._control.exchange(state.digest(self._ddp)), str, "digest of its parameters")
        except TransportError as error:
            logger.info("process %d: parameters are not compared: %s", self._presence.id, error)
            self._regroup(Note(step, Stage.BETWEEN))
            return
        usual = statistics.mode(told)
        others = [rank for rank, digest in enumerate(told) if digest != usual]
        if others and (self.rank in others or self.rank == told.index(usual)):
            logger.warning(
                "rank %s of %d has other parameters than the rest, one turn after somebody has come: it began with "
                "another part of the loop. Say how many synchronised backwards a turn has, backwards= of "
                "fastreduce.elastic.join, and give join all that has a state",
                ", ".join(map(str, others)), self.size,
            )  # fmt: skip

    def _check_here(self) -> None:
        if self._left:
            raise TransportError("this process has left: members.leave() was called")

    def _step_of_others(self) -> int:
        return max((note.step for note in self.generation.notes.values()), default=0)

    def _own_note(self) -> Note:
        """Of a process that has come, and has made no step yet."""
        return Note(self.step, Stage.BETWEEN) if self._has_state else Note(self._step_of_others(), Stage.NEW)

    def _regroup(self, note: Note) -> bool:
        counts = False
        while True:
            self.abort()
            self._store.set(f"broken {self.generation.number}", "")
            self._someone_waits = False
            before, self.generation = self.generation, self._meetings.next(self.generation, note)
            lost = [rank for rank, member in enumerate(before.members) if member not in self.generation.members]
            if lost:
                names = ", ".join(map(str, lost))
                logger.log(
                    logging.INFO if self.rank else logging.WARNING,  # said by one of them
                    "rank %s of %d is lost in step %d: %d go on", names, len(before.members), note.step, self.size
                )  # fmt: skip
            if note.stage in (Stage.UNDER_WAY, Stage.WHOLE) and self.generation.counts(note.step):
                if note.stage is Stage.UNDER_WAY:
                    raise ReducerError(
                        f"step {note.step} was committed by another rank, and not all of its averages are here"
                    )
                counts, note = True, Note(note.step + 1, Stage.COUNTED)
                self._count()
            self._in_vain = 0 if self.generation.members != before.members else self._in_vain + 1
            if self._in_vain > MOST_IN_VAIN:  # as on all others
                raise TransportError(
                    f"rank {self.rank} of {self.size}: step {note.step} has failed {self._in_vain} times, though "
                    f"nobody was lost. {self._why or 'The error before this one says why.'}"
                )
            self._share_samples()
            if self._connected():
                return counts
            if note.stage is Stage.NEW:
                note = self._own_note()

    def _count(self) -> None:
        """The step under way is committed."""
        self._in_vain = 0
        for sampler in self._samplers.values():
            sampler.count()

    def _share_samples(self) -> None:
        """Before the state is sent, and in each generation, connected or not: all members make the same moves."""
        for sampler in self._samplers.values():
            sampler.share(self.generation.members)

    def _connected(self) -> bool:
        """Connect with the members of the generation, and let new ones have the state; whether nobody was lost."""
        generation = self.generation
        self.transport = self._control = LocalTransport()
        self._group, self._why = None, ""
        members = generation.members
        self._presence.watch(generation.number, members, {*members, *generation.out})
        try:
            self._control = self._connect(generation)
            self.transport = self._connect_gpus(generation) if self._asked == "nccl" else self._control
            if generation.number == 1:
                check_agreement(self._control, self._description)
            self._share(generation)
        except TransportError as error:
            logger.info("process %d: generation %d ended early: %s", self._presence.id, generation.number, error)
            self._why = str(error)
            return False
        logger.info("rank %d of %d in generation %d", self.rank, self.size, generation.number)
        for call in self.changes:
            call()
        return True

    def _connect(self, generation: Generation) -> Transport:
        if self.size == 1:
            return LocalTransport()
        members = generation.members
        self._group = group = Subgroup(
            self.rank,
            members,
            len(members),
            members,
            self._store.at(f"generation {generation.number}/transport"),
            self._timeout,
            absent=lambda: self._presence.gone(members),
        )
        processes = [self._presence.process(member) for member in members]
        if len(asked := {process.transport or "none" for process in processes}) > 1:
            raise MismatchError(f"ranks differ in the transport that is asked for: {', '.join(sorted(asked))}")
        hosts = {process.host for process in processes}
        if self._asked == "shm" or (self._asked in (None, "nccl") and len(hosts) == 1):
            shm = ShmTransport(group)
            try:
                shm.connect()
                return shm
            except BackendUnavailableError as error:
                if self._presence.gone(members):
                    raise TransportError(f"a process was lost while memory was shared: {error}") from error
                if self._asked == "shm":
                    raise
        gloo = GlooTransport(group)
        gloo.exchange(generation.number)
        return gloo

    def _connect_gpus(self, generation: Generation) -> Transport:
        """NCCL, whose communicator the first collective makes; nothing of it is raised but where it is waited for."""
        if self._group is None:
            return LocalTransport()
        nccl = NcclTransport(self._group, interrupts=False)
        nccl.exchange(generation.number)
        return nccl

    def _share(self, generation: Generation) -> None:
        """Let new members have the state of the first of the others."""
        new, source = generation.newcomers, generation.source
        self._compares_at = None  # some may have come here in a generation that ended before others did
        if not new:
            return
        if source is None:
            if self._step_of_others() > 0:
                raise SettingError("everybody who has trained was lost before the state had been sent")
            source = generation.members[0]
        averages = generation.note(source).stage is Stage.BETWEEN  # in `.grad`, and the same ones on all
        parts = {"model": state.Model(self._ddp, averages), **self._parts}
        self._compares_at = self.step + self._backwards
        taken = self._take if self._presence.id in new and self._presence.id != source else None
        self._reducer.finish_on_gpus()  # states are read and loaded on another thread
        state.send(parts, self.step, self._control, generation.members.index(source), taken)
        self._reducer.finish_on_gpus()

    def _take(self, step: int) -> None:
        """The state of others is here, after so many steps."""
        self._has_state, self._compares_at = True, step + self._backwards
        if self.generation.source is None:  # all begin together, each from a checkpoint if there is one
            self._reducer.schedule.step = step
        else:
            self._reducer.take_over(step)


_alive: weakref.WeakSet[Membership] = weakref.WeakSet()


def trains() -> bool:
    """Whether this process is a member already."""
    return any(not membership._left for membership in _alive)


each_at_exit(Exit.REDUCERS, Membership.leave, _alive)
