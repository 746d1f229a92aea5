"""What results.json holds, in one form for a script and for the built-in network."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...reduction.telemetry.flight_record import BucketFlight, StepFlight
from ..compare.intervals import Estimate
from ..compare.results import FORMAT, over
from ..compare.script.equivalence import Equivalence
from ..compare.script.plan import AGAIN, BASE
from ..compare.script.quality import GradientErrors, Outcome, Quality
from ..compare.script.speed import Speed, Turn, say_weights
from ..compare.script.verdicts import Verdict, headline

BOTH = ("command", "seconds", "versions", "machine")
OF_A_SCRIPT = ("plan", "wrapped", "verdicts", "warnings", "missing", "left_out", "apart", "speed", "turns", "quality")
OF_DIGITS = ("experiment", "parameters", "conclusion", "settings")
SINCE_FORMAT_1 = ("date", "commit")
NOT_RECORDED = "not recorded"


class ReportError(Exception):
    """A file is no results.json that a report can be made of."""


@dataclass(frozen=True)
class Comparison:
    """A comparison as the report shows it.

    Attributes:
        title: what was trained.
        verdict: the answer, in a sentence.
        verdicts: of each contestant; their setting and word are "" where a sentence is on all of them.
        warnings: what makes the answer doubtful, and what is missing.
        notes: what else is to be known of it.
        facts: what was compared, in words, by what they are.
        command: the command line.
        made: with what, when and where, as facts are.
        names: of the contestants, in order.
        speeds: by contestant, as all that follows; empty where results hold none.
        turns: of rounds that are complete; of the built-in network with the slowest rank's seconds alone.
        margin: a fraction of none's loss, within which a loss counts as equal.
        target: a loss, or None.
        metric: what the metric is, or "".
        parts: of a step, in milliseconds, which add up to it.
        stages: of communication, beside the step, in milliseconds.
        sent: bytes, of a rank in a step.
        flights: of our settings, one step of rank 0.
        gradient_errors: relative, of each inspected step.
        group_errors: of steps under none, by setting and group of parameters.
    """

    title: str
    verdict: str
    verdicts: list[Verdict]
    warnings: list[str]
    notes: list[str]
    facts: dict[str, str]
    command: str
    made: dict[str, str]
    names: list[str]
    speeds: dict[str, Speed]
    turns: list[Turn]
    qualities: dict[str, Quality]
    margin: float = 0.0
    target: float | None = None
    metric: str = ""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    flights: dict[str, StepFlight] = field(default_factory=dict)
    gradient_errors: dict[str, list[float]] = field(default_factory=dict)
    group_errors: list[GradientErrors] = field(default_factory=list)

    @property
    def control(self) -> Speed | None:
        """The baseline once more."""
        return self.speeds.get(AGAIN)


def read(path: Path) -> Comparison:
    """Read a results.json of `fastreduce compare`.

    Raises:
        ReportError: if there is none, it was written by something else, or it lacks what a report shows.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or not {"plan", "experiment"} & data.keys():
        raise ReportError(f"{path} is no results.json of `fastreduce compare`: it has neither a plan nor an experiment")
    version = data.get("format", 0)  # 0: from before there was one
    if not isinstance(version, int) or version > FORMAT:
        raise ReportError(f"{path} has format {version!r}; this fastreduce reads up to {FORMAT}: take a newer one")
    needed = [*BOTH, *(OF_A_SCRIPT if "plan" in data else OF_DIGITS), *(SINCE_FORMAT_1 if version else ())]
    if missing := [key for key in needed if key not in data]:
        raise ReportError(f"{path} lacks {', '.join(missing)}: run `fastreduce compare` again")
    try:
        found = _of_a_script(data) if "plan" in data else _of_digits(data)
        _check(found)
        return found
    except KeyError as error:
        raise ReportError(f"{path} lacks {error.args[0]}: run `fastreduce compare` again") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ReportError(f"{path} is not as `fastreduce compare` writes it: {error}") from None


def _check(comparison: Comparison) -> None:
    """Of figures and what they were made of, there must be both."""
    timed = {turn.contestant for turn in comparison.turns}
    if comparison.speeds and (timed != comparison.speeds.keys() or BASE not in timed):
        raise ValueError(f"turns are of {', '.join(sorted(timed))}, figures of {', '.join(sorted(comparison.speeds))}")
    for name, quality in comparison.qualities.items():
        if not quality.outcomes or not all(outcome.losses for outcome in quality.outcomes):
            raise ValueError(f"quality of {name} has no losses")


def _of_a_script(data: Mapping[str, Any]) -> Comparison:
    plan, wrapped = data["plan"], data["wrapped"]
    verdicts = [Verdict(each["setting"], each["word"], each["sentence"]) for each in data["verdicts"]]
    speeds = {name: _speed(each) for name, each in data["speed"].items()}
    qualities = {name: _quality(each) for name, each in data["quality"].items()}
    errors = [_errors(each) for each in data.get("gradient_errors", [])]
    notes = [f"{name} was left out: {why.splitlines()[-1].strip()}." for name, why in data["left_out"].items() if why]
    notes += [f"Contestants ran in trainings of their own, in turns: {data['apart']}."] if data["apart"] else []
    notes += [say_weights(plan["weights_from"], data["copy_seconds"])] if plan.get("weights_from") else []
    rounds = max((speed.rounds for speed in speeds.values()), default=0)
    steps = len(data["turns"][0]["seconds"][0]) if data["turns"] else plan["steps"]  # more where trainings alternate
    facts = {
        "Script": shlex.join([*(["-m"] if plan["module"] else []), *plan["words"]]),
        "Model": f"{wrapped['wrapped']}, {wrapped['parameters']:,} parameters",
        "Ranks": f"{wrapped['ranks']}, on {wrapped['device']}{_over(wrapped)}",
        "Speed": f"{rounds} rounds of {steps} timed steps each" if speeds else "not compared",
        "Quality": _say_trainings(qualities) if qualities else "not compared",
    }
    return Comparison(
        title=plan["words"][0],
        verdict=headline(verdicts),
        verdicts=verdicts,
        warnings=[*data["warnings"], *(f"Missing: {what}." for what in data["missing"])],
        notes=notes,
        facts=facts,
        command=_command(data),
        made=_made(data),
        names=list(dict.fromkeys([*speeds, *qualities, *(name for each in errors for name in each.errors)])),
        speeds=speeds,
        turns=_complete([Turn(each["round"], each["contestant"], each["seconds"]) for each in data["turns"]]),
        qualities=qualities,
        margin=float(plan["margin"]),
        target=plan["target"],
        metric="metric" if plan["metric_line"] or plan["metric_file"] else "",
        flights={name: _flight(each) for name, each in data.get("flights", {}).items() if name in speeds},
        group_errors=errors,
    )


def _of_digits(data: Mapping[str, Any]) -> Comparison:
    experiment, settings = data["experiment"], data["settings"]
    where = "GPU" if experiment["device"] == "cuda" else experiment["device"]
    facts = {
        "Training": "the built-in network, on scikit-learn's handwritten digits",
        "Model": f"{data['parameters']:,} parameters",
        "Ranks": f"{experiment['ranks']}, on {where}{_over(data)}, with {experiment['batch']} digits a step each",
        "Speed": f"{experiment['rounds']} rounds of {experiment['steps']} timed steps each",
        "Quality": f"one seed ({experiment['seed']})",
    }
    first, *others = data["conclusion"]
    turns = [
        Turn(number, name, [steps])
        for name, each in settings.items()
        for number, steps in enumerate(each["step_seconds"])
    ]
    return Comparison(
        title="the built-in network",
        verdict=first,
        verdicts=[Verdict("", "", sentence) for sentence in others if not sentence.startswith("Warning")],
        warnings=[sentence for sentence in others if sentence.startswith("Warning")],
        notes=[],
        facts=facts,
        command=_command(data),
        made=_made(data),
        names=list(settings),
        speeds={
            name: _speed({**each, "contestant": name, "rounds": len(each["step_seconds"])})
            for name, each in settings.items()
        },
        turns=turns,
        qualities={name: _quality_of_digits(name, each, experiment["seed"]) for name, each in settings.items()},
        metric="accuracy on held-out digits",
        parts={
            name: {"compute": each["compute"], "exposed communication": each["exposed"]}
            for name, each in settings.items()
        },
        stages={name: each["stages"] for name, each in settings.items()},
        sent={name: each["sent_bytes"] for name, each in settings.items()},
        gradient_errors={name: [_number(e) for e in each["gradient_errors"]] for name, each in settings.items()},
    )


def _command(data: Mapping[str, Any]) -> str:
    return shlex.join(["fastreduce", *data["command"][1:]])


def _over(found: Mapping[str, Any]) -> str:
    return f", {over(found['transport'])}" if "transport" in found else ""


def _made(data: Mapping[str, Any]) -> dict[str, str]:
    machine = {"processor": "Processor", "cores": "Cores", "gpus": "GPUs", "kernels": "Kernels", "system": "System"}
    said = {label: data["machine"][key] for key, label in machine.items()}
    return {
        "Date": data.get("date", NOT_RECORDED).replace("T", " "),
        "Took": f"{data['seconds']:.0f} s",
        "Commit": data.get("commit", NOT_RECORDED) or "started outside of a Git repository",
        **{
            label: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            for label, value in said.items()
        },
        "Versions": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
    } | ({} if said["GPUs"] else {"GPUs": "none"})


def _say_trainings(qualities: Mapping[str, Quality]) -> str:
    seeds = {outcome.seed for quality in qualities.values() for outcome in quality.outcomes}
    steps = [len(outcome.losses) for quality in qualities.values() for outcome in quality.outcomes]
    length = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    return f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'} of {length} steps"


def _complete(turns: Sequence[Turn]) -> list[Turn]:
    """Those of rounds in which every contestant had its turn."""
    names = {turn.contestant for turn in turns}
    had: dict[int, set[str]] = {}
    for turn in turns:
        had.setdefault(turn.round, set()).add(turn.contestant)
    return [turn for turn in turns if had[turn.round] == names]


def _speed(found: Mapping[str, Any]) -> Speed:
    low, high = found["quartiles"]
    to_torch = found["ratio_to_torch"]
    return Speed(
        contestant=found["contestant"],
        step=float(found["step"]),
        quartiles=(float(low), float(high)),
        ratio=_estimate(found["ratio"]),
        ratio_to_torch=None if to_torch is None else _estimate(to_torch),
        rounds=found["rounds"],
    )


def _quality(found: Mapping[str, Any]) -> Quality:
    loss, metric = found["loss"], found["metric"]
    outcomes = [
        Outcome(
            each["setting"], each["seed"], [_number(loss) for loss in each["losses"]], each["seconds"], each["metric"]
        )
        for each in found["outcomes"]
    ]
    return Quality(
        setting=found["setting"],
        seeds=found["seeds"],
        final=_number(found["final"]),
        loss=None if loss is None else _equivalence(loss),
        metric_mean=found["metric_mean"],
        metric=None if metric is None else _equivalence(metric),
        note=found["note"],
        target_steps=found["target_steps"],
        target_seconds=found["target_seconds"],
        reached=found["reached"],
        outcomes=outcomes,
    )


def _flight(found: Mapping[str, Any]) -> StepFlight:
    buckets = [BucketFlight(**bucket) for bucket in found["buckets"]]
    return StepFlight(found["step"], float(found["seconds"]), dict(found["began"]), dict(found["took"]), buckets)


def _errors(found: Mapping[str, Any]) -> GradientErrors:
    errors = {
        setting: {group: _number(error) for group, error in groups.items()}
        for setting, groups in found["errors"].items()
    }
    return GradientErrors(found["seed"], found["step"], errors)


def _quality_of_digits(name: str, found: Mapping[str, Any], seed: int) -> Quality:
    outcome = Outcome(name, seed, [_number(loss) for loss in found["losses"]], [], found["accuracy"])
    return Quality(name, [seed], outcome.final, None, found["accuracy"], outcomes=[outcome])


def _estimate(found: Mapping[str, Any]) -> Estimate:
    return Estimate(*(_number(found[key]) for key in ("median", "low", "high")))


def _equivalence(found: Mapping[str, Any]) -> Equivalence:
    difference, low, high = (_number(found[key]) for key in ("difference", "low", "high"))
    return Equivalence(difference, low, high, found["verdict"], found["seeds"], found.get("of_zero", False))


def _number(found: float | None) -> float:
    """NaN for null, which results.json has in the place of what is not finite."""
    return math.nan if found is None else float(found)
