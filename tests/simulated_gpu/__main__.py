"""Runs tests for GPUs on the simulated device: `python -m tests.simulated_gpu tests/ddp/test_gpu.py`.

Arguments are pytest's. What the detector finds is printed after the tests' own results, and is an error. With
SIMULATED_GPU_DEFAULT=1 tensors lie on the device where a test names none: so tests for CPUs run on it too, as far as
they do not take a device for granted.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from .build import why_not
from .launching import environment


def main(arguments: list[str]) -> int:
    """The exit code: pytest's; 1 if there are races."""
    if reason := why_not():
        print(f"no simulated device: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `call` ends pytest, too
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "races")
        env = environment(SIMULATED_GPU_RACES=str(found), TRITON_INTERPRET="1", NCCL_MULTI_RANK_GPU_ENABLE="1")
        code = subprocess.call([sys.executable, "-m", "pytest", "-n", "0", *arguments], env={**env, "TMPDIR": folder})
        races = found.read_text() if found.exists() else ""
    print(races or "no races", end="" if races else "\n")
    return code or int(bool(races))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
