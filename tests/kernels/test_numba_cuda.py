"""The numba_cuda kernels without a GPU: in Numba's simulator, and what the simulator leaves out, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from fastreduce.ops import backends
from tests.support.commands import PYTHON, run

from .cases import Memory, assert_same_bits, values

pytest.importorskip("numba_cuda")

from fastreduce.kernels import numba_cuda_memory, numba_cuda_tiles, numba_cuda_vectors
from fastreduce.kernels import numba_cuda_simulated as twins

ROOT = Path(__file__).parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _in_the_simulator(*which: str) -> int:
    """Run tests of kernels there; returns how many passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *which]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout[-8000:]
    assert "skipped" not in done.stdout, done.stdout[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0


def test_any_shape_in_the_simulator():
    assert _in_the_simulator("tests/kernels/test_any_shape.py", "-k", "numba_cuda") == 1


NOT_THERE = {"test_numba_cuda", "test_aot", "test_any_shape"}  # the last one is above
FILES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py") if path.stem not in NOT_THERE)
WITHOUT_CASES = {"test_fp16_range", "test_launches", "test_powersgd_kernels", "test_topk_kernels"}


@pytest.mark.long
@pytest.mark.timeout(900)  # a thread for each thread of a block
@pytest.mark.parametrize("file", FILES)
def test_kernel_cases_in_the_simulator(file: str):
    assert (_in_the_simulator(f"tests/kernels/{file}.py", "-k", "numba_cuda") == 0) == (file in WITHOUT_CASES)


def _not_found(*_: object) -> None:
    raise RuntimeError("libnvvm.so: not found")


@pytest.mark.skipif(not hasattr(np, "row_stack"), reason="this NumPy is another reason, if numba-cuda does not fit it")
def test_the_reason_why_it_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch):
    assert "NUMBA_ENABLE_CUDASIM=1" in (backends.why_not("numba_cuda", CPU) or "")
    assert backends.why_not("numba_cuda", CUDA) is None
    with monkeypatch.context() as patch:
        patch.setattr("numba.cuda.cudadrv.nvvm.NVVM.get_ir_version", _not_found)
        assert "CUDA_HOME" in (backends.why_not("numba_cuda", CUDA) or "")
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    assert "pip install" in (backends.why_not("numba_cuda", CUDA) or "")


# As NumPy 2.5 is, which needs a later Python than some that this runs on.
WITHOUT_ROW_STACK = """
import numpy
if hasattr(numpy, "row_stack"):
    del numpy.row_stack
import torch
from fastreduce.ops import backends
print(backends.why_not("numba_cuda", torch.device("cuda", 0)))
"""


@pytest.mark.long
def test_a_numpy_that_numba_cuda_does_not_fit_is_named(tmp_path: Path):
    script = tmp_path / "asks.py"
    script.write_text(WITHOUT_ROW_STACK)
    said = run(PYTHON, script, seconds=100).stdout
    assert "does not fit NumPy" in said and "pip install 'numpy<2.5'" in said


TAGS = {**numba_cuda_tiles.TAGS, torch.int8: np.int8(0)}
# Dtypes of memory that take every path of a load and of a store.
PAIRS = [
    (torch.float64, torch.float64),
    (torch.float64, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.int8),
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.float16, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.int8, torch.bfloat16),
]


def _on_cpu(name: str) -> Any:
    module = numba_cuda_memory if hasattr(numba_cuda_memory, name) else numba_cuda_vectors
    return intrinsic(getattr(module, name)._defn)


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    """The intrinsics that are no instruction of a GPU, compiled for the CPU from the code that they emit for a GPU."""
    names = ["load", "store", "fetch", "fetch_int32", "size_of", "lanes_of", "quotient"]
    names += ["largest_bits", "from_bits", "more_than_half"]
    names += ["bits_of", "byte_of", "is_fp8", "load_int4", "store_int4", "largest_and_sign", "at_most", "e4m3_rounders"]
    return {name: _on_cpu(name) for name in names}


def test_loads_and_stores_do_what_their_twins_in_the_simulator_do(on_cpu):
    load, store = on_cpu["load"], on_cpu["store"]

    @njit
    def move(source, tag, target, target_tag, count, extent):
        store(target, target_tag, load(source, tag, target_tag, count), count, extent)

    memory = Memory(CPU)
    for dtype, to in PAIRS:
        lanes = twins.lanes_of(TAGS[dtype], TAGS[to])
        numbers = torch.arange(-120, 120).to(dtype) if torch.int8 in (dtype, to) else values(240, dtype, 0)
        if dtype == torch.float32 and to != torch.int8:
            numbers[1:2] = torch.tensor([0x7F800001], dtype=torch.int32).view(dtype)  # a NaN in its lowest bits alone
        for part in numbers.split(lanes):
            for shift, count, extent in [(0, lanes, lanes), (1, lanes, lanes), (0, 1, lanes), (1, 0, 1), (0, -1, -1)]:
                source, mine, theirs = memory.copy(part, shift), memory.empty(lanes, to), memory.empty(lanes, to)
                move(source.data_ptr(), TAGS[dtype], mine.data_ptr(), TAGS[to], count, extent)
                vector = twins.load(source.data_ptr(), TAGS[dtype], TAGS[to], count)
                with np.errstate(over="ignore"):
                    twins.store(theirs.data_ptr(), TAGS[to], vector, count, extent)
                assert_same_bits(mine, theirs, f"{dtype} to {to}, {count} of {extent}, shift {shift}")
    memory.check()


def test_the_other_intrinsics_do_what_their_twins_in_the_simulator_do(on_cpu):
    load, store, fetch, fetch_int32 = (on_cpu[name] for name in ("load", "store", "fetch", "fetch_int32"))
    quotient = on_cpu["quotient"]
    largest_bits, from_bits, more_than_half = (on_cpu[n] for n in ("largest_bits", "from_bits", "more_than_half"))
    fp32 = TAGS[torch.float32]

    @njit
    def look(source, target):
        numbers = load(source, fp32, fp32, 4)
        store(target, fp32, more_than_half(numbers), 4, 4)
        words = fetch(source, 1), fetch_int32(source + 8)
        return largest_bits(numbers), from_bits(largest_bits(numbers)), quotient(1000, 7), words

    rows = [
        [0.5, 0.50001, -7.0, 1.0],
        [np.nan, np.inf, 0.0, -0.0],
        [-np.inf, 2.0, -3.0, 0.4],
        [0.0, 1e-40, -2e-40, 0.0],
    ]
    for row in rows:
        numbers, found = torch.tensor(row), torch.empty(4)
        vector = twins.load(numbers.data_ptr(), fp32, fp32, 4)
        bits, largest, whole, words = look(numbers.data_ptr(), found.data_ptr())
        assert (bits, whole) == (twins.largest_bits(vector), 142)
        assert words == (numbers.view(torch.int64)[1].item(), twins.fetch_int32(numbers.data_ptr() + 8))
        assert words[1] == numbers.view(torch.int32)[2].item()
        assert np.float32(largest).view(np.int32) == np.float32(twins.from_bits(bits)).view(np.int32)
        assert_same_bits(found, torch.from_numpy(twins.more_than_half(vector)))


def test_int4_intrinsics_do_what_their_twins_in_the_simulator_do(on_cpu):
    load, load_int4, store_int4 = (on_cpu[name] for name in ("load", "load_int4", "store_int4"))
    largest_and_sign, at_most, bits_of = (on_cpu[name] for name in ("largest_and_sign", "at_most", "bits_of"))
    tags, fp32, int8 = (np.uint32(0), np.int8(0)), np.float32(0), np.int8(0)

    @njit
    def look(source, numbers, target, count):
        found = load(numbers, fp32, int8, 16)
        store_int4(target, load_int4(source, count))
        store_int4(target + 8, at_most(found, np.float32(7)))
        return largest_and_sign(found)

    @njit
    def widths(first, second):
        return bits_of(first), bits_of(second)

    assert widths(*tags) == tuple(map(twins.bits_of, tags)) == (4, 8)
    random = np.random.default_rng(0)
    for count in (16, 0):
        payload = torch.from_numpy(random.integers(0, 256, 8, np.uint8))
        numbers = torch.from_numpy(random.integers(-8, 16, 16).astype(np.float32))
        mine, theirs = torch.empty(16, dtype=torch.uint8), torch.empty(16, dtype=torch.uint8)
        key = look(payload.data_ptr(), numbers.data_ptr(), mine.data_ptr(), count)
        vector = twins.load(numbers.data_ptr(), fp32, int8, 16)
        twins.store_int4(theirs.data_ptr(), twins.load_int4(payload.data_ptr(), count))
        twins.store_int4(theirs.data_ptr() + 8, twins.at_most(vector, np.float32(7)))
        assert_same_bits(mine, theirs)
        assert_same_bits(mine[:8], payload if count else torch.zeros_like(payload))
        assert key == twins.largest_and_sign(vector)
    for row, plus in [([-3.0, 3.0], 1), ([3.0, -4.0], 0), ([-np.inf], 0), ([np.inf, -np.inf], 1), ([-1e-40, 2e-40], 1)]:
        numbers = torch.tensor(row + [0.0] * (16 - len(row)))
        key = look(payload.data_ptr(), numbers.data_ptr(), mine.data_ptr(), 0)
        assert key == twins.largest_and_sign(twins.load(numbers.data_ptr(), fp32, int8, 16))
        assert key == int(numbers.abs().max().view(torch.int32)) & -2 | plus


def test_e4m3_is_what_its_twins_in_the_simulator_make_of_it(on_cpu):
    load, store, e4m3_rounders = (on_cpu[name] for name in ("load", "store", "e4m3_rounders"))
    fp32, e4m3, int8, int4 = np.float32(0), np.uint8(0), np.int8(0), np.uint32(0)

    @njit
    def look(source, target, numbers, rounders):
        store(target, fp32, load(source, e4m3, fp32, 16), 16, 16)
        store(source, e4m3, load(target, fp32, int8, 16), 16, 16)
        store(rounders, fp32, e4m3_rounders(load(numbers, fp32, int8, 16)), 16, 16)

    every = torch.cat([torch.arange(127), torch.arange(129, 255), torch.zeros(3)]).to(torch.uint8)
    for part in every.split(16):
        source, target, rounders = part.clone(), torch.empty(16), torch.empty(16)
        numbers = torch.cat([part.float() - 100, torch.tensor([0.0, 2.0**-7, 2.0**-6, 448.0])])[-16:].clone()
        look(source.data_ptr(), target.data_ptr(), numbers.data_ptr(), rounders.data_ptr())
        assert_same_bits(target, part.view(torch.float8_e4m3fn).float())
        assert_same_bits(target, torch.from_numpy(twins.load(part.data_ptr(), e4m3, fp32, 16)))
        assert_same_bits(source, part)
        theirs = torch.empty_like(part)
        twins.store(theirs.data_ptr(), e4m3, target.numpy(), 16, 16)
        assert_same_bits(theirs, part)
        assert_same_bits(rounders, torch.from_numpy(twins.e4m3_rounders(numbers.numpy())))

    @njit
    def kinds(code):
        return on_fp8(code), byte(code)

    on_fp8, byte = on_cpu["is_fp8"], on_cpu["byte_of"]
    for code in (e4m3, int8, int4):
        assert kinds(code) == (twins.is_fp8(code), 0)
        assert twins.byte_of(code).dtype == (np.int8 if code is int4 else code.dtype)


def test_sums_and_counts_are_those_of_their_twins_in_the_simulator(monkeypatch: pytest.MonkeyPatch):
    """Compiled for the CPU, with its own products and sums in the place of a GPU's: LLVM fuses none unless told to."""
    kinds = {"mul": ir.IRBuilder.fmul, "add": ir.IRBuilder.fadd}
    monkeypatch.setattr(numba_cuda_vectors, "rounded_op", lambda builder, kind, a, b: kinds[kind](builder, a, b))
    load, squares, odd = (_on_cpu(name) for name in ("load", "sum_of_squares", "not_finite"))

    @njit
    def look(source, tag, to, sum_tag, count):
        numbers = load(source, tag, to, 16)
        return squares(numbers, to, sum_tag, count), odd(numbers, to, count)

    for dtype, to in PAIRS:
        if to != torch.int8:
            sum_tag = np.float64(0) if to == torch.float64 else np.float32(0)
            lanes = twins.lanes_of(TAGS[dtype], TAGS[to])
            for special in (False, True):
                numbers = torch.arange(lanes).to(dtype) if dtype == torch.int8 else values(lanes, dtype, 3, special)
                vector = twins.load(numbers.data_ptr(), TAGS[dtype], TAGS[to], lanes)
                for count in (-1, 1, lanes):
                    total, many = look(numbers.data_ptr(), TAGS[dtype], TAGS[to], sum_tag, count)
                    with np.errstate(over="ignore", invalid="ignore"):
                        wanted = twins.sum_of_squares(vector, TAGS[to], sum_tag, count)
                        assert many == twins.not_finite(vector, TAGS[to], count), (dtype, to, count)
                    np.testing.assert_array_equal(total, wanted, f"{dtype} to {to}, {count}")
