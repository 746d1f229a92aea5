"""`python -m bench`: run the benchmarks, show and draw what came out, and keep it as CSV rows.

Those that need a GPU are `python -m bench.gpu`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import report

HERE = Path(__file__).parent


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes, few rounds; nothing is added to bench/results.")] = False,
    out: Annotated[Path, typer.Option(help="Where the JSON and the plot go.")] = Path("out/bench"),
    select: Annotated[str, typer.Option("-k", help="Only benchmarks that match, as in pytest.")] = "",
) -> None:
    """Run the benchmarks; rows are kept if none of them fails."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    out.mkdir(parents=True, exist_ok=True)
    json = out / "benchmarks.json"
    json.unlink(missing_ok=True)
    arguments = [str(HERE), "-q", "-p", "no:cacheprovider", f"--benchmark-json={json}", "--benchmark-quiet"]
    arguments += ["--quick"] if quick else []
    code = pytest.main([*arguments, *(["-k", select] if select else [])])
    if json.exists() and json.stat().st_size:
        rows = out / "results.csv" if quick else HERE / "results" / "history.csv"
        report.show(json, out / "bench.png", rows, keeps=code == 0)
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
