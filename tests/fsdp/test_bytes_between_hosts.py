"""The bytes that leave a host in a sharded backward, as its interface counts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import two_nodes
from tests.support.sharded_job import WIDTH

GRADIENTS = 2 * (WIDTH + 1) * WIDTH
# Of what `none` sends, beside what TCP adds: a byte for 128 elements of FP16, four of INT8, and two for 32 of INT4.
SHARES = {"fp16": 0.51, "bf16": 0.505, "int8": 0.27, "int4": 0.15}


@pytest.mark.long
def test_bytes_of_a_reduce_scatter(tmp_path: Path):
    launch = ["-c", "from fastreduce.cli import main; main()", "launch", "WHERE"]
    with two_nodes.or_skip(), two_nodes.two_nodes() as names:
        two_nodes.launch(names, [*launch, "-m", "tests.support.sharded_job", tmp_path], timeout=200)
    for rank in range(2):
        sent = json.loads((tmp_path / f"{rank}.json").read_text())
        none = sent["none"]
        assert GRADIENTS * 4 / 2 <= none <= 1.02 * GRADIENTS * 4 / 2, "to the other rank goes its half"
        assert none <= 1.01 * sent["torch"]
        for setting, share in SHARES.items():
            assert sent[setting] <= share * none, f"{setting}: {sent[setting]} bytes, none {none}"
