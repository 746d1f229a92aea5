"""Tiny programs on streams: those in `RACES` leave out an order, those in `ORDERED` do not.

`python -m tests.simulated_gpu.orders` prints what is found in each, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import torch

Stream, Event = torch.cuda.Stream, torch.cuda.Event
RACES: dict[str, tuple[Callable[[], object], str]] = {}  # and what is to be found in it
ORDERED: dict[str, Callable[[], object]] = {}


def _ones() -> torch.Tensor:
    return torch.ones(64, device="cuda")


def _ones_read_on_another_stream() -> tuple[torch.Tensor, torch.cuda.Stream]:
    x, side = _ones(), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    return x, side


def _race(expected: str) -> Callable[[Callable[[], object]], None]:
    def add(program: Callable[[], object]) -> None:
        RACES[program.__name__] = (program, expected)

    return add


def _ordered(program: Callable[[], object]) -> None:
    ORDERED[program.__name__] = program


@_race("read by aten::mul does not follow write by aten::fill_")
def no_wait_before_a_read() -> None:
    x = _ones()
    with torch.cuda.stream(Stream()):
        x.mul(2)
    torch.cuda.synchronize()


@_race("write by aten::zero_ does not follow read by aten::mul")
def no_wait_before_a_write() -> None:
    x, _ = _ones_read_on_another_stream()
    x.zero_()
    torch.cuda.synchronize()


@_race("does not follow write by aten::zero_")
def an_event_that_was_recorded_too_early() -> None:
    x, side = _ones(), Stream()
    event = torch.cuda.current_stream().record_event()
    x.zero_()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.mul(2)
    torch.cuda.synchronize()


@_race("read by aten::copy_ does not follow write by aten::zero_")
def a_copy_to_the_host_from_another_stream() -> None:
    x, side = _ones(), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.zero_()
    x.cpu()
    torch.cuda.synchronize()


@_race("does not follow write by aten::copy_")
def a_copy_that_the_host_does_not_wait_for() -> None:
    side = Stream()
    x = torch.empty(64, device="cuda")
    x.copy_(torch.ones(64), non_blocking=True)
    with torch.cuda.stream(side):
        x.mul(2)
    torch.cuda.synchronize()


@_race("does not follow write by aten::fill_")
def a_wait_in_what_stands_for_a_kernel() -> None:
    x, side = _ones(), Stream()
    from . import torch_cuda  # only where there is a simulated device

    torch_cuda.as_kernel(x.cpu)()
    with torch.cuda.stream(side):
        x.mul(2)
    torch.cuda.synchronize()


@_race("without record_stream")
def memory_taken_anew() -> None:
    x, _ = _ones_read_on_another_stream()
    del x
    _ones()


@_race("without record_stream")
def memory_recorded_on_a_stream_that_has_not_waited() -> None:
    x, _ = _ones_read_on_another_stream()
    x.record_stream(Stream())
    del x
    _ones()


@_ordered
def one_stream() -> None:
    x = _ones()
    x.mul_(2)
    x.zero_()


@_ordered
def an_event() -> None:
    x, side, event = _ones(), Stream(), Event()
    event.record()
    event.wait(side)
    with torch.cuda.stream(side):
        x.mul_(2)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    x.zero_()


@_ordered
def wait_stream() -> None:
    x, side = _ones(), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    x.zero_()


@_ordered
def two_reads() -> None:
    x, _ = _ones_read_on_another_stream()
    x.mul(2)
    torch.cuda.synchronize()


@_ordered
def a_host_that_waits() -> None:
    x, side, event = _ones(), Stream(), Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.mul_(2)
    side.synchronize()
    x.mul_(2)
    event.record()
    event.synchronize()
    with torch.cuda.stream(side):
        x.zero_()
    side.synchronize()


@_ordered
def a_blocking_copy() -> None:
    x, side = torch.ones(64).cuda(), Stream()
    with torch.cuda.stream(side):
        x.mul_(2)
        x.cpu()
    x.zero_()


@_ordered
def a_number_that_the_host_reads() -> None:
    x, side = _ones(), Stream()
    x.sum().item()
    with torch.cuda.stream(side):
        x.mul_(2)
    side.synchronize()


@_ordered
def an_event_from_another_thread() -> None:
    x, side, events = _ones(), Stream(), [Event()]
    side.wait_stream(torch.cuda.current_stream())

    def work() -> None:
        with torch.cuda.stream(side):
            x.mul_(2)
            events[0].record()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.current_stream().wait_event(events[0])
    x.zero_()


@_ordered
def a_thread_that_waits() -> None:
    x, side = _ones(), Stream()
    thread = threading.Thread(target=torch.cuda.synchronize)
    thread.start()
    thread.join()
    with torch.cuda.stream(side):
        x.mul_(2)
    side.synchronize()


@_ordered
def record_stream() -> None:
    x, side = _ones_read_on_another_stream()
    x.record_stream(side)
    del x
    _ones()


@_ordered
def record_stream_of_one_that_has_waited() -> None:
    x, side, other = _ones(), Stream(), Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    other.wait_stream(side)
    x.record_stream(other)
    del x
    _ones()


@_ordered
def memory_that_another_thread_takes_when_the_host_has_waited() -> None:
    x, side = _ones_read_on_another_stream()
    side.synchronize()
    del x
    thread = threading.Thread(target=_ones)
    thread.start()
    thread.join()


@_ordered
def memory_taken_anew_behind_a_wait() -> None:
    x, side = _ones_read_on_another_stream()
    del x
    torch.cuda.current_stream().wait_stream(side)
    _ones()


@contextlib.contextmanager
def _refused(expected: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


@_ordered
def a_capture_that_a_stream_joins_and_leaves() -> None:
    stream, side = Stream(), Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        x = _ones()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.mul_(2)
        stream.wait_stream(side)
    assert not torch.cuda.is_current_stream_capturing()
    side.synchronize()


@_ordered
def a_capture_that_leaves_a_stream_behind() -> None:
    stream, side = Stream(), Stream()
    with _refused("unjoined work"), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        side.wait_stream(stream)


@_ordered
def a_capture_behind_what_is_not_captured() -> None:
    stream, side = Stream(), Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), _refused("uncaptured work in another stream"):
        stream.wait_stream(side)


@_ordered
def a_capture_that_the_default_stream_joins() -> None:
    stream = Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), _refused("legacy stream"):
        torch.cuda.default_stream().wait_stream(stream)


@_ordered
def a_capture_whose_host_waits() -> None:
    stream, side = Stream(), Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        x = _ones()
        side.wait_stream(stream)
        with torch.cuda.stream(side), _refused("not permitted"):
            x.sum().item()
        stream.wait_stream(side)


def main() -> None:
    """Print the races of each program, as JSON."""
    from . import torch_cuda  # only where there is a simulated device

    found = {}
    for name, program in {**{name: race[0] for name, race in RACES.items()}, **ORDERED}.items():
        torch_cuda.races()
        program()
        found[name] = torch_cuda.races()
        torch.cuda.synchronize()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
