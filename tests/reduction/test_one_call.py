"""all_reduce_gradients: plain tensors and parameters, any layout, under every setting."""

from __future__ import annotations

import datetime
import gc
import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastreduce
from fastreduce import DeviceError, SettingError, TensorError, all_reduce_gradients
from fastreduce.reduction import one_call
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.shared_buffers import Turns
from fastreduce.transports import LocalTransport, local_ranks
from tests.support import tolerances
from tests.support.each_setting import EACH_SETTING
from tests.support.models import assert_same_bits, batch, mlp
from tests.support.ranks import OVER_HOSTS, RankPool
from tests.support.thread_ranks import in_threads
from tests.support.threads import threads_of_all


def make_tensors(rank: int) -> list[Tensor]:
    """Many dtypes, sizes and layouts: contiguous, transposed, channels_last, strided, expanded from one, views."""
    return [
        batch(rank, 0, 1000),
        batch(rank, 1, 7, 9).t(),
        batch(rank, 2, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        batch(rank, 3, 40)[::2],
        batch(rank, 4, 6, 6)[:, 1:3],
        batch(rank, 5),
        batch(rank, 6, 0),
        batch(rank, 7, 129, dtype=torch.float64),
        batch(rank, 8, 129, dtype=torch.float16),
        batch(rank, 9, 129, dtype=torch.bfloat16),
        torch.complex(batch(rank, 10, 5), batch(rank, 11, 5)),
        torch.view_as_complex(batch(rank, 12, 4, 3, 2)).t(),
    ]


def _averaged(rank: int, world_size: int, setting: str) -> list[Tensor]:
    tensors = make_tensors(rank)
    addresses = [t.data_ptr() for t in tensors]
    all_reduce_gradients(tensors, setting)
    assert [t.data_ptr() for t in tensors] == addresses, "in place"
    return [t.contiguous() for t in tensors]


@OVER_HOSTS
@pytest.mark.parametrize("setting", EACH_SETTING)
def test_tensors_are_averaged_in_place_within_the_bound_and_alike_on_all_ranks(ranks: RankPool, setting: str):
    found = ranks.run(_averaged, setting)
    for other in found[1:]:
        assert_same_bits(other, found[0])
    of_ranks = [make_tensors(r) for r in range(ranks.world_size)]
    for i, tensor in enumerate(found[0]):
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        exact = torch.stack([tensors[i].to(wide) for tensors in of_ranks]).mean(0)
        dense = [tensors[i] if i not in (3, 4) else tensors[i].contiguous() for tensors in of_ranks]
        far = exact - tensor
        far = torch.view_as_real(far) if far.is_complex() else far
        bound = tolerances.error_bound(setting, dense, bool(ranks.hosts))
        in_memory_order = torch.empty_like(dense[0], dtype=wide).copy_(exact - tensor)
        if tensor.is_complex():
            in_memory_order = torch.view_as_real(in_memory_order)
        flat = in_memory_order.as_strided((in_memory_order.numel(),), (1,)).abs()
        assert (flat <= bound).all(), f"tensor {i}: {far.abs().max()}"


def _elements_between(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    base = torch.full((40,), float(rank + 1))
    all_reduce_gradients([base[::2]])
    return base[::2].clone(), base[1::2].clone()


def test_elements_between_those_of_a_strided_tensor_are_not_touched(ranks2: RankPool):
    for rank, (inside, between) in enumerate(ranks2.run(_elements_between)):
        assert (inside == 1.5).all() and (between == rank + 1).all()


def _parameters(rank: int, world_size: int) -> dict[str, Any]:
    used, some, none = (nn.Parameter(torch.zeros(5)) for _ in range(3))
    leaf = torch.zeros(3, requires_grad=True)
    used.grad = torch.full((5,), rank + 1.0)
    leaf.grad = torch.full((3,), rank + 1.0)
    if rank == 0:
        some.grad = torch.full((5,), 4.0)
    plain = torch.full((2,), rank + 1.0)
    all_reduce_gradients([used, some, none, leaf, plain])
    return {
        "used": used.grad,
        "some": some.grad,
        "none": none.grad,
        "leaf": leaf.grad,
        "plain": plain,
        "value": used.data,
    }


def test_parameters_are_averaged_in_their_grad_and_none_counts_as_zeros(ranks2: RankPool):
    for found in ranks2.run(_parameters):
        assert (found["used"] == 1.5).all() and (found["leaf"] == 1.5).all() and (found["plain"] == 1.5).all()
        assert (found["some"] == 2.0).all(), "one rank's 4 and the other's None"
        assert found["none"] is None, "None everywhere stays None"
        assert not found["value"].any()


def _loop(rank: int, world_size: int, setting: str) -> tuple[list[Tensor], list[Tensor]]:
    seen = []
    for kind in ("functional", "ddp"):
        torch.manual_seed(0)
        model: Any = mlp()
        if kind == "ddp":
            model = fastreduce.DistributedDataParallel(model, compression=setting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step, 4, 20)).square().mean().backward()
            if kind == "functional":
                all_reduce_gradients(model.parameters(), setting)
            optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    return seen[0], seen[1]


@pytest.mark.parametrize("setting", ["none", "fp16", "int8"])
def test_a_loop_without_a_wrapper_trains_to_the_wrappers_bits(ranks2: RankPool, setting: str):
    for by_hand, wrapped in ranks2.run(_loop, setting):
        assert_same_bits(by_hand, wrapped)


def _feedback(rank: int, world_size: int, setting: str) -> Tensor:
    """Mean over calls with the same gradients."""
    total, gradient = torch.zeros(500, dtype=torch.float64), torch.empty(500)
    for _ in range(100):
        gradient.copy_(batch(rank, 0, 500) * torch.logspace(-3, 0, 500))  # what is kept is that of a tensor
        all_reduce_gradients([gradient], setting)
        total += gradient
    return total / 100


def test_residuals_persist_across_calls(ranks2: RankPool):
    exact = torch.stack([batch(r, 0, 500) * torch.logspace(-3, 0, 500) for r in range(2)]).double().mean(0)
    without, with_feedback = (
        (ranks2.run(_feedback, setting)[0] - exact).abs().sum() for setting in ("int8", "int8:error_feedback")
    )
    assert with_feedback < 2 * tolerances.LONG_RUN * without  # half the steps of that entry


def _kept(rank: int, world_size: int) -> list[int]:
    gradients = [torch.ones(3), torch.ones(4)]
    sizes = []
    for setting in ("fp16", "fp16", "int8", "fp16"):
        all_reduce_gradients(gradients, setting)
        sizes.append(len(one_call._Kept.of(one_call.transport_of(None, "", "cpu", None)).reductions))
    return [size - sizes[0] for size in sizes]


def test_buffers_are_kept_per_setting_and_shapes(ranks2: RankPool):
    assert ranks2.run(_kept) == [[0, 0, 1, 1]] * 2


def _ever_new_shapes(rank: int, world_size: int) -> tuple[int, bool, float, float]:
    """How many lists are kept of ever new ones, whether one is that comes all the time among them, and two averages."""
    transport, always = one_call.transport_of(None, "a test"), torch.ones(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_call, "KEPT", 10)
        one_call._Kept.of(transport).reductions.clear()
        for size in range(6, 30):
            all_reduce_gradients([torch.ones(size)], "fp16")
            all_reduce_gradients([always], "fp16")
        known = one_call._Kept.of(transport).reductions
        kept = len(known), always.shape in [layout[0][0] for _, _, layout in known]
        forgotten, last = (torch.full((size,), rank + 1.0) for size in (6, 29))
        all_reduce_gradients([forgotten], "fp16")
        all_reduce_gradients([last], "fp16")
    return *kept, float(forgotten[-1]), float(last[-1])


def test_buffers_are_kept_for_the_last_lists_of_ever_new_shapes(ranks2: RankPool):
    assert ranks2.run(_ever_new_shapes) == [(10, True, 1.5, 1.5)] * 2


def _ever_new_lists(rank: int, world_size: int, kept: int) -> tuple[int, list[Tensor]]:
    """The most lists that were kept of ever new ones of the same six parameters, and all averages."""
    parameters = [nn.Parameter(torch.zeros(16)) for _ in range(6)]
    averages, most = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_call, "KEPT", kept)
        for listed in 2 * [each for size in (2, 3) for each in itertools.permutations(range(6), size)]:
            for i in listed:
                parameters[i].grad = batch(rank, i, 16)
            all_reduce_gradients([parameters[i] for i in listed], FEEDBACK)
            averages.append(torch.cat([parameters[i].grad for i in listed]))
            homes = one_call._Kept.of(one_call.transport_of(None, "a test")).owners.values()
            found = [key for owners in homes for key in owners._reductions]
            most = max(most, sum(set(key) <= set(map(id, parameters)) for key in found))
    return most, averages


@pytest.mark.long
def test_under_error_feedback_lists_without_residuals_are_not_kept_for_ever(ranks2: RankPool):
    for (all_of_them, expected), (most, averages) in zip(
        ranks2.run(_ever_new_lists, 1000), ranks2.run(_ever_new_lists, 10), strict=True
    ):
        assert all_of_them == 150
        assert most <= 10 + 6 + 1, "the last ones, and those where residuals lie"
        assert_same_bits(averages, expected)


def _destroyed_groups(rank: int, world_size: int, transport: str) -> tuple[int, int, bool]:
    """Groups with transports, descriptors and threads beside those of the first one; and whether averages are right."""
    right, counts = True, []
    for setting in 8 * ["fp16", FEEDBACK]:
        group = dist.new_group([0, 1])
        parameter = nn.Parameter(torch.zeros(8))
        parameter.grad = torch.full((8,), rank + 1.0)
        all_reduce_gradients([parameter], setting, group, transport)
        right = right and torch.equal(parameter.grad, torch.full((8,), 1.5))
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append((len(one_call._transports), len(os.listdir("/proc/self/fd")), threads_of_all()))
    return counts[-1][0] - counts[0][0], max(b - a for a, b in zip(counts[1], counts[-1], strict=True)), right


@pytest.mark.long
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_connections_and_buffers_end_with_their_group(ranks2: RankPool, transport: str):
    for groups, more, right in ranks2.run(_destroyed_groups, transport):
        assert right
        assert groups == 0
        assert more <= 4, "descriptors or threads, of 15 groups; what a thread has not yet let go of"


def test_nothing_to_average_is_fine(ranks2: RankPool):
    assert ranks2.run(_nothing) == [None, None]


def _nothing(rank: int, world_size: int) -> None:
    all_reduce_gradients([])
    all_reduce_gradients(p for p in [torch.ones(0)])


def test_it_takes_a_transport_and_a_group(ranks3: RankPool):
    def run(rank: int, transport: Any) -> Tensor:
        tensor = torch.full((4,), rank + 1.0)
        all_reduce_gradients([tensor], transport=transport)
        return tensor

    assert all((t == 2.5).all() for t in in_threads(4, run))
    assert ranks3.run(_in_group) == [2.0, 2.0, 2.0]


def _in_group(rank: int, world_size: int) -> float:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(SettingError, match="all_reduce_gradients on rank 1: this rank is not in the group"):
            all_reduce_gradients([torch.ones(2)], group=group)
    tensor = torch.full((4,), rank + 1.0)
    if rank != 1:
        all_reduce_gradients([tensor], group=group)
    return float(tensor[0])


def test_one_rank_alone_needs_no_transport():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor = batch(0, 0, 10)
        kept = tensor.clone()
        all_reduce_gradients([tensor])
        assert_same_bits(tensor, kept)
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match="init_process_group"):
        all_reduce_gradients([torch.ones(3)])


# Bad input


def alone(*tensors: Any, setting: Any = None) -> None:
    all_reduce_gradients(tensors, setting, transport=local_ranks(1)[0])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_averaged_in_place_is_a_tensor_error():
    with pytest.raises(TensorError, match="int32"):
        alone(torch.ones(3, dtype=torch.int32))
    with pytest.raises(TensorError, match="sparse"):
        alone(torch.ones(3).to_sparse())
    with pytest.raises(TensorError, match=r"^tensor 0 is torch\.sparse_csr; allowed: torch\.strided"):
        alone(torch.eye(3).to_sparse_csr())
    with pytest.raises(TensorError, match="conj"):
        alone(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(TensorError, match="detach"):
        alone(torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(
        TensorError, match=r"^tensor 1, of shape \(4,\) and strides \(0,\), has several elements in one"
    ):
        alone(torch.ones(3), torch.ones(1).expand(4))
    with pytest.raises(TensorError, match=r"^the gradient of tensor 0, of shape \(2, 3\) and strides \(1, 0\), has"):
        parameter = nn.Parameter(torch.ones(2, 3))
        parameter.grad = torch.ones(2, 1).expand(2, 3)
        alone(parameter)
    with pytest.raises(TensorError, match=r"^tensor 0, of shape \(2, 3\) and strides \(0, 1\), has several"):
        alone(np.lib.stride_tricks.as_strided(np.ones(3), (2, 3), (0, 8)))
    with pytest.raises(DeviceError, match="tensor 1 is on meta; allowed: cpu, cuda"):
        alone(torch.ones(3), torch.ones(3, device="meta"))
    with pytest.raises(SettingError, match="int9"):
        alone(torch.ones(3), setting="int9")


def test_what_one_rank_cannot_average_is_told_to_the_others(ranks2: RankPool):
    for how in ("text", "meta", "computed", "expanded", "no list"):
        told, raised = ranks2.run(_one_that_cannot, how)
        assert told == f"MismatchError: rank 1 could not be set up: {raised}"
        assert raised.startswith(("TensorError: ", "DeviceError: ")), raised


@pytest.mark.long
def test_a_rank_that_cannot_average_has_its_own_error_where_others_know_their_list(ranks2: RankPool):
    for how, own in (
        ("tensor", "TensorError: a builtins.str is no array"),
        ("op", "SettingError: all_reduce_gradients: un"),
    ):
        others, raised = ranks2.run(_later_one_that_cannot, how)
        assert raised.startswith(own), raised
        assert others.startswith("TransportError: rank 0 of 2: "), others


def _later_one_that_cannot(rank: int, world_size: int, how: str) -> str:
    group, tensors = dist.new_group(timeout=datetime.timedelta(seconds=2)), [torch.ones(3)]
    all_reduce_gradients(tensors, group=group)
    try:
        wrong = how == "tensor" and rank == 1
        all_reduce_gradients(["a"] if wrong else tensors, group=group, op="max" if how == "op" and rank else "mean")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return ""


def _one_that_cannot(rank: int, world_size: int, how: str) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    wrong = {"text": "a", "meta": torch.ones(3, device="meta"), "computed": torch.ones(3, requires_grad=True) * 2}
    wrong["expanded"] = torch.ones(1).expand(3)
    try:
        given: Any = None if how == "no list" and rank else [torch.ones(2), wrong.get(how) if rank else torch.ones(3)]
        all_reduce_gradients(given, group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Error feedback belongs to a parameter


FEEDBACK = "int8:error_feedback"


def _equal_layers(rank: int, world_size: int, how: str) -> list[float]:
    """The error of the mean over many steps with the same gradients, by layer; layers have one shape."""
    layers = [nn.Linear(32, 32) for _ in range(4)]
    gradients = [
        [batch(0, 10 * i + j, *p.shape) * 10.0**-i for j, p in enumerate(each.parameters())]
        for i, each in enumerate(layers)
    ]
    totals = [[torch.zeros_like(g, dtype=torch.float64) for g in each] for each in gradients]
    steps = 60
    for step in range(steps):
        for layer, each in zip(layers, gradients, strict=True):
            for parameter, gradient in zip(layer.parameters(), each, strict=True):
                parameter.grad = gradient.clone()
        if how == "one by one":
            calls = [list(layer.parameters()) for layer in layers]
        elif how == "in other lists":
            whole = [p for layer in layers for p in layer.parameters()]
            calls = [whole[:3], whole[3:]] if step % 3 else [whole[5:], whole[:5]]
        else:
            calls = [[p for layer in layers for p in layer.parameters()]]
        for call in calls:
            all_reduce_gradients(call, FEEDBACK if how != "without feedback" else "int8")
        for layer, total in zip(layers, totals, strict=True):
            for parameter, at in zip(layer.parameters(), total, strict=True):
                at += parameter.grad.double()
    return [
        max(float((t / steps - g).norm() / g.norm()) for t, g in zip(total, each, strict=True))
        for total, each in zip(totals, gradients, strict=True)
    ]


@pytest.fixture(scope="module")
def without(ranks2: RankPool) -> list[float]:
    return ranks2.run(_equal_layers, "without feedback")[0]


@pytest.mark.parametrize("how", ["one by one", "in other lists", "in one call"])
def test_layers_of_one_shape_have_residuals_of_their_own(ranks2: RankPool, without: list[float], how: str):
    found = ranks2.run(_equal_layers, how)
    assert found[0] == found[1]
    for error, plain in zip(found[0], without, strict=True):
        # A residual or two of a step, over 60 steps, where plain INT8 repeats its error in every step.
        assert error < 0.1 * plain, (found[0], without)


def _forgotten(rank: int, world_size: int) -> tuple[int, int]:
    def entries() -> int:
        return sum(len(owners._reductions) for kept in one_call._alive for owners in kept.owners.values())

    gc.collect()
    before = entries()
    model: Any = nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    all_reduce_gradients(model.parameters(), FEEDBACK)
    during = entries()
    del model, parameter
    gc.collect()
    return during - before, entries() - before


def test_residuals_end_with_their_parameters(ranks2: RankPool):
    assert ranks2.run(_forgotten) == [(1, 0), (1, 0)]


def test_calls_on_several_streams_of_a_gpu_take_turns_in_the_memory_that_they_share(monkeypatch: pytest.MonkeyPatch):
    """Which calls for other tensors of the same shapes share, too; without a GPU: each says first where it is."""
    seen: list[str] = []
    run = BucketPipeline.run

    def noted(self: BucketPipeline, *given: Any) -> None:
        seen.append("run")
        run(self, *given)

    monkeypatch.setattr(Turns, "use_here", lambda _, device: seen.append(str(device)))
    monkeypatch.setattr(BucketPipeline, "run", noted)
    transport = LocalTransport()
    for _ in range(2):
        all_reduce_gradients([torch.ones(3)], "fp16", transport=transport)
    assert seen == ["cpu", "run"] * 2


def test_a_parameter_that_is_there_twice_counts_once(ranks2: RankPool):
    """In another bucket than the first time it was summed again: twice the sum, on two ranks."""
    assert ranks2.run(_twice) == [(3.0, 3.0)] * 2


def _twice(rank: int, world_size: int) -> tuple[float, float]:
    first, between = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    for parameter in (first, between):
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_call, "BUCKET_BYTES", 16)
        all_reduce_gradients([first, between, first], op="sum")
    assert first.grad is not None and between.grad is not None
    return first.grad[4].item(), between.grad[4].item()
