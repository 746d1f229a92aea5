"""What ranks do in the MPI benchmark: `mpirun -n 2 python -m bench.transports.mpi_ranks FOLDER ELEMENTS ROUNDS`."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from fastreduce import all_reduce_gradients
from fastreduce.distributed.mpi import init_mpi
from fastreduce.transports import GlooTransport, MpiTransport

from ..kernels import shapes
from ..paired import turns

# Relative to the norm of the average that mpi4py computes; 0 is bit for bit.
TOLERANCES = {
    "fp16": 2.0**-10,
    "none": 0.0,
    "int8": 2.0**-5,
    "fp16 over MPI": 2.0**-10,
    "none over MPI": 0.0,
    "int8 over MPI": 2.0**-5,
    "fp16 over gloo": 2.0**-10,
    "mpi4py Iallreduce per parameter": 0.0,
}


def contestants(gradients: list[Tensor], flat: Tensor) -> dict[str, Callable[[], Any]]:
    """Averages of the same gradients, in place: ours, of the separate tensors, and mpi4py's.

    Over what is chosen where nothing is said, which is shared memory, and over MPI and gloo.
    """
    world, group = MPI.COMM_WORLD, dist.group.WORLD
    assert group is not None
    gloo, over_mpi = GlooTransport(group), MpiTransport(group)
    whole, parts = flat.numpy(), [gradient.numpy() for gradient in gradients]

    def allreduce(*arrays: Any) -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)
            array /= world.size

    def iallreduce() -> None:
        MPI.Request.Waitall([world.Iallreduce(MPI.IN_PLACE, array, op=MPI.SUM) for array in parts])
        for array in parts:
            array /= world.size

    return {
        "fp16": lambda: all_reduce_gradients(gradients, "fp16"),
        "none": lambda: all_reduce_gradients(gradients, "none"),
        "int8": lambda: all_reduce_gradients(gradients, "int8"),
        "fp16 over MPI": lambda: all_reduce_gradients(gradients, "fp16", transport=over_mpi),
        "none over MPI": lambda: all_reduce_gradients(gradients, "none", transport=over_mpi),
        "int8 over MPI": lambda: all_reduce_gradients(gradients, "int8", transport=over_mpi),
        "fp16 over gloo": lambda: all_reduce_gradients(gradients, "fp16", transport=gloo),
        "mpi4py Allreduce": lambda: allreduce(whole),
        "mpi4py Allreduce per parameter": lambda: allreduce(*parts),
        "mpi4py Iallreduce per parameter": iallreduce,
    }


def main() -> None:
    folder, elements, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    init_mpi()
    rank = dist.get_rank()
    folder.joinpath(f"{rank}.pid").write_text(str(os.getpid()))
    sizes = [min(torch.Size(shape).numel(), elements) for shape in shapes.resnet50()]
    while sum(sizes) > elements:
        sizes.pop()
    flat = torch.empty(sum(sizes))
    gradients = list(flat.split(sizes))
    start = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(rank))
    taking_part = contestants(gradients, flat)
    results = {}
    for name, call in taking_part.items():
        for _ in range(2):
            flat.copy_(start)
            call()
        results[name] = flat.clone()
    expected = results["mpi4py Allreduce"]
    for name, tolerance in TOLERANCES.items():
        error = float((results[name] - expected).norm() / expected.norm())
        assert error <= tolerance, f"{name}: differs from mpi4py's by {error:.2g}"
    del results, expected

    times: dict[str, list[float]] = {name: [] for name in taking_part}
    gc.collect()
    gc.disable()
    for name in turns(taking_part, rounds):
        flat.copy_(start)
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        taking_part[name]()
        times[name].append(time.perf_counter() - begin)
    folder.joinpath(f"{rank}.json").write_text(json.dumps({"times": times, "elements": flat.numel()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
