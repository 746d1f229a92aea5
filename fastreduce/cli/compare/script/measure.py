"""What is trained for a comparison, in which order, and what is left when it ends early."""

from __future__ import annotations

import socket
import sys
import time

from rich.console import Console
from rich.progress import TaskID

from ....run.contestants import TORCHS
from ...ending import SignalError, fail, signals_end_ranks, signals_wait, writing
from ...report import write_page
from ..progress import make_bar
from ..results import over
from . import plot, quality, report, speed, trainings
from .nodes import FirstNode, follow
from .plan import BASE, Plan
from .report import Findings
from .trainings import Line, Training, TrainingError


def run(plan: Plan, console: Console) -> None:
    """Train, and report what was measured, all of it or what there was when a training failed or a signal came.

    On several nodes that is done by the first one; the others start their ranks for it.

    Raises:
        typer.Exit: with a training's exit code if it failed, with 128 + the signal if one ended this process.
    """
    if plan.nodes is not None and plan.nodes.rank:
        follow(plan, plan.nodes, console)
    start = time.monotonic()
    findings = Findings()
    ended: tuple[str, int] | None = None
    others: FirstNode | None = None
    try:
        with signals_end_ranks(), _Watch(plan, console) as watch:
            if plan.nodes is not None:
                others = FirstNode(plan.nodes)
                watch.begin(f"waiting for {plan.nodes.count - 1} more at {plan.nodes.address}", 1)
                others.meet(plan)
            if plan.rounds:
                _measure_speed(plan, findings, watch, others)
            if plan.trains:
                _measure_quality(plan, findings, watch, others)
    except (TrainingError, SignalError) as error:
        ended = str(error), error.code
    except OSError as error:  # a full disk, say
        ended = f"no training can be started: {error}", 1
    with signals_wait():
        findings.seconds = time.monotonic() - start
        if ended is not None:
            findings.missing.append(_what_is_missing(plan, findings))
        if findings.turns or findings.outcomes:
            summary = report.summarise(plan, findings)
            report.print_report(console, plan, findings, summary)
            with writing():
                report.write_results(plan.out / "results.json", sys.argv, plan, findings, summary)
                plot.draw(plan.out / "compare.png", summary, plan.margin, _title(plan, findings))
                written = write_page(plan.out)
            said = f"\n{findings.seconds:.0f} s, {over(findings.wrapped['transport'])}. {written}"
            console.print(said, soft_wrap=True)
        if others is not None:
            others.end(*_told(plan, findings, ended))
    if ended is not None:
        fail(*ended)


def _measure_speed(plan: Plan, findings: Findings, watch: _Watch, others: FirstNode | None) -> None:
    training = speed.rotation(plan)
    watch.begin("speed", plan.rounds)
    lines: list[Line] = []

    def on_line(line: Line) -> None:
        lines.append(line)
        each = len(set(plan.contestants) - set(findings.left_out))
        if "turn" in line and (line["turn"] + 1) % each == 0:
            done = (line["turn"] + 1) // each
            watch.step(f"speed: round {done} of {plan.rounds}", quarter=4 * done // plan.rounds)

    try:
        _train(plan, training, findings, on_line, others)
    finally:
        findings.turns = speed.read_rotation(plan.contestants, lines)
        findings.flights = speed.read_flights(plan.contestants, lines)
    findings.apart = speed.why_fixed(lines)
    if findings.apart and plan.weights_from:
        raise TrainingError(
            f"--weights-from {plan.weights_from}: contestants cannot take turns within one training, because "
            f"{findings.apart}; without it each has trainings of its own",
            2,
        )
    if findings.apart:
        findings.turns, findings.flights = [], {}  # of other rounds than those that follow
        _measure_apart(plan, findings, watch, others)
    elif not findings.turns:
        steps = speed.steps_needed(plan, findings.left_out, 6)
        short = f"{plan.name} ended before a round was over: six, the fewest that have an interval, take {steps} steps"
        if not plan.trains:
            wanted = "train longer, compare fewer --settings, or take no times: --rounds 0 with --train"
            raise TrainingError(f"{short}; {wanted}", 2)
        findings.missing.append(f"all {plan.rounds} rounds of speed: {short}")
    elif (rounds := _rounds(findings)) < plan.rounds:
        steps = speed.steps_needed(plan, findings.left_out, plan.rounds)
        missing = f"{plan.rounds - rounds} of {plan.rounds} rounds of speed: they take {steps} steps, the script fewer"
        findings.missing.append(missing)


def _measure_apart(plan: Plan, findings: Findings, watch: _Watch, others: FirstNode | None) -> None:
    planned = speed.apart(plan, findings.left_out)
    watch.begin("speed, in trainings that alternate", len(planned))
    for number, name, training in planned:
        if name in findings.left_out:
            continue
        try:
            lines = _train(plan, training, findings, lambda _: None, others)
        except TrainingError as error:
            if name not in TORCHS or number:
                raise
            findings.left_out[name] = str(error)  # torch's class does not take what ours takes
            continue
        found = [line["seconds"] for line in lines if "turn" in line]
        if not found:
            raise TrainingError(f"{training.what} ended before its steps were timed: train longer", 2)
        findings.turns.append(speed.Turn(number, name, found[0]))
        flights = [line["flight"] for line in lines if line.get("flight") is not None]
        findings.flights.setdefault(name, []).extend(flights)
        watch.step(f"speed: {name}, round {number + 1} of {speed.ROUNDS_APART}")


def _measure_quality(plan: Plan, findings: Findings, watch: _Watch, others: FirstNode | None) -> None:
    planned = quality.trainings(plan)
    watch.begin("quality", len(planned) * max(plan.length, 1))
    alike = False
    for number, training in enumerate(planned):
        text = f"quality: {training.setting}, seed {training.seed} ({number + 1} of {len(planned)})"
        watch.say(text)

        def on_line(line: Line, text: str = text) -> None:
            if "loss" in line and plan.length:
                watch.step(text)

        before = quality.stamp_metric(plan, training)
        lines = _train(plan, training, findings, on_line, others)
        findings.outcomes.append(quality.read_outcome(plan, training, lines, before))
        findings.gradient_errors += quality.read_errors(training, lines)
        if not plan.length:
            watch.step(text)
        if not alike and (alike := quality.are_alike(findings.outcomes)):
            watch.note(f"{quality.SAME_SEEDS}. A setting whose losses differ stays untested then; Ctrl-C ends it here.")
    if short := [len(each.losses) for each in findings.outcomes if len(each.losses) < plan.length]:
        steps = f"steps of {len(short)} of {len(planned)} trainings"
        findings.missing.append(f"{steps}: the script ends after {min(short)}, --train asks for {plan.length}")


def _train(
    plan: Plan, training: Training, findings: Findings, on_line: trainings.OnLine, others: FirstNode | None
) -> list[Line]:
    def note(line: Line) -> None:
        if "wrapped" in line and not findings.wrapped:
            findings.wrapped = line
        findings.left_out |= line.get("missing", {})
        findings.copy_seconds = line.get("copy_seconds", findings.copy_seconds)
        on_line(line)

    return trainings.run(plan, training, note, others)


def _rounds(findings: Findings) -> int:
    """How many enter the figures: those in which all had their turn."""
    return max((each.rounds for each in speed.summarise([BASE], findings.turns)), default=0)


def _what_is_missing(plan: Plan, findings: Findings) -> str:
    rounds = _rounds(findings)
    of = speed.ROUNDS_APART if findings.apart else plan.rounds
    parts = [f"{of - rounds} of {of} rounds of speed"] if plan.rounds and rounds < of else []
    planned = quality.trainings(plan) if plan.trains else []
    done = len(findings.outcomes)
    parts += [f"{len(planned) - done} of {len(planned)} trainings for quality"] if done < len(planned) else []
    return " and ".join(parts) or "nothing"


def _told(plan: Plan, findings: Findings, ended: tuple[str, int] | None) -> tuple[int, str]:
    """What the other nodes end with: an exit code, and where results are."""
    said = f"node 0: {ended[0].splitlines()[0]}" if ended else ""
    if findings.turns or findings.outcomes:
        said += f"{'. ' if said else ''}Results are in {socket.gethostname()}:{(plan.out / 'results.json').resolve()}"
    return 0 if ended is None else ended[1], said


def _title(plan: Plan, findings: Findings) -> str:
    wrapped = findings.wrapped
    ranks = f"{wrapped['ranks']} ranks, {over(wrapped['transport'])}"
    return f"{plan.name}: {wrapped['wrapped']}, {wrapped['parameters']:,} parameters, {ranks}"


class _Watch:
    """A progress bar on a terminal; elsewhere a line for each quarter of the turns, and for each training."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan, self._console, self._quarter = plan, console, 0
        self._bar = make_bar(console)
        self._task: TaskID | None = None

    def __enter__(self) -> _Watch:
        plan = self._plan
        weights = f" --weights-from {plan.weights_from}" if plan.weights_from else ""
        speed = (
            f"--rounds {plan.rounds} --steps {plan.steps}{weights}: {', '.join(plan.contestants)}"
            if plan.rounds
            else ""
        )
        length = plan.length or "whole"
        train = f"--train {length} --seeds {len(plan.seeds)}: {', '.join(plan.settings)}" if plan.trains else ""
        for line in filter(None, (speed, train)):
            self._console.print(f"{plan.name}, {plan.started}, {line}.")
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, text: str, total: int) -> None:
        """Something that takes `total` steps begins."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=total)

    def say(self, text: str) -> None:
        """What is being done."""
        if self._console.is_terminal:
            assert self._task is not None
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text)

    def note(self, text: str) -> None:
        """What is better known before the end."""
        self._console.print(text, soft_wrap=True)

    def step(self, text: str, quarter: int | None = None) -> None:
        """One step of it is done."""
        assert self._task is not None
        self._bar.update(self._task, advance=1, description=text)
        if quarter is not None and quarter > self._quarter and not self._console.is_terminal:
            self._quarter = quarter
            self._console.print(text)
