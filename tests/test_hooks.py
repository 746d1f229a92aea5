"""`fastreduce.hooks` on torch's own class gives the gradients that our class gives."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce import DistributedDataParallel, SettingError
from fastreduce.hooks import CompressState, compress
from fastreduce.transports import connections
from tests.support import tolerances


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 10))


def _steps(ddp: TorchDDP, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(16, 30, generator=torch.Generator().manual_seed(100 * step + rank))
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()


def _same_as_ours(rank: int, world_size: int, spec: str) -> bool:
    stock, ours = TorchDDP(_model(), bucket_cap_mb=0.005), DistributedDataParallel(_model(), compression=spec)
    stock.register_comm_hook(CompressState(spec), compress)
    for ddp in (stock, ours):
        _steps(ddp, rank, 0, 4)
    return all(torch.equal(p.grad, q.grad) for p, q in zip(stock.parameters(), ours.parameters(), strict=True))


LONG = [pytest.param(spec, marks=pytest.mark.long) for spec in ("bf16", "int8:block=64")]


@pytest.mark.parametrize("spec", ["none", "fp16", "int8", *LONG])
def test_hook_on_torchs_class_gives_the_bits_of_ours(ranks2, spec: str):
    assert ranks2.run(_same_as_ours, spec) == [True, True]


def _residuals_survive(rank: int, world_size: int) -> tuple[bool, bool]:
    def wrapped() -> tuple[TorchDDP, CompressState]:
        model = _model()
        state = CompressState("int8:error_feedback", named_parameters=model.named_parameters())
        ddp = TorchDDP(model, bucket_cap_mb=0.005)
        ddp.register_comm_hook(state, compress)
        return ddp, state

    ddp, state = wrapped()
    _steps(ddp, rank, 0, 3)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    named = sorted(saved["residuals"]) == sorted(name for name, _ in _model().named_parameters())

    again, resumed = wrapped()
    resumed.load_state_dict(saved)
    fresh, _ = wrapped()
    for each in (ddp, again, fresh):
        _steps(each, rank, 3, 4)
    grads = [torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (ddp, again, fresh)]
    closer = (grads[0] - grads[1]).norm() < (grads[0] - grads[2]).norm()
    return named, bool(closer)


def test_residuals_are_saved_by_name_and_loaded(ranks2):
    assert ranks2.run(_residuals_survive) == [(True, True)] * 2


def _kept_beside_buckets(rank: int, world_size: int, spec: str) -> tuple[bool, list[str], list[str]]:
    """Whether torch has laid its buckets out anew behind the first step, and of what copies stay: then, and loaded."""
    model = _model()
    state = CompressState(spec, named_parameters=model.named_parameters())
    ddp = TorchDDP(model, bucket_cap_mb=0.005)
    ddp.register_comm_hook(state, compress)
    _steps(ddp, rank, 0, 1)
    before = list(state._pipelines.values())
    _steps(ddp, rank, 1, 3)
    anew, beside = not set(before) & set(state._pipelines.values()), list(state._kept)
    state.load_state_dict(state.state_dict())
    _steps(ddp, rank, 3, 4)
    return anew, beside, list(state._kept)


@pytest.mark.parametrize("spec", ["int8:error_feedback", "powersgd:rank=1,min_compression_rate=1"])
def test_what_new_buckets_go_on_with_is_not_kept_beside_them(ranks2, spec: str):
    assert ranks2.run(_kept_beside_buckets, spec) == [(True, [], [])] * 2


class _Bucket:
    """What torch hands to a hook, of these parameters; torch has no constructor for it."""

    def __init__(self, index: int, parameters: list[torch.Tensor]) -> None:
        self.index, self.parameters = lambda: index, lambda: parameters
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        self.gradients, self.buffer = lambda: gradients, lambda: torch.cat([each.flatten() for each in gradients])


def test_what_waits_for_a_bucket_still_waits_when_others_are_given_up(group_of_one: None):
    """As where a state has been loaded, and buckets change before the last of them has come."""
    first, second = (torch.nn.Parameter(torch.zeros(32)) for _ in range(2))
    state = CompressState("int8:error_feedback", named_parameters=[("first", first), ("second", second)])
    residuals = {"first": torch.full((32,), 0.25), "second": torch.full((32,), 0.5)}
    state.load_state_dict({**state.state_dict(), "residuals": residuals})
    for bucket in (_Bucket(0, [first]), _Bucket(0, [second, first])):
        state.pipeline(bucket)
        saved = state.state_dict()["residuals"]
        assert {name: kept.tolist() for name, kept in saved.items()} == {n: r.tolist() for n, r in residuals.items()}


def _old_buckets(rank: int, world_size: int, spec: str) -> int:
    """How many of the pipelines of torch's first buckets are in memory behind those of its later ones."""
    ddp = TorchDDP(_model(), bucket_cap_mb=0.005)
    state = CompressState(spec)
    ddp.register_comm_hook(state, compress)
    gc.collect()
    gc.disable()
    try:
        _steps(ddp, rank, 0, 1)
        first = [weakref.ref(pipeline) for pipeline in state._pipelines.values()]
        _steps(ddp, rank, 1, 3)
        return sum(each() is not None for each in first)
    finally:
        gc.enable()


@pytest.mark.parametrize("spec", ["none", "int8:error_feedback"])
def test_buckets_that_torch_lays_out_anew_are_gone_without_a_collection_of_cycles(ranks2, spec: str):
    assert ranks2.run(_old_buckets, spec) == [0, 0]


class _InTwoDtypes(nn.Module):
    """Torch's first buckets are one for each dtype; then the FP32 parameters get others, in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((900, torch.float32), (800, torch.float32), (700, torch.float32), (100_000, torch.float64))
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((self.values[i] * gradients[i]).sum() for i in (0, 2, 1, 3)) * 1.0


def _owed_and_kept(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """By parameter, exact averages less those that were applied, and what this rank keeps."""
    model = _InTwoDtypes()
    ddp = TorchDDP(model, bucket_cap_mb=0.002)
    state = CompressState("int8:error_feedback", named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    short = [torch.zeros_like(value, dtype=torch.float64) for value in model.values]
    for step in range(3):
        of_ranks = [
            [torch.randn(v.shape, generator=torch.Generator().manual_seed(step * 8 + r), dtype=v.dtype) for v in short]
            for r in range(world_size)
        ]
        optimizer.zero_grad()
        ddp(of_ranks[rank]).backward()
        for total, value, *exact in zip(short, model.values, *of_ranks, strict=True):
            total += sum(exact) / world_size - value.grad
        optimizer.step()
    kept = state.state_dict()["residuals"]
    return short, [kept[f"values.{i}"] for i in range(len(short))]


def test_a_bucket_that_stays_while_torch_lays_others_out_anew_keeps_its_residuals(ranks2):
    results = ranks2.run(_owed_and_kept)
    for i, short in enumerate(results[0][0]):
        kept = torch.stack([of_rank[i].double() for _, of_rank in results]).mean(0)
        assert kept.abs().max() > 1e-3
        assert (short - kept).abs().max() < 1e-5, i


def _refuses(rank: int, world_size: int) -> str:
    ddp = TorchDDP(_model())
    ddp.register_comm_hook("fp16", compress)
    with pytest.raises(SettingError) as error:
        ddp(torch.ones(2, 30)).sum().backward()
    return str(error.value)


def test_a_state_that_is_none_is_refused(ranks2):
    assert all("CompressState" in text for text in ranks2.run(_refuses))


WRONG: dict[str, tuple[Any, str]] = {
    "a name of a group": (lambda: CompressState("int8", "gloo"), "process_group='gloo'; allowed: a ProcessGroup"),  # type: ignore[arg-type]
    "a module": (lambda: CompressState("int8", named_parameters=nn.Linear(1, 1)), "named_parameters=Linear"),  # type: ignore[arg-type]
    "parameters": (lambda: CompressState("int8", named_parameters=nn.Linear(1, 1).parameters()), "allowed: pairs of a"),  # type: ignore[arg-type]
    "a dict": (lambda: CompressState("int8", named_parameters={"ab": nn.Linear(1, 1).weight}), "allowed: pairs of a"),  # type: ignore[dict-item]
    "an empty state": (
        lambda: CompressState("int8").load_state_dict({}),
        r"load_state_dict: \{\}; allowed: what",
    ),
    "no state": (
        lambda: CompressState("int8").load_state_dict(None),
        "load_state_dict: None; allowed: what",
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_are_none_are_named(group_of_one: None, case: str):
    with pytest.raises(SettingError, match=f"(?s)CompressState.*{WRONG[case][1]}"):
        WRONG[case][0]()


LOSSY = ["int8:error_feedback", "int4:error_feedback", "topk:ratio=0.1,min_numel=1", "powersgd:rank=1"]


def _rolled_back(rank: int, world_size: int, spec: str) -> None:
    """What is kept is what was loaded: nothing of what was kept until then."""
    model = _model()
    state = CompressState(spec, named_parameters=model.named_parameters())
    ddp = TorchDDP(model, bucket_cap_mb=0.005)
    ddp.register_comm_hook(state, compress)
    first = state.state_dict()
    _steps(ddp, rank, 0, 3)
    saved = state.state_dict()
    for behind in (0, 2):
        _steps(ddp, rank, 3, 3 + behind)
        state.load_state_dict(saved)
        for kind in ("residuals", "units", "factors"):
            torch.testing.assert_close(state.state_dict()[kind], saved[kind], rtol=0, atol=0)
    _steps(ddp, rank, 3, 5)
    state.load_state_dict(first)
    assert not state.state_dict()["residuals"] and not state.state_dict()["factors"]


@pytest.mark.parametrize("spec", [pytest.param(LOSSY[0], marks=pytest.mark.long), *LOSSY[1:]])
def test_a_state_that_is_loaded_takes_the_place_of_what_was_kept(ranks2, spec: str):
    ranks2.run(_rolled_back, spec)


def _connections(rank: int, world_size: int) -> int:
    """How many were made for states that came one after the other."""
    group = dist.new_group()
    for _ in range(6):
        model = nn.Linear(3, 2)
        ddp = TorchDDP(model, process_group=group)
        ddp.register_comm_hook(CompressState("int8", group), compress)
        ddp(torch.ones(1, 3)).sum().backward()
        del model, ddp
        gc.collect()
    assert group is not None
    return max(len(beside.made) for beside in connections.ALL[group].values())


def test_a_state_that_is_gone_leaves_its_connection_to_the_next(ranks2):
    assert max(ranks2.run(_connections)) < 5  # torch keeps the last one or two for a while


class _Branch(nn.Module):
    """Its gradients are what one says; of the second parameter only where `both`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(20, 15)) for _ in range(2))

    def forward(self, gradient: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.first * gradient).sum() + ((self.second * gradient).sum() if both else 0)


def _joined(rank: int, world_size: int, spec: str, views: bool, own_steps: int) -> float:
    """Rank 0 alone uses the second parameter, and joins behind its steps; how far that is from the exact sum."""
    model = _Branch()
    with warnings.catch_warnings():  # torch's, of parameters that are used
        warnings.simplefilter("ignore")
        ddp = TorchDDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    ddp.register_comm_hook(CompressState(spec, named_parameters=model.named_parameters()), compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def gradient(rank: int, step: int) -> torch.Tensor:
        return torch.randn(20, 15, generator=torch.Generator().manual_seed(100 * rank + step))

    exact = sum(gradient(0, step).double() for step in range(own_steps)) / world_size
    with ddp.join():
        for step in range(own_steps if rank == 0 else 30):
            optimizer.zero_grad()
            ddp(gradient(rank, step), rank == 0).backward()
            optimizer.step()
    return float((model.second.double() + exact).norm() / exact.norm())


OWN = ("int4:error_feedback", "powersgd:rank=1")


@pytest.mark.parametrize(
    ("spec", "views"),
    [
        pytest.param(
            spec,
            views,
            marks=[pytest.mark.long] * (views == (spec in OWN) or spec == LOSSY[0]),
            id=f"{spec}-{'views' * views}",
        )
        for spec in LOSSY
        for views in (False, True)
    ],
)
def test_what_a_rank_that_joins_has_used_alone_is_applied_once(ranks2, spec: str, views: bool):
    """Torch stores averages of it still, and with them what was kept, which is owed no longer then."""
    for own_steps in (1, 2):  # torch lays buckets out anew behind the first one, on a rank that has joined, too
        for far in ranks2.run(_joined, spec, views, own_steps):
            assert far < tolerances.APPLIED


def _thrown_away(rank: int, world_size: int, spec: str) -> float:
    """Averages that rank 0 throws away before it joins without an input; how far the rest is from the exact sum."""
    model = _Branch()
    ddp = TorchDDP(model)
    ddp.register_comm_hook(CompressState(spec, named_parameters=model.named_parameters()), compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def gradient(rank: int, step: int) -> torch.Tensor:
        return torch.randn(20, 15, generator=torch.Generator().manual_seed(100 * rank + step))

    def step(number: int, size: float = 1.0, applies: bool = True) -> None:
        ddp(gradient(rank, number) * size, True).backward()
        if applies:
            optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1, applies=False)
    with ddp.join():
        if rank == 1:
            step(2)
    for number in range(3, 33):
        step(number, size=0.0)
    exact = (gradient(0, 0) + gradient(1, 0) + gradient(1, 2)).double() / world_size
    return float((model.second.double() + exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "spec", ["int4:error_feedback", pytest.param("topk:ratio=0.1,min_numel=1", marks=pytest.mark.long)]
)
def test_what_a_rank_throws_away_before_it_joins_is_not_taken_for_applied(ranks2, spec: str):
    assert max(ranks2.run(_thrown_away, spec)) < tolerances.APPLIED


@pytest.mark.long
@pytest.mark.parametrize("spec", LOSSY)
def test_what_a_rank_of_three_that_joins_has_used_alone_is_applied_once(ranks3, spec: str):
    for far in ranks3.run(_joined, spec, False, 2):
        assert far < tolerances.APPLIED


@pytest.mark.parametrize("where", ["in its job", "behind it"])
def test_what_a_bucket_raises_is_raised_by_backward(group_of_one, monkeypatch: pytest.MonkeyPatch, where: str):
    def fails() -> Any:
        raise ValueError(f"it was given up {where}")

    ddp = TorchDDP(nn.Linear(3, 2))
    state = CompressState("none")
    ddp.register_comm_hook(state, compress)
    parts = (fails, None) if where == "in its job" else (lambda: None, fails)
    monkeypatch.setattr(state, "_dense", lambda bucket: parts)
    with pytest.raises(RuntimeError, match=f"it was given up {where}"):  # torch names it in an error of its own
        ddp(torch.ones(1, 3)).sum().backward()
