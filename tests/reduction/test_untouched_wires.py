"""What nothing has written to takes no memory, also where it is made in the place of others, amid gradients."""

from __future__ import annotations

import struct
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fastreduce
from tests.support.ranks import RankPool

PAGEMAP = Path("/proc/self/pagemap")
PRESENT = 63  # the bit of an entry of /proc/self/pagemap that tells (Linux, Documentation/admin-guide/mm/pagemap.rst)


def _pages(tensor: Tensor) -> int:
    """How many whole pages of its storage are in memory."""
    storage = tensor.untyped_storage()
    first, end = -(-storage.data_ptr() // PAGESIZE), (storage.data_ptr() + storage.nbytes()) // PAGESIZE
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = file.read(8 * (end - first))
    return sum(entry >> PRESENT for entry in struct.unpack(f"<{end - first}Q", entries))


def _touched(rank: int, world_size: int, setting: str, transport: str) -> tuple[int, int]:
    """Of pages that wires have, those in memory behind four steps, and how many these are in all."""
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(8)))
    ddp = fastreduce.DistributedDataParallel(model, compression=setting, transport=transport, bucket_cap_mb=4)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(2, 700)).sum().backward()
    wires = [pipeline.wire for pipeline in ddp.reducer.pipelines]
    assert len(wires) > 2
    return sum(map(_pages, wires)), sum(wire.untyped_storage().nbytes() // PAGESIZE for wire in wires)


@pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux")
@pytest.mark.parametrize("setting", ["none", "fp16", "int8"])
def test_over_shared_memory_nothing_of_a_wire_is_in_memory(ranks2: RankPool, setting: str):
    for touched, pages in ranks2.run(_touched, setting, "shm"):
        assert (touched, pages > 500) == (0, True)


@pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux")
def test_over_gloo_all_of_it_is(ranks2: RankPool):
    """So that the first test could fail."""
    for touched, pages in ranks2.run(_touched, "none", "gloo"):
        assert touched > 0.9 * pages


def _residuals_touched(rank: int, world_size: int, setting: str) -> tuple[int, int]:
    """Of pages that residuals have, those in memory before the first step, and how many these are in all."""
    size = 3 << 20
    torch.ones(size)  # malloc hands out what is as large from its own memory now
    held = [torch.ones(size) for _ in range(8)]
    del held[::2]
    model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(8)))
    ddp = fastreduce.DistributedDataParallel(model, compression=setting, bucket_cap_mb=4)
    rows = [pipeline.feedback.residuals for pipeline in ddp.reducer.pipelines]
    return sum(map(_pages, rows)), sum(row.untyped_storage().nbytes() // PAGESIZE for row in rows)


@pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux")
@pytest.mark.parametrize("setting", ["int8:error_feedback", "int4:error_feedback=8bit", "topk"])
def test_residuals_before_the_first_step_are_not(ranks2: RankPool, setting: str):
    for touched, pages in ranks2.run(_residuals_touched, setting):
        assert (touched, pages > 500) == (0, True)
