"""The other systems' programs, carried over: each runs as a script on one and on two ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.commands import (
    FASTREDUCE,
    INSTALLED,
    PYTHON,
    ROOT,
    finish,
    free_port,
    run,
    started,
    with_environment,
)

SECONDS = 300
LOSS = r"^epoch \d+: loss ([\d.]+)$"


def losses(script: str, world_size: int, *arguments: str) -> tuple[list[str], str]:
    """What the ranks of a script print as losses, and all that they print."""
    where = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    command = [PYTHON, ROOT / "examples" / script, *arguments]
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
    [(1, "1.944 1.379 1.050 0.852 0.723"), (2, "1.964 1.388 1.055 0.855 0.726")],
)
@pytest.mark.long
def test_megengines_program_gives_the_reference_run(world_size: int, reference: str):
    """It starts its ranks itself, with the launcher's decorator."""
    done = run(PYTHON, ROOT / "examples" / "megengine_train.py", world_size, together=True, seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    assert re.findall(LOSS, done.stdout, flags=re.MULTILINE) == reference.split()


@pytest.mark.long
def test_two_stages_train_to_the_losses_of_one_process():
    one, _ = losses("pipeline_train.py", 1)
    two, _ = losses("pipeline_train.py", 2)
    assert one == two and len(one) == 3 and float(one[-1]) < 0.6 * float(one[0])


@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.long)])
def test_genesis_program_falls_back_to_gloo_and_learns(compression: str):
    found, output = losses("genesis_train.py", 2, "--compression", compression)
    assert len(found) == 3 and float(found[-1]) < 0.7 * float(found[0])
    assert "NCCL library not available" in output or "gloo" not in output


@pytest.mark.parametrize(("model", "items"), [("gpt2", "tokens"), ("resnet50", "images")])
@pytest.mark.long
def test_the_gpu_example_trains_a_tiny_model_where_there_is_no_gpu(model: str, items: str):
    script = ROOT / "examples" / "gpu_train.py"
    options = ["--model", model, "--size", "tiny", "--compression", "fp16", "--steps", "10"]
    done = run(FASTREDUCE, "launch", "--nproc-per-node", "2", script, *options, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    start = rf"{model} \(tiny\), 2 ranks on (?:cpu|cuda), compression fp16: loss"
    found = re.fullmatch(rf"{start} (\S+) to (\S+), (\S+) ms per step, \S+ {items} per second\n", done.stdout)
    assert found and float(found[2]) < float(found[1]) and float(found[3]) > 0, done.stdout


@pytest.mark.long
def test_the_sharded_example_trains_and_saves(tmp_path: Path):
    script, options = ROOT / "examples" / "fsdp_train.py", ["--steps", "21", "--checkpoint", tmp_path / "saved"]
    done = run(INSTALLED, "launch", "--nproc-per-node", "2", script, *options, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"step 0: loss (\S+)\nstep 20: loss (\S+)\n\d+ bytes of gradients .*\n", done.stdout)
    assert found and float(found[2]) < 0.8 * float(found[1]), done.stdout
    assert (tmp_path / "saved" / "21" / ".metadata").exists()
    done = run(INSTALLED, "launch", "--nproc-per-node", "2", script, *options, seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    resumed = re.fullmatch(r"step 40: loss (\S+)\n\d+ bytes of gradients .*\n", done.stdout)
    assert resumed and float(resumed[1]) < 0.95 * float(found[2]), done.stdout
    assert (tmp_path / "saved" / "42" / ".metadata").exists()


def test_the_page_of_the_sharded_example_shows_its_code():
    page, script = (ROOT.joinpath(name).read_text() for name in ("docs/fsdp.md", "examples/fsdp_train.py"))
    shown, _, saved, _ = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert textwrap.indent(shown, " " * 4) in script and textwrap.indent(saved, " " * 8) in script


def test_its_models_are_as_large_as_their_names_say():
    spec = importlib.util.spec_from_file_location("models", ROOT / "examples" / "models.py")
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    with torch.device("meta"):
        numels = {name: sum(p.numel() for p in models.make(name, "full").parameters()) for name in ("gpt2", "resnet50")}
    assert numels == {"gpt2": 124_439_808, "resnet50": 25_557_032}
