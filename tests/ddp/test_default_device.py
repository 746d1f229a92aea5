"""With another default device than the CPU, what ranks tell each other lies on the CPU: averages have the same bits.

A tensor on meta has no memory: over shared memory a rank that reads one ends.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import fastreduce
import fastreduce.distributed as dist
from fastreduce.distributed import functional
from fastreduce.errors import DeviceError
from fastreduce.transports import ShmTransport
from tests.support.models import SETTINGS, Words, assert_same_bits, batch, grads_of, mlp, word_indices, wrap
from tests.support.ranks import RankPool

LOW_RANK = ["powersgd:rank=2,min_compression_rate=1", "topk:ratio=0.1,min_numel=1"]


def _elsewhere(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.device("meta") if on else contextlib.nullcontext()


def _train(rank: int, world_size: int, setting: str, transport: str | None, elsewhere: bool) -> list[Any]:
    torch.manual_seed(0)
    model, inputs = mlp(), [batch(rank, step, 4, 20) for step in range(3)]
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[Any]()
    with _elsewhere(elsewhere):
        ddp = wrap("ours", model, compression=setting, transport=transport, bucket_cap_mb=0.004)
        for each in inputs:
            optimizer.zero_grad()
            ddp(each).square().mean().backward()
            seen += [ddp.clip_grad_norm_(0.5), grads_of(model)]
            optimizer.step()
    return [*seen, dict(model.named_parameters())]


def _train_on_both(rank: int, world_size: int, setting: str, transport: str | None) -> None:
    found, expected = (_train(rank, world_size, setting, transport, elsewhere) for elsewhere in (True, False))
    assert_same_bits(found, expected, f"rank {rank}, {setting} over {transport}")


PICKED = {
    ("none", "shm"),
    ("none", "gloo"),
    ("fp16", "gloo"),
    ("bf16:accumulate=wire", "shm"),
    ("int8:error_feedback", "gloo"),
    ("int4", "shm"),
    (LOW_RANK[0], "gloo"),
    (LOW_RANK[1], "shm"),
}


@pytest.mark.parametrize(
    ("setting", "transport"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in PICKED))
        for case in itertools.product([*SETTINGS, *LOW_RANK], ["shm", "gloo"])
    ],
)
def test_training_has_the_same_bits(ranks2: RankPool, setting: str, transport: str):
    ranks2.run(_train_on_both, setting, transport)


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_training_in_two_levels_has_the_same_bits(ranks21: RankPool, setting: str):
    ranks21.run(_train_on_both, setting, None)


def _other_ways(rank: int, world_size: int, folder: Path, elsewhere: bool) -> dict[str, Any]:
    """What else averages, saves or exchanges, of inputs on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)]
    net = fastreduce.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))
    uneven, words = nn.Linear(20, 4), Words()
    inputs, indices = [batch(rank, step, 4, 20) for step in range(5)], word_indices(rank, 0)
    seen: dict[str, Any] = {}
    with _elsewhere(elsewhere):
        ddp = wrap("ours", net, compression="int8:error_feedback")
        for each in inputs[:3]:
            ddp(each).square().mean().backward()
        fastreduce.save_checkpoint(folder / "snapshot.pt", model=ddp, step=3)
        ddp(inputs[3]).square().mean().backward()
        seen["step"] = fastreduce.load_checkpoint(folder / "snapshot.pt", model=ddp)["step"]
        ddp(inputs[4]).square().mean().backward()
        seen["net"] = [grads_of(net), dict(net.state_dict())]

        joining = wrap("ours", uneven)
        with joining.join():
            for each in inputs[: 2 + rank]:
                joining(each).square().mean().backward()
        seen["join"] = grads_of(uneven)

        fastreduce.all_reduce_gradients([inputs[0]], "int4:error_feedback")
        seen["one call"] = inputs[0]

        sparse = wrap("ours", words)
        sparse(indices).sum().backward()
        sparse(indices, bags=rank == 0).sum().backward()
        seen["sparse"] = {name: p.grad.to_dense() for name, p in words.named_parameters() if p.grad is not None}
    return seen


def _collectives(rank: int, world_size: int, elsewhere: bool) -> dict[str, Any]:
    """Point-to-point, values and collectives, of tensors on the CPU."""
    mine, parts = batch(rank, 7, 4, 6).requires_grad_(), [torch.zeros(4, 6) for _ in range(world_size)]
    seen: dict[str, Any] = {}
    with _elsewhere(elsewhere):
        summed = functional.all_reduce_sum(mine) * functional.all_gather(mine).sum()
        summed.sum().backward()
        seen["functional"], seen["its gradient"] = summed.detach(), mine.grad
        dist.all_gather(parts, mine.detach())
        seen["all_gather"] = parts
        if rank == 0:
            seen["sent"] = functional.remote_send(mine.detach(), 1)
        else:
            seen["received"] = functional.remote_recv(0)
        several: list[Tensor] = [part.clone() for part in parts]
        several[0] += rank
        dist.bcast_list_(several)
        seen["several"] = several
        values = {"empty": several[0][:0], "full": several[0], "text": str(rank)}
        client = dist.get_client()
        client.user_set(f"default device {elsewhere} {rank}", values)
        seen["value"] = client.user_get(f"default device {elsewhere} {1 - rank}")
        dist.barrier()
    return seen


def _on_both(rank: int, world_size: int, folder: Path) -> None:
    found, expected = (
        [_other_ways(rank, world_size, folder, elsewhere), _collectives(rank, world_size, elsewhere)]
        for elsewhere in (True, False)
    )
    assert_same_bits(found, expected, f"rank {rank}")


def test_other_ways_have_the_same_bits(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_on_both, tmp_path)


def _move(rank: int, world_size: int) -> None:
    transport, rows = ShmTransport(torch_dist.group.WORLD), torch.zeros(world_size, 3)  # type: ignore[arg-type]
    lost = rows.to("meta")
    for operation, call in (
        ("all_reduce", lambda: transport.all_reduce(lost)),
        ("all_reduce", lambda: transport.all_reduce(lost.long())),  # a dtype that goes by an all-gather
        ("all_to_all", lambda: transport.all_to_all(rows, lost)),
        ("all_to_all", lambda: transport.all_to_all(lost, rows)),
        ("all_gather", lambda: transport.all_gather(lost)),
    ):
        with pytest.raises(DeviceError, match=rf"rank {rank} of 2: {operation} over shm: .* is on meta: "):
            call()
    transport.all_reduce(rows.fill_(rank)).wait()
    assert (rows == 1).all()


def test_shared_memory_refuses_what_is_not_on_the_cpu(ranks2: RankPool):
    ranks2.run(_move)
