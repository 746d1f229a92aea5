"""What `python -m bench.gpu` finds on a machine, and that each of its cases and tests can begin there."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")

from bench.gpu import carried_nccl, kernel_rows, phases, probe, runner
from bench.gpu.gpu_goals import gpu_goals
from bench.gpu.lines import FILE, Lines, Row
from bench.gpu.phases import SHARES, cases_of
from bench.gpu.step_rows import RIVAL
from bench.kernels.kernel_cases import WITHOUT
from tests.support.commands import ROOT, run


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path / FILE, {"run": "2026-01-01T00:00:00.000+00:00", "commit": "c0ffee", "rehearsal": True})


def test_rows_of_each_command_of_the_half_hour_bear_the_name_of_the_gpu():
    commands = re.findall(
        r"^python3 -m bench\.gpu((?: --phase \w+)+)", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE
    )
    named = [re.findall(r"--phase (\w+)", command) for command in commands]
    assert [phase for of_one in named for phase in of_one] == list(SHARES)
    for phase in SHARES:  # each by itself, too
        assert any(case.name == probe.MACHINE for case in cases_of(phase, False, Path())), phase


def test_the_machine_is_told_once_where_a_phase_has_tests_only(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ran: list[str] = []
    monkeypatch.setattr(runner, "_run_cases", lambda run, phase, cases, _: ran.extend(case.name for case in cases))
    monkeypatch.setattr(runner, "tests_of", lambda *_: [])
    for earlier, expected in (([], [probe.MACHINE]), ([probe.MACHINE], [])):
        for case in earlier:
            lines.write("probe", case, "done", result={"gpu": "A GPU"})
        runner.run_phase(runner.Run(tmp_path, lines, True, tmp_path), "tests", 5)
        assert ran == expected
        ran.clear()


def measured(names: Iterable[str]) -> list[tuple[str, float | None, str]]:
    """The goals, where cases of these names have been done, each with all that a goal could ask for."""
    both: dict[str, Any] = {"of_copy": [1.0], "ratio": [1.0] * 3, "overhead_ratio": [1.0] * 3, "peak_bytes": 1}
    ways = ("triton", "numba_cuda", "cat, cast, divide", "foreach copy_", WITHOUT, RIVAL, "it")
    done = {"contestants": dict.fromkeys(ways, both)}
    rows = [Row("", name, "", False, "", "done", result=done) for name in names]
    return [(goal.what, goal.measured, goal.where) for goal in gpu_goals(rows)]


@pytest.mark.parametrize("phase", ["kernels", "steps", "numba"])
def test_cases_on_which_a_goal_stands_come_first(phase: str):
    """And on a machine half as fast as hoped one of each goal ends within its command's budget."""
    found = cases_of(phase, False, Path())[1:]  # behind the machine's
    names = [case.name for case in found]
    whole = measured(names)
    stands = [measured(other for other in names if other != name) != whole for name in names]
    assert any(stands) and stands == sorted(stands, reverse=True), names[stands.index(False) :]

    (budget,) = re.findall(rf"--phase {phase} --budget (\d+)", (ROOT / "docs/gpu.md").read_text())
    ends = list(accumulate(2 * case.seconds for case in found))
    in_time = [name for name, end in zip(names, ends, strict=True) if end < int(budget) - 30]  # processes begin, too
    reached = {what for what, figure, _ in measured(in_time) if figure is not None}
    assert {what for what, figure, _ in whole if figure is not None} == reached


def test_tests_on_which_a_goal_stands_compile_in_many_processes_unless_ranks_share_the_gpu():
    """Kernels have been compiled for none of them: one after the other they would take the phase's time and more."""
    suites = [suite for phase in SHARES for suite in phases.tests_of(phase, False) if suite.of_goals]
    assert {suite.name for suite in suites} == {"one rank", "2 ranks", "4 ranks"}
    assert all(suite.spread is not suite.shares for suite in suites)


def test_every_goal_of_kernels_and_steps_has_a_case():
    found = [case.name for phase in ("kernels", "steps", "numba") for case in cases_of(phase, False, Path())]
    assert not [what for what, figure, _ in measured(found) if figure is None]


def test_a_copy_is_measured_whatever_nvidia_smi_says_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    gpu = SimpleNamespace(name="A GPU", multi_processor_count=132)
    small = partial(torch.zeros, 1, dtype=torch.uint8)
    fakes: dict[str, Any] = {"randint": lambda *_, **__: small(), "zeros_like": torch.zeros_like, "uint8": torch.uint8}
    cuda = SimpleNamespace(get_device_properties=lambda _: gpu)
    monkeypatch.setattr(probe, "torch", SimpleNamespace(**fakes, cuda=cuda))
    monkeypatch.setattr(probe, "timed", lambda *_: SimpleNamespace(gpu={"copy": [1e-3]}))
    for said, known in (("1980", True), ("[N/A]", False), ("", False)):
        monkeypatch.setattr(probe, "_machine", lambda _, said=said: {"nvidia_smi": {"clocks.max.sm": said}})
        found = probe._copy("cuda")
        assert len(found["gb_per_s"]) == 3 and math.isfinite(found["instructions_a_byte"]) is known, said


@pytest.mark.parametrize("phase", SHARES)
def test_processes_find_the_packages_that_the_command_finds(
    phase: str, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = runner.Run(tmp_path, lines, False, tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/carried")
    assert run.environment(phase)["PYTHONPATH"] == f"{ROOT}{os.pathsep}/carried"
    monkeypatch.delenv("PYTHONPATH")
    assert run.environment(phase)["PYTHONPATH"] == str(ROOT)


def test_what_is_preloaded_already_stays_so_beside_a_carried_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(carried_nccl, "FOLDER", tmp_path)
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert "LD_PRELOAD" not in carried_nccl.sharing_environment(tmp_path)
    (tmp_path / carried_nccl.NAME).touch()
    whole = carried_nccl.sharing_environment(tmp_path)["LD_PRELOAD"]
    assert whole == f"{tmp_path / carried_nccl.NAME}:libjemalloc.so.2"
    monkeypatch.delenv("LD_PRELOAD")
    assert carried_nccl.sharing_environment(tmp_path)["LD_PRELOAD"] == str(tmp_path / carried_nccl.NAME)


def test_nccl_is_asked_for_its_version_once_by_all_runs_of_tests_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def told(*_: object, env: dict[str, str], **__: object) -> Any:
        asked.append(env.get("LD_PRELOAD"))
        return SimpleNamespace(returncode=0, stdout="23203\n")

    monkeypatch.setattr("subprocess.run", told)
    for number in range(3):
        assert carried_nccl.version({"LD_PRELOAD": "one", "NUMBER": str(number)}) == 23203
    assert carried_nccl.version({"LD_PRELOAD": "another"}) == 23203
    assert asked == ["one", "another"]


def test_processes_ask_no_name_service(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runner.Run(tmp_path, lines, False, tmp_path)
    for name, expected in (("GLOO_SOCKET_IFNAME", "lo"), ("RES_OPTIONS", "attempts:0")):
        monkeypatch.delenv(name, raising=False)
        assert run.environment("steps")[name] == expected
        monkeypatch.setenv(name, "chosen")
        assert run.environment("steps")[name] == "chosen"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["one of each operation", pytest.param("all", marks=pytest.mark.long)])
def test_each_case_of_kernels_can_be_run(which: str):
    failed = {}
    chosen = (kernel_rows.GOALS, kernel_rows.TELLING, kernel_rows.MORE, kernel_rows.LAST, kernel_rows.NUMBA)
    cases = list(chain.from_iterable(chosen))
    if which != "all":
        cases = list({operation: (operation, model, options) for operation, model, options in cases}.values())
    for named in cases:
        try:
            found = kernel_rows.kernel_case("reference", named, "cpu").run()
            if found["wrong"]:
                failed[str(named)] = found["wrong"]
        except Exception as error:
            failed[str(named)] = repr(error)
    assert not failed


A_GPU = """
import torch

torch.cuda.is_available = lambda: True

from tests.support import compiled

class Compiling:
    def fork(self, *_):
        return self

    def poll(self, _):
        raise AssertionError("they were waited for")

compiled.server = Compiling
"""


@pytest.mark.long
@pytest.mark.slow
def test_tests_of_gpus_do_not_wait_for_kernels_of_cpus(tmp_path: Path):
    (tmp_path / "a_gpu.py").write_text(A_GPU)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTREDUCE_", "PYTEST_"))}
    env = {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    test = "tests/ddp/test_gpu.py::test_this_file_is_in_the_run_for_gpus"
    options = ("-p", "a_gpu", "-p", "no:cacheprovider", "-n", "1", "-m", "gpu")
    done = run(sys.executable, "-m", "pytest", test, *options, cwd=ROOT, env=env)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
