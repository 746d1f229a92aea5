"""What is to be compared: a script, its contestants, and how long."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .... import FastreduceError
from ....run import why_not_found
from ....run.contestants import NO_REDUCTION, TORCHS, canonical
from ...ending import fail, need
from ..starting import Nodes, check_timeout, read_launch

BASE = "none"
AGAIN = "none again"  # the control
ROUNDS = 20
WARM_UP_STEPS = 5
SETTLE_STEPS = 3  # a new reducer's first step learns the order of gradients, its second lays the buckets out anew


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison.

    Attributes:
        words: the script or module, and its arguments.
        module: whether it is a module.
        settings: those of --settings, with `none` first.
        ranks: processes to start on this machine; 1: one, which may start ranks itself; 0: `launch` knows how many.
        rounds: of speed; 0: no speed.
        steps: timed steps of a turn.
        trains: whether quality is compared.
        length: steps of a training; 0: until the script ends.
        seeds: those of the trainings.
        margin: a fraction of none's loss.
        target: a loss, or None.
        timeout: seconds after which a training that takes no step and prints nothing is ended.
        metric_line: a regular expression with one group, or None.
        metric_file: a path, or None; behind it a colon and a key of JSON.
        weights_from: the setting whose averages the optimizer sees while others are timed; "": each contestant's own.
        launch: the command that starts ranks, to which theirs is added; (): we do.
        nodes: where ranks are on several machines that we start them on.
    """

    words: tuple[str, ...]
    module: bool
    settings: tuple[str, ...]
    ranks: int
    rounds: int
    steps: int
    out: Path
    trains: bool = False
    length: int = 0
    seeds: tuple[int, ...] = (0,)
    margin: float = 0.0
    target: float | None = None
    timeout: float
    metric_line: str | None = None
    metric_file: str | None = None
    weights_from: str = ""
    launch: tuple[str, ...] = ()
    nodes: Nodes | None = None

    @property
    def contestants(self) -> tuple[str, ...]:
        """Who takes turns for speed: settings, torch's, a step that reduces nothing, and the control."""
        others = dict.fromkeys([*self.settings, *TORCHS])
        return (BASE, AGAIN, *(name for name in others if name not in (BASE, AGAIN)))

    @property
    def has_metric(self) -> bool:
        """Whether trainings end with a number that the user names."""
        return bool(self.metric_line or self.metric_file)

    @property
    def name(self) -> str:
        """Of the script."""
        return self.words[0]

    @property
    def started(self) -> str:
        """How ranks are, in the words of the options."""
        if self.launch:
            return f"--launch '{shlex.join(self.launch)}'"
        return f"--ranks {self.ranks}" + (f" on each of {self.nodes.count} nodes" if self.nodes else "")

    def common(self) -> dict[str, object]:
        """What all nodes are asked for alike."""
        own = {"out", "ranks", "nodes"}
        return {name: value for name, value in asdict(self).items() if name not in own}


def contestant_of(name: str) -> str:
    """What a name means to the ranks."""
    return BASE if name == AGAIN else name


def make_plan(
    words: Sequence[str],
    settings: Sequence[str],
    *,
    ranks: int | None,
    rounds: int,
    steps: int,
    seed: int,
    out: Path,
    train: str | None,
    seeds: int,
    margin: float,
    target: float | None,
    timeout: float,
    metric_line: str | None,
    metric_file: str | None,
    weights_from: str | None,
    launch: str | None,
    nodes: Nodes | None,
) -> Plan:
    """The plan, or an error and exit code 2 before anything starts."""
    need("scipy", "matplotlib")
    words, module = read_words(words)
    try:
        specs = [canonical(name) for name in settings]
        weights_from = None if weights_from is None else canonical(weights_from)
    except FastreduceError as error:
        fail(str(error))
    named = [BASE, *([AGAIN] if specs.count(BASE) > 1 else []), *(name for name in specs if name != BASE)]
    if NO_REDUCTION in specs:
        fail(f"{NO_REDUCTION!r} is timed beside the settings, and is none")
    if weights_from in TORCHS:
        fail(f"--weights-from {weights_from}: give a setting of ours, such as none")
    if weights_from and rounds == 0:
        fail("--weights-from is for speed: --rounds 0 takes no times")
    if train is not None and train != "whole" and not (train.isdecimal() and int(train) > 0):
        fail(f"--train {train}: give a number of steps, or whole")
    if target is not None and math.isnan(target):
        fail("--target nan: give a number")
    if not margin >= 0:
        fail(f"--margin {margin:g}: give percent, 0 or more")
    check_timeout(timeout)
    if seed + seeds > 1 << 32:
        fail(f"--seed {seed} --seeds {seeds}: the last one is {seed + seeds - 1}; allowed: up to {(1 << 32) - 1}")
    if rounds == 0 and train is None:
        fail("--rounds 0 takes no times: then give --train, for losses")
    if metric_file is not None and not metric_file.partition(":")[0]:
        fail(f"--metric-file {metric_file!r}: give a file, as in metrics.json:loss")
    if (metric_line or metric_file) and train != "whole":
        fail("--metric-line and --metric-file need --train whole: a training that is cut off ends with no metric")
    if metric_line and metric_file:
        fail("--metric-line and --metric-file both name the metric: give one of them")
    _check_pattern(metric_line)
    command = read_launch(launch, ranks, nodes)
    return Plan(
        words=words,
        module=module,
        settings=tuple(dict.fromkeys(named)),
        ranks=0 if command else ranks or torch.cuda.device_count() or 2,
        rounds=rounds,
        steps=steps,
        out=out,
        trains=train is not None,
        length=int(train) if train not in (None, "whole") else 0,
        seeds=tuple(range(seed, seed + seeds)),
        margin=margin / 100,
        target=target,
        timeout=timeout,
        metric_line=metric_line,
        metric_file=metric_file,
        weights_from=weights_from or "",
        launch=command,
        nodes=nodes,
    )


def read_words(words: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The script or module with its arguments, and whether it is a module; or an error and exit code 2."""
    module = words[0] == "-m"
    words = words[1:] if module else words
    if not words:
        fail("-m needs the name of a module")
    if why := why_not_found("module" if module else "script", words[0]):
        fail(why)
    return tuple(words), module


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        fail(f"--metric-line {pattern}: {error}")
    if groups != 1:
        fail(f"--metric-line {pattern}: one pair of parentheses says where the number stands, not {groups}")
