"""fp16 from one end of FP32's range to the other, on real ranks: what overflowed and what became zero does neither."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastreduce
from fastreduce import hooks
from tests.support import tolerances
from tests.support.ranks import RankPool

from .cases import assert_same_bits

SETTINGS = ["fp16", "fp16:accumulate=wire"]


def gradients(rank: int, kind: str) -> list[Tensor]:
    """What one rank has, in tensors of several sizes and one that is FP64."""
    generator = torch.Generator().manual_seed(10 * rank + 1)
    shapes = [(1,), (3, 7), (1000,), (130, 5), (0,)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made.append(torch.randn(200, generator=generator, dtype=torch.float64))
    for tensor in made:
        if kind == "one rank's spike" and rank == 0 and tensor.numel():
            tensor.view(-1)[0] = 70_000.0
        if kind == "small":
            tensor.mul_(2e-8)
        if kind == "smallest":
            tensor.mul_(1e-40)
        if kind == "at the end":
            tensor.fill_(3e38)
        if kind == "60,000":
            tensor.fill_(60_000.0)
        if kind == "from end to end":
            tensor.mul_(10.0 ** (30 * (rank - 1)))
    return made


KINDS = ["ordinary", "one rank's spike", "small", "smallest", "at the end", "60,000", "from end to end"]


def _averages(rank: int, world_size: int, setting: str, backend: str) -> dict[str, list[Tensor]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTREDUCE_KERNELS", backend)
        for kind in KINDS:
            found[kind] = gradients(rank, kind)
            fastreduce.all_reduce_gradients(found[kind], setting)
    return found


@pytest.mark.parametrize(
    "setting", [*SETTINGS, "bf16:accumulate=wire", "bf16", pytest.param("none:accumulate=fp32", marks=pytest.mark.long)]
)
def test_averages_are_right_wherever_gradients_lie(ranks3: RankPool, setting: str):
    numba, plain = (ranks3.run(_averages, setting, backend) for backend in ("numba_cpu", "reference"))
    for kind in KINDS:
        if kind in ("smallest", "from end to end") and not setting.startswith("fp16"):
            continue
        sources = [gradients(rank, kind) for rank in range(3)]
        for i, grads in enumerate(zip(*sources, strict=True)):
            bound = tolerances.error_bound(setting, list(grads)).view(grads[0].shape)
            exact = torch.stack([grad.double() for grad in grads]).mean(0)
            for rank, row in enumerate(numba):
                error = (row[kind][i].double() - exact).abs()
                assert bool((error <= bound).all()), f"{kind}, tensor {i}, rank {rank}: {error.max()}"
                assert_same_bits(row[kind][i], numba[0][kind][i], f"{kind}, tensor {i}, rank {rank}")
                assert_same_bits(row[kind][i], plain[0][kind][i], f"{kind}, tensor {i}, reference")
            if kind in ("small", "smallest") and exact.numel() > 1:
                assert bool((numba[0][kind][i] != 0).any())


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))


def _inputs(rank: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))


def _ordinary(rank: int, world_size: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Averages under both settings and as stock DDP's hook, and this rank's own gradients."""
    local = _model()
    local(_inputs(rank)).square().sum().backward()
    own = [p.grad for p in local.parameters() if p.grad is not None]
    found: list[list[Tensor]] = []
    for setting in SETTINGS:
        for views in (False, True):
            ddp = fastreduce.DistributedDataParallel(_model(), compression=setting, gradient_as_bucket_view=views)
            ddp(_inputs(rank)).square().sum().backward()
            found.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
        stock = nn.parallel.DistributedDataParallel(_model())
        stock.register_comm_hook(hooks.CompressState(setting), hooks.compress)
        stock(_inputs(rank)).square().sum().backward()
        found.append([p.grad.clone() for p in stock.parameters() if p.grad is not None])
        grads = [grad.clone() for grad in own]
        fastreduce.all_reduce_gradients(grads, setting)
        found.append(grads)
    return own, found


def test_ordinary_gradients_have_the_bits_of_plain_fp16(ranks2: RankPool):
    """What torch makes of FP16 wires: each rank's rounded, summed in FP32, scaled, rounded; or summed in FP16."""
    rows = ranks2.run(_ordinary)
    for i, (a, b) in enumerate(zip(rows[0][0], rows[1][0], strict=True)):
        assert a.abs().max() > 2.0**-13, "an ordinary gradient"
        two_shot = ((a.half().float() + b.half().float()) * 0.5).half().float()
        wire = ((a * 0.5).half() + (b * 0.5).half()).float()
        for _, found in rows:
            for way in range(4):
                assert_same_bits(found[way][i], two_shot, f"fp16, gradient {i}, way {way}")
                assert_same_bits(found[4 + way][i], wire, f"fp16:accumulate=wire, gradient {i}, way {way}")


class Branches(nn.Module):
    """Two branches, of which an input takes one; of several dtypes; and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList([nn.Linear(20, 30), nn.Linear(20, 30)])
        self.wide = nn.Linear(30, 2).double()
        self.narrow = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        y = self.wide(self.branches[branch](x).double())
        return y.sum() + (self.narrow[:20].float() * x).sum()


def _branches(rank: int, world_size: int, setting: str, factor: float) -> dict[str, Any]:
    ddp = fastreduce.DistributedDataParallel(Branches(), compression=setting, find_unused_parameters=True)
    with ddp.no_sync():
        (ddp(_inputs(rank), 0) * factor).backward()
    (ddp(_inputs(rank + 5), rank) * factor).backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in ddp.module.named_parameters()}
    local = Branches()
    (local(_inputs(rank), 0) * factor).backward()
    (local(_inputs(rank + 5), rank) * factor).backward()
    own = {name: p.grad for name, p in local.named_parameters()}
    return {"found": found, "own": own}


@pytest.mark.parametrize(
    ("setting", "factor"),
    [
        pytest.param(setting, factor, marks=[pytest.mark.long] * (factor != of_short))
        for setting, of_short in zip(SETTINGS, (1e-9, 1e6), strict=True)
        for factor in (1e-9, 1.0, 1e6)
    ],
)
def test_models_of_several_dtypes_unused_parameters_and_no_sync(ranks2: RankPool, setting: str, factor: float):
    rows = ranks2.run(_branches, setting, factor)
    for name in rows[0]["own"]:
        owns = [row["own"][name] for row in rows]
        for row in rows:
            if name == "unused":
                assert row["found"][name] is None
                continue
            like = next(own for own in owns if own is not None)
            grads = [torch.zeros_like(like) if own is None else own for own in owns]
            exact = torch.stack([grad.double() for grad in grads]).mean(0)
            bound = tolerances.error_bound(setting, grads).view(exact.shape)
            assert bool(((row["found"][name].double() - exact).abs() <= bound).all()), name


def _resumed(rank: int, world_size: int, setting: str) -> tuple[list[Tensor], list[Tensor]]:
    def steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            (ddp(_inputs(10 * step + rank)).square().sum() * 1e-6).backward()
            optimizer.step()

    model = _model()
    ddp = fastreduce.DistributedDataParallel(model, compression=setting)
    optimizer = torch.optim.Adam(ddp.parameters(), eps=1e-16)
    steps(ddp, optimizer, 0, 3)
    states = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    steps(ddp, optimizer, 3, 6)
    again = fastreduce.DistributedDataParallel(_model(), compression=setting)
    again.load_state_dict(states[0])
    other = torch.optim.Adam(again.parameters(), eps=1e-16)
    other.load_state_dict(states[1])
    steps(again, other, 3, 6)
    return [p.detach() for p in ddp.parameters()], [p.detach() for p in again.parameters()]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_run_has_the_same_bits(ranks2: RankPool, setting: str):
    for through, resumed in ranks2.run(_resumed, setting):
        for a, b in zip(through, resumed, strict=True):
            assert_same_bits(a, b)


def _not_finite(rank: int, world_size: int, setting: str) -> list[Tensor]:
    tensor = torch.ones(300)
    if rank == 1:
        tensor[0], tensor[200], tensor[201] = torch.nan, torch.inf, 2.0
    grads = [tensor, torch.ones(10)]
    fastreduce.all_reduce_gradients(grads, setting)
    return grads


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_not_finite_arrives_so_on_every_rank_and_nothing_else(ranks2: RankPool, setting: str):
    for grads in ranks2.run(_not_finite, setting):
        assert grads[0][0].isnan() and grads[0][200].isinf()
        assert (~grads[0].isfinite()).sum() == 2 and grads[0][201] == 1.5
        assert torch.equal(grads[1], torch.ones(10))


def _learn(rank: int, world_size: int, setting: str, factor: float) -> float:
    """The loss after training on random digits-like clusters, by Adam, with the loss times `factor`."""
    torch.manual_seed(0)
    centers = torch.randn(10, 64)
    labels = torch.randint(10, (512,))
    data = centers[labels] + torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    ddp = fastreduce.DistributedDataParallel(model, compression=setting)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3, eps=1e-16)
    for step in range(60):
        batch = slice((step % 4) * 128 + rank * 64, (step % 4) * 128 + rank * 64 + 64)
        optimizer.zero_grad()
        (F.cross_entropy(ddp(data[batch]), labels[batch]) * factor).backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(data), labels).item()


@pytest.mark.parametrize("factor", [*(pytest.param(factor, marks=pytest.mark.long) for factor in (1.0, 1e-5)), 1e-6])
def test_training_with_a_small_loss_learns_as_it_does_uncompressed(ranks2: RankPool, factor: float):
    wanted, _ = ranks2.run(_learn, "none", factor)
    assert wanted < 0.2, "there is something to learn, and it is learned"
    for setting in SETTINGS:
        found, _ = ranks2.run(_learn, setting, factor)
        assert abs(found - wanted) <= tolerances.SMALL_LOSS * wanted, setting
