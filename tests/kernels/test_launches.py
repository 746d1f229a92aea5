"""Launches through Triton's own launcher over a driver that does nothing: what is kept is what Triton would find."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fastreduce.kernels.slots import (
    FP8_FORMAT,
    INT4_FORMAT,
    INT8_FORMAT,
    OF_AVERAGES,
    Draws,
    SlotTable,
    fp16_shard_bytes,
    shard_bytes,
)
from tests.support.commands import run


@pytest.mark.skipif(not find_spec("triton") or not shutil.which("gcc"), reason="no triton, or no gcc for its launcher")
@pytest.mark.parametrize(
    "check",
    [
        "check_each_operation",
        *(
            pytest.param(check, marks=pytest.mark.long)
            for check in (
                "check_each_format",
                "check_that_warming_up_compiles_all",
                "check_that_ever_new_sizes_are_not_kept_for_ever",
                "check_that_no_sum_of_other_memory_is_launched",
                "check_that_nothing_stale_is_launched",
            )
        ),
    ],
)
def test_a_kept_kernel_is_launched_as_triton_launched_it(check: str):
    code = f"from tests.kernels.test_launches import {check}; {check}()"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run(sys.executable, "-c", code, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def check_that_ever_new_sizes_are_not_kept_for_ever() -> None:
    from tests.support import cuda_stub

    library = cuda_stub.activate()
    from fastreduce.kernels import triton_fp16, triton_tiles

    launched = ctypes.c_long.in_dll(library, "fastreduce_launches")
    with patch.object(triton_tiles, "MOST", 10):
        for blocks in range(1, 51):
            nbytes = fp16_shard_bytes(blocks)
            received, shard = (torch.zeros(*shape, dtype=torch.uint8) for shape in ((2, nbytes), (nbytes,)))
            for _ in range(2):
                triton_fp16.reduce_fp16(received, shard, 0.5)
    assert launched.value == 100
    for kept in (triton_tiles._compiled, triton_tiles._sums):
        assert 0 < len(kept) <= 10, len(kept)


def check_that_nothing_stale_is_launched() -> None:
    """Whatever changes between two launches for one slot table: they get what a new table's launches get."""
    from tests.support import cuda_stub

    cuda_stub.activate()
    from fastreduce.kernels import triton_cast, triton_fp16, triton_int8
    from tests.kernels.cases import slot_table

    numels, random = [300, 128, 5], Random(0)
    kept = slot_table(numels, 128, shards=2)
    memory = torch.zeros(1 << 18, dtype=torch.uint8)
    aligned = -memory.data_ptr() % 256

    def at(start: int, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return memory[aligned + start : aligned + start + count * dtype.itemsize].view(dtype)

    def given(slots: SlotTable, operation: str) -> list[object]:
        """Numbers and addresses as they are, tables on the device by what is in them."""
        launch = slots.cache[operation][1]
        tables = [x.tolist() for x in launch.tensors if isinstance(x, torch.Tensor) and x.dtype is torch.int64]
        theirs = {x.data_ptr() for x in launch.tensors if isinstance(x, torch.Tensor) and x.dtype is torch.int64}
        return [id(launch.compiled), launch.programs, tables, [x for x in launch.passed if x not in theirs]]

    choices: dict[str, Sequence[Any]] = {
        "form": [INT8_FORMAT, FP8_FORMAT, INT4_FORMAT],
        "shards": [1, 2],
        "dtype": [torch.float32, torch.float16],
        "tensors": [0, 1 << 13],
        "wire": [1 << 15, 5 << 13],
        "residuals": [None, 9 << 13, 5 << 14],
        "turn": [1 << 16, (1 << 16) + 16],
        "finite": [None, 6 << 14, (6 << 14) + 16],
        "statistics": [None, 7 << 14],
    }
    now = {name: values[0] for name, values in choices.items()}
    for _ in range(150):
        name = random.choice(list(choices))
        now[name] = random.choice(choices[name])
        form, shards, dtype = now["form"], now["shards"], now["dtype"]
        tensors = [at(now["tensors"] + (i << 11), numel, dtype) for i, numel in enumerate(numels)]
        wire = at(now["wire"], shards * shard_bytes(kept.total // shards // 128, 128, form))
        residuals = turn = finite = statistics = None
        if now["residuals"] is not None:
            residuals = at(now["residuals"], 2 * kept.total, torch.float32).view(2, -1)
            turn = at(now["turn"], 1, torch.int32)
        if now["finite"] is not None:
            finite = at(now["finite"], 1)
        if now["statistics"] is not None:
            statistics = at(now["statistics"], 64, torch.float32).view(-1, 2)
        new = slot_table(numels, 128, shards=2)
        for slots in (new, kept):
            triton_int8.quantize(tensors, slots, wire, shards, 128, residuals, turn, finite, form)
            triton_int8.dequantize(wire, shards, 128, slots, tensors, statistics, finite, turn, form)
            halves = at(now["wire"], shards * fp16_shard_bytes(kept.total // shards // 128))
            triton_fp16.flatten_fp16(tensors, slots, halves, shards, 1, finite)
            triton_fp16.unflatten_fp16(halves, shards, slots, tensors, 0.5, statistics, finite)
            plain = at(now["wire"], kept.total, dtype)
            triton_cast.flatten(tensors, slots, plain, 0.5, finite)
            triton_cast.unflatten(plain, slots, tensors, 0.5, statistics, finite)
        for operation in ("quantize", "dequantize", "flatten", "unflatten", "flatten_fp16", "unflatten_fp16"):
            assert given(kept, operation) == given(new, operation), operation


def check_that_no_sum_of_other_memory_is_launched() -> None:
    """Whatever changes between two sums of shards: each gets what it would get were none kept."""
    from tests.support import cuda_stub

    cuda_stub.activate()
    from fastreduce.kernels import triton_cast, triton_fp16, triton_int8, triton_tiles

    random, memory = Random(0), torch.zeros(1 << 17, dtype=torch.uint8)
    aligned = -memory.data_ptr() % 256

    def at(place: int, ranks: int, nbytes: int) -> torch.Tensor:
        return memory[aligned + place :][: ranks * nbytes].view(ranks, nbytes)

    choices: dict[str, Sequence[Any]] = {
        "received": [0, 1 << 13],
        "ranks": [2, 3],
        "shard": [1 << 15, (1 << 15) + 512],
        "blocks": [4, 8],
        "scale": [0.5, 1 / 3],
        "form": [INT8_FORMAT, FP8_FORMAT, INT4_FORMAT],
        "dtype": [torch.float32, torch.bfloat16],
        "flag_block": [1, 3],
        "residuals": [None, 1 << 16, 3 << 15],
        "turn": [5 << 14, (5 << 14) + 16],
    }
    now = {name: values[0] for name, values in choices.items()}
    launched: list[triton_tiles.Launch] = []
    for _ in range(150):
        name = random.choice(list(choices))
        now[name] = random.choice(choices[name])
        form, blocks, scale, dtype = (now[each] for each in ("form", "blocks", "scale", "dtype"))

        def shards(nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
            return at(now["received"], now["ranks"], nbytes), at(now["shard"], 1, nbytes)[0]

        residuals = turn = None
        if now["residuals"] is not None:
            residuals = at(now["residuals"], 2, 512 * blocks).view(torch.float32)
            turn = at(now["turn"], 1, 4)[0].view(torch.int32)
        received, shard = (each.view(dtype) for each in shards(512 * blocks))
        told = (128, now["flag_block"], residuals, turn, form)
        operations = [
            partial(triton_cast.reduce_shards, received, shard, scale),
            partial(triton_fp16.reduce_fp16, *shards(fp16_shard_bytes(blocks)), scale),
            partial(triton_int8.reduce_quantized, *shards(shard_bytes(blocks, 128, form)), scale, *told),
        ]
        for operation in operations:
            with patch.dict(triton_tiles._sums, clear=True):
                operation()
                (alone,) = triton_tiles._sums.values()
            with patch.object(triton_tiles.Launch, "run", lambda self: launched.append(self)):
                operation()
                operation()
            assert launched[-1][:-1] == alone[:-1], (operation, now)
            assert any(launched[-1] is kept for kept in triton_tiles._sums.values()), "and it is kept"
            assert alone.tensors == ()


def check_each_operation() -> None:
    """Each operation as Triton finds it and as it is kept, until memory or numbers change; not only multiples of 16."""
    from tests.support import cuda_stub

    library = cuda_stub.activate()
    from triton import knobs

    from fastreduce.kernels import triton_tiles

    def launch(operation: Callable[[], None]) -> tuple[list[int], int]:
        count = ctypes.c_long.in_dll(library, "fastreduce_launches")
        before, known = count.value, len(triton_tiles._compiled)
        operation()
        assert count.value == before + 1
        return list((ctypes.c_uint * 5).in_dll(library, "fastreduce_last")), len(triton_tiles._compiled) - known

    for offset in (0, 8):
        case = Case(offset)
        for name, operation in case.operations().items():
            (found, compiled), (kept, again) = launch(operation), launch(operation)
            assert kept == found, (name, offset)
            assert (compiled, again) == (1, 0), f"{name}: what is a multiple of 16 is compiled for"
            profiled: list[object] = []
            knobs.runtime.launch_enter_hook.add(profiled.append)
            assert launch(operation)[0] == kept and len(profiled) == 1, f"{name}: a profiler sees it"
            knobs.runtime.launch_enter_hook.remove(profiled.append)
            in_slots = not name.startswith(("reduce", "share"))
            before = case.tensors[1]
            case.tensors[1] = before.clone()
            (moved, _), (still, _) = launch(operation), launch(operation)
            assert still == moved and (moved != kept) == in_slots, f"{name}: a table of other addresses"
            if "flatten" in name and name != "flatten_fp16":
                passed = case.slots.cache[name][1].passed
                case.scale = 0.3
                launch(operation)
                assert case.slots.cache[name][1].passed != passed, f"{name}: another scale"
                case.scale = 0.5


def check_each_format() -> None:
    """Every format, by chance and with what error feedback keeps: a launch each, kept until a step has other memory."""
    from tests.support import cuda_stub

    library = cuda_stub.activate()
    from fastreduce.kernels import triton_cast, triton_int8, triton_tiles
    from tests.kernels.cases import slot_table

    launches = ctypes.c_long.in_dll(library, "fastreduce_launches")
    plain = slot_table([300, 128, 5], 128, shards=2)
    slots = SlotTable(plain.offsets, plain.numels, plain.total, np.arange(1, 4), np.zeros(3, np.int64))
    half, turn, finite = slots.total // 2, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.uint8)
    shard = slots.shard(half, 2 * half)
    tensors = [torch.zeros(int(numel)) for numel in slots.numels]
    residuals, own = torch.zeros(2, slots.total), torch.zeros(2, half)
    bf16 = torch.zeros(slots.total, dtype=torch.bfloat16)

    def every_operation(step: torch.Tensor) -> dict[str, Callable[[], None]]:
        mine, averages = Draws(3, 1, step), Draws(3, OF_AVERAGES, step)
        found: dict[str, Callable[[], None]] = {
            "flatten": lambda: triton_cast.flatten(tensors, slots, bf16, 1.0, finite, mine),
            "reduce": lambda: triton_cast.reduce_shards(bf16.view(2, -1), bf16[half:], 0.5, shard, averages),
        }
        for form in (INT8_FORMAT, INT4_FORMAT, FP8_FORMAT):
            wire = wires[form.name]
            to = (tensors, slots, wire, 2, 128)
            sums = (wire.view(2, -1), wire[len(wire) // 2 :], 0.5, 128, 2)
            found |= {
                f"quantize {form.name}": partial(triton_int8.quantize, *to, None, None, finite, form, mine),
                f"keep {form.name}": partial(triton_int8.quantize, *to, residuals, turn, finite, form),
                f"dequantize {form.name}": partial(
                    triton_int8.dequantize, wire, 2, 128, slots, tensors, None, finite, turn, form
                ),
                f"sum {form.name}": partial(triton_int8.reduce_quantized, *sums, None, None, form, shard, averages),
                f"sum and keep {form.name}": partial(triton_int8.reduce_quantized, *sums, own, turn, form),
            }
        return found

    forms = (INT8_FORMAT, INT4_FORMAT, FP8_FORMAT)
    wires = {form.name: torch.zeros(2 * shard_bytes(half // 128, 128, form), dtype=torch.uint8) for form in forms}
    for number, step in enumerate(torch.zeros(2, 1, 16, dtype=torch.int64)[:, 0].unbind()):
        for name, operation in every_operation(step[:1]).items():
            for again in (False, True):
                before, known = launches.value, len(triton_tiles._compiled)
                operation()
                assert launches.value == before + 1, name
                assert len(triton_tiles._compiled) - known == (not again and number == 0), name
            drawn = name.partition(" ")[0] in ("flatten", "quantize")
            if drawn:
                launch = slots.cache[name.partition(" ")[0]][1]
                assert step.data_ptr() in launch.passed, f"{name}: the number of another step"
    theirs = {each.data_ptr() for each in (*wires.values(), *tensors, bf16, residuals, turn, finite)}
    for name in ("flatten", "quantize", "dequantize"):
        assert theirs.isdisjoint(each.data_ptr() for each in slots.cache[name][1].tensors), f"{name} keeps its caller's"


def check_that_warming_up_compiles_all() -> None:
    """Whatever a bucket's number is: where the byte lies that tells whether its averages are finite."""
    from tests.support import cuda_stub

    cuda_stub.activate()
    from triton.runtime.jit import JITFunction

    from fastreduce.ops import backends
    from fastreduce.policy import single
    from fastreduce.reduction.buckets import ParameterSpec, build_plan
    from fastreduce.reduction.pipeline import BucketPipeline, warm_up
    from fastreduce.transports import local_ranks

    compiled: list[str] = []
    compile_ = JITFunction._do_compile

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append(self.__name__)
        return compile_(self, *args, **options)

    device, transport = torch.device("cpu"), local_ranks(2)[0]
    with (
        patch.dict(os.environ, {backends.ENVIRONMENT_VARIABLE: "triton"}),
        patch.object(backends, "why_not", lambda name, device: None),
        patch.object(JITFunction, "_do_compile", noted),
    ):
        for text in ("fp16", "int8:error_feedback"):
            setting = single(text, "")
            warm_up(torch.float32, device, setting, transport, statistics=True)
            warm = len(compiled)
            specs = [ParameterSpec(str(i), 3000, torch.float32, device) for i in range(3)]
            plan = build_plan(specs, [[0], [1], [2]], alignment=setting.alignment, shards=2)
            verdicts = torch.ones(3, dtype=torch.uint8)
            for bucket in plan.buckets:
                pipeline = BucketPipeline(bucket, setting, transport, verdicts=verdicts)
                pipeline.keep_statistics()
                pipeline.launch_kernels([torch.zeros(3000)])
            assert warm and compiled[warm:] == [], f"{text}: {compiled[warm:]}"


class Case:
    """Every operation on the same tensors, with wires that begin so many bytes behind a multiple of 16."""

    def __init__(self, offset: int) -> None:
        from fastreduce.kernels import triton_cast, triton_fp16, triton_int8
        from tests.kernels.cases import slot_table  # asks for Triton's interpreter, which those have done without

        self.cast, self.fp16, self.int8 = triton_cast, triton_fp16, triton_int8
        self.offset, self.scale = offset, 0.5
        self.slots = slot_table([300, 128, 5], 128, shards=2)
        self.tensors = [torch.zeros(int(numel)) for numel in self.slots.numels]

    def memory(self, count: int) -> torch.Tensor:
        return torch.zeros(count + self.offset, dtype=torch.uint8)[self.offset :]

    def operations(self) -> dict[str, Callable[[], None]]:
        triton_cast, triton_fp16, triton_int8 = self.cast, self.fp16, self.int8
        slots, tensors, memory = self.slots, self.tensors, self.memory
        half = slots.total // 2
        fp16, int8 = fp16_shard_bytes(half // 128), shard_bytes(half // 128, 128)
        wire, received = memory(4 * half).view(torch.float16), memory(4 * half).view(torch.float16).view(2, -1)
        halves, halves_received = memory(2 * fp16), memory(2 * fp16).view(2, -1)
        quantized, quantized_received = memory(2 * int8), memory(2 * int8).view(2, -1)
        return {
            "flatten": lambda: triton_cast.flatten(tensors, slots, wire, self.scale),
            "unflatten": lambda: triton_cast.unflatten(wire, slots, tensors, self.scale),
            "reduce_shards": lambda: triton_cast.reduce_shards(received, wire[:half], self.scale),
            "flatten_fp16": lambda: triton_fp16.flatten_fp16(tensors, slots, halves, 2, 1),
            "unflatten_fp16": lambda: triton_fp16.unflatten_fp16(halves, 2, slots, tensors, self.scale),
            "reduce_fp16": lambda: triton_fp16.reduce_fp16(halves_received, halves[:fp16], self.scale),
            "share_exponents": lambda: triton_fp16.share_exponents(halves[:fp16], halves_received),
            "quantize": lambda: triton_int8.quantize(tensors, slots, quantized, 2, 128, None, None),
            "dequantize": lambda: triton_int8.dequantize(quantized, 2, 128, slots, tensors),
            "reduce_quantized": lambda: triton_int8.reduce_quantized(
                quantized_received, quantized[:int8], self.scale, 128, 0, None, None
            ),
        }
