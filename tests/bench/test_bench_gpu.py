"""`python -m bench.gpu`, rehearsed: what is killed leaves all lines before it, nothing gates the rest, budgets hold."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")

from bench.gpu import collect, runner
from bench.gpu.collect import RehearsalError, csv_rows, latest, tables
from bench.gpu.gpu_goals import SHOWN
from bench.gpu.gpu_goals import shown as shown_by_tests
from bench.gpu.lines import FILE, Lines, Row, predictions, read, rows, sources
from bench.gpu.phases import SHARES, Suite, cases_of
from bench.gpu.trace import overlap
from bench.gpu.worker_cases import Case, NotHere, work
from tests.support.commands import ROOT, run, started

COMMON = {"run": "2026-01-01T00:00:00.000+00:00", "commit": "c0ffee", "rehearsal": True}
COMMAND = (sys.executable, "-m", "bench.gpu", "--rehearse")


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path / FILE, COMMON)


def endings(lines: Lines) -> dict[str, str]:
    return {row.case: row.ending for row in rows(read(lines.path))}


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTREDUCE_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(ROOT)}


# Lines


def test_a_torn_line_is_left_out_and_hurts_no_other(lines: Lines):
    lines.write("kernels", "a", "done", result={"x": 1})
    with lines.path.open("a") as file:
        file.write('{"phase": "kernels", "case": "b", "sta')
    lines.write("kernels", "c", "done", result={"x": 3})
    assert [line["case"] for line in read(lines.path)] == ["a", "c"]


def test_a_row_is_the_last_known_of_a_case_with_what_was_predicted_before(lines: Lines):
    lines.write("kernels", "a", "planned", predictions={"triton: of_copy": {"low": 0.9, "high": None, "reason": "r"}})
    lines.write("kernels", "b", "planned")
    lines.write("kernels", "a", "begun")
    lines.write("kernels", "a", "failed", why="killed")
    lines.write("kernels", "a", "done", result={})  # of a worker that was given up
    a, b = rows(read(lines.path))
    assert (a.status, a.why, list(a.predictions)) == ("failed", "killed", ["triton: of_copy"])
    assert (b.status, b.ending) == ("planned", "not reached: the run ended before")
    assert (a.commit, a.rehearsal) == ("c0ffee", True)


def test_every_prediction_is_about_a_case():
    found = [(phase, case.name) for phase in SHARES for case in cases_of(phase, False, Path())]
    named = {name for phase, case in found for name in predictions(phase, case)}
    with (ROOT / "bench/gpu/predictions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert row["reason"] and (row["low"] or row["high"]), row
            assert f"{row['contestant']}: {row['figure']}" in named, row
            assert any(p == row["phase"] and fnmatchcase(c, row["case"]) for p, c in found), row


def test_what_is_shown_is_shown_by_tests_that_there_are():
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for what, pattern in SHOWN.items():
        for name in re.findall(r"test_\w+", pattern):
            assert f"{name}.py" in files or any(f"def {name}" in text for text in files.values()), what
    tests = (
        "kernels: test_int8.py::test_bits[triton-1]",
        "4 ranks: test_gpu.py::test_averages_have_the_bits_of_the_cpus[x]",
    )
    found = shown_by_tests(Row("tests", case, "", False, "", "done") for case in tests)
    assert [verdict for _, verdict, _ in found].count("met") == 2


def test_sources_have_a_name_of_their_own_where_git_is_not():
    assert len(sources()) == 12 and sources() == sources()


# What a worker does


def test_what_does_not_fit_is_skipped_by_name_and_what_fails_does_not_end_the_rest(lines: Lines):
    def bad() -> dict[str, Any]:
        raise ValueError("no such thing")

    def not_here() -> dict[str, Any]:
        raise NotHere("no CUDA device")

    cases = [
        Case("first", 1, lambda: {"x": 1}),
        Case("bad", 1, bad),
        Case("long", 1000, lambda: {"x": 2}),
        Case("elsewhere", 1, not_here),
        Case("short", 1, lambda: {"x": 3}),
    ]
    work("kernels", cases, lines, time.time() + 60)
    found = endings(lines)
    assert found["first"] == found["short"] == "done"
    assert found["bad"] == "failed: ValueError: no such thing"
    assert found["long"].startswith("skipped: it takes about 1000 s, and ")
    assert found["elsewhere"] == "skipped: no CUDA device"
    late = Lines(lines.path.with_name("late"), COMMON)
    work("kernels", cases, late, time.time() - 1)
    assert all(why.startswith("skipped: it takes about") for why in endings(late).values())


# The command, with every phase killed in the middle


def case_lines(path: Path) -> list[dict[str, Any]]:
    return list(read(path)) if path.exists() else []


def end_with_all_children(process: Any) -> list[psutil.Process]:
    """SIGKILL to the command only, as a machine's time limit does; returns what it had started."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return children


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("phase", SHARES)
def test_a_phase_that_is_killed_leaves_all_lines_before(phase: str, tmp_path: Path):
    file = tmp_path / FILE
    # Of the tests of ranks the first takes longest: there the line of its beginning is waited for.
    enough = 2 if phase != "ranks" else 1
    with started(*COMMAND, "--phase", phase, "--out", tmp_path, env=environment(), together=True) as process:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            states = [line["status"] for line in case_lines(file)]
            if states.count("begun") > enough and states.count("done") + states.count("skipped") >= enough:
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stdout and process.stdout.read()
        before = case_lines(file)
        children = end_with_all_children(process)
    _, alive = psutil.wait_procs(children, timeout=100)
    assert not alive, "what the command had started goes on without it"
    after = case_lines(file)
    assert after[: len(before)] == before
    found = rows(after)
    assert any(row.status == "done" for row in found) and any(row.status in ("begun", "planned") for row in found)
    assert all(row.rehearsal and row.commit and row.run for row in found)
    collected = run(*COMMAND[:3], "--collect", tmp_path, "--out", tmp_path / "made", env=environment())
    assert collected.returncode == 0, collected.stderr
    assert "A REHEARSAL" in collected.stdout and "unmeasured" in collected.stdout
    with (tmp_path / "made" / "results.csv").open(newline="") as table:
        written = list(csv.DictReader(table))
    assert written and {row["rehearsal"] for row in written} == {"yes"}
    refused = run(*COMMAND[:3], "--collect", tmp_path, "--out", tmp_path / "made", "--keep", env=environment())
    assert refused.returncode != 0 and "rehearsal" in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_small_budget_is_kept_and_all_that_it_left_out_is_named(tmp_path: Path):
    begin = time.monotonic()
    done = run(*COMMAND, "--budget", "25", "--out", tmp_path, env=environment(), seconds=400)
    took = time.monotonic() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    assert took < 300  # the start of the command on a busy machine, and what ends processes
    found = rows(read(tmp_path / FILE))
    planned = {(phase, case.name) for phase in SHARES for case in cases_of(phase, True, tmp_path)}
    assert planned <= {(row.phase, row.case) for row in found}
    assert all(row.status in ("done", "failed", "skipped") for row in found)
    assert any("of the budget are left" in row.why for row in found)
    assert len(list(tmp_path.rglob("*"))) <= 8 and all(path.parent == tmp_path for path in tmp_path.rglob("*"))


# The runner, with cases of its own


def _sleeps() -> dict[str, Any]:
    time.sleep(100)
    return {}


def _dies() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _breaks_the_gpu() -> dict[str, Any]:
    """What a kernel does that writes where it must not: from then on CUDA refuses all work in this process."""

    def refuse(device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = refuse
    return {}


def _exits() -> dict[str, Any]:
    os._exit(3)


WORKER = """
import sys
sys.path.insert(0, {tests!r})
import bench.gpu.phases as phases
import tests.bench.test_bench_gpu as here
phases.cases_of = lambda *_: here.some_cases()
import bench.gpu.worker as worker
worker.cases_of = phases.cases_of
worker.main()
"""


def some_cases() -> list[Case]:
    return [
        Case("first", 1, lambda: {"x": 1}),
        Case("dies", 1, _dies),
        Case("second", 1, lambda: {"x": 2}),
        Case("breaks the GPU", 1, _breaks_the_gpu),
        Case("third", 1, lambda: {"x": 3}),
        Case("exits", 1, _exits),
        Case("alone", 1, lambda: {"pid": os.getpid()}, alone=True),
        Case("sleeps", 0.2, _sleeps),
        Case("last", 1, lambda: {"pid": os.getpid()}),
    ]


@pytest.fixture
def a_run(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[runner.Run]:
    """Phases made of the cases above, in real processes; a case may take two seconds more than it says."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(ROOT)))
    begin = runner._started

    def with_these_cases(run: runner.Run, command: list[str], environment: dict[str, str]) -> Any:
        worker = "bench.gpu.worker" in command
        return begin(run, [sys.executable, str(script)] if worker else command, environment)

    monkeypatch.setattr(runner, "_started", with_these_cases)
    monkeypatch.setattr(runner, "MORE", (3.0, 2.0))
    monkeypatch.setattr(runner, "cases_of", lambda *_: some_cases())
    monkeypatch.setattr(runner, "tests_of", lambda *_: [])
    yield runner.Run(tmp_path, lines, True, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(500)  # seven processes that import torch, on a busy machine
def test_what_dies_or_hangs_is_named_and_the_rest_goes_on(a_run: runner.Run):
    runner.run_phase(a_run, "kernels", 450)
    found = endings(a_run.lines)
    assert found["first"] == found["second"] == found["third"] == found["alone"] == found["last"] == "done"
    assert found["dies"] == "failed: its process was ended by SIGKILL"
    assert found["exits"].startswith("failed: its process ended with exit code 3")
    assert found["sleeps"].startswith("failed: ended after 3 s")
    results = {row.case: row.result for row in rows(read(a_run.lines.path))}
    assert results["alone"]["pid"] != results["last"]["pid"]


@pytest.mark.long
def test_a_hanging_case_does_not_outlive_the_budget(a_run: runner.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "MORE", (3.0, 1000.0))
    monkeypatch.setattr(runner, "cases_of", lambda *_: [each for each in some_cases() if each.name == "sleeps"])
    begin = time.monotonic()
    runner.run_phase(a_run, "kernels", 15)
    assert time.monotonic() - begin < 90  # the case would take a hundred
    assert endings(a_run.lines) == {"sleeps": "failed: ended in the middle: the budget was used up"}


def test_a_phase_that_cannot_even_be_planned_does_not_stop_the_next(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> list[Case]:
        raise RuntimeError("no cases")

    monkeypatch.setattr(runner, "cases_of", broken)
    runner.run_phase(runner.Run(tmp_path, lines, True, tmp_path), "kernels", 5)
    assert endings(lines) == {"phase": "failed: RuntimeError: no cases"}


# pytest's results


TESTS = """
import os, signal, time, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.parametrize("ranks", [2, 4], ids=lambda size: f"{size} ranks")
def test_of_ranks(ranks): pass
def test_is_skipped(): pytest.skip("no reason")
def test_ends_the_process(): os.kill(os.getpid(), signal.SIGKILL)
def test_comes_after(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, pytest.param(True, marks=pytest.mark.long)])
def test_each_test_is_a_line_before_the_next_begins(
    spread: bool, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    tests = Suite("some", ["-c", os.devnull, f"--rootdir={tmp_path}", str(file)], ranks=1, spread=spread)
    monkeypatch.setattr(runner, "cases_of", lambda *_: [])
    monkeypatch.setattr(runner, "tests_of", lambda *_: [tests])
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "" if spread else "1")  # they take a second to import
    runner.run_phase(runner.Run(tmp_path, lines, True, tmp_path), "tests", 300)
    found = {case.partition("::")[2]: ending for case, ending in endings(lines).items()}
    assert found["test_passes"] == "done"
    assert found["test_fails"].startswith("failed: call: ")
    assert found["test_is_skipped"] == "skipped: no reason"
    assert not any("test_of_ranks" in case for case in found)
    if spread:  # xdist starts another worker
        assert "failed" in found["test_ends_the_process"] and found["test_comes_after"] == "done"
    else:
        assert found["test_ends_the_process"].startswith("failed: in the middle: its process ended")
        assert found["test_comes_after"] == "skipped: its process ended"


@pytest.mark.long
@pytest.mark.parametrize("spread", [False, True])
def test_tests_that_would_begin_too_late_are_named(
    spread: bool, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "test_some.py"
    file.write_text("def test_one(): pass\ndef test_two(): pass\n")
    tests = Suite("some", ["-c", os.devnull, f"--rootdir={tmp_path}", str(file)], spread=spread)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(runner, "LEAST", 1000.0)
    runner._run_tests(runner.Run(tmp_path, lines, True, tmp_path), "tests", tests, time.time() + 100)
    found = {case.partition("::")[2]: ending for case, ending in endings(lines).items()}
    assert found == dict.fromkeys(("test_one", "test_two"), "skipped: nothing of the budget is left")


def test_ranks_are_not_started_where_nccl_cannot_have_them_share(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "version", lambda _: 22809)
    monkeypatch.setattr(runner, "_started", None)
    tests = Suite("2 ranks", ["tests/ddp/test_gpu.py"], ranks=2, shares=True)
    runner._run_tests(runner.Run(tmp_path, lines, False, tmp_path), "ranks", tests, time.time() + 10)
    assert endings(lines)["2 ranks"].startswith("skipped: NCCL 2.28.9 takes one rank a GPU: carry 2.30.0")


# Tables, rows and the plot


def a_kernel(ours: str, share: float) -> dict[str, Any]:
    row = {"median_s": 1e-3, "gpu_s": 1e-3, "host_s": 2e-5, "rounds": 9, "late": 0, "bytes": 10**6, "gb_per_s": 1.0}
    return {
        "ours": ours,
        "contestants": {
            ours: {**row, "of_copy": [share] * 3, "launches": 2, "host_us_a_launch": 10.0},
            "cat, cast, divide": {**row, "of_copy": [share / 3] * 3, "ratio": [1 / 3] * 3},
            "copy": {**row, "of_copy": [1.0] * 3, "ratio": [1.0] * 3},
        },
        "first_call_s": 1.5,
        "wrong": "",
    }


def shown(found: list[Row]) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in tables(found):
        console.print(table)
    return console.export_text()


def on_a_gpu(tmp_path: Path) -> Lines:
    return Lines(tmp_path / FILE, {**COMMON, "rehearsal": False})


def test_rows_of_several_runs_are_kept_and_tables_show_the_last_that_was_done(tmp_path: Path):
    case = "flatten-bert_large-dtype=fp16-scale=0.5-triton"
    first, second = on_a_gpu(tmp_path), Lines(tmp_path / FILE, {**COMMON, "rehearsal": False, "run": "2026-01-02"})
    first.write("kernels", "machine", "done", result={"gpu": "A GPU", "packages": {"triton": "3.6.0"}})
    first.write("kernels", case, "planned", predictions=predictions("kernels", case))
    first.write("kernels", case, "done", result=a_kernel("triton", 0.95))
    second.write("kernels", case, "failed", why="the GPU is gone")
    second.write("kernels", "never", "planned")
    found = rows(read(tmp_path / FILE))
    assert {row.case: row.status for row in latest(found)} == {"machine": "done", case: "done", "never": "planned"}
    text = shown(found)
    assert "not reached: the run ended before" in text and "as predicted" in text
    goal = next(line for line in text.splitlines() if "triton: casts, buckets of 256 MiB" in line)
    assert "0.95" in goal and "met" in goal
    written = [row for row in csv_rows(found) if row["case"] == case]
    assert [row["contestant"] for row in written] == ["triton", "cat, cast, divide", "copy"]
    assert written[0]["gpu"] == "A GPU" and written[0]["rehearsal"] == "" and written[0]["triton"] == "3.6.0"
    assert "of_copy 0.92 to 1.05" in written[0]["predicted"]


def test_wrong_results_and_rehearsals_reach_no_goal(tmp_path: Path):
    case = "flatten-bert_large-dtype=fp16-scale=0.5-triton"
    wrong = {**a_kernel("triton", 0.95), "wrong": "triton differs from reference"}
    for name, common, result in (("a", False, wrong), ("b", True, a_kernel("triton", 0.95))):
        lines = Lines(tmp_path / name, {**COMMON, "rehearsal": common})
        lines.write("kernels", case, "planned", predictions=predictions("kernels", case))
        lines.write("kernels", case, "done", result=result)
        text = shown(rows(read(lines.path)))
        goal = next(line for line in text.splitlines() if "triton: casts, buckets of 256 MiB" in line)
        assert "unmeasured" in goal and "as predicted" not in text
        assert ("WRONG" in text) is (name == "a")


def test_a_rehearsal_is_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    kept = tmp_path / "kept.csv"
    monkeypatch.setattr(collect, "KEPT", kept)
    case = "flatten-bert_large-dtype=fp16-scale=0.5-triton"
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    on_a_gpu(tmp_path / "gpu").write("kernels", case, "done", result=a_kernel("triton", 0.9))
    Lines(tmp_path / "cpu" / FILE, COMMON).write("kernels", case, "done", result=a_kernel("triton", 0.9))
    collect.show(tmp_path / "gpu", tmp_path / "out", keep=True)
    before = kept.read_text()
    assert len(before.splitlines()) == 4
    with pytest.raises(RehearsalError, match="are not kept"):
        collect.show(tmp_path / "cpu", tmp_path / "out", keep=True)
    with pytest.raises(RehearsalError, match="collect them apart"):
        collect.show(tmp_path, tmp_path / "out", keep=False)
    with pytest.raises(RehearsalError, match="not appended"):
        collect.write(kept, csv_rows(rows(read(tmp_path / "cpu" / FILE))), "a")
    assert kept.read_text() == before
    later = Lines(tmp_path / "gpu" / FILE, {**COMMON, "rehearsal": False, "run": "2026-01-02"})
    later.write("kernels", case, "done", result=a_kernel("triton", 0.9))
    collect.show(tmp_path / "gpu", tmp_path / "out", keep=True)
    assert len(kept.read_text().splitlines()) == 7  # one line of names
    assert "REHEARSAL" not in capsys.readouterr().out
    assert (tmp_path / "out" / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_folders_brought_home_one_by_one_are_collected_together(tmp_path: Path):
    for i, phase in enumerate(("probe", "kernels")):
        (tmp_path / "home" / phase).mkdir(parents=True)
        run = Lines(tmp_path / "home" / phase / FILE, {**COMMON, "rehearsal": False, "run": f"2026-01-0{i + 1}"})
        run.write(phase, "machine", "done", result={"gpu": "A GPU"})
    collect.show(tmp_path / "home", tmp_path / "out", keep=False)
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        assert [row["phase"] for row in csv.DictReader(file)] == ["probe", "kernels"]
    with pytest.raises(FileNotFoundError, match="no lines in"):
        collect.show(tmp_path / "out", tmp_path / "out", keep=False)


def test_figures_of_two_gpus_are_in_tables_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    case = "quantize-bert_large-compression=fp8-triton"
    for i, (gpu, share) in enumerate((("NVIDIA H200", 0.81), ("NVIDIA H100", 0.92), ("NVIDIA H200", 0.86))):
        made = Lines(tmp_path / FILE, {**COMMON, "rehearsal": False, "run": f"2026-01-0{i + 1}"})
        made.write("kernels", "machine", "done", result={"gpu": gpu})
        made.write("kernels", case, "planned", predictions=predictions("kernels", case))
        made.write("kernels", case, "done", result=a_kernel("triton", share))
    collect.show(tmp_path, tmp_path / "out", keep=False)
    h100, h200 = capsys.readouterr().out.split("Machine, NVIDIA H200")
    assert "Kernels, NVIDIA H100" in h100 and "Goals, NVIDIA H200" in h200
    assert "0.92" in h100 and "0.86" not in h100 and "0.86" in h200 and "0.92 to" not in h200
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        found = [(row["gpu"], row["of_copy"]) for row in csv.DictReader(file) if row["contestant"] == "triton"]
    assert found == [("NVIDIA H200", "0.81"), ("NVIDIA H100", "0.92"), ("NVIDIA H200", "0.86")]


def test_overlap_is_what_our_streams_share_with_the_others():
    def kernel(name: str, stream: int, start: float, length: float) -> dict[str, Any]:
        return {"cat": "kernel", "ph": "X", "name": name, "ts": start, "dur": length, "args": {"stream": stream}}

    events = [
        kernel("gemm", 7, 0, 100),
        kernel("gemm", 7, 100, 50),
        kernel("_move", 20, 90, 30),
        kernel("ncclDevKernel", 20, 120, 10),
        kernel("_move", 20, 140, 40),
        {"cat": "cpu_op", "ph": "X", "name": "_move", "ts": 0, "dur": 1000},
    ]
    found = overlap({"traceEvents": events})
    assert found["kernels"] == 5
    assert found["ours_s"] == pytest.approx(80e-6) and found["others_s"] == pytest.approx(150e-6)
    assert found["both_s"] == pytest.approx(50e-6) and found["hidden"] == pytest.approx(50 / 80)
    assert overlap({"traceEvents": []})["hidden"] is None
    json.dumps(found)
