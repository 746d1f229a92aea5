"""Gradient shapes of real models, written from their architectures, and the buckets they travel in."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from fastreduce.bucketed import BUCKET_BYTES, FIRST_BUCKET_BYTES
from fastreduce.buckets import Bucket, ParameterSpec, build_plan, group_by_size

Shape = tuple[int, ...]

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


def bert_base() -> Iterator[Shape]:
    """BERT-base, uncased, with its pooler: 109,482,240 parameters."""
    width, inner = 768, 3072
    yield from ((30522, width), (512, width), (2, width), (width,), (width,))
    for _ in range(12):
        yield from ((width, width), (width,)) * 4  # query, key, value, output
        yield from ((width,), (width,))
        yield from ((inner, width), (inner,), (width, inner), (width,))
        yield from ((width,), (width,))
    yield from ((width, width), (width,))


def gpt2() -> Iterator[Shape]:
    """GPT-2 124M, its output tied to its embedding: 124,439,808 parameters."""
    width = 768
    yield from ((50257, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,))
        yield from ((width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,))
        yield from ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield from ((width,), (width,))


def thousand_tiny() -> Iterator[Shape]:
    """A thousand parameters of 64 elements."""
    yield from [(64,)] * 1000


LISTS = {"resnet50": resnet50, "bert": bert_base, "gpt2": gpt2, "tiny": thousand_tiny}
TOTALS = {"resnet50": 25_557_032, "bert": 109_482_240, "gpt2": 124_439_808, "tiny": 64_000}


def buckets_of(name: str, alignment: int, most: int = MOST_ELEMENTS) -> tuple[list[Shape], list[Bucket]]:
    """A model's shapes and its buckets in the order of backward, as many as hold at most `most` elements (or one)."""
    shapes = list(LISTS[name]())
    assert sum(map(math.prod, shapes)) == TOTALS[name]
    cpu = torch.device("cpu")
    specs = [ParameterSpec(str(i), math.prod(s), torch.float32, cpu) for i, s in enumerate(shapes)]
    groups, elements = [], 0
    for group in group_by_size(specs, reversed(range(len(specs))), [FIRST_BUCKET_BYTES, BUCKET_BYTES]):
        elements += sum(specs[i].numel for i in group)
        if groups and elements > most:
            break
        groups.append(group)
    return shapes, list(build_plan(specs, groups, alignment=alignment, shards=2).buckets)
