"""`fastreduce run` and `python -m fastreduce.run`: unedited scripts get our class."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import FASTREDUCE, TORCHRUN, run

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from neighbour import value

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(3, 2))
ddp(torch.ones(1, 3) * dist.get_rank()).sum().backward()
if dist.get_rank() == 0:
    print("CLASS", type(ddp).__module__, ddp.compression, ddp.module.weight.grad[0, 0].item(), sys.argv[1:], value)
    from torch.nn.parallel.distributed import DistributedDataParallel as Inner
    Inner(torch.nn.Linear(1, 1), process_group=dist.new_group([0], use_local_synchronization=True))
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    "launcher", ["fastreduce run", pytest.param("torchrun -m fastreduce.run", marks=pytest.mark.long)]
)
def test_an_unedited_script_gets_our_class(script: Path, launcher: str):
    torchrun = ["--standalone", "--nproc_per_node=2"]
    if launcher == "fastreduce run":
        done = run(*FASTREDUCE, "run", "--compression", "bf16", *torchrun, script, "--lr", "1")
    else:
        module = ["-m", "fastreduce.run", "--compression", "bf16"]
        done = run(*TORCHRUN, *torchrun, *module, script, "--lr", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLASS fastreduce.ddp bf16 0.5 ['--lr', '1'] 7" in done.stdout
    assert done.stderr.count("UserWarning: this is torch's own DistributedDataParallel") == 1
    assert done.stdout.count("fastreduce: torch's DistributedDataParallel is ours in train.py, compression bf16") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "fp17", "train.py"], "unknown compression 'fp17'"),
        (["missing.py"], "there is no script 'missing.py'"),
        ([], "usage:"),
    ],
)
def test_bad_input_ends_with_a_message(script: Path, arguments: list[str], message: str):
    arguments = [str(script) if a == "train.py" else a for a in arguments]
    done = run(sys.executable, "-m", "fastreduce.run", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
