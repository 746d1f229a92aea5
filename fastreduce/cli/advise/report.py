"""What the advisor leaves: tables and sentences on the terminal, and advice.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...run.contestants import Variant
from ...run.probing import COLLECTIVES
from ..compare import results
from ..compare.script.plan import BASE, Plan
from ..compare.script.speed import Speed, Turn
from ..compare.script.trainings import Line
from ..compare.settings_table import make_table, print_table
from ..ending import SignalError
from .advice import Advice
from .prediction import Interval, Link, Prediction
from .readings import Readings

STEPS = (
    "predicted: ms, with 95 % from the scatter of what was measured. over none: a step's ratio to that of none. "
    "measured: the median of steps that were run in turns."
)
PARTS = (
    "The predicted step in ms, which parts add up to: compute in the mean of the ranks, waiting for the slowest, "
    "and communication behind backward. What goes on beside backward is hidden. "
    "other: what of none's measured step the model does not explain."
)
VARIANTS = (
    "The predicted step in ms with buckets of other sizes (bucket_cap_mb=) and over other transports "
    "(FASTREDUCE_TRANSPORT=), of none and the settings whose communication takes least. The first column: in the "
    "buckets of now."
)
PART_COLUMNS = {
    "step": "\nstep",
    "compute": "com-\npute",
    "waiting": "wait-\ning",
    "compress": "com-\npress",
    "wire": "\nwire",
    "sum": "\nsum",
    "decompress": "decom-\npress",
    "other": "\nother",
    "hidden": "hid-\nden",
}
FILE = "advice.json"  # has all that is measured, predicted and said
MOVED = 0.15  # by which none's own step may be off before that is told


@dataclass
class Findings:
    """What was found.

    Attributes:
        readings: of the first training.
        seconds: the predicted step of all that was measured, by the variant's name.
        predicted: by setting, `none` first; and what may pay in other buckets, or over another transport.
        turns: of the second.
        measured: by the variant's name, in milliseconds.
        advice: for here.
        projected: by setting, and the advice, for the link that was asked for.
        missing: what was not measured, and why.
        ended: the signal that ended the check.
    """

    lines: list[Line]
    readings: Readings
    seconds: dict[str, float]
    predicted: dict[str, Prediction]
    turns: list[Turn] = field(default_factory=list)
    measured: dict[str, Speed] = field(default_factory=dict)
    advice: Advice | None = None
    projected: tuple[dict[str, Prediction], Advice] | None = None
    missing: str = ""
    ended: SignalError | None = None

    @property
    def errors(self) -> dict[str, float]:
        """Of all that was run: how far the prediction is off, as a share of what was measured."""
        return {name: 1e3 * self.predicted[name].step.value / found.step - 1 for name, found in self.measured.items()}


def show(console: Console, findings: Findings, link: Link | None) -> None:
    """The link, the steps, their parts, what the check says, and the advice."""
    readings = findings.readings
    wrapped = readings.wrapped
    over = f"over {wrapped['transport']}" if wrapped["transport"] else ""
    about = f"{wrapped['wrapped']}, {wrapped['parameters']:,} parameters, {wrapped['ranks']} ranks {over}".rstrip()
    console.print(f"\n{about}. The link: {links_text(readings, readings.transport)}.")
    _print_steps(console, findings.predicted, findings, STEPS)
    _print_parts(console, findings.predicted)
    if len(findings.seconds) > len(readings.settings):
        print_table(console, _variants_table(findings), VARIANTS)
    for name in readings.latency:
        if name != readings.transport:
            _say(console, f"The link over {name}: {links_text(readings, name)}.")
    console.print()
    _say(console, _checked(findings))
    if findings.advice is not None:
        console.print(findings.advice.sentence, style="bold")
        _say(console, findings.advice.caution)
    if findings.projected is not None and link is not None:
        there, advice = findings.projected
        each = wrapped["local_ranks"]
        console.print(f"\nProjected to {link.nodes} hosts of {each} ranks, {link.gbits:g} Gbit/s:")
        _print_steps(console, there, None, "predicted only: nothing was run there.")
        _print_parts(console, there)
        console.print()
        console.print(advice.sentence, style="bold")
        _say(console, advice.caution)


def links(readings: Readings, transport: str) -> dict[str, dict[str, float]]:
    """By collective: seconds of a small one, and Gbit/s each way that a rank sends, alone and with others beside it."""
    found = {name: {"latency_s": seconds} for name, seconds in readings.latency[transport].items()}
    ranks = readings.wrapped["ranks"]
    other = None if transport == readings.transport else transport
    for probe in readings.probes.values():
        if (probe.variant.bucket_cap_mb, probe.variant.transport) != (None, other):
            continue
        # Through shared memory a two-shot has no exchange of its own: each collective is one of whole wires.
        stages, (_, share) = probe.draw_apart(slice(None)), probe.draw()
        sent = sum(probe.wire) * 8e-9 * (ranks - 1) / ranks
        two = probe.collectives == 2
        columns = {"all-to-all": "exchange", "all-gather": "reduce"} if two else {"all-reduce": "reduce"}
        for name, column in columns.items():
            seconds = sum(getattr(each, column) for each in stages)
            if seconds > 0 and "gbits" not in found.setdefault(name, {}):
                gbits = (sent if two else 2 * sent) / seconds
                found[name] |= {"gbits": gbits, "gbits_at_once": gbits / share}
    return {name: found[name] for name in COLLECTIVES if name in found}


def links_text(readings: Readings, transport: str) -> str:
    """The link, as the end of a sentence."""
    told = []
    for name, figures in links(readings, transport).items():
        rate = ""
        if "gbits" in figures:
            rate = f", {figures['gbits']:.2g} Gbit/s alone, {figures['gbits_at_once']:.2g} with others"
        told.append(f"{name} {1e3 * figures['latency_s']:.2f} ms{rate}")
    return "; ".join(told)


def _print_steps(console: Console, predicted: Mapping[str, Prediction], findings: Findings | None, notes: str) -> None:
    narrower = (
        ("the 95 % of predictions", _steps_table(predicted, findings, intervals=False)),
        ("the 95 % of predictions, sent", _steps_table(predicted, findings, intervals=False, sent=False)),
    )
    print_table(console, _steps_table(predicted, findings), notes, narrower, FILE)


def _steps_table(
    predicted: Mapping[str, Prediction], findings: Findings | None, intervals: bool = True, sent: bool = True
) -> Table:
    columns = ["predicted, ms\n(95 %)", "over none\n(95 %)"] if intervals else ["pre-\ndicted,\nms", "over\nnone"]
    table = make_table([*columns, *(["sent,\nMB"] if sent else [])])
    measured = {} if findings is None else findings.measured
    if measured:
        for column in ("meas-\nured,\nms", "its ratio\n(95 %)", "pre-\ndiction\noff by"):
            table.add_column(column, justify="right", no_wrap=True)
    advice = None if findings is None else findings.advice
    chosen = "" if advice is None else advice.name
    for name, each in predicted.items():
        ratio = "1" if name == BASE else _interval(each.ratio, 1, 2, intervals)
        cells = [_interval(each.step, 1e3, 1, intervals), ratio]
        cells += [f"{each.sent / 1e6:.1f}"] if sent else []
        if measured:
            cells += ["–", "–", "–"]
        if findings is not None and name in measured:
            seen = measured[name]
            ratio = "1" if name == BASE else str(seen.ratio)
            cells[-3:] = [f"{seen.step:.1f}", ratio, f"{findings.errors[name]:+.0%}"]
        table.add_row(_label(each.variant), *cells, style="bold" if name == chosen else None)
    return table


def _variants_table(findings: Findings) -> Table:
    """Settings and transports down, buckets across."""
    readings, seconds = findings.readings, findings.seconds
    probes = {probe.variant: probe for probe in readings.probes.values()}
    varied = {variant.setting for variant in probes if variant.options}
    rows = dict.fromkeys((v.setting, v.transport) for v in probes if v.setting in varied)
    sizes = dict.fromkeys(variant.bucket_cap_mb for variant in probes)
    counts = {size: len(probes[Variant(BASE, size)].buckets) for size in sizes}
    columns = [
        f"{'now' if size is None else f'{size} MiB'},\n{count}\nbucket{'s' * (count > 1)}"
        for size, count in counts.items()
    ]
    table = make_table(["\nover", *columns])
    best = min(seconds, key=lambda name: seconds[name])
    for setting, transport in sorted(rows, key=lambda row: list(readings.settings).index(row[0])):
        names = [str(Variant(setting, size, transport)) for size in sizes]
        cells = [Text(f"{1e3 * seconds[name]:.1f}", style="bold" if name == best else "") for name in names]
        table.add_row(setting, transport or readings.transport, *cells)
    return table


def _label(variant: Variant) -> str:
    """A variant as it is called in a table."""
    size, over = variant.bucket_cap_mb, variant.transport
    options = [*([] if size is None else [f"{size} MiB"]), *([] if over is None else [over])]
    return variant.setting + ("\n " + ", ".join(options) if options else "")


def _print_parts(console: Console, predicted: Mapping[str, Prediction]) -> None:
    less = (("step",), ("step", "hidden"), ("step", "hidden", "other"))
    narrower = ((", ".join(without), _parts_table(predicted, without)) for without in less)
    print_table(console, _parts_table(predicted), PARTS, narrower, FILE)


def _parts_table(predicted: Mapping[str, Prediction], without: Sequence[str] = ()) -> Table:
    columns = {name: header for name, header in PART_COLUMNS.items() if name not in without}
    table = make_table(list(columns.values()))
    for each in predicted.values():
        found = [getattr(each.parts, column) for column in columns]
        table.add_row(_label(each.variant), *(f"{1e3 * seconds:.1f}" for seconds in found))
    return table


def _say(console: Console, text: str) -> None:
    if text:
        console.print(text)


def _interval(found: Interval, unit: float, digits: int, whole: bool) -> str:
    value, low, high = (f"{unit * each:.{digits}f}" for each in (found.value, found.low, found.high))
    return f"{value} ({low}–{high})" if whole else value


def _checked(findings: Findings) -> str:
    if findings.missing:
        return f"Missing: {findings.missing}."
    if not findings.errors:
        return "Nothing was checked (--rounds 0): the advice is a prediction."
    worst = max(map(abs, findings.errors.values()))
    text = f"Where the prediction was checked it is off by {worst:.0%} at most."
    if abs(findings.errors[BASE]) > MOVED:
        text += " none's own step was another than before: the machine, or the training, was not the same all the time."
    return text


def write(
    path: Path, command: Sequence[str], plan: Plan, findings: Findings, link: Link | None, seconds: float
) -> None:
    """Everything measured, predicted and said."""
    there = findings.projected
    results.write(
        path,
        {
            **results.describe(findings.readings.wrapped["machine"]),
            "command": list(command),
            "seconds": seconds,
            "plan": {**asdict(plan), "out": str(plan.out)},
            "wrapped": findings.readings.wrapped,
            "links": {name: links(findings.readings, name) for name in findings.readings.latency},
            "unusable": findings.readings.unusable,
            "advice": asdict(findings.advice) if findings.advice is not None else None,
            "predicted": {name: _as_dict(each) for name, each in findings.predicted.items()},
            "steps": findings.seconds,
            "measured": {name: asdict(each) for name, each in findings.measured.items()},
            "errors": findings.errors,
            "missing": findings.missing,
            "projected": None
            if there is None or link is None
            else {
                **asdict(link),
                "advice": asdict(there[1]),
                "predicted": {name: _as_dict(each) for name, each in there[0].items()},
            },
            "turns": [asdict(turn) for turn in findings.turns],
            "lines": findings.lines,
        },
    )


def _as_dict(each: Prediction) -> dict[str, object]:
    return {**asdict(each), "variant": each.variant._asdict(), "parts": {**asdict(each.parts), "step": each.parts.step}}
