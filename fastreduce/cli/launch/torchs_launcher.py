"""What `fastreduce launch` changes in torch's elastic launcher: what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, NoReturn

import typer
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext, to_map
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ...distributed.processes import name_of_signal
from .. import output
from .elastic_nodes import ElasticNodes
from .nodes import NodeLostError, Nodes

BROKEN_SECONDS, TOLD_SECONDS = 2, 30  # that ranks have to end
LOOK_SECONDS = 0.02


class Logs(LogsSpecs):
    """Where the ranks write: `LOG_DIR/rank.N/stdout` and `stderr`, by global rank; after a restart in `attempt_1/`."""

    def __init__(self, options: Namespace, ranks: int, scratch: Path) -> None:
        try:
            redirects, tee = Std.from_str(options.redirects), Std.from_str(options.tee)
            shown = {int(rank) for rank in options.local_ranks_filter.split(",") if rank}
        except ValueError as error:
            fail(f"--redirects, --tee or --local-ranks-filter: {error}")
        if absent := sorted(shown - set(range(ranks))):
            fail(f"--local-ranks-filter {options.local_ranks_filter}: there is no {absent[0]}; give 0 to {ranks - 1}")
        if options.log_dir and not redirects and not tee:
            tee = Std.ALL
        if redirects and not options.log_dir:
            fail("--redirects writes files: say where with --log-dir")
        super().__init__(options.log_dir, redirects, tee, shown or None)
        self._scratch = scratch
        self._root = Path(options.log_dir) if options.log_dir else scratch
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            fail(f"--log-dir {options.log_dir}: {why}")

    @property
    def root_log_dir(self) -> str:
        """The folder, as given."""
        return str(self._root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for each local rank, which are new ones at each restart."""
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        root = self._root if attempt == "0" else self._root / f"attempt_{attempt}"
        redirects, tee = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        to = LogsDest()
        for local_rank, env in envs.items():
            folder = root / f"rank.{env['RANK']}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(f"--log-dir {self._root}: cannot make {folder}: {error.strerror}") from error
            env["TORCHELASTIC_ERROR_FILE"] = str(self._scratch / f"error.{attempt}.{env['RANK']}.json")
            to.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"]
            quiet = self._local_ranks_filter is not None and local_rank not in self._local_ranks_filter
            for stream, files, teed in (
                (Std.OUT, to.stdouts, to.tee_stdouts),
                (Std.ERR, to.stderrs, to.tee_stderrs),
            ):
                shown = bool(tee[local_rank] & stream) and not quiet
                files[local_rank] = os.devnull if quiet else ""  # "" is the console
                if (redirects[local_rank] | tee[local_rank]) & stream:
                    files[local_rank] = str(folder / ("stdout" if stream is Std.OUT else "stderr"))
                if shown:
                    teed[local_rank] = files[local_rank]
        for name in ("filtered_stdout", "filtered_stderr"):
            if hasattr(to, name):
                setattr(to, name, str(root / f"{name}.log"))
        return to


class Ranks(SubprocessContext):
    """torch's processes, and why they failed is said once.

    Where one has failed, or another node has, the others wait for averages that do not come, and have 2 seconds to end.
    Where the launcher is told to end, they may be saving what they have, and have 30, as under torchrun.
    """

    grace_seconds: ClassVar[int | None] = None  # the user's
    hint: ClassVar[str] = ""  # which option gives more of them, where torch has it
    watch: ClassVar[Callable[[Mapping[str, str]], Nodes | ElasticNodes] | None] = None  # the other nodes
    nodes: ClassVar[Nodes | ElasticNodes | None] = None
    why: ClassVar[str] = ""  # the job has failed here
    lost: ClassVar[str] = ""  # which other node was, when the ranks here were done and waited for its
    here: ClassVar[Ranks | None] = None  # those that were started last
    early: ClassVar[list[int] | None] = None  # signals to be passed on once all ranks have been started, meanwhile
    outlives_terminal: ClassVar[bool] = False  # under nohup, say
    _ended: frozenset[int] = frozenset()  # process ids that this launcher ended, which are no causes
    _over: frozenset[int] = frozenset()  # local ranks that have failed for good, and of whose groups nobody is left
    _ended_at = 0  # when, in nanoseconds: those that had told of their own end before may be

    def _start(self) -> None:
        if self.outlives_terminal:  # torch has just taken the signal
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Ranks.early = []  # the first of them may be at work before the last one is known
        super()._start()  # type: ignore[no-untyped-call]
        Ranks.here = self
        early, Ranks.early = Ranks.early, None
        for number in early:
            self.pass_on(number, None)
        if Ranks.watch is not None:
            self.leave()  # where nodes have met anew
            Ranks.nodes = Ranks.watch(self.envs[0])

    @classmethod
    def pass_on(cls, number: int, frame: object) -> None:
        """Let every rank's process have a signal that the launcher has received, as mpirun and srun do."""
        if cls.early is not None:
            cls.early.append(number)
            return
        if cls.here is None:
            say(f"{signal.Signals(number).name}: no rank runs yet")
            return
        for handler in list(cls.here.subprocess_handlers.values()):
            if handler.proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(handler.proc.pid, number)

    @classmethod
    def look_for_lost(cls) -> None:
        """Raise if others are waited for in vain: torch waits for their ranks behind its own, and does not look."""
        if cls.nodes is not None:
            try:
                cls.nodes.check_at_end()
            except NodeLostError:
                cls.lost = cls.nodes.lost and f"{cls.nodes.lost}; the ranks here were done"
                raise

    @classmethod
    def leave(cls, why: str = "") -> None:
        """The job is over on this node; the others learn `why`, if it is so before their ranks are done."""
        nodes, Ranks.nodes = Ranks.nodes, None
        if nodes is not None:
            nodes.leave(why)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._ended:
            return
        handlers = self.subprocess_handlers.values()
        self._ended, self._ended_at = frozenset(h.proc.pid for h in handlers if h.proc.poll() is None), time.time_ns()
        if not self._ended and not self._failures:
            return  # what a rank that succeeded left running is its own affair
        if self.nodes is not None:
            self.nodes.note_end()
        seconds = self.grace_seconds
        if seconds is None:
            broken = self._failures or (self.nodes is not None and self.nodes.lost)
            seconds = BROKEN_SECONDS if broken else TOLD_SECONDS
        still = threading.Timer(BROKEN_SECONDS, self._say_what_still_ends, [seconds - BROKEN_SECONDS])
        if seconds > BROKEN_SECONDS:
            still.start()
        end = time.monotonic() + seconds
        try:
            super()._close(death_sig, seconds)
            ended = [(self.envs[rank]["RANK"], h.proc) for rank, h in self.subprocess_handlers.items()]
            killed = [rank for rank, p in ended if p.pid in self._ended and p.poll() == -signal.SIGKILL]
            while (left := self._still_end()) and time.monotonic() < end:  # what ranks have started was told, too
                time.sleep(LOOK_SECONDS)
            started = [rank for rank in left if rank not in killed]
            for names, whose in ((killed, "rank"), (started, "what was started by rank")):
                if names:
                    who = f"{whose} {', '.join(names)}"
                    say(f"{who} had not ended {seconds} s after {death_sig.name}, and was killed{self.hint}")
        finally:  # a second Ctrl-C comes here too
            still.cancel()
            for rank, handler in self.subprocess_handlers.items():
                # The number of one that ended well, or whose group was ended then, may be somebody else's by now.
                if rank not in self._over and (handler.proc.pid in self._ended or handler.proc.poll() != 0):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(handler.proc.pid, signal.SIGKILL)
                handler.proc.wait()

    def _still_end(self) -> list[str]:
        """Ranks that were told to end and have not, or of whose process group somebody is there."""
        of = [(self.envs[rank]["RANK"], h.proc) for rank, h in self.subprocess_handlers.items()]
        return [rank for rank, p in of if p.pid in self._ended and (p.poll() is None or is_group(p.pid))]

    def _say_what_still_ends(self, seconds: int) -> None:
        if ranks := self._still_end():
            say(f"rank {', '.join(ranks)} has {seconds} s more to end; Ctrl-C once more kills at once")

    def _poll(self) -> RunProcsResult | None:
        result = super()._poll()
        if result is None and self.nodes is not None:
            self.nodes.check()
        if result is not None and result.failures:
            for rank, handler in self.subprocess_handlers.items():
                code = handler.proc.poll()
                if code and rank not in result.failures:  # torch 2.9 does not look at those that it has ended
                    result.failures[rank] = ProcessFailure(rank, handler.proc.pid, code, self.error_files[rank])
            own = {rank: f for rank, f in result.failures.items() if f.pid not in self._ended or self._has_told(f)}
            result.failures = own or result.failures
            self._explain(result.failures)
        return result

    def _has_told(self, failure: ProcessFailure) -> bool:
        """Whether a rank was at its end already: it has left why, and others may have ended first because of it."""
        at: int = failure.error_file_data.get("nanoseconds", self._ended_at)
        return at < self._ended_at

    def _explain(self, failures: dict[int, ProcessFailure]) -> None:
        for rank, failure in failures.items():
            if self.stderrs[rank] not in ("", os.devnull):  # where it would stand without this launcher
                with (
                    contextlib.suppress(OSError),  # a full disk, say, and why the rank failed is told below
                    open(self.stderrs[rank], "a", encoding="utf-8", errors="backslashreplace") as file,
                ):
                    file.write(traceback_of(failure))
        first = cause(failures.values())
        env = self.envs[first.local_rank]
        Ranks.why = f"rank {env['RANK']} {fate_of(first)}"
        say(f"{self.why}\n{traceback_of(first)}".rstrip())
        others = [self.envs[rank]["RANK"] for rank in failures if rank != first.local_rank]
        if others:
            say(f"rank {', '.join(others)} failed right after it")
        restarts, most = int(env["TORCHELASTIC_RESTART_COUNT"]), int(env["TORCHELASTIC_MAX_RESTARTS"])
        if restarts < most:
            say(f"all ranks start again: restart {restarts + 1} of {most}")


def is_group(number: int) -> bool:
    """Whether a process group has a process."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user by now
        pass
    return True


def exit_code_of(failure: ProcessFailure) -> int:
    """The exit code that a rank has left, or the process's own; below 0 a signal."""
    code: int = failure.error_file_data.get("exit_code", failure.exitcode)
    return code


def fate_of(failure: ProcessFailure) -> str:
    """How a rank ended, as a clause."""
    code = exit_code_of(failure)
    return f"was ended by {name_of_signal(-code)}" if code < 0 else f"failed with exit code {code}"


def traceback_of(failure: ProcessFailure) -> str:
    """What a rank has left of its error."""
    message = failure.error_file_data.get("message")
    return message["extraInfo"].get("py_callstack", "") if isinstance(message, dict) else ""


def cause(failures: Iterable[ProcessFailure]) -> ProcessFailure:
    """The first: ranks that died without a word, which no other rank's end explains, then by time.

    An abort is the exception: torch's own threads do so when a peer is gone.
    """

    def when(failure: ProcessFailure) -> float:
        if failure.exitcode == -signal.SIGABRT:
            return math.inf
        return float(failure.error_file_data.get("nanoseconds", 0))

    return min(failures, key=when)


def say(message: str) -> None:
    """One line for the user."""
    print(f"fastreduce {output.command}: {message}", file=sys.stderr, flush=True)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with a message."""
    say(message)
    raise typer.Exit(code)
