"""The flight record: what it says of real steps, what errors and signals tell of it, and what it does not disturb."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import urllib.request
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from fastreduce import SettingError, TransportError
from fastreduce.environment import fates
from fastreduce.environment.stacks import OURS, dump_at_signal
from fastreduce.reduction import clocks
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.clocks import Point
from fastreduce.reduction.telemetry import other_call, whereabouts
from fastreduce.reduction.telemetry.flight_record import BucketFlight, Phase
from fastreduce.reduction.telemetry.flight_recorder import STEPS, FlightRecorder, _of_optimizer
from fastreduce.reduction.telemetry.watch import _Watch
from fastreduce.reduction.telemetry.whereabouts import Whereabouts
from fastreduce.transports.deadlines import in_background
from fastreduce.transports.store_client import StoreClient
from tests.support.commands import finish, run, started, with_environment
from tests.support.models import wrap
from tests.support.ranks import RankPool, run_ranks

IN_ORDER = ("ready", "compress", "compressed", "exchanged", "summed", "reduced", "decompressed")
PHASES = ["after", "optimizer", "data", "forward", "backward", "waiting"]


def _model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def _check_bucket(bucket: BucketFlight, two_shot: bool, seconds: float) -> None:
    times = [getattr(bucket, name) for name in IN_ORDER if two_shot or name not in ("exchanged", "summed")]
    assert None not in times and times == sorted(times) and times[0] > 0 and times[-1] <= seconds
    assert two_shot or bucket.exchanged is bucket.summed is None


def _trained(rank: int, world_size: int, setting: str) -> list[str]:
    """What this rank does, as told inside each part of the last step."""
    ddp = wrap("ours", _model(), compression=setting, bucket_cap_mb=0.03, transport="gloo")
    optimizer, told = torch.optim.SGD(ddp.parameters(), lr=1e-3), []
    last = ddp.reducer.recorder.phase is Phase.DATA

    def note(*_: Any) -> None:
        if last:
            told.append(ddp.reducer.flight_record().doing)

    optimizer.register_step_pre_hook(note)
    ddp.module[2].weight.register_hook(note)
    for step in range(STEPS + 6):
        last = step == STEPS + 5
        if step % 3 == 1:
            with ddp.no_sync():
                ddp(torch.randn(4, 64)).sum().backward()
        note()
        output = ddp(torch.randn(4, 64))
        note()
        output.square().mean().backward()
        note()
        optimizer.step()
        optimizer.zero_grad()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ddp.reducer.flight_record()))
    thread.start()
    thread.join()
    record = found[0]
    assert [step.step for step in record.steps] == list(range(6, STEPS + 7)) and record.rank == rank
    assert record.steps[-1].seconds is None and not record.steps[-1].buckets
    for step in record.steps[1:-1]:
        assert list(step.took) == list(step.began) == PHASES
        assert step.seconds is not None and abs(sum(step.took.values()) - step.seconds) < 1e-6
        assert [bucket.bucket for bucket in step.buckets] == list(range(len(ddp.reducer.plan.buckets)))
        for bucket in step.buckets:
            _check_bucket(bucket, setting != "none", step.seconds)
        assert [bucket.ready for bucket in step.buckets] == sorted(bucket.ready for bucket in step.buckets)
    pipeline, bucket = ddp.reducer.pipelines[0], record.steps[-2].buckets[0]
    assert bucket.compressed - bucket.compress == pytest.approx(pipeline.seconds.compress, abs=1e-6)
    assert json.loads(json.dumps(record.as_dict()))["steps"][0]["step"] == 6
    assert f"step {STEPS + 5}: " in str(record) and "compressed" in str(record)
    ddp.reducer.close()
    return told


@pytest.mark.parametrize("setting", ["none", pytest.param("int8", marks=pytest.mark.long)])
def test_the_record_of_real_steps(ranks2: RankPool, setting: str):
    for data, forward, backward, after, optimizer in ranks2.run(_trained, setting):
        assert data.startswith("between its optimizer's step and its forward")
        assert forward.startswith("in forward, the loss or a backward of its own (no_sync), for ")
        assert "in backward, 7 of 12 gradients there, up to '2.bias'" in backward  # its weight comes next
        assert after.startswith("after its last averages") and optimizer.startswith("in an optimizer's step")


def _asked_by_debug_server(rank: int, world_size: int) -> Any:
    import torch.distributed.debug
    from torch._C._distributed_c10d import _WorkerServer

    ddp = wrap("ours", _model())
    ddp(torch.randn(4, 64)).sum().backward()
    server = _WorkerServer("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}/handler/fastreduce_flight_record"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=20) as answer:
            return json.loads(answer.read())
    finally:
        server.shutdown()


class Device:
    """A clock whose device comes to its points later than the host."""

    def __init__(self) -> None:
        self.passed = array("d", [0.0] * len(Point))

    def times(self, wait: bool = False) -> array[float]:
        if wait:
            time.sleep(0.01)
            self.passed = array("d", [clocks.now()] * len(Point))
        return self.passed


def test_a_step_that_waits_for_a_device_ends_when_that_has_ended():
    cpu, device = torch.device("cpu"), Device()
    recorder = FlightRecorder(0, 1, [], [])
    plan = build_plan([ParameterSpec("", 1, torch.float32, cpu)], [[0]], alignment=16, shards=1)
    recorder.lay_out(plan, [SimpleNamespace(clock=device, wires=SimpleNamespace(sent_by_stage={}))])  # type: ignore[list-item]
    recorder.waits = True
    recorder.enter(Phase.WAITING)
    recorder.end_step(0)
    (row,) = recorder.last_rows(1)
    assert row.seconds[Phase.WAITING] >= 0.01
    assert row.start < device.passed[Point.END] <= row.end == recorder.row.start


def test_torchs_debug_server_has_it_and_processes_end_well():
    try:
        import torch.distributed.debug  # noqa: F401
    except ImportError:
        pytest.skip("this torch has no debug server")
    for rank, records in enumerate(run_ranks(_asked_by_debug_server, 2)):
        record = records[-1]  # of what has just been trained
        assert record["rank"] == rank and record["steps"][0]["took"]["backward"] > 0


SIGNALS = """
import faulthandler, os, signal, threading, time
import torch, torch.distributed as dist
from fastreduce import DistributedDataParallel
from fastreduce.environment.stacks import OURS, dump_at_signal

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
for name, take in (("USR2", lambda number: faulthandler.register(number, open(os.devnull, "w"))),
                   ("USR1", lambda number: signal.signal(number, signal.SIG_IGN)), ("none", None)):
    os.environ["FASTREDUCE_DUMP_SIGNAL"] = name
    number = signal.Signals["SIG" + name] if take else 0
    if take:
        take(number)
    dump_at_signal(lambda: "must not be printed")
    os.kill(os.getpid(), number)
    time.sleep(0.5)
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
del os.environ["FASTREDUCE_DUMP_SIGNAL"]
ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
ddp(torch.ones(2, 4)).sum().backward()
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGUSR1)  # nobody prints
    time.sleep(0.5)
    dump_at_signal(lambda: "the child")
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(5)
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()

def waits_in_cpp():
    try:
        store.wait(["never"], __import__("datetime").timedelta(seconds=10))
    except Exception:
        print("went on", flush=True)

waits_in_cpp()
"""


@pytest.mark.long
def test_a_signal_prints_record_and_stacks_and_takes_no_handler():
    with started(sys.executable, "-c", SIGNALS, env=with_environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == "went on\n"
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:  # as it ends, too
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.001)
        done = finish(process, 100)
    assert done.returncode == 0, done.stderr
    assert "must not be printed" not in done.stderr
    assert done.stderr.count("has a handler for SIGUSR") == 2, done.stderr
    assert done.stderr.count("the child\nMainThread:\n") == 1
    assert "rank 0 of 1 is after its last averages" in done.stderr and "step 0: " in done.stderr
    assert "MainThread:\n" in done.stderr and "in waits_in_cpp" in done.stderr


# What an exit does, and a signal right behind it.
UNREGISTERED = """
import faulthandler, os, signal
from fastreduce.environment.stacks import dump_at_signal
dump_at_signal(lambda: "the record")
faulthandler.unregister(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_where_the_handler_goes_no_signal_ends_the_process():
    assert run(sys.executable, "-c", UNREGISTERED, env=with_environment()).returncode == 0


def test_a_signal_that_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_DUMP_SIGNAL", "KILL")
    with pytest.raises(SettingError, match="FASTREDUCE_DUMP_SIGNAL=KILL: allowed: USR1, USR2, none"):
        dump_at_signal(lambda: "")


class _Unhashable(torch.optim.SGD):
    def __eq__(self, other: object) -> bool:
        return self is other


class _WithoutGroups(torch.optim.SGD):
    """Keeps its groups elsewhere."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_optimizers_of_any_class_step():
    parameter = nn.Parameter(torch.ones(2))
    recorder = FlightRecorder(0, 1, [parameter], [False])
    optimizer = _Unhashable([parameter], lr=0.1)
    optimizer.step()
    assert recorder.changes == 2 and recorder.row.seconds[Phase.OPTIMIZER] > 0
    other = _WithoutGroups([parameter], lr=0.1)
    del other.param_groups
    other.step()
    known = len(_of_optimizer)
    del optimizer, other
    assert recorder.changes == 2 and len(_of_optimizer) == known - 2


def test_who_waits_in_another_call_is_named_while_its_gradients_are_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(other_call, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(other_call, "PATIENCE", 0.0)
    store, recorder = StoreClient(dist.HashStore(), 5.0), FlightRecorder(0, 3, [], [])
    recorder.row.begin(20, clocks.now(), None)
    missing, there = other_call.Call(store, 1, 20), other_call.Call(store, 2, 21)  # which has brought its gradients

    def found() -> list[int]:
        return other_call.Question().ask(store, recorder)

    recorder.enter(Phase.WAITING)
    assert found() == []
    assert there.tell() and missing.tell() and not missing.tell()
    assert found() == [1]
    recorder.enter(Phase.AFTER)
    assert found() == []
    recorder.enter(Phase.WAITING)
    missing.end()
    assert found() == [] and not missing.tell()


def test_a_call_of_which_the_store_did_not_answer_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(other_call, "LOOK_SECONDS", 0.0)
    store = StoreClient(dist.HashStore(), 5.0)
    with patch.object(StoreClient, "add", side_effect=TransportError("no answer")), pytest.raises(TransportError):
        (call := other_call.Call(store, 1, 20)).tell()
    call.end()
    assert store.add("other calls", 0) == 0


def _interrupted(rank: int, world_size: int) -> list[str]:
    """What a rank does behind an interrupt in the broadcast of buffers."""
    ddp = wrap("ours", nn.BatchNorm1d(4))
    ddp(torch.ones(3, 4)).sum().backward()
    recorder, found = ddp.reducer.recorder, []

    def interrupt(_: object, buffers: object) -> None:
        found.append(recorder.doing())
        raise KeyboardInterrupt

    ddp._register_buffer_comm_hook(None, interrupt, _BufferCommHookLocation.PRE_FORWARD)
    with pytest.raises(KeyboardInterrupt):
        ddp(torch.ones(3, 4))
    return [*found, recorder.doing()]


def test_who_was_interrupted_where_buffers_are_broadcast_waits_no_more(ranks2: RankPool):
    for waits, then in ranks2.run(_interrupted):
        assert waits.startswith("waiting for other ranks") and then.startswith("after its last averages")


def test_a_process_is_known_from_its_wrapping_on(monkeypatch: pytest.MonkeyPatch):
    class There(Whereabouts):
        wrapped = ""

        def __init__(self) -> None:
            self.group = self.store = self  # type: ignore[assignment]
            self.patience, self.asked = 1000.0, threading.Event()

        def introduce(self, rank: int) -> None:
            self.asked.set()

    monkeypatch.setattr("fastreduce.reduction.telemetry.watch.LOOK_SECONDS", 1000.0)
    monkeypatch.setattr("fastreduce.reduction.telemetry.watch.SHORTEST", 1000.0)
    place, recorder, watch = There(), FlightRecorder(0, 2, [], []), _Watch()
    watch.add(recorder, place, lambda: None)
    assert place.asked.wait(20.0)
    watch.remove(recorder)
    watch.end()


def test_a_recorder_may_end_on_the_thread_that_is_about_to_look(monkeypatch: pytest.MonkeyPatch):
    """As where garbage is collected there: the one that started the thread waited for it, and kept the lock."""

    class Silent(Whereabouts):
        wrapped = ""

        def __init__(self) -> None:
            self.group = self.store = self  # type: ignore[assignment]
            self.patience = 1000.0

        def introduce(self, rank: int) -> None:
            pass

    watch, place, ended = _Watch(), Silent(), [FlightRecorder(0, 2, [], [])]
    watch.add(ended[0], place, lambda: None)
    watch.remove(ended[0])
    begin: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def end_one_and_begin(thread: threading.Thread) -> None:
        if thread.name == f"{OURS}whereabouts":
            ended.clear()
        begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", end_one_and_begin)
    recorder = FlightRecorder(0, 2, [], [])
    in_background(lambda: watch.add(recorder, place, lambda: None), 20.0)
    assert not ended
    watch.remove(recorder)
    watch.end()


def test_nobody_is_told_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch):
    class Gone(Whereabouts):
        wrapped = ""

        def __init__(self) -> None:
            self.group, self.patience, self.asked = self, 0.01, 0  # type: ignore[assignment]

        def introduce(self, rank: int) -> None:
            self.asked += 1
            raise TransportError("the store is gone") from RuntimeError("Broken pipe")

        tell = introduce

    place, recorder, watch = Gone(), FlightRecorder(0, 2, [], []), _Watch()
    watch.add(recorder, place, lambda: None)
    deadline = time.monotonic() + 100
    while not place.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # in which it would be asked again and again
    assert place.asked == 1 and watch._thread is not None and watch._thread.is_alive()
    watch.remove(recorder)
    watch.end()

    def unknown(_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("os.readlink", unknown)
    assert fates.introduction()[0] == "" == whereabouts._fate(["", 0, ""])
