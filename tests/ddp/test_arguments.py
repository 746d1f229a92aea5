"""Each argument of torch's class, with torch's meaning."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.support.models import (
    DDP,
    EXACT,
    Branches,
    Grads,
    Normed,
    assert_same_bits,
    batch,
    grads_of,
    play,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool

KINDS = ("torch", "ours")
WIDE = 64


# Each argument of torch's class, with a value that is not its default, or where else it is tested.
ARGUMENTS: dict[str, Any] = {
    "device_ids": "test_misuse.py and test_wrapper.py",
    "output_device": "test_misuse.py and test_wrapper.py",
    "dim": 1,
    "broadcast_buffers": False,
    "init_sync": False,
    "process_group": "test_regrouping.py and test_wrapper.py",
    "bucket_cap_mb": 64 / 2**20,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "delay_all_reduce_named_params": "a test of its own",
    "param_to_hook_all_reduce": "a test of its own",
    "mixed_precision": "tests of its own",
    "device_mesh": "a test of its own",
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [64 / 2**20, 700 / 2**20],
    "batched_grad_copy": True,
    "forward_sync_buffers": False,
    "lazy_bucket_allocation": True,
}
TORCHS = set(inspect.signature(TorchDDP).parameters) - {"module"}


def test_the_signature_names_torchs_arguments_and_three_more():
    torchs, ours = (inspect.signature(kind) for kind in DDP.values())
    assert list(ours.parameters.values())[: len(torchs.parameters)] == list(torchs.parameters.values())
    own = list(ours.parameters.values())[len(torchs.parameters) :]
    assert {each.name for each in own} == {"compression", "transport", "elastic"}
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in own)


def test_every_argument_of_the_installed_torch_is_tested():
    assert set(ARGUMENTS) >= TORCHS


def test_a_function_around_torchs_init_may_pass_on_what_it_gets(alone: None, monkeypatch: pytest.MonkeyPatch):
    """As programs put one there, to set an argument for all of their models: its own signature names none."""
    construct = TorchDDP.__init__

    def with_views(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **{"gradient_as_bucket_view": True, **kwargs})

    monkeypatch.setattr(TorchDDP, "__init__", with_views)
    for kind in KINDS:
        model = wrap(kind, nn.Linear(2, 2), static_graph=True)
        assert model.gradient_as_bucket_view and model.static_graph
        with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap'"):
            DDP[kind](nn.Linear(2, 2), bucket_cap=1)


def _with_argument(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, list[Any]]:
    """State after construction and after each step, of a model whose weights and buffers differ between ranks."""
    seen: dict[str, list[Any]] = {}
    for kind in KINDS:
        torch.manual_seed(rank)
        body = Normed()
        body.steps += rank
        model, seen[kind] = wrap(kind, body, **options), [copy.deepcopy(dict(body.state_dict()))]
        for step in range(4):
            model.zero_grad()
            model(batch(rank, step, 6, 20)).square().mean().backward()
            seen[kind].append([grads_of(body), dict(copy.deepcopy(body.state_dict())), body.seen])
        logged = model._get_ddp_logging_data()
        seen[kind].append([logged[key] for key in ("rebuilt_bucket_sizes", "bucket_cap_bytes") if key in logged])
    if not options.get("find_unused_parameters"):  # torch never rebuilds where it searches
        assert seen["ours"][-1] == seen["torch"][-1]
    assert_same_bits(seen["ours"][:-1], seen["torch"][:-1], f"rank {rank}")
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("argument", [name for name, value in ARGUMENTS.items() if not isinstance(value, str)])
def test_an_argument_has_torchs_meaning(ranks2: RankPool, argument: str):
    options = {argument: ARGUMENTS[argument]}
    if argument not in TORCHS:  # of another version: ours takes what the installed class takes
        for kind in KINDS:
            with pytest.raises(TypeError, match=argument):
                DDP[kind](nn.Linear(2, 2), **options)
        return
    first, second = (seen["ours"] for seen in ranks2.run(_with_argument, options))
    same = all(torch.equal(a, b) for a, b in zip(first[0].values(), second[0].values(), strict=True))
    assert same == (argument not in ("init_sync", "broadcast_buffers"))
    if argument == "bucket_cap_mb_list":
        assert len(first[-1][0].split(", ")) > 1


def _arguments_in_order(rank: int, world_size: int) -> None:
    for kind in KINDS:
        names = [name for name in inspect.signature(TorchDDP).parameters if name != "module"]
        given = {"dim": 1, "init_sync": False, "find_unused_parameters": True, "gradient_as_bucket_view": True}
        torch.manual_seed(rank)
        net = nn.Linear(2, 2)
        own = net.weight.detach().clone()
        model = DDP[kind](net, *[given.get(name, _default(name)) for name in names])
        assert (model.dim, model.process_group) == (1, dist.group.WORLD)
        assert model.find_unused_parameters and model.gradient_as_bucket_view
        assert torch.equal(net.weight, own)  # not rank 0's


def _default(name: str) -> Any:
    return inspect.signature(TorchDDP).parameters[name].default


def test_arguments_may_be_given_by_position(ranks2: RankPool):
    ranks2.run(_arguments_in_order)


def _meshed(rank: int, world_size: int) -> list[Any]:
    """The gradients where the mesh is all ranks, and where it is this one alone."""
    meshes, ends = dist.device_mesh.init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("all", "one")), []
    for name in ("all", "one"):
        seen = {}
        for kind in KINDS:
            model = wrap(kind, whole_(Branches()), device_mesh=meshes[name])
            seen[kind] = play(model, ["f1", "b1", "f2", "b2"], rank)
        assert_same_bits(seen["ours"], seen["torch"], name)
        ends.append(seen["ours"])
    return ends


def test_a_device_mesh_gives_the_group(ranks2: RankPool):
    (first, alone), (second, other) = ranks2.run(_meshed)
    assert_same_bits(first, second)
    with pytest.raises(AssertionError):
        assert_same_bits(alone, other)


def _tensor_parallel(rank: int, world_size: int) -> None:
    mesh, seen = dist.device_mesh.init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp")), {}
    for kind in KINDS:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model = wrap(kind, net, device_mesh=mesh["dp"])
        parts = dict(net.named_parameters())  # each forward puts DTensors in their place for as long as it takes
        model(torch.ones(3, 4) * (1 + rank)).sum().backward()
        seen[kind] = {name: part.grad for name, part in parts.items()}
    assert_same_bits(seen["ours"], seen["torch"])


def test_beside_tensor_parallelism_the_parts_of_parameters_are_averaged(ranks2: RankPool):
    ranks2.run(_tensor_parallel)


def _delayed(rank: int, world_size: int, hooked: str) -> None:
    """Not with all parameters delayed: there the first forward of torch's own class fails (2.13)."""
    body = whole_(Branches(WIDE))
    named = [(n, p) for n, p in body.named_parameters() if n.startswith("a.")]
    hook = body.get_parameter(hooked)
    model = wrap("ours", body, delay_all_reduce_named_params=named, param_to_hook_all_reduce=hook)
    for step in range(30):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, WIDE)).sum() * EXACT).backward()
        found = grads_of(body)
        assert_same_bits(found, _average_of_wide(step), f"rank {rank}, step {step}")
        norm = torch.nn.utils.get_total_norm([grad for grad in found.values() if grad is not None])
        torch.testing.assert_close(model.clip_grad_norm_(torch.inf), norm)


@functools.cache
def _average_of_wide(step: int) -> Grads:
    model = whole_(Branches(WIDE))
    for rank in range(2):
        (model(whole_batch(rank, step, 3, WIDE)).sum() * EXACT).backward()
    return {name: None if g is None else g / 2 for name, g in grads_of(model).items()}


@pytest.mark.parametrize("hooked", ["trunk.weight", "a.weight", "c.weight"])  # the last, one of them, the first
def test_delayed_parameters_are_averaged_when_backward_returns(ranks2: RankPool, hooked: str):
    """torch starts their reduction where the hook is called, and waits for none."""
    ranks2.run(_delayed, hooked)


def test_a_delayed_parameter_does_not_keep_the_wrapper_alive(alone: None):
    body = Branches()
    model = wrap(
        "ours", body, delay_all_reduce_named_params=[("a.bias", body.a.bias)], param_to_hook_all_reduce=body.trunk.bias
    )
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    body(torch.ones(3, 4)).sum().backward()


def test_what_torchs_class_warns_its_caller_of_is_told_of_the_line_that_called_ours(alone: None):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for kind in KINDS:
            wrap(kind, nn.Linear(2, 2), check_reduction=True)
    told = [(each.category, str(each.message), each.filename) for each in found]
    assert len(told) == 2 and told[0] == told[1] and "check_reduction" in told[0][1], told
    with warnings.catch_warnings(), pytest.raises(FutureWarning, match="check_reduction"):
        warnings.simplefilter("error")
        wrap("ours", nn.Linear(2, 2), check_reduction=True)
