"""What is to be reached on a GPU, held against what was measured there. Goals are never tuned to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from ..goals import ALLOCATING, STATISTICS, Goal, interval, with_statistics, worst
from .lines import Row
from .step_rows import OURS, RIVAL

_BIG = ("bert_large", "gpt2_xl", "llama_1b")
_CASTS = ("flatten", "unflatten")
_COPIES = {
    "casts, buckets of 256 MiB": (0.92, [f"{o}-{name}-" for o in _CASTS for name in _BIG]),
    "INT8 and sums, BERT-large": (
        0.85,
        [
            *(f"quantize-bert_large-{options}" for options in ("grads=fp32", "error_feedback=True")),
            "dequantize-bert_large-grads=fp32",
            "reduce_shards-bert_large-",
        ],
    ),
    "FP8, BERT-large": (0.85, [f"{o}-bert_large-compression=fp8" for o in ("quantize", "dequantize")]),
}
# What a test shows, where all of its cases have to pass.
SHOWN = {
    "the kernels' bits on the GPU": "kernels: *triton*",
    "one rank: averages with the bits of the CPU's": "one rank: test_gpu.py::test_averages_have_the_bits*",
    "2 ranks over NCCL: none with torch's bits": "2 ranks: *test_ranks*ddp_trains_alike*",
    "4 ranks over NCCL: averages within the format": "4 ranks: test_gpu.py::test_averages_have_the_bits*",
    "another setting in mid-run: averages with the bits of the CPU's": "one rank: *test_another_setting_in_mid_run*",
    "FSDP2, 2 ranks: averages with the bits of the CPU's": "2 ranks: test_fsdp_gpu.py::*bits_of_the_cpus*",
    "FSDP2: a shard is nobody else's before its average has ended": "one rank: *test_a_shard_that_is_let_go*",
    "a trace knows when the device was where": "one rank: *test_a_flight_record_and_a_trace*",
    "a step captured in a CUDA graph, replayed with the same bits": "one rank: *test_a_step_in_a_cuda_graph*",
    "a killed rank is named by the watchdog": "2 ranks: *test_a_rank_that_exits_is_named*",
    "a step neither waits for the GPU nor allocates": "one rank: *test_a_step_neither_waits_nor_allocates*",
    "nor waits error feedback for what became of gradients": "one rank: *test_neither_waits_error_feedback*",
}


def gpu_goals(rows: Iterable[Row]) -> Iterator[Goal]:
    """All of them, measured or not; rows whose results were wrong do not count."""
    good = {row.case: row.result for row in rows if row.status == "done" and not row.result.get("wrong")}
    for backend in ("triton", "numba_cuda"):
        end = f"-{backend}"
        cases = {case.removesuffix(end): result["contestants"] for case, result in good.items() if case.endswith(end)}
        for what, (limit, chosen) in _COPIES.items():
            shares = {
                case: each[backend]["of_copy"][0] for case, each in cases.items() if case.startswith(tuple(chosen))
            }
            yield worst(f"{backend}: {what}: share of a copy's bandwidth", limit, shares)
        casts = {case: each for case, each in cases.items() if case.startswith(tuple(f"{cast}-" for cast in _CASTS))}
        yield worst(f"{backend}: times as fast as plain torch", 2.5, _faster(casts, ALLOCATING))
        yield worst(f"{backend}: times as fast as torch's foreach copies", 1.3, _faster(casts, ("foreach",)))
        yield with_statistics(backend, {what: cases[case] for what, case in STATISTICS.items() if case in cases})
    for tokens in (128, 1024, 4096):
        rival = good.get(f"gpt2, {tokens} tokens", {}).get("contestants", {}).get(RIVAL, {})
        what = f"GPT-2 124M, {tokens} tokens, fp16: time added to a step / by torch with views and FP16 hook"
        share = rival.get("overhead_ratio")
        yield Goal(what, False, 0.6, share and share[0], interval(share) if share else "")
    peaks = [good.get(f"memory: {name}", {}).get("contestants", {}).get("it", {}) for name in (OURS, RIVAL)]
    what = "GPT-2 124M, fp16: peak memory / torch's with views and FP16 hook"
    ours, torchs = (peak.get("peak_bytes") for peak in peaks)
    yield Goal(what, False, 1.0, ours / torchs if ours and torchs else None, f"{ours / 2**20:.0f} MiB" if ours else "")


def _faster(cases: dict[str, Any], ways: tuple[str, ...]) -> dict[str, float]:
    """How many times as fast as torch's ways whose names begin so."""
    return {
        f"{case}, against {way}": 1 / row["ratio"][0]
        for case, each in cases.items()
        for way, row in each.items()
        if way.startswith(ways)
    }


def shown(rows: Iterable[Row]) -> Iterator[tuple[str, str, str]]:
    """What tests show: in words, the verdict, and how many there were."""
    tests = list(rows)
    for what, pattern in SHOWN.items():
        chosen = [row for row in tests if fnmatchcase(row.case, pattern.replace("[", "[[]"))]
        ended = [row.status for row in chosen]
        if "failed" in ended:
            bad = next(row.case for row in chosen if row.status == "failed")
            yield what, "missed", f"{ended.count('failed')} of {len(ended)} failed: {bad}"
        elif "done" in ended and set(ended) == {"done"}:
            yield what, "met", f"{len(ended)} passed"
        else:
            yield what, "unmeasured", f"{ended.count('done')} of {len(ended)} passed, the others were not run"
