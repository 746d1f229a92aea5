"""The cost model: what it says where the answer is known by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from bench.scaling import __main__ as command
from bench.scaling import inputs, star
from bench.scaling.model import (
    SETTINGS,
    WIRE_BYTES,
    Cluster,
    Do,
    Inputs,
    Kernels,
    Send,
    Wait,
    flat,
    makespan,
    two_levels,
)
from bench.tables import markdown
from fastreduce import Compression
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.transports import LocalTransport, local_ranks
from tests.support.two_nodes import or_skip

NOTHING = Inputs({setting: Kernels(0, 0, 0) for setting in SETTINGS}, 0, 0, 0, 0)
KERNELS = Inputs({setting: Kernels(1, 10, 100) for setting in SETTINGS}, 1000, 0, 0, 0)
LATENCY = Inputs(NOTHING.kernels, 0, 0, latency=1, message=0.01)
FAST = 1e30


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_element_has_the_bytes_of_our_wires(setting: str):
    plan = build_plan([ParameterSpec("", 1 << 20, torch.float32, torch.device("cpu"))], [[0]], alignment=128, shards=2)
    transport: LocalTransport = local_ranks(2)[0]
    pipeline = BucketPipeline(plan.buckets[0], Compression.parse(setting), transport)
    assert pipeline.wire.nbytes == pytest.approx(WIRE_BYTES[setting] * (1 << 20), rel=1e-3)
    link = 1e6  # of one rank's bytes, which leave its host
    assert flat(NOTHING, Cluster(2, 1, link), setting, [1 << 20]) == pytest.approx(pipeline.sent_bytes / link, rel=1e-3)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 1), (2, 2), (4, 2), (16, 4)])
def test_a_slow_link_takes_as_long_as_its_bytes(hosts: int, ranks: int):
    cluster, n = Cluster(hosts, ranks, 1000.0), hosts * ranks
    for setting, size in WIRE_BYTES.items():
        wires = 2 * size * 600 / 1000
        between = wires * (hosts - 1) / hosts
        of_flat = wires * (n - 1) / n if setting == "none" else ranks * wires * (n - ranks) / n
        for buckets in ([600], [100, 500]):
            assert flat(NOTHING, cluster, setting, buckets) == pytest.approx(of_flat)
            assert two_levels(NOTHING, cluster, setting, buckets) == pytest.approx(between)


def test_kernels_take_their_turns():
    assert flat(KERNELS, Cluster(2, 1, FAST), "int8", [3]) == pytest.approx(3 * 111)
    assert flat(KERNELS, Cluster(2, 1, FAST), "none", [3]) == pytest.approx(3 * 101)
    # Flat, all-to-all of half of it, sum, then of the column its compression, sum, gather, decompression.
    moved = 1000 * (4 + WIRE_BYTES["int8"]) / 2
    assert two_levels(KERNELS, Cluster(2, 2, FAST), "int8", [4]) == pytest.approx(4 * (1 + 10 + moved + 0.5 + 5 + 100))


def test_latency_is_that_of_each_collective():
    assert flat(LATENCY, Cluster(4, 2, FAST), "none", [1]) == pytest.approx(2 * 7)
    assert flat(LATENCY, Cluster(4, 2, FAST), "int4", [1]) == pytest.approx(2 * (1 + 6 * 0.01))
    assert two_levels(LATENCY, Cluster(4, 2, FAST), "none", [1]) == pytest.approx(2 * 3)
    assert two_levels(LATENCY, Cluster(4, 2, FAST), "int4", [1]) == pytest.approx(2 * (1 + 2 * 0.01))
    assert two_levels(LATENCY, Cluster(1, 4, FAST), "int8", [1]) == 0


def test_threads_share_a_core_and_a_link_that_serve_first_what_comes_first():
    assert makespan([]) == 0
    assert makespan([[Do(2), Do(1)], [Do(3)]]) == 6
    assert makespan([[Do(1), Send("a", 5), Do(2), Wait("a"), Do(1)]]) == 7
    assert makespan([[Do(1), Send("a", 5)], [Send("b", 3), Wait("b"), Do(1), Wait("a"), Do(1)]]) == 9
    with pytest.raises(ValueError, match="nobody sends c"):
        makespan([[Wait("c")]])


def test_nothing_takes_less_than_its_parts_and_more_than_their_sum():
    chance = random.Random(0)
    for _ in range(200):
        buckets = [chance.randint(1, 1000) for _ in range(chance.randint(1, 6))]
        cluster = Cluster(chance.choice([2, 8]), chance.choice([1, 4]), chance.choice([1.0, 1e3, 1e6]))
        for model in (flat, two_levels):
            for setting in SETTINGS:
                alone = [model(each, cluster, setting, buckets) for each in (NOTHING, KERNELS)]
                kernels = model(KERNELS, Cluster(cluster.hosts, cluster.ranks, FAST), setting, buckets)
                assert max(alone[0], kernels) <= alone[1] * (1 + 1e-9) and alone[1] <= (alone[0] + kernels) * (1 + 1e-9)


def test_tables_go_between_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- model -->\nold\n<!-- end of model -->\nb\n<!-- check -->\n<!-- end of check -->\n")
    monkeypatch.setattr(command, "PAGE", page)
    for _ in range(2):
        command.put("model", "new")
        command.put("check", markdown([["x", "y"], ["1", "2"]]))
    assert page.read_text() == (
        "a\n<!-- model -->\nnew\n<!-- end of model -->\nb\n<!-- check -->\n| x | y |\n| --- | --- |\n| 1 | 2 |\n"
        "<!-- end of check -->\n"
    )
    rows = list(command.predicted(KERNELS))
    assert [row[:2] for row in rows] == [[str(n), str(g)] for n in (8, 64, 512) for g in (1, 10, 100)]
    seen = command.Seen(4, 2, "int8", "flat", 0.11, 0.1)
    assert list(command.rows_of([seen])) == [["4 on 2 hosts", "`int8`", "flat", "110", "100", "+10%"]]


def test_the_page_has_what_the_kept_inputs_give():
    kept = json.loads((command.RESULTS / "scaling.json").read_text())
    page = command.PAGE.read_text()
    assert kept.pop("measured") in page
    kernels = {setting: Kernels(**seconds) for setting, seconds in kept.pop("kernels").items()}
    lines = [f"| {' | '.join(row)} |" for row in command.predicted(Inputs(kernels, **kept))]
    assert [line for line in lines if line not in page] == []


@pytest.mark.long
def test_inputs_are_measured_and_ranks_in_namespaces_are_timed(tmp_path: Path):
    found = inputs.measure(2, 2, 1 << 16)
    assert set(found.kernels) == set(SETTINGS) and min(found.shared, found.socket, found.latency) > 0
    assert all(min(each.compress, each.reduce, each.decompress) > 0 for each in found.kernels.values())
    out = tmp_path / "medians.json"
    with or_skip(), star.star(2, "1gbit") as names:
        star.run(names, 1, ["-m", "bench.scaling.timed_rank", "5000,700", 2, out], timeout=200)
    seconds = json.loads(out.read_text())
    assert set(seconds) == {f"{setting}, flat" for setting in SETTINGS} and min(seconds.values()) > 0
