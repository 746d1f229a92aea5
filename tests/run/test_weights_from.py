"""Training under one setting while contestants are timed: bits of a training without them, and their own residuals."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce import SettingError
from fastreduce.reduction.reducer import GradientReducer
from fastreduce.reduction.telemetry.stragglers import EVERY, TIMES
from fastreduce.run import contestants
from fastreduce.run.listening import _around_backward
from fastreduce.run.orders import Orders
from fastreduce.run.weights_from import WeightsFrom
from tests.support.commands import run, with_environment
from tests.support.models import Branches, Heads, assert_same_bits, batch, grads_of, mlp, wrap
from tests.support.ranks import RankPool, with_time
from tests.support.run_scripts import RUN
from tests.support.snapshots import FEEDBACK, Training

ALL = ("int8:error_feedback", "torch", "fp16", "no reduction", "int4:error_feedback", "torch:fp16", "none")
OF_OURS = ("none", FEEDBACK, "int4", "no reduction", "fp16")
STEPS = 11  # for which three ranks have data


class Contest:
    """Contestants that take turns in a wrapper's steps, each for `steps` of them."""

    def __init__(self, model: Any, names: Sequence[str], steps: int = 2) -> None:
        self.weights = WeightsFrom(model)
        self._model, self._names, self._steps, self._count = model, names, steps, 0
        model.register_forward_pre_hook(lambda *_: self._forward())

    def _forward(self) -> None:
        if torch.is_grad_enabled():
            self.weights.contest(self._model)
            if self._count % self._steps == 0:
                contestants.take(self._model, self._names[self._count // self._steps % len(self._names)])
            self._count += self._model.require_backward_grad_sync

    def before_backward(self) -> None:
        self.weights.look()

    def after_backward(self, roots: Any, gradients: Any) -> None:
        self.weights.settle()

    def forward(self, model: Any) -> None: ...

    def output(self, model: Any, tensors: Iterable[Tensor]) -> None: ...

    @contextlib.contextmanager
    def goes_on(self) -> Iterator[None]:
        """In it scripts' backwards are those of a comparison."""
        with patch.object(torch.autograd, "backward", _around_backward(torch.autograd.backward, self)):
            yield


# Bits of a training without contestants


@pytest.mark.parametrize(
    "setting",
    [
        "none",
        *(
            pytest.param(s, marks=pytest.mark.long)
            for s in (FEEDBACK, "bf16", "powersgd:rank=2", "int4:rounding=stochastic,warm_up=3")
        ),
    ],
)
def test_a_training_has_the_bits_of_one_without_contestants(ranks: RankPool, setting: str):
    """Weights, optimizer, loss scale, norms, and all that the reducer keeps; under a loss scale, with clipping."""
    for rank, (plain, contested) in enumerate(ranks.run(_train_twice, setting)):
        assert_same_bits(contested, plain, f"rank {rank}")


def _train_twice(rank: int, world_size: int, setting: str) -> Any:
    plain = Training(setting, clips=True)
    plain.steps(STEPS)
    found = plain.all(), plain.norms
    contested = Training(setting, clips=True)
    with Contest(contested.model, ALL, steps=1).goes_on():
        contested.steps(STEPS)
    return found, (contested.all(), contested.norms)


@pytest.mark.long
@pytest.mark.parametrize(("setting", "views"), [("none", True), (FEEDBACK, False)], ids=["views", "gradients"])
def test_so_it_has_over_random_histories(ranks2: RankPool, setting: str, views: bool):
    """Of accumulation, unused parameters, clipping, skipped steps and gradients that stay."""
    for seed in range(6):
        for rank, (plain, contested) in enumerate(ranks2.run(_histories, setting, views, seed)):
            assert_same_bits(contested, plain, f"rank {rank}, history {seed}")


def _histories(rank: int, world_size: int, setting: str, views: bool, seed: int) -> Any:
    return _history(setting, views, seed, ()), _history(setting, views, seed, (*ALL, *OF_OURS))


def _history(setting: str, views: bool, seed: int, names: Sequence[str]) -> Any:
    torch.manual_seed(0)
    options = {"compression": setting, "bucket_cap_mb": 0.0002, "gradient_as_bucket_view": views}
    model = wrap("ours", Branches(), find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    same, own = random.Random(seed), random.Random(1000 * seed + dist.get_rank())
    seen: list[Any] = []
    with contextlib.ExitStack() as stack:
        if names:
            stack.enter_context(Contest(model, names, steps=1 + seed % 2).goes_on())
        for step in range(14):
            kind = same.choice(["none", "zeros", "stays"])
            if kind != "stays":
                optimizer.zero_grad(set_to_none=kind == "none")
            for micro in range(same.choice([1, 1, 3]), 0, -1):
                with model.no_sync() if micro > 1 else contextlib.nullcontext():
                    model(
                        batch(dist.get_rank(), step, 4, 4), own.choice(["abc", "a", "b", ""])
                    ).square().mean().backward()
            seen.append(grads_of(model.module))
            match same.choice(["torch", "ours", "times", "", ""]):
                case "torch":
                    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                case "ours":
                    seen.append(model.clip_grad_norm_(0.1))
                case "times":
                    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
            if same.random() < 0.8:
                optimizer.step()
    return seen, dict(model.module.state_dict()), model.reducer.step


@pytest.mark.long
def test_a_second_backward_for_what_the_first_left_out_is_refused(ranks2: RankPool):
    assert all("sum the losses and call backward once" in said for said in ranks2.run(_two_backwards))


def _two_backwards(rank: int, world_size: int) -> str:
    model = wrap("ours", Heads())
    with Contest(model, OF_OURS).goes_on():
        out = model(batch(rank, 0, 2, 4))
        out["first"].sum().backward()
        with pytest.raises(SettingError) as refused:
            out["rest"][0].square().sum().backward()
    return str(refused.value)


# What contestants keep


@pytest.mark.parametrize("factor", [0.5, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_contestant_keeps_what_it_would_keep_if_its_own_averages_were_applied(ranks2: RankPool, factor: float):
    """Where weights stay, gradients are the same; what becomes of the averages in its place becomes of its own."""
    for alone, contested in ranks2.run(_residuals, factor):
        assert contested.keys() == alone.keys() and any(kept.abs().max() > 0 for kept in alone.values())
        for name, kept in alone.items():
            # Under a factor its averages' largest magnitudes and those in their place are each measured in FP32.
            torch.testing.assert_close(
                contested[name], kept, rtol=0 if factor == 1 else 1e-5, atol=0 if factor == 1 else 1e-8
            )


def _residuals(rank: int, world_size: int, factor: float) -> Any:
    found = []
    for contested in (False, True):
        torch.manual_seed(0)
        model = wrap("ours", mlp(), compression="none" if contested else FEEDBACK, bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with contextlib.ExitStack() as stack:
            if contested:
                contest = stack.enter_context(_and_itself(Contest(model, [FEEDBACK], steps=100)))
            for step in range(5):
                optimizer.zero_grad()
                model(batch(rank, step, 4, 20)).square().mean().backward()
                if factor != 1:
                    torch._foreach_mul_([p.grad for p in model.parameters()], factor)
                if step != 2:
                    optimizer.step()
        reducer = contest.weights._contestants if contested else model.reducer
        state = reducer.state_dict()
        found.append({name: kept.clone() for name, kept in state["residuals"].items()})
    return found


@contextlib.contextmanager
def _and_itself(contest: Contest) -> Iterator[Contest]:
    with contest.goes_on():
        yield contest


# Who is late

SLEEP = 0.008  # seconds that rank 1's forward takes longer, on a machine that does nothing else


@pytest.mark.long
@pytest.mark.slow
def test_a_late_rank_is_late_in_what_it_does_whoever_contests(ranks2: RankPool):
    """In turns without a reduction it is the wrapper's own that ranks wait in, and that compares them."""

    def test(sleep: float) -> None:
        found = ranks2.run(_late, sleep)[0]
        assert [(late.rank, late.part) for late in found.late] == [(1, "compute")], found

    with_time(test, SLEEP)


def _late(rank: int, world_size: int, sleep: float) -> Any:
    model = wrap("ours", mlp())
    model.module.register_forward_pre_hook(lambda *_: time.sleep(sleep * rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Contest(model, ["none", "no reduction"], steps=1).goes_on():
        for step in range((TIMES + 1) * EVERY):
            optimizer.zero_grad()
            model(batch(rank, step, 4, 20)).square().mean().backward()
            optimizer.step()
    return model.reducer.stragglers() if isinstance(model.reducer, GradientReducer) else None


# Under `fastreduce compare`

SCRIPT = """
import hashlib, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(3)
ddp = DDP(torch.nn.Sequential(torch.nn.Linear(9, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
numbers = torch.Generator().manual_seed(dist.get_rank())
for step in range(200):
    optimizer.zero_grad()
    for micro in range(2):
        with ddp.no_sync() if micro == 0 else torch.enable_grad():
            loss = ddp(torch.randn(8, 9, generator=numbers)).square().mean()
            loss.backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()
    if dist.get_rank() == 0:
        print("WEIGHTS", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest())
"""


@pytest.mark.long
def test_weights_after_a_rotation_of_all_contestants_are_those_of_a_training_alone(tmp_path: Path):
    """Without --weights-from they are others."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    names = ("none", "none", "int8:error_feedback", "torch", "fp16", "torch:fp16", "no reduction")
    lengths = {"rounds": 2, "warm_up": 3, "settle": 2, "steps": 2}

    def weights(**orders: Any) -> list[str]:
        told = Orders(str(tmp_path / "lines"), "none", names, **lengths, **orders).environment() if orders else {}
        done = run(*RUN, "--nproc-per-node", 2, script, env=with_environment(**told))
        assert done.returncode == 0, done.stderr
        return re.findall("WEIGHTS (.*)", done.stdout)

    (tmp_path / "lines").touch()
    alone, kept, spoilt = weights(), weights(weights_from="none"), weights(weights_from="")
    assert len(kept) == 3 + 2 * len(names) * 4 - 1 and kept == alone[: len(kept)]
    assert len(spoilt) == len(kept) and spoilt[:5] == alone[:5] and spoilt[-1] != alone[len(spoilt) - 1]
