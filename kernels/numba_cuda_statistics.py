"""What a thread of a `numba_cuda` kernel counts and sums while its vectors are in registers.

As in `numba_cuda_vectors.py`, each has a twin in `numba_cuda_simulated.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .numba_cuda_vectors import narrow, rounded_to_nearest, widen

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _stored(
    builder: ir.IRBuilder, vector: ir.Value, tag: types.Type, to: types.Type, count: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each number as memory of type `tag` will hold it, in type `to`, and whether it is one of the first `count`."""
    for lane in range(vector.type.count):
        value = narrow(builder, builder.extract_value(vector, lane), tag)
        yield widen(builder, value, tag, to), builder.icmp_signed(">", count, _I64(lane))


@intrinsic
def sum_of_squares(_typing: Any, vector: types.Type, tag: types.Type, sum_tag: types.Type, count: types.Type) -> Any:
    """The sum of the first `count` numbers' squares, in their order, each as memory of type `tag` will hold it."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        multiply, add = (rounded_to_nearest(builder, name, sum_tag) for name in ("mul", "add"))
        total = ir.Constant(multiply.function_type.return_type, 0.0)
        for value, inside in _stored(builder, args[0], tag, sum_tag, args[3]):
            more = builder.call(add, [total, builder.call(multiply, [value, value])])
            total = builder.select(inside, more, total)
        return total

    return sum_tag(vector, tag, sum_tag, types.int64), emit


@intrinsic
def not_finite(_typing: Any, vector: types.Type, tag: types.Type, count: types.Type) -> Any:
    """How many of the first `count` numbers memory of type `tag` will hold as infinity or NaN."""
    to = types.float64 if tag == types.float64 else types.float32
    bits, infinity = (_I64, 0x7FF << 52) if tag == types.float64 else (_I32, 0xFF << 23)

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = _I64(0)
        for value, inside in _stored(builder, args[0], tag, to, args[2]):
            magnitude = builder.and_(builder.bitcast(value, bits), bits((1 << bits.width - 1) - 1))
            odd = builder.and_(inside, builder.icmp_signed(">=", magnitude, bits(infinity)))
            total = builder.add(total, builder.zext(odd, _I64))
        return total

    return types.int64(vector, tag, types.int64), emit
