"""Random training programs as data: a model out of blocks, a script of forwards and backwards, and options.

`check(rank, world_size, program, setting)` runs one on real ranks three times over: under torch's class, under
ours, and without a wrapper, which tells what every rank's own gradients are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import tolerances
from tests.support.models import Grads, assert_same_bits, batch, in_memory_order, playing, wrap

WIDTH, ROWS = 6, 3  # rank 1 has a row more than rank 0, and so on


class _Short:
    """Shows only the fields that are not as by default, so that a failing example can be pasted as a test."""

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Block(_Short):
    """One residual block; `module_of` and `weight_of` are earlier blocks with which it shares."""

    kind: str
    dtype: str = "float32"
    module_of: int | None = None
    weight_of: int | None = None
    frozen: bool = False
    checkpoint: str = ""  # or "hooks", "reentrant"


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """A model and its training. In `ops` (see `playing` in models.py) block 0 is `a`, block 1 is `b` and so on."""

    blocks: tuple[Block, ...]
    ops: str
    outputs: str = "tensor"  # or "dict", "tuple"
    optimizer: str = "SGD"  # or "AdamW"
    find_unused: bool = False  # for torch's class only
    options: dict[str, Any] = field(default_factory=dict)


def synced_backwards(ops: Sequence[str]) -> list[bool]:
    """For every backward, whether it is reduced: a synchronised forward arms one reduction."""
    found, armed, depth = [], False, 0
    for op in ops:
        depth += {"(": 1, ")": -1}.get(op, 0)
        if op[0] == "f" and depth == 0:
            armed = True
        elif op[0] in "br":
            found.append(armed)
            armed = False
    return found


# Blocks


class Scaled(nn.Module):
    """Multiplies by the sum of a parameter of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sum()


class Turned(nn.Module):
    """A complex parameter with a lazily conjugated gradient, a real one with a lazily negated gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.flip = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(self.turn.conj() * (1 + 2j)).sum()
        return x * (turned + torch.complex(x[:1, 0], self.flip).conj().imag.sum())


class Product(nn.Module):
    """A product with a matrix that lies in memory in an unusual way."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).t() if dense else torch.randn(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Images(nn.Module):
    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=layout)
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, WIDTH // 2, 1).to(memory_format=self.layout)).reshape(x.shape)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x[:, 0] > 0).long() + torch.arange(len(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gru(x)[0]
        return y


class Counting(nn.Module):
    """A layer and a buffer that differs between ranks."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x[0, 0].detach()
        return self.layer(x)


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 43), nn.Linear(43, WIDTH, bias=False)),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "counting": Counting,
    "conv": lambda: Images(torch.contiguous_format),
    "channels_last": lambda: Images(torch.channels_last),
    "embedding": Words,
    "gru": Recurrent,
    "scalar": lambda: Scaled(),
    "one": lambda: Scaled(1),
    "empty": lambda: Scaled(0, 3),
    "ragged": lambda: Scaled(129),
    "transposed": lambda: Product(True),
    "strided": lambda: Product(False),
    "complex": Turned,
}
DTYPES = ("float32", "float64", "bfloat16", "float16")
FP32_ONLY = ("complex", "gru", "batchnorm")  # the others also run in FP64 and 16 bits on a CPU


class Model(nn.Module):
    """The blocks of a program, one after the other; `use` says which a forward takes."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.layers = program, nn.ModuleList()
        for block in program.blocks:
            if block.module_of is not None:
                self.layers.append(self.layers[block.module_of])
                continue
            layer = KINDS[block.kind]()
            if block.dtype != "float32":
                layer = layer.to(getattr(torch, block.dtype))
            if block.weight_of is not None:
                layer.weight = self.layers[block.weight_of].weight
            self.layers.append(layer)
        for block, layer in zip(program.blocks, self.layers, strict=True):
            if block.frozen:
                next(layer.parameters()).requires_grad_(False)

    def forward(self, x: Tensor, use: str) -> Any:
        seen = [x]
        for letter, block, layer in zip("abcdefghij", self.program.blocks, self.layers, strict=False):
            if letter not in use:
                continue
            y = x.to(getattr(torch, block.dtype))
            y = checkpoint(layer, y, use_reentrant=block.checkpoint == "reentrant") if block.checkpoint else layer(y)
            x = x + torch.tanh(y).float()
            seen.append(x)
        return {"tensor": x, "dict": {"last": x, "rest": [len(seen), *seen]}, "tuple": (x, tuple(seen[1:-1]))}[
            self.program.outputs
        ]


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.square().mean()
    parts = output.values() if isinstance(output, dict) else output
    return sum((_loss(part) for part in parts if not isinstance(part, int)), torch.zeros(()))


class _Bare:
    """A model without a wrapper, in the place of one."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.zero_grad, self.no_sync = module, module.zero_grad, nullcontext

    def __call__(self, x: Tensor, use: str) -> Any:
        return self.module(x, use)


# Running and checking


def _make(kind: str, program: Program, setting: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Model(program)
    options = dict(program.options)
    if kind == "torch":
        options["find_unused_parameters"] = program.find_unused
    elif kind == "ours":
        options["compression"] = setting
    model = _Bare(module) if kind == "bare" else wrap(kind, module, **options)
    trainable = [p for p in module.parameters() if p.requires_grad]
    if program.optimizer == "AdamW":
        return model, torch.optim.AdamW(trainable, lr=0.01, eps=1e-3)  # FP16 has no 1e-8
    return model, torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def check(rank: int, world_size: int, program: Program, setting: str = "none") -> list[str]:
    """What is wrong with our class beside torch's, after every backward and every step of the optimizer.

    After each backward our gradients, once compared, are set to torch's: where only the order of summation or
    a compression makes a difference, it does not grow, and parameters stay equal bit for bit.
    """
    made = {kind: _make(kind, program, setting) for kind in ("torch", "ours", "bare")}
    torchs, ours, bare = (model for model, _ in made.values())
    checks = _Checks(torchs, ours, bare, setting, world_size)

    def loss_of_ours(output: Any) -> Tensor:
        checks.before_backward()
        return _loss(output)

    plays = [
        playing(
            model,
            program.ops.split(),
            rank,
            inputs=lambda rank, step: batch(rank, step, ROWS + rank, WIDTH).requires_grad_(),
            loss=loss_of_ours if model is ours else _loss,
            optimizer=optimizer,
        )
        for model, optimizer in made.values()
    ]
    synced = iter(synced_backwards(program.ops.split()))
    for position, (op, *_) in enumerate(zip(*plays, strict=True)):
        checks.where = f"rank {rank}, {op} (backward or step {position})"
        if op == "s":
            checks.after_step()
        else:
            checks.after_backward(next(synced))
    return checks.problems


class _Checks:
    def __init__(self, torchs: Any, ours: Any, bare: Any, setting: str, world_size: int) -> None:
        self.torchs, self.ours, self.bare = torchs, ours, bare
        self.setting, self.world_size = setting, world_size
        self.two_levels = ours.reducer.transport.name == "two_level"
        self.problems: list[str] = []
        self.where = ""
        self.kept: dict[str, list[Tensor]] = {}  # what error feedback adds on each rank, by parameter
        self.used: set[str] = set()  # what a backward reached since the last synchronised one
        self.names = [name for name, p in bare.module.named_parameters() if p.requires_grad]
        for name in self.names:  # such a hook is never collected: it holds a name and a set, and no model
            parameter = bare.module.get_parameter(name)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, used=self.used: used.add(name))

    def before_backward(self) -> None:
        if "error_feedback" not in self.setting:
            return
        self.kept = {}
        for pipeline in self.ours.reducer.pipelines:
            feedback, where = pipeline.feedback, pipeline.feedback._kept.share
            first, second = torch.zeros(2, pipeline.bucket.total, dtype=torch.float64)
            first[where.first] = feedback.residual * where.unit  # in two levels of the node's sum, in its owner's units
            second[where.second] = feedback.shard_residual
            gathered = _gather((first, second), self.world_size)
            shards = sum(shard for _, shard in gathered)
            for slot in pipeline.bucket.slots:
                place = slice(slot.offset, slot.offset + slot.numel)
                self.kept[slot.name] = [first[place] + shards[place] for first, _ in gathered]

    def after_backward(self, synced: bool) -> None:
        torchs, ours, local = (_grads(model) for model in (self.torchs, self.ours, self.bare))
        for name in self.names:
            self._same(_structure(ours[name]), _structure(torchs[name]), f"{name}, beside torch's")
        if synced:
            self._averages(torchs, ours, local)
        else:
            for name in self.names:
                self._same(ours[name], local[name], f"{name}, which is local, beside a bare model's")
                self._same(torchs[name], local[name], f"{name} of torch's, which is local, beside a bare model's")
        self._take_over(torchs)

    def _averages(self, torchs: Grads, ours: Grads, local: Grads) -> None:
        gathered = _gather((local, self.used), self.world_size)
        used_by_any = set().union(*(used for _, used in gathered))
        self.used.clear()
        averaged = {name: ours[name] for name in self.names if name in used_by_any}
        for other in _gather(averaged, self.world_size):
            for name, grad in averaged.items():
                self._same(grad, other[name], f"{name} beside another rank's")
        for name in self.names:
            if name not in used_by_any:
                self._same(ours[name], local[name], f"{name}, which no rank used, beside the gradient before")
            elif self.setting == "none" and self.world_size == 2:
                self._same(ours[name], torchs[name], f"{name} beside torch's")
            elif ours[name] is not None and torchs[name] is not None:
                parameter = self.bare.module.get_parameter(name)
                grads = [_laid_out(grads[name], parameter) for grads, _ in gathered]
                self._close(name, ours[name], torchs[name], grads)

    def _close(self, name: str, found: Tensor, torchs: Tensor, grads: list[Tensor]) -> None:
        """Within the order of summation of torch's, or within the format's bound of the average."""
        if self.setting == "none":
            expected, bound = in_memory_order(torchs), tolerances.order_of_summation(grads, self.two_levels)
        else:
            sums = [in_memory_order(grad) for grad in grads]
            bound = tolerances.error_bound(self.setting, grads, self.two_levels)
            if kept := self.kept.get(name):
                sums = [a + b for a, b in zip(sums, kept, strict=True)]
                bound = tolerances.error_bound_with_feedback(self.setting, grads, kept, self.two_levels)
            expected = torch.stack(sums).mean(0)
        far = (in_memory_order(found) - expected).abs()
        if not bool((far <= bound).all()):
            self.problems.append(f"{self.where}: {name} is off by {float((far / bound).max()):.3g} times the bound")

    def after_step(self) -> None:
        for name, mine in self.ours.module.state_dict().items():
            self._same(mine, self.torchs.module.state_dict()[name], f"{name} beside torch's")

    def _same(self, found: Any, expected: Any, what: str) -> None:
        try:
            assert_same_bits(found, expected)
        except AssertionError as error:
            self.problems.append(f"{self.where}: {what}: {error}")

    def _take_over(self, torchs: Grads) -> None:
        for name, grad in torchs.items():
            for model in (self.ours, self.bare):
                parameter = model.module.get_parameter(name)
                if grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = _laid_out(grad, parameter)
                else:
                    parameter.grad.copy_(grad)


def _grads(model: Any) -> Grads:
    return {name: p.grad for name, p in model.module.named_parameters() if p.requires_grad}


def _structure(grad: Tensor | None) -> str:
    return "None" if grad is None else f"{grad.dtype} {tuple(grad.shape)} with strides {grad.stride()}"


def _laid_out(grad: Tensor | None, parameter: Tensor) -> Tensor:
    """A copy of a gradient (zeros for None) in the memory order of its parameter."""
    copy = torch.zeros_like(parameter, requires_grad=False)
    return copy if grad is None else copy.copy_(grad)


def _gather(value: Any, world_size: int) -> list[Any]:
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values
