"""pytest-benchmark's JSON → tables on the terminal, CSV rows that are kept, and a plot."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .goals import NOT_PLAIN, Goal, Results, goals
from .plot import draw

COLUMNS = [
    "date",
    "commit",
    "cpu",
    "gpu",
    "cores",
    "load",
    "python",
    "torch",
    "numba",
    "numpy",
    "benchmark",
    "params",
    "contestant",
    "rounds",
    "median_s",
    "bytes",
    "gb_per_s",
    "of_copy",
    "ratio",
    "ratio_low",
    "ratio_high",
    "overhead_s",
    "overhead_ratio",
    "overhead_ratio_low",
    "overhead_ratio_high",
    "allocations",
    "peak_bytes",
    "device_bytes",
]
LEVELS = ("none", "fp16", "int8")  # settings that are measured in two levels


def show(source: Path, picture: Path, rows: Path, keeps: bool) -> None:
    """Print the tables and draw the plot; append the rows, or say that they are not kept."""
    document = json.loads(source.read_text())
    results: Results = {each["name"]: each["extra_info"] for each in document["benchmarks"]}
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    for table in tables(results):
        console.print(table)
    if document["machine_info"]["quick"]:
        console.print("[red]A quick run: sizes are too small for the goals, and rounds too few for the intervals.")
    draw(results, picture)
    if keeps:
        keep(document, rows)
    said = "and rows added to" if keeps else "but a benchmark has failed, and no row is added to"
    console.print(f"{source}, {picture}, {said} {rows}", soft_wrap=True)


def tables(results: Results) -> Iterator[Table]:
    """One for kernels, two for steps, one for overheads, one for MPI, and the goals last."""
    columns = ("operation", "ms", "GB/s", "/ copy", "× best of torch", "", "× reference")
    kernels = Table(*columns, title="Kernels (numba_cpu)")
    for name, info in results.items():
        if name.startswith("test_kernel"):
            kernels.add_row(*_kernel_row(name, info["contestants"], info["ours"]))
    steps = Table(
        "25 M parameters, 2 ranks",
        "ms",
        "none / it",
        "fp16 / it",
        "compress, reduce, decompress ms",
        "allocations",
        title="Steps",
    )
    both = [_contestants(results, f"test_step[{compression}]") for compression in ("none", "fp16")]
    for name, row in both[0].items():
        stages = ", ".join(f"{1e3 * s:.1f}" for s in (row["stages_s"] or {}).values())
        figures = [_figure(rows.get(name, {}).get("ratio")) for rows in both]
        steps.add_row(name, f"{1e3 * row['median_s']:.1f}", *figures, stages, str(row["allocations"]))
    links = Table("25 M parameters, 2 nodes", "ms", "fp16 / it", "int8 / it", "int4 / it", title="Steps at 1 Gbit/s")
    slow = [
        results.get(f"test_two_nodes[{compression}]", {}).get("contestants", {})
        for compression in ("fp16", "int8", "int4")
    ]
    for name, row in slow[0].items():
        figures = [_figure(rows.get(name, {}).get("ratio")) for rows in slow]
        links.add_row(name, f"{1e3 * row['median_s']:.1f}", *figures)
    levels = Table("2 nodes of 2 ranks", "ms", *(f"{name} / it" for name in LEVELS), title="Two levels")
    of_four = [_contestants(results, f"test_two_levels[{name}]") for name in LEVELS]
    for name, row in of_four[-1].items():
        figures = [_figure(rows.get(name, {}).get("ratio")) for rows in of_four]
        levels.add_row(name, f"{1e3 * row['median_s']:.1f}", *figures)
    overheads = Table("parameters of 64", "wrapper", "step ms", "wrapper adds ms", "ours / it", title="Host overhead")
    for name, info in results.items():
        if name.startswith("test_overhead"):
            for contestant, row in info["contestants"].items():
                added = [1e3 * s for s in row.get("overhead_s", ())]
                figures = [_figure(added), _figure(row.get("overhead_ratio"))]
                overheads.add_row(OVERHEADS[name], contestant, f"{1e3 * row['median_s']:.2f}", *figures)
            overheads.add_section()
    mpi = Table("25 M gradients, 2 ranks", "ms", "fp16 / it", title="MPI")
    for name, row in results.get("test_mpi", {}).get("contestants", {}).items():
        mpi.add_row(name, f"{1e3 * row['median_s']:.1f}", _figure(row.get("ratio")))
    shared = Table("", "contestant", "ms", "shared memory / it", title="Shared memory")
    for name, info in results.items():
        if name.startswith("test_shared"):
            for contestant, row in info["contestants"].items():
                ratio = row.get("overhead_ratio", row.get("ratio"))
                shared.add_row(SHARED[name], contestant, f"{1e3 * row['median_s']:.2f}", _figure(ratio))
            shared.add_section()
    reached = Table("goal", "", "measured", "", "", title="Goals")
    for goal in goals(results):
        add_goal(reached, goal)
    for table in (kernels, steps, links, levels, overheads, mpi, shared, reached):
        if table.row_count:
            yield table


OVERHEADS = {
    "test_overhead[1]": "1,000, world size 1",
    "test_overhead[2]": "1,000, 2 ranks",
    "test_overhead_of_hooks": "1,000, world size 1, no_sync",
    "test_overhead_of_launches": "300 in 20 buckets, launches that do nothing",
}
SHARED = {
    "test_shared_step[none]": "25 M parameters, 2 ranks: none / it",
    "test_shared_step[fp16]": "25 M parameters, 2 ranks: fp16 / it",
    "test_shared_crowded_step[none]": "6 M parameters, 4 ranks on 2 cores: none / it",
    "test_shared_crowded_step[fp16]": "6 M parameters, 4 ranks on 2 cores: fp16 / it",
    "test_shared_overhead": "1,000 parameters of 64, 2 ranks, what is added",
    "test_shared_sum[100]": "all-reduce of 100 MB, 2 ranks",
    "test_shared_sum[1]": "all-reduce of 1 MB, 2 ranks",
}


def add_goal(table: Table, goal: Goal) -> None:
    """A row of the table of goals."""
    limit = f"{'≥' if goal.at_least else '≤'} {goal.limit:g}"
    measured = "" if goal.measured is None else f"{goal.measured:.2f}"
    table.add_row(goal.what, limit, measured, f"[{COLOURS[goal.verdict]}]{goal.verdict}", goal.where)


COLOURS = {"met": "green", "missed": "red", "unmeasured": "yellow"}


def _contestants(results: Results, name: str) -> dict[str, Any]:
    contestants: dict[str, Any] = results.get(name, {}).get("contestants", {})
    return contestants


def _kernel_row(name: str, rows: dict[str, Any], ours: str) -> Iterator[str]:
    yield name.partition("[")[2].removesuffix(f"-{ours}]").replace("-", " ")
    yield f"{1e3 * rows[ours]['median_s']:.2f}"
    yield f"{rows[ours]['gb_per_s']:.1f}"
    yield f"{rows[ours]['of_copy'][0]:.2f}"
    plain = {way: row["ratio"] for way, row in rows.items() if way not in NOT_PLAIN}
    best = max(plain, key=lambda way: plain[way][0], default="")
    yield _figure(_inverse(plain.get(best)))
    yield best
    if "reference" in rows:
        yield _figure(_inverse(rows["reference"]["ratio"]))


def _inverse(figure: list[float] | None) -> list[float]:
    median, low, high = figure or (0, 0, 0)
    return [1 / median, 1 / high, 1 / low] if figure else []


def _figure(figure: list[float] | None) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*figure) if figure else ""


def keep(document: dict[str, Any], path: Path) -> None:
    """Append a row for each contestant of each benchmark."""
    machine, commit = document["machine_info"], document["commit_info"]
    run = {
        "date": document["datetime"][:19],
        "commit": f"{commit.get('id', '')[:12]}{'+changes' if commit.get('dirty') else ''}",
        "cpu": machine["cpu"].get("brand_raw", ""),
        "gpu": machine.get("gpu", ""),
        "cores": machine["cores"],
        "load": round(machine["load"], 2),
        "python": machine["python_version"],
        **machine["versions"],
    }
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for each in document["benchmarks"]:
            benchmark, _, params = each["name"].removesuffix("]").partition("[")
            for contestant, row in each["extra_info"]["contestants"].items():
                about = {**run, "benchmark": benchmark, "params": params, "contestant": contestant}
                writer.writerow({**about, **dict(cells(row, COLUMNS))})


def cells(row: dict[str, Any], columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What of a row goes into a file of these columns, rounded; of an interval all three numbers."""
    for key, value in row.items():
        if key in ("ratio", "overhead_ratio"):
            for suffix, number in zip(("", "_low", "_high"), value, strict=True):
                yield key + suffix, f"{number:.4g}"
        elif key in columns:
            number = value[0] if isinstance(value, list) else value
            yield key, f"{number:.6g}" if isinstance(number, float) else number
