"""`python -m bench.kernels.formats`: what formats of few bits lose of gradients recorded in training.

Two models train on one core and record gradients early, midway and late: a GPT of 0.9 million parameters on the source
of Python's own library under AdamW, and a convolutional network of 0.2 million on drawn images under SGD with momentum.
Each format rounds each gradient once, as a rank does that sends it. The table has vNMSE, the sum of the squares of what
is lost over the sum of the gradients' squares, all parameters together. Our formats are the reference kernels, the
others plain torch below.
"""

from __future__ import annotations

import csv
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from fastreduce import Compression
from fastreduce.kernels import reference
from fastreduce.kernels.slots import SlotTable, shard_bytes

from ..training.timed_models import Gpt2

KEPT = Path(__file__).parents[1] / "results" / "formats.csv"
WHEN = ("early", "midway", "late")
OURS = ("int8", "fp8", "int4", "int4:block=64")
LIMITS = {"MXFP4": 0.7, "E3M0": 0.5}  # of their vNMSE, for int4

Recording = list[Tensor]


# Gradients


class ConvNet(nn.Module):
    """Four convolutions with batch norm and a linear layer; takes images and classes, returns the loss."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for come, go, stride in [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 2)]:
            layers += [nn.Conv2d(come, go, 3, stride, 1), nn.BatchNorm2d(go), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), classes)


def texts(length: int = 128, batch: int = 8) -> Iterator[tuple[Tensor]]:
    """Pieces of the files beside this Python's `os.py`, bytes as tokens, `[batch, length]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    while True:
        starts = torch.randint(len(text) - length, (batch,))
        yield (torch.stack([text[start : start + length] for start in starts]).long(),)


def images(batch: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """One of ten random patterns each, moved somewhere, under noise: `[batch, 3, 32, 32]`, and which one."""
    patterns = F.interpolate(torch.randn(10, 3, 8, 8), size=(32, 32), mode="bilinear")
    while True:
        classes = torch.randint(10, (batch,))
        moves = torch.randint(32, (batch, 2)).tolist()
        moved = [patterns[k].roll(move, (1, 2)) for k, move in zip(classes, moves, strict=True)]
        yield torch.stack(moved) + torch.randn(batch, 3, 32, 32), classes


def recordings(quick: bool) -> Iterator[tuple[str, Recording]]:
    """Each model's gradients, early, midway and late."""
    torch.manual_seed(0)
    gpt, conv = Gpt2(128, 4, 256, 128), ConvNet()
    adam = torch.optim.AdamW(gpt.parameters(), 1e-3)
    sgd = torch.optim.SGD(conv.parameters(), 0.05, momentum=0.9)
    for name, model, data, optimizer, late in [("GPT", gpt, texts(), adam, 300), ("CNN", conv, images(), sgd, 200)]:
        steps = dict(zip((1, 2, 3) if quick else (5, late // 3, late), WHEN, strict=True))
        for step, batch in enumerate(islice(data, max(steps)), 1):
            optimizer.zero_grad()
            model(*batch).backward()
            if step in steps:
                grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                yield f"{name} {steps[step]}", [grad.flatten().clone() for grad in grads]
            optimizer.step()


# Formats


class Format(NamedTuple):
    """Bits an element, scales included, and what becomes of a gradient."""

    bits: float
    rounded: Callable[[Tensor], Tensor]


def ours(spec: str) -> Format:
    """One of our settings."""
    setting = Compression.parse(spec)
    block, form = setting.block, setting.format

    def rounded(gradient: Tensor) -> Tensor:
        blocks = -(-gradient.numel() // block)
        slots = SlotTable(np.zeros(1, np.int64), np.array([gradient.numel()], np.int64), blocks * block)
        wire, back = torch.empty(shard_bytes(blocks, block, form), dtype=torch.uint8), torch.empty_like(gradient)
        reference.quantize([gradient], slots, wire, 1, block, None, None, form=form)
        reference.dequantize(wire, 1, block, slots, [back], form=form)
        return back

    return Format(form.bits + 8 * form.scale_bytes / block, rounded)


def rival(magnitudes: list[float], block: int, scale: Callable[[Tensor], Tensor], scale_bits: int) -> Format:
    """Signs and the nearest of a few magnitudes, times a scale that a block's largest magnitude tells."""
    levels = torch.tensor(sorted({*magnitudes, *(-magnitude for magnitude in magnitudes)}))
    return nearest(levels, block, scale, scale_bits)


def nearest(levels: Tensor, block: int, scale: Callable[[Tensor], Tensor], scale_bits: int) -> Format:
    """The nearest of 16 levels, or fewer, times a scale that a block's largest magnitude tells."""
    between = (levels[1:] + levels[:-1]) / 2

    def rounded(gradient: Tensor) -> Tensor:
        values = F.pad(gradient, (0, -gradient.numel() % block)).view(-1, block)
        absmax = values.abs().amax(dim=1, keepdim=True)
        factor = torch.where(absmax > 0, scale(absmax.clamp(min=2.0**-100)), 1.0)
        return (levels[torch.bucketize(values / factor, between)] * factor).flatten()[: gradient.numel()]

    return Format(4 + scale_bits / block, rounded)


def power_below(largest: float) -> Callable[[Tensor], Tensor]:
    """The power of two that brings a block's largest magnitude to the binade of the format's largest number."""
    return lambda absmax: 2.0 ** (absmax.log2().floor() - np.floor(np.log2(largest)))


# NF4's levels: Dettmers et al. 2023, QLoRA, appendix E.
NF4 = [
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
RIVALS = {
    # OCP Microscaling Formats 1.0: E2M1 under a power of two.
    "MXFP4": rival([0, 0.5, 1, 1.5, 2, 3, 4, 6], 32, power_below(6), 8),
    # A sign and an exponent of three bits, of which one pattern is zero. Under a power of two it loses more.
    "E3M0": rival([0, *(2.0**e for e in range(-2, 5))], 32, lambda absmax: (absmax / 16).bfloat16().float(), 16),
    "NF4": nearest(torch.tensor(NF4), 64, lambda absmax: absmax, 32),
}


def lost(form: Format, gradients: Recording) -> float:
    """vNMSE."""
    pairs = [(form.rounded(gradient) - gradient, gradient) for gradient in gradients]
    error, whole = (sum(float(each.double().square().sum()) for each in of) for of in zip(*pairs, strict=True))
    return error / whole


def main(quick: Annotated[bool, typer.Option(help="The first three steps of each training.")] = False) -> None:
    """Print the table; a whole run keeps it in bench/results/formats.csv."""
    torch.set_num_threads(1)
    formats = {**{spec: ours(spec) for spec in OURS}, **RIVALS}
    figures: dict[str, list[float]] = {name: [] for name in formats}
    recorded = []
    for name, gradients in recordings(quick):
        recorded.append(name)
        for of, form in formats.items():
            figures[of].append(lost(form, gradients))
    table = Table("format", "bits", *recorded, title="vNMSE")
    rows = [
        [name, f"{form.bits:.3g}", *(f"{figure:.1e}" for figure in figures[name])] for name, form in formats.items()
    ]
    for row in rows:
        table.add_row(*row)
    if not quick:
        with KEPT.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["format", "bits", *recorded], *rows])
    console = Console(width=120)
    console.print(table)
    for name, limit in LIMITS.items():
        ratios = [mine / theirs for mine, theirs in zip(figures["int4"], figures[name], strict=True)]
        said = "met" if max(ratios) <= limit else "missed"
        mean = float(np.exp(np.mean(np.log(ratios))))
        console.print(f"int4 / {name}: {mean:.2f} (geometric mean), at most {max(ratios):.2f}; goal {limit}: {said}")


if __name__ == "__main__":
    typer.run(main)
