"""Backwards of `torch.distributed.autograd`: their context has the averages, and `.grad` stays as it was."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fastreduce.reduction import distributed_autograd
from tests.support.models import assert_same_bits, batch, grads_of, mean_over_ranks, mlp, wrap
from tests.support.ranks import RankPool


@contextmanager
def _agent(rank: int, world_size: int, folder: Path) -> Iterator[None]:
    """An agent of `torch.distributed.rpc`, without which there is no context."""
    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)


def _backward(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What the context has, by name."""
    from torch.distributed import autograd

    with autograd.context() as context:
        autograd.backward(context, [loss()])
        found = autograd.get_gradients(context)
        return {name: found[p].to_dense().clone() for name, p in model.named_parameters()}


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(5, 20, sparse=True), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.embedding(torch.arange(len(x))) + x)
        return output


def _train(rank: int, world_size: int, folder: Path, make: Callable[[], nn.Module], views: bool) -> None:
    with _agent(rank, world_size, folder):
        ddp, alone = wrap("ours", make(), bucket_cap_mb=1e-3, gradient_as_bucket_view=views), make()
        alone.load_state_dict(ddp.module.state_dict())
        for step in range(3):
            x = batch(rank, step, 3, 20)
            alone.zero_grad()
            alone(x).square().sum().backward()
            expected = mean_over_ranks({name: p.grad.to_dense() for name, p in alone.named_parameters()})
            found = _backward(ddp.module, lambda x=x: ddp(x).square().sum())
            assert_same_bits(found, expected, f"step {step}")
            assert all(p.grad is None for p in ddp.parameters())


@pytest.mark.parametrize(("make", "views"), [(mlp, False), (mlp, True), (_Sparse, False)])
def test_gradients_of_a_context_are_averaged_in_it(
    ranks2: RankPool, tmp_path: Path, make: Callable[[], nn.Module], views: bool
):
    """Hooks told of gradients, zeros were averaged into `.grad`, and the context kept each rank's own."""
    ranks2.run(_train, tmp_path, make, views, timeout=60)


def _train_plainly(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed import autograd

    with _agent(rank, world_size, folder):
        ddp, alone = wrap("ours", mlp(), bucket_cap_mb=1e-3), mlp()
        alone.load_state_dict(ddp.module.state_dict())
        x = batch(rank, 0, 3, 20)
        alone(x).square().sum().backward()
        expected = mean_over_ranks(grads_of(alone))
        with autograd.context() as context:
            loss = ddp(x).square().sum()
            autograd.backward(context, [loss], retain_graph=True)
            ddp(x).square().sum().backward()
        assert_same_bits(grads_of(ddp.module), expected)

        ddp.zero_grad()
        loss = ddp(x).square().sum()
        with autograd.context() as context, pytest.raises(RuntimeError, match="run the forward inside of"):
            autograd.backward(context, [loss])
        ddp(x).square().sum().backward()
        assert_same_bits(grads_of(ddp.module), expected)

        ddp.zero_grad()
        with autograd.context():
            loss = ddp(x).square().sum()
        loss.backward()  # the context has ended
        assert_same_bits(grads_of(ddp.module), expected)

        ddp.zero_grad()
        if rank:  # no gradient of its own, and no error
            with ddp.join():
                pass
        else:
            with ddp.join():
                ddp(x).square().sum().backward()


def test_a_plain_backward_amid_a_context_and_a_forward_outside(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_train_plainly, tmp_path, timeout=60)


def _refused(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed import autograd

    with _agent(rank, world_size, folder):
        ddp, alone = wrap("ours", mlp(), bucket_cap_mb=1e-3, transport="gloo"), mlp()
        alone.load_state_dict(ddp.module.state_dict())
        for step in range(30):
            x = batch(rank, step, 3, 20)
            alone.zero_grad()
            ddp.zero_grad()
            alone(x).square().sum().backward()
            expected = mean_over_ranks(grads_of(alone))
            loss = ddp(x).square().sum()
            with autograd.context() as context, pytest.raises(RuntimeError, match="run the forward inside of"):
                autograd.backward(context, [loss])
            ddp(x).square().sum().backward()
            assert_same_bits(grads_of(ddp.module), expected, f"step {step}")


def test_what_a_refused_backward_has_sent_is_awaited_before_the_next_one(ranks2: RankPool, tmp_path: Path):
    """Its buckets were still on their way in the memory of the next ones."""
    ranks2.run(_refused, tmp_path, timeout=100)


def _accumulate(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed import autograd

    with _agent(rank, world_size, folder):
        ddp = wrap("ours", nn.ModuleDict({"first": nn.Linear(20, 4), "second": nn.Linear(20, 4)}))
        ddp.module.forward = lambda name, x: ddp.module[name](x)
        alone = copy.deepcopy(ddp.module)
        x = batch(rank, 0, 3, 20)
        for name in alone:
            alone[name](x).square().sum().backward()
        with autograd.context() as context:
            with ddp.no_sync():
                autograd.backward(context, [ddp("first", x).square().sum()])
            autograd.backward(context, [ddp("second", x).square().sum()])
            grads = autograd.get_gradients(context)
            found = {name: grads[p].clone() for name, p in ddp.module.named_parameters()}
        assert_same_bits(found, mean_over_ranks(grads_of(alone)))


def test_what_a_local_backward_has_left_in_the_context_is_averaged(ranks2: RankPool, tmp_path: Path):
    """It counted as thrown away, since `.grad` is None."""
    ranks2.run(_accumulate, tmp_path, timeout=60)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 4), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def _backward_twice(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed import autograd

    with _agent(rank, world_size, folder):
        ddp = wrap("ours", _Heads())
        alone = copy.deepcopy(ddp.module)
        for step in range(2):
            x = batch(rank, step, 3, 20)
            alone.zero_grad()
            sum(output.square().sum() for output in alone(x)).backward()
            with autograd.context() as context:
                for output in ddp(x):
                    autograd.backward(context, [output.square().sum()])
                grads = autograd.get_gradients(context)
                found = {name: grads[p].clone() for name, p in ddp.module.named_parameters()}
            assert_same_bits(found, mean_over_ranks(grads_of(alone)), f"step {step}")


def test_another_backward_through_the_forward_is_averaged_in_its_context(ranks2: RankPool, tmp_path: Path):
    """It left each rank its own."""
    ranks2.run(_backward_twice, tmp_path, timeout=60)


def _penalize(rank: int, world_size: int, folder: Path) -> None:
    from torch.distributed import autograd

    with _agent(rank, world_size, folder):
        ddp, alone = wrap("ours", mlp(), bucket_cap_mb=1e-3), mlp()
        alone.load_state_dict(ddp.module.state_dict())
        for step in range(3):
            x = batch(rank, step, 3, 20).requires_grad_()

            def loss(model: nn.Module, x: Tensor = x) -> Tensor:
                loss = model(x).square().sum()
                (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
                return loss * slope.square().sum()

            alone.zero_grad()
            with autograd.context() as context:
                autograd.backward(context, [loss(alone)])
                own = autograd.get_gradients(context)
                expected = mean_over_ranks({name: own[p] for name, p in alone.named_parameters()})
            assert_same_bits(_backward(ddp.module, lambda loss=loss: loss(ddp)), expected, f"step {step}")


def test_a_plain_gradient_before_leaves_the_context_known(ranks2: RankPool, tmp_path: Path):
    """The backward that follows was said to be of no context."""
    ranks2.run(_penalize, tmp_path, timeout=60)


def _unused(rank: int, world_size: int, folder: Path) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(20, 4), nn.Linear(20, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + self.sometimes(x) if rank else self.always(x)

    with _agent(rank, world_size, folder):
        ddp = wrap("ours", Sometimes())
        x = batch(rank, 0, 3, 20)
        if rank:
            _backward(ddp.module, lambda: ddp(x).square().sum())
        else:
            with pytest.raises(RuntimeError, match=r"'sometimes.*' has an average of other ranks' gradients"):
                _backward(ddp.module, lambda: ddp(x).square().sum())
        assert all(p.grad is None for p in ddp.parameters())
        torch.distributed.barrier()


def test_an_average_without_a_gradient_in_the_context_is_an_error(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_unused, tmp_path, timeout=60)


def test_grads_stay_where_a_context_has_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    """Those before it were the context's from then on."""
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    before = first.grad = torch.ones(2)
    theirs = {first: torch.zeros(2), second: torch.zeros(2, dtype=torch.bfloat16)}
    monkeypatch.setattr(distributed_autograd, "_may_be", lambda: True)
    monkeypatch.setattr(distributed_autograd, "_functions", lambda: SimpleNamespace(get_gradients=lambda _: theirs))
    reducing = distributed_autograd.gradients_of(1, [first, second], ["first", "second"], [True, True], 0)
    with pytest.raises(RuntimeError, match="dtype"), reducing:
        pytest.fail("what does not fit is in .grad")
    assert first.grad is before
    assert second.grad is None
