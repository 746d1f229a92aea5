"""Ray Train, where it is installed: a cluster of two nodes, our class in its workers, one of which is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import ROOT, end, with_environment

DRIVER = """
import runpy, sys, ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)
script, *options = sys.argv[1:]
for folder in ("alone", "killed"):
    print("BEGIN", folder, flush=True)
    sys.argv = [script, *options, "--storage_path", folder]
    runpy.run_path(script, run_name="__main__")
ray.shutdown()
cluster.shutdown()
"""
WORKER = re.compile(r"pid=(\d+)\) world_rank=1")  # as Ray tells of the second one's start
EPOCHS, SECONDS = 8, 400


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray (pip install 'ray[train]')")
def test_workers_train_in_our_class_and_one_that_is_killed_changes_nothing(tmp_path: Path):
    """examples/ray_train.py twice: undisturbed, and with a worker killed once there is a checkpoint."""
    log = tmp_path / "log"
    options = ("--epochs", EPOCHS, "--compression", "int8:error_feedback")  # with residuals of each worker
    command = [sys.executable, "-c", DRIVER, ROOT / "examples" / "ray_train.py", *options]
    environment = with_environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", RAY_DEDUP_LOGS="0", NO_COLOR="1")
    with log.open("w") as file:
        driver = subprocess.Popen(
            [str(word) for word in command],
            cwd=tmp_path, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline, killed = time.monotonic() + SECONDS, False
            while driver.poll() is None:
                assert time.monotonic() < deadline, log.read_text()[-5000:]
                if not killed and len([*(tmp_path / "killed").glob("**/snapshot.pt")]) == 3:  # so Ray has the first one
                    worker = WORKER.search(log.read_text().partition("BEGIN killed")[2])
                    assert worker is not None
                    os.kill(int(worker[1]), signal.SIGKILL)
                    killed = True
                time.sleep(0.05)
        finally:
            end(driver)
    said = log.read_text()
    assert driver.returncode == 0 and killed, said[-5000:]
    disturbed = said.partition("BEGIN killed")[2]  # in which each line may stand twice: both nodes' monitors read all
    first, second = dict.fromkeys(WORKER.findall(disturbed))
    again = {int(number) for number in re.findall(r"epoch (\d+): loss", disturbed.partition(f"pid={second})")[2])}
    assert again == set(range(min(again), EPOCHS)) and min(again) > 0, (first, second, again)  # from a checkpoint
    results = re.findall("result: (.*)", said)
    assert len(results) == 2 and results[0] == results[1] and "'wrapped by': 'fastreduce.ddp'" in results[0]
