"""`python -m bench.gpu --collect DIR`: tables, CSV rows and a plot of what runs have left, however they ended."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..goals import NOT_PLAIN
from ..report import COLOURS, add_goal, cells
from ..tables import of_commits
from .gpu_goals import gpu_goals, shown
from .kept_picture import draw, of_kept
from .lines import FILE, ROOT, Row, commit, read, rows, sources
from .probe import MACHINE

KEPT = ROOT / "bench" / "results" / "gpu.csv"
COLUMNS = [
    "date", "commit", "rehearsal", "gpu", "driver", "cores", "load", "python", "torch", "triton", "cupy", "numba-cuda",
    "nccl", "phase", "case", "contestant", "rounds", "median_s", "gpu_s", "host_s", "late", "launches",
    "host_us_a_launch", "bytes", "gb_per_s", "of_copy", "ratio", "ratio_low", "ratio_high", "backward_host_s",
    "backward_overhead_s", "overhead_s", "overhead_ratio", "overhead_ratio_low", "overhead_ratio_high",
    "first_of_turn_s", "first_call_s", "peak_bytes", "device_bytes", "error", "wrong", "predicted", "other",
]  # fmt: skip


class RehearsalError(Exception):
    """A rehearsal's rows are to be kept as measured ones."""


def show(source: Path, out: Path, keep: bool) -> None:
    """Print tables of the lines in `source` and in folders below it; write results.csv and gpu.png into `out`.

    Args:
        source: a file of lines, or a folder of them; of a CSV of kept rows gpu.png is drawn, and no more.
        out: the folder to write to.
        keep: whether to append to bench/results/gpu.csv what is not there yet.

    Raises:
        FileNotFoundError: if there are no lines, or rows.
        RehearsalError: if rows of a rehearsal are to be kept, or are mixed with a GPU's.
        ValueError: if rows are to be kept in a file of other columns.
    """
    if source.suffix == ".csv":
        out.mkdir(parents=True, exist_ok=True)
        if not (kept := of_kept(source)):
            raise FileNotFoundError(f"no rows in {source}")
        draw(latest(kept[max(kept)]), out / "gpu.png", max(kept)[1])
        return
    files = sorted(source.rglob(FILE)) if source.is_dir() else [source]
    found = sorted(rows(line for file in files for line in read(file)), key=lambda row: row.run)
    if not found:
        raise FileNotFoundError(f"no lines in {source}: a run leaves them in {FILE}")
    rehearsal = any(row.rehearsal for row in found)
    if rehearsal and not all(row.rehearsal for row in found):
        raise RehearsalError(f"{source} holds lines of a rehearsal beside those of a GPU: collect them apart")
    if rehearsal and keep:
        raise RehearsalError(f"{source} holds lines of a rehearsal, which measures nothing: they are not kept")
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    warning = "A REHEARSAL, without a GPU: no figure here is a measurement" if rehearsal else ""
    by_gpu = of_each_gpu(found)
    for gpu, of_gpu in by_gpu.items():
        for table in tables(of_gpu):
            table.title = f"{table.title}, {gpu}" if gpu else table.title
            if warning:
                table.title = f"{table.title} [red]({warning})"
            console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    written = list(csv_rows(found))
    write(out / "results.csv", written, "w")
    gpu, last = list(by_gpu.items())[-1]
    drawn = latest(last)
    draw(drawn, out / "gpu.png", ": ".join(filter(None, (warning or gpu, commits_of(drawn)))))
    said = f"{out / 'results.csv'}, {out / 'gpu.png'}"
    if keep:
        new = not_in(KEPT, written)
        write(KEPT, new, "a")
        said += f", and {len(new)} rows added to {KEPT}, which had {len(written) - len(new)} of them already"
    console.print(said, soft_wrap=True)


def of_each_gpu(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the name of the GPU they were measured on, the last one last: figures of two GPUs are not one table."""
    names = {row.run: row.result["gpu"] for row in found if row.case == MACHINE and row.result.get("gpu")}
    by_gpu: dict[str, list[Row]] = {}
    for row in found:  # by run, the last one last
        name = names.get(row.run, "")
        by_gpu[name] = [*by_gpu.pop(name, []), row]
    return by_gpu


def latest(found: Iterable[Row]) -> list[Row]:
    """One row for each case: the last that was done or failed, else the last that was left out.

    A failure hides no figure that the same sources have left before: that was measured, and `_failed_since` names both.
    """
    by_case: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        by_case.setdefault((row.phase, row.case), []).append(row)
    chosen = []
    for ends in by_case.values():
        ends.sort(key=lambda row: (row.tells, row.at))
        figures = [row for row in ends if _outlives(row, ends[-1])]
        chosen.append([*ends, *figures][-1])
    return chosen


def _outlives(figure: Row, failure: Row) -> bool:
    """Whether the first is a measurement, and the second a failure of the same sources."""
    same = _named(figure.commit) == _named(failure.commit) and not figure.commit.endswith("+changes")
    return same and figure.status == "done" and failure.status == "failed" and not figure.is_test


@cache
def _named(named: str) -> str:
    """A row's commit, also where a copy without Git's folder knew the hash of its sources only."""
    return commit() if named == f"sources:{sources()}" else named


def commits_of(last: Iterable[Row]) -> str:
    """Of how many rows with a result each commit is, where there are several."""
    found = [_named(row.commit) for row in last if row.tells]
    return of_commits(found) if len(set(found)) > 1 else ""


# Tables


def tables(found: Sequence[Row]) -> Iterator[Table]:
    """Commits, machine and probe, kernels, sweep, steps, memory, tests, what has no result, predictions, goals."""
    last = latest(found)
    done = [row for row in last if row.status == "done"]
    chosen = (_commits(last), _probe(done), _kernels(done), _steps(done), _memory(done), _tests(last), _missing(last))
    for table in (*chosen, _failed_since(found, last), _predictions(last), _goals(last)):
        if table.row_count:
            yield table


def _commits(last: Sequence[Row]) -> Table:
    """Of how many rows of each phase a commit is, where the tables below are of several."""
    table = Table("phase", "rows of a commit", title="Rows of several commits")
    if commits_of(last):
        for phase in dict.fromkeys(row.phase for row in last if row.tells):
            table.add_row(phase, of_commits(_named(row.commit) for row in last if row.tells and row.phase == phase))
    return table


def _probe(done: Sequence[Row]) -> Table:
    table = Table("case", "", title="Machine")
    for row in done:
        if row.phase == "probe" or row.case in (MACHINE, "trace", "switch"):
            parts = [f"{key}: {_short(value)}" for key, value in row.result.items() if value not in (None, {}, "")]
            table.add_row(f"{row.phase}: {row.case}", ", ".join(parts))
    return table


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key} {_short(each)}" for key, each in value.items())
    return str(value)


def _kernels(done: Sequence[Row]) -> Table:
    table = Table("operation", "", "GPU ms", "GB/s", "copy GB/s", "/ copy", "× best of torch", "", title="Kernels")
    table.columns[0].overflow = "fold"
    for heading in ("host µs a launch", "first call s", ""):
        table.add_column(heading)
    for row in done:
        contestants = row.result.get("contestants", {})
        if row.phase not in ("kernels", "numba") or "unwrapped" in contestants:
            continue
        ours, copy = row.result.get("ours", ""), contestants.get("copy", {})
        plain = {way: r["ratio"] for way, r in contestants.items() if way not in NOT_PLAIN and "ratio" in r}
        best = max(plain, key=lambda way: plain[way][0], default="")
        for name, each in contestants.items():
            if copy and name != ours:
                continue
            notes = ["[red]WRONG[/]"] * bool(row.result.get("wrong"))
            notes += [f"host late in {each['late']} of {each['rounds']}"] * bool(each.get("late"))
            table.add_row(
                row.case.removesuffix(f"-{ours}"),
                name,
                f"{1e3 * each['gpu_s']:.3f}",
                _number(each, "gb_per_s", ".0f"),
                _number(copy, "gb_per_s", ".0f"),
                _number(each, "of_copy", ".2f"),
                f"{1 / plain[best][0]:.2f}" if copy and best else "",
                best if copy else "",
                _number(each, "host_us_a_launch", ".1f"),
                _number({**row.result, **each}, "first_call_s", ".1f"),
                ", ".join(notes),
            )
    return table


def _number(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "" if value is None else format(value[0] if isinstance(value, list) else value, form)


def _steps(done: Sequence[Row]) -> Table:
    columns = ("case", "contestant", "step ms", "wrapper adds ms", "ours / it", "backward on the host ms", "GPU ms")
    table = Table(*columns, "compress, reduce, decompress ms", title="Steps, one rank")
    for row in done:
        contestants = row.result.get("contestants", {})
        if row.phase not in ("steps", "numba") or "unwrapped" not in contestants:
            continue
        for name, each in contestants.items():
            stages = ", ".join(f"{1e3 * s:.2f}" for s in (each.get("stages_s") or {}).values())
            late = "*" if each.get("late") else ""  # the host's part is in it
            table.add_row(
                row.case,
                name + (" [red]WRONG[/]" if name in row.result.get("wrong", "") else ""),
                f"{1e3 * each['median_s']:.2f}",
                _figure(each.get("overhead_s"), 1e3),
                _figure(each.get("overhead_ratio")),
                f"{1e3 * each['backward_host_s']:.2f}",
                f"{1e3 * each['gpu_s']:.2f}{late}",
                stages,
            )
        table.add_section()
    table.caption = "* the host was late: its time is in the GPU's"
    return table


def _memory(done: Sequence[Row]) -> Table:
    table = Table("contestant", "peak MiB", "held by the process MiB", "counted", title="Memory of a step, 128 tokens")
    for row in done:
        if row.case.startswith("memory: "):
            each = row.result["contestants"]["it"]
            figures = [f"{each[key] / 2**20:.0f}" for key in ("peak_bytes", "device_bytes")]
            table.add_row(row.case.removeprefix("memory: "), *figures, row.result["counted"])
    return table


def _tests(last: Sequence[Row]) -> Table:
    table = Table("run", "passed", "failed", "skipped", "not reached", "", title="Tests")
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for row in last:
        if row.is_test:
            run = f"{row.phase}: {row.case.partition(': ')[0]}"
            counts.setdefault(run, Counter())[row.status] += 1
            if row.status == "skipped":
                reasons.setdefault(run, Counter())[row.why[:80]] += 1
    for run, count in counts.items():
        why = "; ".join(f"{n}: {reason}" for reason, n in reasons.get(run, Counter()).most_common(3))
        figures = [count["done"], count["failed"], count["skipped"], count["planned"] + count["begun"]]
        table.add_row(run, *map(str, figures), why)
    return table


def _missing(last: Sequence[Row]) -> Table:
    table = Table("case", "", title="Without a result")
    for row in last:
        if row.status != "done" and not (row.is_test and row.status in ("skipped", "planned")):
            lines = row.ending.strip().splitlines()
            table.add_row(f"{row.phase}: {row.case}", lines[0][:200] + (f" … {lines[-1][:200]}" if lines[1:] else ""))
    return table


def _failed_since(found: Sequence[Row], last: Sequence[Row]) -> Table:
    """Cases whose figures are in the tables, though a later run of the same sources has failed."""
    table = Table("case", "", title="Failed since it was measured")
    shown_at = {(row.phase, row.case): row.at for row in last if row.status == "done"}
    for row in found:
        if row.status == "failed" and row.tells and row.at > shown_at.get((row.phase, row.case), row.at):
            table.add_row(f"{row.phase}: {row.case}", row.ending.strip()[:400])
    return table


def _figure(figure: Sequence[float] | None, factor: float = 1.0) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*(factor * x for x in figure)) if figure else ""


# Predictions and goals


def measured(row: Row, name: str) -> float | None:
    """The figure of a contestant that a prediction, "contestant: figure", is about."""
    contestant, _, figure = name.rpartition(": ")
    result = row.result["contestants"].get(contestant, {}) if contestant else row.result
    value = result.get(figure)
    value = value[0] if isinstance(value, list) and value else value
    return float(value) if isinstance(value, (int, float)) else None


def _predictions(last: Sequence[Row]) -> Table:
    table = Table("case", "figure", "predicted", "measured", "", "because", title="Predictions, from before each case")
    for row in last:
        for name, each in row.predictions.items():
            low, high = each["low"], each["high"]
            found = measured(row, name) if row.status == "done" and not row.result.get("wrong") else None
            within = found is not None and (low is None or found >= low) and (high is None or found <= high)
            said, colour = ("as predicted", "green") if within else ("otherwise", "red")
            if found is None or row.rehearsal:
                said, colour = "unmeasured", "yellow"
            figures = [span(each), "" if found is None else f"{found:.2f}", f"[{colour}]{said}"]
            table.add_row(row.case, name.removeprefix(": "), *figures, each["reason"])
    return table


def span(prediction: dict[str, Any]) -> str:
    """The bounds in words."""
    low, high = prediction["low"], prediction["high"]
    return f"≤ {high:g}" if low is None else f"≥ {low:g}" if high is None else f"{low:g} to {high:g}"


def _goals(last: Sequence[Row]) -> Table:
    """A rehearsal reaches none of them, and misses none."""
    table = Table("goal", "", "measured", "", "", title="Goals")
    rows = [row for row in last if not row.rehearsal]
    for goal in gpu_goals(rows):
        add_goal(table, goal)
    for what, verdict, where in shown(rows):
        table.add_row(what, "", "", f"[{COLOURS[verdict]}]{verdict}", where)
    return table


# Rows and the plot


def csv_rows(found: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A row for each contestant of each case that was done, and one for each run of tests."""
    machines = {(row.run, row.phase): row.result for row in found if row.case == MACHINE and row.status == "done"}
    tests: dict[tuple[str, str, str], Counter[str]] = {}
    firsts: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in found:
        others = (each for (run, _), each in machines.items() if run == row.run)
        machine = machines.get((row.run, row.phase)) or next(others, {})
        common = {
            "date": row.run[:19],
            "commit": _named(row.commit),
            "rehearsal": "yes" if row.rehearsal else "",
            **_machine_cells(machine),
            "phase": row.phase,
        }
        if row.is_test:
            key = row.run, row.phase, row.case.partition(": ")[0]
            tests.setdefault(key, Counter())[row.status] += 1
            firsts.setdefault(key, {**common, "case": f"tests: {key[2]}"})
        elif row.status == "done":
            expected = "; ".join(f"{name.removeprefix(': ')} {span(each)}" for name, each in row.predictions.items())
            other = {k: v for k, v in row.result.items() if k not in ("contestants", "ours", "wrong", "first_call_s")}
            about = {
                **common,
                "case": row.case,
                "predicted": expected,
                "wrong": row.result.get("wrong", ""),
                "other": json.dumps(other) if other else "",
            }
            for contestant, each in row.result.get("contestants", {"": {}}).items():
                ours = contestant in ("", row.result.get("ours"))
                first = {"first_call_s": row.result["first_call_s"]} if ours and "first_call_s" in row.result else {}
                yield {**about, "contestant": contestant, **dict(cells({**first, **each}, COLUMNS))}
    for key, common in firsts.items():
        yield {**common, "other": json.dumps(tests[key])}


def _machine_cells(machine: dict[str, Any]) -> dict[str, Any]:
    packages = machine.get("packages", {})

    def first(*names: str) -> str:
        return next((packages[name] for name in names if name in packages), "")

    return {
        "gpu": machine.get("gpu") or "",
        "driver": machine.get("nvidia_smi", {}).get("driver_version", ""),
        "cores": machine.get("cores", ""),
        "load": round(machine["load"], 2) if "load" in machine else "",
        "python": machine.get("python", ""),
        **{name: first(name) for name in ("torch", "triton", "numba-cuda")},
        "cupy": first("cupy-cuda13x", "cupy-cuda12x"),
        "nccl": first("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    }


def not_in(path: Path, found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of which a file has none of the same run, GPU and case, with as many tests."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name, "")) for name in ("date", "gpu", "phase", "case", "contestant", "other"))

    if not path.exists():
        return list(found)
    with path.open(newline="") as file:
        there = {key(row) for row in csv.DictReader(file)}
    return [row for row in found if key(row) not in there]


def write(path: Path, found: Iterable[dict[str, Any]], mode: str) -> None:
    """Write rows, or append them, under a line of column names.

    Raises:
        RehearsalError: if rows of a rehearsal are to be appended.
        ValueError: if the file to append to has other columns.
    """
    chosen = list(found)
    if mode == "a" and any(row["rehearsal"] for row in chosen):
        raise RehearsalError(f"rows of a rehearsal are not appended to {path}")
    new = mode == "w" or not path.exists()
    if not new:
        with path.open(newline="") as file:
            columns = next(csv.reader(file), [])
        if columns != COLUMNS:
            differ = sorted(set(columns) ^ set(COLUMNS)) or "their order"
            raise ValueError(f"{path} has other columns than the rows to be appended: {differ}")
    with path.open(mode, newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(chosen)
