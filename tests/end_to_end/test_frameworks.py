"""accelerate, Lightning, transformers' Trainer: the examples train in our class, uncompressed with torch's bits."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from fastreduce import DistributedDataParallel
from fastreduce.run import replace_torchs_class, restore_torchs_class
from tests.support.commands import FASTREDUCE, PYTHON, ROOT, TORCHRUN, run, with_environment
from tests.support.ranks import RankPool

QUIET = {
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

Trained = tuple[type, list[float], list[Tensor]]  # the wrapper's class, losses, parameters

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        pytest.param(
            [FASTREDUCE, "run", "--standalone", "--nproc_per_node=2", "--compression=fp16", "accelerate_train.py"],
            "fp16",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [sys.executable, "lightning_train.py", "--strategy", "fastreduce_fp16"], "fp16", marks=pytest.mark.long
        ),
        pytest.param(
            [sys.executable, "lightning_train.py", "--compression=int8:block=64"],
            "int8:block=64",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [TORCHRUN, "--standalone", "--nproc_per_node=2", "-m", "fastreduce.run", "transformers_train.py"],
            "int8:error_feedback",
            marks=pytest.mark.long,
        ),
    ],
    ids=["accelerate", "lightning", "lightning with options", "transformers"],
)
def test_the_example_trains_compressed_as_a_user_starts_it(command: list[str], setting: str):
    environment = with_environment(**QUIET)
    environment.pop("OMPI_MCA_ess_singleton_isolated", None)  # which the tests set, and a user does not
    if "fastreduce.run" in command:  # one of the three takes the setting from here
        environment["FASTREDUCE_COMPRESSION"] = setting
    done = run(*command, cwd=ROOT / "examples", env=environment, together=True)
    assert done.returncode == 0, done.stdout
    (found,) = re.findall(r"^fastreduce\S* (\S+): loss (\S+) to (\S+)$", done.stdout, flags=re.MULTILINE)
    assert found[0] == setting
    assert float(found[2]) < 0.8 * float(found[1])


def test_the_code_in_the_documentation_is_the_examples():
    examples = "\n".join(path.read_text() for path in ROOT.glob("examples/*_train.py"))
    text = ROOT.joinpath("docs", "frameworks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    lines = {line.strip() for line in examples.splitlines()}
    assert [line for block in blocks for line in block.splitlines() if line.strip() not in lines] == []


# A package of Lightning's other name, whose classes are its own, as those of `lightning` are.
OTHER_LIGHTNING = {
    "__init__.py": "",
    "pytorch/__init__.py": "from pytorch_lightning import *",
    "pytorch/strategies.py": (
        "import pytorch_lightning.strategies as theirs\n"
        "class DDPStrategy(theirs.DDPStrategy): pass\n"
        "StrategyRegistry = type(theirs.StrategyRegistry)()\n"
    ),
}
WHICH = """
import os, sys
from fastreduce import lightning
from {other}.strategies import DDPStrategy, StrategyRegistry
other = lightning.strategy_of({other!r})
names = [name for name in StrategyRegistry if name.startswith("fastreduce")]
print(lightning.FastreduceStrategy.__mro__[1].__module__, other.__mro__[1] is DDPStrategy, names)
print(type(StrategyRegistry.get("fastreduce_int8")) is other, StrategyRegistry.get("fastreduce_int8")._ddp_kwargs)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "installed", "chosen"),
    [
        ("", ["lightning"], "lightning.pytorch.strategies"),
        ("import lightning.pytorch", ["lightning"], "lightning.pytorch.strategies"),
        ("import pytorch_lightning", ["lightning"], "pytorch_lightning.strategies.ddp"),
        ("", [], "pytorch_lightning.strategies.ddp"),
    ],
    ids=["both, none imported", "both, lightning imported", "both, pytorch_lightning imported", "one"],
)
def test_the_strategy_is_that_of_the_lightning_that_the_script_uses(
    tmp_path: Path, first: str, installed: list[str], chosen: str
):
    for name, text in OTHER_LIGHTNING.items() if installed else ():
        path = tmp_path / "lightning" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    other = "pytorch_lightning" if chosen.startswith("lightning") or not installed else "lightning.pytorch"
    environment = with_environment(**QUIET, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    done = run(PYTHON, "-c", f"{first}\n{WHICH.format(other=other)}", env=environment)
    names = ["fastreduce", "fastreduce_fp16", "fastreduce_bf16", "fastreduce_int8"]
    expected = f"{chosen} True {names}\nTrue {{'compression': 'int8'}}\n"
    assert done.stdout == expected, done.stderr


def test_without_lightning_the_error_says_what_to_install():
    code = "import sys, importlib.util as u; u.find_spec = lambda _: None\nimport fastreduce.lightning"
    done = run(PYTHON, "-c", code)
    assert done.stderr.splitlines()[-1].endswith("pip install lightning, or pip install pytorch-lightning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks of this module: frameworks keep state, and importing them takes seconds."""
    pool = RankPool(2)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield pool
    pool.kill()  # torch's class may abort where a process ends; the examples above end cleanly


@pytest.mark.parametrize(
    "framework", ["accelerate", *(pytest.param(name, marks=pytest.mark.long) for name in ("lightning", "transformers"))]
)
def test_losses_and_parameters_are_torchs_bit_for_bit(ranks: RankPool, framework: str):
    for theirs, ours in ranks.run(_train_in_both, framework):
        assert theirs[0] is TorchDDP
        assert ours[0] is DistributedDataParallel
        assert len(ours[1]) >= 12
        assert ours[1] == theirs[1]
        assert ours[1][-1] < ours[1][0]
        for mine, other in zip(ours[2], theirs[2], strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


def _train_in_both(rank: int, world_size: int, framework: str) -> tuple[Trained, Trained]:
    """Run the example's training in this process, first in torch's class, then in ours."""
    _be_launched(rank, world_size)
    train = {"accelerate": _accelerate, "lightning": _lightning, "transformers": _transformers}[framework]
    example = _load(framework)
    theirs = train(example, TorchDDP)
    replace_torchs_class()
    try:
        return theirs, train(example, DistributedDataParallel)
    finally:
        restore_torchs_class()


def _be_launched(rank: int, world_size: int) -> None:
    """As frameworks ask the environment."""
    size = str(world_size)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # the ranks have joined already


def _load(framework: str) -> Any:
    path = ROOT / "examples" / f"{framework}_train.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _accelerate(example: Any, wrapper: type) -> Trained:
    accelerator, model, *rest = example.prepare()
    losses = example.train(accelerator, model, *rest)
    return type(model), losses, _parameters(model)


def _lightning(example: Any, wrapper: type) -> Trained:
    classes = []

    class Digits(example.Digits):
        def on_train_end(self) -> None:
            classes.append(type(self.trainer.model))

    example.Digits = Digits
    model = example.train("ddp" if wrapper is TorchDDP else "fastreduce")
    return classes[0], model.losses, _parameters(model)


def _transformers(example: Any, wrapper: type) -> Trained:
    if not list(importlib.metadata.distributions(name="kernels")):
        utils = importlib.import_module("transformers.utils")
        assert not utils.is_kernels_available(), "our folder kernels/ is taken for the package of that name"
    trainer = example.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return type(trainer.model_wrapped), losses, _parameters(trainer.model)


@pytest.mark.long
def test_a_backbone_that_lightning_unfreezes_is_the_same_on_all_ranks(ranks: RankPool):
    (first, before), (second, _) = ranks.run(_finetuned)
    assert len(first) == 4
    for mine, other, old in zip(first, second, before, strict=True):
        assert torch.equal(mine, other)
        assert not torch.equal(mine, old)


def _finetuned(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    _be_launched(rank, world_size)
    lightning: Any = importlib.import_module("pytorch_lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss: Tensor = self.head(torch.tanh(self.backbone(batch[0]))).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)

    class Unfreezes(lightning.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
        def freeze_before_training(self, model: Any) -> None:
            self.freeze(model.backbone)

        def finetune_function(self, model: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(model.backbone, optimizer)

    torch.manual_seed(0)
    model, data = Model(), torch.utils.data.TensorDataset(torch.randn(64, 8))
    before = _parameters(model)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = importlib.import_module("fastreduce.lightning").strategy_of("pytorch_lightning")(compression="fp16")
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy=strategy, callbacks=[Unfreezes()], **quiet
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
    return _parameters(model), before


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]
