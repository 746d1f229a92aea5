"""What `fastreduce compare` wants measured in a training, as its ranks find it in their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "_FASTREDUCE_ORDERS"
LEFT = "has left the script"  # what a rank says last that has not come to the end of what is measured


def order(contenders: Sequence[T], round_number: int) -> list[T]:
    """Who comes after whom in a round: every second one is the last in reverse, then all move up by one."""
    shift = round_number // 2 % max(1, len(contenders))
    rotated = [*contenders[shift:], *contenders[:shift]]
    return rotated[::-1] if round_number % 2 else rotated


@dataclass(frozen=True)
class Orders:
    """A training that is measured: losses step by step, or the seconds of steps under contestants in turn.

    Attributes:
        record: a file of this machine, to which rank 0 appends JSON lines; beside it each rank keeps in a file, with
            its rank behind a point, which step it is in.
        first: the contestant from the first step on.
        contestants: those that take turns in each round after `warm_up` steps, each for `settle` untimed and `steps`
            timed ones; none: losses are taken.
        rounds: how many.
        end: the training ends after so many steps; 0: when its turns are over, or by itself.
        shadow: settings of which a `Shadow` measures what they would lose of the first wrapper's gradients.
        shadow_every: in which steps.
        keeps_torchs_class: torch's class stays torch's, since no other contestant comes.
        probes: settings whose stages are measured before the first turn (`probing.py`).
        flights: whether a turn's line has the flights of its steps, but for the first, before which ranks meet.
        weights_from: the setting whose averages the optimizer sees, whoever is timed; "": the contestant's own.
    """

    record: str
    first: str
    contestants: tuple[str, ...] = ()
    rounds: int = 0
    warm_up: int = 0
    settle: int = 0
    steps: int = 0
    end: int = 0
    shadow: tuple[str, ...] = ()
    shadow_every: int = 100
    keeps_torchs_class: bool = False
    probes: tuple[str, ...] = ()
    flights: bool = False
    weights_from: str = ""

    @property
    def turns(self) -> list[str]:
        """Contestants, round after round, in an order that changes."""
        return [name for number in range(self.rounds) for name in order(self.contestants, number)]

    def environment(self) -> dict[str, str]:
        """What to add to that of the training."""
        return {VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def read() -> Orders:
        """Those in this process's environment."""
        found = json.loads(os.environ[VARIABLE])
        return Orders(**{**found, **{name: tuple(found[name]) for name in ("contestants", "shadow", "probes")}})
