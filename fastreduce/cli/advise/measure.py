"""Two trainings of a script: one of which link, kernels and steps are measured, one that checks the prediction."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from ...run.contestants import AFTER_BACKWARD, Variant
from ..compare.script import speed, trainings
from ..compare.script.nodes import FirstNode, follow
from ..compare.script.plan import BASE, SETTLE_STEPS, WARM_UP_STEPS, Plan
from ..compare.script.trainings import Line, Training, TrainingError
from ..ending import SignalError, fail, signals_end_ranks, signals_wait, writing
from .advice import advise, contenders, varied, who_is_late
from .prediction import Link, predict, seconds
from .readings import read
from .report import FILE, Findings, show, write

PROFILE_ROUNDS, PROFILE_STEPS = 3, 5
CHECK_STEPS = 3
STAY_STEPS = 1  # to settle: reducers stay, and the first step under a setting pays for its memory


def run(plan: Plan, link: Link | None, console: Console) -> None:
    """Train, predict, check, and report. On several nodes the first one does; the others start their ranks for it.

    Raises:
        typer.Exit: with a training's exit code if the first one failed, with 128 + the signal if one came.
    """
    if plan.nodes is not None and plan.nodes.rank:
        follow(plan, plan.nodes, console)
    start = time.monotonic()
    others: FirstNode | None = None
    ended: tuple[str, int] | None = None
    file = plan.out / FILE
    try:
        with signals_end_ranks():
            if plan.nodes is not None:
                others = FirstNode(plan.nodes)
                others.meet(plan)
            findings = investigate(plan, link, console, others)
    except (TrainingError, SignalError) as error:
        ended = str(error), error.code
    except OSError as error:  # a full disk, say
        ended = f"no training can be started: {error}", 1
    with signals_wait():
        if ended is None:
            ended = None if findings.ended is None else (str(findings.ended), findings.ended.code)
            show(console, findings, link)
            with writing():
                write(file, sys.argv, plan, findings, link, time.monotonic() - start)
            said = f"\n{time.monotonic() - start:.0f} s. Wrote {file}."
            console.print(said, soft_wrap=True)
        if others is not None:
            said = f"The advice is in {socket.gethostname()}:{file.resolve()}"
            others.end(*((0, said) if ended is None else (ended[1], f"node 0: {ended[0].splitlines()[0]}")))
    if ended is not None:
        fail(*ended)


def investigate(plan: Plan, link: Link | None, console: Console, others: FirstNode | None = None) -> Findings:
    """All but the report.

    Raises:
        TrainingError: if the first training failed, or ended before it was measured, or its settings cannot change, or
            a projection was asked for where ranks are on several hosts already.
    """
    say = _Saying(plan, console)
    lines = trainings.run(plan, _profile(plan), say.line, others)
    if why := speed.why_fixed(lines):
        raise TrainingError(f"{why}: nothing is predicted then; fastreduce compare measures", 2)
    readings = read(lines)
    if readings.wrapped["ranks"] < 2:
        raise TrainingError("one rank alone has nothing to send: start two or more", 2)
    if link is not None and readings.wrapped["local_ranks"] < readings.wrapped["ranks"]:
        raise TrainingError("--nodes projects from the ranks of one host, and these are on several", 2)
    if not readings.flights or not readings.alone:
        count = WARM_UP_STEPS + 2 * PROFILE_ROUNDS * (STAY_STEPS + PROFILE_STEPS)
        raise TrainingError(f"{plan.name} ended before it was measured, which takes {count} steps: train longer", 2)
    steps = seconds(readings)
    findings = Findings(lines, readings, steps, predict(readings, more=varied(steps)))
    if plan.rounds:
        _check(plan, findings, say, others)
    late = who_is_late(readings.flights)
    findings.advice = advise(findings.predicted, findings.measured, late)
    if link is not None:
        there = predict(readings, link)
        findings.projected = there, advise(there, {}, late)
    return findings


def _profile(plan: Plan) -> Training:
    orders = {
        "contestants": (BASE, AFTER_BACKWARD),
        "rounds": PROFILE_ROUNDS,
        "warm_up": WARM_UP_STEPS,
        "settle": STAY_STEPS,
        "steps": PROFILE_STEPS,
        "probes": plan.settings,
        "flights": True,
    }
    return Training("the training that is measured", "measured", BASE, plan.seeds[0], BASE, orders)


def rotation(plan: Plan, names: Sequence[str], rounds: int) -> Training:
    """A training in which variants of settings take turns."""
    moves = any(Variant.of(name).transport for name in names)  # then gradients' order is learned anew
    orders = {
        "contestants": tuple(names),
        "rounds": rounds,
        "warm_up": WARM_UP_STEPS,
        "settle": SETTLE_STEPS if moves else STAY_STEPS,
        "steps": plan.steps,
    }
    return Training("the training that checks the prediction", "checked", BASE, plan.seeds[0], BASE, orders)


def _check(plan: Plan, findings: Findings, say: _Saying, others: FirstNode | None) -> None:
    names = [BASE, *contenders(findings.predicted)]
    training = rotation(plan, names, plan.rounds)
    say.text(f"checking the prediction: {', '.join(names)} in turns, --rounds {plan.rounds}")
    try:
        lines = trainings.run(plan, training, say.line, others)
    except (TrainingError, OSError) as error:
        findings.missing = f"the prediction was not checked: {error}"
        return
    except SignalError as error:  # the prediction is there
        findings.missing = f"the prediction was not checked: {error.received.name}"
        findings.ended = error
        return
    findings.turns = speed.read_rotation(names, lines)
    findings.measured = {each.contestant: each for each in speed.summarise(names, findings.turns)}
    if not findings.measured:
        findings.missing = f"the prediction was not checked: {plan.name} ended before a round was over"
    elif (rounds := findings.measured[BASE].rounds) < plan.rounds:
        orders = training.orders
        steps = orders["warm_up"] + len(names) * plan.rounds * (orders["settle"] + orders["steps"])
        short = f"they take {steps} steps, the script fewer"
        findings.missing = f"{plan.rounds - rounds} of {plan.rounds} rounds of the check: {short}"


class _Saying:
    """What goes on, a line each."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._console = console
        self._said = ""
        self.text(f"{plan.name}, {plan.started}: {', '.join(plan.settings)}.")

    def text(self, text: str) -> None:
        """Say it."""
        self._console.print(text)

    def line(self, line: Line) -> None:
        """Say what a rank has measured."""
        if "link" in line:
            self.text(f"measured the link over {line['transport']}")
        elif "probe" in line:
            variant = Variant.of(line["probe"])
            text = f"{variant.setting}{' in other buckets, over other transports' if variant.options else ''}"
            if text != self._said:
                self._said = text
                self.text(f"measured kernels and transfers of {text}")
