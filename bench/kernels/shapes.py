"""Gradient shapes of real models, written from their architectures, and the buckets they travel in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from fastreduce.reduction.bucketed import BUCKET_BYTES, FIRST_BUCKET_BYTES
from fastreduce.reduction.buckets import Bucket, ParameterSpec, build_plan, group_by_size

Shape = tuple[int, ...]

CAPS = (FIRST_BUCKET_BYTES, BUCKET_BYTES)
MOST_ELEMENTS = 25_600_000  # all of ResNet-50; of larger models the first buckets of backward


def resnet50() -> Iterator[Shape]:
    """torchvision's: 25,557,032 parameters."""

    def convolution(inputs: int, outputs: int, kernel: int) -> Iterator[Shape]:
        yield from ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))  # without bias, batch norm

    yield from convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from convolution(inputs, width, 1)
            yield from convolution(width, width, 3)
            yield from convolution(width, 4 * width, 1)
            if block == 0:
                yield from convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    yield from ((1000, 2048), (1000,))


def bert(width: int, layers: int) -> Iterator[Shape]:
    """BERT, uncased, with its pooler; base is 768 wide with 12 layers: 109,482,240 parameters."""
    inner = 4 * width
    yield from ((30522, width), (512, width), (2, width), (width,), (width,))
    for _ in range(layers):
        yield from ((width, width), (width,)) * 4  # query, key, value, output
        yield from ((width,), (width,))
        yield from ((inner, width), (inner,), (width, inner), (width,))
        yield from ((width,), (width,))
    yield from ((width, width), (width,))


def gpt2(width: int, layers: int) -> Iterator[Shape]:
    """GPT-2, its output tied to its embedding; the small one is 768 wide with 12 layers: 124,439,808 parameters."""
    yield from ((50257, width), (1024, width))
    for _ in range(layers):
        yield from ((width,), (width,))
        yield from ((width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,))
        yield from ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield from ((width,), (width,))


def llama() -> Iterator[Shape]:
    """Llama 3.2 1B, its output tied to its embedding: 1,235,814,400 parameters."""
    width, inner, keys = 2048, 8192, 512
    yield (128256, width)
    for _ in range(16):
        yield from ((width, width), (keys, width), (keys, width), (width, width))
        yield from ((inner, width), (inner, width), (width, inner), (width,), (width,))
    yield (width,)


def thousand_tiny() -> Iterator[Shape]:
    """A thousand parameters of 64 elements."""
    yield from [(64,)] * 1000


def few() -> Iterator[Shape]:
    """What an interpreter of GPU kernels can do."""
    yield from ((16, 40), (33,), (129,))


LISTS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": resnet50,
    "bert": lambda: bert(768, 12),
    "gpt2": lambda: gpt2(768, 12),
    "tiny": thousand_tiny,
    "few": few,
    "bert_large": lambda: bert(1024, 24),
    "gpt2_xl": lambda: gpt2(1600, 48),
    "llama_1b": llama,
}
TOTALS = {
    "resnet50": 25_557_032,
    "bert": 109_482_240,
    "gpt2": 124_439_808,
    "tiny": 64_000,
    "few": 802,
    "bert_large": 335_141_888,
    "gpt2_xl": 1_557_611_200,
    "llama_1b": 1_235_814_400,
}


def buckets_of(name: str, alignment: int, most: int, caps: Sequence[int] = CAPS) -> tuple[list[Shape], list[Bucket]]:
    """A model's shapes and its buckets in the order of backward, as many as hold at most `most` elements (or one)."""
    shapes = list(LISTS[name]())
    assert sum(map(math.prod, shapes)) == TOTALS[name]
    cpu = torch.device("cpu")
    specs = [ParameterSpec(str(i), math.prod(s), torch.float32, cpu) for i, s in enumerate(shapes)]
    groups, elements = [], 0
    for group in group_by_size(specs, reversed(range(len(specs))), caps):
        elements += sum(specs[i].numel for i in group)
        if groups and elements > most:
            break
        groups.append(group)
    return shapes, list(build_plan(specs, groups, alignment=alignment, shards=2).buckets)
