"""AgreedSchedule: the schedule on which all ranks agree, whose settings the buckets follow."""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import Tensor

from ..errors import SettingError, TransportError
from ..transports.messages import checked, of_types
from .agreement import check_agreement, describe_tensor
from .bucketed import BucketedGradients
from .gradients import Gradients
from .schedule import Schedule, Setting


class AgreedSchedule:
    """Has ranks compare what is to come, and puts the setting of each step into force before its forward.

    Args:
        schedule: the one of construction, which ranks have compared.
        buckets: what follows it; their sizes are those of stretches that name none.

    Attributes:
        schedule: the setting of each step.
        caps: the sizes of buckets where it names none, from the next change on.
    """

    def __init__(self, schedule: Schedule, buckets: BucketedGradients) -> None:
        self.schedule, self._buckets, self.caps = schedule, buckets, buckets.caps
        self._due: float = schedule.step
        self._moved = False
        buckets.warm_up(schedule.settings)

    def change(self, setting: Setting, at: int | None, bucket_bytes: float | None, in_backward: bool) -> None:
        """Let another setting be in force from step `at` on, as `GradientReducer.set_compression` has it."""
        if in_backward:  # nor can ranks tell each other: buckets under way have the transport
            raise SettingError(f"set_compression({setting!r}) in a backward: call it between two steps")
        error: Exception | None = None
        changed = None
        try:
            changed = self.schedule.with_setting(self.schedule.step if at is None else at, setting, bucket_bytes)
        except Exception as found:  # whatever it is, other ranks must not wait
            error = found
        self._adopt(changed, error)

    def _adopt(self, schedule: Schedule | None, error: Exception | None = None, moved: bool = False) -> None:
        """Go on with a schedule on which all ranks agree; with `moved`, and on what is averaged."""
        step, gradients = self.schedule.step, self._buckets.gradients
        told = {"the number of steps reduced": str(step)}
        if moved:  # buckets are laid out by these numbers
            order = "by the order of wrapping and unfreezing"
            told |= {f"parameter {i} {order}": repr(name) for i, name in enumerate(gradients.names)}
        try:
            if schedule is not None:
                told |= schedule.description(gradients.names, gradients.parameters, self._buckets.frozen)
        except Exception as found:
            error = found
        try:
            check_agreement(self._buckets.transport, told, error)
        except TransportError as found:
            raise TransportError(
                f"{found} Settings are compared where set_compression is called, which every rank does between the "
                f"same two steps: this one has reduced {step}"
            ) from found
        assert schedule is not None
        self._buckets.warm_up(schedule.settings)
        self.resume(schedule)

    def agree_to_add(self, parameters: Sequence[Tensor], names: Sequence[str], sparse: Set[int]) -> Gradients:
        """Have ranks compare what is averaged, too, from the next step on, as `GradientReducer.add` has it."""
        buckets, step = self._buckets, self.schedule.step
        added, error, told = None, None, dict[str, str]()
        try:
            if not buckets.are_compressed:
                raise SettingError(
                    f"a communication hook averages, and may keep something of buckets without {names[0]!r}"
                )
            added, known = Gradients(parameters, names, buckets.dtype), buckets.gradients
            told |= self.schedule.description([*known.names, *names], [*known.parameters, *parameters], buckets.frozen)
            for i, (spec, layout) in enumerate(zip(added.specs, added.layouts, strict=True)):
                # Not as a parameter is now: a forward may have left it in a lower precision on some ranks.
                kind = f"{describe_tensor(layout.to(spec.dtype))}, {'sparse' if i in sparse else 'dense'}"
                told[f"parameter {spec.name!r} from step {step} on"] = kind
        except Exception as found:  # whatever it is, other ranks must not wait
            error = found
        try:
            check_agreement(buckets.transport, told, error)
        except TransportError as found:
            raise TransportError(
                f"{found} Ranks compare what is averaged from step {step} on, {names[0]!r} too: every rank is to "
                "unfreeze the same parameters before that"
            ) from found
        assert added is not None
        return added

    def resume(self, schedule: Schedule) -> None:
        """Go on with a schedule that ranks need not compare now."""
        self.schedule, self._due = schedule, schedule.step

    def move(self, compared: bool) -> None:
        """Other ranks take part: before the next forward they compare what is to come, unless they have."""
        self._moved, self._due = not compared, self.schedule.due if compared else 0

    def switch_if_due(self) -> bool:
        """Before a forward: let the setting of the next step be in force; returns whether buckets were laid out anew.

        It takes effect on all ranks at one step, because they have agreed on it before.
        """
        schedule, buckets = self.schedule, self._buckets
        if schedule.step < self._due:
            return False
        if self._moved:  # ranks may have come unequally far
            steps = checked(buckets.transport.exchange(schedule.step), lambda value: of_types([value], int), "step")
            schedule.step = max(step for (step,) in steps)
            self._adopt(schedule, moved=True)
            self._moved = False
        if schedule.must_compare:
            error = None
            try:
                schedule.ask()
            except SettingError as found:
                error = found
            self._adopt(schedule, error)
        self._due = schedule.due
        caps = self.caps if schedule.bucket_bytes is None else (schedule.bucket_bytes,)
        if buckets.is_laid_out and (buckets.assign(schedule.setting), caps) == (buckets.settings, buckets.caps):
            buckets.compression = schedule.setting
            return False
        buckets.switch(schedule.setting, caps)
        return True
