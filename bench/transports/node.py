"""What each rank on two nodes runs in the benchmark over a slow link: `node.py WIDTH ROUNDS OUT [NAMES]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from ..training.steps import Setting, measure

STEPS = {
    "none": Setting("fastreduce", {"compression": "none"}),
    "fp16": Setting("fastreduce", {"compression": "fp16"}),
    "int8": Setting("fastreduce", {"compression": "int8"}),
    "int4": Setting("fastreduce", {"compression": "int4"}),
    "int4, error feedback": Setting("fastreduce", {"compression": "int4:error_feedback"}),
    "auto4": Setting("fastreduce", {"compression": "auto4"}),
    "powersgd": Setting("fastreduce", {"compression": "powersgd:rank=4"}),
    "topk": Setting("fastreduce", {"compression": "topk:ratio=0.01"}),
    "torch": Setting("torch"),
    "torch fp16 hook": Setting("torch", hook=True),
    # In one bucket: of several, callbacks start the second collectives, in any order, and gloo aborts.
    "torch powersgd hook": Setting("torch", {"bucket_cap_mb": 1000}, powersgd=4),
    "unwrapped": Setting(""),
}
TOLERANCES = {"none": 0.0, "fp16": 2.0**-10, "int8": 2.0**-5, "int4": 2.0**-2, "auto4": 2.0**-1}  # as in bench_steps.py
OURS = ("none", "fp16", "int8")
IN_LEVELS = {f"{name}, two levels": Setting("fastreduce", STEPS[name].options, transport=None) for name in OURS}
# Where a node has several ranks. These sum in other orders than torch does.
LEVELS = {**IN_LEVELS, **{name: STEPS[name] for name in (*OURS, "torch", "torch fp16 hook")}}
BOUNDS = {f"{name}{how}": max(TOLERANCES[name], 2.0**-20) for name in OURS for how in ("", ", two levels")}


def main() -> None:
    """Measure, and write this rank's results."""
    width, rounds = (int(word) for word in sys.argv[1:3])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings, bounds = (STEPS, TOLERANCES) if world_size == 2 else (LEVELS, BOUNDS)
    settings = {name: settings[name] for name in sys.argv[4:] or settings}
    results = measure(rank, world_size, settings, "linear", width, rounds, bounds)
    Path(sys.argv[3], f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
