"""The other systems' programs, carried over: each runs as a script on one and on two ranks."""

from __future__ import annotations

import contextlib
import re
import sys

import pytest

from tests.commands import ROOT, finish, free_port, run, started, with_environment

SECONDS = 60
LOSS = r"^epoch \d+: loss ([\d.]+)$"


def losses(script: str, world_size: int, *arguments: str) -> tuple[list[str], str]:
    """What the ranks of a script print as losses, and all that they print."""
    where = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, ROOT / "examples" / script, *arguments]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in map(str, range(world_size)):
            env = with_environment(**where, RANK=rank, LOCAL_RANK=rank)
            processes.append(stack.enter_context(started(*command, env=env, together=True)))
        done = [finish(process, SECONDS) for process in processes]
    output = "".join(each.stdout for each in done)
    assert [each.returncode for each in done] == [0] * world_size, output
    return re.findall(LOSS, output, flags=re.MULTILINE), output


@pytest.mark.parametrize(
    ("world_size", "reference"),
    [pytest.param(1, "1.944 1.379 1.050 0.852 0.723", marks=pytest.mark.long), (2, "1.964 1.388 1.055 0.855 0.726")],
)
def test_megengines_program_gives_the_reference_run(world_size: int, reference: str):
    """It starts its ranks itself, with the launcher's decorator."""
    done = run(sys.executable, ROOT / "examples" / "megengine_train.py", world_size, together=True, seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    assert re.findall(LOSS, done.stdout, flags=re.MULTILINE) == reference.split()


def test_two_stages_train_to_the_losses_of_one_process():
    one, _ = losses("pipeline_train.py", 1)
    two, _ = losses("pipeline_train.py", 2)
    assert one == two and len(one) == 3 and float(one[-1]) < 0.6 * float(one[0])


@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.long)])
def test_genesis_program_falls_back_to_gloo_and_learns(compression: str):
    found, output = losses("genesis_train.py", 2, "--compression", compression)
    assert len(found) == 3 and float(found[-1]) < 0.7 * float(found[0])
    assert "NCCL library not available" in output or "gloo" not in output
