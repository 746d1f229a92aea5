"""`python -m bench.scaling`: what a cost model says of many ranks, and, with --check, what some ranks say of the model.

Kernels, shared memory and sockets are measured here first. With --check ranks in network
namespaces, whose cables `tc` shapes, average gradients, and the model must be within 20 % of what they take; that needs
root, `ip` and `tc`. With --keep, inputs go to bench/results/scaling.json, the check's rows to scaling_check.csv beside
it, and tables into docs/scaling.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from tests.support.commands import ROOT
from tests.support.two_nodes import CannotMake

from ..kernels.shapes import buckets_of
from ..tables import markdown, write_csv
from . import inputs as measured
from . import star
from .model import SETTINGS, Cluster, Inputs, flat, two_levels

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "scaling.md"
MODEL = "resnet50"  # 25.6 million parameters
HERE = 4  # ranks of a host
RANKS, GIGABITS = (8, 64, 512), (1, 10, 100)
OF_LINK = 0.95  # of its bits a second, what TCP carries in frames of 1500 bytes
CHECKED = ((2, 1), (2, 2), (4, 2))  # hosts, and ranks of each
SIZES = [720 * 720] * 12
WITHIN = 0.2


class Seen(NamedTuple):
    """One row of the check; seconds."""

    ranks: int
    hosts: int
    setting: str
    how: str
    model: float
    measured: float

    @property
    def off(self) -> float:
        """How much longer the model's step is, of the measured one."""
        return self.model / self.measured - 1


def bytes_a_second(gigabits: float) -> float:
    """What TCP carries over a link."""
    return OF_LINK * gigabits * 1e9 / 8


def predicted(inputs: Inputs) -> Iterator[list[str]]:
    """A row of the table for each number of ranks and each link: milliseconds, flat / in two levels."""
    buckets = [bucket.total for bucket in buckets_of(MODEL, 128, sys.maxsize)[1]]
    for ranks in RANKS:
        for gigabits in GIGABITS:
            cluster = Cluster(ranks // HERE, HERE, bytes_a_second(gigabits))
            times = [
                f"{1e3 * flat(inputs, cluster, setting, buckets):,.0f} / "
                f"{1e3 * two_levels(inputs, cluster, setting, buckets):,.0f}"
                for setting in SETTINGS
            ]
            yield [str(ranks), str(gigabits), *times]


def check(rounds: int, gigabits: float) -> Iterator[Seen]:
    """Model and measurement, for 2, 4 and 8 ranks; inputs are measured on as many.

    Raises:
        CannotMake: with the reason, where there can be no namespaces.
    """
    for hosts, here in CHECKED:
        inputs = measured.measure(hosts * here, here, sum(SIZES))
        with star.star(hosts, f"{1000 * gigabits:.0f}mbit") as names, tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "medians.json")
            command = ["-m", "bench.scaling.timed_rank", ",".join(map(str, SIZES)), rounds, out]
            star.run(names, here, command, timeout=400)
            found: Mapping[str, float] = json.loads(out.read_text())
        cluster = Cluster(hosts, here, bytes_a_second(gigabits))
        for name, seconds in found.items():
            setting, how = name.split(", ")
            model = flat if how == "flat" else two_levels
            yield Seen(hosts * here, hosts, setting, how, model(inputs, cluster, setting, buckets()), seconds)


def buckets() -> list[int]:
    """Elements of each bucket of `timed_rank.Given`, as a wrapper cuts it by itself."""
    return [SIZES[0], sum(SIZES[1:])]


def rows_of(seen: Iterable[Seen]) -> Iterator[list[str]]:
    """Of the check's table."""
    for row in seen:
        place = f"{row.ranks} on {row.hosts} hosts"
        times = [f"{1e3 * seconds:.0f}" for seconds in (row.model, row.measured)]
        yield [place, f"`{row.setting}`", row.how, *times, f"{row.off:+.0%}"]


def put(mark: str, text: str) -> None:
    """Replace what is between two comments of the page."""
    before, _, rest = PAGE.read_text().partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition(f"<!-- end of {mark} -->")
    assert end, f"{PAGE} has no {mark}"
    PAGE.write_text(f"{before}<!-- {mark} -->\n{text.rstrip()}\n{end}{after}")


def main(
    checked: Annotated[bool, typer.Option("--check", help="Hold it against 2, 4 and 8 ranks in namespaces.")] = False,
    keep: Annotated[bool, typer.Option(help="Write results, and the tables of docs/scaling.md.")] = False,
    rounds: Annotated[int, typer.Option(help="Steps of each kind in the check.")] = 11,
    gigabits: Annotated[float, typer.Option(help="Gbit/s of each cable in the check.")] = 0.25,
) -> None:
    """Measure, predict, print, and check."""
    inputs = measured.measure(HERE, HERE, sum(SIZES), min)
    at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    where = f"{at}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    head = ["ranks", "Gbit/s", *(f"`{setting}`, ms" for setting in SETTINGS)]
    told = f"**Model**, by inputs measured (the shortest of {measured.ROUNDS} rounds) {where}:"
    told += f"\n\n{markdown([head, *predicted(inputs)])}"
    print(json.dumps(asdict(inputs), indent=1), told, sep="\n\n")
    if keep:
        (RESULTS / "scaling.json").write_text(json.dumps({"measured": where, **asdict(inputs)}, indent=1) + "\n")
        put("model", told)
    if not checked:
        return
    try:
        seen = list(check(rounds, gigabits))
    except CannotMake as reason:
        sys.exit(f"no network namespaces here: {reason}")
    far = [row for row in seen if abs(row.off) > WITHIN]
    head = ["ranks", "setting", "", "model, ms", "measured, ms", "model over measured"]
    told = f"{len(seen) - len(far)} of {len(seen)} within {WITHIN:.0%} at {gigabits:g} Gbit/s, {where}:"
    told += f"\n\n{markdown([head, *rows_of(seen)])}"
    print(told)
    if keep:
        write_csv(RESULTS / "scaling_check.csv", [{**row._asdict(), "off": round(row.off, 3)} for row in seen])
        put("check", told)
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    typer.run(main)
