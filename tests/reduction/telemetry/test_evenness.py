"""Ranks that do not run the same program are told while they train; those that may differ are not."""

from __future__ import annotations

import torch
from torch import nn

from fastreduce.reduction.telemetry.evenness import Did, _uneven
from fastreduce.reduction.telemetry.stragglers import EVERY
from tests.support.models import wrap
from tests.support.ranks import RankPool

STEP = 7  # in which rank 1 does something else
WHAT = ("alike", "no_sync", "missing", "frozen", "melted", "backwards", "join")


def _notes(rank: int, world_size: int) -> dict[str, list[str]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = wrap("ours", model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    found = {}
    for what in WHAT[:-1]:
        model[0].bias.requires_grad_(not (what == "frozen" and rank == 1))
        for step in range(EVERY + (what == "missing" and rank == 1)):
            other = rank == 1 and step == STEP
            if other and what == "no_sync":
                with ddp.no_sync():
                    ddp(torch.ones(2, 4)).sum().backward()
            output = ddp(torch.ones(2, 4))
            if other and what == "missing":
                continue
            output.sum().backward()
            if what != "backwards" or step % (2 + rank) == 0:
                optimizer.step()
            if rank:  # evaluates
                with torch.no_grad():
                    ddp(torch.ones(2, 4))
        compared = ddp.reducer.stragglers()
        assert compared is not None
        found[what] = [note for note in compared.notes if "all ranks" not in note]  # what a busy machine does to links
    with ddp.join():
        for _ in range(EVERY - 3 * rank):
            ddp(torch.ones(2, 4)).sum().backward()
    compared = ddp.reducer.stragglers()
    found["join"] = [] if compared is None else [note for note in compared.notes if "all ranks" not in note]
    ddp.reducer.close()
    return found


def test_ranks_that_differ_are_told(ranks2: RankPool):
    mine, theirs = ranks2.run(_notes)
    assert mine == theirs
    assert mine["alike"] == mine["melted"] == mine["join"] == []
    there, here = mine["no_sync"]  # of two, nobody knows which is right
    assert there.startswith("rank 0 is out of step: ") and "0 forward(s) in no_sync (others 1)" in there
    assert here.startswith("rank 1 is out of step: in the last 50 averages it ran ") and here.endswith(
        "1 forward(s) in no_sync (others 0): not all were in no_sync at once"
    )
    here = mine["missing"][1]
    assert "it ran 51 forward(s) to be averaged (others 50): a forward had no backward" in here
    (told,) = mine["frozen"]
    assert told.startswith("rank 1 has frozen '0.bias', which other ranks train")
    here = mine["backwards"][1]
    assert "it ran 18 optimizer step(s) (others 26): not all run as many backwards" in here


def test_of_three_ranks_the_one_that_differs_is_named():
    usual = Did(50, 50, 0, 50, 7)
    assert _uneven([usual] * 3) == []
    (note,) = _uneven([usual._replace(optimizer_steps=25), usual, usual])
    assert note.startswith("rank 0 is out of step: in the last 50 averages it ran 25 optimizer step(s) (others 50)")
    two = _uneven([usual._replace(forwards=51), usual, usual, usual._replace(unreduced=1)])
    assert [note[:6] for note in two] == ["rank 0", "rank 3"]
