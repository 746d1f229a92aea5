"""BucketPlan: parameter shapes in, buckets and offsets out, for any shapes."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fastreduce import Compression
from fastreduce.ops import wire_numel
from fastreduce.reduction.buckets import BucketPlan, ParameterSpec, build_plan, group_by_size
from tests.support.each_setting import EACH_SETTING

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

numels = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 127, 128, 129, 1000, 4099]), st.integers(0, 20_000))
shapes = st.lists(st.tuples(numels, st.sampled_from(DTYPES)), min_size=1, max_size=30)
caps = st.lists(st.integers(1, 60_000), min_size=1, max_size=4)
alignments = st.sampled_from([8, 16, 64, 128, 4096])


def make_specs(of: list[tuple[int, torch.dtype]]) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", numel, dtype, CPU) for i, (numel, dtype) in enumerate(of)]


def nbytes(specs: list[ParameterSpec], group: list[int]) -> int:
    return sum(specs[i].numel * specs[i].dtype.itemsize for i in group)


@given(shapes, caps, st.randoms())
def test_every_parameter_is_in_exactly_one_group_and_groups_keep_the_order(of, caps, random):
    specs = make_specs(of)
    order = list(range(len(specs)))
    random.shuffle(order)
    groups = group_by_size(specs, order, caps)
    assert sorted(i for group in groups for i in group) == list(range(len(specs)))
    place = {index: position for position, index in enumerate(order)}
    for group in groups:
        assert [place[i] for i in group] == sorted(place[i] for i in group)
        assert len({specs[i].dtype for i in group}) == 1
    last = [place[group[-1]] for group in groups]
    assert last == sorted(last), "a bucket comes when its last gradient does"


@given(shapes, caps)
def test_a_group_ends_with_the_parameter_that_reaches_the_cap(of, caps):
    specs = make_specs(of)
    for dtype in DTYPES:
        groups = [g for g in group_by_size(specs, range(len(specs)), caps) if specs[g[0]].dtype is dtype]
        for number, group in enumerate(groups):
            cap = caps[min(number, len(caps) - 1)]
            assert nbytes(specs, group[:-1]) < cap, "it would have ended before"
            assert nbytes(specs, group) >= cap or number == len(groups) - 1


@given(shapes, caps)
def test_groups_are_those_of_torch(of, caps):
    specs = make_specs(of)
    order = list(range(len(specs)))[::-1]
    ours = group_by_size(specs, order, caps)
    tensors = [torch.empty(specs[i].numel, dtype=specs[i].dtype) for i in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors), order)
    assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs))


def plan_of(of, caps, alignment, shards) -> tuple[list[ParameterSpec], BucketPlan]:
    specs = make_specs(of)
    groups = group_by_size(specs, range(len(specs)), caps)
    return specs, build_plan(specs, groups, alignment=alignment, shards=shards)


@pytest.mark.parametrize("setting", EACH_SETTING)
@given(shapes, caps, st.integers(1, 9))
def test_shards_are_what_kernels_read_16_bytes_at_a_time(setting, of, caps, shards):
    """Triton sees that a size is divisible where it is a multiple of 16, whatever the dtype."""
    specs, alignment = make_specs(of), Compression.parse(setting).alignment
    plan = build_plan(specs, group_by_size(specs, range(len(specs)), caps), alignment=alignment, shards=shards)
    assert all(bucket.total // shards % 16 == 0 for bucket in plan.buckets)


@given(shapes, caps, alignments, st.integers(1, 9))
def test_slots_are_aligned_and_apart_and_the_flags_and_equal_shards_fit(of, caps, alignment, shards):
    specs, plan = plan_of(of, caps, alignment, shards)
    assert sorted(s.parameter for b in plan.buckets for s in b.slots) == list(range(len(specs)))
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        for slot in bucket.slots:
            spec = specs[slot.parameter]
            assert (slot.name, slot.numel, bucket.dtype) == (spec.name, spec.numel, spec.dtype)
        places = [(s.offset, s.numel) for s in bucket.slots] + [(bucket.flags_offset, len(bucket.slots))]
        assert all(offset % alignment == 0 for offset, _ in places)
        for (offset, numel), (following, _) in pairwise(places):
            assert offset + numel <= following < offset + numel + alignment, "no overlap, no needless gap"
        assert bucket.flags_offset + len(bucket.slots) <= bucket.total
        assert bucket.total % (alignment * shards) == 0
        assert bucket.total - bucket.flags_offset - len(bucket.slots) < alignment * shards
        offsets, lengths = bucket.table.offsets.tolist(), bucket.table.numels.tolist()
        assert list(zip(offsets, lengths, strict=True)) == places
        assert bucket.table.total == bucket.total


@given(shapes, st.sampled_from([16, 64, 128, 4096]), st.integers(1, 9))
def test_no_block_straddles_two_slots_and_quantized_wires_divide_too(of, block, shards):
    _, plan = plan_of(of, [1 << 40], block, shards)
    for bucket in plan.buckets:
        owner: dict[int, int] = {}
        for number, (offset, numel) in enumerate(zip(bucket.table.offsets, bucket.table.numels, strict=True)):
            for index in range(offset // block, -(-(offset + numel) // block)):
                assert owner.setdefault(index, number) == number
        assert wire_numel(bucket.total, shards, block) % shards == 0
        assert wire_numel(bucket.total, shards, block) // shards % 16 == 0


@given(shapes, caps, alignments, st.integers(1, 9))
def test_a_plan_prints_one_line_a_bucket_and_is_a_value(of, caps, alignment, shards):
    specs, plan = plan_of(of, caps, alignment, shards)
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.buckets)
    for line, bucket in zip(lines, plan.buckets, strict=True):
        assert line.startswith(f"bucket {bucket.index}: ") and bucket.slots[0].name in line
        assert bucket.slots[-1].name in line and f"{len(bucket.slots)} slots" in line and "MiB" in line
    again = build_plan(
        specs, [[s.parameter for s in b.slots] for b in plan.buckets], alignment=alignment, shards=shards
    )
    assert again == plan and hash(again) == hash(plan)
    index_of = {spec.name: i for i, spec in enumerate(specs)}
    from_names = [[index_of[name] for name in names] for names in plan.names()]
    assert build_plan(specs, from_names, alignment=alignment, shards=shards) == plan


def test_a_plan_cannot_be_changed():
    _, plan = plan_of([(10, torch.float32)], [100], 8, 2)
    for value, name in ((plan, "shards"), (plan.buckets[0], "total"), (plan.buckets[0].slots[0], "offset")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 0)


def test_caps_are_torchs_a_mebibyte_first_then_the_cap():
    specs = make_specs([(100_000, torch.float32)] * 100)  # 0.4 MB each
    groups = group_by_size(specs, range(100), [1 << 20, 25 << 20])
    assert [len(group) for group in groups] == [3, 66, 31]
