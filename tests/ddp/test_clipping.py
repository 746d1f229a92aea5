"""clip_grad_norm_: torch's norm, the same bits on every rank, from the reduction's statistics only where they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

from fastreduce import SettingError, all_reduce_gradients
from fastreduce.ddp import clipping
from fastreduce.ddp.clipping import known_slots
from tests.support import tolerances
from tests.support.models import (
    SETTINGS,
    Branches,
    Grads,
    MixedDtypes,
    OddShapes,
    assert_same_bits,
    batch,
    grads_of,
    mlp,
    wrap,
)
from tests.support.ranks import RankPool
from tests.support.waiting import no_waiting


def known(model: Any) -> int:
    """How many gradients are as their reduction left them, so that they need not be read."""
    return sum(len(slots) for _, slots in known_slots(model.reducer.pipelines, model.parameters()))


def clip(model: Any, max_norm: float = 0.01, norm_type: float = 2.0) -> Tensor:
    """Clip, and hold norm and clipped gradients against torch's on copies."""
    twins = [nn.Parameter(p.detach().clone()) for p in model.parameters() if p.grad is not None]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.detach().clone()
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    found: Tensor = model.clip_grad_norm_(max_norm, norm_type)
    assert found.dtype is expected.dtype and found.shape == expected.shape
    bound = max(tolerances.CLIPPING[grad.dtype.to_real()] for grad in grads)
    torch.testing.assert_close(found, expected, rtol=bound, atol=0.0, equal_nan=True)
    for twin, grad in zip(twins, grads, strict=True):
        torch.testing.assert_close(grad, twin.grad, rtol=2 * bound, atol=1e-7, equal_nan=True)
    return found


def assert_same_on_all(results: list[Any]) -> None:
    for rank, result in enumerate(results[1:], 1):
        assert_same_bits(result, results[0], f"rank {rank}")


# The same as torch's, on every rank


def large() -> nn.Module:
    """Parameters of more than a tile."""
    return nn.Sequential(nn.Linear(20, 130), nn.Linear(130, 50))


@pytest.mark.parametrize("views", [False, True], ids=["", "views"])
def test_the_norm_is_torchs_and_the_same_bits_on_every_rank(ranks: RankPool, views: bool):
    assert_same_on_all(ranks.run(_trained, mlp, ("none", "fp16", "int8") if views else SETTINGS, views))


def test_a_norm_that_overflows_16_bits_clips_nothing_to_zero():
    parameter = nn.Parameter(torch.zeros(16, dtype=torch.float16))
    parameter.grad = torch.full((16,), 6e4, dtype=torch.float16)
    assert clipping.clip_({"a": parameter}, [], 1.0, 2.0, False, None).isinf()
    assert parameter.grad.tolist() == [0.25] * 16


@pytest.mark.parametrize("model", [MixedDtypes, OddShapes, large])
def test_dtypes_and_shapes(ranks2: RankPool, model: Callable[[], nn.Module]):
    assert_same_on_all(ranks2.run(_trained, model, ("int8",), False))


def _trained(
    rank: int, world_size: int, make: Callable[[], nn.Module], settings: tuple[str, ...], views: bool
) -> list[tuple[str, list[Any]]]:
    results = []
    for setting in settings:
        torch.manual_seed(0)
        model = wrap("ours", make(), compression=setting, bucket_cap_mb=0.004, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 4, 20)).square().mean().backward()
            in_wires = views and all(p.wires.in_place for p in model.reducer.pipelines)
            expected = 0 if step == 0 or in_wires else len(list(model.parameters()))
            assert in_wires or not views or "none" not in setting
            assert known(model) == expected, (setting, step)
            seen += [clip(model), grads_of(model.module)]
            optimizer.step()
        results.append((setting, [*seen, dict(model.module.state_dict())]))
    return results


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 3, "inf", float("-inf")])
def test_other_norms(ranks2: RankPool, norm_type: Any):
    assert_same_on_all(ranks2.run(_other_norm, norm_type))


def _other_norm(rank: int, world_size: int, norm_type: Any) -> list[Any]:
    model = wrap("ours", nn.Sequential(nn.Linear(20, 130), nn.Linear(130, 50)), compression="fp16")
    seen = []
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step, 4, 20)).square().mean().backward()
        seen += [clip(model, norm_type=norm_type), grads_of(model.module)]
    return seen


def test_ranks_with_other_numbers_of_threads_get_the_same_bits(ranks2: RankPool):
    """Of what is read too: torch's norm of order 3 would differ."""
    assert_same_on_all(ranks2.run(_with_threads))


def _with_threads(rank: int, world_size: int) -> list[Any]:
    model, threads = wrap("ours", nn.Linear(300, 900, bias=False), compression="fp16"), torch.get_num_threads()
    torch.set_num_threads(rank + 1)
    try:
        seen = []
        for step in range(2):
            model.zero_grad()
            model(batch(0, step, 4, 300)).square().mean().backward()
            seen += [model.clip_grad_norm_(0.01, order) for order in (3.0, 2.0)] + [grads_of(model.module)]
        return seen
    finally:
        torch.set_num_threads(threads)


# Statistics are used only where they hold

Change = Callable[[Any, int], int]  # does something to a model's gradients; returns how many are still known


def _unscale(model: Any, rank: int) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return 0


def _accumulate(model: Any, rank: int) -> int:
    with model.no_sync():
        model(batch(0, 7, 4, 16), use="a").square().mean().backward()
    return 3  # b and c


def _start_anew(model: Any, rank: int) -> int:
    model.zero_grad()
    return _accumulate(model, rank) - 3


def _multiply(model: Any, rank: int) -> int:
    model.module.a.weight.grad.mul_(3)
    return 6


def _replace(model: Any, rank: int) -> int:
    model.module.a.weight.grad = model.module.a.weight.grad * 3
    return 6


def _average_again(model: Any, rank: int) -> int:
    model.module.a.weight.grad += rank
    all_reduce_gradients([model.module.a.weight], op="sum")
    return 6


def _average_others_again(model: Any, rank: int) -> int:
    all_reduce_gradients([model.module.a.weight], op="sum")
    return 6


def _leave_some_out(model: Any, rank: int) -> int:
    model.zero_grad(set_to_none=False)
    model(batch(rank, 8, 4, 16), use="a").square().mean().backward()
    return 4


def _leave_some_out_on_one_rank(model: Any, rank: int) -> int:
    model.zero_grad(set_to_none=False)
    model(batch(rank, 8, 4, 16), use="ab" if rank else "a").square().mean().backward()
    return 6


def _leave_some_out_on_one_rank_from_nothing(model: Any, rank: int) -> int:
    model.zero_grad()
    model(batch(rank, 8, 4, 16), use="ab" if rank else "a").square().mean().backward()
    return 6


CHANGES: dict[str, Change] = {
    "nothing": lambda model, rank: 7,
    "unscale_": _unscale,
    "local backward": _accumulate,
    "zero_grad and local backward": _start_anew,
    "in place": _multiply,
    "another tensor": _replace,
    "all_reduce_gradients": _average_again,
    "all_reduce_gradients of averages": _average_others_again,
    "no rank used it": _leave_some_out,
    "one rank did not use it": _leave_some_out_on_one_rank,
    "one rank had none": _leave_some_out_on_one_rank_from_nothing,
}


@pytest.mark.parametrize("setting", [pytest.param("fp16", marks=pytest.mark.long), "int8"])
def test_what_has_changed_since_the_reduction_is_read_again(ranks2: RankPool, setting: str):
    assert_same_on_all(ranks2.run(_changed, setting))


def _changed(rank: int, world_size: int, setting: str) -> list[tuple[str, list[Any]]]:
    results = []
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        model = wrap("ours", Branches(16), compression=setting, bucket_cap_mb=0.001)
        for step in range(2):
            model.zero_grad()
            model(batch(rank, step, 4, 16)).square().mean().backward()
            clip(model)
        model.zero_grad()
        model(batch(rank, 5, 4, 16)).square().mean().backward()
        expected = change(model, rank)
        assert known(model) == expected, f"{name}: {known(model)} known, {expected} expected"
        results.append((name, [clip(model), grads_of(model.module)]))
    return results


def test_a_hook_of_the_users(ranks2: RankPool):
    assert_same_on_all(ranks2.run(_hooked))


def _hooked(rank: int, world_size: int) -> list[Any]:
    model = wrap("ours", Branches(16))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    seen = []
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().backward()
        seen += [clip(model), grads_of(model.module)]
    return seen


def test_sparse_gradients(ranks2: RankPool):
    assert_same_on_all(ranks2.run(_sparse))


def _sparse(rank: int, world_size: int) -> list[Tensor]:
    model = wrap("ours", nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 4)), compression="bf16")
    seen = []
    for step in range(3):
        model.zero_grad()
        model(torch.tensor([rank, 7, step])).square().mean().backward()
        dense = [p.grad.to_dense() for p in model.parameters()]
        expected = torch.nn.utils.get_total_norm(dense)
        found = model.clip_grad_norm_(0.01)
        torch.testing.assert_close(found, expected, rtol=tolerances.CLIPPING[torch.float32], atol=0.0)
        after = torch.nn.utils.get_total_norm([p.grad.to_dense() for p in model.parameters()])
        torch.testing.assert_close(after, torch.tensor(0.01), rtol=1e-4, atol=0.0)
        seen += [found, *(p.grad.to_dense() for p in model.parameters())]
    return seen


def test_uneven_inputs(ranks2: RankPool):
    """The average over those who still train is scaled after decompression."""
    assert ranks2.run(_uneven) == [2, 4]


def _uneven(rank: int, world_size: int) -> int:
    model, steps = wrap("ours", Branches(16), compression="fp16"), 0
    with Join([model], divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            model.zero_grad()
            model(batch(rank, step, 4, 16)).square().mean().backward()
            clip(model)
            steps += 1
    return steps


def test_one_rank_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for setting, expected in (("none", 0), ("fp16", 7)):
            model = wrap("ours", Branches(16), compression=setting)
            assert torch.equal(model.clip_grad_norm_(1.0), torch.tensor(0.0)), "no gradients yet"
            model(batch(0, 0, 4, 16)).square().mean().backward()
            assert known(model) == expected
            clip(model)
    finally:
        dist.destroy_process_group()


# Errors

MESSAGE = (
    r"^The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped: not finite "
    r"are elements of trunk\.weight \((\d+), bucket \d+\), trunk\.bias \(16, bucket \d+\)"
)


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [False, True], ids=["known", "read"])
def test_on_a_gpu_the_norm_takes_as_many_launches_whatever_the_number_of_buckets(
    monkeypatch: pytest.MonkeyPatch, read: bool
):
    monkeypatch.setattr(clipping, "at_once", lambda tensor: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (one, few), (many, more) = (_launches(cap, read) for cap in (25, 0.0005))
        assert one == 1 and many > 3 and few == more
    finally:
        dist.destroy_process_group()


def _launches(bucket_cap: float, read: bool) -> tuple[int, int]:
    """The number of buckets, and of operations in clipping; gradients are changed first if they are to be `read`."""
    model = wrap("ours", mlp(), compression="fp16", bucket_cap_mb=bucket_cap)
    for _ in range(3):
        model.zero_grad()
        model(batch(0, 0, 4, 20)).square().mean().backward()
        if read:
            torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 2.0)
        before = known(model)
        with Launches() as launches:
            clip(model)
    assert before == (0 if read else len(list(model.parameters())))
    return len(model.reducer.pipelines), launches.count


def test_a_norm_that_is_not_finite_is_an_error_if_asked_for(ranks2: RankPool):
    results = ranks2.run(_not_finite)
    assert_same_on_all(results)
    message, finite = results[0]
    found = re.search(MESSAGE, message)
    assert found and int(found[1]) == 256, message
    assert finite == "every element is finite, but their squares overflow"


def _not_finite(rank: int, world_size: int) -> tuple[str, str]:
    model = wrap("ours", Branches(16), compression="bf16", bucket_cap_mb=0.001)
    for step in range(3):
        model.zero_grad()
        factor = torch.inf if step == 2 and rank == 0 else 1.0
        (model(batch(rank, step, 4, 16), use="a").square().mean() * factor).backward()
        if step < 2:
            model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    before = grads_of(model.module)
    message = _error_of(model)
    assert_same_bits(grads_of(model.module), before, "nothing is clipped")
    assert not model.clip_grad_norm_(1.0).isfinite()
    model.zero_grad()
    (model(batch(rank, 9, 4, 16), use="a").square().mean() * 1e30).backward()
    return message, _error_of(model).split(": ")[1].split(". ")[0]


def _error_of(model: Any) -> str:
    try:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return "no error"


# Nothing waits for a device


def test_parameters_in_the_place_of_the_norm_are_an_error_that_says_so():
    model = mlp()
    with pytest.raises(TypeError, match=r"max_norm must be a number, got generator: ddp\.clip_grad_norm_\(max_norm\)"):
        clipping.clip_(dict(model.named_parameters()), [], model.parameters(), 1.0, False, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (math.nan, 2.0), (1.0, math.nan)])
def test_a_norm_that_turns_gradients_round_or_makes_them_nan_is_an_error(max_norm: float, norm_type: float):
    model = mlp()
    model(batch(0, 0, 2, 20)).sum().backward()
    before = {name: grad.clone() for name, grad in grads_of(model).items()}
    with pytest.raises(SettingError, match=r"(max_norm=(-1|nan)|norm_type=nan); allowed: "):
        clipping.clip_(dict(model.named_parameters()), [], max_norm, norm_type, False, None)
    assert_same_bits(grads_of(model), before)


def test_clipping_does_not_wait_for_the_device(ranks2: RankPool):
    assert ranks2.run(_without_waiting) == [True, True]


def _without_waiting(rank: int, world_size: int) -> bool:
    model = wrap("ours", Branches(16), compression="fp16")
    model.clip_grad_norm_(1.0)  # compiles
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().backward()
        if step == 2:
            model.module.a.weight.grad.mul_(2)
        with no_waiting():
            model.clip_grad_norm_(1.0)
            model.clip_grad_norm_(1.0, norm_type=1.0)
    return known(model) == 0


def test_a_gradient_that_is_freed_is_not_kept(ranks2: RankPool):
    """Statistics hold no gradient: a new one at the same place is another."""
    assert ranks2.run(_freed) == [0, 0]


def _freed(rank: int, world_size: int) -> int:
    model = wrap("ours", Branches(16), compression="fp16")
    grads: list[Grads] = []
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().backward()
        model.clip_grad_norm_(1e9)
    grads.append(grads_of(model.module))
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return known(model)


# What nobody averages


def _ignoring(rank: int, world_size: int) -> tuple[Any, ...]:
    module = Branches(16)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["c.weight", "c.bias"])
    model = wrap("ours", module, compression="fp16")
    norms = []
    for step in range(2):  # gradients are read in the first call, and known in the second
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().mul(100).backward()
        before = module.c.weight.grad.clone()
        norms.append(model.clip_grad_norm_(0.01))
    averaged = {name: grad for name, grad in grads_of(module).items() if not name.startswith("c.")}
    return torch.stack(norms), before, module.c.weight.grad, averaged


def test_gradients_that_nobody_averages_are_neither_counted_nor_clipped(ranks2: RankPool):
    results = ranks2.run(_ignoring)
    assert_same_bits(results[1][0], results[0][0], "the norm")
    assert_same_bits(results[1][3], results[0][3], "what was clipped")
    for _, before, after, _ in results:
        assert_same_bits(after, before, "local gradients")
    assert not torch.equal(results[0][1], results[1][1]), "they differ from rank to rank"
