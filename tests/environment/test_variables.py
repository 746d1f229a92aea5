"""Our environment variables: each is in the table, rubbish in one is an error, and a name that is none is told once."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest
import torch

import fastreduce.distributed as frdist
from fastreduce import DistributedDataParallel, SettingError, all_reduce_gradients
from fastreduce.environment import variables
from fastreduce.hooks import CompressState
from tests.support.commands import ROOT, TORCHRUN, run, with_environment
from tests.support.ranks import RankPool, message

TABLE = variables.VARIABLES.keys() | variables.INTERNAL


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without variables of ours, and as if nothing had been told yet."""
    for name in [name for name in os.environ if name.startswith(variables.PREFIX)]:
        monkeypatch.delenv(name)
    variables._tell_unknown.cache_clear()
    return monkeypatch


def test_the_table_holds_every_variable_that_the_code_names():
    files = [*ROOT.joinpath("fastreduce").rglob("*.py"), *ROOT.joinpath("kernels").glob("*.py")]
    sources = [text for text in map(Path.read_text, files) if variables.PREFIX in text]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = {name for text in texts for name in re.findall(r"(?<![A-Z_])FASTREDUCE_[A-Z_]+", text)}
    assert found == TABLE | {variables.PREFIX} & found


@pytest.mark.parametrize("value", ["1", "true", "True", "0", "false", ""])
def test_a_switch_is_on_or_off(environment: pytest.MonkeyPatch, value: str):
    environment.setenv("FASTREDUCE_DEBUG", value)
    assert variables.switch("FASTREDUCE_DEBUG") == (value.lower() in ("1", "true"))
    environment.delenv("FASTREDUCE_DEBUG")
    assert not variables.switch("FASTREDUCE_DEBUG")


WRONG = {
    "FASTREDUCE_DEBUG": ("yes please", r"^FASTREDUCE_DEBUG=yes please: allowed: 1 or true, 0 or false$"),
    "FASTREDUCE_COMPRESSION": (
        "fp17",
        r"^FASTREDUCE_COMPRESSION: unknown compression 'fp17'; allowed: none, ",
    ),
    "FASTREDUCE_KERNELS": (
        "cuda",
        r"^FASTREDUCE_KERNELS=cuda: unknown kernel backend 'cuda'; allowed: reference, numba_cpu, ",
    ),
}


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", WRONG)
def test_rubbish_is_an_error_where_a_module_is_wrapped_or_gradients_are_averaged(
    environment: pytest.MonkeyPatch, name: str
):
    value, text = WRONG[name]
    environment.setenv(name, value)
    with pytest.raises(SettingError, match=text):
        DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(SettingError, match=text):
        all_reduce_gradients([torch.ones(2)])
    if name != "FASTREDUCE_KERNELS":  # a hook learns at the first bucket what it works on
        with pytest.raises(SettingError, match=text):
            CompressState()


def test_rubbish_is_an_error_before_a_group_is_made(environment: pytest.MonkeyPatch):
    environment.setenv("FASTREDUCE_DEBUG", "2")
    with pytest.raises(SettingError, match="FASTREDUCE_DEBUG=2: allowed"):
        frdist.init_process_group("gloo", world_size=1, rank=0)
    assert not frdist.is_initialized()


def test_rubbish_on_one_rank_is_an_error_on_all(ranks2: RankPool):
    first, second = ranks2.run(_wrap_with_rubbish_on_rank_1)
    assert "FASTREDUCE_DEBUG=2: allowed" in second
    assert first.startswith("MismatchError") and "rank 1" in first and "FASTREDUCE_DEBUG=2" in first, first


def _wrap_with_rubbish_on_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        os.environ["FASTREDUCE_DEBUG"] = "2"
    return message(lambda: DistributedDataParallel(torch.nn.Linear(2, 2)))


def test_names_that_are_none_of_ours_are_told_once_with_the_one_that_was_meant(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    environment.setenv("FASTREDUCE_COMPRESION", "fp16")
    environment.setenv("FASTREDUCE_TEA", "1")
    variables.check_environment(rank=1)
    assert not caplog.messages
    for _ in range(2):
        variables.check_environment(rank=0)
    meant, none = caplog.messages
    assert meant == (
        "FASTREDUCE_COMPRESION is set, and fastreduce knows no such variable: did you mean FASTREDUCE_COMPRESSION?"
    )
    assert none.startswith("FASTREDUCE_TEA is set, and fastreduce knows no such variable: there are FASTREDUCE_COMP")


def test_ours_are_told_nothing_of(environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    environment.setenv("FASTREDUCE_COMPRESSION", "fp16")
    environment.setenv("FASTREDUCE_LAUNCHER", "17")
    variables.check_environment(rank=0)
    assert not caplog.messages and not variables.unknown()


@pytest.mark.long
def test_a_job_with_a_misspelt_name_says_so_in_one_line(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, fastreduce\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(2): fastreduce.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "dist.destroy_process_group()\n"
    )
    env = with_environment(FASTREDUCE_COMPRESION="fp16", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = run(TORCHRUN, "--standalone", "--nproc_per_node=2", script, env=env, together=True)
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if "FASTREDUCE" in line]
    assert len(lines) == 1 and lines[0].endswith("did you mean FASTREDUCE_COMPRESSION?"), done.stdout
