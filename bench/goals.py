"""What the benchmarks are to reach, held against what was measured. Goals are never tuned to measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .operations import WITHOUT

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
INT8 = {operation: f"test_kernel[{operation}-resnet50-numba_cpu]" for operation in ("quantize", "dequantize")}
STATISTICS = {
    "unflatten fp16": "unflatten_with_statistics-resnet50-dtype=fp16-scale=0.5",
    "unflatten bf16": "unflatten_with_statistics-resnet50-dtype=bf16-scale=0.5",
    "dequantize": "dequantize_with_statistics-resnet50",
}
ALLOCATING = ("cat, cast, divide", "cast, divide, copy_")
NOT_PLAIN = ("numba_cpu", "triton", "numba_cuda", "reference", "copy", WITHOUT)


def goals(results: Results) -> Iterator[Goal]:
    """Goals for which there are results."""
    casts = {label: results[name]["contestants"] for label, name in CASTS.items() if name in results}
    if casts:
        each = "FP32 ↔ FP16/BF16, 25 M elements: "
        yield _worst(each + "share of a copy's bandwidth", 0.9, _of_copy(casts))
        faster = {
            (f"{case}, against {way}", way in ALLOCATING): 1 / row["ratio"][0]
            for case, rows in casts.items()
            for way, row in rows.items()
            if way not in NOT_PLAIN
        }
        allocating = {case: figure for (case, allocates), figure in faster.items() if allocates}
        yield _worst(each + "times as fast as allocating", 3, allocating)
        plain = {case: figure for (case, _), figure in faster.items()}
        yield _worst(each + "times as fast as the best of torch", 1.15, plain)
    int8 = {label: results[name]["contestants"] for label, name in INT8.items() if name in results}
    if int8:
        yield _worst("INT8, 25 M elements: share of a copy's bandwidth", 0.6, _of_copy(int8))
    if (with_statistics := _with_statistics(results, "test_kernel", "numba_cpu")).measured is not None:
        yield with_statistics
    for world_size, limit in ((1, 0.6), (2, 0.8)):
        if (name := f"test_overhead[{world_size}]") in results:
            figure = results[name]["contestants"]["torch"].get("overhead_ratio", [math.nan] * 3)
            what = f"host overhead / torch's, 1,000 parameters, world size {world_size}"
            yield Goal(what, False, limit, figure[0], _interval(figure))
    for compression, limit in (("none", 1.05), ("fp16", 0.75)):
        if (name := f"test_step[{compression}]") in results:
            best = results[name]["best_of_torch"]
            figure = results[name]["contestants"][best]["ratio"]
            what = f"step {compression} / {best}, 25 M parameters, 2 ranks: upper 95 % bound"
            yield Goal(what, False, limit, figure[2], f"median {figure[0]:.2f}, {_interval(figure)}")
    if "test_mpi" in results:
        figure = results["test_mpi"]["contestants"]["mpi4py Allreduce"]["ratio"]
        what = "fp16 over MPI / mpi4py's FP32 Allreduce and division, 25 M gradients, 2 ranks"
        yield Goal(what, False, 0.65, figure[0], _interval(figure))
    for compression, limit in (("fp16", 0.58), ("int8", 0.36)):
        if (name := f"test_two_nodes[{compression}]") in results:
            figure = results[name]["contestants"]["none"]["ratio"]
            what = f"step {compression} / none, 25 M parameters, 2 nodes, 1 Gbit/s"
            yield Goal(what, False, limit, figure[0], _interval(figure))
    if "test_step[none]" in results:
        rows = results["test_step[none]"]["contestants"].items()
        counts = {name: row["allocations"] for name, row in rows if row["stages_s"] and "reference" not in name}
        most = max(counts, key=lambda name: counts[name])
        where = f"most of {len(counts)}: {most}"
        yield Goal("gradient-sized allocations a step, beyond the model's own", False, 0, counts[most], where)


GPU_BACKENDS = ("triton", "numba_cuda")
_BIG = ("bert_large", "gpt2_xl", "llama_1b")
_CASTS = ("flatten", "unflatten")
_COPIES = {
    "casts, buckets of 256 MiB": (0.92, [f"{o}-{name}-" for o in _CASTS for name in _BIG]),
    "casts, ResNet-50, launches included": (0.8, [f"{o}-resnet50-grads=fp32-" for o in _CASTS]),
    "INT8 and sums, BERT-large": (
        0.85,
        ["quantize-bert_large-", "dequantize-bert_large-", "reduce_shards-bert_large-"],
    ),
}


def gpu_goals(results: Results) -> Iterator[Goal]:
    """All goals that need a GPU, measured or not."""
    for backend in GPU_BACKENDS:
        cases = {
            name.removeprefix("test_gpu_kernel[").removesuffix(f"-{backend}]"): info["contestants"]
            for name, info in results.items()
            if name.startswith("test_gpu_kernel[") and name.endswith(f"-{backend}]")
        }
        for what, (limit, chosen) in _COPIES.items():
            shares = {
                case: rows[backend]["of_copy"][0] for case, rows in cases.items() if case.startswith(tuple(chosen))
            }
            yield _worst(f"{backend}: {what}: share of a copy's bandwidth", limit, shares)
        casts = {case: rows for case, rows in cases.items() if case.startswith(("flatten", "unflatten"))}
        plain, foreach = (
            {
                f"{case}, against {way}": 1 / row["ratio"][0]
                for case, rows in casts.items()
                for way, row in rows.items()
                if chosen(way)
            }
            for chosen in (lambda way: way in ALLOCATING, lambda way: way.startswith("foreach"))
        )
        yield _worst(f"{backend}: times as fast as plain torch", 2.5, plain)
        yield _worst(f"{backend}: times as fast as torch's foreach copies", 1.3, foreach)
        yield _with_statistics(results, "test_gpu_kernel", backend)
    share = results.get("test_gpu_step", {}).get("share_of_rival")
    what = "GPT-2 124M, one GPU, fp16: time added to a step / by torch with views and FP16 hook"
    yield Goal(what, False, 0.6, share and share[0], _interval(share) if share else "")
    peaks = {n: row["peak_bytes"] for n, row in results.get("test_gpu_memory", {}).get("contestants", {}).items()}
    what = "GPT-2 124M, one GPU, fp16: peak memory / torch's with views and FP16 hook"
    share_of_memory = peaks["fp16"] / peaks["torch fp16 hook, views"] if peaks else None
    yield Goal(what, False, 1.0, share_of_memory, f"{peaks['fp16'] / 2**20:.0f} MiB" if peaks else "")


def _with_statistics(results: Results, test: str, backend: str) -> Goal:
    named = {label: f"{test}[{name}-{backend}]" for label, name in STATISTICS.items()}
    ratios = {label: results[name]["contestants"][WITHOUT]["ratio"] for label, name in named.items() if name in results}
    what = f"{backend}: statistics, 25 M elements: the pass with / without"
    if not ratios:
        return Goal(what, False, 1.03, None, "")
    worst = max(ratios, key=lambda label: ratios[label][0])
    return Goal(what, False, 1.03, ratios[worst][0], f"worst of {len(ratios)}: {worst}, {_interval(ratios[worst])}")


def _of_copy(cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {case: rows["numba_cpu"]["of_copy"][0] for case, rows in cases.items()}


def _worst(what: str, limit: float, measured: dict[str, float]) -> Goal:
    if not measured:
        return Goal(what, True, limit, None, "")
    where = min(measured, key=lambda name: measured[name])
    return Goal(what, True, limit, measured[where], f"worst of {len(measured)}: {where}")


def _interval(figure: Iterable[float]) -> str:
    _, low, high = figure
    return f"95 %: {low:.2f} to {high:.2f}"
