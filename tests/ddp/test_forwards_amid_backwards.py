"""Forwards while a backward is under way, elsewhere or around them: an error there, and right averages here."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastreduce.errors import ReducerError
from tests.support.models import assert_same_bits, batch, mlp, wrap
from tests.support.ranks import RankPool

X = torch.zeros(1, 4)


class _Layers(nn.Module):
    """The gradient of each bias is what the loss is multiplied by."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers, self._checkpointed = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), checkpointed
        for layer in self.layers:
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=True) if self._checkpointed and i > 0 else layer(x)
        return x


def _biases(ddp: Any) -> Tensor:
    return torch.stack([layer.bias.grad for layer in ddp.module.layers])


def _forward_meanwhile(rank: int, world_size: int, on_thread: bool) -> None:
    """On another thread, or in a hook of the backward that a re-entrant checkpoint runs within the whole."""
    ddp, told = wrap("ours", _Layers(checkpointed=not on_thread), bucket_cap_mb=1e-5), list[str]()

    def forward() -> None:
        with torch.enable_grad(), pytest.raises(ReducerError) as error:
            ddp(X)
        told.append(str(error.value))

    def meanwhile(_: Tensor) -> None:
        if not on_thread:
            forward()
            return
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    for step in range(4):
        ddp.zero_grad()
        loss = (rank + 1) * 2.0**step * ddp(X).sum()
        hook = ddp.module.layers[2].weight.register_hook(meanwhile if rank == 0 and step != 1 else lambda _: None)
        loss.backward()
        hook.remove()
        assert (_biases(ddp) == 2.0**step * (world_size + 1) / 2).all(), (rank, step, _biases(ddp))
    assert len(told) == (3 if rank == 0 else 0)
    assert all(text.startswith("rank 0: a forward with gradients began while") for text in told), told


@pytest.mark.parametrize("on_thread", [True, False], ids=["thread", "checkpoint"])
def test_a_forward_while_a_backward_is_under_way_elsewhere_is_an_error_and_disturbs_none(
    ranks2: RankPool, on_thread: bool
):
    ranks2.run(_forward_meanwhile, on_thread, timeout=60)


def _while_garbage_is_collected(rank: int, world_size: int) -> None:
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(3)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            _forward_meanwhile(rank, world_size, on_thread=False)
    finally:
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)


def test_nor_does_a_collection_of_garbage_while_it_is_looked_who_is_in_a_backward(ranks2: RankPool):
    """Python 3.11 read freed memory there, and mostly ended by SIGSEGV."""
    ranks2.run(_while_garbage_is_collected, timeout=100)


class _Adversarial(nn.Module):
    """Trains on inputs that a backward inside of the forward moves, as virtual adversarial training does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        moved = x.clone().requires_grad_()
        self.net(moved).square().sum().backward()
        self.net.zero_grad()
        assert moved.grad is not None
        output: Tensor = self.net(x + 0.1 * moved.grad.sign())
        return output


def _train_adversarially(rank: int, world_size: int, which: str) -> dict[str, Tensor]:
    ddp = wrap(which, _Adversarial(), bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, step, 3, 20)).square().sum().backward()
        optimizer.step()
    return dict(ddp.module.state_dict())


def test_a_backward_inside_of_the_forward_may_be_of_its_own(ranks2: RankPool):
    ours, torchs = (ranks2.run(_train_adversarially, which) for which in ("ours", "torch"))
    assert_same_bits(ours[0], torchs[0])
    assert_same_bits(ours[1], torchs[1])
