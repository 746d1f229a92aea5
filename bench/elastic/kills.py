"""`python -m bench.elastic`: trainings of 3 and 4 ranks, each of which loses random ranks at random times, by kill -9.

Each run trains in processes of its own that meet in a store of this one; one or two of them are killed, at any moment,
also while the others still regroup, and most are started again. Then it is looked whether all that were there at a step
had the same bits after it, whether each sample was in as many averages as it was dealt for, how long it took until
those who were left had committed the next step, and whether anybody hung. Rows go to bench/results/elastic.csv;
docs/elastic.md has them.

`python -m bench.elastic --soak 10000`: a training of so many steps over each transport, whose ranks but one are killed
and started again all the time; what that one holds goes to bench/results/elastic_soak.csv.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch.distributed as dist
import typer

from fastreduce.data import epoch_order
from tests.support.fork_server import Forked, run_as_script, server

from ..tables import write_csv
from .elastic_ranks import SAMPLES

KEPT = Path(__file__).parents[1] / "results" / "elastic.csv"
SOAKED = KEPT.with_name("elastic_soak.csv")
HANG_SECONDS = 10.0
TIMEOUT = 5.0
START_SECONDS = 120.0
MORE_STEPS = 60  # after all that was done to them
CASES = [(3, "shm", "none"), (4, "gloo", "none"), (3, "gloo", "int8:error_feedback"), (4, "shm", "int8:error_feedback")]


class Line(NamedTuple):
    """One step of one process."""

    step: int
    at: float
    size: int
    generation: int
    digest: str
    loss: float


class Job:
    """The processes of one training, by place; a process that is started again has another name."""

    def __init__(self, ranks: int, folder: Path, *arguments: str, module: str = "bench.elastic.elastic_ranks") -> None:
        self.ranks, self.folder = ranks, folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._module, self._arguments = module, arguments
        self.alive: dict[int, tuple[str, Forked]] = {}
        self.names: list[str] = []

    def start(self, place: int) -> str:
        """A process for a place."""
        name = f"{place}.{len(self.names)}"
        self.names.append(name)
        where = {"RANK": str(place), "WORLD_SIZE": str(self.ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        arguments = [f"127.0.0.1:{self._store.port}", str(self.folder), name, *self._arguments]
        job = self._module, arguments, str(self.folder / f"{name}.out")
        self.alive[place] = name, server(place).fork(run_as_script, *job, env={**os.environ, **where})
        return name

    def kill(self, place: int) -> None:
        """kill -9."""
        self.alive.pop(place)[1].kill()

    def lines(self, name: str) -> list[Line]:
        """The steps of a process so far."""
        path = self.folder / f"{name}.steps"
        found = []
        for text in path.read_text().splitlines() if path.exists() else ():
            words = text.split()
            if len(words) == len(Line._fields):  # else it was killed in the middle
                found.append(
                    Line(int(words[0]), float(words[1]), int(words[2]), int(words[3]), words[4], float(words[5]))
                )
        return found

    def step_of(self, name: str) -> int:
        """The last step of a process."""
        lines = self.lines(name)
        return lines[-1].step if lines else 0

    def wait_for(self, done: Any, seconds: float) -> bool:
        """Wait until `done()`; whether it came to that in time, with nobody ended."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline or any(each.poll() is not None for _, each in self.alive.values()):
                return False
            time.sleep(0.02)
        return True

    def trains(self, more: int = 1, seconds: float = START_SECONDS) -> bool:
        """Wait until every process has committed so many more steps."""
        before = {name: self.step_of(name) for name, _ in self.alive.values()}
        return self.wait_for(lambda: all(self.step_of(n) >= step + more for n, step in before.items()), seconds)

    def finish(self, seconds: float) -> bool:
        """Let all end after the same step; whether all did, and well."""
        last = max(self.step_of(name) for name, _ in self.alive.values()) + MORE_STEPS
        self.folder.joinpath("last step.part").write_text(str(last))
        os.replace(self.folder / "last step.part", self.folder / "last step")
        deadline = time.monotonic() + seconds
        return all(each.poll(max(0.0, deadline - time.monotonic())) == 0 for _, each in self.alive.values())

    def close(self) -> None:
        """End what is left."""
        for _, process in self.alive.values():
            process.kill()

    def output(self) -> str:
        """The end of what each process has printed."""
        return "".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.out")))

    def differing(self) -> list[int]:
        """Steps after which those who committed them had other parameters."""
        by_step: dict[int, set[str]] = {}
        for name in self.names:
            for line in self.lines(name):
                by_step.setdefault(line.step, set()).add(line.digest)
        return [step for step, found in by_step.items() if len(found) > 1]

    def miscounted(self) -> list[int]:
        """Samples that were in more or fewer averages than the sampler says at the end."""
        by_step: dict[int, list[int]] = {}
        for path in self.folder.glob("*.trained"):
            for step, *samples in (map(int, line.split()) for line in path.read_text().splitlines()):
                by_step[step] = samples
        states = [json.loads(path.read_text()) for path in self.folder.glob("*.samples")]
        told = {(each["top"], *sorted([*each["back"], *itertools.chain(*each["hands"].values())])) for each in states}
        if len(told) > 1 or any(len(each["hands"]) > len(self.alive) for each in states):
            return [*range(SAMPLES)]  # they do not know the same, or somebody has samples who is not there
        ((top, *open_),) = told
        places = [divmod(number, SAMPLES) for number in range(top) if number not in open_]
        orders = [epoch_order(SAMPLES, True, 0, epoch) for epoch in range(top // SAMPLES + 1)]
        expected = Counter(int(orders[epoch][place]) for epoch, place in places)
        found = Counter(itertools.chain(*by_step.values()))
        return [sample for sample in range(SAMPLES) if found[sample] != expected[sample]]


def run(seed: int, ranks: int, transport: str, setting: str, timeout: float = TIMEOUT) -> dict[str, Any]:
    """One training with its losses."""
    chance = random.Random(seed)
    kills: list[tuple[float, int, list[str]]] = []  # when, of how many, who was left
    with tempfile.TemporaryDirectory(prefix="fastreduce-elastic-") as folder:
        job = Job(ranks, Path(folder), transport, setting, str(timeout))
        try:
            for place in range(ranks):
                job.start(place)
            hangs = int(not job.trains())
            for _ in range(chance.choice([1, 2])):
                time.sleep(chance.choice([chance.uniform(0, 0.2), chance.uniform(0, 1.5)]))
                place = chance.choice(list(job.alive))
                job.kill(place)
                kills.append((time.time(), ranks, [name for name, _ in job.alive.values()]))
                if chance.random() < 0.7:
                    time.sleep(chance.choice([0.0, chance.uniform(0, 1)]))
                    job.start(place)
            hangs += int(not job.trains(3))
            hangs += int(not job.finish(START_SECONDS))
            alive = [name for name, _ in job.alive.values()]
            waits = []
            for at, _, left in kills:
                for name in left:
                    lines = job.lines(name)
                    wait = _longest_pause(lines, at)
                    trained = any(line.at < at for line in lines)
                    if trained and (math.isfinite(wait) or name in alive):  # else it was killed before its next step
                        waits.append(wait)
            lines = [line for name in job.names for line in job.lines(name)]
            return {
                "kills": len(kills),
                "joined again": len({n for n in job.names[ranks:] if job.lines(n)}),
                "steps": max(line.step for line in lines),
                "hangs": hangs + sum(wait > HANG_SECONDS for wait in waits),
                "waits": waits,
                "differing": job.differing(),
                "miscounted": job.miscounted(),
                "output": job.output(),
            }
        finally:
            job.close()


def _longest_pause(lines: list[Line], at: float) -> float:
    """The longest time between two steps of a process behind a kill, which it noticed at one of the first.

    Infinite where none came behind it.
    """
    later = [line.at for line in lines if line.at > at]
    soon = sum(time < at + 2 * HANG_SECONDS for time in later)
    times = [at, *later[: soon + 1]]
    return max((b - a for a, b in itertools.pairwise(times)), default=math.inf)


def _keep(found: Mapping[tuple[int, str, str], list[dict[str, Any]]]) -> None:
    """A row for each case so far."""
    rows = []
    for (ranks, transport, setting), results in found.items():
        waits = [wait for each in results for wait in each["waits"]]
        rows.append(
            {
                "ranks": ranks,
                "transport": transport,
                "setting": setting,
                "runs": len(results),
                "kills": sum(each["kills"] for each in results),
                "joined again": sum(each["joined again"] for each in results),
                "steps": sum(each["steps"] for each in results),
                "hangs over 10 s": sum(each["hangs"] for each in results),
                "steps with differing parameters": sum(len(each["differing"]) for each in results),
                "samples lost or repeated": sum(len(each["miscounted"]) for each in results),
                "kill to next step, median s": round(statistics.median(waits), 2),
                "longest, s": round(max(waits), 2),
                "load": round(os.getloadavg()[0], 1),
            }
        )
    write_csv(KEPT, rows)


def soak(steps: int, transport: str, ranks: int = 3) -> dict[str, Any]:
    """One training under churn: what its first rank holds, early and at the end."""
    chance, kills = random.Random(0), 0
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="fastreduce-elastic-") as folder:
        job = Job(ranks, Path(folder), transport, "int8:error_feedback", str(TIMEOUT))
        try:
            stays = job.start(0)
            for place in range(1, ranks):
                job.start(place)
            held: list[dict[str, Any]] = []
            while job.step_of(stays) < steps:
                before = job.step_of(stays)
                time.sleep(chance.uniform(0, 1))
                place = chance.randrange(1, ranks)
                job.kill(place)
                kills += 1
                time.sleep(chance.uniform(0, 0.5))
                job.start(place)
                if not job.trains():
                    raise RuntimeError(f"nobody trains: {job.output()}")
                path = Path(folder, f"{stays}.resources")
                if path.exists() and before // 100 < job.step_of(stays) // 100:
                    held.append(json.loads(path.read_text()))
            good = job.finish(START_SECONDS)
            early, late = held[len(held) // 5], held[-1]
            row = {
                "transport": transport,
                "steps": job.step_of(stays),
                "kills": kills,
                "differing": len(job.differing()),
                "samples lost or repeated": len(job.miscounted()),
                "ended well": good,
                **{f"{what}, after a fifth": early[what] for what in early},
                **{f"{what}, at the end": late[what] for what in late},
            }
        finally:
            job.close()
    row["files left in /dev/shm"] = len([name for name in set(os.listdir("/dev/shm")) - shared if "fastreduce" in name])
    row["load"] = round(os.getloadavg()[0], 1)
    print(row, flush=True)
    return row


def main(
    runs: Annotated[int, typer.Option(help="Trainings.")] = 20,
    first: Annotated[int, typer.Option(help="The seed of the first; others follow.")] = 0,
    at_once: Annotated[int, typer.Option(help="How many at a time; they mostly wait.")] = 1,
    steps: Annotated[int, typer.Option("--soak", help="One training of so many steps instead.")] = 0,
) -> None:
    """Run, print and keep."""
    if steps:
        write_csv(SOAKED, [soak(steps, transport) for transport in ("gloo", "shm")])
        return
    found: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    seeds = range(first, first + runs)
    with ThreadPoolExecutor(at_once) as threads:
        for seed, result in zip(seeds, threads.map(lambda seed: run(seed, *_case(seed)), seeds), strict=True):
            case = _case(seed)
            found.setdefault(case, []).append(result)
            bad = result["hangs"] or result["differing"] or result["miscounted"]
            told = f"{max(result['waits'], default=0):.2f} s, {result['joined again']} joined again"
            print(
                f"seed {seed}, {case}: {result['kills']} kills, longest pause {told}{' BAD' if bad else ''}", flush=True
            )
            if bad:
                print(result["differing"][:5], result["miscounted"][:5], result["output"][-6000:], flush=True)
            _keep(found)


def _case(seed: int) -> tuple[int, str, str]:
    return CASES[seed % len(CASES)]
