"""What ranks do under `fastreduce compare`: contestants in turn, losses at the root of backward, seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastreduce.run.orders import Orders, order
from tests.support.commands import Done, run, with_environment
from tests.support.run_scripts import RUN

SHOW = """
import contextlib, json, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
"""
STEPS = """
class Own(DDP):
    pass

kind, options = eval(sys.argv[1])
ddp = kind(torch.nn.Linear(3, 2), **options)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
while True:
    optimizer.zero_grad()
    ddp(torch.ones(1, 3) * (1 + 2 * dist.get_rank())).sum().backward()
    optimizer.step()
    assert isinstance(ddp, kind)
    setting = getattr(ddp.reducer, "compression", "torch")
    if dist.get_rank() == 0:
        print("STEP", setting, ddp.module.weight.grad[0, 0].item())
"""


def measured(tmp_path: Path, script: str, ranks: int, *arguments: str, **orders: Any) -> tuple[Done, list[Any]]:
    """A run of a script under orders, and the lines that it has left."""
    path, record = tmp_path / "train.py", tmp_path / "lines"
    path.write_text(script)
    orders = {"first": "none", **orders}
    env = with_environment(**Orders(str(record), **orders).environment(), FASTREDUCE_SEED="5")
    done = run(*RUN, "--nproc-per-node", ranks, path, *arguments, env=env)
    return done, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


@pytest.mark.parametrize(
    "wrapping",
    [
        "DDP, {}",
        pytest.param("DDP, dict(gradient_as_bucket_view=True, static_graph=True)", marks=pytest.mark.long),
        pytest.param("Own, dict(find_unused_parameters=True)", marks=pytest.mark.long),
    ],
)
def test_contestants_take_turns_at_step_boundaries(tmp_path: Path, wrapping: str):
    """Rank 0 has gradients of 1 and rank 1 of 3: their mean is 2, and 1 where nothing is reduced."""
    names = ("none", "int8:error_feedback", "torch", "fp16", "torch:fp16", "no reduction")
    lengths = {"rounds": 2, "warm_up": 3, "settle": 2, "steps": 3}
    done, lines = measured(tmp_path, SHOW + STEPS, 2, f"({wrapping})", contestants=names, **lengths)
    assert done.returncode == 0, done.stderr
    shown = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("STEP")]
    turns = [*order(names, 0), *order(names, 1)]
    expected = ["none"] * 3 + [name for name in turns for _ in range(5)]
    assert len(shown) == len(expected) - 1  # the script does not come back from the last step
    for name, (setting, grad) in zip(expected, shown, strict=False):
        if name != "no reduction":  # the last one's reducer is there, and has nothing to do
            assert setting == ("torch" if name in ("torch", "torch:fp16") else name)
        assert float(grad) == pytest.approx(1.0 if name == "no reduction" else 2.0, rel=0.02), name
    measured_turns = [line for line in lines if "turn" in line]
    assert [line["contestant"] for line in measured_turns] == turns
    assert [line["turn"] for line in measured_turns] == list(range(len(turns)))
    assert all([len(rank) for rank in line["seconds"]] == [3, 3] for line in measured_turns)
    assert lines[0]["wrapped"] == "Linear" and lines[0]["parameters"] == 8 and lines[-1] == {"done": True}


COPIES = """
ddp = DDP(torch.nn.Linear(4, 2), compression="none")
for step in range(100):
    ddp(torch.ones(1, 4)).sum().backward()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
    DDP = torch.nn.parallel.DistributedDataParallel
    kinds = {type(each) is DDP and isinstance(each.reducer, fastreduce.GradientReducer) for each in copies}
    if dist.get_rank() == 0:
        print("COPIED", isinstance(ddp.reducer, fastreduce.GradientReducer), type(ddp) is DDP, kinds)
"""


@pytest.mark.long
def test_wrappers_keep_their_class_in_turns_of_torchs_and_can_be_copied_there(tmp_path: Path):
    names = ("none", "torch", "no reduction")
    script = "import copy\nimport io\nimport fastreduce\n" + SHOW + COPIES
    done, lines = measured(tmp_path, script, 2, contestants=names, rounds=1, warm_up=2, settle=1, steps=2)
    assert done.returncode == 0 and lines[-1] == {"done": True}, done.stderr
    told = [line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("COPIED")]
    assert {rest for _, rest in told} == {"True {True}"} and {reducer for reducer, _ in told} == {"True", "False"}


LOSSES = """
torch.manual_seed(0)
ddp = DDP(torch.nn.Linear(2, 1, bias=False))
torch.nn.init.ones_(ddp.module.weight)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
for step in range(3):
    with torch.no_grad():
        ddp(torch.ones(1, 2))
    for micro in range(2):
        with ddp.no_sync() if micro == 0 else contextlib.nullcontext():
            x = torch.full((1, 2), 1.0 + step + 10.0 * micro + 100.0 * dist.get_rank())
            scaler.scale(torch.utils.checkpoint.checkpoint(ddp, x, use_reentrant=False).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
loss = ddp(torch.ones(1, 2)).sum()
torch.autograd.backward(scaler.scale([loss, 2 * loss]))
print("WENT ON")
"""


@pytest.mark.long
def test_a_shadow_measures_other_settings(tmp_path: Path):
    """Under `none`, in every second step, over all ranks; seconds are those of the training alone."""
    done, lines = measured(tmp_path, SHOW + STEPS, 2, "(DDP, {})", end=5, shadow=("int8", "fp16"), shadow_every=2)
    assert done.returncode == 0, done.stderr
    found = [line for line in lines if "gradient_errors" in line]
    assert [line["step"] for line in found] == [1, 3, 5] and len([line for line in lines if "loss" in line]) == 5
    for line in found:  # of gradients that are all equal
        assert line["gradient_errors"]["fp16"] == {"all": 0, "weight": 0, "bias": 0}
        assert 0 <= line["gradient_errors"]["int8"]["all"] < 1e-12
    seconds = [line["seconds"] for line in lines if "loss" in line]
    assert seconds[0] == 0 and seconds == sorted(seconds)


@pytest.mark.long
@pytest.mark.parametrize("end", [0, 2])
def test_the_loss_is_what_backward_was_called_on(tmp_path: Path, end: int):
    """Without the scale, the mean over two micro-steps and two ranks: 2 · (1 + step + 5 + 50); then a list of two."""
    done, lines = measured(tmp_path, SHOW + "import torch.utils.checkpoint\n" + LOSSES, 2, end=end)
    assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == [*(2.0 * (56 + step) for step in range(end or 3)), *[2.0 + 4.0] * (end == 0)]
    assert ("WENT ON" in done.stdout) == (end == 0)


BESIDE = """
ddp, other, beside = DDP(torch.nn.Linear(1, 1)), DDP(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
one = torch.ones(1, 1)
for step in range(3):
    output = ddp(one)
    (0 * beside(one) + 100).sum().backward()
    (0 * other(one) + 200).sum().backward()
    (0 * output + torch.tensor([[1.0], [step]])).backward(torch.tensor([[1.0], [2.0]]))
"""


def test_losses_are_those_of_backwards_through_the_wrapper(tmp_path: Path):
    """Neither of a network that is not wrapped nor of another wrapper; of a loss by element it is its weighed sum."""
    done, lines = measured(tmp_path, SHOW + BESIDE, 2)
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in lines if "loss" in line] == [1.0, 3.0, 5.0]


JOIN = """
ddp = DDP(torch.nn.Linear(2, 1))
with ddp.join():
    for step in range([20, 5, 30][dist.get_rank()]):
        ddp(torch.ones(1, 2)).sum().backward()
print("WENT ON")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "orders", "last"),
    [
        (3, {"end": 12}, {"done": True}),
        (2, {"contestants": ("none",), "rounds": 1, "warm_up": 2, "settle": 2, "steps": 6}, {"done": True}),
        (3, {"end": 25}, {"loss"}),
    ],
    ids=["losses", "times", "rank 0 has fewer steps"],
)
def test_in_join_nobody_waits_for_ranks_that_have_no_step(
    tmp_path: Path, ranks: int, orders: dict[str, Any], last: Any
):
    _, lines = measured(tmp_path, SHOW + JOIN, ranks, **orders)
    assert lines[-1] == last or set(last) <= set(lines[-1])
    assert len([line for line in lines if "loss" in line]) in (0, 12, 20)


GAN = """
critic, generator = DDP(torch.nn.Linear(2, 1)), DDP(torch.nn.Linear(2, 2))
for step in range(9):
    critic(torch.ones(1, 2)).sum().backward()
    made = generator(torch.ones(1, 2))
    critic(made.detach()).sum().backward()
    critic(made).sum().backward()
"""


@pytest.mark.long
def test_contestants_do_not_change_between_a_wrappers_forward_and_its_backward(tmp_path: Path):
    """Another wrapper's step may end there."""
    done, lines = measured(
        tmp_path, SHOW + GAN, 2, contestants=("none", "torch"), rounds=1, warm_up=5, settle=3, steps=3
    )
    assert done.returncode == 0, done.stderr
    assert lines[1:] == [{"fixed": "the script wraps several modules"}, {"done": True}]


ONE_AFTER_ANOTHER = """
import gc

class Trainer:
    def __init__(self):
        self.ddp = DDP(torch.nn.Linear(3, 2))
        self.callbacks = [self.step] * cycles
    def step(self):
        loss = self.ddp(torch.ones(1, 3)).sum()
        if dist.get_rank() == 0:
            print("STEP", getattr(self.ddp.reducer, "compression", "torch"))
        loss.backward()

models, steps, cycles = map(int, sys.argv[1:])
for _ in range(models):
    trainer = Trainer()
    for _ in range(steps):
        trainer.step()
    del trainer
    if dist.get_rank() == 0:
        gc.collect()  # as it may by itself, at any time
"""


@pytest.mark.long
@pytest.mark.parametrize("cycles", [0, 1])
def test_a_turn_begins_again_with_the_wrapper_that_follows(tmp_path: Path, cycles: int):
    """Which the turn's contestant reduces, in the settling steps and in those that are timed."""
    lengths = {"rounds": 2, "warm_up": 1, "settle": 2, "steps": 3}
    done, lines = measured(
        tmp_path, SHOW + ONE_AFTER_ANOTHER, 2, "99", "8", str(cycles), contestants=("none", "int8"), **lengths
    )
    assert done.returncode == 0, done.stderr
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("STEP")]
    # Of 8 steps of a wrapper the first warms up, a turn takes 5, and what is left of the next one is lost.
    assert shown == ["none"] * 6 + ["int8"] * (2 + 5 + 3) + ["int8"] * 5 + ["none"] * (3 + 5)
    assert [line["contestant"] for line in lines if "turn" in line] == ["none", "int8", "int8", "none"]


@pytest.mark.long
def test_wrappers_that_are_used_for_fewer_steps_than_a_turn_has_are_measured_in_trainings_of_their_own(tmp_path: Path):
    lengths = {"rounds": 2, "warm_up": 1, "settle": 2, "steps": 3}
    done, lines = measured(
        tmp_path, SHOW + ONE_AFTER_ANOTHER, 2, "99", "4", "0", contestants=("none", "int8"), **lengths
    )
    assert done.returncode == 0, done.stderr
    why = "the script wraps one module after another, each for fewer steps than a turn has"
    assert lines[1:] == [{"fixed": why}, {"done": True}]


@pytest.mark.long
@pytest.mark.parametrize("cycles", [pytest.param(0, id=""), pytest.param(1, id="in a cycle")])
def test_losses_of_wrappers_that_follow_each_other_count_whatever_a_ranks_collector_does(tmp_path: Path, cycles: int):
    done, lines = measured(tmp_path, SHOW + ONE_AFTER_ANOTHER, 2, "3", "5", str(cycles), shadow=("int8",))
    assert done.returncode == 0, done.stderr
    assert len([line for line in lines if "loss" in line]) == 15


def test_everything_is_seeded_before_the_script(tmp_path: Path):
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    path = tmp_path / "draw.py"
    path.write_text(code)
    drawn = [run(*RUN, path, env=with_environment(FASTREDUCE_SEED=seed)).stdout for seed in ("3", "3", "4")]
    assert drawn[0] == drawn[1] and len(drawn[0].split()) == 3
    assert all(a != b for a, b in zip(drawn[0].split(), drawn[2].split(), strict=True))


def test_a_seed_that_is_none_is_one_line(tmp_path: Path):
    path = tmp_path / "draw.py"
    path.write_text("print(1)")
    done = run(*RUN, path, env=with_environment(FASTREDUCE_SEED="x"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "fastreduce run: FASTREDUCE_SEED=x: give a whole number below 2^32\n"
