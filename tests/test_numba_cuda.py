"""The numba_cuda kernels without a GPU: the kernel cases in Numba's simulator, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastreduce import backends

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_every_kernel_case_in_the_simulator():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels.py"]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50 and "skipped" not in done.stdout, done.stdout[-1000:]


def test_the_reason_why_it_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch):
    assert "NUMBA_ENABLE_CUDASIM=1" in (backends.why_not("numba_cuda", CPU) or "")
    assert backends.why_not("numba_cuda", CUDA) is None
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    assert "pip install" in (backends.why_not("numba_cuda", CUDA) or "")
