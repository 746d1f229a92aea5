"""`mixed_precision=`: low-precision forward and backward, averages in the parameters' own precision.

torch's class cannot do this on the CPU (it needs an accelerator's streams), so the oracle is written out:
every rank's gradients of a cast copy of the model, averaged in the reduction's dtype.
"""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision

from fastreduce import DistributedDataParallel, load_checkpoint, save_checkpoint
from tests.support.installed_torch import needs_streams
from tests.support.models import Breaking, assert_same_bits, batch, grads_of

pytestmark = needs_streams


class Model(nn.Module):
    """Two branches, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("shift", torch.arange(5.0))

    def forward(self, x: Tensor, second: bool) -> Tensor:
        assert {p.dtype for p in self.parameters()} == {x.dtype} == {self.shift.dtype}
        y = self.one(x) * self.fixed + self.shift
        return y + self.two(x) if second else y


def _averaged(model: nn.Module, config: Any, batches: list[tuple[Tensor, bool]], world_size: int) -> dict[str, Any]:
    """What all ranks should find in `.grad`: gradients of a cast copy, all-reduced in the dtype of the reduction."""
    low = {name: t.to(config.param_dtype) for name, t in model.named_buffers()}
    averages: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        low[name] = p.detach().to(config.param_dtype).requires_grad_(p.requires_grad)
    for x, second in batches:
        functional_call(model, low, (x.to(config.param_dtype), second)).float().square().mean().backward()
    for name, p in model.named_parameters():
        grad = low[name].grad
        used = torch.tensor(float(grad is not None))
        mine = (torch.zeros_like(p) if grad is None else grad).to(config.reduce_dtype or config.param_dtype)
        mine = mine / world_size
        dist.all_reduce(used)
        dist.all_reduce(mine)
        averages[name] = mine.float() if used > 0 else None
    return averages


def _compare(rank: int, world_size: int, config: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(copy.deepcopy(model), mixed_precision=config, bucket_cap_mb=1e-4, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(4):
        x, second = batch(rank, step, 4, 6), step > 0 and rank == 1
        optimizer.zero_grad(set_to_none=True)
        model.load_state_dict(ddp.module.state_dict())
        ddp(x, second).float().square().mean().backward()
        expected = _averaged(model, config, [(x, second)], world_size)
        assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, step {step}")
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
        optimizer.step()


DTYPES = [(torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(
    ("low", "reduced", "views"),
    [
        pytest.param(*pair, views, marks=[pytest.mark.long] * (views == i % 2))
        for i, pair in enumerate(DTYPES)
        for views in (False, True)
    ],
)
def test_averages_are_those_of_a_cast_model(ranks2: Any, low: torch.dtype, reduced: torch.dtype | None, views: bool):
    config = _MixedPrecision(param_dtype=low, reduce_dtype=reduced, buffer_dtype=low)
    ranks2.run(_compare, config, {"gradient_as_bucket_view": views})


BF16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


def _accumulate(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Model()
    ddp = DistributedDataParallel(copy.deepcopy(model), mixed_precision=BF16)
    for _ in range(3):
        ddp.zero_grad()
        inputs = [(batch(rank, i, 4, 6), i == 0) for i in range(3)]
        for x, second in inputs[:2]:
            with ddp.no_sync():
                ddp(x, second).float().square().mean().backward()
        assert ddp.module.one.weight.grad.dtype is torch.bfloat16
        ddp(*inputs[2]).float().square().mean().backward()
        assert_same_bits(grads_of(ddp.module), _averaged(model, BF16, inputs, world_size), f"rank {rank}")


def test_micro_steps_are_accumulated_and_averaged_once(ranks2: Any):
    ranks2.run(_accumulate)


def _evaluate(rank: int, world_size: int) -> list[str]:
    ddp = DistributedDataParallel(Model(), mixed_precision=BF16)
    before = copy.deepcopy(ddp.module.state_dict())
    with torch.no_grad():
        out = ddp(torch.ones(2, 6), True)
    assert_same_bits(ddp.module.state_dict(), before, "after an evaluation")
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    return [str(out.dtype)]


def test_an_evaluation_leaves_parameters_in_their_own_precision(ranks2: Any):
    assert ranks2.run(_evaluate) == [["torch.bfloat16"]] * 2


def _load_after_broken(rank: int, world_size: int, folder: Path) -> None:
    model = Breaking()
    ddp = DistributedDataParallel(model, mixed_precision=BF16, bucket_cap_mb=1e-6)
    saved = {name: tensor + 1 / 3 for name, tensor in model.state_dict().items()}

    def step(boom: bool) -> None:
        ddp.zero_grad()
        loss = ddp(batch(rank, 0, 3, 4), boom=boom).float().sum()
        with pytest.raises(ValueError, match="boom") if boom else nullcontext():
            loss.backward()

    step(False)
    step(rank == 0)
    ddp.load_state_dict(saved)
    step(False)
    assert_same_bits(model.state_dict(), saved, f"rank {rank}, loaded by the wrapper")
    step(rank == 1)
    save_checkpoint(folder / "snapshot.pt", model=ddp)
    assert_same_bits(torch.load(folder / "snapshot.pt")["model"], saved, f"rank {rank}, saved")
    step(rank == 0)
    load_checkpoint(folder / "snapshot.pt", model=ddp)
    step(False)
    assert_same_bits(model.state_dict(), saved, f"rank {rank}, loaded from a snapshot")
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_what_is_loaded_and_saved_after_a_backward_that_raised_is_in_the_parameters_own_precision(
    ranks2: Any, tmp_path: Path
):
    ranks2.run(_load_after_broken, tmp_path, timeout=60)


def _load_after_forward(rank: int, world_size: int, folder: Path) -> None:
    """Such as where the loss was not finite, and the step was left out."""
    model = Breaking()
    ddp = DistributedDataParallel(model, mixed_precision=BF16)
    save_checkpoint(folder / "snapshot.pt", model=ddp)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    ddp(batch(rank, 0, 3, 4), boom=False)
    load_checkpoint(folder / "snapshot.pt", model=ddp)
    ddp(batch(rank, 0, 3, 4), boom=False).float().sum().backward()
    assert_same_bits(model.state_dict(), saved, f"rank {rank}")


def test_what_is_loaded_after_a_forward_that_no_backward_followed_stays(ranks2: Any, tmp_path: Path):
    ranks2.run(_load_after_forward, tmp_path, timeout=60)


def _saved_at_every_moment(rank: int, world_size: int, folder: Path) -> list[str]:
    """Names of the moments at which a state was not that of the parameters' own precision."""
    model = Breaking()
    ddp = DistributedDataParallel(model, mixed_precision=BF16, bucket_cap_mb=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1 / 3)
    own, wrong = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[str]()

    def look(moment: str, saves: bool = True) -> None:
        states = {
            "wrapper": {name.removeprefix("module."): t for name, t in ddp.state_dict().items()},
            "module": model.state_dict(),
            "layers": {f"{name}.{key}": t for name, m in model.named_children() for key, t in m.state_dict().items()},
        }
        if saves:
            save_checkpoint(folder / "snapshot.pt", model=ddp)
            states["snapshot"] = torch.load(folder / "snapshot.pt")["model"]
        for kind, state in states.items():
            try:
                assert_same_bits(state, own)
            except AssertionError:
                wrong.append(f"{moment}: {kind}")

    x = batch(rank, 0, 3, 4)
    look("before the first forward")
    for step in range(2):
        loss = ddp(x, boom=False).float().sum()
        look(f"{step}: between forward and backward")
        handle = model.a.weight.register_hook(lambda _, step=step: look(f"{step}: in a hook", saves=False))
        loss.backward()
        handle.remove()
        look(f"{step}: behind backward")
        with ddp.no_sync():
            loss = ddp(x, boom=False).float().sum()
            look(f"{step}: between the two in no_sync")
            loss.backward()
        look(f"{step}: behind a local backward")
        loss = ddp(x, boom=rank == 1).float().sum()
        with pytest.raises(ValueError, match="boom") if rank == 1 else nullcontext():
            loss.backward()
        look(f"{step}: behind one that raised", saves=False)
        look(f"{step}: behind one that raised, saved")
    return wrong


def test_a_state_holds_the_parameters_own_precision_at_every_moment(ranks2: Any, tmp_path: Path):
    assert ranks2.run(_saved_at_every_moment, tmp_path, timeout=60) == [[], []]


def _loaded_at_every_moment(rank: int, world_size: int, moment: str, part: str) -> None:
    model = Breaking()
    ddp = DistributedDataParallel(model, mixed_precision=BF16, bucket_cap_mb=1e-6)
    saved = {name: tensor + 1 / 3 for name, tensor in model.state_dict().items()}
    x = batch(rank, 0, 3, 4)
    ddp(x, boom=False).float().sum().backward()
    if moment == "forward":
        ddp(x, boom=False)
    elif moment == "local":
        with ddp.no_sync():
            ddp(x, boom=False).float().sum().backward()
    elif moment == "raised":
        with pytest.raises(ValueError, match="boom"):
            ddp(x, boom=True).float().sum().backward()
    if part == "module":
        model.load_state_dict(saved)
    else:
        for name, layer in model.named_children():
            layer.load_state_dict({key: saved[f"{name}.{key}"] for key in layer.state_dict()})
    for _ in range(2):
        assert_same_bits(model.state_dict(), saved, f"rank {rank}, behind {moment}")
        ddp.zero_grad()
        ddp(x, boom=False).float().sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("moment", "part"),
    [
        ("forward", "module"),
        pytest.param("forward", "layers", marks=pytest.mark.long),
        pytest.param("local", "module", marks=pytest.mark.long),
        ("local", "layers"),
        ("raised", "module"),
        pytest.param("raised", "layers", marks=pytest.mark.long),
    ],
)
def test_what_a_module_inside_loads_stays(ranks2: Any, moment: str, part: str):
    ranks2.run(_loaded_at_every_moment, moment, part, timeout=60)


def _data_of_another(rank: int, world_size: int) -> None:
    model = Breaking()
    ddp = DistributedDataParallel(model, mixed_precision=BF16)
    x = batch(rank, 0, 3, 4)
    ddp(x, boom=False).float().sum().backward()
    averaged = {name: p.detach() + 1 / 3 for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = averaged[name]
    ddp(x, boom=False).float().sum().backward()
    assert_same_bits(dict(model.state_dict()), averaged, f"rank {rank}")


def test_memory_that_a_user_gives_a_parameter_between_two_steps_stays_its_own(ranks2: Any):
    ranks2.run(_data_of_another)


def _evaluated_between(rank: int, world_size: int) -> None:
    """Targets of the model's own (`torch.no_grad`) between a forward and its backward, as in self-training."""
    model = Model()
    ddp = DistributedDataParallel(model, mixed_precision=BF16)
    x = batch(rank, 0, 4, 6)
    for frozen in (False, True, False):
        model.one.requires_grad_(not frozen)
        ddp.zero_grad()
        ddp(x, True).float().square().mean().backward()
        expected = grads_of(model)
        ddp.zero_grad()
        loss = ddp(x, True).float().square().mean()
        with torch.no_grad():
            ddp(x, True)
        loss.backward()
        assert_same_bits(grads_of(model), expected)
        assert (model.one.weight.grad is None) == frozen
        with torch.no_grad():
            ddp(x, True)
        assert model.one.weight.dtype is torch.float32


def test_an_evaluation_between_forward_and_backward_leaves_what_backward_needs(ranks2: Any):
    ranks2.run(_evaluated_between)


def _local_for_good(rank: int, world_size: int) -> Tensor:
    ddp = DistributedDataParallel(Model(), mixed_precision=BF16)
    ddp(torch.ones(2, 6), True).float().sum().backward()
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    (ddp(torch.ones(2, 6), True).float().sum() * (rank + 1)).backward()
    return ddp.module.one.bias.grad  # type: ignore[no-any-return]


def test_hooks_that_were_removed_stay_removed(ranks2: Any):
    one, two = ranks2.run(_local_for_good)
    assert_same_bits(two, 2 * one)


def _join_compressed(rank: int, world_size: int, compression: str) -> list[Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(), mixed_precision=BF16, compression=compression)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    losses = []
    with ddp.join():
        for step in range(20 + 5 * rank):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step % 5, 4, 6), True).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("compression", ["none", "int8:error_feedback"])
def test_ranks_that_join_end_with_the_same_bits(ranks2: Any, compression: str):
    one, two = ranks2.run(_join_compressed, compression)
    assert_same_bits(dict(enumerate(one)), dict(enumerate(two)), "rank 0 against rank 1")


def _alone(rank: int, world_size: int) -> torch.dtype:
    group = dist.new_group([rank], use_local_synchronization=True)
    ddp = DistributedDataParallel(Model(), mixed_precision=BF16, process_group=group)
    for _ in range(2):
        ddp(torch.ones(2, 6), True).float().sum().backward()
    return ddp.module.one.weight.grad.dtype


def test_one_rank_alone_casts_too(ranks2: Any):
    assert ranks2.run(_alone) == [torch.float32] * 2


def _deleted(rank: int, world_size: int) -> bool:
    module = Model()
    ddp = DistributedDataParallel(module, mixed_precision=BF16)
    for _ in range(2):
        ddp(torch.ones(2, 6), True).float().sum().backward()
    before, gone = grads_of(module), weakref.ref(ddp)
    del ddp
    gc.collect()
    module.load_state_dict(module.state_dict())  # hooks that are left do nothing
    assert module.one(torch.ones(2, 6)).dtype is torch.float32
    assert_same_bits(grads_of(module), before)
    return gone() is None


def test_a_module_does_not_keep_its_wrapper_alive(ranks2: Any):
    assert all(ranks2.run(_deleted))


def _forward_of_a_copy(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(Model(), mixed_precision=BF16)
    copied = copy.deepcopy(ddp.module)
    copied.shift = copied.shift.float()
    assert copied(torch.ones(2, 6), True).dtype is torch.float32
    assert {p.dtype for p in ddp.module.parameters()} == {torch.float32}
    ddp(torch.ones(2, 6), True).float().sum().backward()
    assert ddp.module.one.weight.grad.dtype is torch.float32


def test_a_copy_of_the_module_is_in_its_own_precision(ranks2: Any):
    ranks2.run(_forward_of_a_copy)


class Words(nn.Module):
    """An embedding whose gradient is sparse, or dense where its weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, indices: Tensor | None, tied: bool = False) -> Tensor:
        y = self.out(x if indices is None else self.words(indices) + x)
        return y @ self.words.weight.t() if tied else y


def _words(rank: int, world_size: int, how: str) -> None:
    """Averages of the embedding beside those of BF16 rows that are added up by hand."""
    torch.manual_seed(0)
    model = Words()
    ddp = DistributedDataParallel(model, mixed_precision=BF16, find_unused_parameters=True)
    with ddp.join() if how == "joined" else nullcontext():
        for step in range(1 + rank if how == "joined" else 2):
            bring = {"used": [0, 1], "joined": range(step, 2)}.get(how, [0])
            expected = torch.zeros(10, 4, dtype=torch.bfloat16)
            for r in bring:
                low = copy.deepcopy(model).bfloat16()
                low(batch(r, step, 3, 4).bfloat16(), _indices(r), how == "tied").float().square().sum().backward()
                expected += low.words.weight.grad.to_dense() / world_size
            ddp.zero_grad()
            indices = _indices(rank) if rank in bring else None
            ddp(batch(rank, step, 3, 4), indices, how == "tied" and rank == 0).float().square().sum().backward()
            grad: Any = model.words.weight.grad
            assert grad.dtype is torch.float32 and grad.is_sparse is (how != "tied")
            assert_same_bits(grad.to_dense(), expected.float(), f"rank {rank}, step {step}")


def _indices(rank: int) -> Tensor:
    return torch.tensor([1, 5, 2 + rank])


@pytest.mark.parametrize("how", ["used", "unused", "tied", "joined"])
def test_sparse_gradients_travel_in_low_precision_also_from_ranks_without_any(ranks2: Any, how: str):
    ranks2.run(_words, how)


def test_an_evaluation_in_inference_mode_comes_between_two_steps(alone: None):
    """Also as the first forward."""
    ddp = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    for _ in range(3):
        with torch.inference_mode():
            assert ddp(torch.ones(1, 2)).dtype is torch.bfloat16
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        assert torch.equal(ddp.module.weight.grad, torch.ones(2, 2))


def test_an_evaluation_between_a_forward_and_its_backward_leaves_the_low_copy(alone: None):
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), mixed_precision=BF16)
    for _ in range(2):
        loss = ddp(torch.ones(1, 2)).float().sum()
        with torch.no_grad():
            ddp(torch.ones(1, 2))
        assert ddp.module[0].weight.dtype is torch.bfloat16
        loss.backward()
        assert ddp.module[0].weight.dtype is torch.float32


def test_an_optimizer_that_is_loaded_behind_a_forward_keeps_its_precision(alone: None, tmp_path: Path):
    ddp = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=BF16)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    (ddp(torch.ones(1, 2)).float().sum() / 3).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    save_checkpoint(tmp_path / "a", optimizer=optimizer, model=ddp)
    ddp(torch.ones(1, 2))
    load_checkpoint(tmp_path / "a", optimizer=optimizer, model=ddp)
    assert_same_bits(optimizer.state_dict()["state"], before["state"])
