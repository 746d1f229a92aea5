"""Where a bucket's work is enqueued, so that reduction overlaps with backward: a thread, or a CUDA stream."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from ..environment.forks import Owner
from ..transports import LateGatherTransport, Transport, TwoLevelTransport
from .jobs import Begun, Part, Pending, StreamJob, Told, at_once, do_all

CLOSE_SECONDS = 5.0


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on the current GPU's current stream: then no host may wait for a device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Stream(Protocol):
    """Runs work in the order in which it comes."""

    def submit(self, begin: Part) -> Pending:
        """Enqueue a job, of which `begin` is the first part."""

    def begin(self, begin: Part) -> Pending:
        """Do the first part of the last job of a reduction now, on the caller's thread."""

    @property
    def idle(self) -> bool:
        """Whether no transfer that was enqueued is under way on the host."""

    def close(self) -> None:
        """End what the stream holds."""


def one_by_one(device: torch.device, transport: Transport) -> bool:
    """Whether a bucket on `device` is reduced to its end before the next is begun: as CUDA work on one stream."""
    return device.type == "cuda" and transport.enqueues


def make_stream(device: torch.device, transport: Transport) -> CudaStream | ThreadStream:
    """What buckets on `device` are reduced on."""
    if one_by_one(device, transport):
        return CudaStream(device, None)
    thread = ThreadStream(apart=isinstance(transport, (TwoLevelTransport, LateGatherTransport)))
    return CudaStream(device, thread) if device.type == "cuda" else thread


_Jobs = queue.SimpleQueue["StreamJob | None"]


class ThreadStream:
    """Runs jobs on a thread that starts with the first one, in the order of `submit`.

    A job is begun before the ones under way go on, so that one bucket is compressed while another's wire is on its way.

    Args:
        apart: whether each part has a thread of its own, where jobs come in the same order. So nothing that waits keeps
            a bucket, or what has been summed of one, from being sent. And ranks need not be equally far: one may do a
            job to its end before it begins the next, for which others wait meanwhile.
    """

    def __init__(self, apart: bool = False) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._begun: _Jobs | None = queue.SimpleQueue() if apart else None
        self._threads: list[threading.Thread] = []
        self._owner = Owner()
        self._under_way: deque[StreamJob] = deque()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, begin: Part, told: Told | None = None) -> StreamJob:
        """Enqueue a job for the thread.

        Raises:
            TransportError: in a fork of the process that made the stream.
        """
        self._owner.check("A bucket was to be reduced")
        if not self._threads:
            if self._begun is None:
                self._start(_work, self._jobs)
            else:
                summed: _Jobs = queue.SimpleQueue()
                self._start(_begin, self._jobs, self._begun)
                self._start(_go_on, self._begun, summed)
                self._start(_end, summed)
        job = self._new_job(begin, told)
        self._jobs.put(job)
        return job

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="fastreduce-communication", daemon=True)
        self._threads.append(thread)
        thread.start()

    def begin(self, begin: Part) -> Pending:
        """Do the first part on the caller's thread, which would only wait for the other.

        The rest is done where the result is asked for, unless threads of its own are at work on other jobs.
        """
        if self._begun is None or self.idle:
            return Begun(begin())
        job = self._new_job(begin)
        job.begin(self._begun.put)
        job.begun()
        return job

    def _new_job(self, first: Part, told: Told | None = None) -> StreamJob:
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft()
        job = StreamJob(first, told)
        self._under_way.append(job)
        return job

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended; one that has failed counts as ended, while earlier ones go on."""
        return all(job.done for job in list(self._under_way))  # to which another thread may add

    def close(self) -> None:
        """End the threads after the jobs already enqueued, and wait a little for their end."""
        self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))


def _begin(jobs: _Jobs, begun: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.begin(begun.put)
        del job
    begun.put(None)


def _go_on(begun: _Jobs, summed: _Jobs) -> None:
    while (job := begun.get()) is not None:
        if job.go_on():
            summed.put(job)
        del job
    summed.put(None)


def _end(summed: _Jobs) -> None:
    while (job := summed.get()) is not None:
        job.finish()
        del job


def _work(jobs: _Jobs) -> None:
    under_way: deque[StreamJob] = deque()
    while True:
        try:
            job = jobs.get(block=not under_way)
        except queue.Empty:
            under_way.popleft().finish()
            continue
        if job is None:
            break
        job.begin(under_way.append)
        del job
    for job in under_way:
        job.finish()


class CudaStream:
    """Runs jobs on one high-priority CUDA stream of a device, behind what is enqueued on the caller's stream.

    A job's result makes the caller's stream wait, not the host. The host's part of the work is done at once or, with
    transports that wait on the host, on `thread`.
    """

    def __init__(self, device: torch.device, thread: ThreadStream | None) -> None:
        self._device, self._thread = device, thread
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._ahead = False  # whether it holds work that no caller's stream has waited for

    def submit(self, begin: Part, told: Told | None = None) -> Pending:
        """Enqueue a job behind what the current stream holds now."""
        current = torch.cuda.current_stream(self._device)
        ready = current.record_event()
        if self._thread is not None:
            here = None if told is None else lambda error: self._tell(told, error)
            return _OnStream(self, self._thread.submit(lambda: self._begin(begin, ready), here))
        self._ahead = True  # as in `_begin`
        self._stream.wait_event(ready)
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.stream(self._stream):
                return _OnStream(self, at_once(begin, told))
        torch.cuda.set_stream(self._stream)  # a scope would look for the device and both streams anew
        try:
            return _OnStream(self, at_once(begin, told))
        finally:
            torch.cuda.set_stream(current)

    def _tell(self, told: Told, error: BaseException | None) -> None:
        with torch.cuda.stream(self._stream):
            told(error)
        self._ahead = True

    def begin(self, begin: Part) -> Pending:
        """Begin a job behind what the current stream holds now."""
        if self._thread is None:
            return self.submit(begin)
        ready = torch.cuda.current_stream(self._device).record_event()
        return _OnStream(self, self._thread.begin(lambda: self._begin(begin, ready)))

    def _begin(self, begin: Part, ready: torch.cuda.Event) -> Part:
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                rest = begin()
        finally:
            self._ahead = True  # of what fails, or is never gone on with, too, a part may be on the stream

        def finish_on_stream() -> None:
            try:
                with torch.cuda.stream(self._stream):
                    do_all(rest)
            finally:
                self._ahead = True

        return finish_on_stream

    def join(self) -> None:
        """Let the current stream wait for all work that was enqueued, unless it has."""
        if self._ahead:
            self._ahead = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @property
    def idle(self) -> bool:
        """Whether the host's part of all jobs has ended."""
        return self._thread is None or self._thread.idle

    def close(self) -> None:
        """End the host's part; the current stream waits for the device's, whose memory may be let go of now."""
        if self._thread is not None:
            self._thread.close()
        self.join()


class _OnStream:
    """A job whose result the caller's stream waits for."""

    def __init__(self, stream: CudaStream, job: Pending) -> None:
        self._stream, self._job = stream, job

    def begun(self) -> None:
        self._job.begun()

    def result(self) -> None:
        try:
            self._job.result()
        finally:
            self._stream.join()

    def cancel(self) -> None:
        self._job.cancel()

    @property
    def done(self) -> bool:
        return self._job.done
