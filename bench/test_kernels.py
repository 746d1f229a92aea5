"""Kernels against torch's plain ways and a copy, over the gradients of real models."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from fastreduce.backends import ENVIRONMENT_VARIABLE

from . import operations, shapes
from .conftest import Size
from .operations import Case, Way, elements
from .paired import Contestant, alternate, record

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Triton on the CPU is an interpreter for tests: nothing to time.
DEVICES = {"numba_cpu": "cpu", **({"triton": "cuda"} if torch.cuda.is_available() else {})}

Options = dict[str, Any]
CASES: list[tuple[str, str, Options]] = [
    *(
        (operation, name, {"dtype": dtype, "scale": 0.5})
        for operation in ("flatten", "unflatten")
        for name in shapes.LISTS
        for dtype in ("fp16", "bf16")
    ),
    ("flatten", "resnet50", {"dtype": "fp16", "scale": 1.0}),
    ("unflatten", "resnet50", {"dtype": "fp16", "scale": 1.0}),
    ("flatten", "resnet50", {"dtype": "fp32", "scale": 0.5}),
    ("unflatten", "resnet50", {"dtype": "fp32", "scale": 1.0}),
    *(("reduce_shards", name, {"dtype": "fp16", "scale": 0.5}) for name in shapes.LISTS),
    ("reduce_shards", "resnet50", {"dtype": "bf16", "scale": 0.5}),
    *(
        (operation, name, {})
        for operation in ("quantize", "dequantize", "reduce_quantized")
        for name in shapes.LISTS
    ),
    ("quantize", "resnet50", {"error_feedback": True}),
]


def _id(case: tuple[str, str, Options]) -> str:
    operation, name, options = case
    return "-".join([operation, name, *(f"{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_kernel(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, size: Size, case: tuple[str, str, Options], backend: str
) -> None:
    operation, name, options = case
    device = DEVICES[backend]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
    model = operations.model_of(name, 128 if "quantize" in operation else 8, size.elements, device)
    if "dtype" in options:
        options = {**options, "dtype": DTYPES[options["dtype"]]}
    made: Case = getattr(operations, operation)(model, **options)
    check(made, backend)

    source = torch.randn(elements(model), device=device)
    target = torch.zeros_like(source)
    contestants = {
        backend: Contestant(on(backend, made.run), made.nbytes),
        "reference": Contestant(on("reference", made.run), made.nbytes),
        **{name: Contestant(way, made.nbytes) for name, way in made.plain.items()},
        "copy": Contestant(lambda: target.copy_(source), source.nbytes + target.nbytes),
    }
    times = alternate(contestants, size.seconds, torch.cuda.synchronize if device == "cuda" else lambda: None)
    benchmark.group = operation
    record(benchmark, times, {name: contestant.nbytes for name, contestant in contestants.items()})


def on(backend: str, run: Way) -> Way:
    """`run` on a kernel backend."""

    def call() -> list[Tensor] | None:
        os.environ[ENVIRONMENT_VARIABLE] = backend
        return run()

    return call


def check(case: Case, backend: str) -> None:
    """Hold the backend's bits against the reference's, and torch's ways against those."""
    expected = _results(case, on("reference", case.run))
    for got, want in zip(_results(case, on(backend, case.run)), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{backend} differs from reference"
    for way in case.plain.values():
        results = _results(case, way)
        whole = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (results, expected)]
        torch.testing.assert_close(*whole, rtol=2**-7, atol=1e-6)


def _results(case: Case, way: Way) -> list[Tensor]:
    for output in case.outputs:
        output.fill_(97)
    returned = way()
    return [tensor.detach().clone().contiguous().flatten() for tensor in returned or case.outputs]
