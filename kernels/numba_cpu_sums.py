"""Parts of several `numba_cpu` kernels: sums of shards and of blocks over ranks, scales of blocks, and zeros."""

from __future__ import annotations

import numpy as np
import torch

from .numba_cpu_elements import (
    TAGS,
    add_to_block,
    bits_of,
    byte_of,
    convert_block,
    inlined,
    is_fp8,
    kernel,
    load,
    store,
)
from .numba_cpu_int4 import INT4, USUAL, add_int4, load_int4, put_int4
from .slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT

CHUNK = 256  # small enough that reading ahead and writing out overlap
INT8, E4M3, FP32 = np.int8(0), np.uint8(0), np.float32(0)
ZERO, TINY = np.float32(0), np.float32(2.0**-100)
LARGEST_INT8, LARGEST_E4M3 = np.float32(127), np.float32(448)
RECIPROCAL_127, RECIPROCAL_448 = np.float32(1 / 127), np.float32(1 / 448)

# Tags of an element and of a scale.
CODES = {INT8_FORMAT: (INT8, FP32), INT4_FORMAT: (INT4, TAGS[torch.bfloat16]), FP8_FORMAT: (E4M3, FP32)}


@kernel
def zero(start, end):
    """Bytes from one address to before another."""
    for index in range(end - start):
        store(start, index, INT8, np.int32(0))


@inlined
def scale_of(largest, code):
    """A finite INT8 or FP8 block's scale, and what elements are multiplied by, of its largest magnitude's bits."""
    absmax = np.int32(largest).view(np.float32)
    unit = inverse = ZERO
    if absmax >= TINY:
        unit = absmax * (RECIPROCAL_448 if is_fp8(code) else RECIPROCAL_127)
        inverse = (LARGEST_E4M3 if is_fp8(code) else LARGEST_INT8) / absmax
    return unit, inverse


@inlined
def flags_of(total, block):
    """Sums of used-flags become flags: 1 where any rank has used it."""
    for index in range(block):
        store(total, index, FP32, np.float32(load(total, index, FP32) > np.float32(0.5)))


@kernel
def average_of_shards(terms, index, tag, scale, spare):
    """One element; where its sum is not finite, terms are made small first."""
    total = load(terms[0], index, tag)
    small = total / spare
    for rank in range(1, len(terms)):
        term = load(terms[rank], index, tag)
        total += term
        small += term / spare
    return total * scale if abs(total) < np.float32(np.inf) else small * (scale * spare)


@kernel
def average_of_blocks(terms, payload, scale_at, block, scale, spare, averages, code, scale_tag):
    """One block, element by element in the same way."""
    for index in range(block):
        total = small = ZERO
        for rank in range(len(terms)):
            unit, at = load(terms[rank] + scale_at, 0, scale_tag), terms[rank] + payload
            term = (load_int4(at, index) if bits_of(code) == 4 else load(at, index, byte_of(code))) * unit
            total = term if rank == 0 else total + term
            small = term / spare if rank == 0 else small + term / spare
        average = total * scale if abs(total) < np.float32(np.inf) else small * (scale * spare)
        store(averages, index, FP32, average)


@inlined
def add_blocks(total, terms, payload, scale_at, blocks, block, code, scale_tag):
    """The sums over ranks of as many blocks as are encoded at once (`run_of`), decoded to FP32.

    `payload` and `scale_at` are from each rank's address on.
    """
    if bits_of(code) == 4 and block == USUAL:
        _add_int4(total, terms, payload, scale_at, blocks, USUAL)
    elif bits_of(code) == 4:
        _add_int4(total, terms, payload, scale_at, blocks, block)
    else:
        for rank in range(len(terms)):
            unit = load(terms[rank] + scale_at, 0, scale_tag)
            if rank == 0:
                convert_block(total, FP32, terms[rank] + payload, byte_of(code), block, unit)
            else:
                add_to_block(total, FP32, terms[rank] + payload, byte_of(code), block, unit)


@inlined
def _add_int4(total, terms, payload, scale_at, blocks, block):
    for rank in range(len(terms)):
        if rank == 0:
            put_int4(total, terms[rank] + payload, terms[rank] + scale_at, blocks, block)
        else:
            add_int4(total, terms[rank] + payload, terms[rank] + scale_at, blocks, block)
