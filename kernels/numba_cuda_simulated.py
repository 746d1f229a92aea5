"""The twins of `numba_cuda_memory.py` and `numba_cuda_vectors.py` in NumPy, for the simulator: a vector is an array."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray

from .torch_residuals import scrambled

WIDTH = 16

Numbers = NDArray[Any]


def function(body: Any) -> Any:
    """A function that kernels call: here it is what it is."""
    return body


kernel = cuda.jit


def size_of(tag: Any) -> int:
    """Bytes of an element."""
    return int(tag.itemsize)


def lanes_of(tag: Any, other: Any) -> int:
    """Numbers of a vector between memory of two types."""
    return WIDTH // min(size_of(tag), size_of(other))


def quotient(a: int, b: int) -> int:
    """The whole part of a / b, for 0 <= a, b < 2^32."""
    return a // b


def fetch(address: int, index: int) -> int:
    """Entry `index` of a table of int64."""
    return ctypes.c_int64.from_address(int(address + 8 * index)).value


def fetch_int32(address: int) -> int:
    """An int32."""
    return ctypes.c_int32.from_address(int(address)).value


def fetch_byte(address: int) -> int:
    """A byte as a number from 0 to 255."""
    return ctypes.c_uint8.from_address(int(address)).value


def store_byte(address: int, number: int) -> None:
    """A number from 0 to 255 as a byte."""
    ctypes.c_uint8.from_address(int(address)).value = int(number)


def load(address: int, tag: Any, other: Any, count: int) -> Numbers:
    """A vector from memory of type `tag`, on its way to memory of type `other`; numbers from `count` on are zero."""
    memory = np.zeros(lanes_of(tag, other), tag.dtype)
    ctypes.memmove(memory.ctypes.data, int(address), int(max(0, min(len(memory), count))) * size_of(tag))
    memory = _widen(memory)
    wide = np.float64 in (tag.dtype, other.dtype) and np.int8 not in (tag.dtype, other.dtype)
    return memory.astype(np.float64 if wide else np.float32)


def _narrow(vector: Any, tag: Any) -> Numbers:
    memory = np.array(vector)
    if tag.dtype != np.float64:
        memory = memory.astype(np.float32)
    if tag.dtype == np.int16:
        return memory.astype(np.float16)
    if tag.dtype == np.uint16:
        bits = memory.view(np.uint32)
        rounded = np.where(np.isnan(memory), (bits >> 16) | 0x40, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return rounded.astype(np.uint16)
    if tag.dtype == np.uint8:
        return np.asarray(torch.from_numpy(memory).to(torch.float8_e4m3fn).view(torch.uint8))
    return memory.astype(tag.dtype)


def _widen(memory: Numbers) -> Numbers:
    if memory.dtype == np.int16:
        return memory.view(np.float16)
    if memory.dtype == np.uint8:
        return np.asarray(torch.from_numpy(memory).view(torch.float8_e4m3fn).float())
    return (memory.astype(np.uint32) << 16).view(np.float32) if memory.dtype == np.uint16 else memory


def store(address: int, tag: Any, vector: Any, count: int, extent: int) -> None:
    """The first `count` numbers of a vector to memory of type `tag`, each rounded once more, then zeros to `extent`."""
    memory = _narrow(vector, tag)
    memory[max(0, count) :] = 0
    ctypes.memmove(int(address), memory.ctypes.data, int(max(0, min(len(memory), extent))) * size_of(tag))


def bits_of(code: Any) -> int:
    """Bits of an element of a quantized wire."""
    return 4 if code.dtype == np.uint32 else 8


def byte_of(code: Any) -> Any:
    """The tag of a byte of a quantized wire: that of its elements, or of INT8 where two of them share one."""
    return np.int8(0) if code.dtype == np.uint32 else code


def is_fp8(code: Any) -> bool:
    """Whether elements of a quantized wire are E4M3."""
    return bool(code.dtype == np.uint8)


def e4m3_rounders(vector: Numbers) -> Numbers:
    """1.5 times 2^20 of each number's power of two, 2^-6 at least: a sum with it has the digits that E4M3 has."""
    binades = np.maximum(vector.view(np.int32) & 0x7F800000, 121 << 23)
    rounders: Numbers = (binades + ((20 << 23) + (1 << 22))).view(np.float32)
    return rounders


def _drawn(vector: Numbers, words: Any) -> NDArray[np.int32]:
    halves = np.array([half for word in words for half in (int(word) & 0xFFFF, int(word) >> 16 & 0xFFFF)], np.int32)
    exchanged = ((halves & 0xFF) << 8 | halves >> 8) ^ 0xFF
    return np.stack([halves, exchanged], axis=1).flatten()[: len(vector)]


def bf16_by_chance(vector: Numbers, words: Any) -> Numbers:
    """The BF16 numbers that random bits choose."""
    single = vector.astype(np.float32)
    rounded = (single.view(np.int32) + _drawn(vector, words) & -65536).view(np.float32)
    return np.where(np.isnan(single), single, rounded).astype(vector.dtype)


def whole_by_chance(fixed: Numbers, words: Any) -> Numbers:
    """The whole numbers that random bits choose of numbers times 2^15, to which 1.5 * 2^23 has been added."""
    number = fixed.view(np.int32) - 0x4B400000
    return (number + (_drawn(fixed, words) >> 1) >> 15).astype(np.float32)


def whole_by_own_bits(fixed: Numbers, values: Numbers, largest: int, first: int) -> Numbers:
    """The whole numbers that values choose by their bits, of themselves times 2^15 and with 1.5 * 2^23 added."""
    salt = torch.arange(first, first + len(values), device="cpu") ^ int(largest)
    drawn = np.asarray(scrambled(torch.from_numpy(values.view(np.int32).copy()), salt))
    number = fixed.view(np.int32) - 0x4B400000
    return (number + (drawn.astype(np.int32) >> 1) >> 15).astype(np.float32)


def e4m3_bases(vector: Numbers) -> Numbers:
    """2^-6 for each number below it, and 0 for others: added to its magnitude, the sum has E4M3's steps."""
    return np.where(np.abs(vector) < 2.0**-6, np.float32(2.0**-6), np.float32(0))


def magnitudes(vector: Numbers) -> Numbers:
    """The numbers without signs."""
    return np.abs(vector)


def e4m3_by_chance(sums: Numbers, words: Any) -> Numbers:
    """Numbers cut off to the 4 digits of E4M3, up or down as random bits choose."""
    summed = sums.view(np.int32) + (16 * _drawn(sums, words) + 8)
    cut: Numbers = (summed & -(1 << 20)).view(np.float32)
    return cut


def signed_as(vector: Numbers, signs: Numbers) -> Numbers:
    """Numbers from 0 on with the signs of others; a zero has none."""
    return np.copysign(vector, signs) + np.float32(0)


def load_int4(address: int, count: int) -> Numbers:
    """16 numbers of 4 bits, the first of each byte in its low ones; zeros where `count` is 0."""
    memory = np.zeros(WIDTH // 2, np.int8)
    if count > 0:
        ctypes.memmove(memory.ctypes.data, int(address), len(memory))
    return np.stack([memory << 4 >> 4, memory >> 4], axis=1).flatten().astype(np.float32)


def store_int4(address: int, vector: Any) -> None:
    """16 whole numbers from -8 to 7 as 8 bytes."""
    codes = np.array(vector).astype(np.int8)
    memory = codes[::2] & 15 | codes[1::2] << 4
    ctypes.memmove(int(address), memory.ctypes.data, len(memory))


def multiply(a: Any, b: Any) -> Any:
    """The product of two vectors of one type, or a vector and a number, or two numbers."""
    return a * b


def add(a: Any, b: Any) -> Any:
    """The sum of two vectors of one type, or a vector and a number, or two numbers."""
    return a + b


def divide(a: Any, b: Any) -> Any:
    """The quotient of two vectors of one type, or a vector and a number, or two numbers."""
    return a / b


def largest_bits(vector: Numbers) -> int:
    """The largest magnitude's bits: as integers they compare as the numbers do, infinity and every NaN above them."""
    return int((vector.view(np.int32) & 0x7FFFFFFF).max())


def largest_and_sign(vector: Numbers) -> int:
    """The largest magnitude's bits, the last of which is 1 if a number with a plus has them, but for that bit."""
    bits = vector.view(np.int32)
    return int((bits & 0x7FFFFFFE | (bits >= 0)).max())


def at_most(vector: Numbers, limit: np.float32) -> Numbers:
    """The smaller of each number and a limit."""
    return np.minimum(vector, limit)


def from_bits(bits: int) -> np.float32:
    """The FP32 number of 32 bits."""
    return np.int32(bits).view(np.float32)


def to_bits(number: np.float32) -> int:
    """The 32 bits of an FP32 number."""
    return int(np.float32(number).view(np.int32))


def power(exponent: int, like: Any) -> Any:
    """2^(exponent - 127) for an exponent from 1 to 254, in the type of another number."""
    return like.dtype.type(2.0 ** (int(exponent) - 127))


def where_finite(tested: Numbers, then: Numbers, otherwise: Numbers) -> Numbers:
    """Each number of the second vector where that of the first is finite, else of the third."""
    return np.where(np.isfinite(tested), then, otherwise)


def more_than_half(vector: Numbers) -> Numbers:
    """1 where a number is larger than 0.5, else 0."""
    return (vector > np.float32(0.5)).astype(np.float32)


def sum_of_squares(vector: Any, tag: Any, sum_tag: Any, count: int) -> Any:
    """The sum of the first `count` numbers' squares, in their order, each as memory of type `tag` will hold it."""
    total = sum_tag
    for number in _widen(_narrow(vector, tag)).astype(sum_tag.dtype)[: max(0, count)]:
        total = total + number * number
    return total


def not_finite(vector: Any, tag: Any, count: int) -> int:
    """How many of the first `count` numbers memory of type `tag` will hold as infinity or NaN."""
    return int((~np.isfinite(_widen(_narrow(vector, tag))[: max(0, count)])).sum())
