"""Counters: sums of the flight record, also over a change of setting, in Prometheus' format and in files."""

from __future__ import annotations

import json
import locale
import logging
import math
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastreduce import SettingError
from fastreduce.reduction.telemetry import counter_files
from fastreduce.reduction.telemetry.counters import Counters, to_prometheus
from fastreduce.reduction.telemetry.flight_recorder import STEPS, FlightRecorder
from fastreduce.reduction.telemetry.nonfinite import NonFiniteSteps
from fastreduce.reduction.telemetry.stragglers import Comparison, Straggler, Stragglers
from tests.support.models import wrap
from tests.support.ranks import RankPool

# Of the stages that a flight record has, from which of its points to which.
PARTS = {
    "compress": ("compress", "compressed"),
    "wire stage 1": ("compressed", "exchanged"),
    "sum": ("exchanged", "summed"),
    "wire stage 2": ("summed", "reduced"),
    "wire": ("compressed", "reduced"),
    "decompress": ("reduced", "decompressed"),
}
METRIC = re.compile(r'fastreduce_(\w+)\{((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (NaN|[+-]Inf|[-+.\de]+)')

UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def _model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def _step(ddp: Any) -> None:
    ddp.zero_grad()
    ddp(torch.randn(4, 64)).square().mean().backward()


def _stages(record: Any, steps: list[int]) -> Counter[str]:
    """Seconds by stage, of some steps of a flight record."""
    found: Counter[str] = Counter()
    for step in (step for step in record.steps if step.step in steps):
        for bucket in step.buckets:
            two = bucket.exchanged is not None
            for name in ("compress", *(("wire stage 1", "sum", "wire stage 2") if two else ("wire",)), "decompress"):
                start, end = (getattr(bucket, point) for point in PARTS[name])
                found[name] += end - start
    return found


def _counted(rank: int, world_size: int) -> None:
    ddp = wrap("ours", _model(), compression="int8", bucket_cap_mb=0.03, transport="gloo")
    reducer = ddp.reducer
    for _ in range(STEPS + 6):
        _step(ddp)
    assert reducer.recorder.on_step == [], "nobody has asked: nobody is told"
    first = reducer.counters()
    assert (first["since"], first["step"], first["reductions"]) == (6, STEPS + 5, STEPS)
    assert (first["rank"], first["world_size"], first["nonfinite_steps"]) == (rank, world_size, 0)
    half = sum(p.sent_bytes for p in reducer.pipelines) // 2
    assert first["sent_bytes"] == {"wire stage 1": half * STEPS, "wire stage 2": half * STEPS, "wire": 0}
    record = reducer.flight_record()
    assert first["stage_seconds"] == pytest.approx({"wire": 0.0} | _stages(record, list(range(6, STEPS + 6))))
    took = sum(step.seconds for step in record.steps if step.seconds is not None)
    assert sum(first["phase_seconds"].values()) == pytest.approx(took)
    waiting = sum(step.took["waiting"] for step in record.steps if step.seconds is not None)
    assert first["phase_seconds"]["waiting"] == pytest.approx(waiting)
    assert reducer.counters() == first

    ddp.set_compression("none")
    stop, seen = threading.Event(), []

    def ask() -> None:
        while not stop.wait(0.002):
            seen.append(reducer.counters()["reductions"])

    asking = threading.Thread(target=ask)
    asking.start()
    while not seen:  # it may not get a core at once
        time.sleep(0.001)
    for _ in range(20):
        _step(ddp)
    stop.set()
    asking.join()
    assert seen and seen == sorted(seen) and seen[0] >= STEPS
    then = reducer.counters()
    assert (then["since"], then["step"], then["reductions"]) == (6, STEPS + 25, STEPS + 20)
    assert then["sent_bytes"] == first["sent_bytes"] | {"wire": 20 * reducer.sent_bytes}
    added = _stages(reducer.flight_record(), list(range(STEPS + 6, STEPS + 26)))
    for name, seconds in then["stage_seconds"].items():
        assert seconds - first["stage_seconds"][name] == pytest.approx(added[name], abs=1e-9), name
    assert json.loads(json.dumps(then)) == then
    with ddp.join():
        for _ in range(2 + rank):
            _step(ddp)
    assert reducer.counters()["sent_bytes"]["wire"] == 23 * reducer.sent_bytes, "also where this rank has joined"
    ddp.module[0].weight.register_hook(lambda grad: grad / 0)
    ddp.set_compression("fp16")
    _step(ddp)
    assert reducer.counters()["nonfinite_steps"] == 1
    ddp.reducer.close()


def test_they_are_the_sums_of_the_flight_record(ranks2: RankPool):
    ranks2.run(_counted)


def test_a_step_in_whose_end_somebody_asks_first_is_counted_once():
    recorder = FlightRecorder(0, 1, [], [])
    counters = Counters(recorder, Stragglers(recorder), NonFiniteSteps())
    recorder.end_step(0)
    recorder.on_step.append(lambda _: counters.as_dict())
    for step in (1, 2):
        recorder.end_step(step)
    assert counters.as_dict()["reductions"] == 3 and len(recorder.on_step) == 2


def _metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """A page of Prometheus' text format, held against its grammar."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in found and len(line.split(" ", 3)[3]) > 20
        elif line.startswith("# TYPE "):
            assert line.split()[2] == name, "behind its help"
            kinds[name], found[name] = line.split()[3], []
            assert kinds[name] == ("counter" if name.endswith("_total") else "gauge")
        else:
            match = METRIC.fullmatch(line)
            assert match is not None and f"fastreduce_{match[1]}" == name, line
            pairs = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2])
            labels = {key: re.sub(r"\\.", lambda found: UNESCAPED[found[0]], value) for key, value in pairs}
            assert (labels["rank"], "wrapper" in labels) == ("3", True)
            found[name].append((labels, float(match[3])))
    return found


def test_the_page_for_prometheus():
    hostile = 'a"b\\c\nd{e}'
    counted = {
        "rank": 3,
        "wrapper": 0,
        "reductions": 7,
        "sent_bytes": {"wire": 10**15, "wire stage 1": 0},
        "phase_seconds": {"forward": 1e-7, "waiting": 0.25},
        "stage_seconds": {"sum": 12.5},
        "nonfinite_steps": 0,
        "relative_errors": {"int8": {hostile: 0.01, "all": math.nan}, "fp16": {"all": math.inf}},
        "late": [{"rank": 1, "part": "data", "seconds": 0.004, "share": 0.3, "since": 50}],
    }
    found = _metrics(to_prometheus(counted))
    assert found["fastreduce_reductions_total"][0][1] == 7
    sent = {labels["stage"]: value for labels, value in found["fastreduce_sent_bytes_total"]}
    assert sent == counted["sent_bytes"]
    (late,) = found["fastreduce_late_seconds"]
    assert (late[0]["late_rank"], late[0]["part"], late[1]) == ("1", "data", 0.004)
    errors = {(labels["setting"], labels["group"]): value for labels, value in found["fastreduce_relative_error"]}
    assert errors["int8", hostile] == 0.01 and math.isnan(errors["int8", "all"]) and errors["fp16", "all"] == math.inf
    assert len(found) == 7


@pytest.mark.usefixtures("group_of_one")
def test_files_wait_for_no_device_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_COUNTERS", str(tmp_path))
    ddp = wrap("ours", nn.Linear(64, 8), compression="int8")
    files = ddp.reducer._telemetry.files
    monkeypatch.setattr(counter_files, "is_capturing", lambda: True)
    _step(ddp)
    assert not files._lines.exists()
    monkeypatch.setattr(counter_files, "is_capturing", lambda: False)
    _step(ddp)
    assert [json.loads(line)["reductions"] for line in files._lines.read_text().splitlines()] == [2]
    ddp.reducer.close()


@pytest.mark.usefixtures("group_of_one")
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("FASTREDUCE_COUNTERS", str(tmp_path / "new"))
    ddp = wrap("ours", nn.Linear(64, 8), compression="int8")
    _step(ddp)
    number = ddp.reducer.counters()["wrapper"]
    name = f"rank0.{number}" if number else "rank0"
    lines, page = tmp_path / "new" / f"{name}.jsonl", tmp_path / "new" / f"{name}.prom"
    assert len(lines.read_text().splitlines()) == 1 and 'reductions_total{rank="0"' in page.read_text()
    ddp.reducer._telemetry.stragglers.last = Comparison(0, [Straggler(1, "data", 0.01, 0.2, 3)], 0.05, {}, 0.0)
    ddp.reducer.note_errors({"int8": {"all": math.nan}})
    ddp.reducer._telemetry.files._due += 1000  # a busy machine may take ten seconds for the next steps
    for _ in range(3):
        _step(ddp)
    ddp.reducer.close()
    ddp.reducer.close()
    first, last = (json.loads(line, parse_constant=pytest.fail) for line in lines.read_text().splitlines())
    assert (first["reductions"], last["reductions"], last["time"] > first["time"]) == (1, 4, True)
    assert last["relative_errors"] == {"int8": {"all": None}} and last["late"][0]["part"] == "data"
    assert f'reductions_total{{rank="0",wrapper="{number}"}} 4' in page.read_text()
    assert sorted(path.name for path in page.parent.iterdir()) == sorted([lines.name, page.name])

    broken = wrap("ours", nn.Linear(64, 8), compression="int8")
    broken.reducer._telemetry.files._seconds = 0.0
    broken.reducer._telemetry.files._lines = Path("/dev/full")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _step(broken)
    broken.reducer.close()
    assert [record.message for record in caplog.records].count(
        "rank 0: counters are not written any more: [Errno 28] No space left on device"
    ) == 1
    monkeypatch.setenv("FASTREDUCE_COUNTERS", str(lines / "in"))
    with pytest.raises(SettingError, match="FASTREDUCE_COUNTERS="):
        wrap("ours", nn.Linear(8, 8))


@pytest.mark.usefixtures("group_of_one")
def test_names_of_any_letters_end_no_training_in_the_c_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where files are ASCII that are opened without a word."""
    monkeypatch.setenv("FASTREDUCE_COUNTERS", str(tmp_path))
    ddp = wrap("ours", nn.Linear(64, 8), compression="int8")
    ddp.reducer.note_errors({"int8": {"größe": 0.5}})
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C")
        _step(ddp)
        ddp.reducer.close()
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    (page,) = tmp_path.glob("*.prom")
    assert 'group="größe"' in page.read_text("utf-8")
