"""Kernels on a GPU: beside torch's plain ways and a copy, with the wire in L2 or not, under other launch settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fastreduce.ops import backends

from ..kernels import kernel_cases, operations
from ..kernels.kernel_cases import DTYPES, TO_NEAREST, Model, Options, alignment_of, case_id, check, model_of
from ..kernels.shapes import CAPS
from ..paired import describe
from .two_clocks import Clocks, Work, timed
from .worker_cases import Case

BIG_CAPS = (256 << 20,)  # bytes; elsewhere buckets are those of a step
BIG = ("bert_large", "gpt2_xl", "llama_1b")
ALL = 2_000_000_000  # elements: whole models
SECONDS = 0.4  # of measuring, for each case
FLUSH = 512 << 20  # bytes: several times what any L2 holds

Named = tuple[str, str, Options]


def _both(name: str, **options: Any) -> Iterator[Named]:
    for operation in ("flatten", "unflatten"):
        yield operation, name, {**options, "scale": 0.5}


# Those on which a goal stands: of each goal one, then the others.
GOALS: list[Named] = [
    *_both("bert_large", dtype="fp16"),
    ("quantize", "bert_large", {"grads": "fp32"}),
    ("dequantize", "bert_large", {"grads": "fp32"}),
    *((operation, "bert_large", {"compression": "fp8"}) for operation in ("quantize", "dequantize")),
    ("unflatten_with_statistics", "resnet50", {"dtype": "fp16", "scale": 0.5}),
    ("reduce_shards", "bert_large", {"dtype": "fp16", "scale": 1 / 2, "ranks": 2}),
    *_both("resnet50", grads="fp32", dtype="fp16"),
    *_both("bert_large", dtype="bf16"),
    ("quantize", "bert_large", {"error_feedback": True}),
    ("dequantize_with_statistics", "resnet50", {}),
    ("unflatten_with_statistics", "resnet50", {"dtype": "bf16", "scale": 0.5}),
    ("dequantize_with_statistics", "resnet50", {"compression": "int4"}),
    *_both("gpt2_xl", dtype="fp16"),
    *_both("llama_1b", dtype="fp16"),
    *_both("tiny", dtype="fp16"),
    ("reduce_shards", "bert_large", {"dtype": "fp16", "scale": 1 / 8, "ranks": 8}),
    *_both("resnet50", grads="fp32", dtype="bf16"),
    *_both("resnet50", grads="bf16", dtype="bf16"),
    *_both("resnet50", grads="bf16", dtype="fp16"),
    ("quantize", "bert_large", {"compression": "fp8", "error_feedback": True}),
    ("quantize", "bert_large", {"compression": "fp8:rounding=stochastic"}),
]
TELLING: list[Named] = [
    *((operation, "bert_large", {}) for operation in ("flatten_fp16", "unflatten_fp16", "reduce_fp16")),
    *((operation, "bert_large", {"compression": "int4"}) for operation in ("quantize", "dequantize")),
    ("quantize", "bert_large", {"compression": "int4", "error_feedback": True}),
    ("flatten_bf16_stochastic", "bert_large", {}),
    *(("quantize", "bert_large", {"compression": f"{each}:rounding=stochastic"}) for each in ("int8", "int4")),
    *(("reduce_quantized", "bert_large", {"compression": each}) for each in ("int8", "int4", "fp8")),
]
MORE: list[Named] = [
    ("dequantize", "resnet50", {"grads": "bf16"}),
    ("quantize", "resnet50", {"grads": "bf16"}),
    ("reduce_shards_bf16_stochastic", "bert_large", {}),
    *(("reduce_quantized", "bert_large", {"compression": f"{each}:rounding=stochastic"}) for each in ("int8", "int4")),
    *((operation, "resnet50", {"compression": "int4"}) for operation in ("quantize", "dequantize", "reduce_quantized")),
    ("dequantize_with_statistics", "resnet50", {"compression": "fp8"}),
]
LAST: list[Named] = [
    ("reduce_quantized", "bert_large", {"compression": "fp8:rounding=stochastic"}),
    ("quantize", "resnet50", {"grads": "fp32"}),
    ("dequantize", "resnet50", {"grads": "fp32"}),
    ("quantize", "tiny", {"grads": "fp32"}),
    ("dequantize", "tiny", {"grads": "fp32"}),
    *(("quantize", "resnet50", {"error_feedback": kept}) for kept in (True, "8bit", "bf16")),
    ("reduce_quantized", "resnet50", {}),
    *(("reduce_shards", "resnet50", {"dtype": "fp16", "scale": 1 / ranks, "ranks": ranks}) for ranks in (2, 8)),
]
NUMBA: list[Named] = [
    ("flatten", "bert_large", {"dtype": "fp16", "scale": 0.5}),
    ("quantize", "bert_large", {"grads": "fp32"}),
    ("quantize", "bert_large", {"compression": "fp8"}),
    ("unflatten_with_statistics", "resnet50", {"dtype": "fp16", "scale": 0.5}),
    ("unflatten", "bert_large", {"dtype": "fp16", "scale": 0.5}),
    ("dequantize", "bert_large", {"grads": "fp32"}),
    ("reduce_shards", "bert_large", {"dtype": "fp16", "scale": 1 / 2, "ranks": 2}),
    *_both("resnet50", grads="fp32", dtype="fp16"),
    ("dequantize", "bert_large", {"compression": "fp8"}),
    *_both("bert_large", dtype="bf16"),
    *((operation, "bert_large", {"compression": "int4"}) for operation in ("quantize", "dequantize")),
]


def cases(rehearsal: bool, more: Sequence[Case] = ()) -> list[Case]:
    """Triton's, those on which a goal stands first, then the most telling; `more` come before the sweep."""
    device = "cpu" if rehearsal else "cuda"

    def named(chosen: list[Named]) -> Iterator[Case]:
        for each in chosen:
            yield kernel_case("triton", each, device)

    return [
        *named(GOALS),
        *named(TELLING),
        Case("wire in L2", 8, partial(_wire_in_l2, device)),
        *more,
        *named(MORE),
        *sweep_cases(device),
        *named(LAST),
    ]


def numba_cases(rehearsal: bool) -> list[Case]:
    """Numba CUDA's, which take longer to compile."""
    return [kernel_case("numba_cuda", each, "cpu" if rehearsal else "cuda", 12) for each in NUMBA]


def kernel_case(backend: str, named: Named, device: str, seconds: float = 4) -> Case:
    """One operation over a model's buckets by a backend, beside torch's ways and a copy."""
    return Case(f"{case_id(named)}-{backend}", seconds, partial(_kernel, backend, named, device))


def _model(operation: str, name: str, options: Options, device: str) -> Model:
    grads = options.pop("grads", torch.float32)
    shapes, most = ("few", 1000) if device == "cpu" else (name, ALL)
    return model_of(shapes, alignment_of(operation), most, device, grads, BIG_CAPS if name in BIG else CAPS)


def _kernel(backend: str, named: Named, device: str) -> dict[str, Any]:
    operation, name, options = named
    kernels = backends.load(backend)
    options = {key: DTYPES[value] if key in ("dtype", "grads") else value for key, value in options.items()}
    model = _model(operation, name, options, device)
    made: kernel_cases.Case = getattr(operations, operation)(model, **options)
    first_call = _first_call(lambda: made.run(kernels), device)
    wrong = ""
    try:
        check(made, kernels)
    except AssertionError as error:  # said beside the row: how fast a wrong kernel is may still tell something
        wrong = str(error)[:500]

    sources = [torch.randn(each.bucket.total, device=device) for each in model]
    targets = [torch.zeros_like(source) for source in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    to_nearest = made.to_nearest
    beside = {} if to_nearest is None else {TO_NEAREST: Work(lambda: to_nearest(kernels))}
    contestants = {
        backend: Work(lambda: made.run(kernels)),
        **beside,
        **{way: Work(call) for way, call in made.ways(kernels).items()},
        "copy": Work(copy),
    }
    nbytes = dict.fromkeys(contestants, made.nbytes) | {"copy": 2 * sum(source.nbytes for source in sources)}
    clocks = timed(contestants, device, SECONDS)
    rows = described(clocks, dict.fromkeys((backend, "copy"), len(model)), nbytes)
    return {"ours": backend, "contestants": rows, "first_call_s": first_call, "wrong": wrong}


def described(clocks: Clocks, launches: dict[str, int], nbytes: dict[str, int] | None = None) -> dict[str, Any]:
    """Figures of the GPU's time, with the host's median and the rounds in which the host was late."""
    rows = describe(clocks.gpu, nbytes)
    for name, row in describe(clocks.host).items():
        rows[name] |= {"gpu_s": rows[name]["median_s"], "host_s": row["median_s"], "late": clocks.late[name]}
    for name, count in launches.items():
        rows[name] |= {"launches": count, "host_us_a_launch": 1e6 * rows[name]["host_s"] / count}
    return rows


def _first_call(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call that compiles, or finds in the cache on disk, what it launches."""
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _wire_in_l2(device: str) -> dict[str, Any]:
    """unflatten of one bucket of a step, with its wire just written, and after something else has filled the L2."""
    kernels = backends.load("triton")
    model = _model("unflatten", "resnet50", {}, device)
    fullest = max(model, key=lambda each: each.bucket.total)
    other = torch.zeros(FLUSH if device == "cuda" else 1000, dtype=torch.uint8, device=device)

    def write_wire() -> None:
        kernels.flatten([*fullest.grads, fullest.used], fullest.bucket.table, wire, 0.5)

    wire = fullest.filled_wire(torch.float16)
    targets = [torch.zeros_like(grad) for grad in fullest.grads]

    def unflatten() -> None:
        kernels.unflatten(wire, fullest.bucket.table, [*targets, fullest.used], 0.5)

    def flush() -> None:
        write_wire()
        other.fill_(1)

    contestants = {
        "wire just written": Work(unflatten, write_wire),
        "L2 filled with other data": Work(unflatten, flush),
    }
    clocks = timed(contestants, device, SECONDS)
    rows = described(clocks, dict.fromkeys(contestants, 1))
    nbytes = sum(target.nbytes + target.numel() * wire.itemsize for target in targets)
    for row in rows.values():
        row |= {"bytes": nbytes, "gb_per_s": nbytes / row["median_s"] / 1e9}
    return {"ours": "wire just written", "contestants": rows, "wire_bytes": wire.nbytes}


TILES, WARPS = (1024, 4096, 8192), (2, 8, 16)
CONVERSIONS = ("natively", "by integers")


def sweep_cases(device: str) -> list[Case]:
    """Other launch settings, each in a process of its own, which changes them before the kernels are imported."""
    settings: list[dict[str, Any]] = [
        {},
        *({"bf16": how} for how in CONVERSIONS),
        *({"warps": warps} for warps in WARPS),
        *({"tile": tile} for tile in TILES),
    ]
    return [
        Case("sweep-" + (case_id(("", "", each))[2:] or "as it is"), 16, partial(_sweep, each, device), alone=True)
        for each in settings
    ]


def _sweep(setting: dict[str, Any], device: str) -> dict[str, Any]:
    """flatten, unflatten, quantize and dequantize under one setting, in shares of a copy."""
    from . import sweep

    used = sweep.change(**setting)
    dtype = "bf16" if "bf16" in setting else "fp16"
    chosen: list[Named] = [*_both("bert_large", dtype=dtype)]
    if "bf16" not in setting:
        chosen += [(operation, "bert_large", {}) for operation in ("quantize", "dequantize")]
    else:
        chosen.append(("dequantize", "resnet50", {"grads": "bf16"}))
    rows, wrong = {}, ""
    for named in chosen:
        found = _kernel("triton", named, device)
        rows[case_id(named)] = {**found["contestants"]["triton"], "first_call_s": found["first_call_s"]}
        wrong = wrong or found["wrong"]
    used()
    for row in rows.values():
        row.pop("ratio", None)
    return {"ours": "", "contestants": rows, "wrong": wrong}
