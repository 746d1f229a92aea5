"""`fastreduce run` and `compare` of scripts that shard with `fully_shard`."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fastreduce import SettingError
from fastreduce.run import sharded
from tests.run.test_measuring import measured
from tests.support.commands import run
from tests.support.run_scripts import RUN, said

SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import fastreduce.fsdp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 2))
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
for module in (*model, model):
    fully_shard(module, mesh=mesh if "hybrid" in sys.argv else mesh["shard"])
if "own" in sys.argv:
    fastreduce.fsdp.compress(model, "fp16")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 30)).square().mean().backward()
    optimizer.step()
    scatter = type(model[0]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm).__name__
    if dist.get_rank() == 0:
        print("STEP", scatter)
dist.destroy_process_group()
"""
LEFT = "2 modules sharded by FSDP2 and left as they are: Sequential, because"
IS_OURS = "STEP CompressedReduceScatter"


@pytest.fixture
def sharding(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_shards_is_reduced_by_us(sharding: Path):
    done = run(*RUN, "--nproc_per_node=2", "--compression", "int8:error_feedback", sharding, "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [IS_OURS] * 2
    assert said(done) == [
        "fastreduce: Sequential is sharded by FSDP2 and reduced by fastreduce, compression int8:error_feedback",
        "fastreduce run: 2 modules in 2 processes sharded by FSDP2 and reduced by fastreduce, "
        "compression int8:error_feedback",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("own", "the script itself says what reduces its gradients"),
        ("hybrid", "fastreduce.fsdp: module '0' is sharded and replicated over the 2-D mesh ('replicate', 'shard')"),
    ],
)
def test_what_is_left_as_it_is(sharding: Path, argument: str, why: str):
    done = run(*RUN, "--nproc_per_node=2", "--compression", "int8", sharding, "1", argument)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = said(done)
    assert line.startswith(f"fastreduce run: {LEFT} {why}")
    if argument == "hybrid":
        assert "fully_shard(module, mesh=mesh['shard'])" in line and "fastreduce.fsdp.replicate(model" in line


@pytest.mark.long
def test_a_setting_that_it_cannot_have_ends_the_run(sharding: Path):
    done = run(*RUN, "--nproc_per_node=2", "--compression", "int8:warm_up=5", sharding, "1")
    assert done.returncode != 0
    assert "fastreduce.fsdp.compress: 'int8:warm_up=5': it counts no steps, so it takes no warm_up" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("first", ["int8", "torch"])
def test_one_contestant_of_a_sharded_training_is_timed(tmp_path: Path, first: str):
    orders = {"contestants": (first,), "rounds": 1, "warm_up": 1, "settle": 1, "steps": 2}
    done, lines = measured(tmp_path, SCRIPT, 2, "9", first=first, **orders)
    assert done.returncode == 0, done.stdout + done.stderr
    wrapped, turn, end = lines
    assert wrapped["wrapped"] == "FSDPSequential" and wrapped["parameters"] == 31 * 20 + 21 * 2
    assert wrapped["ranks"] == 2 and wrapped["transport"] == ("shm" if first == "int8" else "")
    assert [len(rank) for rank in turn["seconds"]] == [2, 2] and end == {"done": True}
    assert set(done.stdout.splitlines()[:3]) == {IS_OURS if first == "int8" else "STEP DefaultReduceScatter"}


@pytest.mark.long
def test_contestants_do_not_change_in_a_sharded_training(tmp_path: Path):
    orders = {"contestants": ("none", "int8", "torch", "torch:fp16"), "rounds": 2, "settle": 1, "steps": 2}
    done, lines = measured(tmp_path, SCRIPT, 2, "9", **orders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[1:] == [
        {"missing": {"torch:fp16": "FSDP2 takes no communication hooks"}},
        {"fixed": "the script shards its model, and settings of sharded models are for good"},
        {"done": True},
    ]


@pytest.mark.long
def test_losses_of_a_sharded_training(tmp_path: Path):
    done, lines = measured(tmp_path, SCRIPT, 2, "4", first="fp16", end=3)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in lines[1:-1]]
    assert len(losses) == 3 and all(0 < loss < math.inf for loss in losses)


@pytest.mark.long
def test_a_reduction_that_the_script_chooses_cannot_be_compared(tmp_path: Path):
    done, _ = measured(tmp_path, SCRIPT, 2, "4", "own", end=3)
    assert done.returncode != 0
    assert "contestants cannot reduce the gradients of this Sequential: the script itself says what" in done.stderr
    assert "by fastreduce.fsdp.compress or otherwise: leave it to compare" in done.stderr


def test_a_model_that_could_not_be_reduced_is_in_the_record(monkeypatch: pytest.MonkeyPatch):
    """A script that goes on behind the error trains under torch."""
    refused, told = SettingError("no room"), list[tuple[object, ...]]()
    monkeypatch.setattr(sharded, "groups_of", lambda model: [])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    with patch.object(sharded, "compress", side_effect=refused), pytest.raises(SettingError, match="no room"):
        sharded._begin(False, lambda *line: told.append(line), nn.Linear(1, 1))
    assert told == [("sharded", "Linear", "Linear", "", "no room", 3)]
