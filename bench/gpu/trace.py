"""One profiled step as a file for chrome://tracing or Perfetto, and how much of our work overlapped with backward."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST_BYTES = 8 << 20  # of a file that is carried home
OURS = ("_move", "_flatten", "_unflatten", "_quantize", "_dequantize", "_reduce", "nccl")

Spans = list[tuple[float, float]]


def write_trace(step: Callable[[], Any], device: str, file: Path) -> dict[str, Any]:
    """Run and profile a step; writes the packed trace, if it is small enough, and returns what it shows."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    step()
    with profile(activities=activities) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(whole))
        text = whole.read_bytes()
    packed = gzip.compress(text)
    kept = len(packed) <= MOST_BYTES
    if kept:
        file.write_bytes(packed)
    return {**overlap(json.loads(text)), "bytes": len(packed), "kept": kept}


def overlap(trace: dict[str, Any]) -> dict[str, Any]:
    """Seconds of kernels on the streams that ours run on, on the others, and on both at once."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel" and e.get("ph") == "X"]

    def stream(event: dict[str, Any]) -> Any:
        return event.get("args", {}).get("stream", event.get("tid"))

    streams = {stream(e) for e in kernels if e["name"].startswith(OURS)}
    ours, others = (_joined([e for e in kernels if (stream(e) in streams) == mine]) for mine in (True, False))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in others)
    of_ours = _length(ours)
    return {
        "kernels": len(kernels),
        "ours_s": of_ours / 1e6,
        "others_s": _length(others) / 1e6,
        "both_s": both / 1e6,
        "hidden": both / of_ours if of_ours else None,
    }


def _joined(events: list[dict[str, Any]]) -> Spans:
    """The events' times in microseconds as spans that do not overlap."""
    spans: Spans = []
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
