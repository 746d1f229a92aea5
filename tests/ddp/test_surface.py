"""What scripts touch beside training: logging data, introspection, other process groups, errors, arguments.

Everything runs with torch's class and with ours, on the same ranks, and is compared.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce
from fastreduce.ddp.reducer import CPP_ONLY, TorchReducer
from tests.support.models import (
    EXACT,
    Branches,
    Grads,
    Normed,
    assert_same_bits,
    batch,
    grads_of,
    mlp,
    play,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool

KINDS = ("torch", "ours")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Logging data


def _logged(rank: int, world_size: int, find: bool) -> dict[str, list[dict[str, Any]]]:
    """Logging data after construction and before some steps; where torch searches, its buckets are ours at once."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        model = wrap(kind, whole_(Branches()), find_unused_parameters=find, bucket_cap_mb=64 / 2**20)
        model._set_ddp_runtime_logging_sample_rate(4)
        seen[kind] = [model._get_ddp_logging_data()]
        for step in range(14):
            model(whole_batch(rank, step, 3, 4), use="abc" if step < 12 or not find else "a").sum().backward()
            if step in (0, 1, 5, 11, 13):
                seen[kind].append(model._get_ddp_logging_data())
    return seen


TIMES = {f"{what}_time" for what in ("forward_compute", "backward_compute", "backward_comm")}
TIMES |= {"backward_compute_comm_overlap_time"}


@pytest.mark.parametrize("find", [False, True])
def test_logging_data_has_torchs_keys_and_values(ranks2: RankPool, find: bool):
    for seen in ranks2.run(_logged, find):
        for ours, torchs in zip(seen["ours"], seen["torch"], strict=True):
            assert not torchs.keys() - ours.keys()
            for key, value in torchs.items():
                if (
                    key == "bucket_sizes"
                ):  # torch begins with one bucket, unless it searches; there its order is another
                    assert sorted(value.split(", ")) == sorted(ours[key].split(", ")) or (not find and "," not in value)
                elif key in ("has_rebuilt_buckets", "num_buckets_reduced") or key.startswith(("rebuilt", "prev_")):
                    pass  # compared below: torch never rebuilds where it searches
                elif key == "unused_parameter_size" or "_time" not in key:
                    assert ours[key] == value, key
        ours, torchs = seen["ours"][-1], seen["torch"][-1]
        assert ours["iteration"] == 12
        assert {k for k in ours if k in TIMES} == TIMES and all(ours[f"avg_{k}"] >= 0 for k in TIMES)
        if not find:
            for key in ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "has_rebuilt_buckets"):
                assert ours[key] == torchs[key], key
            assert ours["prev_iteration_grad_ready_order_indices"] == torchs["prev_iteration_grad_ready_order_indices"]
        assert ours["forward_compute_time_start"] <= ours["backward_compute_time_start"]
        assert ours["backward_compute_time_start"] <= ours["backward_comm_time_start"] <= ours["backward_comm_time_end"]


def test_times_are_taken_in_the_first_ten_steps_and_then_at_the_sample_rate(alone: None):
    model, sampled = wrap("ours", nn.Linear(4, 4)), []
    for step in range(1, 301):
        model(torch.ones(1, 4)).sum().backward()
        if model.logger._times is not None:
            sampled.append(step)
    assert sampled == [*range(1, 11), 100, 200, 300]


# Introspection


def test_what_only_the_cpp_reducer_has_is_an_attribute_error_that_says_what_to_use(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    cpp = {name for kind in (dist.Reducer, dist.Logger) for name in dir(kind) if not name.startswith("__")}
    for name, instead in CPP_ONLY.items():
        assert name in cpp and not hasattr(TorchReducer, name)
        with pytest.raises(AttributeError, match=r"only torch's C\+\+ reducer") as caught:
            getattr(model.reducer, name)
        assert instead in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = model.reducer.no_such_thing


def test_everything_else_of_the_cpp_reducer_and_logger_is_there(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    mixed_precision = {"_autograd_hook", "_set_mixed_precision_param_dtype"}
    for ours, kind in ((model.reducer, dist.Reducer), (model.logger, dist.Logger)):
        for name in dir(kind):
            if not name.startswith("__") and not name.startswith("_pybind11") and name not in mixed_precision:
                assert hasattr(ours, name) or name in CPP_ONLY, name


# Another process group


def _regroup(rank: int, world_size: int, groups: list[list[int]], options: dict[str, Any]) -> dict[str, list[Grads]]:
    """Two steps in each group; a rank that is not in a group waits for the next."""
    made = [dist.new_group(ranks) if len(ranks) < world_size else dist.group.WORLD for ranks in groups]
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS if "compression" not in options else ("ours",):
        model, seen[kind] = wrap(kind, whole_(Branches()), bucket_cap_mb=1e-6, **options), []
        for group, ranks in zip(made, groups, strict=True):
            model._update_process_group(group)
            for step in range(3):
                model.zero_grad()
                if rank in ranks:
                    (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
                    seen[kind].append(grads_of(model.module))
        if kind == "ours" and rank in ranks:
            logged = model._get_ddp_logging_data()
            assert (logged["has_rebuilt_buckets"], logged["world_size"]) == (1, len(ranks))
        dist.barrier()
    return seen


GROUPS = {2: [[0, 1], [0], [0, 1]], 3: [[0, 1, 2], [0, 2], [1, 2], [1], [0, 1, 2]]}


def _average(ranks: list[int], step: int) -> Grads:
    model = whole_(Branches())
    for rank in ranks:
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return {name: None if g is None else g / len(ranks) for name, g in grads_of(model).items()}


@pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
@pytest.mark.parametrize("world_size", GROUPS)
def test_the_process_group_can_shrink_and_grow_as_torchs(request: pytest.FixtureRequest, world_size: int, views: bool):
    groups = GROUPS[world_size]
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    for rank, seen in enumerate(pool.run(_regroup, groups, {"gradient_as_bucket_view": views})):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
        expected = [_average(ranks, step) for ranks in groups if rank in ranks for step in range(3)]
        assert_same_bits(seen["ours"], expected, f"rank {rank}")


def test_the_process_group_can_change_under_compression(ranks3: RankPool):
    results = ranks3.run(_regroup, GROUPS[3], {"compression": "int8:error_feedback"})
    last = [seen["ours"][-1] for seen in results]
    assert_same_bits(last[1], last[0])
    assert_same_bits(last[2], last[0])


def _regroup_after_a_failure(rank: int, world_size: int) -> Grads:
    """Rank 2 takes no part in a backward that the others have begun: they give up and go on without it."""
    small = dist.new_group([0, 1])
    short = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    model = wrap("ours", whole_(Branches()), process_group=short, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    if rank != 2:
        loss = model(whole_batch(rank, 3, 3, 4)).sum()
        with pytest.raises(fastreduce.TransportError):
            loss.backward()
        model._update_process_group(small)
        for step in (4, 5):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    dist.barrier()
    return grads_of(model.module)


def test_survivors_go_on_in_a_smaller_group_after_a_peer_has_failed(ranks3: RankPool):
    first, second, _ = ranks3.run(_regroup_after_a_failure, timeout=60)
    assert_same_bits(first, _average([0, 1], 5))
    assert_same_bits(second, first)


def test_a_transport_of_the_users_cannot_be_regrouped(alone: None):
    model = wrap("ours", nn.Linear(2, 2), transport=fastreduce.transports.LocalTransport())
    with pytest.raises(fastreduce.SettingError, match="wrap the module again"):
        model._update_process_group(dist.group.WORLD)


# Misuse


def _hook(state: object, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _hook_that_raises(state: object, bucket: Any) -> Any:
    raise KeyError("mine")


def _bad_bucket(state: object, bucket: int) -> Any: ...


def _bad_result(state: object, bucket: Any) -> Any: ...


# torch compares annotations with its own classes, and does not take strings.
_hook.__annotations__ = _hook_that_raises.__annotations__ = {}
_bad_bucket.__annotations__ = {"bucket": int}
_bad_result.__annotations__ = {"return": Tensor}


def _layer() -> nn.Module:
    return nn.Linear(2, 2)


def _step(model: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()


def _wrap(make: Callable[[], Any] = _layer, **options: Any) -> Callable[[str], Any]:
    return lambda kind: wrap(kind, make(), **options)


def _register(*hooks: Any, steps: int = 0) -> Callable[[str], None]:
    def misuse(kind: str) -> None:
        model = wrap(kind, _layer())
        for hook in hooks:
            model.register_comm_hook(None, hook)
        for _ in range(steps):
            _step(model)

    return misuse


def _hook_that(value: Callable[[Any], Any]) -> Callable[[object, Any], Any]:
    def hook(state: object, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(value(bucket))
        return future

    hook.__annotations__ = {}
    return hook


def _builtin_hook_too(kind: str) -> None:
    model = wrap(kind, _layer())
    model.register_comm_hook(None, _hook)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _static_too_late(kind: str) -> None:
    model = wrap(kind, _layer())
    for _ in range(2):
        _step(model)
    model._set_static_graph()


def _delay(**what: str) -> Callable[[str], Any]:
    def misuse(kind: str) -> None:
        layer = nn.Linear(2, 2)
        values = {"delay_all_reduce_named_params": [("weight", layer.weight)], "param_to_hook_all_reduce": layer.bias}
        wrap(kind, layer, **{name: values[name] for name in what})

    return misuse


def _two_devices() -> nn.Module:
    return nn.Sequential(_layer(), nn.Linear(2, 2, device="meta"))


def _mesh(*shape: int) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape)


def _pickled_with_a_group(kind: str) -> None:
    pickle.dumps(wrap(kind, _layer(), process_group=dist.new_group([0])))


# What is done → what our message must contain, beside the type of torch's error.
MISUSE: dict[str, tuple[Callable[[str], Any], str]] = {
    "second hook": (_register(_hook, _hook), "only be called once"),
    "second hook, builtin": (_builtin_hook_too, "only be called once"),
    "hook that cannot be called": (_register(3), "callable"),
    "hook without bucket": (_register(lambda state, b: None), "bucket"),
    "hook annotated with another bucket": (_register(_bad_bucket), "dist.GradBucket"),
    "hook annotated with another result": (_register(_bad_result), "torch.futures.Future"),
    "hook that raises": (_register(_hook_that_raises, steps=1), "mine"),
    "hook with another size": (_register(_hook_that(lambda b: torch.ones(1)), steps=1), "6 elements"),
    "hook without a tensor": (_register(_hook_that(lambda b: None), steps=1), "not None"),
    "nothing to train": (_wrap(lambda: nn.Linear(2, 2).requires_grad_(False)), "requires a gradient"),
    "no parameters": (_wrap(nn.ReLU), "requires a gradient"),
    "parameters on two kinds of devices": (_wrap(_two_devices), "'1.weight' is on meta"),
    "parameters on meta": (_wrap(lambda: nn.Linear(2, 2, device="meta")), "'weight' is on meta"),
    "uninitialized parameters": (_wrap(lambda: nn.LazyLinear(3)), "dummy forward"),
    "two device_ids": (_wrap(device_ids=[0, 1]), "device_ids"),
    "device_ids is no list": (_wrap(device_ids=0), "iterable"),
    "delayed parameters alone": (_delay(delay_all_reduce_named_params=""), "param_to_hook_all_reduce"),
    "a parameter to hook alone": (_delay(param_to_hook_all_reduce=""), "delay_all_reduce_named_params"),
    "negative bucket_cap_mb_list": (_wrap(bucket_cap_mb_list=[1, -1]), "[1, -1]"),
    "bucket_cap_mb_list is no list": (_wrap(bucket_cap_mb_list=3), "int"),
    "bucket_cap_mb is text": (_wrap(bucket_cap_mb="x"), "x"),
    "process_group is a name": (_wrap(process_group="gloo"), "'gloo'"),
    "process_group of others": (_wrap(process_group=dist.GroupMember.NON_GROUP_MEMBER), "this rank is not in"),
    "process_group and device_mesh": (
        lambda kind: wrap(kind, _layer(), process_group=dist.group.WORLD, device_mesh=_mesh(1)),
        "both process_group and device_mesh",
    ),
    "two-dimensional device_mesh": (lambda kind: wrap(kind, _layer(), device_mesh=_mesh(1, 1)), "1D device mesh"),
    "static graph after training": (_static_too_late, "before training loop starts"),
    "SyncBatchNorm on a CPU": (_wrap(lambda: nn.Sequential(_layer(), nn.SyncBatchNorm(2))), "SyncBatchNorm"),
    "sample rate": (lambda kind: wrap(kind, _layer())._set_ddp_runtime_logging_sample_rate(0), "sample rate"),
    "unknown argument": (_wrap(compresion="fp16"), "compresion"),
    "too many arguments": (lambda kind: DDP[kind](_layer(), *[None] * 40), "positional arguments"),
    "no module": (_wrap(lambda: "model"), "'str' object"),
    "buffer hook that cannot be called": (
        lambda kind: wrap(kind, _layer())._register_buffer_comm_hook(None, 3),
        "callable",
    ),
    "pickled with a group of its own": (_pickled_with_a_group, "default process"),
}
DDP: dict[str, Any] = {"torch": TorchDDP, "ours": fastreduce.DistributedDataParallel}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_torchs_error(alone: None, case: str):
    misuse, piece = MISUSE[case]
    with pytest.raises(Exception) as torchs:
        misuse("torch")
    with pytest.raises(type(torchs.value)) as ours:
        misuse("ours")
    assert piece in str(ours.value)


def test_without_a_process_group_it_is_torchs_error():
    for kind in KINDS:
        with pytest.raises(ValueError, match="has not been initialized"):
            wrap(kind, _layer())


def _misuse_across_ranks(rank: int, world_size: int, case: str) -> list[tuple[str, list[type]]]:
    seen = []
    for kind in KINDS:
        try:
            if case == "early termination":
                model = wrap(kind, _layer())
                with model.join(throw_on_early_termination=True):
                    for _ in range(3 - rank):
                        _step(model)
            else:
                wrap(kind, _layer() if rank == 0 else mlp())
        except Exception as error:
            seen.append((str(error), [t for t in type(error).__mro__ if t.__module__ == "builtins"]))
        dist.barrier()
    return seen


@pytest.mark.parametrize("case", ["number of parameters", "early termination"])
def test_misuse_across_ranks_is_torchs_error(ranks2: RankPool, case: str):
    """Models that differ in shapes are in test_bad_input: torch raises on one rank, and hangs on the other."""
    for (_, torchs), (message, ours) in ranks2.run(_misuse_across_ranks, case):
        assert torchs[0] in ours
        assert case == "early termination" or "parameter '" in message


# Parameters that change after wrapping


def _add(body: nn.Sequential) -> None:
    body.append(nn.Linear(2, 2))


def _replace(body: nn.Sequential) -> None:
    body[0] = nn.Linear(2, 2)


def _unfreeze(body: nn.Sequential) -> None:
    body[1].requires_grad_(True)


CHANGES = {"added": (_add, "'2.weight'"), "replaced": (_replace, "'0.weight'"), "unfrozen": (_unfreeze, "'1.weight'")}


@pytest.mark.parametrize("when", ["at once", "later", "after train()"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_nobody_averages_is_an_error_that_says_to_wrap_again(alone: None, change: str, when: str):
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    model = wrap("ours", body)
    for _ in range(0 if when == "at once" else 20):
        _step(model)
    apply, name = CHANGES[change]
    apply(body)
    if when == "later":
        model._set_ddp_runtime_logging_sample_rate(25)  # looked for when times are taken
        for _ in range(4):
            _step(model)
    if when == "after train()":
        model.train()
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(fastreduce.ReducerError, match=rf"rank 0: parameter {name}.*Wrap the module again"):
        _step(model)
    _step(wrap("ours", body))


def test_parameters_that_only_move_are_no_new_ones(alone: None):
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = wrap("ours", body)
    nn.utils.parametrizations.weight_norm(body[1])  # splits a parameter: new ones
    model.train().eval()
    with pytest.raises(fastreduce.ReducerError, match="parametrizations"):
        _step(model)
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = wrap("ours", body)
    nn.utils.parametrize.register_parametrization(body[1], "weight", nn.Tanh())  # keeps the parameter
    body[0].weight.data = torch.ones(2, 2)
    _step(model)


def _toggled(rank: int, world_size: int, views: bool) -> dict[str, list[Grads]]:
    """A branch is frozen, and later trained again."""
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS:
        model = whole_(Branches())
        model = wrap(
            kind, model, find_unused_parameters=kind == "torch", gradient_as_bucket_view=views, bucket_cap_mb=1e-6
        )
        seen[kind] = []
        for step in range(6):
            model.module.a.requires_grad_(step not in (2, 3))
            model.zero_grad(set_to_none=step != 3)
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            seen[kind].append(grads_of(model.module))
    return seen


@pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
def test_parameters_frozen_for_some_steps_are_unused_as_with_torchs_search(ranks2: RankPool, views: bool):
    for rank, seen in enumerate(ranks2.run(_toggled, views)):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
        assert seen["ours"][2]["a.weight"] is None


# Arguments

# Each argument of torch's class, with a value that is not its default, or where else it is tested.
ARGUMENTS: dict[str, Any] = {
    "device_ids": "MISUSE, and tests/ddp/test_ddp.py",
    "output_device": "MISUSE, and tests/ddp/test_ddp.py",
    "dim": 1,
    "broadcast_buffers": False,
    "init_sync": False,
    "process_group": "the process group's tests, and tests/ddp/test_ddp.py",
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
}
TORCHS = set(inspect.signature(TorchDDP).parameters) - {"module"}


def test_every_argument_of_the_installed_torch_is_tested():
    assert set(ARGUMENTS) >= TORCHS


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
                DDP[kind](_layer(), **options)
        return
    first, second = (seen["ours"] for seen in ranks2.run(_with_argument, options))
    same = all(torch.equal(a, b) for a, b in zip(first[0].values(), second[0].values(), strict=True))
    assert same == (argument not in ("init_sync", "broadcast_buffers"))
    if argument == "bucket_cap_mb_list":
        assert len(first[-1][0].split(", ")) > 1


def _arguments_in_order(rank: int, world_size: int) -> None:
    for kind in KINDS:
        names = [name for name in inspect.signature(TorchDDP).parameters if name != "module"]
        model = DDP[kind](nn.Linear(2, 2), *[ARGUMENTS[n] if n in ("dim", "init_sync") else _default(n) for n in names])
        assert (model.dim, model.process_group) == (1, dist.group.WORLD)


def _default(name: str) -> Any:
    return inspect.signature(TorchDDP).parameters[name].default


def test_arguments_may_be_given_by_position(ranks2: RankPool):
    ranks2.run(_arguments_in_order)


def _mesh_of_all(rank: int, world_size: int) -> None:
    mesh, seen = dist.device_mesh.init_device_mesh("cpu", (world_size,)), {}
    for kind in KINDS:
        model = wrap(kind, whole_(Branches()), device_mesh=mesh)
        seen[kind] = play(model, ["f1", "b1", "f2", "b2"], rank)
    assert_same_bits(seen["ours"], seen["torch"])


def test_a_device_mesh_gives_the_group(ranks2: RankPool):
    ranks2.run(_mesh_of_all)


def _delayed(rank: int, world_size: int) -> None:
    """Not with all parameters delayed: there the first forward of torch's own class fails (2.13)."""
    for kind in KINDS:
        body = whole_(Branches())
        named = [(n, p) for n, p in body.named_parameters() if n.startswith("a.")]
        model = wrap(kind, body, delay_all_reduce_named_params=named, param_to_hook_all_reduce=body.trunk.weight)
        for step in range(3):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            expected = _average([0, 1], step)
            deadline = time.monotonic() + 10  # torch's hook does not wait for what it begins
            while time.monotonic() < deadline and not all(torch.equal(p.grad, expected[n]) for n, p in named):
                time.sleep(0.005)
            assert_same_bits(grads_of(body), expected, kind)


def test_delayed_parameters_are_averaged_by_torchs_own_hook(ranks2: RankPool):
    ranks2.run(_delayed)


# TORCH_DISTRIBUTED_DEBUG


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((record.levelname, record.getMessage()))


def _debugged(rank: int, world_size: int, level: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    records, logger = _Records(), logging.getLogger("fastreduce")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        model = wrap("ours", whole_(Branches()), bucket_cap_mb=64 / 2**20, **options)
        for step in range(12):
            model.zero_grad()
            use = "abc" if rank == 0 or step < 2 else "ab" if step % 2 else "a"
            (model(whole_batch(rank, step, 3, 4), use=use).sum() * EXACT).backward()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
        logger.removeHandler(records)
        logger.setLevel(logging.NOTSET)
    return records.texts


def test_debug_level_info_logs_the_buckets_when_they_are_built_and_rebuilt(ranks2: RankPool):
    for rank, texts in enumerate(ranks2.run(_debugged, "INFO", {})):
        assert [kind for kind, _ in texts] == ["INFO", "INFO"]
        (_, built), (_, rebuilt) = texts
        assert built.startswith(f"rank {rank}: buckets: 4 of 64, 80, 80, 80 bytes\nbucket 0: float32")
        assert rebuilt.startswith(f"rank {rank}: buckets were rebuilt: 4 of 64, 80, 80, 80 bytes\n")


def test_debug_level_detail_names_unused_parameters_once_a_set(ranks2: RankPool):
    first, second = ranks2.run(_debugged, "DETAIL", {})
    assert [kind for kind, _ in first] == ["INFO", "INFO"]
    warned = [text for kind, text in second if kind == "WARNING"]
    assert len(warned) == 2
    assert "rank 1: no gradient arrived for b.weight, b.bias, c.weight." in warned[0]
    assert "rank 1: no gradient arrived for c.weight." in warned[1]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_where_torch_allows_unused_parameters_nobody_is_warned(ranks2: RankPool, options: dict[str, bool]):
    for texts in ranks2.run(_debugged, "DETAIL", options):
        assert {kind for kind, _ in texts} == {"INFO"}


def test_without_a_debug_level_nothing_is_logged(ranks2: RankPool):
    assert ranks2.run(_debugged, "OFF", {}) == [[], []]


# Checkpoints, compilers, mixed precision, wrappers in wrappers


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
@pytest.mark.parametrize("inside", [False, True], ids=["wrapper compiled", "module compiled"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_equal_torch_and_dynamos_optimizer_sees_our_class(ranks2: RankPool, backend: str, inside: bool):
    results = ranks2.run(_compiled, backend, inside, timeout=120)
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
