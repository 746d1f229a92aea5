"""State dicts, compilers, autocast, and wrappers in wrappers: with torch's class and with ours, on the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce
from fastreduce.errors import ReducerError, SettingError
from tests.support.models import (
    EXACT,
    Branches,
    Grads,
    assert_same_bits,
    batch,
    grads_of,
    mlp,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool

KINDS = ("torch", "ours")


def test_state_is_loaded_with_and_without_the_prefix(alone: None):
    bodies = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    states = {kind: wrap(kind, bodies[0]).state_dict() for kind in KINDS}
    assert list(states["ours"]) == list(states["torch"]) == [f"module.{name}" for name in bodies[0].state_dict()]
    for body, state in ((bodies[1], states["torch"]), (bodies[2], bodies[0].state_dict())):
        model = wrap("ours", body)
        found = model.load_state_dict(state)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        assert_same_bits(dict(body.state_dict()), dict(bodies[0].state_dict()))
    for state in ({"module.0.weight": torch.ones(2, 2)}, {"0.weight": torch.ones(2, 2)}, {}):
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(state)
        assert len(model.load_state_dict(state, strict=False).missing_keys) == 6 - len(state)
    model.load_state_dict(states["ours"], assign=True)  # new parameters, which nobody reduces
    with pytest.raises(fastreduce.ReducerError, match="Wrap the module again"):
        model(torch.ones(3, 2)).sum().backward()


class _Broken(nn.Module):
    """Two regions for the compiler, with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(300, 6), nn.Linear(315, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "output", [True, pytest.param(False, marks=pytest.mark.long)], ids=["output hooks", "parameter hooks"]
)
def test_compiled_autograd_is_refused(alone: None, output: bool):
    model = wrap("ours", nn.Linear(3, 2))
    loss = model(batch(0, 0, 4, 3)).sum() if output else model.module(batch(0, 0, 4, 3)).sum()
    compiler = torch.compile(backend="eager")
    try:
        model(batch(0, 0, 4, 3))
        with (
            torch._dynamo.compiled_autograd._enable(compiler),
            pytest.raises(ReducerError, match=r"rank 0: compiled autograd .* leave it off"),
        ):
            loss.backward()
    finally:
        torch._dynamo.reset()


def test_a_compression_where_dynamo_lets_torch_reduce_is_refused(alone: None):
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(SettingError, match=r"compression='int8' and .*python_reducer' exclude each other"),
    ):
        wrap("ours", mlp(), compression="int8")


def _compiled(rank: int, world_size: int, backend: str, inside: bool) -> dict[str, list[Grads]]:
    from torch._dynamo.backends.distributed import DDPOptimizer

    seen: dict[str, list[Grads]] = {}
    optimized: dict[str, int] = {}
    compile_fn = DDPOptimizer.compile_fn
    for kind in KINDS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        body = _Broken()
        if inside:
            model = wrap(kind, torch.compile(body, backend=backend), bucket_cap_mb=1.1)
        else:
            model = torch.compile(wrap(kind, body, bucket_cap_mb=1.1), backend=backend)
        seen[kind], optimized[kind] = [], 0

        def count(self: Any, *args: Any, kind: str = kind) -> Any:
            optimized[kind] += 1
            return compile_fn(self, *args)

        DDPOptimizer.compile_fn = count  # type: ignore[method-assign, assignment]
        try:
            optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                model(batch(rank, step, 4, 300)).square().mean().backward()
                optimizer.step()
                seen[kind].append(grads_of(body))
        finally:
            DDPOptimizer.compile_fn = compile_fn  # type: ignore[method-assign]
    assert optimized["ours"] == optimized["torch"] > 0
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "inside"),
    [
        ("eager", False),
        ("eager", True),
        *(pytest.param("aot_eager", inside, marks=pytest.mark.long) for inside in (False, True)),
    ],
    ids=lambda value: {False: "wrapper compiled", True: "module compiled"}.get(value, value),
)
def test_compiled_models_equal_torch_and_dynamos_optimizer_sees_our_class(ranks2: RankPool, backend: str, inside: bool):
    results = ranks2.run(_compiled, backend, inside)
    for rank, seen in enumerate(results):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    assert_same_bits(results[1]["ours"], results[0]["ours"])


def _autocast(rank: int, world_size: int, views: bool) -> dict[str, list[Grads]]:
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        body = mlp()
        model, seen[kind] = wrap(kind, body, gradient_as_bucket_view=views, bucket_cap_mb=0.004), []
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(batch(rank, step, 4, 20))
                assert output.dtype is torch.bfloat16 or isinstance(body[-1], nn.Tanh)
            output.float().square().mean().backward()
            optimizer.step()
            seen[kind].append(grads_of(body))
    return seen


@pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
def test_autocast_equals_torch(ranks2: RankPool, views: bool):
    results = ranks2.run(_autocast, views)
    for rank, seen in enumerate(results):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    assert_same_bits(results[1]["ours"], results[0]["ours"])


def _nested(rank: int, world_size: int) -> dict[str, list[Grads]]:
    """A wrapped part inside a wrapped whole, which leaves the part's parameters to it."""
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS:
        part = wrap(kind, whole_(Branches()), bucket_cap_mb=1e-6)
        body = nn.Sequential(part, whole_(nn.Linear(4, 4)))
        names = [name for name, _ in body.named_parameters() if name.startswith("0.")]
        TorchDDP._set_params_and_buffers_to_ignore_for_model(body, names)
        model, seen[kind] = wrap(kind, body, bucket_cap_mb=1e-6), []
        for step in range(4):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            seen[kind].append(grads_of(body))
    return seen


def test_a_wrapper_inside_a_wrapper_averages_its_part(ranks2: RankPool):
    results = ranks2.run(_nested)
    for step in range(4):
        body = nn.Sequential(whole_(Branches()), whole_(nn.Linear(4, 4)))
        for rank in range(2):
            (body(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        average = [None if g is None else g / 2 for g in grads_of(body).values()]
        for seen in results:
            for grads in seen.values():
                assert_same_bits(list(grads[step].values()), average)


def test_a_wrapper_inside_a_wrapper_that_averages_the_same_parameters_warns(alone: None):
    for inner in KINDS:
        body = nn.Sequential(nn.Linear(2, 2), wrap(inner, nn.Linear(2, 2)))
        with pytest.warns(UserWarning, match=r"module '1' is wrapped already.*'1.module.weight'"):
            wrap("ours", body)
        with pytest.warns(UserWarning, match=r"the module is wrapped already.*'module.0.weight'"):
            wrap("ours", wrap(inner, nn.Sequential(nn.Linear(2, 2))))


def _without_gradients(rank: int, world_size: int, views: bool) -> None:
    seen = {}
    for kind in ("torch", "ours"):
        torch.manual_seed(0)
        model = wrap(kind, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), gradient_as_bucket_view=views)
        seen[kind] = []
        for step in range(3):
            for quiet in (torch.no_grad, torch.inference_mode):
                with quiet():
                    seen[kind].append(model.eval()(batch(rank, step, 4, 6)).clone())
            model.train()
            armed = model(batch(rank, step, 4, 6))
            with torch.inference_mode():  # between a forward and its backward
                model.module(batch(rank, step, 4, 6))
            armed.square().sum().backward()
            seen[kind] += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    assert_same_bits(dict(enumerate(seen["ours"])), dict(enumerate(seen["torch"])), f"rank {rank}")


@pytest.mark.parametrize("views", [False, True])
def test_forwards_without_gradients_equal_torch_and_leave_training_alone(ranks2: RankPool, views: bool):
    ranks2.run(_without_gradients, views)
