"""`fastreduce advise` from end to end: ranks that are measured, a prediction that is checked, advice.json."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from fastreduce import DistributedDataParallel
from fastreduce.cli import main
from fastreduce.cli.advise.prediction import predict
from fastreduce.cli.advise.readings import read
from fastreduce.run.contestants import AFTER_BACKWARD
from fastreduce.run.probing import flights, probe
from tests.support.commands import ROOT
from tests.support.ranks import RankPool

SCRIPT = str(ROOT / "tests" / "support" / "trained_script.py")


def _invoke(out: Path, *arguments: object) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(main, ["advise", "--out", str(out), *map(str, arguments)])
    file = out / "advice.json"
    return result, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        (["--settings", "torch:fp16", SCRIPT], "unknown compression 'torch'"),
        (["--nodes", "4", SCRIPT], "--nodes and --gbits go together"),
        (["--nodes", "4", "--gbits", "1", "--settings", "topk:ratio=0.1", SCRIPT], "grows with the number of ranks"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, tmp_path: Path):
    result, _ = _invoke(tmp_path, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastreduce advise: ") and message in line


SETTINGS = ["none", "int8:error_feedback", "auto4", "bf16:rounding=stochastic"]


def _measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The lines of a training of three buckets, as `Training` would write them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.06, compression="int8:error_feedback")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(4, 128) * (1 + rank)).square().sum().backward()
        optimizer.step()

    transport = ddp.reducer.transport
    for _ in range(3):
        step()
    kept = {name: value.clone() for name, value in ddp.reducer.state_dict()["residuals"].items()}
    lines = [
        {"wrapped": "Sequential", "ranks": world_size, "local_ranks": world_size, "transport": transport.name},
        *probe(ddp.reducer, SETTINGS, transport),
    ]
    for name, value in ddp.reducer.state_dict()["residuals"].items():
        assert value.any() and torch.equal(value, kept[name]), (
            f"the probe has changed what error feedback keeps of {name}"
        )
    ddp.set_compression("none")
    for name in ("none", AFTER_BACKWARD):
        ddp.reducer.overlaps = name == "none"
        for _ in range(4):
            step()
        lines.append({"contestant": name, "flights": transport.exchange(flights(ddp.reducer.recorder.last_rows(3)))})
    return lines


def test_what_ranks_measure_is_what_the_model_takes(ranks2: RankPool):
    lines = ranks2.run(_measure)[0]
    readings = read(lines)
    assert list(readings.probes) == SETTINGS and len(readings.flights) == len(readings.alone) == 3
    none, int8, auto, stochastic = readings.probes.values()
    for found in readings.probes.values():
        assert (all(found.one_level), any(found.two_shot)) == (found is stochastic, found is not none), found.setting
    assert none.stages[:, :, [3, 4]].min() >= 0 and int8.apart[:, :, [0, 1, 2, 3, 4]].min() > 0
    assert int8.stages[:, :, 3].min() > 0 == int8.stages[:, :, [1, 2]].max()  # the ring does all of it
    assert (none.collectives, int8.collectives) == (1, 2)
    assert none.sent > 3 * int8.sent and len(none.wire) == len(int8.wire) == 3
    assert sorted(chain(*auto.buckets)) == sorted(chain(*none.buckets)) == list(range(6))
    for flight in readings.flights:
        assert list(flight.step.ready) == sorted(flight.step.ready) and flight.step.ready[-1] == flight.step.computed
        assert 0 < flight.step.backward < flight.step.computed >= flight.step.compute
    measured = sorted(flight.seconds for flight in readings.flights)
    assert predict(readings)["none"].step.value == pytest.approx(
        measured[1], rel=1e-6
    )  # what was measured is explained
    for name, each in predict(readings).items():
        assert each.step.low <= each.step.value <= each.step.high, name
        assert each.parts.step == pytest.approx(each.step.value, rel=1e-9)
        assert each.parts.wire > 0


@pytest.mark.long
def test_the_best_are_run_beside_none_and_another_link_is_projected(tmp_path: Path):
    settings = ("fp16", "fp8", "int4")
    link = ("--nodes", 4, "--gbits", 0.001)  # so slow that bytes are all that counts
    result, found = _invoke(tmp_path, "--settings", *settings, "--rounds", 6, *link, SCRIPT, 300)
    assert result.exit_code == 0, result.output
    checked = found["measured"]
    assert list(found["predicted"]) == ["none", *settings] and found["missing"] == ""
    assert 3 <= len(checked) <= 4 and "none" in checked and {"fp16", "fp8"} & set(checked)
    assert set(found["errors"]) == set(checked) and found["advice"]["setting"] in checked
    assert all(checked[name]["rounds"] == 6 for name in checked)
    projected = found["projected"]["predicted"]
    assert min(projected, key=lambda name: projected[name]["step"]["value"]) == "int4"
    assert found["projected"]["advice"]["setting"] == "int4"
    assert "Projected to 4 hosts of 2 ranks, 0.001 Gbit/s" in result.output
    for each in found["predicted"].values():
        parts = each["parts"]
        added = sum(parts[name] for name in ("compute", "waiting", "compress", "wire", "sum", "decompress", "other"))
        assert added == pytest.approx(parts["step"]) == pytest.approx(each["step"]["value"])
        assert parts["compute"] > 0
    assert min(figures["latency_s"] for figures in found["link"].values()) > 0 and len(found["link"]) == 3
    assert found["advice"]["sentence"] in " ".join(result.output.split())
    *lines, _ = result.output.splitlines()
    assert max(map(len, lines)) <= 120 and "\x1b" not in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SCRIPT, 10], "ended before it was measured, which takes 41 steps: train longer"),
        (["--ranks", 1, SCRIPT, 100], "one rank alone has nothing to send"),
    ],
)
def test_trainings_that_tell_nothing(arguments: list[object], message: str, tmp_path: Path):
    result, found = _invoke(tmp_path, *arguments)
    assert result.exit_code in (1, 2) and message in result.stderr and found == {}
