"""What `python -m bench.gpu` finds on a machine, and that each of its cases and tests can begin there."""

from __future__ import annotations

import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")

from bench.gpu import kernel_rows, probe, runner
from bench.gpu.lines import FILE, Lines
from bench.gpu.phases import SHARES, cases_of
from tests.support.commands import ROOT, run


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path / FILE, {"run": "2026-01-01T00:00:00.000+00:00", "commit": "c0ffee", "rehearsal": True})


def test_rows_of_each_command_of_the_half_hour_bear_the_name_of_the_gpu():
    commands = re.findall(r"^python -m bench\.gpu((?: --phase \w+)+)", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    phases = [re.findall(r"--phase (\w+)", command) for command in commands]
    assert [phase for of_one in phases for phase in of_one] == list(SHARES)
    for of_one in phases:
        assert any(case.name == probe.MACHINE for phase in of_one for case in cases_of(phase, False, Path())), of_one


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


def test_processes_ask_no_name_service(lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = runner.Run(tmp_path, lines, False, tmp_path)
    for name, expected in (("GLOO_SOCKET_IFNAME", "lo"), ("RES_OPTIONS", "attempts:0")):
        monkeypatch.delenv(name, raising=False)
        assert run.environment("steps")[name] == expected
        monkeypatch.setenv(name, "chosen")
        assert run.environment("steps")[name] == "chosen"


@pytest.mark.slow
def test_each_case_of_kernels_can_be_run():
    failed = {}
    for named in (*kernel_rows.TELLING, *kernel_rows.MORE, *kernel_rows.LAST, *kernel_rows.NUMBA):
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


@pytest.mark.slow
def test_tests_of_gpus_do_not_wait_for_kernels_of_cpus(tmp_path: Path):
    (tmp_path / "a_gpu.py").write_text(A_GPU)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTREDUCE_", "PYTEST_"))}
    env = {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    test = "tests/ddp/test_gpu.py::test_this_file_is_in_the_run_for_gpus"
    options = ("-p", "a_gpu", "-p", "no:cacheprovider", "-n", "1", "-m", "gpu")
    done = run(sys.executable, "-m", "pytest", test, *options, cwd=ROOT, env=env)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
