"""Which setting, or none, and why: one sentence, and a caution where a setting has trained worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..compare.intervals import WORTHLESS
from ..compare.script.plan import BASE
from ..compare.script.speed import Speed
from .model import Parts
from .prediction import Prediction
from .readings import Flight

LITTLE = 0.05  # of a step: less is not worth a word
AS_GOOD = 1.03  # a setting that trains as well in all cases is taken up to so many times the fastest one's step
# Of docs/which-setting.md: no worse than none in any case, and those whose losses were higher, by so many percent.
EQUAL = frozenset(
    [
        "none",
        "none:accumulate=fp32",
        "fp16",
        "fp16:accumulate=wire",
        "bf16",
        "bf16:accumulate=wire",
        "bf16:rounding=stochastic",
        "fp8",
        "fp8:error_feedback",
        "fp8:rounding=stochastic",
    ]
)
HIGHER = {
    "int8": 18.33,
    "int8:error_feedback": 13.49,
    "int8:rounding=stochastic": 15.85,
    "int8:block=16": 1.66,
    "int4": 31.37,
    "int4:block=64": 71.11,
    "int4:error_feedback": 13.49,
    "int4:rounding=stochastic": 25.88,
    "auto4": 11.75,
}


@dataclass(frozen=True)
class Advice:
    """What to do: `none` means not to compress."""

    setting: str
    sentence: str
    caution: str


@dataclass(frozen=True)
class _Figure:
    """A setting's step over that of none."""

    setting: str
    ratio: float
    low: float
    high: float
    how: str

    def __str__(self) -> str:
        interval = "" if np.isnan(self.low) else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.ratio:.2f} of none's{interval}, {self.how}"


def contenders(predicted: Mapping[str, Prediction]) -> list[str]:
    """What is worth a measurement beside `none`: the two that are predicted fastest, and the best that is no risk."""
    others = sorted((p for p in predicted.values() if p.setting != BASE), key=lambda p: p.step.value)
    safe = [p for p in others if p.setting in EQUAL]
    return list(dict.fromkeys(p.setting for p in [*others[:2], *safe[:1]]))


def advise(predicted: Mapping[str, Prediction], measured: Mapping[str, Speed], late: str) -> Advice:
    """What the figures say; where settings have been measured, one of them is advised.

    Args:
        predicted: by setting, with `none`.
        measured: by setting; empty if nothing was.
        late: whom ranks wait for.
    """
    figures = {
        name: _Figure(name, p.ratio.value, p.ratio.low, p.ratio.high, "predicted")
        for name, p in predicted.items()
        if name != BASE
    }
    seen = {
        name: _Figure(name, s.ratio.median, s.ratio.low, s.ratio.high, "measured")
        for name, s in measured.items()
        if name != BASE
    }
    paying = [f for f in (seen or figures).values() if _pays(f, figures[f.setting].ratio)]
    none = predicted[BASE]
    if not paying:
        best = min((seen or figures).values(), key=lambda f: f.ratio, default=None)
        return Advice(BASE, f"Do not compress: {_why_not(none.parts, best, late)}", "")
    best = min(paying, key=lambda f: f.ratio)
    safe = [f for f in paying if f.setting in EQUAL and f.ratio <= AS_GOOD * best.ratio]
    chosen = min(safe, key=lambda f: f.ratio, default=best)
    share = none.parts.exposed / none.parts.step
    sentence = f"Compress with {chosen.setting}: a step takes {chosen}"
    if chosen.how == "measured":
        sentence += f" ({figures[chosen.setting].ratio:.2f} predicted)"
    sentence += f". Under none {share:.0%} of it are communication behind backward"
    sentence += f", and {chosen.setting} sends {predicted[chosen.setting].sent / none.sent:.2f} of the bytes."
    if chosen.high >= 1:
        sentence += " The interval holds 1: more --rounds would decide."
    if none.parts.waiting > max(LITTLE * none.parts.step, none.parts.exposed):
        sentence += f" {_waiting(none.parts, late).capitalize()}, longer than for the wire: mend that first."
    return Advice(chosen.setting, sentence, _caution(chosen, paying))


def _pays(figure: _Figure, predicted: float) -> bool:
    """Whether it is worth it: by an interval without 1, or, where what was measured decides nothing, as predicted."""
    undecided = not (figure.high < 1 or figure.low > 1)
    return figure.ratio <= WORTHLESS and (
        figure.high < 1 or (undecided and figure.how == "measured" and predicted <= WORTHLESS)
    )


def _why_not(parts: Parts, best: _Figure | None, late: str) -> str:
    step, exposed = parts.step, parts.exposed
    tail = f" {best.setting}, the best of the others, takes {best}." if best is not None else ""
    if parts.other > max(LITTLE * step, exposed, parts.waiting):
        return (
            f"threads wait for a processor, it seems: {1e3 * parts.other:.1f} of {1e3 * step:.1f} ms are neither "
            f"computing nor communication, which takes {1e3 * exposed:.1f} ms behind backward.{tail}"
        )
    if parts.waiting > max(LITTLE * step, exposed):
        return f"{_waiting(parts, late)}, and {1e3 * exposed:.1f} ms for the wire.{tail}"
    if exposed < LITTLE * step:
        if parts.hidden > exposed:
            return f"backward hides communication, of which {1e3 * exposed:.1f} of {1e3 * step:.1f} ms are left.{tail}"
        return f"communication takes {1e3 * exposed:.1f} of {1e3 * step:.1f} ms, so there is nothing to save.{tail}"
    return f"the link is not the bottleneck: what is saved on the wire is spent in kernels.{tail}"


def _waiting(parts: Parts, late: str) -> str:
    return f"ranks wait for {late}, {1e3 * parts.waiting:.1f} of {1e3 * parts.step:.1f} ms"


def _caution(chosen: _Figure, paying: Sequence[_Figure]) -> str:
    if chosen.setting in EQUAL:
        return ""
    if chosen.setting in HIGHER:
        what = f"{chosen.setting} has trained worse: losses up to {HIGHER[chosen.setting]:.0f} % higher in cases where "
        what += "small gradients lie beside large ones, most of all under AdamW."
    else:
        what = f"Whether {chosen.setting} trains as well is not known: it has not been tried on several tasks."
    safe = min((f for f in paying if f.setting in EQUAL), key=lambda f: f.ratio, default=None)
    instead = "No setting without that risk pays." if safe is None else f"{safe.setting}, which has not: {safe}."
    return f"{what} {instead} `fastreduce compare --train` tests it with your script."


def who_is_late(flights: Sequence[Flight]) -> str:
    """Whom ranks wait for."""
    slowest = np.array([flight.computed for flight in flights]).argmax(axis=1)
    rank = int(np.bincount(slowest).argmax())
    often = float(np.mean(slowest == rank))
    return f"rank {rank}" if often >= 2 / 3 else "each other in turn"
