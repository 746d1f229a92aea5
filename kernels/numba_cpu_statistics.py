"""Conversion with statistics for the `numba_cpu` kernels: squares are summed while a line is in registers.

The order of the sum does not depend on where memory lies. A tile's elements go to lanes in turn, as many as fill 64
bytes; each lane sums in ascending order; then lanes are added, the first half to the second, until one is left. Where
lines begin in the middle of a round of lanes, so do the lanes: halving does not see it, since a + b is b + a.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .numba_cpu_elements import (
    LINE,
    MEMORY,
    can_stream,
    element,
    folded,
    kernel,
    line_of,
    load,
    named,
    part,
    size_of,
    stage,
    store,
    store_line,
    widen,
)

ZERO, ONE, INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


def lanes_for(statistics: Tensor) -> tuple[int, Any, Tensor]:
    """The address of the statistics, their tag, and lanes of zero, which are to be kept while a kernel runs."""
    tag = np.float64(0) if statistics.dtype is torch.float64 else np.float32(0)
    return statistics.data_ptr(), tag, stage(LINE // 8).zero_()


def _sum_lines(stream: bool) -> Callable[..., Any]:
    """An intrinsic that converts whole lines from element `first` on, and returns where it ended."""

    def define(
        _typing: Any,
        to: types.Type,
        to_tag: types.Type,
        source: types.Type,
        source_tag: types.Type,
        first: types.Type,
        count: types.Type,
        scale: types.Type,
        sums: types.Type,
        tag: types.Type,
    ) -> tuple[Any, Any]:
        lanes, size = LINE // MEMORY[tag][1], MEMORY[to_tag][1]
        width = LINE // size if stream else lanes

        def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, _, source, _, first, count, factor, sums, _ = args
            total_at = element(builder, sums, ir.Constant(first.type, 0), tag)
            total_type = ir.VectorType(MEMORY[tag][0], lanes)
            kept = cgutils.alloca_once_value(builder, builder.load(total_at, typ=total_type, align=LINE))
            lines = builder.sdiv(builder.sub(count, first), ir.Constant(first.type, width))
            with cgutils.for_range(builder, lines) as loop:
                index = builder.add(first, builder.mul(loop.index, ir.Constant(first.type, width)))
                line = line_of(builder, source, source_tag, index, factor, to_tag, width)
                store_line(builder, line, element(builder, to, index, to_tag), stream)
                stored, total = widen(builder, line, to_tag), builder.load(kept)
                for start in range(0, width, lanes):
                    some = part(builder, stored, start, lanes)
                    total = builder.fadd(total, builder.fmul(some, some))
                builder.store(total, kept)
            builder.store(builder.load(kept), total_at, align=LINE)
            return builder.add(first, builder.mul(lines, ir.Constant(first.type, width)))

        integers = (types.int64, to_tag, types.int64, source_tag, types.int64, types.int64)
        return types.int64(*integers, scale, types.int64, tag), emit

    return named("stream_lines" if stream else "plain_lines", define)


_stream_lines, _plain_lines = _sum_lines(True), _sum_lines(False)


@intrinsic
def _halve(_typing: Any, sums: types.Type, tag: types.Type) -> tuple[Any, Any]:
    """The sum of all lanes, half by half."""
    scalar, size = MEMORY[tag]
    lanes = LINE // size

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        at = element(builder, args[0], ir.Constant(args[0].type, 0), tag)
        total = builder.load(at, typ=ir.VectorType(scalar, lanes), align=LINE)
        return folded(builder, total, builder.fadd)

    return tag(types.int64, tag), emit


@kernel
def convert_and_sum(to, to_tag, source, source_tag, count, scale, stream, sums, tag):
    """`convert`, which also adds the squares of what it stores to the lanes at `sums`."""
    lanes = LINE // size_of(tag)
    before = done = np.int64(0)
    if stream and can_stream(to, to_tag, source):
        before = -to % LINE // size_of(to_tag)
        done = min(before, count)
        for index in range(done):
            store(to, index, to_tag, load(source, index, source_tag) * scale)
            _add_square(to, index, to_tag, sums, (index - before) % lanes, tag)
        done = _stream_lines(to, to_tag, source, source_tag, done, count, scale, sums, tag)
    done = _plain_lines(to, to_tag, source, source_tag, done, count, scale, sums, tag)
    for index in range(done, count):
        store(to, index, to_tag, load(source, index, source_tag) * scale)
        _add_square(to, index, to_tag, sums, (index - before) % lanes, tag)


@kernel
def _add_square(to, index, to_tag, sums, lane, tag):
    value = load(to, index, to_tag)
    store(sums, lane, tag, load(sums, lane, tag) + value * value)


@kernel
def end_tile(to, to_tag, count, sums, tag, row):
    """Write a tile's row, and start the lanes anew."""
    total, odd = _halve(sums, tag), ZERO
    if not total < INFINITY:  # else every element is finite, and nobody need count
        for index in range(count):
            if not abs(load(to, index, to_tag)) < INFINITY:
                odd += ONE
    store(row, 0, tag, odd)
    store(row, 1, tag, total)
    for lane in range(LINE // size_of(tag)):
        store(sums, lane, tag, ZERO)
