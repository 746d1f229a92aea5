"""Proof of "no worse": threads train as processes do, rows are kept, and verdicts follow from them."""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastreduce
from bench.tables import markdown
from tests.support.commands import run, started
from tests.support.models import assert_same_bits
from tests.support.ranks import run_ranks

training = pytest.importorskip("bench.quality.training")

STEPS = 12
SETTINGS = ("none", "fp16:accumulate=wire", "int8:error_feedback", "auto4")


def _of(setting: str, ranks: int) -> Any:
    return training.Training("cnn", "sgd", ranks, setting, 3, STEPS)


def _trained_by_processes(rank: int, world_size: int, transport: str) -> dict[str, Any]:
    found = {}
    for setting in SETTINGS:
        each = _of(setting, world_size)
        data = training.data_of(each.task, each.seed, each.steps)
        model = copy.deepcopy(data.model)
        ddp = fastreduce.DistributedDataParallel(model, compression=setting, transport=transport, bucket_cap_mb=0.1)
        optimizer, schedule = training.make_optimizer(each, model)
        for batch in data.steps:
            optimizer.zero_grad()
            ddp(*training.share(batch, rank, world_size)).backward()
            optimizer.step()
            schedule.step()
        found[setting] = model.state_dict()
    return found


@pytest.mark.parametrize(("ranks", "transport"), [(2, "gloo"), (4, "shm")], ids=lambda value: str(value))
@pytest.mark.long
def test_threads_have_the_bits_of_processes(ranks: int, transport: str):
    torch.set_num_threads(1)
    found = run_ranks(_trained_by_processes, ranks, transport, timeout=200)[-1]
    for setting in SETTINGS:
        model, _, _ = training.trained(_of(setting, ranks))
        assert_same_bits(model.state_dict(), found[setting], setting)
    assert not torch.equal(*(found[setting]["network.0.weight"] for setting in ("none", "auto4")))


# Verdicts


def _rows(setting: str, losses: list[float], first: int = 0, steps: int = 200) -> list[dict[str, Any]]:
    common = {"task": "gpt", "optimizer": "sgd", "ranks": 2, "setting": setting, "bytes": 1.0, "vnmse": 0.5}
    common |= {"steps": steps, "seconds": 1.0, "commit": f"after {steps} steps"}
    return [{**common, "seed": seed, "loss": loss} for seed, loss in enumerate(losses, first)]


def test_verdicts_are_paired_by_seed_and_count_only_seeds_that_none_has():
    verdicts = pytest.importorskip("bench.quality.verdicts")
    base = [2.0, 3.0, 2.5, 2.2]
    rows = [
        *_rows("none", base),
        *_rows("fp16", [loss + 0.001 for loss in base]),
        *_rows("a|b: int4", [loss + 0.2 for loss in base]),
        *_rows("int4", [loss + noise for loss, noise in zip(base, (0.1, -0.1, 0.08, -0.05), strict=True)]),
        *_rows("fp8", [math.nan, *base[1:]]),
        *_rows("int8", base, first=2),
        *_rows("bf16", base, first=9),
    ]
    found = verdicts.summarise(rows, 0.01)
    case = ("gpt", "sgd", 2)
    expected = {"fp16": "equal", "int8": "undecided", "fp8": "higher", "int4": "undecided", "a|b: int4": "higher"}
    assert {setting: test.verdict for (setting, _), test in found.tests.items()} == expected
    assert found.seeds["int8", case] == 2 and found.seeds["fp16", case] == 4
    assert found.settings == ["fp16", "int8", "fp8", "int4", "a|b: int4"]
    lines = {line[0].strip("`"): line[2] for line in verdicts.by_case(found, 2)}
    assert lines["fp16"] == "= +0.04" and lines["a|b: int4"] == "**higher +8.25**"
    assert lines["fp8"] == "**higher not finite**" and " seeds)" in lines["int4"]
    counted = {line[0].strip("`"): line[3] for line in verdicts.summary(found)}
    assert counted["fp16"] == "1 equal: +0.04 to +0.04"
    assert r"| `a\|b: int4` | 1.00 | 5.0e-01 | 1 **higher**: +8.25 to +8.25 |" in markdown(verdicts.summary(found))


def test_quick_trainings_are_not_held_against_full_ones():
    verdicts = pytest.importorskip("bench.quality.verdicts")
    base = [2.0, 3.0, 2.5, 2.2]
    quick = [{**row, "vnmse": 9.0} for row in _rows("fp16", [9.0] * 4, steps=20)]
    rows = [*_rows("none", base), *_rows("fp16", base), *_rows("none", [9.0] * 4, steps=20), *quick]
    for found in (verdicts.summarise(rows, 0.01), verdicts.summarise(rows[::-1], 0.01)):
        case = ("gpt", "sgd", 2)
        assert found.tests["fp16", case].verdict == "equal" and found.base == {case: pytest.approx(sum(base) / 4)}
        assert found.vnmse["fp16", "gpt"] == 0.5
    alone = verdicts.summarise([*_rows("none", base), *quick], 0.01)
    assert not alone.tests
    assert {row["steps"] for row in verdicts.longest(quick)} == {20}


def test_the_page_names_the_commits_of_its_rows():
    command, verdicts = pytest.importorskip("bench.quality.__main__"), pytest.importorskip("bench.quality.verdicts")
    rows = [*_rows("none", [1.0, 2.0]), *_rows("fp16", [1.0, 2.0])]
    rows[3]["commit"] = "another"
    page = command.page(verdicts.summarise(rows, 0.01), rows, 0, 1.0)
    assert "Rows by commit: 3 of after 200 steps, 1 of another." in page


def test_the_page_that_is_kept_is_what_the_rows_say():
    command, verdicts = pytest.importorskip("bench.quality.__main__"), pytest.importorskip("bench.quality.verdicts")
    rows = command.read(command.RESULTS / "quality.jsonl")
    planned = command.plan(verdicts.SETTINGS, [2, 4], list(training.TASKS), 5, quick=False)
    missing = len([each for each in planned if each not in rows])
    findings = verdicts.summarise(rows.values(), 0.01)
    assert command.page(findings, list(rows.values()), missing, 1.0) == (command.RESULTS / "quality.md").read_text()


# The command


@pytest.mark.long
def test_what_was_trained_before_ctrl_c_is_kept_and_the_rest_trained_later(tmp_path: Path):
    command = [sys.executable, "-m", "bench.quality", "--quick", "--task", "spread", "--seeds", "2", "--out", tmp_path]
    rows, begun = tmp_path / "quality.jsonl", [*map(str, command), "int4"]
    with started(*begun) as process:
        deadline = time.monotonic() + 200
        while not (rows.exists() and rows.read_text().count("\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(100) == 128 + signal.SIGINT
    before = rows.read_text()
    assert 2 <= before.count("\n") < 16 and before.endswith("\n")
    rows.write_text(before + '{"task": "spr')
    done = run(*begun, seconds=200)
    assert done.returncode == 0, done.stderr
    assert rows.read_text().startswith(before) and rows.read_text().count("\n") == 17
    assert "16 trainings, 0 missing" in done.stdout
    page = (tmp_path / "quality.md").read_text()
    assert "## 2 ranks" in page and "## 4 ranks" in page and (tmp_path / "quality.png").stat().st_size > 10_000
    refused = run(*begun[:-1], "int3")
    assert refused.returncode == 2 and "unknown compression 'int3'" in refused.stderr
    refused = run(*begun[:-1], "*.bias: none; *: int4")  # the regression has none
    assert refused.returncode == 2 and "the key '*.bias' of the policy" in refused.stderr
