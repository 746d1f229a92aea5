"""One training of the script: started as `fastreduce run` starts it, followed, and ended with all of its ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from ....compression import ENVIRONMENT_VARIABLE
from ....run.contestants import TORCHS
from ....run.orders import LEFT, Orders
from ....run.replacement import SEED
from ...ending import LOGS
from .plan import BASE, Plan

END_SECONDS = 15
LOOK_SECONDS = 0.1
SHOWN_LINES = 30
MOST_LETTERS = 60  # of a setting, in a file's name
# The folder that this is called in holds no modules of it.
_ELSEWHERE = "import ctypes, os, sys; sys.path[:1] == [''] and sys.path.pop(0); "
_TIED = "os.getppid() == int(os.environ.pop('_FASTREDUCE_PARENT')) or os._exit(1); "
# It ends with its parent, and its ranks with it.
COMMAND = (
    f"{_ELSEWHERE}ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d}); {_TIED}"
    "from fastreduce.cli import main; main(prog_name='fastreduce')"
)
# A launcher of the user's likewise: SIGTERM lets it end its ranks, wherever they are.
LAUNCH = f"{_ELSEWHERE}ctypes.CDLL(None).prctl(1, {signal.SIGTERM:d}); {_TIED}os.execvp(sys.argv[1], sys.argv[1:])"
RANK = f"{_ELSEWHERE}from fastreduce.run import main; main()"

Line = dict[str, Any]
OnLine = Callable[[Line], None]


class TrainingError(Exception):
    """A training failed.

    Attributes:
        code: its exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Training:
    """One run of the script.

    Attributes:
        what: it is, in messages, as in "the training under int8 with seed 1".
        label: in file names, as in "int8-seed1".
        setting: what {setting} stands for.
        seed: what {seed} stands for, and what everything is seeded with.
        first: the contestant from the first step on.
        orders: what is measured, but for the first contestant and where it is written.
    """

    what: str
    label: str
    setting: str
    seed: int
    first: str
    orders: dict[str, Any]


class OtherNodes(Protocol):
    """Those that start ranks of the same training."""

    def tell(self, training: Training, record: Path) -> int:
        """Let them begin one; returns the port of this node at which its ranks meet."""

    def check(self) -> None:
        """Raise TrainingError if one of them has left."""


def run(plan: Plan, training: Training, on_line: OnLine, others: OtherNodes | None = None) -> list[Line]:
    """Run it to its end: the lines that rank 0 has written, each of which `on_line` sees when it comes.

    Raises:
        TrainingError: if it failed, or wrapped no module.
    """
    lines: list[Line] = []
    # Ranks of other hosts may see the folder of results.
    shared = plan.out.resolve() if plan.launch or others is not None else None
    with tempfile.TemporaryDirectory(prefix="fastreduce-compare-", dir=shared) as folder:
        record = Path(folder) / "record"
        record.touch()
        port = others.tell(training, record) if others is not None else 0
        with open_log(plan, training) as output:
            log = Path(output.name)
            process = start(plan, training, record, output, port)
            try:
                with record.open() as file:
                    running, news, heard = True, "", time.monotonic()
                    while running:
                        running = process.poll() is None
                        for line in _new_lines(file):
                            lines.append(line)
                            on_line(line)
                        seen = f"{len(lines)} {log.stat().st_size} {_places(record, plan.ranks)}"
                        if seen != news:
                            news, heard = seen, time.monotonic()
                        silence = time.monotonic() - heard
                        if lines and "done" in lines[-1] and silence > END_SECONDS:
                            break  # what has started the ranks waits for them, or goes on
                        if running and others is not None and not (lines and "done" in lines[-1]):
                            others.check()
                        if running and silence > plan.timeout:
                            raise TrainingError(
                                f"{training.what} took no step for {plan.timeout:g} s (--timeout): "
                                f"{_places(record, plan.ranks)}; {_tail(log)}",
                                1,
                            )
                        if running:
                            time.sleep(LOOK_SECONDS)
            finally:
                end(process)
        left = ", ".join(place for place in _places(record, plan.ranks).split(", ") if LEFT in place)
    if process.returncode and not (lines and "done" in lines[-1]):
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        why = f": {left}" if left else _why(log)
        raise TrainingError(f"{training.what} failed with exit code {code}{why}; {_tail(log)}", code)
    if not lines:
        where = f"{plan.ranks} ranks that `fastreduce run` starts" if plan.ranks else f"the ranks of {plan.started}"
        raise TrainingError(
            f"{training.what} made no DistributedDataParallel, so there is nothing to compare: {plan.name} must wrap "
            f"its model in torch's class or ours, or shard it with fully_shard, in {where}; its output is in {log}",
            2,
        )
    return lines


def open_log(plan: Plan, training: Training) -> TextIO:
    """Where what this machine's ranks print goes."""
    logs = plan.out / LOGS
    logs.mkdir(exist_ok=True)
    return (logs / f"{training.label}.txt").open("w")


def start(plan: Plan, training: Training, record: Path, output: TextIO, port: int) -> subprocess.Popen[bytes]:
    """Start its ranks, on several nodes those of this one, which meet at `port` of the first."""
    only_torchs = {training.first, *training.orders.get("contestants", ())} <= set(TORCHS)
    orders = Orders(record=str(record), first=training.first, keeps_torchs_class=only_torchs, **training.orders)
    told = {
        **orders.environment(),
        SEED: str(training.seed),
        ENVIRONMENT_VARIABLE: BASE if training.first in TORCHS else training.first,
    }
    return subprocess.Popen(
        _command(plan, training, told, port),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **told, "_FASTREDUCE_PARENT": str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
    )


def _command(plan: Plan, training: Training, told: dict[str, str], port: int) -> list[str]:
    filled = [fill(word, plan, training.setting, training.seed) for word in plan.words[1:]]
    script = [*(["-m"] if plan.module else []), plan.name, *filled]
    if plan.launch:  # which may take no variables along to other hosts
        words = [*plan.launch, "env", *(f"{name}={value}" for name, value in told.items())]
        return [sys.executable, "-c", LAUNCH, *words, sys.executable, "-c", RANK, *script]
    ranks = [] if plan.ranks == 1 and plan.nodes is None else ["--nproc-per-node", str(plan.ranks)]
    if (nodes := plan.nodes) is not None:
        where = {"nnodes": nodes.count, "node-rank": nodes.rank, "master-addr": nodes.address, "master-port": port}
        ranks += [f"--{name}={value}" for name, value in where.items()]
    return [sys.executable, "-c", COMMAND, "run", *ranks, *script]


def _places(record: Path, ranks: int) -> str:
    """Where each rank is, as far as it has come to its DistributedDataParallel, and this machine sees."""
    notes = {int(note.suffix[1:]): note.read_text() for note in record.parent.glob(f"{record.name}.*")}
    places = (
        f"rank {rank} {notes.get(rank, 'has wrapped no module').strip() or 'has begun no step'}"
        for rank in sorted({*range(ranks), *notes})
    )
    return ", ".join(places) or "no rank has wrapped a module"


def fill(text: str, plan: Plan, setting: str, seed: int) -> str:
    """The text with {seed}, {setting} and {out} filled in: as a file may be named, and absolute, for scripts move."""
    named = text.replace("{seed}", str(seed)).replace("{setting}", file_name(setting))
    return named.replace("{out}", str(plan.out.resolve()))


def file_name(setting: str) -> str:
    """A setting as a part of a file's name, which is no other one's: of a policy its beginning, and a digest."""
    safe = re.sub(r"[^\w.=-]+", "-", setting)
    if len(safe) <= MOST_LETTERS and not any(character in setting for character in "|;*?[]<>"):
        return safe
    return f"{safe[:MOST_LETTERS]}-{hashlib.sha256(setting.encode()).hexdigest()[:8]}"


def _new_lines(file: Any) -> list[Line]:
    found: list[Line] = []
    while True:
        place = file.tell()
        text = file.readline()
        if not text.endswith("\n"):
            file.seek(place)
            return found
        found.append(json.loads(text))


def read_log(log: Path) -> str:
    """What a training has printed, whatever that is."""
    return log.read_text("utf-8", "replace")


def _tail(log: Path) -> str:
    """How it ends, as the end of a sentence."""
    lines = read_log(log).splitlines()[-SHOWN_LINES:]
    return "\n".join([f"{log} ends with", *(f"  {line}" for line in lines)]) if lines else f"{log} is empty"


def _why(log: Path) -> str:
    """The message of the last error in a log, behind a colon; "" where there is none."""
    found = re.findall(r"^(?:\[rank \d+\] )?[\w.]+(?:Error|Exception): (.+)", read_log(log), re.M)
    return f": {found[-1]}" if found else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
