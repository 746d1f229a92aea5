"""One training of the script: started as `fastreduce run` starts it, followed, and ended with all of its ranks."""

from __future__ import annotations

import contextlib
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
from typing import Any

from ....compression import ENVIRONMENT_VARIABLE
from ....run.contestants import TORCHS
from ....run.orders import Orders
from ....run.replacement import SEED
from .plan import BASE, Plan

END_SECONDS = 15
LOOK_SECONDS = 0.1
SHOWN_LINES = 30
# It ends with its parent, and its ranks with it; the folder that this is called in holds no modules of it.
COMMAND = (
    "import ctypes, os, sys; sys.path[:1] == [''] and sys.path.pop(0); ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(os.environ.pop('_FASTREDUCE_PARENT')) or os._exit(1); "
    "from fastreduce.cli import main; main(prog_name='fastreduce')"
)

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


def run(plan: Plan, training: Training, on_line: OnLine) -> list[Line]:
    """Run it to its end: the lines that rank 0 has written, each of which `on_line` sees when it comes.

    Raises:
        TrainingError: if it failed, or wrapped no module.
    """
    logs = plan.out / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{training.label}.txt"
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="fastreduce-compare-") as folder, log.open("w") as output:
        record = Path(folder) / "record"
        record.touch()
        only_torchs = {training.first, *training.orders.get("contestants", ())} <= set(TORCHS)
        orders = Orders(record=str(record), first=training.first, keeps_torchs_class=only_torchs, **training.orders)
        command = _command(plan, training)
        environment = {
            **os.environ,
            **orders.environment(),
            SEED: str(training.seed),
            ENVIRONMENT_VARIABLE: BASE if training.first in TORCHS else training.first,
            "_FASTREDUCE_PARENT": str(os.getpid()),
        }
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
        )
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
                    if running and silence > plan.timeout:
                        raise TrainingError(
                            f"{training.what} took no step for {plan.timeout:g} s (--timeout): "
                            f"{_places(record, plan.ranks)}; {log} ends with\n{_tail(log)}",
                            1,
                        )
                    if running:
                        time.sleep(LOOK_SECONDS)
        finally:
            _end(process)
    if process.returncode and not (lines and "done" in lines[-1]):
        code = process.returncode if process.returncode > 0 else 128 - process.returncode
        raise TrainingError(f"{training.what} failed with exit code {code}; {log} ends with\n{_tail(log)}", code)
    if not lines:
        raise TrainingError(
            f"{training.what} made no DistributedDataParallel, so there is nothing to compare: {plan.name} must wrap "
            f"its model in torch's class or ours, or shard it with fully_shard, in {plan.ranks} ranks that "
            f"`fastreduce run` starts; its output is in {log}",
            2,
        )
    return lines


def _places(record: Path, ranks: int) -> str:
    """Where each rank is, as far as it has come to its DistributedDataParallel."""
    notes = {int(note.suffix[1:]): note.read_text() for note in record.parent.glob(f"{record.name}.*")}
    places = (
        f"rank {rank} {notes.get(rank, 'has wrapped no module').strip() or 'has begun no step'}"
        for rank in range(max([ranks, *(rank + 1 for rank in notes)]))
    )
    return ", ".join(places)


def _command(plan: Plan, training: Training) -> list[str]:
    filled = [fill(word, plan, training.setting, training.seed) for word in plan.words[1:]]
    ranks = [] if plan.ranks == 1 else ["--nproc-per-node", str(plan.ranks)]
    module = ["-m"] if plan.module else []
    return [sys.executable, "-c", COMMAND, "run", *ranks, *module, plan.name, *filled]


def fill(text: str, plan: Plan, setting: str, seed: int) -> str:
    """The text with {seed}, {setting} and {out} filled in, the setting as a file may be named."""
    safe = re.sub(r"[^\w.=-]+", "-", setting)
    return text.replace("{seed}", str(seed)).replace("{setting}", safe).replace("{out}", str(plan.out))


def _new_lines(file: Any) -> list[Line]:
    found: list[Line] = []
    while True:
        place = file.tell()
        text = file.readline()
        if not text.endswith("\n"):
            file.seek(place)
            return found
        found.append(json.loads(text))


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
