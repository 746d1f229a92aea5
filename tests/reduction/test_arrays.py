"""Arrays of any library: shared with torch, broadcast as a list, reduced one by one and as a list."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fastreduce.distributed as dist
from fastreduce import DeviceError, SettingError, TensorError, all_reduce_gradients
from fastreduce.reduction.arrays import as_tensor
from tests.support.models import EXACT, assert_same_bits, batch
from tests.support.ranks import RankPool, message


class OnlyDLPack:
    """An array of a library that we have never heard of."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.memory.__dlpack_device__()


class OnGPU:
    """What a CuPy or Numba array shows of itself."""

    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


def test_an_array_of_another_gpu_is_not_averaged_in_a_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: torch.zeros(1))  # on the current one
    with pytest.raises(DeviceError, match=r"OnGPU lies on another GPU than the current one, cuda:1.*set_device"):
        as_tensor(OnGPU())


# Sharing memory

KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.zeros(3),
    "NumPy": lambda: np.zeros(3, np.float32),
    "strided NumPy": lambda: np.zeros((3, 2), np.float32)[:, 0],
    "0-d NumPy": lambda: np.zeros(()),
    "integers": lambda: np.zeros(3, np.int16),
    "DLPack": lambda: OnlyDLPack(np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_arrives_in_the_array(kind: str):
    array = KINDS[kind]()
    as_tensor(array).fill_(7)
    memory = array.memory if kind == "DLPack" else array
    assert np.array_equal(np.asarray(memory), np.full(np.asarray(memory).shape, 7))


def _read_only() -> np.ndarray:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "read-only": (_read_only, "read-only"),
    "big-endian": (lambda: np.zeros(3, ">f4"), "dtype >f4"),
    "backwards": (lambda: np.zeros(3)[::-1], "strides"),
    "objects": (lambda: np.array([None]), "dtype object"),
    "text": (lambda: np.array(["a"]), "dtype <U1"),
    "a list": (lambda: [1.0], "builtins.list is no array; allowed: torch tensors, NumPy arrays"),
    "a number": (lambda: 1.0, "builtins.float is no array"),
    "immutable": (lambda: type("Array", (), {"__module__": "jaxlib.xla"})(), "jaxlib.xla.Array is immutable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused(case: str):
    make, says = REFUSED[case]
    with pytest.raises(TensorError) as caught:
        as_tensor(make())
    assert says in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_array_on_a_gpu_is_refused_where_torch_sees_none():
    for kind in (RuntimeError, ValueError, DeviceError):
        with pytest.raises(kind, match=r"OnGPU lies on a CUDA device.*cpu.*install"):
            as_tensor(OnGPU())


@pytest.mark.gpu
def test_an_array_on_a_gpu_is_shared():
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros(3)
    as_tensor(array).fill_(7)
    torch.cuda.synchronize()
    assert array.get().tolist() == [7.0, 7.0, 7.0]


# bcast_list_


def make_list(rank: int) -> list[Any]:
    """Parameters and buffers of a model, and arrays, of all dtypes and layouts; different on every rank."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model[1].num_batches_tracked.fill_(-rank - 1)  # all ones as bits, a NaN if a kernel took it for a float
    gaps = np.full((4, 6), rank, np.float64)
    return [
        *model.parameters(),
        *model.buffers(),
        batch(rank, 1, 3, 4).t(),
        batch(rank, 2, 40)[::2],
        batch(rank, 3, 9, dtype=torch.bfloat16),
        batch(rank, 4, 9, dtype=torch.float16),
        torch.complex(batch(rank, 5, 3), batch(rank, 6, 3)),
        torch.tensor([rank == 0, True]),
        torch.tensor(rank),
        torch.zeros(0),
        torch.full((2,), rank, dtype=torch.int8)[::2],
        np.full((2, 3), rank, np.float32),
        np.full((2, 3), rank, np.int64).T,
        gaps[:, ::2],
        OnlyDLPack(np.full(3, rank, np.float32)),
    ]


def plain(array: Any) -> Tensor:
    """A contiguous copy."""
    array = array.memory if isinstance(array, OnlyDLPack) else array
    return torch.as_tensor(
        np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.detach().clone().contiguous()
    )


def _broadcast(rank: int, world_size: int, src: int | None) -> tuple[list[Tensor], float]:
    arrays = make_list(rank)
    dist.bcast_list_(arrays, src=src)
    gaps = arrays[-2].base
    return [plain(array) for array in arrays], float(gaps[0, 1])


@pytest.mark.parametrize("src", [None, 1])
def test_every_rank_gets_one_ranks_values_in_place(ranks: RankPool, src: int | None):
    expected = [plain(array) for array in make_list(src or 0)]
    for rank, (found, between) in enumerate(ranks.run(_broadcast, src)):
        assert_same_bits(found, expected, f"rank {rank}")
        assert between == rank, "elements between those of a strided array are not touched"


# Gradients


def _arrays_reduced(rank: int, world_size: int, op: str, setting: str) -> list[Tensor]:
    arrays: list[Any] = [
        np.full((3, 2), rank + 1.0, np.float32),
        np.full((4, 4), rank + 1.0)[:, ::2],
        torch.full((5,), rank + 1.0),
        OnlyDLPack(np.full(3, rank + 1.0, np.float16)),
    ]
    all_reduce_gradients(arrays, setting, op=op)
    return [plain(array).double().unique() for array in arrays]


@pytest.mark.parametrize(
    ("op", "setting"),
    [
        pytest.param(op, setting, marks=[pytest.mark.long] * (op != of_short))
        for op in ("mean", "sum")
        for setting, of_short in (("none", "sum"), ("fp16", "mean"), ("bf16:accumulate=wire", "sum"), ("int8", "mean"))
    ],
)
def test_arrays_are_reduced_in_place(ranks2: RankPool, op: str, setting: str):
    expected = 1.5 if op == "mean" else 3.0
    for found in ranks2.run(_arrays_reduced, op, setting):
        for values in found:
            assert (values - expected).abs().max() <= (0.01 if setting == "int8" else 0), (setting, op)


# Ranks that differ


def _differ(rank: int, world_size: int, call: str, case: str) -> str:
    arrays: list[Any] = [np.ones(1, np.float32), torch.ones(2, 3, 2, 2)]
    src, setting, op = 0, "fp16", "mean"
    if rank == 1:
        if case == "shape":
            arrays[1] = torch.ones(2, 3, 4)
        elif case == "dtype":
            arrays[1] = torch.ones(2, 3, 2, 2).double()
        elif case == "strides":
            arrays[1] = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
        elif case == "number":
            arrays.append(torch.ones(1))
        elif case == "no array":
            arrays[0] = "text"
        src = int(case == "src")
        setting = {"setting": "bf16", "bad setting": "int9"}.get(case, setting)
        op = {"op": "sum", "bad op": "max"}.get(case, op)
    if call == "bcast_list_":
        return message(lambda: dist.bcast_list_(arrays, src=src))
    return message(lambda: all_reduce_gradients(arrays, setting, op=op))


LISTS = [("shape", "tensor 1"), ("dtype", "float64"), ("strides", "strides"), ("number", "tensor 2")]
DIFFERENT = [(call, *case) for call in ("bcast_list_", "all_reduce_gradients") for case in LISTS] + [
    ("bcast_list_", "src", "differ in src"),
    ("bcast_list_", "no array", "builtins.str"),
    ("all_reduce_gradients", "setting", "bf16"),
    ("all_reduce_gradients", "bad setting", "int9"),
    ("all_reduce_gradients", "op", "differ in op"),
    ("all_reduce_gradients", "bad op", "'max'; allowed: mean, sum"),
]


@pytest.mark.parametrize(
    ("call", "case", "says"),
    [
        pytest.param(*each, marks=[pytest.mark.long] * (each[0] == "all_reduce_gradients" and each[1:] in LISTS[1:]))
        for each in DIFFERENT
    ],
)
def test_ranks_that_differ_get_one_error_each(ranks2: RankPool, call: str, case: str, says: str):
    first, second = ranks2.run(_differ, call, case)
    assert first.startswith("MismatchError: ") and says in first
    own = case in ("no array", "bad setting", "bad op")  # an error of that rank alone
    assert says in second and (own or first == second)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "src": ({"src": 7}, "SettingError: bcast_list_ on rank 1: src=7 is not in the group; its ranks: 0 to 1"),
    "no list": ({"tensors": None}, "TensorError: None is no list of tensors; allowed: "),
    "a module": (
        {"tensors": nn.Sequential(nn.Linear(1, 1))},
        "TensorError: a Sequential is a module; allowed: a list of tensors, as its parameters()",
    ),
}


def _wrong(rank: int, world_size: int, case: str) -> str:
    group = dist.new_group(timeout=timedelta(seconds=20))
    given: dict[str, Any] = {"tensors": [torch.ones(1)], "src": None}
    return message(lambda: dist.bcast_list_(**given | (WRONG[case][0] if rank else {}), group=group))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_of_bcast_list_is_told_to_the_others(ranks2: RankPool, case: str):
    told, raised = ranks2.run(_wrong, case)
    assert raised.startswith(WRONG[case][1]), raised
    assert told == f"MismatchError: rank 1 could not be set up: {raised}"


# A callback


def _by_hand(rank: int, world_size: int, method: str) -> dict[str, Any]:
    """Gradients of a user's own library, handed over one by one."""
    callback = dist.make_allreduce_cb(method, bucket_bytes=100)
    gradients = [np.full(n, EXACT * (rank + 1.0), np.float32) for n in (3, 20, 5, 40, 2)]
    returned = [callback("parameter", gradient) for gradient in gradients]
    before_flush = gradients[-1][0]
    callback.flush()
    callback.flush()
    with dist.make_allreduce_cb(method) as another:
        inside = np.full(2, EXACT * (rank + 1.0))
        another(inside)
    return {
        "same": all(a is b for a, b in zip(returned, gradients, strict=True)),
        "waits": before_flush,
        "values": {float(v) for g in [*gradients, inside] for v in g},
    }


@pytest.mark.parametrize("method", ["mean", "sum"])
def test_the_callback_packs_and_reduces_when_flushed(ranks: RankPool, method: str):
    size = ranks.world_size
    total = EXACT * size * (size + 1) / 2
    for rank, seen in enumerate(ranks.run(_by_hand, method)):
        assert seen == {
            "same": True,
            "waits": EXACT * (rank + 1),
            "values": {total / size if method == "mean" else total},
        }


def _in_backward(rank: int, world_size: int) -> list[list[Tensor]]:
    """With torch's hooks, over several backwards, beside a list reduced in one call."""
    seen = []
    for kind in ("callback", "list"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        if kind == "callback":
            callback = dist.make_allreduce_cb("mean", bucket_bytes=60)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(callback)
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step, 4, 6)).sum().backward()
            if kind == "list":
                all_reduce_gradients(model.parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        seen.append([p.detach() for p in model.parameters()])
    return seen


def test_as_a_hook_of_torch_it_flushes_when_backward_ends(ranks2: RankPool):
    for by_callback, by_list in ranks2.run(_in_backward):
        assert_same_bits(by_callback, by_list)


def test_a_bad_setting_is_known_at_once(ranks2: RankPool):
    assert ranks2.run(_bad_callback) == ["int9"] * 2


def _bad_callback(rank: int, world_size: int) -> str:
    with pytest.raises(SettingError, match="int9"):
        dist.make_allreduce_cb("sum", compression="int9")
    return "int9"
