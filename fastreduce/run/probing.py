"""What `fastreduce advise` measures in the ranks of a training: the stages of each bucket under settings, and steps."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import BackendUnavailableError
from ..reduction import clocks
from ..reduction.arrivals import accumulation_node
from ..reduction.bucketed import BucketedGradients
from ..reduction.clocks import Point
from ..reduction.pipeline import BucketPipeline
from ..reduction.reducer import GradientReducer
from ..reduction.streams import Stream, make_stream
from ..reduction.telemetry.flight_record import Phase, StepRow
from ..reduction.wires.node_level import in_one_level
from ..transports import TRANSPORTS, Transport, make_transport
from .contestants import Variant

REPETITIONS = 7
ENOUGH = 3  # repetitions, where they have taken so many seconds
SECONDS, VARIANT_SECONDS = 8.0, 2.0
SMALL = 256  # elements for each rank: of such a collective latency is all
COLLECTIVES = ("all-reduce", "all-to-all", "all-gather")
SIZES = (1, 5, 25, 100)  # MiB of buckets, and all in one
VARIED = 3  # settings besides none that are measured in other sizes and over other transports: those that take least


def probe(
    reducer: GradientReducer, settings: Sequence[str], talk: Transport, group: dist.ProcessGroup
) -> Iterator[dict[str, Any]]:
    """Between two steps: one line about a link, then one about each variant of a setting. Every rank calls it.

    First all settings as they would run; then `none` and those that take the least, with buckets of other sizes and
    over the other transports that these ranks can use; why they cannot use the others is a line too.

    Of a link: the seconds of small collectives. Of a variant: for each bucket its parameters, elements, bytes of its
    wire and bytes that a rank sends, and how several hosts would reduce it; by rank and repetition the seconds of its
    stages when it is alone (compress, exchange, sum, reduce, decompress; in a setting that needs no exchange that and
    the sum take none), the same `apart` over whole wires, where the transport can do without and all is `reduce`, and
    how long all buckets take that are ready at once. Gradients are random numbers, and averages go nowhere.

    Args:
        reducer: whose buckets, transport and streams are measured; what it keeps is left alone.
        settings: spec strings, `none` first.
        talk: over the same ranks, what they meet and tell each other by.
        group: the same ranks.
    """
    buckets, here = reducer.buckets, reducer.transport
    yield {"link": _link(here, talk), "transport": here.name}
    took = {}
    for setting in settings:
        line = _probe(buckets, Variant(setting), talk, here)
        took[setting] = min(map(max, zip(*line["bursts"], strict=True)))
        yield line
    none, *rest = settings
    varied = [none, *sorted(rest, key=lambda setting: took[setting])[:VARIED]]
    with ExitStack() as stack:
        others, unusable = _others(group, here.name, stack)
        yield {"unusable": unusable}
        for transport in others.values():
            yield {"link": _link(transport, talk), "transport": transport.name}
        variants = itertools.product(varied, (None, *_sizes(buckets)), (None, *others))
        for variant in itertools.starmap(Variant, variants):
            if variant.options:
                yield _probe(buckets, variant, talk, others[variant.transport] if variant.transport else here)


def _sizes(buckets: BucketedGradients) -> list[int]:
    """MiB of buckets that make other buckets than there are, and than the sizes before."""
    nbytes = sum(buckets.specs[i].numel * buckets.specs[i].dtype.itemsize for i in buckets.indices)
    whole = math.ceil(nbytes / 2**20)
    seen, found = [buckets.groups(buckets.caps)], []
    for size in (*(size for size in SIZES if size < whole), whole):
        groups = buckets.groups([size << 20])
        if groups not in seen:
            seen.append(groups)
            found.append(size)
    return found


def _others(group: dist.ProcessGroup, here: str, stack: ExitStack) -> tuple[dict[str, Transport], dict[str, str]]:
    """By name the other transports for tensors of the CPU that ranks can use, and why they cannot use the rest.

    `stack` closes them.
    """
    found: dict[str, Transport] = {}
    unusable = {}
    for name in (name for name, devices in TRANSPORTS.items() if "cpu" in devices and name != here):
        try:
            transport = make_transport(group, "cpu", name)
            stack.callback(transport.close)
            transport.all_reduce(torch.zeros(1, device="cpu")).wait()
        except BackendUnavailableError as error:  # on every rank
            unusable[name] = str(error)
        else:
            found[name] = transport
    return found, unusable


def _link(transport: Transport, talk: Transport) -> list[dict[str, list[float]]]:
    return talk.exchange({name: [_timed(talk, call) for _ in range(20)] for name, call in _small(transport).items()})


def _small(transport: Transport) -> dict[str, Callable[[], None]]:
    wire = torch.zeros(SMALL * transport.world_size, device="cpu")
    received = torch.zeros_like(wire).view(transport.world_size, -1)
    calls = (
        lambda: transport.all_reduce(wire).wait(),
        lambda: transport.all_to_all(received, wire).wait(),
        lambda: transport.all_gather(wire).wait(),
    )
    return dict(zip(COLLECTIVES, calls, strict=True))


def _meet(talk: Transport) -> None:
    talk.all_reduce(torch.zeros(1, device="cpu")).wait()


def _timed(talk: Transport, call: Callable[[], None]) -> float:
    _meet(talk)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _probe(buckets: BucketedGradients, variant: Variant, talk: Transport, transport: Transport) -> dict[str, Any]:
    """The line about a variant, over its transport."""
    caps = None if variant.bucket_cap_mb is None else [variant.bucket_cap_mb << 20]
    pipelines = buckets.pipelines_under(variant.setting, caps, transport)
    streams = {device: make_stream(device, transport) for device in {p.bucket.device for p in pipelines}}
    gradients = [
        [torch.randn(slot.numel, dtype=pipeline.bucket.dtype, device="cpu") for slot in pipeline.bucket.slots]
        for pipeline in pipelines
    ]

    def run_all() -> None:
        _run_all(streams, pipelines, gradients)

    run_all()  # the first pays for memory
    is_projected = not variant.options and any(pipeline.wires.piecewise for pipeline in pipelines)
    limit = VARIANT_SECONDS if variant.options else SECONDS
    stages: list[list[list[float]]] = []
    apart: list[list[list[float]]] = []
    bursts: list[float] = []
    start = time.perf_counter()
    while len(stages) < REPETITIONS:
        for whole, seen in ((False, stages), (True, apart))[: 1 + is_projected]:
            seen.append([])
            for pipeline, tensors in zip(pipelines, gradients, strict=True):
                pipeline.whole = whole
                _meet(talk)
                pipeline.run(tensors, tensors)
                seen[-1].append(_stages(pipeline))
                pipeline.whole = False
        bursts.append(_timed(talk, run_all))
        if len(stages) >= ENOUGH and max(talk.exchange(time.perf_counter() - start)) > limit:
            break
    for stream in streams.values():
        stream.close()
    return {
        "probe": str(variant),
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
def _run_all(
    streams: Mapping[torch.device, Stream], pipelines: list[BucketPipeline], gradients: list[list[Tensor]]
) -> None:
    """All buckets at once, as at the end of a backward in which none was ready before."""
    on = [streams[pipeline.bucket.device] for pipeline in pipelines]
    begins = [
        lambda pipeline=pipeline, tensors=tensors: pipeline.begin(tensors, tensors)
        for pipeline, tensors in zip(pipelines, gradients, strict=True)
    ]
    launched = [stream.submit(begin) for stream, begin in zip(on[:-1], begins, strict=False)]
    for pending in launched[-1:]:
        pending.begun()
    launched.append(on[-1].begin(begins[-1]))
    for pending in launched:
        pending.result()


class ArrivalTimes:
    """Notes when each parameter's gradient comes, in each step of a reducer from now on.

    Args:
        reducer: whose parameters have a hook more.
        steps: so many are kept.
    """

    def __init__(self, reducer: GradientReducer, steps: int) -> None:
        parameters = reducer.buckets.gradients.parameters
        self._times = [0.0] * len(parameters)
        self._kept: deque[tuple[int, list[float]]] = deque(maxlen=steps)
        for i, parameter in enumerate(parameters):
            accumulation_node(parameter).register_hook(self._make_hook(i))
        reducer.recorder.on_step.append(self._keep)

    def _make_hook(self, i: int) -> Callable[..., None]:
        times, now = self._times, clocks.now

        def note(*_: object) -> None:
            times[i] = now()

        return note

    def _keep(self, row: StepRow) -> None:
        self._kept.append((row.step, self._times.copy()))

    def of(self, row: StepRow) -> list[float | None]:
        """By parameter, when its gradient came last, in seconds from where backward began; None: it did not."""
        times, began = dict(self._kept)[row.step], row.began[Phase.BACKWARD]
        return [time - began if time > began else None for time in times]


def flights(rows: Sequence[StepRow], arrivals: ArrivalTimes) -> list[dict[str, Any]]:
    """Steps of this rank: the seconds of phases by name, and when in backward each gradient came."""
    return [
        {
            "phases": {phase.name.lower(): row.seconds[phase] for phase in Phase},
            "arrived": arrivals.of(row),
        }
        for row in rows
    ]
