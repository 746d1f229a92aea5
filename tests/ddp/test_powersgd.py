"""Trainings under PowerSGD: what is owed, torch's own hook beside it, and everything that a wrapper does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce import all_reduce_gradients, load_checkpoint, save_checkpoint
from fastreduce.hooks import CompressState, compress
from tests.reduction.residuals.test_applied import FEW, steps
from tests.reduction.test_switched_histories import switching_steps
from tests.support import tolerances
from tests.support.histories import Setup, Step, check_law, of_trainings, train
from tests.support.models import Breaking, assert_same_bits, batch, equal_on_all, grads_of, wrap
from tests.support.ranks import RankPool
from tests.support.snapshots import Training, switch_and_resume

SPECS = ("powersgd:rank=1", "powersgd", "powersgd:rank=2,min_compression_rate=1")
SWITCHES = [
    "none",
    "int8:block=16,error_feedback",
    "topk:ratio=0.1,min_numel=1",
    *SPECS,
    "b|c: powersgd:rank=1; *: int4:block=32,error_feedback",
]


# The law


def hunt(ranks: RankPool, examples: int, each_step: st.SearchStrategy[Step], specs: tuple[str, ...] = SPECS) -> None:
    """Search for a training under one of some settings that breaks the law."""
    setups = st.builds(
        Setup,
        way=FEW(["ddp", "ddp", "hook", "call"]),
        optimizer=FEW(["sgd", "adam", "fused"]),
        scaled=st.booleans(),
        setting=FEW(specs),
        bucket_cap_mb=FEW([1e-6, 1e-3, 25.0]),
        views=st.booleans(),
    )

    @of_trainings(examples)
    @given(setups, st.lists(each_step, min_size=2, max_size=12))
    def search(setup: Setup, history: list[Step]) -> None:
        check_law(setup, ranks.run(train, setup, history))

    search()


def test_applied_and_exact_gradients_differ_by_what_is_kept(ranks2: RankPool):
    hunt(ranks2, 2, steps(2))
    hunt(ranks2, 3, switching_steps(2, SWITCHES))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_many_histories_of_two(ranks2: RankPool):
    hunt(ranks2, 60, steps(2))
    hunt(ranks2, 60, switching_steps(2, SWITCHES))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_many_histories_of_three(ranks3: RankPool):
    hunt(ranks3, 40, steps(3))
    hunt(ranks3, 40, switching_steps(3, SWITCHES))


# Beside torch's hook


class Network(nn.Module):
    """What learns a function of 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


STEPS = 80


def _learn(rank: int, world_size: int, way: str) -> tuple[list[float], int, Tensor]:
    """Losses on data that no step has seen, bytes that a step sends, and a parameter at the end."""
    torch.manual_seed(0)
    wanted, module = torch.randn(32), Network()
    sent = 0
    if way == "torch":
        model: Any = TorchDDP(module, bucket_cap_mb=1)
        state = PowerSGDState(None, 2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
        model.register_comm_hook(state, powerSGD_hook)
    else:
        model = wrap("ours", module, bucket_cap_mb=1, compression=way)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    x = batch(9, 999, 512, 32)
    losses = []
    for step in range(STEPS):
        inputs = batch(rank, step, 16, 32)
        optimizer.zero_grad()
        (model(inputs).squeeze(1) - torch.tanh(inputs @ wanted)).square().mean().backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                losses.append(float((module(x).squeeze(1) - torch.tanh(x @ wanted)).square().mean()))
    if way == "torch":  # numbers that its hook has sent since it began to compress, in all steps but two
        sent = 4 * int(state.total_numel_after_compression) // max(1, STEPS - 2)
    else:
        sent = model.reducer.sent_bytes
    return losses, sent, module.layers[2].weight.detach().clone()


def test_a_training_ends_as_under_torchs_hook_and_sends_as_little(ranks2: RankPool):
    found = {way: ranks2.run(_learn, way) for way in ("torch", "powersgd:rank=2")}
    for of_ranks in found.values():
        assert_same_bits(of_ranks[0][2], of_ranks[1][2])
    torchs, ours = (found[way][0] for way in found)
    for step, (theirs, mine) in enumerate(zip(torchs[0], ours[0], strict=True)):
        assert mine == pytest.approx(theirs, rel=tolerances.OF_TORCHS_POWERSGD), step
    assert ours[0][-1] < 0.2 * ours[0][0], "it has learned"
    # The same numbers in factors and small tensors; each of these five, the flags and the factors begin at 64 bytes.
    factors, small = (32 + 64) * 2 + (64 + 64) * 2, 64 + 64 + 64 + 1  # what is 1 by 64 among these
    assert torchs[1] == 4 * (factors + small) <= ours[1] <= torchs[1] + 64 * 7


# With everything else


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (2, 2),
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 0, marks=pytest.mark.long),
        pytest.param(0, 2, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_under_the_same_setting_or_another(
    ranks2: RankPool, old: int, new: int, tmp_path: Path
):
    before, after = (f"powersgd:rank={rank}" if rank else "int8:error_feedback" for rank in (old, new))
    for (kept, _), (resumed, _) in ranks2.run(switch_and_resume, before, after, 3, tmp_path / "snapshot.pt"):
        for part in ("model", "optimizer"):
            assert_same_bits(resumed[part], kept[part], part)
        assert_same_bits(resumed["reducer"]["residuals"], kept["reducer"]["residuals"])
        factors = kept["reducer"]["factors"]
        assert_same_bits(resumed["reducer"]["factors"], factors)
        small = ["5.weight"] if new == 1 else []  # 3 by 26
        assert sorted(factors) == (["0.weight", "3.weight", *small] if new else [])
        assert all(factor.any(1).all() and len(factor) == new for factor in factors.values())


def _save(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    training = Training("powersgd:rank=2")
    training.steps(3)
    save_checkpoint(path, **training.parts())
    return training.model.reducer.state_dict()


def _load(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    training = Training("powersgd:rank=2", seed=5)
    load_checkpoint(path, **training.parts())
    state = training.model.reducer.state_dict()
    training.steps(2)
    return state


@pytest.mark.long
def test_another_number_of_ranks_gets_the_mean_of_residuals_and_the_factors(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Path
):
    old = ranks3.run(_save, tmp_path / "snapshot.pt")
    for state in ranks2.run(_load, tmp_path / "snapshot.pt"):
        assert_same_bits(state["factors"], old[0]["factors"])
        for name, residual in state["residuals"].items():
            assert_same_bits(residual, torch.stack([each["residuals"][name] for each in old]).mean(0))


class Branches(nn.Module):
    """Two layers, of which a batch takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def many_ways(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """Gradients, or parameters, at the end of short trainings of every kind."""
    found: dict[str, Any] = {}

    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        return wrap("ours", Branches(), compression=spec, **options)

    def trained(ddp: Any, name: str, **of_batch: Any) -> None:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(rank, step, 4, 24), **of_batch).square().mean().backward()
            optimizer.step()
        found[name] = grads_of(ddp.module), ddp.module.state_dict()

    for transport in ("gloo", "shm"):
        trained(made(transport=transport), transport, both=True)
    trained(made(gradient_as_bucket_view=True), "views", both=True)
    trained(made(bucket_cap_mb=0.001), "small buckets", both=True)
    trained(made(find_unused_parameters=True), "unused on one rank", both=rank == 0)
    trained(made(find_unused_parameters=True), "unused on both", both=False)
    model = made()
    model.reducer.keep_statistics()
    trained(model, "statistics", both=True)
    found["norm"] = model.clip_grad_norm_(0.01)
    joined = made()
    with Join([joined]):
        for step in range(2 + rank):
            joined(batch(rank, step, 4, 24), True).square().mean().backward()
    found["joined"] = {name: each for name, each in grads_of(joined.module).items() if rank == world_size - 1}
    # Matrices that are transposed in memory, or complex; and numbers alone.
    tensors = [batch(rank, 5, 40, 30).t(), torch.complex(batch(rank, 6, 30, 20), batch(rank, 7, 30, 20))]
    tensors += [torch.tensor(float(rank)), batch(rank, 8, 0, 3)]
    all_reduce_gradients(tensors, spec)
    found["call"] = tensors
    return found


def test_every_rank_has_the_same_bits_however_it_trains(ranks2: RankPool):
    first, second = ranks2.run(many_ways, "powersgd:rank=2")
    joined = first.pop("joined"), second.pop("joined")
    assert all(each is not None and each.isfinite().all() for each in joined[1].values())
    found = equal_on_all([first, second])
    for name in ("shm", "views", "statistics"):
        assert_same_bits(found[name], found["gloo"], name)
    assert found["unused on both"][0]["second.weight"] is None
    assert found["unused on one rank"][0]["second.weight"].any()


def hooked(rank: int, world_size: int, spec: str) -> Any:
    """Our hook in torch's class, and our class."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = Branches()
        options: dict[str, Any] = {"bucket_cap_mb": 1, "find_unused_parameters": True}
        ddp: Any = wrap("ours", module, compression=spec, **options) if ours else TorchDDP(module, **options)
        if not ours:
            ddp.register_comm_hook(CompressState(spec, named_parameters=module.named_parameters()), compress)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            ddp(batch(rank, step, 4, 24), True).square().mean().backward()
            optimizer.step()
        found.append(module.state_dict())
    return found


def test_the_hook_for_torchs_class_has_the_same_bits(ranks2: RankPool):
    for hook, ours in ranks2.run(hooked, "powersgd:rank=2"):
        assert_same_bits(hook, ours)


def _during(rank: int, world_size: int, raises: bool) -> list[Any]:
    """States before a backward, in a hook of it behind a bucket's reduction, and after it."""
    ddp = wrap("ours", nn.Sequential(*[nn.Linear(20, 20) for _ in range(3)]), compression=SPECS[0], bucket_cap_mb=1e-3)
    states: list[Any] = []

    def save(_: Any = None) -> None:
        state = ddp.reducer.state_dict()
        states.append([*state["factors"].values(), *state["residuals"].values()])

    def look(_: Tensor) -> None:
        for _, pending in ddp.reducer.backward._launches.made:
            pending.result()
        save()
        if raises:
            raise RuntimeError("in a hook")

    def step(i: int) -> None:
        ddp.zero_grad()
        ddp(batch(rank, i, 4, 20)).square().mean().backward()

    for i in range(3):
        step(i)
    save()
    hook = ddp.module[0].weight.register_hook(look)
    if raises:
        with pytest.raises(RuntimeError, match="in a hook"):
            step(3)
        hook.remove()
        ddp.reducer.drop_broken_backward()
    else:
        step(3)
    save()
    return states


@pytest.mark.parametrize("raises", [False, True], ids=["stored", "broken"])
def test_a_snapshot_during_a_backward_has_the_factors_from_before_it(ranks2: RankPool, raises: bool):
    for before, during, after in ranks2.run(_during, raises):
        assert_same_bits(during, before)
        assert not torch.equal(after[0], before[0])


@pytest.mark.usefixtures("group_of_one")
def test_one_column_trains_on_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Which are torch's, as those of `reference`, and take no tensor that is argument and result at once."""
    monkeypatch.setenv("FASTREDUCE_KERNELS", "reference")
    model = wrap("ours", nn.Linear(40, 40), compression="powersgd:rank=1,min_compression_rate=1")
    model(torch.ones(2, 40)).sum().backward()
    assert torch.allclose(model.module.weight.grad, torch.full((40, 40), 2.0))  # which is of rank 1


def _factors_behind_a_failure(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(0)
    model = wrap("ours", Breaking(8), compression="powersgd:rank=1,min_compression_rate=1", bucket_cap_mb=1e-6)
    for step in range(3):
        boom = step == 2 and rank == 0
        with pytest.raises(ValueError, match="boom") if boom else nullcontext():
            model(batch(rank, step, 4, 8), boom=boom).square().mean().backward()
    model.reducer.drop_broken_backward()
    return [pipeline.wires.factors() for pipeline in model.reducer.pipelines]


def test_behind_a_backward_that_raised_all_ranks_would_save_the_same_factors(ranks2: RankPool):
    equal_on_all(ranks2.run(_factors_behind_a_failure))


def _infinite_and_applied(rank: int, world_size: int) -> None:
    model = wrap("ours", Breaking(8), compression="powersgd:rank=1,min_compression_rate=1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        if step == 1 and rank == 0:
            model.module.b.weight.register_hook(lambda grad: grad * torch.inf)
        model(batch(rank, step, 4, 8)).square().mean().backward()
        optimizer.step()
    assert not model.module.b.weight.isfinite().all()
    assert all(feedback.residual.isfinite().all() for feedback in model.reducer.buckets.feedbacks)


def test_of_an_infinite_gradient_that_is_applied_nothing_is_kept(ranks2: RankPool):
    ranks2.run(_infinite_and_applied)
