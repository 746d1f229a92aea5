"""`python -m bench.elastic.loss`: the same trainings with and without ranks that are killed and start again, by loss.

Three ranks train on scikit-learn's digits, with the same samples in the same order from the same beginning, once
undisturbed and once with a random process killed (kill -9) about every second, which starts again within half a second.
Rows go to bench/results/elastic_loss.csv, the picture to docs/elastic_loss.png; docs/elastic.md has both.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..tables import write_csv
from .kills import START_SECONDS, Job

HERE = Path(__file__).parents[1]
KEPT = HERE / "results" / "elastic_loss.csv"
PICTURE = HERE.parent / "docs" / "elastic_loss.png"
RANKS = 3
KILL_SECONDS, AWAY_SECONDS = (0.3, 1.2), (0.0, 0.5)
EVERY = 10  # steps, of which the picture has one


def train(seed: int, steps: int, disturbed: bool) -> tuple[dict[str, Any], list[float]]:
    """A row, and the loss on what is held out after each step."""
    chance, kills = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="fastreduce-elastic-") as folder:
        job = Job(RANKS, Path(folder), str(seed), str(steps), module="bench.elastic.digits_rank")
        try:
            for place in range(RANKS):
                job.start(place)
            if not job.trains():
                raise RuntimeError(f"nobody trains: {job.output()}")
            while disturbed:
                time.sleep(chance.uniform(*KILL_SECONDS))
                if max(job.step_of(name) for name in job.names) > 0.9 * steps:
                    break  # who comes then might find that the others have ended
                place = chance.choice(list(job.alive))
                job.kill(place)
                kills += 1
                time.sleep(chance.uniform(*AWAY_SECONDS))
                job.start(place)
                if not job.trains():
                    break  # on a busy machine the training may have ended before one was back
            deadline = time.monotonic() + START_SECONDS
            left = [each for name, each in job.alive.values() if job.lines(name)]
            codes = [each.poll(max(0.0, deadline - time.monotonic())) for each in left]
            if any(code != 0 for code in codes):
                raise RuntimeError(f"exit codes {codes}: {job.output()}")
            by_step = {line.step: line for name in job.names for line in job.lines(name)}
            losses = [by_step[step].loss for step in range(1, steps + 1)]
            (right, *_) = [float(path.read_text()) for path in Path(folder).glob("*.right")]
            row = {
                "seed": seed,
                "kills": kills,
                "steps": steps,
                "steps without all ranks": sum(line.size < RANKS for line in by_step.values()),
                "steps with differing parameters": len(job.differing()),
                "held-out loss at the end": round(losses[-1], 4),
                "accuracy, %": round(100 * right, 1),
                "load": round(os.getloadavg()[0], 1),
            }
        finally:
            job.close()
    print(row, flush=True)
    return row, losses


def draw(curves: list[tuple[bool, list[float]]], path: Path) -> None:
    """The losses of all trainings over their steps."""
    from matplotlib import pyplot as plt

    from ..plot import NEITHER, OURS

    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for disturbed, losses in curves:
        label = "ranks killed, and started again" if disturbed else "undisturbed"
        first = label not in {line.get_label() for line in axis.lines}
        x = range(EVERY, len(losses) + 1, EVERY)
        style = {"color": OURS, "lw": 1.2} if disturbed else {"color": NEITHER, "lw": 3, "alpha": 0.5}
        axis.plot(x, losses[EVERY - 1 :: EVERY], label=label if first else None, zorder=2 if disturbed else 1, **style)
    axis.set(xlabel="step", ylabel="loss on held-out digits", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.")] = 5,
    steps: Annotated[int, typer.Option(help="Of each training.")] = 900,
) -> None:
    """Train, print, keep and draw."""
    rows, curves = [], []
    for seed in range(seeds):
        for disturbed in (False, True):
            row, losses = train(seed, steps, disturbed)
            rows.append(row)
            curves.append((disturbed, losses))
    write_csv(KEPT, rows)
    draw(curves, PICTURE)


if __name__ == "__main__":
    typer.run(main)
