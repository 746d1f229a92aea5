"""remote_send and remote_recv: shapes and dtypes carried, gradients through the wire, a pipeline that trains."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import fastreduce.distributed as dist
from fastreduce import SettingError, TensorError, TransportError
from fastreduce.distributed import functional, point_to_point
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(5.0),
    torch.zeros(0, 4),
    torch.arange(4.0).to(torch.bfloat16),
    torch.arange(4.0).to(torch.float16)[::2],
    torch.arange(4.0, dtype=torch.float64).requires_grad_(),
    torch.arange(5),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 4j]),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.arange(3, dtype=torch.uint8).view(1, 1, 1, 3),
    torch.full((300_000,), 7.0),
]


def _carried(rank: int, world_size: int) -> list[tuple[Tensor, bool]]:
    if rank == 0:
        for tensor in TENSORS:
            token = dist.remote_send(tensor, dest_rank=1)
            assert token.dim() == 0 and not token.item()
            if token.requires_grad:
                token.backward()
        return []
    seen = []
    for _ in TENSORS:
        came = dist.remote_recv(src_rank=0)
        if came.requires_grad:
            came.sum().backward()
        seen.append((came.detach(), came.requires_grad))
    return seen


def test_shape_dtype_and_requires_grad_come_with_the_data(ranks2: RankPool):
    _, seen = ranks2.run(_carried)
    for (came, requires_grad), sent in zip(seen, TENSORS, strict=True):
        assert_same_bits(came, sent.detach().resolve_conj().contiguous())
        assert requires_grad == sent.requires_grad


def _overwritten(rank: int, world_size: int) -> float:
    """What comes of a tensor that is overwritten once it is sent, and before the other rank receives."""
    if rank == 0:
        tensor = torch.ones(5)
        dist.remote_send(tensor, dest_rank=1)
        tensor.zero_()
        dist.barrier()
        return 0.0
    dist.barrier()
    return float(dist.remote_recv(src_rank=0).sum())


def test_what_is_sent_is_what_was_given(ranks2: RankPool):
    assert ranks2.run(_overwritten) == [0.0, 5.0]


def _after_many(rank: int, world_size: int) -> list[float]:
    group = torch_dist.new_group()
    wire = point_to_point._wires.setdefault(group, point_to_point._Wire())
    (wire.received if rank else wire.sent)[1 - rank] = 2**31 // 3 - 2  # a backend's tag has 31 bits
    seen = []
    for i in range(4):
        if rank == 0:
            x = torch.full((2,), float(i), requires_grad=True)
            dist.remote_send(x, 1, group).backward()
            assert x.grad is not None
            seen.append(float(x.grad[0]))
        else:
            came = dist.remote_recv(0, group=group)
            (came.sum() * (i + 1)).backward()
            seen.append(float(came[0]))
    return seen


def test_more_messages_than_a_tag_has_numbers(ranks2: RankPool):
    assert ranks2.run(_after_many) == [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]]


def _halves(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(1, 1).to(dtype), nn.Linear(1, 1).to(dtype), torch.randn(8, 1).to(dtype)


def _two_halves(rank: int, world_size: int) -> list[Tensor]:
    first, second, data = _halves()
    if rank == 0:
        functional.remote_send(first(data), dest_rank=1).backward()
        return [p.grad for p in first.parameters()]
    loss = second(functional.remote_recv(src_rank=0)).square().mean()
    loss.backward()
    return [p.grad for p in second.parameters()]


def test_two_linears_on_two_ranks_match_the_composed_model(ranks2: RankPool):
    first, second, data = _halves()
    second(first(data)).square().mean().backward()
    found = [grad for grads in ranks2.run(_two_halves) for grad in grads]
    expected = [p.grad for p in [*first.parameters(), *second.parameters()]]
    assert max((a - b).abs().item() for a, b in zip(found, expected, strict=True)) <= 1e-6


def _ring(rank: int, world_size: int, order: str) -> Tensor:
    """Every rank sends two messages on and receives two, then runs backward in one order or the other."""
    weight = torch.full((), rank + 1.0, requires_grad=True)
    tokens = [dist.remote_send(weight * k, (rank + 1) % world_size) for k in (1.0, 10.0)]
    came = [dist.remote_recv((rank - 1) % world_size) for _ in range(2)]
    losses = [tensor * (rank + 5.0) for tensor in came]
    if order == "reversed":
        losses, tokens = losses[::-1], tokens[::-1]
    for loss in losses:
        loss.backward()
    for token in tokens[::-1]:
        token.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_everybody_may_send_before_anybody_receives_and_gradients_come_in_any_order(ranks3: RankPool, order: str):
    for rank, grad in enumerate(ranks3.run(_ring, order)):
        assert grad.item() == 11 * ((rank + 1) % 3 + 5)


def _one_forward_one_backward(rank: int, world_size: int) -> float:
    """The next micro-batch is sent before the gradient of the one before is taken."""
    weight = torch.ones(50_000, requires_grad=True)
    if rank == 0:
        token = dist.remote_send(weight * 1.0, 1)
        for step in range(1, 6):
            following = dist.remote_send(weight * (step + 1), 1)
            token.backward()
            token = following
        token.backward()
        return float(weight.grad[0])
    for _ in range(6):
        (dist.remote_recv(0) * weight).sum().backward()
    return float(weight.grad[0])


def test_one_forward_one_backward_does_not_block(ranks2: RankPool):
    assert ranks2.run(_one_forward_one_backward) == [21.0, 21.0]


def _with_other_losses(rank: int, world_size: int) -> Tensor | None:
    leaf = torch.ones(3, requires_grad=True)
    if rank == 0:
        (dist.remote_send(leaf * 2, 1) + leaf.sum()).backward()
    else:
        came = dist.remote_recv(0)
        (came * came).sum().backward()
    return leaf.grad


def test_the_zero_can_be_added_to_another_loss(ranks2: RankPool):
    assert ranks2.run(_with_other_losses)[0].tolist() == [9.0, 9.0, 9.0]


def _second_gradients(rank: int, world_size: int) -> str:
    leaf = torch.ones(3, requires_grad=True)
    if rank == 0:
        loss = dist.remote_send(leaf**3, 1) + (leaf**3).sum()
    else:
        loss = (dist.remote_recv(0) * leaf).square().sum()
    loss.backward(create_graph=True)
    assert leaf.grad is not None
    first = leaf.grad.tolist()
    try:
        leaf.grad.sum().backward()
    except RuntimeError as error:
        return f"{first}: {error}"
    return f"{first}: no error"


def test_a_gradient_of_what_the_other_rank_sent_back_is_an_error(ranks2: RankPool):
    sent, received = ranks2.run(_second_gradients)
    assert sent == f"[9.0, 9.0, 9.0]: {point_to_point.NO_SECOND}"
    assert received == "[2.0, 2.0, 2.0]: no error"


def _without_gradients(rank: int, world_size: int) -> bool:
    if rank == 0:
        with torch.no_grad():
            return dist.remote_send(torch.ones(2, requires_grad=True), 1).requires_grad
    return dist.remote_recv(0).requires_grad


def test_without_gradients_nothing_comes_back(ranks2: RankPool):
    assert ranks2.run(_without_gradients) == [False, False]


def _mistakes(rank: int, world_size: int) -> list[str]:
    said = []
    for call in (
        lambda: dist.remote_send(torch.ones(1), rank),
        lambda: dist.remote_recv(rank),
        lambda: dist.remote_send(torch.ones(1), 2),
        lambda: dist.remote_send([1.0], 1 - rank),
        lambda: dist.remote_send(torch.ones([1] * 14), 1 - rank),
    ):
        try:
            call()
        except (SettingError, TensorError) as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return said


def test_mistakes_name_call_and_rank(ranks2: RankPool):
    for rank, said in enumerate(ranks2.run(_mistakes)):
        to_itself, from_itself, unknown, no_tensor, too_many = said
        assert f"remote_send on rank {rank}: dest_rank={rank} is this rank itself" in to_itself
        assert f"remote_recv on rank {rank}: src_rank={rank} is this rank itself" in from_itself
        assert f"remote_send on rank {rank}: dest_rank=2 is not in the group; its ranks: 0 to 1" in unknown
        assert no_tensor.startswith(f"TensorError: remote_send on rank {rank}")
        assert "14 dimensions" in too_many and f"rank {rank}" in too_many


def _nobody_answers(rank: int, world_size: int) -> str:
    group = torch_dist.new_group([0, 1], timeout=timedelta(seconds=1))
    said = ""
    if rank == 0:
        leaf = torch.ones(1, requires_grad=True)
        try:
            dist.remote_send(leaf * 1, 1, group).backward()
        except TransportError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_gradient_that_does_not_come_is_an_error_after_the_timeout(ranks2: RankPool):
    said = ranks2.run(_nobody_answers)[0]
    assert said.startswith("the backward of remote_send on rank 0 failed")


def _in_a_group(rank: int, world_size: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 1:
        dist.remote_send(torch.full((2,), 3.0), 2, group)
    value = dist.remote_recv(1, group=group, device="cpu").tolist() if rank == 2 else None
    if rank:
        dist.destroy_process_group(group)
    dist.barrier()
    return value


def test_it_takes_a_group(ranks3: RankPool):
    assert ranks3.run(_in_a_group)[2] == [3.0, 3.0]
