"""A two-shot's kernels for CPU tensors as C functions of a few blocks, for a transport that calls them piece by piece.

A piece is blocks of one shard in the wire's format, as if it were a shard of its own without padding: payloads, then
scales or exponents. Bits are those of the kernels of a whole wire, since no block tells in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.typing.templates import signature
from numba.extending import intrinsic
from numba.np.numpy_support import carray, from_dtype
from torch import Tensor

from . import numba_cpu_cast as plain
from . import numba_cpu_fp16 as fp16
from . import numba_cpu_int8 as quantized
from .numba_cpu_elements import STREAM_BYTES, TAGS, addresses, copy, fence, inlined, kernel, stage
from .numba_cpu_residuals import rows_of, scratch_for
from .numba_cpu_sums import CHUNK, CODES
from .slots import FP16_BLOCK, INT8_FORMAT, BlockFormat, Pieces, SlotTable, spare

PLAIN_BLOCK = 16  # elements: shards are multiples of it
RULE = fp16.rule_for(1)


@intrinsic
def _pointer(_typing: Any, address: types.Type) -> tuple[Any, Any]:
    kind = types.CPointer(types.int64)

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(args[0], target.get_value_type(kind))

    return kind(types.int64), emit


@inlined
def _words(address, count):
    return carray(_pointer(address), (count,))


@inlined
def _slots(t, tensors):
    return _words(tensors, t.slots), _words(t.offsets, t.slots), _words(t.numels, t.slots)


# `told` points to a record (`_record`). Its fields have types, of which those of tags say what lies in memory.


@kernel
def _encode_fp16(told, shard, first, count, to):
    t = carray(told, (1,))[0]
    tensors, offsets, numels = _slots(t, t.tensors)
    start = (shard * t.blocks + first) * FP16_BLOCK
    fp16.flatten_blocks(tensors, t.tag, offsets, numels, start, count, to, RULE, t.values, False)
    return 0


@kernel
def _average_fp16(told, first, count, terms, to):
    t = carray(told, (1,))[0]
    fp16.reduce_blocks(_words(terms, t.ranks), to, count, RULE, t.scale, t.spare, t.values, False)
    return 0


@kernel
def _decode_fp16(told, shard, first, count, source):
    t = carray(told, (1,))[0]
    into, offsets, numels = _slots(t, t.into)
    start = (shard * t.blocks + first) * FP16_BLOCK
    fp16.unflatten_blocks(source, count, start, offsets, numels, into, t.tag, t.one, t.stream != 0, t.finite)
    fence()
    return 0


@kernel
def _encode_quantized(told, shard, first, count, to):
    t = carray(told, (1,))[0]
    tensors, offsets, numels = _slots(t, t.tensors)
    start = (shard * t.blocks + first) * t.block
    quantized.quantize_blocks(
        tensors, t.tag, offsets, numels, start, count, to, t.block, t.ranks * t.blocks * t.block, t.old, t.new, t.kept,
        t.values, t.large != 0, t.code, t.scale_tag,
    )  # fmt: skip
    fence()
    return 0


@kernel
def _average_quantized(told, first, count, terms, to):
    t = carray(told, (1,))[0]
    quantized.reduce_blocks(
        _words(terms, t.ranks), to, first, count, t.block, t.flag_block, t.scale, t.spare, t.blocks * t.block,
        t.shard_old, t.shard_new, t.kept, t.values, t.large != 0, t.code, t.scale_tag,
    )  # fmt: skip
    fence()
    return 0


@kernel
def _decode_quantized(told, shard, first, count, source):
    t = carray(told, (1,))[0]
    into, offsets, numels = _slots(t, t.into)
    start = (shard * t.blocks + first) * t.block
    quantized.dequantize_blocks(
        source, count, t.block, start, offsets, numels, into, t.tag, t.stream != 0, t.finite, t.top, t.code, t.scale_tag
    )  # fmt: skip
    fence()
    return 0


@kernel
def _encode_plain(told, shard, first, count, to):
    t = carray(told, (1,))[0]
    tensors, offsets, numels = _slots(t, t.tensors)
    start = (shard * t.blocks + first) * PLAIN_BLOCK
    stop = start + count * PLAIN_BLOCK
    plain.flatten_range(tensors, t.tag, offsets, numels, start, stop, to, t.wire_tag, t.one, False)
    return 0


@kernel
def _average_plain(told, first, count, terms, to):
    t = carray(told, (1,))[0]
    numel = count * PLAIN_BLOCK
    plain.reduce_range(_words(terms, t.ranks), to, numel, t.wire_tag, t.scale, t.spare, t.values, False)
    return 0


@kernel
def _decode_plain(told, shard, first, count, source):
    t = carray(told, (1,))[0]
    into, offsets, numels = _slots(t, t.into)
    start = (shard * t.blocks + first) * PLAIN_BLOCK
    stop = start + count * PLAIN_BLOCK
    plain.unflatten_range(source, t.wire_tag, start, stop, offsets, numels, into, t.tag, t.one, t.stream != 0, t.finite)
    fence()
    return 0


@kernel
def _keep(told, shard, first, count, source):
    # What would be decoded stays encoded, in its place in a wire.
    t = carray(told, (1,))[0]
    payload = t.into + shard * t.shard_bytes
    copy(payload + first * t.width, source, count * t.width)
    scales = payload + t.blocks * t.width + first * t.scale_bytes
    copy(scales, source + count * t.width, count * t.scale_bytes)
    return 0


_FUNCTIONS = {
    "fp16": (_encode_fp16, _average_fp16, _decode_fp16),
    "quantized": (_encode_quantized, _average_quantized, _decode_quantized),
    "plain": (_encode_plain, _average_plain, _decode_plain),
}


def _address(function: Any, kind: Any) -> int:
    compiled = function.get_compile_result(kind)
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address


@cache
def _compiled(
    family: str, keeps: bool, fields: tuple[tuple[str, np.dtype[Any]], ...]
) -> tuple[np.dtype[Any], tuple[int, int, int]]:
    """The dtype of a record with such fields, and the addresses of the three functions that are told one."""
    dtype = np.dtype(list(fields), align=True)
    encode, average, decode = _FUNCTIONS[family]
    told = signature(types.int64, types.CPointer(from_dtype(dtype)), *[types.int64] * 4)
    made = [_address(function, told) for function in (encode, average, _keep if keeps else decode)]
    return dtype, (made[0], made[1], made[2])


def pieces(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    into: Sequence[Tensor] | Tensor,
    wire_dtype: torch.dtype,
    ranks: int,
    scale: float,
    finite: Tensor | None = None,
    block: int = 0,
    form: BlockFormat = INT8_FORMAT,
    flag_block: int = 0,
    residuals: Tensor | None = None,
    shard_residuals: Tensor | None = None,
    turn: Tensor | None = None,
) -> Pieces:
    """How the averages of tensors are made piece by piece; `finite` becomes 1, and 0 later if they are not.

    Args:
        tensors: in the slots.
        slots: of the flat, which divides into a shard for each of `ranks`.
        into: tensors for the averages, of the same dtype; or the wire, where they stay encoded and are not looked at.
        wire_dtype: uint8 for blocks, quantized or FP16.
        ranks: their number.
        scale: by which sums are multiplied.
        finite: a byte.
        block: elements of a quantized block, else 0.
        form: of quantized blocks.
        flag_block: the first block of the own shard that holds used-flags.
        residuals: of the tensors; row `turn` is read, and the other one written.
        shard_residuals: likewise, of the averages of the own shard.
        turn: the row.
    """
    if finite is not None:
        finite.fill_(1)
    dtype, keeps = tensors[0].dtype, isinstance(into, Tensor)
    if block:
        family, elements, width, scale_bytes = "quantized", block, form.payload_bytes(block), form.scale_bytes
    elif wire_dtype is torch.uint8:
        family, elements, width, scale_bytes = "fp16", FP16_BLOCK, 2 * FP16_BLOCK, 1
    else:
        family, elements, width, scale_bytes = "plain", PLAIN_BLOCK, PLAIN_BLOCK * wire_dtype.itemsize, 0
    sources, values = addresses(tensors), scratch_for(elements) if block else stage(max(2 * elements, CHUNK))
    places = addresses([into] if isinstance(into, Tensor) else into)
    computed = np.float64 if torch.float64 in (dtype, wire_dtype) else np.float32
    summed = np.float64 if family == "plain" and wire_dtype is torch.float64 else np.float32
    large = slots.total * 4 >= STREAM_BYTES
    old, new, kept = rows_of(residuals, turn)
    shard_old, shard_new, _ = rows_of(shard_residuals, turn)
    code, scale_tag = CODES[form]
    record: dict[str, Any] = {
        "tensors": sources.ctypes.data,
        "into": int(places[0]) if keeps else places.ctypes.data,
        "offsets": slots.offsets.ctypes.data,
        "numels": slots.numels.ctypes.data,
        "slots": len(tensors),
        "ranks": ranks,
        "blocks": slots.total // ranks // elements,
        "block": elements,
        "width": width,
        "scale_bytes": scale_bytes,
        "shard_bytes": into.nbytes // ranks if isinstance(into, Tensor) else 0,
        "flag_block": flag_block,
        "values": values.data_ptr(),
        "finite": 0 if finite is None else finite.data_ptr(),
        "old": old,
        "new": new,
        "shard_old": shard_old,
        "shard_new": shard_new,
        "kept": kept,
        "large": int(large),
        "stream": int(large and places[0] != sources[0]),  # else they lie in the cache
        "tag": TAGS[dtype],
        "wire_tag": TAGS.get(wire_dtype, TAGS[dtype]),
        "top": np.float32(form.top(by_chance=False)),
        "code": code,
        "scale_tag": scale_tag,
        "one": computed(1),
        "scale": summed(scale),
        "spare": summed(spare(ranks)),
    }
    kinds = tuple(getattr(value, "dtype", np.dtype(np.int64)) for value in record.values())
    made, functions = _compiled(family, keeps, tuple(zip(record, kinds, strict=True)))
    told = np.array([tuple(record.values())], made)
    alive = (told, sources, places, values, slots, tensors, into, finite, residuals, shard_residuals)
    return Pieces(*functions, told.ctypes.data, slots.total // ranks // elements, width + scale_bytes, alive)
