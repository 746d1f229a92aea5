"""What the benchmarks are to reach, held against what was measured. Goals are never tuned to measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .kernels.kernel_cases import TO_NEAREST, WITHOUT

Results = dict[str, dict[str, Any]]  # a benchmark's name → its extra_info


@dataclass(frozen=True)
class Goal:
    """One line of the table: `measured`, if it was, is held against `limit`; `where` says what it was measured on."""

    what: str
    at_least: bool
    limit: float
    measured: float | None
    where: str

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "unmeasured"
        return "met" if (self.measured >= self.limit if self.at_least else self.measured <= self.limit) else "missed"


def _kernel(operation: str, dtype: str) -> str:
    return f"test_kernel[{operation}-resnet50-dtype={dtype}-scale=0.5-numba_cpu]"


CASTS = {f"{o} {d}": _kernel(o, d) for o in ("flatten", "unflatten") for d in ("fp16", "bf16")}
QUANTIZED = {
    name: {f"{o} {name}": f"test_kernel[{o}-resnet50{options}-numba_cpu]" for o in ("quantize", "dequantize")}
    for name, options in (("int8", ""), ("int4", "-compression=int4"))
}
STATISTICS = {
    "unflatten fp16": "unflatten_with_statistics-resnet50-dtype=fp16-scale=0.5",
    "unflatten bf16": "unflatten_with_statistics-resnet50-dtype=bf16-scale=0.5",
    "dequantize": "dequantize_with_statistics-resnet50",
    "dequantize int4": "dequantize_with_statistics-resnet50-compression=int4",
}
ALLOCATING = ("cat, cast, divide", "cast, divide, copy_")
NOT_PLAIN = ("numba_cpu", "triton", "numba_cuda", "reference", "copy", WITHOUT, TO_NEAREST)


def goals(results: Results) -> Iterator[Goal]:
    """Goals for which there are results."""
    casts = {label: results[name]["contestants"] for label, name in CASTS.items() if name in results}
    if casts:
        each = "FP32 ↔ FP16/BF16, 25 M elements: "
        yield worst(each + "share of a copy's bandwidth", 0.9, _of_copy(casts))
        faster = {
            (f"{case}, against {way}", way in ALLOCATING): 1 / row["ratio"][0]
            for case, rows in casts.items()
            for way, row in rows.items()
            if way not in NOT_PLAIN
        }
        allocating = {case: figure for (case, allocates), figure in faster.items() if allocates}
        yield worst(each + "times as fast as allocating", 3, allocating)
        plain = {case: figure for (case, _), figure in faster.items()}
        yield worst(each + "times as fast as the best of torch", 1.15, plain)
    for kind, cases in QUANTIZED.items():
        if found := {label: results[name]["contestants"] for label, name in cases.items() if name in results}:
            yield worst(f"{kind.upper()}, 25 M elements: share of a copy's bandwidth", 0.6, _of_copy(found))
    named = {label: f"test_kernel[{name}-numba_cpu]" for label, name in STATISTICS.items()}
    if found := {label: results[name]["contestants"] for label, name in named.items() if name in results}:
        yield with_statistics("numba_cpu", found)
    for world_size, limit in ((1, 0.6), (2, 0.8)):
        if (name := f"test_overhead[{world_size}]") in results:
            figure = results[name]["contestants"]["torch"].get("overhead_ratio", [math.nan] * 3)
            what = f"host overhead / torch's, 1,000 parameters, world size {world_size}"
            yield _ratio(what, limit, figure)
    for compression, limit in (("none", 1.05), ("fp16", 0.75)):
        if (name := f"test_step[{compression}]") in results:
            best, figure = _best_of_torch(results[name])
            yield _upper_bound(f"step {compression} / {best}, 25 M parameters, 2 ranks", limit, figure)
    yield from _shared(results)
    if "test_mpi" in results:
        rows = results["test_mpi"]["contestants"].items()
        fastest, figure = max(
            ((name, row["ratio"]) for name, row in rows if name.startswith("mpi4py")), key=lambda each: each[1][0]
        )
        what = f"fp16 in an MPI job / the fastest of mpi4py's loops ({fastest}), 25 M gradients, 2 ranks of one host"
        yield _ratio(what, 0.7, figure)
    for compression, limit in (("fp16", 0.58), ("int8", 0.36), ("int4", 0.20)):
        if (name := f"test_two_nodes[{compression}]") in results:
            what = f"step {compression} / none, 25 M parameters, 2 nodes, 1 Gbit/s"
            yield _ratio(what, limit, results[name]["contestants"]["none"]["ratio"])
    if "test_two_levels[int8]" in results:
        rows = results["test_two_levels[int8]"]["contestants"]
        for name, limit in (("int8", 0.6), ("torch", 0.2), ("torch fp16 hook", 0.35)):
            what = f"step int8 in two levels / {name}, 25 M parameters, 2 nodes of 2 ranks, 1 Gbit/s"
            yield _ratio(what, limit, rows[name]["ratio"])
    yield from _sharded(results)
    if "test_step[none]" in results:
        rows = results["test_step[none]"]["contestants"].items()
        counts = {name: row["allocations"] for name, row in rows if row["stages_s"] and "reference" not in name}
        most = max(counts, key=lambda name: counts[name])
        where = f"most of {len(counts)}: {most}"
        yield Goal("gradient-sized allocations a step, beyond the model's own", False, 0, counts[most], where)


def _sharded(results: Results) -> Iterator[Goal]:
    """Goals of models that FSDP2 has sharded."""
    for compression in ("fp16", "bf16"):
        if (name := f"test_sharded_reduce_scatter[{compression}]") in results:
            rival = f"torch, cast to {compression}"
            what = f"FSDP2: reduce-scatter {compression} / {rival}, 25 M parameters, 2 ranks of one host"
            yield _ratio(what, 0.8, results[name]["contestants"][rival]["ratio"])
    for test, compression, where in (
        ("sharded", "int8, parameters bf16", "sharded over 2 nodes"),
        ("hybrid", "int8", "2 nodes of 2 ranks, averaged between nodes"),
    ):
        if (name := f"test_{test}_step[{compression}]") in results:
            what = f"FSDP2: step {compression} / torch, 25 M parameters, {where}, 1 Gbit/s"
            yield _ratio(what, 0.35, results[name]["contestants"]["torch"]["ratio"])


def _shared(results: Results) -> Iterator[Goal]:
    """Goals of shared memory on one host."""
    for compression, limit in (("none", 0.85), ("fp16", 0.60)):
        if (name := f"test_shared_step[{compression}]") in results:
            best, figure = _best_of_torch(results[name])
            what = f"shared memory: step {compression} / {best}, 25 M parameters, 2 ranks"
            yield _upper_bound(what, limit, figure)
        if (name := f"test_shared_crowded_step[{compression}]") in results:
            best, figure = _best_of_torch(results[name])
            yield _ratio(f"shared memory: step {compression} / {best}, 4 ranks on 2 cores", 1.0, figure)
    if "test_shared_sum[100]" in results:
        rows = results["test_shared_sum[100]"]["contestants"]
        for name, limit in (("gloo", 0.35), ("copy", 2.5)):
            yield _ratio(f"all-reduce of 100 MB: shared memory / {name}", limit, rows[name]["ratio"])
    if "test_shared_overhead" in results:
        rows = results["test_shared_overhead"]["contestants"]
        for name, limit in (("torch", 0.5), ("torch, batched copy", 0.9)):
            figure = rows[name].get("overhead_ratio", [math.nan] * 3)
            what = f"host overhead over shared memory / {name}, 1,000 parameters, world size 2"
            yield _ratio(what, limit, figure)


def _best_of_torch(result: dict[str, Any]) -> tuple[str, list[float]]:
    """The fastest of torch's modes, and the ratio to it."""
    best = result["best_of_torch"]
    return best, result["contestants"][best]["ratio"]


def _ratio(what: str, limit: float, figure: list[float]) -> Goal:
    return Goal(what, False, limit, figure[0], interval(figure))


def _upper_bound(what: str, limit: float, figure: list[float]) -> Goal:
    return Goal(f"{what}: upper 95 % bound", False, limit, figure[2], f"median {figure[0]:.2f}, {interval(figure)}")


def with_statistics(backend: str, found: dict[str, dict[str, Any]]) -> Goal:
    """What statistics cost in the pass that makes them, by the contestants of each benchmark."""
    ratios = {label: contestants[WITHOUT]["ratio"] for label, contestants in found.items()}
    what = f"{backend}: statistics, 25 M elements: the pass with / without"
    if not ratios:
        return Goal(what, False, 1.03, None, "")
    worst = max(ratios, key=lambda label: ratios[label][0])
    return Goal(what, False, 1.03, ratios[worst][0], f"worst of {len(ratios)}: {worst}, {interval(ratios[worst])}")


def _of_copy(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {case: rows["numba_cpu"]["of_copy"][0] for case, rows in cases.items()}


def worst(what: str, limit: float, measured: dict[str, float]) -> Goal:
    """A goal that the least of several figures must reach."""
    if not measured:
        return Goal(what, True, limit, None, "")
    where = min(measured, key=lambda name: measured[name])
    return Goal(what, True, limit, measured[where], f"worst of {len(measured)}: {where}")


def interval(figure: Iterable[float]) -> str:
    """A figure's bounds."""
    _, low, high = figure
    return f"95 %: {low:.2f} to {high:.2f}"
