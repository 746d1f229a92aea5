"""What `fastreduce advise` measures in the ranks of a training: the stages of each bucket under settings, and steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..reduction.flight_record import Phase, Row
from ..reduction.node_level import in_one_level
from ..reduction.pipeline import BucketPipeline, Point
from ..reduction.reducer import GradientReducer
from ..transports import Transport

REPETITIONS = 7
ENOUGH = 3  # repetitions, where they have taken so many seconds
SECONDS = 8.0
SMALL = 256  # elements for each rank: of such a collective latency is all
COLLECTIVES = ("all-reduce", "all-to-all", "all-gather")


def probe(reducer: GradientReducer, settings: Sequence[str], talk: Transport) -> Iterator[dict[str, Any]]:
    """Between two steps: one line about the link, then one about each setting. Every rank calls it.

    Of the link: the seconds of small collectives. Of a setting: for each bucket its parameters, elements, bytes of its
    wire and bytes that a rank sends, and how several hosts would reduce it; by rank and repetition the seconds of its
    stages when it is alone (compress, exchange, sum, reduce, decompress; in a setting that needs no exchange that and
    the sum take none), the same `apart` over whole wires, where the transport can do without and all is `reduce`, and
    how long all buckets take that are ready at once. Gradients are random numbers, and averages go nowhere.

    Args:
        reducer: whose buckets, transport and streams are measured; what it keeps is left alone.
        settings: spec strings.
        talk: over the same ranks, what they meet and tell each other by.
    """

    def meet() -> None:
        talk.all_reduce(torch.zeros(1)).wait()

    transport = reducer.transport
    small = {name: [_timed(meet, call) for _ in range(20)] for name, call in _small_collectives(transport).items()}
    yield {"link": talk.exchange(small)}
    for setting in settings:
        pipelines = reducer.buckets.pipelines_under(setting)
        gradients = [
            [torch.randn(slot.numel, dtype=pipeline.bucket.dtype) for slot in pipeline.bucket.slots]
            for pipeline in pipelines
        ]

        def run_all(pipelines: list[BucketPipeline] = pipelines, gradients: list[list[Tensor]] = gradients) -> None:
            _run_all(reducer, pipelines, gradients)

        run_all()  # the first pays for memory
        stages: list[list[list[float]]] = []
        apart: list[list[list[float]]] = []
        bursts: list[float] = []
        start = time.perf_counter()
        while len(stages) < REPETITIONS:
            for whole, seen in ((False, stages), (True, apart))[: 1 + any(p.piecewise for p in pipelines)]:
                seen.append([])
                for pipeline, tensors in zip(pipelines, gradients, strict=True):
                    pipeline.whole = whole
                    meet()
                    pipeline.run(tensors, tensors)
                    seen[-1].append(_stages(pipeline))
                    pipeline.whole = False
            bursts.append(_timed(meet, run_all))
            if len(stages) >= ENOUGH and max(talk.exchange(time.perf_counter() - start)) > SECONDS:
                break
        yield {
            "probe": setting,
            "buckets": [
                {
                    "parameters": [slot.parameter for slot in pipeline.bucket.slots],
                    "elements": pipeline.bucket.total,
                    "wire_bytes": pipeline.wire.nbytes,
                    "one_level": in_one_level(pipeline.compression),
                    "two_shot": pipeline.compression.two_shot,
                    "sent_bytes": pipeline.sent_bytes,
                }
                for pipeline in pipelines
            ],
            "stages": talk.exchange(stages),
            "apart": talk.exchange(apart or stages),
            "bursts": talk.exchange(bursts),
        }


def _small_collectives(transport: Transport) -> dict[str, Callable[[], None]]:
    wire = torch.zeros(SMALL * transport.world_size)
    received = torch.zeros_like(wire).view(transport.world_size, -1)
    calls = (
        lambda: transport.all_reduce(wire).wait(),
        lambda: transport.all_to_all(received, wire).wait(),
        lambda: transport.all_gather(wire).wait(),
    )
    return dict(zip(COLLECTIVES, calls, strict=True))


def _timed(meet: Callable[[], None], call: Callable[[], None]) -> float:
    meet()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _stages(pipeline: BucketPipeline) -> list[float]:
    """Seconds of the last run: compress, exchange, sum, reduce, decompress."""
    times = pipeline.clock.times(wait=True)
    compressed, reduced = times[Point.COMPRESSED], times[Point.REDUCED]
    if times[Point.EXCHANGED] < times[Point.START]:  # it passed neither
        exchanged = summed = compressed
    else:
        exchanged, summed = times[Point.EXCHANGED], times[Point.SUMMED]
    points = [times[Point.START], compressed, exchanged, summed, reduced, times[Point.END]]
    return [after - before for before, after in itertools.pairwise(points)]


@torch.no_grad()
def _run_all(reducer: GradientReducer, pipelines: list[BucketPipeline], gradients: list[list[Tensor]]) -> None:
    """All buckets at once, as at the end of a backward in which none was ready before."""
    streams = reducer.buckets.streams
    on = [streams[pipeline.bucket.device] for pipeline in pipelines]
    begins = [
        lambda pipeline=pipeline, tensors=tensors: pipeline.begin(tensors, tensors)
        for pipeline, tensors in zip(pipelines, gradients, strict=True)
    ]
    launched = [stream.submit(begin) for stream, begin in zip(on[:-1], begins, strict=False)]
    for pending in launched[-1:]:
        pending.begun()
    finish = on[-1].begin(begins[-1])
    for pending in launched:
        pending.result()
    finish()


def flights(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Steps of this rank, in seconds from their beginning: phases by name, and when each bucket was ready."""
    return [
        {
            "phases": {phase.name.lower(): row.seconds[phase] for phase in Phase},
            "ready": [ready - row.start for ready in row.ready],
            "buckets": [[slot.parameter for slot in bucket.slots] for bucket in row.plan.buckets] if row.plan else [],
        }
        for row in rows
    ]
