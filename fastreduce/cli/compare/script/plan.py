"""What is to be compared: a script, its contestants, and how long."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import torch

from .... import FastreduceError
from ....environment.engines import find_place
from ....run.contestants import NO_REDUCTION, TORCHS, canonical
from ..ending import fail, need

BASE = "none"
AGAIN = "none again"  # the control
ROUNDS = 20
WARM_UP_STEPS = 5
SETTLE_STEPS = 3  # a new reducer's first step learns the order of gradients, its second lays the buckets out anew


@dataclass(frozen=True)
class Nodes:
    """On how many nodes the same comparison is asked for, which of them this is, and where the first one listens."""

    count: int
    rank: int
    address: str
    port: int


@dataclass(frozen=True)
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
    trains: bool
    length: int
    seeds: tuple[int, ...]
    margin: float
    target: float | None
    timeout: float
    metric_line: str | None
    metric_file: str | None
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
        weights_from = weights_from and canonical(weights_from)
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
    if rounds == 0 and train is None:
        fail("--rounds 0 takes no times: then give --train, for losses")
    if (metric_line or metric_file) and train != "whole":
        fail("--metric-line and --metric-file need --train whole: a training that is cut off ends with no metric")
    if metric_line and metric_file:
        fail("--metric-line and --metric-file both name the metric: give one of them")
    _check_pattern(metric_line)
    command = _read_launch(launch, ranks, nodes)
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


def read_words(words: Sequence[str], command: str = "compare") -> tuple[tuple[str, ...], bool]:
    """The script or module with its arguments, and whether it is a module; or an error and exit code 2."""
    module = words[0] == "-m"
    words = words[1:] if module else words
    if not words:
        fail("-m needs the name of a module", command=command)
    if module and PathFinder.find_spec(words[0].partition(".")[0], [os.getcwd(), *sys.path]) is None:
        fail(f"there is no module {words[0]!r}", command=command)
    if not module and not Path(words[0]).exists():
        fail(f"there is no script {words[0]!r}", command=command)
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


def find_nodes(count: int, rank: int | None, address: str | None, port: int) -> Nodes | None:
    """Those of the options; None where there is one, or an error and exit code 2."""
    if count == 1:
        return None
    if rank is None or not rank < count:
        fail(f"--nnodes {count}: say which of them this is, by --node-rank 0 to {count - 1}")
    if address is None:
        fail(f"--nnodes {count}: say where the first one is, by --master-addr")
    return Nodes(count, rank, address, port)


def _read_launch(launch: str | None, ranks: int | None, nodes: Nodes | None) -> tuple[str, ...]:
    """The command's words; or an error and exit code 2, also where a launcher has started this process as a rank."""
    if launch is None:
        if started := _started_by():
            command = "srun -n 4" if started.startswith("srun") else "mpirun -n 4"
            fail(f"{started}: compare starts ranks itself, for each training anew; --launch '{command}' says how")
        return ()
    try:
        words = tuple(shlex.split(launch))
    except ValueError as error:
        fail(f"--launch {launch}: {error}")
    if ranks is not None or nodes is not None:
        fail(f"--launch and {'--ranks' if nodes is None else '--nnodes'} both say what is started: give one of them")
    if not words or shutil.which(words[0]) is None:
        fail(f"--launch {launch}: there is no program {(words or ('',))[0]!r}")
    return words


def _started_by() -> str:
    """Which launcher has made this process one of several ranks, and which; "" where none has."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        return f"torchrun says rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}"
    try:
        place = find_place()
    except FastreduceError as error:
        fail(str(error))
    return str(place) if place is not None and place.world_size > 1 else ""
