"""Numba is imported where a script has put a function of its own in the place of `print`, as many do behind set-up."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch

from fastreduce.environment import numba_imports
from fastreduce.kernels import numba_cache
from fastreduce.ops import backends
from fastreduce.transports.shm import why_no_shm
from tests.support.commands import run, with_environment

NESTED = """
def quiet():
    import builtins
    real = builtins.print
    def print(*args, **kwargs):
        if kwargs.pop("force", False):
            real(*args, **kwargs)
    builtins.print = print
"""
PARTIAL = """
def quiet():
    import builtins, functools
    builtins.print = functools.partial(print, flush=True)
"""
GONE = """
def quiet():
    import builtins
    builtins.print = lambda *args, **kwargs: None
"""
LOAD = {
    "kernels": "from fastreduce.ops import backends; assert backends.load('numba_cpu').flatten",
    "simulated kernels": """
import torch
from fastreduce.ops import backends
assert backends.why_not('numba_cuda', torch.device('cpu')) is None
assert backends.load('numba_cuda').flatten
""",
    "shared memory": "from fastreduce.transports import shm; assert shm._load().ShmConnection",
}
TRAIN = r"""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
quiet()
ddp = DDP(torch.nn.Linear(2, 1))
ddp(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
assert ddp.module.weight.grad.tolist() == [[0.5, 0.5]]
print(f"{type(ddp).__module__} {dist.get_rank()}\n", end="", flush=True, force=True)
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "replaced",
    [
        pytest.param(NESTED, id="nested"),
        pytest.param(PARTIAL, id="partial"),
        pytest.param(GONE, id="gone"),
    ],
)
@pytest.mark.parametrize("what", ["kernels", "simulated kernels", "shared memory"])
def test_numba_finds_pythons_print_and_the_script_keeps_its_own(what: str, replaced: str):
    script = f"{replaced}\nquiet(); mine = print\n{LOAD[what]}\nassert print is mine"
    simulated = {"NUMBA_ENABLE_CUDASIM": "1"} if what == "simulated kernels" else {}
    done = run(sys.executable, "-c", script, env={**os.environ, **simulated})
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_script_whose_rank_0_alone_prints_trains_under_run(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(NESTED + TRAIN)
    command = [sys.executable, "-m", "fastreduce", "run", "--nproc-per-node", "2", str(script)]
    done = run(*command, env=with_environment())
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "ddp" in line) == [
        "fastreduce.ddp 0",
        "fastreduce.ddp 1",
    ]


def test_a_processor_that_does_not_convert_fp16_is_told(monkeypatch: pytest.MonkeyPatch):
    """LLVM ended the process."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    for features, told in (("", "has no F16C instructions"), ("+avx2,+f16c", None)):
        monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
        numba_imports._has_f16c.cache_clear()
        for reason in (backends.why_not("numba_cpu", torch.device("cpu")), why_no_shm()):
            assert reason is None if told is None else told in str(reason)
    monkeypatch.undo()
    numba_imports._has_f16c.cache_clear()


@pytest.mark.long
def test_the_reference_trains_on_a_processor_that_does_not_convert_fp16(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("quiet = lambda: None\n" + TRAIN.replace(", force=True", ""))
    command = [sys.executable, "-m", "fastreduce", "run", "--nproc-per-node", "2", str(script)]
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = run(*command, env=with_environment(**generic))
    assert "has no F16C instructions, which the FP16 kernels need; or set FASTREDUCE_KERNELS=reference" in done.stderr
    done = run(*command, env=with_environment(**generic, FASTREDUCE_KERNELS="reference"))
    assert done.returncode == 0 and "fastreduce.ddp 1" in done.stdout, done.stderr


class _Tee:
    def write(self, text: str) -> int:
        return len(text)


def test_kernels_are_compiled_whatever_stands_in_the_place_of_stderr(monkeypatch: pytest.MonkeyPatch):
    closed = io.StringIO()
    closed.close()
    for stream in (_Tee(), None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        numba_cache._say_what_takes_long.__wrapped__()


def test_where_numba_compiles_nothing_kernels_and_shared_memory_say_so(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    for value, told in (("1", "NUMBA_DISABLE_JIT is set"), ("0", None), ("", None)):
        monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
        for reason in (backends.why_not("numba_cpu", cpu), why_no_shm()):
            assert reason is None if told is None else told in str(reason)
