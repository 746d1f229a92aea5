"""`python -m bench.faults.late_ranks`: how often trainings on real ranks name who is late, rightly, and wrongly.

Two ranks train a small network; where somebody is to be late, rank 1 takes some milliseconds longer in one part of each
step. Each run is a wrapper of its own and another seed. Rows go to bench/results/late_ranks.csv; docs/who-is-late.md
has them.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fastreduce import DistributedDataParallel
from fastreduce.reduction.telemetry import stragglers
from tests.support.ranks import RankPool

from ..tables import write_csv
from ..training.steps import set_up_process

KEPT = Path(__file__).parents[1] / "results" / "late_ranks.csv"
STEPS = 500
LATE = 1
SHARES = (0.15, 0.3, 1.0)  # of the undisturbed step, by which rank 1 is later


def trained(rank: int, world_size: int, seed: int, part: str, seconds: float) -> dict[str, Any]:
    """One training: who was named, after which step first, and the seconds of a step."""
    set_up_process()
    logging.getLogger(stragglers.__name__).setLevel(logging.ERROR)
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    ddp = DistributedDataParallel(model, compression="int8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    named: list[tuple[int, int, str]] = []
    ddp.reducer.on_straggler(lambda told: named.extend((told.step, late.rank, late.part) for late in told.late))

    def pause(where: str) -> None:
        if where == part and rank == LATE:
            time.sleep(seconds)

    model[3].weight.register_hook(lambda _: pause("compute"))
    optimizer.register_step_pre_hook(lambda *_: pause("optimizer"))
    for _ in range(STEPS):
        pause("data")
        optimizer.zero_grad()
        ddp(torch.randn(64, 128)).square().mean().backward()
        optimizer.step()
    last = ddp.reducer.stragglers()
    assert last is not None
    ddp.reducer.close()
    return {"named": named, "step": last.seconds}


def main(
    clean: Annotated[int, typer.Option(help="Runs in which nobody is late.")] = 30,
    seeds: Annotated[int, typer.Option(help="Runs of each other kind.")] = 3,
) -> None:
    """Count, print and keep."""
    rows = []
    with RankPool(2) as ranks:

        def runs(count: int, part: str, seconds: float) -> list[dict[str, Any]]:
            return [ranks.run(trained, seed, part, seconds, timeout=300)[0] for seed in range(count)]

        undisturbed = runs(clean, "", 0.0)
        step = statistics.median(run["step"] for run in undisturbed)
        cases = {("nobody", 0.0): undisturbed}
        cases |= {(part, share): runs(seeds, part, share * step) for part in stragglers.PARTS for share in SHARES}
    for (part, share), found in cases.items():
        right = [run for run in found if run["named"] and {told[1:] for told in run["named"]} == {(LATE, part)}]
        rows.append(
            {
                "late in": part,
                "by, of a step": share,
                "runs": len(found),
                "named rank and part rightly": len(right),
                "named somebody else, or another part": sum(bool(run["named"]) for run in found) - len(right),
                "first named after step": max((run["named"][0][0] for run in right), default=""),
                "step, ms": round(1e3 * statistics.median(run["step"] for run in found), 2),
                "load": round(os.getloadavg()[0], 1),
            }
        )
        print(rows[-1])
    write_csv(KEPT, rows)


if __name__ == "__main__":
    from bench.faults import late_ranks  # ranks look for `trained` in a module of this name

    typer.run(late_ranks.main)
