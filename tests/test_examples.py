"""The other systems' programs, carried over: each runs as a script on one and on two ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 60


def losses(script: str, world_size: int, *arguments: str) -> tuple[list[str], str]:
    """What the ranks of a script print as losses, and all that they print."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = dict(os.environ, WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        output = "".join(process.communicate(timeout=SECONDS)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world_size, output
    return re.findall(r"^epoch \d+: loss ([\d.]+)$", output, flags=re.MULTILINE), output


@pytest.mark.parametrize(
    ("world_size", "reference"),
    [pytest.param(1, "1.944 1.379 1.050 0.852 0.723", marks=pytest.mark.long), (2, "1.964 1.388 1.055 0.855 0.726")],
)
def test_megengines_program_gives_the_reference_run(world_size: int, reference: str):
    assert losses("megengine_train.py", world_size)[0] == reference.split()


def test_two_stages_train_to_the_losses_of_one_process():
    one, _ = losses("pipeline_train.py", 1)
    two, _ = losses("pipeline_train.py", 2)
    assert one == two and len(one) == 3 and float(one[-1]) < 0.6 * float(one[0])


@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.long)])
def test_genesis_program_falls_back_to_gloo_and_learns(compression: str):
    found, output = losses("genesis_train.py", 2, "--compression", compression)
    assert len(found) == 3 and float(found[-1]) < 0.7 * float(found[0])
    assert "NCCL library not available" in output or "gloo" not in output
