"""Random bits for the `numba_cpu` kernels: Philox4x32 by hand, in lanes of 64 bits, which hold its products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .numba_cpu_elements import ANYWHERE, element, inlined, splat
from .reference_stochastic import MULTIPLIERS, ROUNDS, WEYL
from .slots import DRAWN

_I32, _I64 = ir.IntType(32), ir.IntType(64)
LANES = 16  # counters at a time
BATCH = LANES * DRAWN  # elements
_WORDS = ir.VectorType(_I64, LANES)


def _all(number: int) -> ir.Constant:
    return ir.Constant(_WORDS, [number] * LANES)


def _rotated(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Words with their halves exchanged."""
    halves = builder.bitcast(words, ir.VectorType(_I32, 2 * LANES))
    places = ir.Constant(ir.VectorType(_I32, 2 * LANES), [lane ^ 1 for lane in range(2 * LANES)])
    return builder.bitcast(builder.shuffle_vector(halves, halves, places), words.type)


@intrinsic
def _philox(
    _typing: Any, to: types.Type, first: types.Type, who: types.Type, step: types.Type, seed: types.Type,
    key: types.Type,
) -> tuple[Any, Any]:  # fmt: skip
    """The words of `LANES` counters from `first` on, in order, to an address; numbers are taken modulo 2^32."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        to, first, who, step, seed, key = args
        lower = _I64(0xFFFFFFFF)
        lanes = ir.Constant(_WORDS, list(range(LANES)))
        # Upper halves may hold anything: nothing but products reads words, and these the lower halves.
        words = [builder.add(splat(builder, first, LANES), lanes)]
        words += [splat(builder, word, LANES) for word in (who, step, seed)]
        keys = [builder.and_(key, lower), builder.lshr(key, _I64(32))]
        for number in range(ROUNDS):
            products = [builder.mul(builder.and_(words[2 * i], _all(0xFFFFFFFF)), _all(MULTIPLIERS[i])) for i in (1, 0)]
            bumped = [builder.add(k, _I64(number * weyl & 0xFFFFFFFF)) for k, weyl in zip(keys, WEYL, strict=True)]
            mixed = [builder.xor(words[2 * i + 1], splat(builder, k, LANES)) for i, k in enumerate(bumped)]
            if number < ROUNDS - 1:
                high = [builder.lshr(product, _all(32)) for product in products]
                upper = [builder.xor(h, m) for h, m in zip(high, mixed, strict=True)]
                words = [upper[0], products[0], upper[1], products[1]]
        # Of the last words each pair is a product, halves exchanged, but for what is mixed into its first word.
        pairs = [
            builder.xor(_rotated(builder, product), builder.and_(m, _all(0xFFFFFFFF)))
            for product, m in zip(products, mixed, strict=True)
        ]
        order = [half * LANES + lane for lane in range(LANES) for half in (0, 1)]
        whole = builder.shuffle_vector(*pairs, ir.Constant(ir.VectorType(_I32, 2 * LANES), order))
        builder.store(whole, builder.inttoptr(to, ir.PointerType()), align=ANYWHERE)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


@intrinsic
def load_draw(_typing: Any, address: types.Type, index: types.Type) -> tuple[Any, Any]:
    """The 16 random bits of an element."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        at = element(builder, args[0], builder.and_(args[1], _I64(-2)), types.uint8)
        half = builder.zext(builder.load(at, typ=ir.IntType(16), align=ANYWHERE), _I32)
        lower = builder.and_(half, _I32(0xFF))
        exchanged = builder.or_(builder.shl(lower, _I32(8)), builder.lshr(half, _I32(8)))
        odd = builder.trunc(args[1], ir.IntType(1))
        return builder.select(odd, builder.xor(exchanged, _I32(0xFF)), half)

    return types.int32(types.int64, types.int64), emit


@inlined
def draw(to, count, first, who, step, seed, key):
    """The random bits of elements `first` to before `first + count`, and of some more, a byte each, to an address."""
    for done in range(0, count, BATCH):
        _philox(to + done, np.int64((first + done) // DRAWN), who, step, seed, key)
