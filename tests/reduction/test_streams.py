"""What a GPU's stream does, without one: its order, by fake streams that know what they have waited for and can do
nothing else; and steps whose buckets are reduced one by one in shared buffers.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import Phase, given, settings

from fastreduce import Compression, TransportError
from fastreduce.reduction import averaging, shared_buffers
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.jobs import Part, Pending, Told, at_once
from fastreduce.reduction.launches import Launches
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.reducer import GradientReducer, shut_down
from fastreduce.reduction.residuals import error_feedback, rows
from fastreduce.reduction.residuals.applied import Applied
from fastreduce.reduction.shared_buffers import SharedBuffers, Turns
from fastreduce.reduction.streams import CudaStream, ThreadStream, _OnStream
from fastreduce.transports import LocalTransport
from tests.support.models import SETTINGS, MixedDtypes, assert_same_bits, one_by_one, train
from tests.support.random_models import Program, check
from tests.support.random_programs import programs
from tests.support.ranks import RankPool

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """Numbers its work, and knows by stream how much other work comes before what it is given next."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority, self.done = priority, 0
        self.seen: dict[FakeStream, int] = {}

    def work(self) -> int:
        self.done += 1
        return self.done

    def record_event(self) -> FakeEvent:
        return FakeEvent({**self.seen, self: self.done})

    def wait_event(self, event: FakeEvent) -> None:
        for stream, count in event.before.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())


class FakeEvent:
    def __init__(self, before: dict[FakeStream, int]) -> None:
        self.before = before


class FakeCuda:
    """The names of torch.cuda that a stream may use."""

    Stream = FakeStream

    def __init__(self, device: int) -> None:
        self.compute, self._device = FakeStream(), device
        self._on_thread = threading.local()

    @property
    def current(self) -> FakeStream:
        stream: FakeStream = getattr(self._on_thread, "stream", self.compute)
        return stream

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE
        return self.current

    def current_device(self) -> int:
        return self._device

    def set_stream(self, stream: FakeStream) -> None:
        assert self._device == DEVICE.index, "torch would make the stream's device the current one, and leave it so"
        self._on_thread.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._on_thread.stream = self.current, stream
        try:
            yield
        finally:
            self._on_thread.stream = before


@pytest.fixture(params=[0, 1], ids=["", "another device is the current one"])
def cuda(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeCuda:
    fake = FakeCuda(request.param)
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


@pytest.fixture(params=[None, ThreadStream], ids=["at once", "on a thread"])
def stream(cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[CudaStream]:
    made = CudaStream(DEVICE, request.param and request.param())
    yield made
    made.close()


def test_work_runs_on_a_stream_of_high_priority_behind_what_made_the_gradients(cuda: FakeCuda, stream: CudaStream):
    compute = cuda.compute
    seen, streams = [], []

    def begin():
        streams.append(cuda.current)
        seen.append(cuda.current.seen[compute])
        return lambda: streams.append(cuda.current)

    for _ in range(3):
        compute.work()
        stream.submit(begin).result()
    assert seen == [1, 2, 3]
    (ours,) = set(streams)
    assert ours is not compute and ours.priority == -1
    assert cuda.current is compute


def test_the_callers_stream_waits_for_a_result_and_not_before(cuda: FakeCuda, stream: CudaStream):
    compute = cuda.compute
    numbers = []

    def begin():
        numbers.append(cuda.current.work())
        return lambda: numbers.append(cuda.current.work())

    pending = [stream.submit(begin) for _ in range(3)]
    pending[-1].begun()
    ours: Any = stream._stream
    assert ours not in compute.seen, "the caller's stream goes on while the work is under way"
    for each in pending:
        each.result()
    assert compute.seen[ours] == ours.done == 6
    last = stream.begin(begin)
    assert compute.seen[ours] == 6
    last.result()
    assert compute.seen[ours] == 8


def test_one_wait_covers_all_results_that_are_there(cuda: FakeCuda):
    stream = CudaStream(DEVICE, None)
    pending = [stream.submit(lambda: lambda: None) for _ in range(3)]
    waits = []
    cuda.compute.wait_stream = waits.append  # type: ignore[method-assign, assignment]
    for each in pending:
        each.result()
    assert waits == [stream._stream]


def test_memory_that_streams_share_is_used_by_one_after_the_other(cuda: FakeCuda):
    turns, streams = Turns(), [FakeStream() for _ in range(3)]
    done: list[tuple[FakeStream, int]] = []
    for i in (0, 0, 1, 2, 2, 0):
        with cuda.stream(streams[i]):
            turns.use_here(DEVICE)
            for other, count in done:
                assert other is streams[i] or streams[i].seen[other] >= count
            done.append((streams[i], streams[i].work()))
    assert cuda.compute.done == 0 and not cuda.compute.seen
    turns.use_here(torch.device("cpu"))


def test_what_a_job_raises_comes_with_its_result(cuda: FakeCuda, stream: CudaStream):
    def begin():
        raise ValueError("no")

    pending = stream.submit(begin)
    with pytest.raises(ValueError, match="no"):
        pending.result()
    stream.submit(lambda: lambda: None).result()


def test_memory_that_is_outgrown_is_not_given_to_others_before_the_stream_that_used_it_last_lets_go(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    class Memory:
        def __init__(self, numel: int, *_: object) -> None:
            self._numel, self.recorded = numel, list[FakeStream]()

        def numel(self) -> int:
            return self._numel

        def record_stream(self, stream: FakeStream) -> None:
            self.recorded.append(stream)

        def __getitem__(self, _: slice) -> Memory:
            return self

        def view(self, _: torch.dtype) -> Memory:
            return self

    monkeypatch.setattr(shared_buffers, "zeros", Memory)
    buffers, other = SharedBuffers(), FakeStream()
    first: Any = buffers.take("wire", 10, torch.uint8, DEVICE)

    def grows_to(numel: int) -> bool:
        return buffers.take("wire", numel, torch.uint8, DEVICE) is not first

    with cuda.stream(other):
        buffers.turns.use_here(DEVICE)
        assert not grows_to(5)
        assert first.recorded == []
        assert grows_to(20)
    assert first.recorded == [other]


def test_numbers_that_ranks_tell_anew_leave_those_before_to_the_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch):
    """They are the optimizer's stream's, and read by a reduce-scatter's: seen on a GPU, where backward wrote there."""

    class Norms:
        def of(self) -> torch.Tensor:
            return torch.ones(2, 1, dtype=torch.float64)

    norms, parameter = Norms(), torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    applied = Applied([parameter], [], norms.of, 1.0, True, {}, find=[lambda: parameter])
    here, recorded = object(), []

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: object) -> None:
            assert stream is here
            recorded.append(float(self))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: here)
    monkeypatch.setattr(torch, "where", lambda _, own, told: told)
    for number in (0.5, 0.25, 0.125):
        applied.put_fates([torch.tensor(number, dtype=torch.float64).as_subclass(OnGpu)], [float("nan")])
    assert recorded == [0.5, 0.25], "what was there is read on this stream before its memory is anybody else's"


def test_a_stream_that_is_closed_is_waited_for(cuda: FakeCuda, stream: CudaStream):
    """Behind a backward that raised: what its buckets write to is let go of with the wrapper."""

    def begin():
        return lambda: cuda.current.work()

    stream.submit(begin).begun()
    shut_down({DEVICE: stream}, LocalTransport())
    ours: Any = stream._stream
    assert cuda.compute.seen[ours] == ours.done == 1


@pytest.mark.parametrize("part", ["first", "second"])
def test_what_fails_behind_its_collectives_has_begun_and_the_callers_stream_waits_for_what_is_there(
    cuda: FakeCuda, stream: CudaStream, part: str
):
    def fail():
        cuda.current.work()
        raise ValueError("no")

    pending = stream.submit(fail if part == "first" else lambda: fail)
    with pytest.raises(ValueError, match="no") if part == "first" else contextlib.nullcontext():
        pending.begun()
    with pytest.raises(ValueError, match="no"):
        pending.result()
    ours: Any = stream._stream
    assert cuda.compute.seen[ours] == ours.done == 1


def test_what_a_first_part_has_enqueued_is_waited_for_whoever_goes_on(cuda: FakeCuda):
    """Where another bucket has failed, nobody may: streams are joined as they are."""
    stream, go_on = CudaStream(DEVICE, ThreadStream()), threading.Event()

    def begin():
        cuda.current.work()
        return lambda: go_on.wait(60) and None

    pending = stream.submit(begin)
    pending.begun()
    stream.join()
    ours: Any = stream._stream
    assert cuda.compute.seen.get(ours) == ours.done == 1
    go_on.set()
    pending.result()
    stream.close()


class LateStream(CudaStream):
    """Does the host's part at once, and knows whether a caller's stream has been made to wait."""

    made: ClassVar[list[LateStream]] = []

    def __init__(self) -> None:
        self._thread, self._ahead = None, False
        self.made.append(self)

    def submit(self, begin: Part, told: Told | None = None) -> Pending:
        self._ahead = True
        return _OnStream(self, at_once(begin, told))

    def join(self) -> None:
        self._ahead = False


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise MemoryError


def _raised(monkeypatch: pytest.MonkeyPatch, in_first_part: bool) -> tuple[GradientReducer, dict[str, Any]]:
    """A reducer behind a backward that raised with a bucket launched, and its state from before."""
    LateStream.made.clear()
    parameters = [torch.nn.Parameter(torch.ones(600)) for _ in range(3)]
    setting = Compression.parse("int8:error_feedback")
    reducer = GradientReducer(parameters, list("abc"), LocalTransport(), setting, bucket_caps=[100])

    def step(raises: bool) -> None:
        for parameter in parameters:
            parameter.grad = None
        first = torch.ones(600) * parameters[0]
        loss = (((Raises.apply(first) if raises else first) * parameters[1]) * parameters[2]).sum()  # type: ignore[no-untyped-call]
        reducer.rebuild_buckets()
        reducer.arm()
        reducer.watch([loss])
        loss.backward()

    step(False)
    step(False)
    state = reducer.state_dict()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        if in_first_part:
            patch.setattr(BucketPipeline, "compress", Raises.backward)
        step(True)
    assert any(stream._ahead for stream in LateStream.made), "a bucket was launched"
    return reducer, state


@pytest.mark.parametrize("how", ["next forward", "reset", "load_state_dict", "move_to", "dropped", "its first part"])
def test_buckets_of_a_backward_that_raised_are_let_go_of_behind_their_stream(monkeypatch: pytest.MonkeyPatch, how: str):
    """Else what a late peer's NCCL brings is written to memory that is others' by then."""
    monkeypatch.setattr(averaging, "make_stream", lambda device, transport: LateStream())
    monkeypatch.setattr(averaging, "one_by_one", lambda device, transport: True)
    reducer, state = _raised(monkeypatch, how == "its first part")
    streams, late = list(LateStream.made), list[bool]()

    def note() -> None:
        late.append(any(stream._ahead for stream in streams))

    def let_go(pipeline: BucketPipeline) -> None:
        note()

    for pipeline in reducer.pipelines:
        weakref.finalize(pipeline.wire, note)
    monkeypatch.setattr(BucketPipeline, "run_broken", let_go)  # which writes to the wire
    if how in ("next forward", "its first part"):
        reducer.arm()
    elif how == "reset":
        weakref.finalize(reducer.backward._launches.made[0][0], note)
        reducer.reset()
    elif how == "load_state_dict":
        weakref.finalize(reducer.backward._launches.made[0][0], note)
        reducer.load_state_dict(state)
    elif how == "move_to":
        reducer.buckets.move_to(LocalTransport())
    pipeline = reducer = None  # type: ignore[assignment]
    gc.collect()
    assert late and not any(late)


def _steps_one_by_one(rank: int, world_size: int) -> None:
    for setting in SETTINGS:
        for views in (False, True):
            options = {"compression": setting, "gradient_as_bucket_view": views, "bucket_cap_mb": 0.002}
            expected = train("ours", MixedDtypes, rank, **options)
            with one_by_one():
                found = train("ours", MixedDtypes, rank, **options)
            assert_same_bits(found, expected, f"{setting}, views={views}")


@pytest.mark.long
def test_buckets_one_by_one_in_shared_buffers_give_the_same_bits(ranks2: RankPool):
    ranks2.run(_steps_one_by_one)


def _check_one_by_one(rank: int, world_size: int, program: Program) -> list[str]:
    with one_by_one():
        return check(rank, world_size, program, "none")


@pytest.mark.parametrize("examples", [3, pytest.param(8, marks=pytest.mark.long)])
def test_random_programs_one_by_one_train_as_with_torch(ranks2: RankPool, examples: int):
    @given(program=programs())
    @settings(max_examples=examples, derandomize=True, phases=[Phase.explicit, Phase.generate])
    def search(program: Program) -> None:
        problems = [problem for of_rank in ranks2.run(_check_one_by_one, program) for problem in of_rank]
        assert not problems, "\n".join(problems[:12])

    search()


def test_a_verdict_that_a_device_may_still_read_is_kept_until_the_next_one_is_read():
    """It is memory of the stream that made it, and read on another: nothing else may be put there meanwhile."""
    setting, cpu = Compression.parse("int8:error_feedback"), torch.device("cpu")
    specs = [ParameterSpec("a", 300, torch.float32, cpu)]
    (bucket,) = build_plan(specs, [[0]], alignment=setting.alignment, shards=1).buckets
    pipeline, parameter = BucketPipeline(bucket, setting, LocalTransport()), torch.nn.Parameter(torch.zeros(300))
    kept, verdicts = pipeline.feedback, []
    assert kept is not None
    with patch.object(error_feedback, "reads_late", lambda _: True), patch.object(rows, "reads_late", lambda _: True):
        for step in range(3):
            parameter.grad = torch.full((300,), step + 1.0)
            pipeline.run([parameter.grad], [parameter.grad])
            kept.follow([parameter], [], pipeline.magnitudes, watched=False)
            error_feedback.agree_that_finite([kept])
            verdicts.append(weakref.ref(kept.finite))
            kept.commit()
            kept.finite = torch.tensor(True)  # as the end of the next reduction, which the host does not wait for
            assert [each() is not None for each in verdicts] == [False] * step + [True]


def test_a_signal_amid_a_launch_ends_the_connection():
    """Also of a bucket that is launched during a backward, or for another one through the same forward."""
    buckets = Mock(**{"alone.return_value": False, "transport.world_size": 2})
    buckets.collect.return_value.stream.begin.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        Launches(buckets, [], []).launch_these([0])
    buckets.transport.abort.assert_called_once_with()


def test_what_a_transport_raised_is_raised_again_where_launches_end_as_they_can():
    buckets, pending = Mock(), Mock()
    pending.begun.side_effect = TransportError
    launches = Launches(buckets, [], [])
    launches.made = [(Mock(), pending)]
    with pytest.raises(TransportError):
        launches.end_as_they_can()
    buckets.streams.join.assert_called_once_with()
