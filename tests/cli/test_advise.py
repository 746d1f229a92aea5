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
from fastreduce.cli.advise.prediction import predict, seconds
from fastreduce.cli.advise.readings import read
from fastreduce.run.contestants import AFTER_BACKWARD, Variant, take
from fastreduce.run.probing import ArrivalTimes, flights, probe
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
        ([""], "there is no script ''"),
        (["--timeout", "nan", SCRIPT], "--timeout nan: give seconds, 1 or more"),
        (["--nodes", "4", SCRIPT], "--nodes and --gbits go together"),
        (["--nodes", "4", "--gbits", "1", "--settings", "topk:ratio=0.1", SCRIPT], "grows with the number of ranks"),
        (
            ["--nodes", "4", "--gbits", "1", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", SCRIPT],
            "--nodes 4 and --nnodes 2: --nodes projects from the ranks of one host",
        ),
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
        *probe(ddp.reducer, SETTINGS, transport, ddp.process_group),
    ]
    arrivals = ArrivalTimes(ddp.reducer, steps=3)
    for name, value in ddp.reducer.state_dict()["residuals"].items():
        assert value.any() and torch.equal(value, kept[name]), (
            f"the probe has changed what error feedback keeps of {name}"
        )
    ddp.set_compression("none")
    for name in ("none", AFTER_BACKWARD):
        ddp.reducer.overlaps = name == "none"
        for _ in range(4):
            step()
        rows = flights(ddp.reducer.recorder.last_rows(3), arrivals)
        lines.append({"contestant": name, "flights": transport.exchange(rows)})
    return lines


def test_what_ranks_measure_is_what_the_model_takes(ranks2: RankPool):
    lines = ranks2.run(_measure)[0]
    readings = read(lines)
    assert readings.settings == list(readings.probes)[:4] == SETTINGS
    assert len(readings.flights) == len(readings.alone) == 3
    none, int8, auto, _ = list(readings.probes.values())[:4]
    for found in readings.probes.values():
        setting = found.variant.setting
        kinds = setting == "bf16:rounding=stochastic", setting != "none"
        assert (all(found.one_level), any(found.two_shot)) == kinds, found.variant
    assert none.stages[:, :, [3, 4]].min() >= 0 and int8.apart[:, :, [0, 1, 2, 3, 4]].min() > 0
    assert int8.stages[:, :, 3].min() > 0 == int8.stages[:, :, [1, 2]].max()  # the ring does all of it
    assert (none.collectives, int8.collectives) == (1, 2)
    assert none.sent > 3 * int8.sent and len(none.wire) == len(int8.wire) == 3
    assert sorted(chain(*auto.buckets)) == sorted(chain(*none.buckets)) == list(range(6))
    for flight in readings.flights:
        step = flight.step
        assert 0 < step.backward < step.computed >= step.compute
        assert min(step.ready) > step.backward and max(step.ready) <= step.computed
        weights = step.ready[::2]  # of the first, second and third layer: the last one's gradient comes first
        assert weights[2] < weights[1] < weights[0]
        ready = flight.for_buckets(none.buckets).ready
        assert list(ready) == sorted(ready) and ready[-1] == step.computed
    measured = sorted(flight.seconds for flight in readings.flights)
    assert predict(readings)["none"].step.value == pytest.approx(
        measured[1], rel=1e-6
    )  # what was measured is explained
    for name, each in predict(readings).items():
        assert each.step.low <= each.step.value <= each.step.high, name
        assert each.parts.step == pytest.approx(each.step.value, rel=1e-9)
        assert each.parts.wire > 0


def test_other_buckets_and_transports_are_measured(ranks2: RankPool):
    """Three buckets fit one of 1 MiB; the ring of shared memory does what gloo takes an exchange for."""
    readings = read(ranks2.run(_measure)[0])
    assert set(readings.latency) == {"shm", "gloo"} and "all ranks run on one host" in readings.unusable["two_level"]
    varied = [probe for probe in readings.probes.values() if probe.variant.options]
    options = [(1, None), (None, "gloo"), (1, "gloo")]
    assert {probe.variant for probe in varied} == {Variant(name, *each) for name in SETTINGS for each in options}
    for found in varied:
        setting, size, transport = found.variant
        alone = setting == "none" or (setting != "bf16:rounding=stochastic" and transport is None)
        assert (found.stages[:, :, 1].max() == 0) == alone, found.variant
        if setting != "auto4":
            assert len(found.buckets) == (3 if size is None else 1)
            assert found.sent >= readings.probes[setting].sent * 0.9
    assert seconds(readings).keys() == readings.probes.keys()


def _take_turns(rank: int, world_size: int) -> list[tuple[str, str, int, torch.Tensor]]:
    """What three steps are reduced with, and the average of the last, for each variant."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))), bucket_cap_mb=0.06)
    found = []
    for name in TURNS:
        take(ddp, name)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(4, 128) * (1 + rank)).square().sum().backward()
        average = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        found.append((ddp.reducer.transport.name, str(ddp.compression), len(ddp.reducer.plan.buckets), average))
    return found


TURNS = [
    "none",
    "none bucket_cap_mb=1 FASTREDUCE_TRANSPORT=gloo",
    "int8 bucket_cap_mb=1",
    "int8",
    "none FASTREDUCE_TRANSPORT=gloo",
    "none",
]


def test_variants_take_turns_in_one_training(ranks2: RankPool):
    found = ranks2.run(_take_turns)[0]
    told = [(transport, setting, buckets) for transport, setting, buckets, _ in found]
    assert told == [
        ("shm", "none", 3),
        ("gloo", "none", 1),
        ("shm", "int8", 1),
        ("shm", "int8", 3),
        ("gloo", "none", 3),
        ("shm", "none", 3),
    ]
    exact, *averages = [average for _, _, _, average in found]
    for (_, setting, _), average in zip(told[1:], averages, strict=True):
        assert torch.equal(average, exact) == (setting == "none"), setting


@pytest.mark.long
def test_the_best_are_run_beside_none_and_another_link_is_projected(tmp_path: Path):
    settings = ("fp16", "fp8", "int4")
    link = ("--nodes", 4, "--gbits", 0.001)  # so slow that bytes are all that counts
    result, found = _invoke(tmp_path, "--settings", *settings, "--rounds", 6, *link, SCRIPT, 300)
    assert result.exit_code == 0, result.output
    checked = found["measured"]
    assert list(found["predicted"])[:4] == ["none", *settings] and found["missing"] == ""
    assert 3 <= len(checked) <= 6 and "none" in checked and {"fp16", "fp8"} & set(checked)
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
    assert set(found["links"]) == {"shm", "gloo"} and set(found["unusable"]) == {"mpi", "two_level"}
    for link_found in found["links"].values():
        assert min(figures["latency_s"] for figures in link_found.values()) > 0 and len(link_found) == 3
    assert set(found["predicted"]) < set(found["steps"]) and "none FASTREDUCE_TRANSPORT=gloo" in found["steps"]
    assert "over" in result.output and "The link over gloo: all-reduce" in result.output
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


@pytest.mark.long
def test_a_script_too_short_for_the_check_is_told(tmp_path: Path):
    result, found = _invoke(tmp_path, "--settings", "fp16", "--rounds", 6, SCRIPT, 45)
    assert result.exit_code == 0, result.output
    rounds = found["measured"]["none"]["rounds"]
    assert rounds < 6 and found["missing"].startswith(f"{6 - rounds} of 6 rounds of the check: they take ")
    assert "the script fewer" in found["missing"] and f"Missing: {6 - rounds} of 6 rounds" in result.output
