"""What torch's class refuses ours refuses, with the same type of error; parameters that change after wrapping."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastreduce
from fastreduce import MismatchError, SettingError
from tests.support.installed_torch import has_bucket_cap_mb_list
from tests.support.models import (
    DDP,
    EXACT,
    Branches,
    Checkpointed,
    Grads,
    assert_same_bits,
    grads_of,
    mlp,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool, run_ranks
from tests.support.threads import threads_of_all

KINDS = ("torch", "ours")


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
    "parameters on two kinds of devices": (
        _wrap(_two_devices),
        "'1.weight' is on meta; all must be on CPUs or all on GPUs. What",
    ),
    "parameters on meta": (
        _wrap(lambda: nn.Linear(2, 2, device="meta")),
        "'weight' is on meta; allowed: cpu, cuda. What",
    ),
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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_wrapper_over_a_given_transport_cannot_be_copied_and_says_so(alone: None, copied: Callable[[Any], Any]):
    transport = fastreduce.transports.GlooTransport(dist.group.WORLD)
    with pytest.raises(SettingError, match=r"was given transport=.*copy ddp\.module"):
        copied(wrap("ours", _layer(), transport=transport))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[has_bucket_cap_mb_list] * ("mb_list" in case)) for case in MISUSE]
)
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


CHANGES = {"added": (_add, "'2.weight'"), "replaced": (_replace, "'0.weight'")}


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
        for _ in range(4 if change == "added" else 0):  # others are found in every step
            _step(model)
    if when == "after train()":
        model.train()
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(fastreduce.ReducerError, match=rf"rank 0: parameter {name}.*Wrap the module again"):
        _step(model)
    _step(wrap("ours", body))


def _assign(body: nn.Sequential) -> None:
    body.load_state_dict({name: each.clone() for name, each in body.state_dict().items()}, assign=True)


def _adapt(body: nn.Sequential) -> None:
    body.requires_grad_(False)
    body[1] = nn.Sequential(body[1], nn.Linear(2, 2))


@pytest.mark.parametrize(("change", "name"), [(_replace, "0.weight"), (_assign, "0.weight"), (_adapt, "1.1.weight")])
def test_one_that_took_the_place_of_another_is_found_when_that_misses_its_gradient(
    alone: None, change: Callable[[nn.Sequential], None], name: str
):
    """At the end of the next backward, in whatever step that is."""
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = wrap("ours", body)
    for _ in range(20):
        _step(model)
    change(body)
    with pytest.raises(fastreduce.ReducerError, match=rf"rank 0: parameter '{name}'.*Wrap the module again"):
        _step(model)


@pytest.mark.parametrize("after", [1, 20])
@pytest.mark.parametrize("runs_again", [True, False])
def test_what_is_unfrozen_behind_a_forward_is_an_error_only_if_its_backward_reaches_it(
    alone: None, runs_again: bool, after: int
):
    body: Any = Checkpointed(reentrant=True, twice=False, width=2) if runs_again else Branches(2)
    frozen = body.inner if runs_again else body.trunk
    frozen.requires_grad_(False)
    model = wrap("ours", body)
    for _ in range(after):
        _step(model)
    loss = model(torch.ones(1, 2)).sum()
    frozen.requires_grad_(True)
    if runs_again:
        with pytest.raises(fastreduce.ReducerError, match=r"rank 0: parameter 'inner.weight'.*unfrozen"):
            loss.backward()
    else:
        loss.backward()
        _step(model)
        assert len(model.reducer.buckets.specs) == len(list(body.parameters()))


def test_a_model_that_leaves_parts_out_by_turns_is_not_walked_through_in_every_step(alone: None):
    model, walks = wrap("ours", Branches()), 0

    def count() -> None:
        nonlocal walks
        walks += 1

    for step in range(12, 40):
        if step == 24:
            model.reducer.check = count
        model(torch.ones(2, 4), "abc"[: step % 4]).sum().backward()
        if step % 6 == 0:
            torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    assert walks == 3, "once where nothing came, in each autograd.grad"


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


def test_an_evaluation_on_one_rank_alone_is_told_to_call_the_module_inside():
    """torch broadcasts buffers in each forward of a wrapper; gloo's error does not name that."""
    said = run_ranks(_evaluate_alone, 2, check_exit=False)
    assert any("of 2: broadcasting the module's buffers before a forward failed: " in text for text in said)
    assert all(text.startswith("TransportError: rank ") for text in said)
    assert any("to evaluate on one rank alone, call ddp.module(…)" in text for text in said)


def _evaluate_alone(rank: int, world_size: int) -> str:
    ddp = fastreduce.DistributedDataParallel(
        nn.BatchNorm1d(3), process_group=dist.new_group(timeout=timedelta(seconds=2))
    )
    try:
        for _ in range(3):
            ddp(torch.randn(4, 3)).sum().backward()
            if rank == 1:
                with torch.no_grad():
                    ddp.eval()(torch.randn(4, 3))
                ddp.train()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return ""


def _untrainable() -> nn.Module:
    with torch.inference_mode():
        return _layer()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a size that is text": (
        {"bucket_cap_mb": "25"},
        "SettingError: bucket_cap_mb='25'; allowed: a finite number of MiB",
    ),
    "a size that is infinite": ({"bucket_cap_mb": float("inf")}, "SettingError: bucket_cap_mb=inf; allowed"),
    "a list of sizes that are text": (
        {"bucket_cap_mb_list": ["1"]},
        "TypeError: bucket_cap_mb_list=['1'] of list; allowed",
    ),
    "a dtype": (
        {"mixed_precision": torch.bfloat16},
        "AttributeError: mixed_precision=torch.bfloat16; allowed: None, or",
    ),
    "two devices": ({"device_ids": [0, 1]}, "ValueError: device_ids can only be None or contain a single element, got"),
    "a module made in inference mode": (
        {"module": _untrainable()},
        "TensorError: parameter 'weight' was made under torch.inference_mode(), so autograd cannot train it; allowed",
    ),
    "no module": ({"module": None}, "AttributeError: module is a 'NoneType' object; allowed: a torch.nn.Module"),
    "an unknown name": (
        {"compresion": "fp16"},
        "TypeError: DistributedDataParallel.__init__() got an unexpected keyword argument 'compresion', did you mean "
        "'compression'?",
    ),
    "a number of devices": ({"device_ids": 3}, "TypeError: 'int' object is not iterable"),
    "elastic in a group": ({"elastic": True}, "SettingError: elastic=True in a process group of 2 ranks"),
    "half a delay": ({"delay_all_reduce_named_params": []}, "ValueError: delay_all_reduce_named_params and"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[has_bucket_cap_mb_list] * ("list of sizes" in case)) for case in ARGUMENTS]
)
def test_an_argument_that_is_none_on_one_rank_is_told_to_all(ranks2: RankPool, case: str):
    """torch's class raised behind the exchange, and the others waited; or errors named no argument."""
    first, second = ranks2.run(_with_argument, case)
    assert second.startswith(ARGUMENTS[case][1]), second
    assert first.startswith(f"MismatchError: rank 1 could not be set up: {ARGUMENTS[case][1]}"), first


def _with_argument(rank: int, world_size: int, case: str) -> str:
    try:
        group = dist.new_group(timeout=timedelta(seconds=20)) if case != "elastic in a group" else None
        given = {"module": _layer(), "process_group": group, **(ARGUMENTS[case][0] if rank else {})}
        fastreduce.DistributedDataParallel(**given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_is_no_module_or_group_is_named(ranks2: RankPool):
    for said in ranks2.run(_with_others):
        assert said == [
            "module is a 'NoneType' object; allowed: a torch.nn.Module",
            "device_ids can only be None or contain a single element, got 'fp16'; settings are compression=…",
            "process_group must be a ProcessGroup, e.g. from torch.distributed.new_group; got 0",
            "all_reduce_gradients: group='gloo'; allowed: a ProcessGroup, as new_group makes, or None",
            "all_reduce_gradients: group=0; allowed: a ProcessGroup, as new_group makes, or None",
            "all_reduce_gradients: unknown op ['mean']; allowed: mean, sum",
        ]


def _with_others(rank: int, world_size: int) -> list[str]:
    ddp: Any = fastreduce.DistributedDataParallel
    reduce: Any = fastreduce.all_reduce_gradients
    said = []
    for call in (
        lambda: ddp(None),
        lambda: ddp(_layer(), "fp16"),
        lambda: ddp(_layer(), process_group=0),
        lambda: reduce([torch.ones(2)], group="gloo"),
        lambda: reduce([torch.ones(2)], group=0),
        lambda: reduce([torch.ones(2)], op=["mean"]),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def _refused(rank: int, world_size: int, transport: str) -> list[tuple[int, int]]:
    """Descriptors and threads after one construction that was refused on all ranks, and after some more."""
    found, process = [], psutil.Process()
    for _ in range(6):
        model = nn.Linear(3 + rank, 4)
        with pytest.raises(MismatchError):
            fastreduce.DistributedDataParallel(model, transport=transport)
        with pytest.raises(SettingError):
            fastreduce.DistributedDataParallel(model, compression="nonsense", transport=transport)
        gc.collect()
        found.append((process.num_fds(), threads_of_all()))
    return [found[0], found[-1]]


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_refused_constructions_leave_nothing(transport: str):
    for early, late in run_ranks(_refused, 2, transport):
        assert late == early
