"""Collectives in place, into the caller's tensors: what they give and what they refuse, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import fastreduce.distributed as dist
from fastreduce import DeviceError, DistributedDataParallel, FastreduceError, SettingError, TensorError
from fastreduce.distributed import ReduceOp, functional
from tests.support.collective_cases import DTYPES, all_kinds, check_all_kinds, data
from tests.support.ranks import RankPool, message


@pytest.mark.parametrize(
    ("dtype", "layout", "async_op"),
    [(dtype, "contiguous", False) for dtype in DTYPES]
    + [(torch.float32, "contiguous", True), (torch.float32, "transposed", False)]
    + [(torch.float32, "apart", False), (torch.float64, "apart", True)],
)
def test_collectives_write_into_the_callers_tensors(ranks: RankPool, dtype: torch.dtype, layout: str, async_op: bool):
    for rank, seen in enumerate(ranks.run(all_kinds, dtype, layout, async_op)):
        check_all_kinds(rank, ranks.world_size, seen, dtype, layout)


def _versions(rank: int, world_size: int, async_op: bool, layout: str) -> dict[str, bool]:
    """For each collective, whether all tensors that it wrote on this rank have a new version."""
    make = partial(data, layout=layout)
    seen: dict[str, bool] = {}

    def check(name: str, written: list[Tensor], call: Callable[..., Any]) -> None:
        before = [tensor._version for tensor in written]
        work = call()
        if isinstance(work, torch_dist.Work):
            work.wait()
        seen[name] = all(tensor._version > version for tensor, version in zip(written, before, strict=True))

    asked: dict[str, Any] = {"async_op": async_op}
    tensor, several, more = make(rank), [make(rank) for _ in range(world_size)], [make(rank) for _ in range(world_size)]
    check("all_reduce", [tensor], lambda: dist.all_reduce(tensor, **asked))
    check("all_reduce AVG", [tensor], lambda: dist.all_reduce(tensor, ReduceOp.AVG, **asked))
    check("reduce", [tensor] if rank == 1 else [], lambda: dist.reduce(tensor, 1, **asked))
    check("broadcast", [tensor], lambda: dist.broadcast(tensor, 1, **asked))
    check("all_gather", several, lambda: dist.all_gather(several, tensor, **asked))
    gathered = several if rank == 1 else None
    check("gather", gathered or [], lambda: dist.gather(tensor, gathered, 1, **asked))
    check("scatter", [tensor], lambda: dist.scatter(tensor, gathered, 1, **asked))
    check("reduce_scatter", [tensor], lambda: dist.reduce_scatter(tensor, several, **asked))
    check("all_to_all", more, lambda: dist.all_to_all(more, several, **asked))
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        check("recv", [tensor], lambda: dist.recv(tensor, 0))
    mixed = [make(rank), data(rank, dtype=torch.int64, layout=layout), torch.ones(3)]
    check("bcast_list_", mixed, lambda: dist.bcast_list_(mixed))
    callback = dist.make_allreduce_cb()
    gradients = [torch.ones(3), torch.ones(2, 2)]
    for gradient in gradients:
        callback(gradient)
    check("callback", gradients, callback.flush)
    with torch.inference_mode():  # which keeps no versions
        dist.all_reduce(make(rank))
    return seen


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "apart"])
def test_what_is_written_in_place_has_a_new_version(ranks2: RankPool, async_op: bool, layout: str):
    for rank, seen in enumerate(ranks2.run(_versions, async_op, layout)):
        assert len(seen) == 11 + rank
        assert [name for name, newer in seen.items() if not newer] == [], f"rank {rank}"


def _clipped(rank: int, world_size: int) -> tuple[float, float]:
    """The norm of averaged gradients, and of these summed by a collective of ours."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    norms = []
    for summed in (False, True):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        for parameter in ddp.parameters():
            if summed:
                dist.all_reduce(parameter.grad)
        norms.append(float(ddp.clip_grad_norm_(1e9)))
    return norms[0], norms[1]


def test_clipping_sees_what_a_collective_wrote_into_gradients(ranks2: RankPool):
    for averaged, summed in ranks2.run(_clipped):
        assert summed == pytest.approx(2 * averaged)


def _gaps(rank: int, world_size: int) -> Tensor:
    base = torch.full((3, 4), float(rank + 1))
    dist.all_reduce(base[:, ::2])
    return base


def test_elements_between_those_of_a_strided_tensor_are_not_touched(ranks2: RankPool):
    for rank, base in enumerate(ranks2.run(_gaps)):
        assert (base[:, ::2] == 3).all() and (base[:, 1::2] == rank + 1).all()


def _uneven(rank: int, world_size: int) -> list[list[float]]:
    came = [torch.zeros(10 * source + rank) for source in range(world_size)]
    dist.all_to_all(came, [torch.full((10 * rank + to,), float(rank)) for to in range(world_size)])
    return [t.tolist() for t in came]


def test_all_to_all_takes_different_sizes(ranks2: RankPool):
    for rank, came in enumerate(ranks2.run(_uneven)):
        assert came == [[float(source)] * (10 * source + rank) for source in range(2)]


def _conjugated(rank: int, world_size: int) -> Tensor:
    came = torch.zeros(2, world_size, 3, dtype=torch.complex64).conj().unbind(1)
    dist.all_to_all(came, [torch.full((2, 3), complex(rank, to + 1)) for to in range(world_size)])
    return torch.stack([each.resolve_conj() for each in came])


def test_all_to_all_fills_what_is_conjugated_and_lies_apart(ranks2: RankPool):
    for rank, came in enumerate(ranks2.run(_conjugated)):
        for source in range(2):
            assert (came[source] == complex(source, rank + 1)).all()


def _of_dtypes(rank: int, world_size: int) -> list[str]:
    float8 = torch.ones(2).to(torch.float8_e4m3fn)
    whole, real = torch.ones(2, dtype=torch.int64), torch.ones(2)
    said = []
    for call in (
        lambda: dist.all_reduce(float8),
        lambda: dist.all_reduce(real, ReduceOp.BAND),
        lambda: dist.all_to_all([real, real], [whole, real]),
        lambda: dist.all_to_all([real, whole], [real, real]),
    ):
        with pytest.raises(TensorError) as caught:
            call()
        said.append(str(caught.value))
    dist.all_reduce(real)  # the group goes on
    assert real.tolist() == [2.0, 2.0]
    return said


def test_what_a_backend_cannot_do_with_a_dtype_is_no_peers_fault(ranks2: RankPool):
    for rank, said in enumerate(ranks2.run(_of_dtypes)):
        assert said[0].startswith(f"all_reduce on rank {rank} with torch.float8_e4m3fn tensors: ")
        assert said[1].startswith(f"all_reduce on rank {rank} with torch.float32 tensors: Cannot use ReduceOp.BAND")
        assert said[2].startswith(f"all_to_all on rank {rank}: input_list has tensors of torch.float32 and torch.int64")
        assert said[3].startswith(f"all_to_all on rank {rank}: tensor 1 of output_list is of torch.int64; needed: ")


BAD: dict[str, tuple[Callable[[], Any], type[FastreduceError], str]] = {
    "op": (lambda: dist.all_reduce(torch.ones(1), "sum"), SettingError, "unknown op 'sum'; allowed: ReduceOp.SUM"),
    "no op": (lambda: dist.reduce(torch.ones(1), 0, 7), SettingError, "unknown op 7"),
    "src": (lambda: dist.broadcast(torch.ones(1), 2), SettingError, "src=2 is not in the group; its ranks: 0 to 0"),
    "src that is text": (lambda: dist.broadcast(torch.ones(1), "0"), SettingError, "src='0' is not in the group"),
    "timeout": (lambda: dist.barrier(timeout=3), SettingError, "barrier on rank 0: timeout=3; allowed: a datetime"),
    "timeout beside async_op": (
        lambda: dist.barrier(async_op=True, timeout=timedelta(seconds=3)),
        SettingError,
        "barrier on rank 0: timeout= with async_op=True, which has the group's",
    ),
    "timeout of 0": (lambda: dist.barrier(timeout=timedelta(0)), SettingError, "barrier on rank 0: timeout="),
    "a group's timeout": (lambda: dist.new_group(timeout=5), SettingError, "new_group on rank 0: timeout=5; allowed: "),
    "a group's past": (lambda: dist.new_group(timeout=timedelta(-1)), SettingError, "of more than 0"),
    "ranks": (lambda: dist.new_group(0), SettingError, "new_group on rank 0: ranks=0; allowed: different ranks from 0"),
    "no ranks": (lambda: dist.new_group([None]), SettingError, "ranks=[None]; allowed"),  # type: ignore[list-item]
    "half ranks": (lambda: dist.new_group([0.5]), SettingError, "ranks=[0.5]; allowed"),  # type: ignore[list-item]
    "MPI beside gloo": (lambda: dist.new_group(backend="mpi"), SettingError, "default group is of gloo: call"),
    "dst": (lambda: dist.reduce(torch.ones(1), -1), SettingError, "dst=-1"),
    **{
        f"group of {name}": (
            lambda call=call: call("world"),
            SettingError,
            f"{name} on rank 0: group='world'; allowed: ",
        )
        for name, call in {
            "all_reduce": lambda group: dist.all_reduce(torch.ones(1), group=group),
            "barrier": lambda group: dist.barrier(group),
            "bcast_list_": lambda group: dist.bcast_list_([torch.ones(1)], group),
            "get_rank": lambda group: dist.get_rank(group),
            "get_world_size": lambda group: dist.get_world_size(group),
            "destroy_process_group": lambda group: dist.destroy_process_group(group),
        }.items()
    },
    "itself": (lambda: dist.send(torch.ones(1), 0), SettingError, "dst=0 is this rank itself"),
    "from itself": (lambda: dist.recv(torch.ones(1), 0), SettingError, "src=0 is this rank itself"),
    "device": (lambda: dist.all_reduce(torch.ones(1, device="meta")), DeviceError, "tensor 0 is on meta"),
    "devices": (
        lambda: dist.all_gather([torch.ones(1, device="meta")], torch.ones(1)),
        DeviceError,
        "tensor 1 is on meta",
    ),
    "sparse": (lambda: dist.all_reduce(torch.ones(1).to_sparse()), TensorError, "sparse"),
    "no tensor": (lambda: dist.all_reduce([1.0]), TensorError, "a list"),
    "too many": (
        lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1)),
        TensorError,
        "2 tensors for a group of 1",
    ),
    "shape": (lambda: dist.all_gather([torch.ones(2)], torch.ones(1)), TensorError, "(2,), torch.float32; needed: "),
    "dtype": (lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1).int()]), TensorError, "int32; needed: "),
    "no list": (lambda: dist.gather(torch.ones(1)), SettingError, "gather_list is None; rank 0 passes one"),
    "lists": (lambda: dist.all_to_all([], [torch.ones(1)]), TensorError, "output_list has 0 tensors"),
    "bool average": (lambda: dist.all_reduce(torch.ones(1).bool(), ReduceOp.AVG), TensorError, "bool"),
    "axis": (
        lambda: functional.reduce_scatter_sum(torch.ones(3), axis=1),
        TensorError,
        "reduce_scatter_sum on rank 0: axis 1 of a tensor of shape (3,); allowed: -1 to 0",
    ),
    "axis of none": (lambda: functional.all_gather(torch.ones(())), TensorError, "shape (); allowed: none"),
    "axis that is text": (
        lambda: functional.gather(torch.ones(1), axis="0"),
        TensorError,
        "gather on rank 0: axis '0' of",
    ),
    "concat_axis": (
        lambda: functional.all_to_all(torch.ones(1), concat_axis=3),
        TensorError,
        "all_to_all on rank 0: axis 3 of a tensor of shape (1,); allowed: -1 to 0",
    ),
    "None for a list": (lambda: dist.all_gather(None, torch.ones(1)), TensorError, "None is no list of tensors"),
    "number for a list": (
        lambda: dist.gather(torch.ones(1), 3),
        TensorError,
        "gather on rank 0: 3 is no list of tensors",
    ),
    "lists that are none": (lambda: dist.all_to_all(None, [torch.ones(1)]), TensorError, "None is no list of tensors"),
    "root": (lambda: functional.gather(torch.ones(1), dst=4), SettingError, "dst=4"),
    "nothing": (lambda: functional.scatter(None), SettingError, "None on the rank that it comes from"),
    "array": (lambda: functional.all_reduce_sum([1.0]), TensorError, "a list, not a torch tensor"),
    "remote": (lambda: dist.remote_send(torch.ones(1), 0), SettingError, "remote_send on rank 0: dest_rank=0"),
    "list src": (lambda: dist.bcast_list_([torch.ones(1)], src=3), SettingError, "bcast_list_ on rank 0: src=3"),
    "method": (lambda: dist.make_allreduce_cb("max"), SettingError, "'max'; allowed: mean, sum"),
    "size": (lambda: dist.make_allreduce_cb(bucket_bytes="1"), SettingError, "bucket_bytes='1'; allowed: a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_an_error_that_names_call_and_rank(group_of_one: None, case: str):
    call, kind, says = BAD[case]
    with pytest.raises(kind) as caught:
        call()
    assert says in str(caught.value)
    assert "rank 0" in str(caught.value) or case in ("method", "size")


def test_one_process_alone_runs_the_same_code(group_of_one: None):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)
    tensor = torch.ones(2)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        dist.all_reduce(tensor, op)
    dist.broadcast(tensor, src=0)
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, tensor)
    dist.reduce_scatter(tensor, gathered)
    dist.barrier()
    assert tensor.tolist() == [1.0, 1.0]
    dist.bcast_list_([tensor])
    for name in functional.__all__:
        if name.startswith("remote_"):
            continue
        leaf = torch.ones(2, 2, requires_grad=True)
        getattr(functional, name)(leaf).sum().backward()
        assert leaf.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]], name
    model = dist.DistributedDataParallel(nn.Linear(2, 1), device_ids=[None], find_unused_parameters=True)
    model(tensor[None]).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]


def _tags(rank: int, world_size: int) -> list[str]:
    call = dist.recv if rank else dist.send
    return [message(lambda tag=tag: call(torch.ones(1), 1 - rank, tag=tag)) for tag in ("a", -1, 1 << 31)]


def test_a_tag_that_is_none_is_no_peers_fault(ranks2: RankPool):
    for rank, said in enumerate(ranks2.run(_tags)):
        names = [f"SettingError: {('send', 'recv')[rank]} on rank {rank}: tag={tag}" for tag in ("'a'", -1, 1 << 31)]
        assert said == [f"{name}; allowed: 0 to 2147483647" for name in names]
