"""`fastreduce doctor`: what a user sees, the same as JSON, and verdicts on what is really broken."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import functools
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llvmlite import binding
from torch import Tensor
from typer.testing import CliRunner, Result

from fastreduce.cli import main
from fastreduce.cli.doctor import choices, machine, self_tests, to_json
from fastreduce.cli.doctor.machine import SHOWN, VARIABLES, parse_topology
from fastreduce.cli.doctor.rows import FAILED, MISSING, OK, Row, row, rows
from fastreduce.cli.variables import CHECKS
from fastreduce.distributed.processes import run_ranks
from fastreduce.environment.cores import usable_cores
from fastreduce.environment.variables import VARIABLES as VARIABLES_OF_OURS
from fastreduce.errors import BackendUnavailableError, RanksFailedError, SettingError, TransportError
from fastreduce.ops import backends
from fastreduce.run.machine import processor
from fastreduce.transports.nccl import library
from tests.support.commands import FASTREDUCE, ROOT, Done, run

CPU = torch.device("cpu")
SECTIONS = [
    "machine",
    "GPUs",
    "libraries",
    "kernels for CPU tensors",
    "kernels for CUDA tensors",
    "transport for CPU tensors",
    "transport for CUDA tensors",
    "times of elastic training",
    "variables",
    "self-test",
]


def _environment() -> dict[str, str]:
    """Without settings of this process's."""
    ours = ("FASTREDUCE_", "NCCL_", "GLOO_", "TRITON_", "NUMBA_ENABLE_CUDASIM")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _run(*arguments: str, **more: str) -> Done:
    """The command, in a process of its own."""
    return run(FASTREDUCE, "doctor", *arguments, env={**_environment(), "PYTHONPATH": str(ROOT), **more})


def _squeezed(text: str) -> str:
    """Without the spaces that lines are broken at."""
    return re.sub(r"\s+", "", text)


@pytest.fixture(scope="module")
def healthy(preloaded: None) -> Result:
    """In this process, with ranks that begin as forks with torch imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - _environment().keys():
            patch.delenv(name)
        for name, value in {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "NCCL_OF_TOMORROW": "7"}.items():
            patch.setenv(name, value)
        patch.setattr(self_tests, "run_ranks", functools.partial(run_ranks, start_method="forkserver"))
        return CliRunner().invoke(main, ["doctor"])


@pytest.fixture(scope="module")
def broken_kernels() -> Result:
    """In this process, since nothing is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("FASTREDUCE_KERNELS", "triton")
        patch.setenv("FASTREDUCE_COMPRESION", "fp16")
        return CliRunner().invoke(main, ["doctor", "--json"])


@pytest.fixture(scope="module")
def broken_transport() -> Done:
    return _run(GLOO_SOCKET_IFNAME="nosuch0", MPI4PY_LIBMPI="/nowhere/libmpi.so")


def test_a_name_service_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch):
    moments = iter([0.0, 5.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    found = machine._name_service()
    assert isinstance(found, Row) and found.state == MISSING
    assert "no answer within 5.0 s" in found.value and "/etc/hosts" in found.help


def test_a_processor_that_linux_does_not_name_as_on_arm_has_llvms_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "neoverse-n1")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert processor() == "neoverse-n1"
    assert {row.name: row.value for row in machine.machine_rows()}["processor"] == "neoverse-n1, aarch64"


def test_a_processor_of_which_a_sandbox_without_proc_tells_nothing_has_llvms_name(monkeypatch: pytest.MonkeyPatch):
    def fails(_: Path) -> str:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(Path, "read_text", fails)
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "znver4")
    assert processor() == "znver4"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_user_sees_the_machine_the_choices_and_a_verdict(healthy: Result):
    out = healthy.stdout
    assert (healthy.exit_code, healthy.stderr) == (0, "")
    assert [line for line in out.splitlines() if line in SECTIONS] == SECTIONS
    assert max(map(len, out.splitlines())) <= 118
    for name, value in {
        "torch": torch.__version__,
        "cores": f"{usable_cores()} to use",
        "GPU": f"torch {torch.__version__} sees none",
        "chosen": "numba_cpu",
        "nccl": "moves CUDA tensors only",
        "GLOO_SOCKET_IFNAME": "=lo  (the network interface that gloo uses)",
        "NCCL_DEBUG": "=WARN  (what NCCL prints: WARN for errors, INFO for its choices too)",
        "NCCL_IB_HCA": "not set  (the InfiniBand or RoCE adapters that NCCL uses)",
        "NCCL_OF_TOMORROW": "=7  (passed through)",
        "numba_cpu on cpu": "the reference's bits",
        "shm, 2 ranks": "gradients averaged over shm",
        "gloo, 2 ranks": "gradients averaged over gloo",
        "two_level": "can run, where one of several hosts has several ranks",
        "a beat": "every 3 s (timeout / 10)",
        "no answer": "90 s (3 × timeout) until it is left out",
    }.items():
        assert re.search(rf"^ +[✓–] {re.escape(name)} +{re.escape(value)}", out, re.MULTILINE), (name, value, out)
    assert out.splitlines()[-1] == (
        "Verdict: works. CPU tensors: numba_cpu kernels, shm within a host, gloo between hosts."
    )


def test_json_holds_what_the_text_holds(healthy: Result, broken_kernels: Result):
    report = json.loads(broken_kernels.stdout)
    assert list(report["sections"]) == SECTIONS
    text = _squeezed(healthy.stdout)
    for section in ("machine", "GPUs", "libraries", "transport for CPU tensors", "transport for CUDA tensors"):
        for name, found in report["sections"][section].items():
            assert set(found) == {"value", "state", "help"}
            for piece in (name, found["value"], found["help"]):
                assert _squeezed(piece) in text, (section, name, piece)


def test_kernels_that_cannot_run_are_a_failure_with_what_helps(broken_kernels: Result):
    assert (broken_kernels.exit_code, broken_kernels.stderr) == (1, "")
    report = json.loads(broken_kernels.stdout)
    if not torch.cuda.is_available():
        assert (report["verdict"], report["failed"]) == ("broken", ["kernels for CPU tensors: chosen"])
        chosen = report["sections"]["kernels for CPU tensors"]["chosen"]
        assert "FASTREDUCE_KERNELS=triton" in chosen["value"] and chosen["help"] == "unset FASTREDUCE_KERNELS"
        assert report["sections"]["self-test"]["gloo, 2 ranks"]["state"] == MISSING
    misspelt = report["sections"]["variables"]["FASTREDUCE_COMPRESION"]
    assert "knows no such variable" in misspelt["value"] and "FASTREDUCE_COMPRESSION" in misspelt["help"]


@pytest.mark.long
def test_a_transport_that_cannot_connect_is_a_failure_with_what_helps(
    broken_transport: Done,
):
    out = _squeezed(broken_transport.stdout)
    assert (broken_transport.returncode, broken_transport.stderr.count("Traceback")) == (1, 0)
    assert "✗gloo,2ranksrank" in out and "nosuch0" in out and "→unsetGLOO_SOCKET_IFNAME,orexport" in out
    # the group itself is gloo's: nothing that is agreed over it can work either
    assert out.endswith("Verdict:broken.Failed:self-test:shm,2ranks;self-test:gloo,2ranks.")
    if "mpi4pynotinstalled" not in out:
        assert "–MPIlibrarycannotbeloaded:/nowhere/libmpi.so" in out and "→apt-getinstallopenmpi-bin" in out


def test_kernels_with_other_bits_are_a_failure(monkeypatch: pytest.MonkeyPatch):
    real = backends.load

    def unflatten(wire: Tensor, slots: Any, tensors: Sequence[Tensor], scale: float) -> None:
        real("reference").unflatten(wire, slots, tensors, scale)
        tensors[2][17] *= 1 + 2**-23

    def load(name: str) -> backends.Backend:
        return dataclasses.replace(real("reference"), unflatten=unflatten) if name == "numba_cpu" else real(name)

    assert self_tests.kernel_test("reference", CPU).state == OK
    monkeypatch.setattr(backends, "load", load)
    found = self_tests.kernel_test("numba_cpu", CPU)
    assert found.state == FAILED
    assert self_tests.kernel_test("numba_cpu", CPU, chosen=False).state == FAILED
    assert found.value.startswith("not the reference's bits after unflatten from torch.float16 and unflatten from")


def test_kernels_that_do_not_run_fail_the_verdict_only_where_they_are_chosen(monkeypatch: pytest.MonkeyPatch):
    real = backends.load

    def load(name: str) -> backends.Backend:
        if name == "numba_cpu":
            raise OSError("no compiler")
        return real(name)

    monkeypatch.setattr(backends, "load", load)
    for chosen, state in ((True, FAILED), (False, MISSING)):
        found = self_tests.kernel_test("numba_cpu", CPU, chosen)
        assert found == Row("numba_cpu on cpu", "OSError: no compiler", state)


def test_what_is_not_installed_says_so_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(machine, "version", _no_package)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)
    found = {r.name: r for r in machine.library_rows()[1:]}
    assert set(found) == {"numba", "triton", "numba-cuda", "CuPy", "NCCL", "mpi4py", "mpirun"}
    assert {r.state for r in found.values()} == {MISSING}
    assert all(re.search("pip install|apt-get install", r.help) for r in found.values())
    assert found["mpi4py"].help == "pip install mpi4py"
    monkeypatch.setattr(choices, "find_spec", lambda _: None)
    assert choices.transport_rows(CPU)[1] == Row("mpi", "mpi4py is not installed", MISSING, found["mpi4py"].help)


def test_shared_memory_is_chosen_where_it_can_be(monkeypatch: pytest.MonkeyPatch):
    def rows() -> dict[str, Row]:
        return {r.name: r for r in choices.transport_rows(CPU)}

    monkeypatch.delenv("FASTREDUCE_TRANSPORT", raising=False)
    assert rows()["chosen"] == Row("chosen", "shm within a host, gloo between hosts")
    assert rows()["shm"] == Row("shm", "can run, for ranks of one host")
    monkeypatch.setenv("FASTREDUCE_TRANSPORT", "shm")
    assert rows()["chosen"] == Row("chosen", "shm")
    monkeypatch.setattr(choices, "why_no_shm", lambda _: "no room")
    assert rows()["chosen"] == Row("chosen", "none: no room", FAILED, "unset FASTREDUCE_TRANSPORT")
    assert rows()["shm"] == Row("shm", "no room", MISSING)
    monkeypatch.delenv("FASTREDUCE_TRANSPORT")
    assert rows()["chosen"] == Row("chosen", "gloo")
    monkeypatch.setenv("FASTREDUCE_TRANSPORT", "tcp")
    assert rows()["chosen"].state == FAILED and "allowed: gloo, shm, mpi, nccl, two_level" in rows()["chosen"].value


def test_shared_memory_without_room_for_it_is_not_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FASTREDUCE_TRANSPORT", raising=False)
    for megabytes, chosen, can in ((0.064, "gloo", False), (5, "gloo", True), (64, "shm within a host", True)):
        free = SimpleNamespace(f_bavail=megabytes * 1e6, f_frsize=1, f_files=0)
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: free)
        found = {r.name: r for r in choices.transport_rows(CPU)}
        assert found["chosen"].value.startswith(chosen) and (found["shm"].state == OK) == can
        assert can or "docker run --shm-size=" in found["shm"].value


@pytest.mark.parametrize(
    ("transport", "error", "helps"),
    [
        ("gloo", RuntimeError("Unable to find address for: nosuch0"), "GLOO_SOCKET_IFNAME"),
        ("gloo", TransportError("no word from rank 1"), "GLOO_SOCKET_IFNAME"),
        ("gloo", SettingError("FASTREDUCE_DEBUG=yes: allowed: 1 or true, 0 or false"), ""),
        ("gloo", ValueError("the gradients under none are not the average of the ranks'"), ""),
        ("gloo", None, ""),
        ("shm", BackendUnavailableError("no room"), "docker run --shm-size=256m, or export FASTREDUCE_TRANSPORT=gloo"),
        ("shm", SettingError("FASTREDUCE_DEBUG=yes: allowed: 1 or true, 0 or false"), ""),
        ("shm", RuntimeError("Unable to find address for: nosuch0"), ""),
        ("nccl", RuntimeError("NCCL error"), "NCCL_DEBUG=INFO"),
    ],
)
def test_what_helps_fits_what_has_failed(
    monkeypatch: pytest.MonkeyPatch, transport: str, error: Exception | None, helps: str
):
    def fail(*_: object, **__: object) -> None:
        raise RanksFailedError(f"rank 0 failed:\n{error}") from error

    monkeypatch.setattr(self_tests, "run_ranks", fail)
    found = self_tests.transport_test("it", transport, 2, "cuda" if transport == "nccl" else "cpu")
    assert found.state == FAILED and str(error) in found.value
    assert helps in found.help if helps else found.help == ""


WRONG = {
    "COMPRESSION": ("fp17", "unknown compression 'fp17'; allowed: none, fp16"),
    "COUNTERS": ("/dev/null/x", "/dev/null/x: [Errno 20] Not a directory"),
    "DEBUG": ("yes", "=yes: allowed: 1 or true, 0 or false"),
    "DUMP_SIGNAL": ("KILL", "=KILL: allowed: USR1, USR2, none"),
    "KERNELS": ("numba", "unknown kernel backend 'numba'; allowed: reference, numba_cpu"),
    "NODE_SECONDS": ("abc", "=abc: give seconds, more than 0"),
    "SEED": ("-1", "=-1: give a whole number below 2^32"),
    "TRACE": ("/proc/x", "/proc/x: [Errno 2]"),
    "TRANSPORT": ("shmm", "=shmm: allowed: gloo, shm, mpi, nccl, two_level"),
}


def test_a_variable_that_holds_what_it_may_not_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    for name, (value, _) in WRONG.items():
        monkeypatch.setenv(f"FASTREDUCE_{name}", value)
    result = CliRunner().invoke(main, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["verdict"]) == (1, "broken")
    found = report["sections"]["variables"]
    for name, (_, said) in WRONG.items():
        assert found[f"FASTREDUCE_{name}"]["state"] == FAILED and said in found[f"FASTREDUCE_{name}"]["value"]
        assert f"variables: FASTREDUCE_{name}" in report["failed"]


def test_every_variable_but_a_name_is_checked():
    assert {f"FASTREDUCE_{name}" for name in WRONG} == set(CHECKS) == set(VARIABLES_OF_OURS) - {"FASTREDUCE_HOST"}


def _no_package(name: str) -> str:
    raise PackageNotFoundError(name)


def test_what_raises_is_a_line_of_the_report():
    def find() -> str:
        raise OSError("a library\nthat cannot be loaded")

    assert row("x", find) == Row("x", "cannot be told: OSError: a library", MISSING)
    assert rows(lambda: [Row("x", find())]) == [Row("error", "OSError: a library", FAILED)]


def test_every_variable_that_is_shown_has_its_phrase():
    assert set(SHOWN) <= set(VARIABLES)
    assert all(2 < len(phrase.split()) < 16 and phrase[-1] != "." for phrase in VARIABLES.values())


def test_links_between_gpus_are_read_from_nvidia_smi():
    text = """
        \x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31
GPU1\tNV18\t X \tSYS\tPXB\t0-31
GPU2\tSYS\tSYS\t X \tSYS\t32-63
NIC0\tPXB\tPXB\tSYS\t X
"""
    assert parse_topology(text) == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 0): "NV18",
        (1, 2): "SYS",
        (2, 0): "SYS",
        (2, 1): "SYS",
    }
    assert parse_topology("") == {}


@pytest.mark.gpu
def test_a_gpu_is_described_and_averages_over_nccl(healthy: Result):
    out = healthy.stdout
    assert healthy.exit_code == 0, out
    assert re.search(rf"✓ GPU 0 +{torch.cuda.get_device_name(0)}, \d+ GiB, sm_", out)
    assert re.search(r"✓ triton on cuda +the reference's bits", out)
    assert re.search(r"✓ nccl, 1 rank +gradients averaged over ", out)


def test_the_json_is_that_of_the_rows():
    sections = {"machine": [Row("a", "b"), Row("c", "d", FAILED, "e")]}
    assert to_json(sections, ["machine: c"]) == {
        "verdict": "broken",
        "failed": ["machine: c"],
        "sections": {
            "machine": {
                "a": {"value": "b", "state": "ok", "help": ""},
                "c": {"value": "d", "state": "failed", "help": "e"},
            }
        },
    }


def _advice(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> str:
    """All that is said of what to install where a torch of this CUDA finds nothing else."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "version", _no_package)
    for name in ("cupy.cuda.nccl", "numba_cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    found = [found.help for found in machine.library_rows()] + [str(library._find_nccl())]
    return "\n".join([*found, str(backends.why_not("numba_cuda", CPU))])


@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
def test_what_to_install_fits_torchs_cuda_and_nothing_else(monkeypatch: pytest.MonkeyPatch, cuda: str):
    monkeypatch.setattr(ctypes, "CDLL", _no_driver)
    said, (wanted, other) = _advice(monkeypatch, cuda), (("12", "13") if cuda == "12.8" else ("13", "12"))
    assert f"pip install cupy-cuda{wanted}x" in said and f"pip install 'numba-cuda[cu{wanted}]'" in said
    assert not re.search(f"cuda{other}|cu{other}", said)
    assert "fastreduce[" not in said, "which is in no package index"


def _no_driver(_: str) -> Any:
    raise OSError("no such library")


class _Driver:
    """libcuda of a driver that runs CUDA 14.1."""

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 14010
        return 0


def test_without_a_cuda_build_of_torch_the_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _Driver())
    said = _advice(monkeypatch, None)
    assert "pip install cupy-cuda13x" in said and "cuda12" not in said and "cu12" not in said


def test_where_nothing_tells_cudas_version_it_is_said_how_to_choose(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", _no_driver)
    said = _advice(monkeypatch, None)
    assert "pip install cupy-cuda13x, or cupy-cuda12x where nvidia-smi shows CUDA 12" in said


def test_no_message_cites_what_an_installed_package_lacks():
    for path in ROOT.joinpath("fastreduce").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "docs/" in text or "fastreduce[" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "docs/" not in node.value, f"{path}: {node.value}"
                assert "fastreduce[" not in node.value, f"{path}: {node.value}"
