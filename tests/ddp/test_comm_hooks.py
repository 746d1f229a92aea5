"""Communication hooks, optimizers in backward and join(), beside torch's class on the same data."""

from __future__ import annotations

import datetime
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join, Joinable, JoinHook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce import DistributedDataParallel
from fastreduce.ddp.user_hook import HookWork, UserHook
from fastreduce.reduction.bucketed import BucketedGradients
from fastreduce.reduction.telemetry.telemetry import Telemetry
from tests.support.installed_torch import needs_streams
from tests.support.models import (
    Words,
    assert_same_bits,
    batch,
    equal_on_all,
    grads_of,
    mlp,
    whole_loss,
    word_indices,
    wrap,
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 50), nn.Linear(50, 10))


def _register(ddp: TorchDDP, name: str) -> None:
    if name == "allreduce":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "builtin fp16":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif "PowerSGD" in name:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        hook = powerSGD_hook.powerSGD_hook
        ddp.register_comm_hook(state, hook if name == "PowerSGD" else default_hooks.fp16_compress_wrapper(hook))
    elif name == "another buffer":
        ddp.register_comm_hook(None, _in_another_buffer)
    else:
        ddp._register_fused_optim(torch.optim.SGD, 0.1)


def _in_another_buffer(state, bucket):  # torch takes no annotations that are text
    bucket.set_buffer(bucket.buffer() / 2)
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        gradient.mul_(parameter[0].sum())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _same_gradients(rank: int, world_size: int, hook: str, views: bool, cap: float) -> bool:
    pair = [
        kind(_model(), gradient_as_bucket_view=views, bucket_cap_mb=cap) for kind in (TorchDDP, DistributedDataParallel)
    ]
    for ddp in pair:
        _register(ddp, hook)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        inputs = torch.randn(16, 30, generator=data)
        for ddp in pair:
            ddp.zero_grad()
            ddp(inputs).square().mean().backward()
    return all(
        torch.equal(p, q) and torch.equal(p.grad, q.grad)
        for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True)
    )


OWN = ["allreduce", "builtin fp16", "PowerSGD in FP16", "fused optimizer"]
IN_VIEWS = ["fp16", "PowerSGD", "another buffer"]


@pytest.mark.parametrize(
    ("hook", "views"),
    [
        pytest.param(hook, views, marks=[pytest.mark.long] * (views != (hook in IN_VIEWS)))
        for hook in [*OWN, *IN_VIEWS]
        for views in (False, True)
    ],
)
def test_hooks_give_torchs_bits(ranks2, hook: str, views: bool):
    cap = 25 if "PowerSGD" in hook else 0.005  # on gloo, torch's PowerSGD aborts with several buckets
    assert ranks2.run(_same_gradients, hook, views, cap) == [True, True]


def _registered_amid(rank: int, world_size: int, at: int) -> None:
    pair = [kind(_model(), bucket_cap_mb=0.005) for kind in (TorchDDP, DistributedDataParallel)]
    for step in range(3):
        for ddp in pair:
            ddp.zero_grad()
            loss = ddp(batch(rank, step, 4, 30)).square().mean()
            if step == at:
                _register(ddp, "fp16")
            loss.backward()
        assert_same_bits(grads_of(pair[1]), grads_of(pair[0]), f"{step=}")


@pytest.mark.parametrize("at", [0, 2])
def test_a_hook_may_be_registered_between_a_forward_and_its_backward(ranks2, at: int):
    ranks2.run(_registered_amid, at)


def _bucket_as_seen_by_a_hook(rank: int, world_size: int) -> list[tuple]:
    seen = []

    def hook(state, bucket):  # torch checks annotations, and does not take strings
        gradients = bucket.gradients()
        whole = torch.cat([g.flatten() for g in gradients])
        shapes = [g.shape for g in gradients] == [p.shape for p in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), torch.equal(whole, bucket.buffer()), shapes))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 7.0))
        return future

    model = _model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(2, 30)).sum().backward()
    assert all((p.grad == 7).all() for p in model.parameters())
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, hook)
    for setting in ("fp16", "none:accumulate=fp32", "none:flat"):
        with pytest.raises(RuntimeError, match="exclude each other"):
            DistributedDataParallel(_model(), compression=setting).register_comm_hook(None, hook)
    return seen


def test_hook_sees_the_bucket_and_its_result_lands_in_the_gradients(ranks2):
    for seen in ranks2.run(_bucket_as_seen_by_a_hook):
        indices = list(range(len(seen)))
        assert len(indices) > 1
        assert seen == [(i, i == indices[-1], True, True) for i in indices]


# What raises at the end of a backward on one rank, whose collectives are not to be entered twice: a hook's sum of
# used-flags, those of sparse gradients, and of what follows a reduction.
ENDS = {
    "stored": (BucketedGradients, "settle"),
    "followed": (Telemetry, "meet"),
    "judged": (BucketedGradients, "agree_that_finite"),
}


class _AnotherOrder(nn.Module):
    """Layers that run in another order than that in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def _layouts_under_a_hook(rank: int, world_size: int, kind: str, find: bool) -> list[list[list[str]]]:
    """The names in each bucket, by step, of a wrapper of each rank alone, whose hook could average among the ranks."""
    group = dist.new_group([rank], use_local_synchronization=True)
    ddp = wrap(kind, _AnotherOrder(), process_group=group, find_unused_parameters=find)
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    steps: list[list[list[str]]] = []

    def hook(state, bucket):  # torch takes no annotations that are text
        steps[-1].append([names[id(p)] for p in bucket.parameters()])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        steps.append([])
        ddp(batch(rank, step, 3, 2)).sum().backward()
    return steps


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("find", [True, False])
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_what_a_hook_sees_is_laid_out_anew_only_where_torch_does(ranks2, kind: str, find: bool):
    for first, second, third in ranks2.run(_layouts_under_a_hook, kind, find):
        assert second == third
        assert (first == second) == find


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_group_of_one_need_not_be_of_torchs_making(group_of_one: None, kind: str):
    """As torchft's, whose hook averages among ranks that the group has not."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    ddp = wrap(kind, nn.Linear(2, 2), process_group=group)

    def halve(state, bucket):  # torch takes no annotations that are text
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() / 2)
        return done

    ddp.register_comm_hook(None, halve)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(4, 2)).sum().backward()
        assert ddp.module.bias.grad.tolist() == [2, 2]


def _raises_at_its_end(rank: int, world_size: int, where: str) -> tuple[list[Any], list[tuple[int, int]]]:
    ddp, found, met = DistributedDataParallel(Words()), list[Any](), list[tuple[int, int]]()
    _register(ddp, "allreduce")
    ddp.reducer.events.met.append(lambda *told: met.append(told))
    ddp.reducer.events.met.append(lambda *_: ddp.reducer.transport.all_reduce(torch.ones(3)).wait())
    for step in range(3):
        ddp.zero_grad()
        loss = whole_loss(ddp(word_indices(rank, step)))
        if rank == 0 and step == 1:
            with patch.object(*ENDS[where], side_effect=MemoryError), pytest.raises(MemoryError):
                loss.backward()
        else:
            loss.backward()
        found += [[p.grad.to_dense() for p in ddp.module.parameters()]] * (step != 1)
    return found, met


@pytest.mark.parametrize("where", ENDS)
def test_what_raises_at_the_end_on_one_rank_leaves_none_a_step_behind(ranks2, where: str):
    equal_on_all(ranks2.run(_raises_at_its_end, where))


def _channels_last_under_a_hook(rank: int, world_size: int, views: bool) -> bool:
    seen: list[torch.Tensor] = []

    def hook(state, bucket):  # torch checks annotations, and does not take strings
        dist.all_reduce(bucket.buffer())
        seen.extend(gradient.clone() for gradient in bucket.gradients())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, bias=False).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    ddp.register_comm_hook(None, hook)
    ddp(torch.randn(1, 2, 5, 5)).square().sum().backward()
    assert model.weight.grad is not None
    return torch.equal(seen[0], model.weight.grad) and seen[0].stride() == model.weight.stride()


@pytest.mark.parametrize("views", [False, True])
def test_a_hook_sees_gradients_of_channels_last_weights_element_by_element(ranks2, views: bool):
    assert ranks2.run(_channels_last_under_a_hook, views) == [True, True]


class _NoStream(nullcontext[None]):
    """What torch's hook of optimizers in backward takes for a GPU's stream."""

    def wait_stream(self, other: object) -> None:
        pass


def _optimizers_in_backward(rank: int, world_size: int, views: bool, some: bool) -> tuple[bool, bool]:
    trained: list[list[torch.Tensor]] = []
    averaged: list[torch.Tensor] = []
    with patch.object(torch.accelerator, "current_stream", _NoStream):  # torch asks for an accelerator's
        for kind in ("torch", "ours"):
            model = _model()
            first = cast(nn.Linear, model[0])
            stepping = [p for p in model.parameters() if not some or p is not first.weight]
            _apply_optimizer_in_backward(torch.optim.SGD, stepping, {"lr": 0.1, "momentum": 0.9})
            ddp = wrap(kind, model, gradient_as_bucket_view=views, bucket_cap_mb=0.005)
            data = torch.Generator().manual_seed(rank)
            for _ in range(3):
                first.weight.grad = None
                ddp(torch.randn(16, 30, generator=data)).square().mean().backward()
            trained.append([p.detach() for p in model.parameters()])
            averaged.append(torch.zeros(()) if first.weight.grad is None else first.weight.grad)
    elsewhere = averaged[1].clone()
    dist.broadcast(elsewhere, 0)
    return all(map(torch.equal, *trained)), torch.equal(elsewhere, averaged[1])


@needs_streams
@pytest.mark.parametrize(
    ("views", "some"),
    [
        pytest.param(False, False, id="False-all", marks=pytest.mark.long),
        pytest.param(False, True, id="False-some"),
        pytest.param(True, False, id="True-all"),
        pytest.param(True, True, id="True-some", marks=pytest.mark.long),
    ],
)
def test_optimizers_step_in_backward_with_torchs_bits(ranks2, views: bool, some: bool):
    """Without views, torch leaves gradients that no such optimizer takes as they are on each rank."""
    assert ranks2.run(_optimizers_in_backward, views, some) == [(True, True)] * 2


def _unused_under_a_hook(rank: int, world_size: int) -> list[float | None]:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[0](x) if rank == 0 else self.parts[0](x) + self.parts[1](x)

    ddp = DistributedDataParallel(Some())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    return [None if part.weight.grad is None else part.weight.grad[0, 0].item() for part in model]


def _resume(rank: int, world_size: int) -> list[bool]:
    """Whether a wrapper that loads what another one has saved goes on with its bits."""
    saved, loaded = (wrap("ours", _model(), bucket_cap_mb=0.005) for _ in range(2))
    for ddp in (saved, loaded):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    saved(batch(rank, 0, 16, 30)).sum().backward()
    state = saved.reducer.state_dict()
    loaded.reducer.load_state_dict(state)
    for ddp in (saved, loaded):
        ddp.zero_grad()
        ddp(batch(rank, 1, 16, 30)).sum().backward()
    assert_same_bits(grads_of(loaded), grads_of(saved))
    return [(state["rank"], state["world_size"]) == (rank, world_size), loaded.reducer.step == 2]


def test_every_rank_loads_what_it_has_saved_under_a_hook(ranks2):
    assert ranks2.run(_resume) == [[True, True]] * 2


def test_unused_parameters_under_a_hook(ranks2):
    assert ranks2.run(_unused_under_a_hook) == [[1.0, 0.5, None]] * 2


def _joined(rank: int, world_size: int, by_initial_size: bool, compression: str) -> float:
    pair = [TorchDDP(_model()), DistributedDataParallel(_model(), compression=compression)]
    for ddp in pair:
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        data = torch.Generator().manual_seed(rank)
        with ddp.join(divide_by_initial_world_size=by_initial_size):
            for _ in range(3 + 2 * rank):
                optimizer.zero_grad()
                ddp(torch.randn(16, 30, generator=data)).square().mean().backward()
                optimizer.step()
    return max(
        float((p - q).detach().abs().max()) for p, q in zip(pair[0].parameters(), pair[1].parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("compression", "bound", "by_initial_size"),
    [
        ("none", 0.0, True),
        ("none", 0.0, False),
        pytest.param("fp16", 1e-4, True, marks=pytest.mark.long),
        pytest.param("fp16", 1e-4, False, marks=pytest.mark.long),
        pytest.param("int8", 1e-3, True, marks=pytest.mark.long),
        ("int8", 1e-3, False),
    ],
)
def test_join_with_uneven_inputs(ranks2, by_initial_size: bool, compression: str, bound: float):
    assert max(ranks2.run(_joined, by_initial_size, compression)) <= bound


def test_join_on_three_ranks_with_one_left(ranks3):
    assert max(ranks3.run(_joined, False, "none")) <= 1e-6


class _Counter(Joinable):
    """Counts steps over all ranks, as torch's tutorial on `Join` does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)

    def step(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one)
        self.total += one

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                nothing = torch.zeros(1)
                dist.all_reduce(nothing)
                counter.total += nothing

            def post_hook(self, is_last_joiner: bool) -> None:
                dist.broadcast(counter.total, src=0)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def _joined_with_others(rank: int, world_size: int, views: bool) -> tuple[float, float]:
    trained, totals = [], []
    for kind in ("torch", "ours"):
        ddp, counter = wrap(kind, _model(), gradient_as_bucket_view=views), _Counter()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        data = torch.Generator().manual_seed(rank)
        with Join([counter, ddp, optimizer]):
            for _ in range(2 + 3 * rank):
                counter.step()
                ddp(torch.randn(16, 30, generator=data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]))
        totals.append(counter.total.item())
    assert totals[0] == totals[1]
    return float((trained[0] - trained[1]).abs().max()), totals[1]


@pytest.mark.parametrize("views", [pytest.param(False, marks=pytest.mark.long), True])
def test_joined_with_a_zero_optimizer_and_a_joinable_of_the_users(ranks2, views: bool):
    assert ranks2.run(_joined_with_others, views) == [(0.0, 7.0)] * 2


def test_a_hook_has_nothing_to_do_where_all_gradients_are_sparse(group_of_one: None):
    ddp = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    ddp(torch.tensor([1])).sum().backward()
    assert ddp.module.weight.grad.to_dense().sum() == 3


class _Named:
    """A hook that is an object, with an attribute that functools.partial has otherwise."""

    keywords = ("its", "own")

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "named"

    def __call__(self, state, bucket):
        return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_hook_may_be_an_object_with_attributes_of_its_own(group_of_one: None, kind: str):
    ddp = wrap(kind, nn.Linear(2, 2))
    ddp.register_comm_hook(None, _Named())
    ddp(torch.ones(3, 2)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[3.0, 3.0]] * 2


def test_used_flags_are_summed_when_all_hooks_have_ended(group_of_one: None):
    """On a GPU they travel in a communicator of ours, beside which the hooks' must not be at work."""
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
    order: list[str] = []
    wait, sum_used = HookWork.wait, UserHook.sum_used

    def noted_wait(self: HookWork) -> None:
        order.append("hook")
        wait(self)

    def noted_sum(self: UserHook) -> None:
        order.append("flags")
        sum_used(self)

    with patch.object(HookWork, "wait", noted_wait), patch.object(UserHook, "sum_used", noted_sum):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        for _ in range(2):
            ddp(torch.ones(2, 20)).sum().backward()
    buckets = len(ddp.reducer.pipelines)
    assert buckets > 2 and order[-buckets - 1 :] == ["hook"] * buckets + ["flags"]
