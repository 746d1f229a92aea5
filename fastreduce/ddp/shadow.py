"""Shadow: what other settings would lose of the gradients of a running training, which goes on as it is."""

from __future__ import annotations

import logging
import math
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compression import Compression, OfWholeParameters, PowerSGD
from ..errors import SettingError, brief
from ..policy import AnySetting, Policy, assigned, match
from ..reduction import clocks
from ..reduction.agreement import check_agreement
from ..reduction.bucketed import BucketJob
from ..reduction.buckets import ParameterSpec, Slot, build_plan
from ..reduction.pipeline import BucketPipeline
from ..reduction.reducer import GradientReducer
from ..reduction.streams import is_capturing
from ..transports import LocalTransport
from ..transports.base import gather_rows
from .wrapper import DistributedDataParallel

logger = logging.getLogger(__name__)

ALL = "all"  # the group of all parameters together
GROUPS = 32  # modules up to which each is a group
CHUNK = 1 << 18  # elements whose squares are summed at once, in FP64


@dataclass(frozen=True)
class Measurement:
    """What settings would have lost of one step's gradients.

    Attributes:
        step: the step.
        errors: by setting and group, the squared error of all ranks' gradients over their squares (vNMSE); NaN where
            they were not finite, and no entry where they were 0. The group "all" is all parameters together.
    """

    step: int
    errors: dict[str, dict[str, float]]


class Shadow:
    """Measures on the gradients of a running training what settings would lose of them, without using one.

    In every `every`-th step each rank sends its own gradients, bucket by bucket as they become ready, through each
    setting's kernels and back, and compares. What settings lose of them, and their squares, are summed over the ranks
    in one small all-gather behind that step's reduction, so all ranks find the same. Gradients, the training's bits
    and its wires stay as they are, whatever its setting is. Other steps pay nothing; memory is that of one bucket.

    It is the first rounding, that of a rank's own gradients, of one step: the average of N ranks has less of it where
    gradients point the same way, and a second rounding on top, of the same size. Of a setting with error feedback it is
    what the next step adds again. Under PowerSGD factors begin anew each time: it is what the first step loses.

    Every rank makes one, between the same two steps. It measures until `close`, or until the wrapper trains with other
    ranks, whether the object is kept or not; what it has found is in `ddp.reducer.counters()` too.

    Args:
        ddp: the wrapper.
        settings: spec strings, settings or policies, as for `compression=`.
        every: in which steps: those whose number, counted by the ranks that train together, is a multiple of it.
        groups: keys as a policy has them, such as `"*.bias|ndim<2"` and `"*"`, of which the first that matches a
            parameter is its group. None: each module with parameters of its own, by name; where there are more than 32,
            modules whose names differ only in numbers together, as `blocks.*.attention`. Where a parameter that is
            unfrozen later matches no key, here or of a policy in `settings`, a warning says so, and nothing is measured
            any more.

    Attributes:
        last: the last measurement; None before the first.
        seconds: that measuring has taken on this rank, in all.

    Raises:
        SettingError: if `ddp` is no wrapper, a setting is none, a parameter matches no key, torch reduces all gradients
            of this wrapper, or its ranks may be lost.
        MismatchError: on every rank, if ranks differ in settings, steps or groups.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Iterable[AnySetting],
        every: int = 100,
        groups: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise SettingError(
                f"ddp={brief(ddp)}; allowed: a fastreduce.DistributedDataParallel, which has wrapped a module"
            )
        if ddp._delay_all_reduce_all_params:
            raise SettingError("Shadow and delay_all_reduce_named_params of all parameters: torch reduces them")
        if ddp._elastic:
            raise SettingError("Shadow and elastic=True: ranks would agree on what they found when some may be lost")
        reducer: GradientReducer = ddp.reducer
        error: Exception | None = None
        told: dict[str, str] = {}
        self._settings: dict[str, list[Compression]] = {}
        self._given, self._keys = list[Compression | Policy](), groups
        try:
            if not isinstance(every, int) or every < 1:
                raise SettingError(f"every={every!r}: give a number of steps, 1 or more")
            if not isinstance(settings, Iterable):
                raise SettingError(f"settings={brief(settings)}; allowed: a list of settings, such as ['int8', 'fp16']")
            self._given += map(Policy.of, [settings] if isinstance(settings, str) else settings)
            if not self._given:
                raise SettingError("a Shadow of no settings measures nothing")
            self._assign(reducer)
            told = {"settings": "; ".join(self._settings), "every": str(every), "groups": repr(groups)}
        except Exception as found:  # whatever it is, other ranks must not wait
            error = found
        check_agreement(reducer.transport, {f"a Shadow's {what}": text for what, text in told.items()}, error)
        self._reducer, self._transport = weakref.ref(reducer), weakref.ref(reducer.transport)
        self._every, self._is_over = every, False
        # By device, the squares of gradients and of what each setting loses of them, by group.
        self._squares: dict[torch.device, Tensor] = {}
        self.last: Measurement | None = None
        self.seconds = 0.0
        reducer.buckets.warm_up(dict.fromkeys(each for chosen in self._settings.values() for each in chosen))
        reducer.events.launching.append(self._look)
        reducer.events.computed.append(self._look_alone)
        reducer.events.met.append(self._agree)
        reducer.events.ended.append(self._squares.clear)  # a second backward's, which no reduction follows

    def _assign(self, reducer: GradientReducer) -> None:
        """A group, and of each setting what it has for it, to each parameter that is averaged."""
        names, parameters = reducer.buckets.gradients.names, reducer.buckets.gradients.parameters
        for given in self._given:
            self._settings[str(given)] = [
                _of_one_step(each) for each in assigned(given, names, parameters, reducer.buckets.frozen)
            ]
        named = modules_of(names) if self._keys is None else _by_keys(self._keys, names, parameters)
        self._groups = list(dict.fromkeys(named))
        self._group_of = [self._groups.index(name) for name in named]

    def close(self) -> None:
        """Measure no more; on every rank, between the same two steps."""
        reducer = self._reducer()
        if reducer is not None and self._agree in reducer.events.met:
            reducer.events.launching.remove(self._look)
            reducer.events.computed.remove(self._look_alone)
            reducer.events.met.remove(self._agree)
            reducer.events.ended.remove(self._squares.clear)

    # What a step does

    def _due(self, reduction: int) -> bool:
        """Whether a reduction is measured: not among other ranks, and not while a CUDA graph is captured.

        Groups follow what is averaged by then.
        """
        reducer = self._reducer()
        if self._is_over or reducer is None or reducer.transport is not self._transport():
            return False
        if len(self._group_of) < len(reducer.buckets.specs):  # some were frozen so far
            try:
                self._assign(reducer)
            except SettingError as error:  # on all ranks alike: keys match none of these
                logger.warning("this Shadow measures no more: %s", error)
                self._is_over = True
                return False
        return not is_capturing() and reduction % self._every == 0

    @torch.no_grad()
    def _look(self, job: BucketJob) -> None:
        """A bucket is about to be reduced."""
        reducer = self._reducer()
        if reducer is None or not self._due(reducer.reductions):
            return
        start = clocks.now()
        bucket, grads = job.pipeline.bucket, job.found.sources
        squares = self._squares_on(bucket.device)
        places = torch.tensor([self._group_of[slot.parameter] for slot in bucket.slots], device=bucket.device)
        squares[0].index_add_(0, places, _squares(grads))
        for row, chosen in enumerate(self._settings.values(), 1):
            by_setting: dict[Compression, list[int]] = {}
            for position, slot in enumerate(bucket.slots):
                by_setting.setdefault(chosen[slot.parameter], []).append(position)
            for setting, positions in by_setting.items():
                some = [grads[position] for position in positions]
                back = _there_and_back(some, [bucket.slots[position] for position in positions], bucket.dtype, setting)
                torch._foreach_sub_(back, some)
                squares[row].index_add_(0, places[positions], _squares(back))
        self.seconds += clocks.now() - start

    def _squares_on(self, device: torch.device) -> Tensor:
        if device not in self._squares:
            shape = 1 + len(self._settings), len(self._groups)
            self._squares[device] = torch.zeros(shape, dtype=torch.float64, device=device)
        return self._squares[device]

    def _look_alone(self) -> None:
        """On one rank, where nothing is compressed, buckets are not reduced."""
        reducer = self._reducer()
        if reducer is None or not self._due(reducer.reductions):
            return
        for index in range(len(reducer.plan.buckets)):
            if reducer.buckets.alone(index):
                self._look(reducer.buckets.collect(index, reducer.used))

    @torch.no_grad()
    def _agree(self, reduction: int, step: int) -> None:
        """A reduction has ended on all ranks: sum what each has found."""
        reducer = self._reducer()
        if reducer is None or not self._due(reduction):
            return
        start, transport, device = clocks.now(), reducer.transport, reducer.buckets.wire_device
        mine = torch.zeros_like(self._squares_on(device))
        for squares in self._squares.values():
            mine += squares.to(device)
        self._squares.clear()
        whole, *lost = gather_rows(transport, mine).sum(0).tolist()
        errors = {name: self._errors(whole, each) for name, each in zip(self._settings, lost, strict=True)}
        self.last = Measurement(step, errors)
        reducer.note_errors(errors)
        self.seconds += clocks.now() - start

    def _errors(self, whole: Sequence[float], lost: Sequence[float]) -> dict[str, float]:
        found = {ALL: (math.fsum(lost), math.fsum(whole))}
        found |= {group: (a, b) for group, a, b in zip(self._groups, lost, whole, strict=True)}
        return {group: a / b for group, (a, b) in found.items() if b != 0}


def modules_of(names: Sequence[str]) -> list[str]:
    """The module of each parameter; where that makes too many, without the numbers in their names."""
    modules = [name.rpartition(".")[0] or name for name in names]
    if len(set(modules)) > GROUPS:
        modules = [re.sub(r"(?<![^.])\d+(?![^.])", "*", module) for module in modules]
    return modules


def _by_keys(keys: Sequence[str], names: Sequence[str], parameters: Sequence[Tensor]) -> list[str]:
    return [keys[matching[0]] for matching in match(keys, names, parameters)]


def _of_one_step(setting: Compression) -> Compression:
    """The same without a memory; PowerSGD and top-k begin anew with each pipeline."""
    if isinstance(setting, OfWholeParameters) or not setting.error_feedback:
        return setting
    return replace(setting, error_feedback=False)  # type: ignore[call-arg]


def _there_and_back(
    grads: Sequence[Tensor], slots: Sequence[Slot], dtype: torch.dtype, setting: Compression
) -> list[Tensor]:
    """What arrives of gradients that a setting sends."""
    device = grads[0].device
    specs = [ParameterSpec(slot.name, slot.numel, dtype, device, slot.rows) for slot in slots]
    plan = build_plan(specs, [range(len(specs))], alignment=setting.alignment, shards=1)
    pipeline = BucketPipeline(plan.buckets[0], setting, LocalTransport())
    back = [torch.empty_like(grad) for grad in grads]
    if isinstance(setting, PowerSGD):  # whose second factors follow from the sums of the first
        pipeline.run(grads, back)
    else:
        pipeline.compress(grads)
        pipeline.decompress(back)
    return back


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each dense tensor, FP64."""
    flats = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    return torch.stack([torch.stack([_square(part) for part in flat.split(CHUNK)]).sum() for flat in flats])


def _square(part: Tensor) -> Tensor:
    wide = part.double()
    return torch.dot(wide, wide)
