"""Processes that are killed in each stage of a step: who is left has the same averages of known gradients."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.support import gpu_pools
from tests.support.commands import with_environment
from tests.support.elastic_jobs import AT_STEP, BATCH, TIMEOUT, VICTIM, gradient
from tests.support.fork_server import Forked, run_as_script, server

SECONDS = 120.0
GOES_ON = 60.0  # a kill is noticed in tenths of a second, here beside everything else


class Step(NamedTuple):
    """What a process did in one step; `done` has the samples that were in a committed step by then."""

    step: int
    size: int
    batch: list[int]
    samples: list[Any]
    averages: list[float]
    same: bool
    momentum: list[float]
    parameters: list[float]

    @property
    def done(self) -> set[int]:
        top, *open_ = self.samples
        return {*range(top)}.difference(*open_)


class Processes:
    """Those of one training."""

    def __init__(self, folder: Path, stage: str, transport: str, setting: str, size: int = 3) -> None:
        self.folder, self.size, self._arguments = folder, size, (stage, transport, setting)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.running: dict[str, Forked] = {}

    def start_all(self) -> None:
        for place in range(self.size):
            self.start(place, str(place))

    def start(self, place: int, name: str, stage: str | None = None) -> None:
        where = {"RANK": str(place), "WORLD_SIZE": str(self.size), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        address, (given, transport, setting) = f"127.0.0.1:{self._store.port}", self._arguments
        arguments = [address, str(self.folder), name, stage or given, transport, setting]
        job = "tests.support.elastic_jobs", arguments, str(self.folder / f"{name}.out")
        self.running[name] = server(place).fork(run_as_script, *job, env=with_environment(**where))

    def steps(self, name: str) -> list[Step]:
        path = self.folder / f"{name}.json"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Step(*json.loads(line)) for line in lines if line.endswith("]]")]

    def wait(self, done: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            told = {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.out")}
            assert time.monotonic() < deadline, f"it did not come to that: {told}"
            time.sleep(0.02)

    def last(self, name: str) -> int:
        return max((step.step for step in self.steps(name)), default=-1)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("stage", "transport", "setting"),
    [
        ("backward", "gloo", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("backward", "nccl", "none"),
                ("commit", "shm", "none"),
                ("forward", "gloo", "none"),
                ("collective", "gloo", "none"),
                ("collective", "shm", "none"),
                ("collective", "gloo", "fp16"),
                ("collective", "shm", "int8:error_feedback"),
                ("between", "shm", "none"),
                ("forward", "nccl", "none"),
                ("collective", "nccl", "int8:error_feedback"),
                ("commit", "nccl", "fp16"),
            ]
        ),
    ],
)
def test_who_is_left_has_the_averages_of_those_present(tmp_path: Path, stage: str, transport: str, setting: str):
    check(Processes(tmp_path, stage, transport, setting), stage, setting)


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_pools.HAS_GPU, reason="no CUDA device")
@pytest.mark.timeout(500)
@pytest.mark.parametrize("size", gpu_pools.MANY)
@pytest.mark.parametrize(("stage", "setting"), [("backward", "none"), ("collective", "int8"), ("commit", "fp16")])
def test_who_is_left_on_a_gpu(tmp_path: Path, stage: str, setting: str, size: int):
    check(Processes(tmp_path, stage, "nccl", setting, size), stage, setting)


def check(job: Processes, stage: str, setting: str) -> None:
    """Run a training, in which the second process ends in a stage, and look at every step of the others."""
    others = [str(place) for place in range(job.size) if place != VICTIM]
    try:
        job.start_all()
        job.wait(lambda: job.running["1"].poll() is not None, SECONDS)
        job.wait(lambda: min(map(job.last, others)) > AT_STEP + 3, GOES_ON)
        if stage in ("backward", "commit"):
            job.start(VICTIM, "again", stage="none")
            job.wait(lambda: len(job.steps("again")) > 3, SECONDS)
        (job.folder / "last.part").write_text(str(job.last("0") + 30))
        os.replace(job.folder / "last.part", job.folder / "last step")
        left = [name for name in job.running if name != "1"]
        job.wait(lambda: all(job.running[name].poll() == 0 for name in left), SECONDS)
        by_step: dict[int, list[Step]] = {}
        for name in left:
            for step in job.steps(name):
                by_step.setdefault(step.step, []).append(step)
        batches = [(step.step, step.batch) for name in job.running for step in job.steps(name)]
    finally:
        for process in job.running.values():
            process.kill()
    assert sorted(by_step) == list(range(max(by_step) + 1)), "no step is left out"
    # One that is killed in the commit has averages of all, and so have all others: they count.
    lost_from = AT_STEP + (stage == "commit")
    for number, same in by_step.items():
        assert len({json.dumps(step[3:]) for step in same}) == 1, "the bits of all are the same"
        first = same[0]
        everybody = number < lost_from or len(same) == job.size
        present = [place for place in range(job.size) if everybody or place != VICTIM]
        mean = sum(gradient(place, number) for place in present) / len(present)
        assert first.averages == pytest.approx([mean] * len(first.averages), rel=1e-2 if setting != "none" else 1e-6)
        assert first.same or setting.startswith("int8"), "no average is of some ranks here, and of others there"
        dealt = [sample for at, batch in batches if at == number for sample in batch]
        new = first.done - (by_step[number - 1][0].done if number else set())
        lost = stage == "commit" and number == AT_STEP  # by then it has not told what it had
        assert new.issuperset(dealt) and len(new) == len(dealt) + BATCH * lost, "each sample is in one step"
        assert len(first.samples) == 2 + first.size, "or in the hand of one who is there"
    if "again" in left:
        assert {step.size for step in job.steps("again")} == {job.size}


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("transport", ["gloo", "shm", "nccl"])
def test_one_that_is_stopped_is_left_out_after_the_timeout_and_is_told_so(tmp_path: Path, transport: str):
    job = Processes(tmp_path, "stopped", transport, "none")
    try:
        job.start_all()
        job.wait(lambda: min(job.last(name) for name in "02") >= AT_STEP - 1, SECONDS)
        job.wait(lambda: min(job.last(name) for name in "02") > AT_STEP + 3, 2 * TIMEOUT + GOES_ON)
        assert {step.size for name in "02" for step in job.steps(name) if step.step >= AT_STEP} == {2}
        os.kill(job.running["1"].pid, signal.SIGCONT)
        job.wait(lambda: job.running["1"].poll() is not None, 2 * TIMEOUT + GOES_ON)
        assert "have gone on without it: start it again" in (tmp_path / "1.out").read_text()
    finally:
        for process in job.running.values():
            process.kill()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_nobody_is_lost_where_the_whole_job_stood_still(tmp_path: Path):
    """As on a suspended machine; the first to go on finds that the others have not said anything for longer."""
    job = Processes(tmp_path, "none", "gloo", "none")
    try:
        job.start_all()
        job.wait(lambda: min(job.last(name) for name in "012") > AT_STEP, SECONDS)
        for process in job.running.values():
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.3 * TIMEOUT)
        stopped = max(job.last(name) for name in "012")
        for process in job.running.values():
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
        job.wait(lambda: min(job.last(name) for name in "012") > stopped + 20, 2 * TIMEOUT + GOES_ON)
        assert {step.size for name in "012" for step in job.steps(name)} == {3}
    finally:
        for process in job.running.values():
            process.kill()
