"""Kernels against torch's plain ways and a copy, over the gradients of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastreduce.ops import backends

from ..conftest import Size
from ..paired import Contestant, alternate, record
from . import operations
from .kernel_cases import (
    DTYPES,
    REFERENCE,
    TO_NEAREST,
    Case,
    Options,
    alignment_of,
    case_id,
    check,
    elements,
    model_of,
)

MODELS = ("resnet50", "bert", "gpt2", "tiny")

CASES: list[tuple[str, str, Options]] = [
    *(
        (operation, name, {"dtype": dtype, "scale": 0.5})
        for operation in ("flatten", "unflatten")
        for name in MODELS
        for dtype in ("fp16", "bf16")
    ),
    ("flatten", "resnet50", {"dtype": "fp16", "scale": 1.0}),
    ("unflatten", "resnet50", {"dtype": "fp16", "scale": 1.0}),
    ("flatten", "resnet50", {"dtype": "fp32", "scale": 0.5}),
    ("unflatten", "resnet50", {"dtype": "fp32", "scale": 1.0}),
    *(("reduce_shards", name, {"dtype": "fp16", "scale": 0.5}) for name in MODELS),
    ("reduce_shards", "resnet50", {"dtype": "bf16", "scale": 0.5}),
    *((operation, name, {}) for operation in ("flatten_fp16", "unflatten_fp16", "reduce_fp16") for name in MODELS),
    *((operation, name, {}) for operation in ("quantize", "dequantize", "reduce_quantized") for name in MODELS),
    ("quantize", "resnet50", {"error_feedback": True}),
    *(
        (operation, "resnet50", {"compression": compression})
        for compression in ("int4", "fp8")
        for operation in ("quantize", "dequantize", "reduce_quantized")
    ),
    ("quantize", "resnet50", {"compression": "int4", "error_feedback": True}),
    *(
        ("quantize", "resnet50", {"compression": compression, "error_feedback": kept})
        for compression in ("int8", "int4")
        for kept in ("8bit", "bf16")
    ),
    *((f"{operation}_bf16_stochastic", "resnet50", {}) for operation in ("flatten", "reduce_shards")),
    *(
        (operation, "resnet50", {"compression": f"{name}:rounding=stochastic"})
        for name in ("int8", "int4", "fp8")
        for operation in ("quantize", "reduce_quantized")
    ),
    *(("unflatten_with_statistics", "resnet50", {"dtype": dtype, "scale": 0.5}) for dtype in ("fp16", "bf16")),
    ("dequantize_with_statistics", "resnet50", {}),
    ("dequantize_with_statistics", "resnet50", {"compression": "int4"}),
    *((operation, name, {}) for operation in ("take_largest", "average_taken") for name in ("resnet50", "gpt2")),
]


@pytest.mark.parametrize("backend", ["numba_cpu"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernel(benchmark: Any, size: Size, case: tuple[str, str, Options], backend: str) -> None:
    operation, name, options = case
    kernels = backends.load(backend)
    model = model_of(name, alignment_of(operation), size.elements)
    if "dtype" in options:
        options = {**options, "dtype": DTYPES[options["dtype"]]}
    made: Case = getattr(operations, operation)(model, **options)
    check(made, kernels)
    to_nearest = made.to_nearest

    source = torch.randn(elements(model))
    target = torch.zeros_like(source)
    beside = (TO_NEAREST, lambda: to_nearest(kernels)) if to_nearest else ("reference", lambda: made.run(REFERENCE))
    contestants = {
        backend: Contestant(lambda: made.run(kernels), made.nbytes),
        beside[0]: Contestant(beside[1], made.nbytes),
        **{way: Contestant(call, made.nbytes) for way, call in made.ways(kernels).items()},
        "copy": Contestant(lambda: target.copy_(source), source.nbytes + target.nbytes),
    }
    benchmark.group = operation
    record(benchmark, alternate(contestants, size.seconds), {name: c.nbytes for name, c in contestants.items()})
