"""`python -m bench.faults`: is the rank at fault named, and the cause? Kinds of faults, injected into real ranks.

Three ranks train (two in network namespaces where it is about the link), one of them does what is wrong, and it is
looked at what the others are told: in their error, or in the line of who is late. Right is what names this rank, no
other one, and the cause, within the timeout and 5 s. Clean trainings must be told nothing. Each run is a row in
bench/results/faults.jsonl, written when it has ended; a command that is repeated runs what is missing.
docs/who-is-late.md has the table. The three kinds about links and the one about disks need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tests.support.commands import ROOT, end, with_environment
from tests.support.fork_server import run_as_script, server
from tests.support.two_nodes import ADDRESSES, INTERFACE, two_nodes

from .. import json_lines
from ..gpu.lines import commit
from ..tables import markdown, of_commits
from .fault_ranks import Job

KEPT = Path(__file__).parents[1] / "results" / "faults.jsonl"
RANKS = 3
TIMEOUT, LATE = 10.0, 5.0  # seconds: of the group, and beyond it until all have been told
START, MORE = 240.0, 60.0  # until it begins, and beyond the timeout until a run is given up
BACK = 3.0  # seconds until a link that was cut is back
RATE = ("rate", "250mbit", "burst", "256kb", "latency", "50ms")
DISK = "256k"
CLEAN = "clean"

LATER = r"^told at [\d.]+: rank {victim} is late by [\d.]+ ms a step \(\d+% of it\), mostly in {part}, since about .*$"
MISMATCH = r"MismatchError: ranks differ in {what}: .*rank {victim} has "


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        what: what one rank does, or what is done to it.
        told: what all who are left must be told, as a regular expression over lines; {victim} stands for the rank.
        where: parts of a step, of which a run takes one.
        step: in which it begins, about.
        by: "error", in which no other rank may be named as missing, or "line", while it trains.
        link: whether it is about the link between two nodes: what is done to it, and later.
    """

    what: str
    told: str
    where: Sequence[str] = ("data",)
    step: int = 40
    by: str = "error"
    link: Sequence[Sequence[str]] = ()

    def expects(self, victim: int) -> re.Pattern[str]:
        """The expression for a run."""
        return re.compile(self.told.replace("{victim}", str(victim)), re.MULTILINE)


def _line(told: str) -> str:
    return rf"^told at [\d.]+: {told}$"


ANY = ("data", "forward", "backward")
UNEVEN = r"rank {victim} is out of step: in the last \d+ averages it ran "
KINDS: Mapping[str, Kind] = {
    "SIGSTOP": Kind("is stopped", r"^Rank {victim}\b.*its process \d+ is stopped \(SIGSTOP\)", ANY),
    "SIGKILL": Kind("kill -9", r"^Rank {victim}\b.*its process \d+ has ended. It said nothing at its end.*killed", ANY),
    "exception": Kind(
        "raises in forward",
        r"^Rank {victim} has ended, in forward.*: it raised RuntimeError: a bad batch$",
        ("forward",),
    ),
    "exit": Kind("sys.exit(0)", r"^Rank {victim} has ended.*: its script has come to its end, or called sys.exit"),
    "lock": Kind(
        "waits for a lock that nobody releases",
        r"^Rank {victim}, [\d.]+ s ago, was (between|in (for|back)ward)(.*\n)*.* in take_lock\n +lock\.acquire\(\)",
        ANY,
    ),
    "torch collective": Kind(
        "torch.distributed.all_reduce alone",
        r"^Rank {victim}, .* It was in torch\.distributed\.all_reduce \(line \d+ of .*, in torch_collective\)",
        ("data", "forward"),
    ),
    "our collective": Kind(
        "fastreduce.distributed.all_reduce alone",
        r"^Rank {victim}, .* It was in fastreduce\.distributed\.all_reduce \(line \d+ of .*, in our_collective\)",
        ("data", "forward"),
    ),
    "batch": Kind(
        "has a batch less, and evaluates",
        r"^Rank {victim}, [\d.]+ s ago, was between its optimizer's step and its forward(.*\n)*.* in evaluate$",
    ),
    "missing": Kind(
        "a forward without its backward",
        _line(UNEVEN + r"\d+ forward\(s\) to be averaged \(others \d+\): a forward had no backward, .*"),
        by="line",
    ),
    "no_sync": Kind(
        "one step in no_sync alone",
        _line(UNEVEN + r".*1 forward\(s\) in no_sync \(others 0\).*: not all were in no_sync at once"),
        by="line",
    ),
    "backwards": Kind(
        "three backwards a step, others two",
        _line(UNEVEN + r"\d+ optimizer step\(s\) \(others \d+\): not all run as many backwards .*"),
        by="line",
    ),
    "frozen later": Kind(
        "freezes a parameter while it trains",
        _line(r"rank {victim} has frozen '3\.weight', which other ranks train: .*"),
        by="line",
    ),
    "frozen": Kind(
        "a parameter that is frozen",
        MISMATCH.replace("{what}", r"parameter '3\.weight'") + r"shape \(256, 256\), torch\.float32, requires no grad",
    ),
    "shape": Kind(
        "a parameter of another shape", MISMATCH.replace("{what}", r"parameter '3\.weight'") + r"shape \(264, 256\)"
    ),
    "dtype": Kind(
        "parameters of another dtype",
        MISMATCH.replace("{what}", r"parameter '3\.weight'") + r"shape \(256, 256\), torch\.float64",
    ),
    "order": Kind(
        "parameters in another order", MISMATCH.replace("{what}", "the order of parameters") + r"parameter '3\.bias'"
    ),
    "setting": Kind("another compression", MISMATCH.replace("{what}", "compression") + "bf16"),
    "backward": Kind("30 % longer in backward", LATER.replace("{part}", "compute"), ("backward",), 60, "line"),
    "loader": Kind("30 % of a step longer in data", LATER.replace("{part}", "data"), ("data",), 60, "line"),
    "optimizer": Kind(
        "30 % of a step longer in the optimizer", LATER.replace("{part}", "optimizer"), ("optimizer",), 60, "line"
    ),
    "gc": Kind("collects garbage, often and long", LATER.replace("{part}", "gc"), ANY, 60, "line"),
    "disk": Kind("a full disk in save_checkpoint", r"CheckpointError: rank 0, writing .*No space left on device"),
    "slow link": Kind(
        "tbf on the link between two nodes",
        _line(r"the link has become slow: since about step \d+ all ranks wait .*"),
        step=310,
        by="line",
        link=[("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *RATE)],
    ),
    "link cut": Kind(
        "cut, between two nodes",
        r"its host [\d.]+ is out of reach \(.*\): its link is cut, or it is down",
        step=60,
        link=[("ip", "link", "set", INTERFACE, "down")],
    ),
    "link back": Kind(
        f"cut for {BACK:g} s, between two nodes",
        _line(r"all ranks waited [\d.]+ s for their averages in step \d+: the link was interrupted, .*"),
        step=60,
        by="line",
        link=[("ip", "link", "set", INTERFACE, "down"), ("ip", "link", "set", INTERFACE, "up")],
    ),
    CLEAN: Kind("nothing", r"^trained 500 steps$", by="line"),
}
_one_by_one = threading.Lock()  # the namespaces have one name each


def draw(name: str, seed: int, folder: Path) -> Job:
    """Who does it, when, and where in a step; over which transport, under which setting."""
    kind, chance = KINDS[name], random.Random(f"{name} {seed}")
    victim = -1 if kind.link or name == CLEAN else 0 if name == "disk" else chance.randrange(RANKS)
    step = kind.step + chance.randrange(20)
    where, transport = chance.choice(kind.where), "gloo" if kind.link else chance.choice(["gloo", "shm"])
    setting = "none" if name == "slow link" else chance.choice(["none", "int8", "fp16"])
    return Job(str(folder), name, victim, step, where, TIMEOUT, transport, setting, str(folder / "disk"))


def run(name: str, seed: int) -> dict[str, Any]:
    """One training, as a row."""
    kind, load = KINDS[name], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fastreduce-faults-") as text:
        job = draw(name, seed, Path(text))
        with contextlib.ExitStack() as stack:
            if name == "disk":
                stack.enter_context(_small_disk(Path(job.disk)))
            if kind.link:
                stack.enter_context(_one_by_one)
                began = _between_two_nodes(kind, job)
            else:
                began = _here(job, name)
        output = {int(file.stem): file.read_text() for file in sorted(Path(text).glob("*.out"))}
    witnesses = [rank for rank in output if rank != job.victim or kind.by == "line"]
    told = [_told(output[rank]) for rank in witnesses]
    times = [_time(output[rank]) for rank in witnesses]
    seconds = max(times, default=0.0) - began if began and all(times) else None
    named = all(kind.expects(job.victim).search(text) for text in told)
    in_time = name == CLEAN or (seconds is not None and 0 <= seconds <= TIMEOUT + LATE)
    right = bool(told) and named and not _others(told, job.victim, name) and in_time
    return {
        "kind": name,
        "seed": seed,
        "right": right,
        "seconds": None if seconds is None or name == CLEAN else round(seconds, 2),
        "victim": job.victim,
        "where": job.where,
        "transport": job.transport,
        "setting": job.setting,
        "step": job.step,
        "load": round(load, 1),
        "told": _first_line(next((found[0] for t in told if (found := kind.expects(job.victim).search(t))), ""), text),
        **({} if right else {"output": {rank: output[rank][-4000:] for rank in output}}),
    }


def _first_line(told: str, folder: str) -> str:
    """Without this machine's paths."""
    return told.partition("\n")[0].replace(f"{folder}/", "").replace(f"{ROOT}/", "")[:300]


def _told(text: str) -> str:
    return text.replace("[rank0]: ", "").replace("[rank1]: ", "").replace("[rank2]: ", "")


def _time(text: str) -> float:
    """When a rank was told something; 0 if it was not."""
    found = re.findall(r"^(?:raised|told) at ([\d.]+)", text, re.MULTILINE)
    return float(found[-1]) if found else 0.0


def _others(told: Sequence[str], victim: int, name: str) -> bool:
    """Whether another rank is named."""
    missing = {
        rank
        for text in told
        for ranks in re.findall(r"No word from rank ([\d, ]+):", text)
        for rank in ranks.split(", ")
    }
    late = {
        rank
        for text in told
        for rank in re.findall(r"rank (\d+) is (?:late|out of step)|rank (\d+) has frozen", text)
        for rank in rank
        if rank
    }
    return not KINDS[name].link and bool((missing | late) - {str(victim)})


def _here(job: Job, name: str) -> float:
    """Ranks that meet in a store of this process, as under torchrun; returns when it began."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS)}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "FASTREDUCE_HOST": ""}
    with contextlib.ExitStack() as stack:
        ranks = {}
        for rank in range(RANKS):
            env = with_environment(**where, RANK=str(rank), LOCAL_RANK=str(rank))
            arguments = ("bench.faults.fault_ranks", [json.dumps(asdict(job))], str(Path(job.folder, f"{rank}.out")))
            ranks[rank] = server(rank).fork(run_as_script, *arguments, env=env)
            stack.callback(ranks[rank].kill)
        waits_for = [process for rank, process in ranks.items() if rank != job.victim or KINDS[name].by == "line"]
        return _follow(Path(job.folder), name, lambda: all(process.poll() is not None for process in waits_for))


def _between_two_nodes(kind: Kind, job: Job) -> float:
    """A rank on each of two nodes, whose link is changed when they have come so far; returns when."""
    with two_nodes() as names, contextlib.ExitStack() as stack:
        ranks = []
        for rank, name in enumerate(names):
            where = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0]}
            env = with_environment(**where, MASTER_PORT="29500", GLOO_SOCKET_IFNAME=INTERFACE)
            command = [sys.executable, "-m", "bench.faults.fault_ranks", json.dumps(asdict(job))]
            out = stack.enter_context(Path(job.folder, f"{rank}.out").open("w"))
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    env=env,
                    stdout=out,
                    stderr=out,
                    text=True,
                    start_new_session=True,
                )
            )
            stack.callback(end, ranks[-1])
        going, event = Path(job.folder, "going"), Path(job.folder, "event")

        def done() -> bool:
            if going.exists() and not event.exists():
                event.write_text(str(time.time()))
                first, *then = kind.link
                subprocess.run(["ip", "netns", "exec", names[0], *first], check=True)
                for command in then:
                    time.sleep(BACK)
                    subprocess.run(["ip", "netns", "exec", names[0], *command], check=True)
            return all(rank.poll() is not None for rank in ranks)

        return _follow(Path(job.folder), job.kind, done)


def _follow(folder: Path, name: str, done: Callable[[], bool]) -> float:
    """Wait until those who are to be told have ended, for so long; returns when it began, 0 if it did not."""
    event, start = folder / "event", time.time()
    began = 0.0
    while not done() and time.time() < (began + TIMEOUT + MORE if began else start + START):
        began = began or (float(event.read_text() or 0) if event.exists() else 0.0)
        time.sleep(0.02)
    return began or (float(event.read_text()) if event.exists() else 0.0)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "fastreduce-faults", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A heading, and a line for each kind."""
    lines = [["kind", "one rank, or the link", "runs", "rank and cause right", "seconds, median", "longest"]]
    for name, kind in KINDS.items():
        found = [row for row in rows if row["kind"] == name]
        seconds = [row["seconds"] for row in found if row["seconds"] is not None]
        times = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else ["–", "–"]
        if found:
            lines.append([name, kind.what, str(len(found)), str(sum(row["right"] for row in found)), *times])
    return lines


def main(
    only: Annotated[list[str] | None, typer.Option(help="A kind; again for further ones.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    clean: Annotated[int, typer.Option(help="Runs of 500 steps in which nothing happens.")] = 30,
    jobs: Annotated[int, typer.Option(help="Runs at a time.")] = 2,
    out: Annotated[Path, typer.Option(help="Where rows are, and go.")] = KEPT,
    in_markdown: Annotated[bool, typer.Option("--markdown", help="The table as docs/who-is-late.md has it.")] = False,
) -> None:
    """Run what is missing, and show all."""
    unknown = set(only or ()) - set(KINDS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: allowed: {', '.join(KINDS)}")
    there = {(row["kind"], row["seed"]) for row in json_lines.read(out)}
    wanted = [(name, seed) for name in only or KINDS for seed in range(clean if name == CLEAN else seeds)]
    missing = [each for each in wanted if each not in there]
    made_by, console = {"commit": commit()}, Console()

    def keep(each: tuple[str, int]) -> None:
        row = run(*each)
        json_lines.append(out, [{**row, **made_by}])
        verdict = "right" if row["right"] else "WRONG"
        console.print(f"{row['kind']} {row['seed']}: {verdict}, {row['seconds']} s, load {row['load']}")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(keep, missing))
    rows = list(json_lines.read(out))
    lines, made = table(rows), f"Rows by commit: {of_commits(row['commit'] for row in rows)}."
    if in_markdown:
        print(markdown(lines), made, sep="\n")
        return
    shown = Table(*lines[0], box=box.SIMPLE)
    for line in lines[1:]:
        shown.add_row(*line)
    console.print(shown)
    faults = [row for row in rows if row["kind"] != CLEAN]
    console.print(f"{sum(row['right'] for row in faults)} of {len(faults)} faults named, rank and cause. {made}")


if __name__ == "__main__":
    typer.run(main)
