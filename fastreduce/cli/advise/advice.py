"""Which setting, or none, in which buckets, over what, and why: a sentence, and a caution where one trains worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...policy import Policy
from ...run.contestants import Variant
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
    "int8:error_feedback=8bit": 13.48,
    "int8:rounding=stochastic": 15.85,
    "int8:block=16": 1.66,
    "int4": 31.37,
    "int4:block=64": 71.11,
    "int4:error_feedback": 13.49,
    "int4:error_feedback=8bit": 13.47,
    "int4:rounding=stochastic": 25.88,
    "auto4": 11.75,
    "powersgd:rank=4": 27.02,
    "topk:ratio=0.01": 60425874.0,
}
DIVERGED = 1000.0  # percent, from where a loss tells no more than that


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        setting: to compress with; `none` means not to.
        options: what else is to be written, as a user does.
        sentence: says it, and why.
        caution: where the setting has trained worse.
    """

    setting: str
    options: list[str]
    sentence: str
    caution: str

    @property
    def name(self) -> str:
        """Of the variant."""
        return " ".join([self.setting, *self.options])


@dataclass(frozen=True)
class _Figure:
    """A variant's step over that of none as it is."""

    variant: Variant
    ratio: float
    low: float
    high: float
    how: str

    @property
    def setting(self) -> str:
        """Without what else is not as it is."""
        return self.variant.setting

    def over(self, ratio: float) -> _Figure:
        """The step over that of something else, which takes so much of none's."""
        return replace(self, ratio=self.ratio / ratio, low=self.low / ratio, high=self.high / ratio)

    def __str__(self) -> str:
        interval = "" if np.isnan(self.low) else f" ({self.low:.2f}–{self.high:.2f})"
        return f"{self.ratio:.2f} of none's{interval}, {self.how}"


def contenders(predicted: Mapping[str, Prediction]) -> list[str]:
    """What is worth a measurement beside `none`: the two that are predicted fastest, and the best that is no risk.

    And all that is predicted in other buckets or over another transport.
    """
    found = [p for name, p in predicted.items() if name != BASE]
    others = sorted((p for p in found if not p.variant.options), key=lambda p: p.step.value)
    safe = [p for p in others if p.variant.setting in EQUAL]
    varied = [p for p in found if p.variant.options]
    return list(dict.fromkeys(str(p.variant) for p in [*others[:2], *safe[:1], *varied]))


def varied(seconds: Mapping[str, float]) -> list[str]:
    """In other buckets, or over another transport: `none`, and the setting that would be advised if all were at best.

    Each option is to save 2 % of the step without it, or nothing is named.

    Args:
        seconds: the predicted step by the variant's name, `none` first.
    """
    steps = {Variant.of(name): step for name, step in seconds.items()}
    best = {variant.setting: variant for variant in steps if not variant.options}
    for count in (1, 2):
        for setting, now in best.items():
            others = [each for each in steps if each.setting == setting and len(each.options) == count]
            fastest = min(others, key=lambda each: steps[each], default=now)
            if steps[fastest] <= WORTHLESS * steps[now]:
                best[setting] = fastest
    ratios = {setting: steps[variant] / steps[best[BASE]] for setting, variant in best.items()}
    paying = {setting: ratio for setting, ratio in ratios.items() if ratio <= WORTHLESS}
    chosen = [BASE, _choose(paying)] if paying else [BASE]
    return [str(best[setting]) for setting in chosen if best[setting].options]


def _choose(ratios: Mapping[str, float]) -> str:
    """The setting that takes the least; or, of those that take hardly more, one that trains as well as none."""
    least = min(ratios.values())
    safe = {setting: ratio for setting, ratio in ratios.items() if setting in EQUAL and ratio <= AS_GOOD * least}
    return min(safe or ratios, key=lambda setting: ratios[setting])


def advise(predicted: Mapping[str, Prediction], measured: Mapping[str, Speed], late: str) -> Advice:
    """What the figures say; where settings have been measured, one of them is advised.

    Args:
        predicted: by the variant's name, with `none`.
        measured: the same; empty if nothing was.
        late: whom ranks wait for.
    """
    figures = {
        name: _Figure(p.variant, p.ratio.value, p.ratio.low, p.ratio.high, "predicted")
        for name, p in predicted.items()
        if name != BASE
    }
    seen = {
        name: _Figure(Variant.of(name), s.ratio.median, s.ratio.low, s.ratio.high, "measured")
        for name, s in measured.items()
        if name != BASE
    }
    found = seen or figures
    as_it_is = [f for f in found.values() if not f.variant.options]
    paying = [f for f in as_it_is if _pays(f, figures[str(f.variant)].ratio)]
    chosen = found[_choose({f.setting: f.ratio for f in paying})] if paying else None
    others = [f for f in found.values() if f.variant.options]
    for other in sorted(others, key=lambda f: f.setting != BASE):  # what is no risk comes first
        ratio, guess = (chosen.ratio, figures[str(chosen.variant)].ratio) if chosen else (1.0, 1.0)
        if _pays(other.over(ratio), figures[str(other.variant)].ratio / guess):
            chosen = other
    none = predicted[BASE]
    best = min(as_it_is, key=lambda f: f.ratio, default=None)
    if chosen is None:
        return Advice(BASE, [], f"Do not compress: {_why_not(none.parts, best, late)}", "")
    takes = f"a step takes {chosen}"
    if chosen.how == "measured":
        takes += f" ({figures[str(chosen.variant)].ratio:.2f} predicted)"
    options = " and ".join(chosen.variant.options)
    if chosen.setting == BASE:
        sentence = f"Do not compress, but write {options}: {takes}. "
        if not paying:
            sentence += f"Without that, {_why_not(none.parts, best, late)}"
        elif best is not None:
            sentence += f"Without that, {best.setting} takes {best}."
        return Advice(BASE, chosen.variant.options, sentence, "")
    sentence = f"Compress with {chosen.setting}{f', and write {options}' if options else ''}: {takes}"
    if options and chosen.setting in found:
        sentence += f", and without {options} {found[chosen.setting].ratio:.2f}"
    share = none.parts.exposed / none.parts.step
    sent = predicted[str(chosen.variant)].sent / none.sent
    sentence += f". Under none {share:.0%} of it are communication behind backward"
    sentence += f", and {chosen.setting} sends {sent:.2f} of the bytes."
    if chosen.high >= 1:
        sentence += " The interval holds 1: more --rounds would decide."
    if none.parts.waiting > max(LITTLE * none.parts.step, none.parts.exposed):
        sentence += f" {_waiting(none.parts, late).capitalize()}, longer than for the wire: mend that first."
    return Advice(chosen.setting, chosen.variant.options, sentence, _caution(chosen, paying))


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
    named = {str(Policy.of(setting)): percent for setting, percent in HIGHER.items()}  # as predictions name them
    percent = HIGHER.get(chosen.setting, named.get(chosen.setting))
    if percent is not None:
        what = f"{chosen.setting} has trained worse: losses "
        what += f"up to {percent:.0f} % higher" if percent < DIVERGED else "that diverged"
        what += " in cases where small gradients lie beside large ones, "
        drops = chosen.setting.startswith(("powersgd", "topk"))
        what += "and higher ones in ordinary cases, too." if drops else "most of all under AdamW."
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
