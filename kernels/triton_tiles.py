"""A program's tile in the Triton kernels, the conversion of its numbers, and the launch of all programs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from .slots import INFINITE_FROM, SlotTable

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
FP16_INFINITE, BF16_INFINITE = tl.constexpr(INFINITE_FROM[torch.float16]), tl.constexpr(INFINITE_FROM[torch.bfloat16])


@triton.jit
def widen(values, compute: tl.constexpr):
    """Any wire or tensor dtype → the compute type; BF16 by its bits, for the interpreter's sake."""
    if values.dtype == tl.bfloat16:
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(compute)


@triton.jit
def convert(values, dtype: tl.constexpr):
    """The compute type → any wire or tensor dtype, to nearest even; FP64 reaches 16 bits through FP32.

    A GPU's own conversion to BF16 has these bits, but for the payload of a NaN; the interpreter's cuts off.
    """
    if dtype != tl.float64:
        values = values.to(tl.float32)
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(values == values, rounded, (bits >> 16) | 0x40)
        values = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def any_not_finite(values):
    """Whether some number is infinite or NaN, as one answer for the whole tile."""
    return tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1)) > 0


def double_bits(value: float) -> int:
    """A float as the integer of its 64 bits: Triton would pass a float argument as FP32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit
def double(bits):
    """The FP64 number of `double_bits`."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def load_tile(tiles, addresses, dtype: tl.constexpr):
    """This program's tile: its address, its place in the flat, its elements without and with the padding."""
    tiles += 5 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(addresses + tl.load(tiles)), tl.load(tiles + 1)
    count, extent = tl.load(tiles + 3).to(tl.int32), tl.load(tiles + 4).to(tl.int32)
    return tensor + start * (dtype.primitive_bitwidth // 8), tl.load(tiles + 2), count, extent


@triton.jit
def store_statistics(statistics, values, inside):
    """Write this program's row: how many of the values `inside` are not finite, and the sum of their squares."""
    dtype: tl.constexpr = statistics.dtype.element_ty
    values = tl.where(inside, widen(values, dtype), 0.0)
    row = statistics + 2 * tl.program_id(0).to(tl.int64)
    tl.store(row, tl.sum(tl.where(tl.abs(values) < float("inf"), 0, 1)).to(dtype))
    tl.store(row + 1, tl.sum(values * values))


@triton.jit
def overflows(values, dtype: tl.constexpr):
    """Whether a number is infinite or NaN once it is in a dtype."""
    limit: tl.constexpr = (
        FP16_INFINITE if dtype == tl.float16 else BF16_INFINITE if dtype == tl.bfloat16 else float("inf")
    )
    return (tl.abs(values) < limit) == 0


@triton.jit
def note_finite(finite, values, dtype: tl.constexpr):
    """Make the byte `finite` 0 if a value is not in a dtype; of eight neighbours, those of a thread, the largest tells.

    As integers magnitudes compare as the numbers do, with infinity and every NaN above them.
    """
    if dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(bits, (values.numel // 8, 8)), axis=1)
    odd = overflows(largest.to(tl.float64 if dtype == tl.float64 else tl.float32, bitcast=True), dtype)
    tl.store(finite + tl.zeros_like(odd).to(tl.int32), tl.zeros_like(odd).to(tl.uint8), mask=odd)


class Launch(NamedTuple):
    """A compiled kernel, its programs, and what they are given: numbers, and addresses in `tensors`, kept alive.

    `gpu` is the number of the device.
    """

    compiled: Any
    run_compiled: Any
    function: Any
    metadata: Any
    programs: int
    gpu: int | None
    passed: list[Any]
    tensors: tuple[Any, ...]

    def run(self) -> None:
        """Launch it on the current stream."""
        compiled, run_compiled, function, metadata, programs, gpu, passed, _ = self
        # A profiler's: lists in them, or in older versions of Triton functions or None.
        enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
        hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        if gpu is not None and gpu != torch.cuda.current_device():
            with torch.cuda.device(gpu):
                self.run()
        elif hooked:
            compiled[(programs, 1, 1)](*passed)
        else:
            stream = driver.active.get_current_stream(gpu or 0)
            run_compiled(programs, 1, 1, stream, function, metadata, None, None, None, *passed)


MOST = 4096  # kept kernels, and sums: numbers that change, such as sizes, make ever new ones
_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
_sums: dict[tuple[Any, ...], Launch] = {}
_runtime = knobs.runtime


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> Launch | None:
    """Run `programs` programs of a kernel on a device, multiplications and additions rounded one by one.

    In every launch Triton looks anew for what it has compiled, which takes the host several times as long as the launch
    itself. So it is kept here, by all that it was compiled for: dtypes, which addresses are multiples of 16, numbers.

    Returns:
        The launch, which can be run once more; None without programs, and in Triton's interpreter.
    """
    if not programs:
        return None
    compiled_for, passed = [id(kernel), device, *constants.values()], []
    for argument in arguments:
        if isinstance(argument, Tensor):
            at = argument.data_ptr()
            compiled_for += (argument.dtype, at & 15)
            passed.append(at)
        else:
            compiled_for.append(argument)
            passed.append(argument)
    key = tuple(compiled_for)
    kept = _compiled.get(key)
    new = kept is None
    if kept is None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compiled = kernel[(programs,)](*arguments, **constants, num_warps=4, enable_fp_fusion=False)
        if compiled is None:  # as it is by the interpreter
            return None
        if len(_compiled) >= MOST:
            _compiled.clear()  # Triton still has them
        kept = _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(arguments) :]]
    compiled, of_signature = kept
    handles = compiled.run, compiled.function, compiled.packed_metadata
    found = Launch(compiled, *handles, programs, device.index, passed + of_signature, arguments)
    if not new:  # else it has just been launched
        found.run()
    return found


def repeat(
    operation: str,
    slots: SlotTable,
    wire: Tensor,
    tensors: Sequence[Tensor],
    more: tuple[Any, ...],
    make: Callable[[], Launch | None],
) -> None:
    """Do the last launch of an operation for a slot table once more; `make` it where that had other memory or numbers.

    That holds for nothing while a CUDA graph is captured, which keeps the tables that it reads.

    Args:
        operation: its name.
        slots: keeps the launch.
        wire: the wire.
        tensors: what lies in the slots.
        more: what else there is but the shape of the slots, and for tensors their addresses.
        make: launches it.
    """
    dtype = tensors[0].dtype if tensors else None
    made_of = (wire.data_ptr(), wire.dtype, wire.numel(), dtype, *more, *map(Tensor.data_ptr, tensors))
    kept: tuple[tuple[Any, ...], Launch] | None = slots.cache.get(operation)
    if kept is not None and kept[0] == made_of and not (wire.is_cuda and torch.cuda.is_current_stream_capturing()):
        kept[1].run()
    elif (launched := make()) is not None:
        # All but the tables is the caller's, who may let go of it: what comes again has to have the same address.
        tables = tuple(each for each in launched.tensors if isinstance(each, Tensor) and each.dtype is torch.int64)
        slots.cache[operation] = made_of, launched._replace(tensors=tables)


def repeat_sum(
    operation: str, received: Tensor, shard: Tensor, more: tuple[Any, ...], make: Callable[[], Launch | None]
) -> None:
    """Do a launch that sums shards once more, as `repeat`; all that it reads and writes is memory of the caller's.

    Args:
        operation: its name.
        received: shards, `[ranks, elements]`.
        shard: their sum.
        more: what else there is but shapes, and for tensors their addresses.
        make: launches it.
    """
    memory = received.data_ptr(), shard.data_ptr(), shard.dtype, shard.device, received.shape[0], shard.numel()
    made_of = operation, *memory, *more
    kept = _sums.get(made_of)
    if kept is not None:
        kept.run()
    elif (launched := make()) is not None:
        if len(_sums) >= MOST:
            _sums.clear()
        _sums[made_of] = launched._replace(tensors=())  # which keeps nothing alive
