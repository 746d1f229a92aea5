"""The timeline: one step of each of our settings, what the rank does and below it where each bucket is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...reduction.telemetry.flight_record import BucketFlight, StepFlight
from ..compare.script.plan import AGAIN
from .reading import Comparison
from .tables import Cell, Table, csv_link
from .traces import Figure, Trace, axis, escape, filled, key, labels, layout

MOST_BUCKETS = 8  # that are drawn; the table has all
LANE = 18  # pixels
STEP = {
    "optimizer": ("#8a63d2", "x"),
    "data": ("#7a7a7a", "."),
    "forward": ("#0a8f6a", ""),
    "backward": ("#1a7fc1", "\\"),
    "waiting": ("#D55E00", "/"),
}
BUCKET = {
    "ready": ("#9a9a9a", "-"),
    "compress": ("#a6761d", "\\"),
    "wire": ("#C4609A", ""),
    "sum": ("#a6761d", "+"),
    "decompress": ("#a6761d", "|"),
}


class Span(NamedTuple):
    """Seconds from the step's beginning; lane 0 is the rank's, and those of buckets follow."""

    lane: int
    part: str
    start: float
    end: float


def draw_timeline(c: Comparison) -> Figure:
    """What happens when in a step."""
    flights = {name: flight for name, flight in c.flights.items() if name != AGAIN}
    spans = {name: list(spans_of(flight)) for name, flight in flights.items()}
    most = max(len(flight.buckets) for flight in flights.values())
    lanes = 1 + min(MOST_BUCKETS, most)
    data: list[Trace] = [key(part, *look) for part, look in (STEP | BUCKET).items()]
    for name, found in spans.items():
        drawn = [span for span in found if span.lane < lanes]
        for part, look in (STEP | BUCKET).items():
            data += _bars(name, [span for span in drawn if span.part == part], look, 0.84 / lanes)
    rows = [
        (name, [Cell(_lane(span.lane)), Cell(span.part), *(_ms(each) for each in (span.start, span.end - span.start))])
        for name, found in spans.items()
        for span in found
    ]
    lengths = "; ".join(f"{name} {1e3 * (flight.seconds or 0):.1f} ms" for name, flight in flights.items())
    more = f" The first {MOST_BUCKETS} buckets are drawn." if most > MOST_BUCKETS else ""
    return Figure(
        name="timeline",
        title="What happens when in a step?",
        says="One step of rank 0 in the middle of those that were timed: above what the rank does, and below it each "
        "bucket's way, from where it is full. What lies below waiting is not hidden behind backward." + more,
        alt=f"Timeline of a step, from the last averages to the next: {lengths}.",
        data=data,
        layout=layout(axis("milliseconds"), legend=True) | {"barmode": "overlay", "height": LANE * (lanes + 1)},
        rows=labels(c, flights),
        table=Table(
            "One step of rank 0: when each part began, and how long it took",
            ["setting", "of", "part", "from, ms", "takes, ms"],
            rows,
        ),
        raw=csv_link(
            ["setting", "of", "part", "from, s", "to, s"],
            [[name, _lane(s.lane), s.part, s.start, s.end] for name, found in spans.items() for s in found],
        ),
        folded=True,
    )


def spans_of(flight: StepFlight) -> Iterator[Span]:
    """What lies side by side in one step; "after" the averages counts to the optimizer."""
    began, took = flight.began, flight.took
    optimizer = took.get("after", 0.0) + took.get("optimizer", 0.0)
    yield Span(0, "optimizer", 0.0, optimizer)
    for part in ("data", "forward", "backward"):
        if part in began:
            yield Span(0, part, began[part], began[part] + took[part])
    if began.get("waiting", math.inf) < began.get("forward", 0.0):  # where buffers and settings are compared
        yield Span(0, "waiting", began["waiting"], began["forward"])
    if "backward" in began and flight.seconds is not None:
        yield Span(0, "waiting", began["backward"] + took["backward"], flight.seconds)
    for lane, bucket in enumerate(flight.buckets, 1):
        yield from _way(lane, bucket)


def _way(lane: int, bucket: BucketFlight) -> Iterator[Span]:
    points = [("ready", bucket.ready), ("compress", bucket.compress), ("wire", bucket.compressed)]
    points += [("sum", bucket.exchanged), ("wire", bucket.summed), ("decompress", bucket.reduced)]
    known = [(part, time) for part, time in points if time is not None]
    ends = [time for _, time in known[1:]]
    if bucket.decompressed is not None:  # else it is on a GPU, and nobody knows
        for (part, start), end in zip(known, [*ends, bucket.decompressed], strict=True):
            yield Span(lane, part, start, end)


def _bars(name: str, spans: Sequence[Span], look: tuple[str, str], height: float) -> list[Trace]:
    took = [1e3 * (span.end - span.start) for span in spans]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": took,
        "y": [-0.42 + height * (span.lane + 0.5) for span in spans],
        "base": [1e3 * span.start for span in spans],
        "width": 0.9 * height,
        "marker": filled(*look),
        "hovertemplate": [
            f"{escape(name)}, {_lane(span.lane)}: {span.part}, {ms:.2f} ms<extra></extra>"
            for span, ms in zip(spans, took, strict=True)
        ],
        "showlegend": False,
        "meta": name,
    }
    return [trace] if spans else []


def _lane(lane: int) -> str:
    return f"bucket {lane - 1}" if lane else "rank 0"


def _ms(seconds: float) -> Cell:
    return Cell(f"{1e3 * seconds:.2f}", 1e3 * seconds)
