"""`python -m bench.elastic.beside PYTHON`: our elastic training and torchft, the same kills, by turns.

PYTHON is an interpreter that has fastreduce and torchft. Three processes of this machine train a small network over
gloo; one is killed (kill -9), and when the others have gone on for a while it is started again. torchft is used by its
Manager there, since its DistributedDataParallel (0.2.0) ends survivors by an AssertionError where a kill falls into an
all-reduce. Then steps without failures, in processes of their own by turns: ours elastic and with fixed ranks, torchft,
torch's own class. Rows go to bench/results/elastic_beside.csv; docs/elastic.md has them.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ..paired import ratio, turns
from ..tables import write_csv
from .beside_rank import TIMEOUT
from .kills import Job

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "bench" / "results" / "elastic_beside.csv"
RANKS = 3
AFTER_SECONDS = 2.0  # of undisturbed training after each event
STEPS = 300  # of a training without failures, of which the first third warms up
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=50,
                          heartbeat_timeout_ms=int(sys.argv[1]))
print(server.address(), flush=True)
sys.stdin.read()
"""


class Started:
    """A process by another interpreter; of the fork server's what `Job` uses."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def poll(self, timeout: float = 0.0) -> int | None:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Beside(Job):
    """The processes of one training of a kind, with torchft's lighthouse where it is that."""

    def __init__(self, python: Path, kind: str, folder: Path, steps: int = 0) -> None:
        super().__init__(RANKS, folder)
        self._python, self._kind, self._steps = python, kind, steps
        self.lighthouse: subprocess.Popen[str] | None = None
        self._address = f"127.0.0.1:{self._store.port}"
        if kind in ("torchft", "manager"):
            pipe = subprocess.PIPE
            command = [str(python), "-c", LIGHTHOUSE, str(int(1000 * TIMEOUT))]
            self.lighthouse = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            assert self.lighthouse.stdout is not None
            self._address = self.lighthouse.stdout.readline().strip()

    def start(self, place: int) -> str:
        name = f"{place}.{len(self.names)}"
        self.names.append(name)
        where = {"RANK": str(place), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [self._kind, self._address, str(self.folder), name, str(self._steps)]
        command = [str(self._python), "-m", "bench.elastic.beside_rank", *arguments]
        with (self.folder / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **where}, stdout=out, stderr=out)
        self.alive[place] = name, Started(process)  # type: ignore[assignment]
        return name

    def close(self) -> None:
        super().close()
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()

    def pause(self, names: list[str], begin: float, end: float) -> float:
        """The longest time between two steps of any of these, from then to then."""
        times = {name: [line.at for line in self.lines(name) if begin - 1 < line.at < end] for name in names}
        return max(b - a for each in times.values() for a, b in pairwise(each) if b > begin)

    def lost(self) -> int:
        """Steps that were made and not committed."""
        return sum(path.read_text().count("\n") for path in self.folder.glob("*.lost"))


def kills(python: Path, kind: str, count: int, seed: int) -> list[dict[str, float]]:
    """What each of so many kills cost."""
    chance, found = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="fastreduce-elastic-") as folder:
        job = Beside(python, kind, Path(folder))
        try:
            for place in range(RANKS):
                job.start(place)
            _must(job, job.trains(50))
            for _ in range(count):
                time.sleep(chance.uniform(0.2, 0.7))
                before, place = job.lost(), chance.randrange(RANKS)
                killed_at = time.time()
                job.kill(place)
                left = [name for name, _ in job.alive.values()]
                _must(job, job.trains(5))
                time.sleep(AFTER_SECONDS)
                lost, started_at = job.lost() - before, time.time()
                name = job.start(place)
                _must(job, job.trains(5))
                time.sleep(AFTER_SECONDS)
                found.append(
                    {
                        "kill": job.pause(left, killed_at, started_at),
                        "return": job.pause(left, started_at, time.time()),
                        "back": job.lines(name)[0].at - started_at,
                        "lost": lost / len(left),
                        "lost by the return": (job.lost() - before - lost) / len(left),
                    }
                )
        finally:
            job.close()
    return found


def _must(job: Job, good: bool) -> None:
    if not good:
        raise RuntimeError(f"nobody trains: {job.output()}")


def step_seconds(python: Path, kind: str) -> float:
    """The median step of a training without failures."""
    with tempfile.TemporaryDirectory(prefix="fastreduce-elastic-") as folder:
        job = Beside(python, kind, Path(folder), STEPS)
        try:
            for place in range(RANKS):
                job.start(place)
            codes = [process.poll(120.0) for _, process in job.alive.values()]
            _must(job, codes == [0] * RANKS)
            times = [line.at for line in job.lines("0.0")][STEPS // 3 :]
            return statistics.median(b - a for a, b in pairwise(times))
        finally:
            job.close()


def main(
    python: Annotated[Path, typer.Argument(help="An interpreter with fastreduce and torchft.")] = Path(sys.executable),
    runs: Annotated[int, typer.Option(help="Trainings of each kind with kills.")] = 3,
    count: Annotated[int, typer.Option("--kills", help="In each training.")] = 4,
    rounds: Annotated[int, typer.Option(help="Trainings of each kind without failures.")] = 7,
) -> None:
    """Run, print and keep."""
    costs: dict[str, list[dict[str, float]]] = {"elastic": [], "manager": []}
    for number, kind in enumerate(turns(costs, runs)):
        costs[kind] += kills(python, kind, count, number // len(costs))
        print(kind, costs[kind][-count:], flush=True)
    steps: dict[str, list[float]] = {kind: [] for kind in ("elastic", "fixed", "torchft", "torch")}
    for kind in turns(steps, rounds):
        steps[kind].append(step_seconds(python, kind))
        print(kind, f"{1e3 * steps[kind][-1]:.2f} ms", flush=True)
    rows: list[dict[str, Any]] = []
    for name, killed, kind, base in (
        ("fastreduce", "elastic", "elastic", "fixed"),
        ("torchft", "manager", "torchft", "torch"),
    ):
        found = costs[killed]
        middle = {what: statistics.median(each[what] for each in found) for what in found[0]}
        over = ratio(steps[kind], steps[base])
        rows.append(
            {
                "training": name,
                "kills": len(found),
                "survivors pause after a kill, median s": round(middle["kill"], 2),
                "longest, s": round(max(each["kill"] for each in found), 2),
                "steps of a survivor not committed": round(statistics.mean(each["lost"] for each in found), 1),
                "survivors pause at the return, median s": round(middle["return"], 2),
                "steps of a survivor not committed by it": round(
                    statistics.mean(each["lost by the return"] for each in found), 1
                ),
                "from its start to its first step, median s": round(middle["back"], 2),
                "step without failures, ms": round(1e3 * statistics.median(steps[kind]), 2),
                "over the same with fixed ranks": f"{over[0]:.2f} ({over[1]:.2f}–{over[2]:.2f})",
                "load": round(os.getloadavg()[0], 1),
            }
        )
        print(rows[-1], flush=True)
    write_csv(KEPT, rows)


if __name__ == "__main__":
    typer.run(main)
