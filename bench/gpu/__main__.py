"""`python -m bench.gpu`: on a machine with a GPU for half an hour, is everything right, and how fast is it?

It runs from the source tree, with what a CUDA image commonly holds: torch, Triton, CuPy with NCCL, numba-cuda, pytest,
hypothesis, typer, rich, psutil and matplotlib. Every case is a line of `lines.jsonl`, on disk as soon as it is known,
so that whatever is ended in the middle leaves what came before. `--collect` makes tables, CSV rows and a plot of those
lines later, on any machine. `--rehearse` does the same without a GPU, with interpreted kernels, a stand-in for NCCL and
tiny sizes; what it writes is marked, and is never kept among measured rows.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from .lines import FILE, Lines, commit, read, rows
from .phases import SHARES

ALL = "all"


def main(
    phase: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHARES)} or {ALL}; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="The one folder for all results; holds at most 8 files.")] = Path("out/gpu"),
    budget: Annotated[float, typer.Option(help="Seconds for all phases together; what does not fit is named.")] = 1740,
    rehearse: Annotated[bool, typer.Option(help="Without a GPU: interpreted kernels, tiny sizes.")] = False,
    collect: Annotated[Path | None, typer.Option(help="Measure nothing: make tables of the lines below here.")] = None,
    keep: Annotated[
        bool, typer.Option(help="With --collect: append what is new to bench/results; no rehearsal.")
    ] = False,
) -> None:
    """Test and measure on a GPU, or make tables of what was found."""
    if collect is not None:
        from .collect import show

        show(collect, out, keep)
        return
    chosen = list(phase or [ALL])
    if unknown := [name for name in chosen if name not in SHARES and name != ALL]:
        raise typer.BadParameter(f"unknown phase {unknown[0]!r}; allowed: {', '.join(SHARES)}, {ALL}")
    names = [name for name in SHARES if name in chosen or ALL in chosen]
    from .runner import Run, run_phase

    out.mkdir(parents=True, exist_ok=True)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    common = {"run": started, "commit": commit(), "rehearsal": rehearse}
    lines = Lines(out / FILE, common)
    end = time.monotonic() + budget
    with tempfile.TemporaryDirectory() as unpacked:
        run = Run(out.resolve(), lines, rehearse, Path(unpacked))
        for i, name in enumerate(names):
            left = end - time.monotonic()
            seconds = left * SHARES[name] / sum(SHARES[each] for each in names[i:])
            print(f"{name}: at most {seconds:.0f} s of {left:.0f}", flush=True)
            run_phase(run, name, seconds)
            found = [row for row in rows(read(lines.path)) if row.phase == name and row.run == started]
            counts = {status: sum(row.status == status for row in found) for status in ("done", "failed", "skipped")}
            print(f"{name}: {', '.join(f'{n} {status}' for status, n in counts.items())}", flush=True)
            for row in found:
                if row.status == "failed":
                    print(f"  {row.case}: {row.ending[:300]}", flush=True)


if __name__ == "__main__":
    typer.run(main)
