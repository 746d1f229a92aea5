"""Sparse gradients on real ranks, beside torch's class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fastreduce import hooks, transports
from fastreduce.errors import MismatchError
from fastreduce.reduction.sparse import average
from tests.support import tolerances
from tests.support.models import WORDS, Words, assert_same_bits, word_indices, wrap


def _grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_dense().clone() for n, p in model.named_parameters()}


def _train(kind: str, rank: int, optimizer: Any, bags: Any, **options: Any) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    ddp = wrap(kind, Words(), **options)
    dense, seen = optimizer(ddp), []
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(word_indices(rank, step + 50), bags=bags(rank, step)).sum().backward()
        ddp(word_indices(rank, step), bags=bags(rank, step)).sum().backward()
        seen.append(
            {n: None if p.grad is None else p.grad.to_dense().clone() for n, p in ddp.module.named_parameters()}
        )
        assert ddp.module.words.weight.grad.is_sparse
        dense.step()
        seen.append(copy.deepcopy(dict(ddp.module.named_parameters())))
    return seen


class Both:
    """SparseAdam for the embeddings, SGD for the rest."""

    def __init__(self, ddp: Any) -> None:
        self.sparse = torch.optim.SparseAdam([ddp.module.words.weight, ddp.module.bags.weight], lr=0.5)
        self.dense = torch.optim.SGD(ddp.module.out.parameters(), lr=0.5)

    def step(self) -> None:
        for optimizer in (self.sparse, self.dense):
            optimizer.step()


def _sgd(ddp: Any) -> Any:
    return torch.optim.SGD(ddp.parameters(), lr=0.5)


def _still(ddp: Any) -> Any:
    """Parameters stay the small whole numbers that they are."""
    return torch.optim.SGD(ddp.parameters(), lr=0.0)


def _same_as_torch(rank: int, world_size: int, optimizer: Any, options: dict[str, Any]) -> None:
    ours = _train("ours", rank, optimizer, lambda *_: True, **options)
    for step, (a, b) in enumerate(zip(ours, _train("torch", rank, optimizer, lambda *_: True, **options), strict=True)):
        assert_same_bits(a, b, f"rank {rank}, record {step}")


@pytest.mark.parametrize(
    ("optimizer", "views"),
    [
        pytest.param(_sgd, False, marks=pytest.mark.long),
        (_sgd, True),
        (Both, False),
        pytest.param(Both, True, marks=pytest.mark.long),
    ],
)
def test_same_bits_as_torch(ranks2: Any, optimizer: Any, views: bool):
    ranks2.run(_same_as_torch, optimizer, {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-4})


def test_same_bits_as_torch_on_three_ranks_where_no_sum_rounds(ranks3: Any):
    ranks3.run(_same_as_torch, _still, {})


def _used_by_some(rank: int, step: int) -> bool:
    return rank == 0 and step != 1


def _unused(rank: int, world_size: int) -> None:
    sparse = _train("ours", rank, _still, _used_by_some)
    assert sparse[2]["bags.weight"] is None
    for step, (a, b) in enumerate(zip(sparse, _dense(rank), strict=True)):
        assert_same_bits(a, b, f"rank {rank}, record {step}")


def _dense(rank: int) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = Words()
    model.words.sparse = model.bags.sparse = False
    ddp = wrap("torch", model, find_unused_parameters=True)
    optimizer, seen = _still(ddp), []
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(word_indices(rank, step + 50), bags=_used_by_some(rank, step)).sum().backward()
        ddp(word_indices(rank, step), bags=_used_by_some(rank, step)).sum().backward()
        seen.append(_grads(model))
        optimizer.step()
        seen.append(copy.deepcopy(dict(model.named_parameters())))
    return seen


def test_unused_on_one_rank_or_on_all_is_as_with_dense_gradients(ranks2: Any):
    ranks2.run(_unused)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too: its gradient is dense where both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)

    def forward(self, indices: Tensor, tied: bool) -> Tensor:
        x = self.words(indices)
        return x @ self.words.weight.t() if tied else x


def _tied(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    model = Tied()
    ddp = wrap("ours", model)
    ddp(word_indices(rank, 0), tied=rank == 1).sum().backward()
    grad: Any = model.words.weight.grad
    assert not grad.is_sparse
    model.words.weight.grad = None
    model(word_indices(rank, 0), tied=rank == 1).sum().backward()
    local: Any = model.words.weight.grad
    mine = local.to_dense() / world_size
    dist.all_reduce(mine)
    assert_same_bits(grad, mine, f"rank {rank}")
    return grad


def test_dense_on_one_rank_is_dense_on_all(ranks2: Any):
    one, two = ranks2.run(_tied)
    assert_same_bits(one, two, "rank 0 against rank 1")


def _only_sparse(rank: int, world_size: int, compression: str) -> list[list[float]]:
    model = nn.Embedding(4, 1, sparse=True)
    ddp = wrap("ours", model, compression=compression)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 3])).sum().backward()
    return model.weight.grad.to_dense().tolist()


@pytest.mark.parametrize("compression", ["none", "int8:error_feedback"])
def test_a_model_with_sparse_gradients_only(ranks2: Any, compression: str):
    assert ranks2.run(_only_sparse, compression) == [[[0.5], [0.5], [0.0], [1.0]]] * 2


def _join(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    seen = []
    for kind in ("torch", "ours"):
        ddp = wrap(kind, Words())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-12)
        with ddp.join():
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                ddp(word_indices(rank, step)).sum().backward()
                optimizer.step()
        seen.append([p.detach().clone() for p in ddp.parameters()])
    return seen[0] + seen[1]


def test_join_with_uneven_inputs(ranks2: Any):
    for found in ranks2.run(_join):
        half = len(found) // 2
        for torchs, ours in zip(found[:half], found[half:], strict=True):
            assert_same_bits(ours, torchs, "ours against torch")


def _breaks(rank: int, world_size: int) -> bool:
    model = Words()
    ddp = wrap("ours", model)
    ddp(word_indices(rank, 0)).sum().backward()
    handle = None
    if rank == 1:

        def boom(_: Tensor) -> None:
            raise ValueError("boom")

        handle = model.out.weight.register_hook(boom)
        with pytest.raises(ValueError, match="boom"):
            ddp(word_indices(rank, 1)).sum().backward()
        handle.remove()
    else:
        ddp(word_indices(rank, 1)).sum().backward()
    broken = bool(model.words.weight.grad.to_dense().isnan().any())
    ddp.zero_grad()
    ddp(word_indices(rank, 2)).sum().backward()
    assert not model.words.weight.grad.to_dense().isnan().any()
    return broken


def test_a_broken_backward_is_nan_on_the_others_and_the_next_one_is_good(ranks2: Any):
    assert ranks2.run(_breaks)[0]


def _stock(rank: int, world_size: int, compression: str) -> list[float]:
    torch.manual_seed(0)
    seen = []
    for hook in (None, hooks.compress):
        model = Words()
        ddp = wrap("torch", model)
        if hook is not None:
            ddp.register_comm_hook(hooks.CompressState(compression), hook)
        ddp(word_indices(rank, 0)).sum().backward()
        seen.append({n: p.grad.to_dense() for n, p in model.named_parameters()})
    return [float((seen[1][n] - g).abs().max() / g.abs().max()) for n, g in seen[0].items()]


def test_our_hook_in_torchs_class(ranks2: Any):
    for errors in ranks2.run(_stock, "fp16"):
        assert errors[:2] == [0.0, 0.0] and max(errors) <= 2 * tolerances.U[torch.float16]


def _own_hook(rank: int, world_size: int) -> None:
    seen = []
    for kind in ("torch", "ours"):
        torch.manual_seed(0)
        model = Words()
        ddp = wrap(kind, model)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        ddp(word_indices(rank, 0)).sum().backward()
        seen.append({n: p.grad.to_dense() for n, p in model.named_parameters()})
    assert_same_bits(seen[1], seen[0], f"rank {rank}")


def test_a_users_hook_beside_sparse_gradients(ranks2: Any):
    ranks2.run(_own_hook)


def test_several_sparse_dimensions_and_no_rows():
    alone = transports.LocalTransport()
    two = torch.eye(3).to_sparse()
    empty = torch.zeros(4, 3).to_sparse(1)
    averages = average(alone, [two, empty, None, None], [True, True, True, False], [two, empty, empty, two], 1)
    assert [None if a is None else a.to_dense().tolist() for a in averages] == [
        torch.eye(3).tolist(),
        torch.zeros(4, 3).tolist(),
        torch.zeros(4, 3).tolist(),
        None,
    ]


def _in_either_order(rank: int, world_size: int, kind: str) -> Tensor:
    """The average for a parameter that lies transposed, of a gradient as it lies and one that is sparse, or none."""
    parameter = torch.zeros(4, 3).t()
    numbers = torch.arange(12.0).view(3, 4)
    gradient = {"sparse": numbers.to_sparse(1), "none": None}[kind] if rank else parameter + numbers
    transport = transports.make_transport(dist.group.WORLD, torch.device("cpu"))
    (found,) = average(transport, [gradient], [gradient is not None], [parameter], world_size)
    transport.close()
    assert found is not None
    return found


@pytest.mark.parametrize(("kind", "times"), [("sparse", 1.0), ("none", 0.5)])
def test_elements_are_added_to_their_own_however_gradients_lie(ranks2: Any, kind: str, times: float):
    for found in ranks2.run(_in_either_order, kind):
        assert_same_bits(found, torch.arange(12.0).view(3, 4) * times)


def _wrapped_apart(rank: int, world_size: int) -> str:
    with pytest.raises(MismatchError) as raised:
        wrap("ours", nn.Embedding(5, 2, sparse=rank == 1))
    return str(raised.value)


def test_ranks_that_differ_in_what_is_sparse_are_told_so(ranks2):
    one, other = ranks2.run(_wrapped_apart)
    assert one == other and "parameter 'weight'" in one and ", which is sparse" in one
