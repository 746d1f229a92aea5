"""What became of sharded gradients, for error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..reduction.residuals.applied import norms_of
from ..reduction.residuals.error_feedback import ErrorFeedback
from ..transports import Transport
from .torch_fsdp import NO_BACKWARD, Group, backward_under_way, used_elsewhere


class Followed:
    """The gradients of some parameters of a group, under error feedback.

    Args:
        feedback: what was lost of them.
        group: the group.
        positions: of the parameters in the group.
        transport: the ranks of which each knows another part of them; None where residuals are of the own part alone.
    """

    def __init__(
        self, feedback: ErrorFeedback, group: Group, positions: Sequence[int], transport: Transport | None = None
    ) -> None:
        self.feedback, self.group, self.transport = feedback, group, transport
        self._members = [(i, group.members[i]) for i in positions]
        self._find = [partial(getattr, member, "parameter") for _, member in self._members]
        self._norms = torch.zeros(2, len(positions), dtype=torch.float64, device="cpu")
        self._absent: list[int] = []  # of the last message, though they require gradients

    @property
    def _parameters(self) -> list[Tensor]:
        """As they are now: `load_state_dict(assign=True)` puts others in their place."""
        return [find() for find in self._find]

    def norms(self) -> Tensor:
        """What was measured when they were stored, FP64 `[2, parameters]` (`norms_of`)."""
        return self._norms.clone()

    def follow(self, present: Sequence[int], late: bool) -> None:
        """The gradients of a message are stored; `late`: by a backward that raised, so some may be zeroed again."""
        trained = set(self.group.trained).difference(present)
        self._absent = [k for k, (i, _) in enumerate(self._members) if i in trained]
        self._measure()
        left = [k for k, (i, _) in enumerate(self._members) if i not in present]
        self.feedback.follow(self._parameters, left, self.norms, watched=self._is_watched, find=self._find)
        if late:
            self.feedback.throw_away(k for k, largest in enumerate(self._norms[0].tolist()) if not largest)

    def follow_on(self) -> None:
        """What is kept has come from another layout, and averages may be in `.grad` still; every rank calls it."""
        self._measure()
        self.feedback.follow_on(self._parameters, self._is_watched, self._find)

    def _measure(self) -> None:
        like, grads = self._members[0][1].local, [parameter.grad for parameter in self._parameters]
        self._norms = norms_of([like.new_zeros(1) if grad is None else grad for grad in grads])

    @property
    def _is_watched(self) -> bool:
        """What steps in backward has stepped: its averages count as applied."""
        return not any(member.steps_in_backward for _, member in self._members)

    def seen(self) -> Tensor | None:
        """What this rank knows of their averages, FP64 `[4, parameters]`: `ErrorFeedback.fates`, 1, and 1.

        Zeros where it has none of an average, or zeros, and in the last row where it had no gradient. None before the
        first.
        """
        fates = self.feedback.fates()
        if fates is None:
            return None
        has_any = ((self._norms[0] > 0) & self._norms.isfinite().all(0)).double().to(fates.device)
        had = torch.ones_like(has_any)
        for k in self._absent:
            had[k] = 0
        return torch.cat([torch.cat([fates.nan_to_num(), torch.ones_like(has_any)[None]]) * has_any, had[None]])

    def agree(self, seen: Tensor, transport: Transport) -> None:
        """Go by the mean over the ranks of `transport` that have seen anything; `seen` is the sum of what they have.

        Raises:
            ReducerError: if a parameter was used on other ranks only.
        """
        for k in self._absent:
            if seen[3, k] > 0:
                raise used_elsewhere(self._members[k][1].name, transport, "rank")
        self.feedback.put_fates(seen[:2] / seen[2])  # 0 / 0, NaN, of what none of them has seen


class Follower:
    """Lets error feedback see, once in a backward of a model, what became of the last one's gradients.

    A clipped DTensor has the version that it had, and FSDP adds to gradients that are there behind their backs. So they
    are measured when a backward has stored them, and again before the next one stores others. A rank that has nothing
    of a parameter, or zeros, can measure nothing: the ranks tell each other.
    """

    def __init__(self) -> None:
        self._all: list[Followed] = []
        self._stored: dict[Followed, list[int]] = {}  # by this backward, and not followed yet
        self._reduced: set[Followed] = set()  # since the last look of this backward
        self._backward: int | None = None
        self._looked: torch.cuda.Event | None = None
        self._verdicts: list[Tensor] = []  # that the last look has read: their memory may be another stream's

    @property
    def all(self) -> list[Followed]:
        """At what it looks."""
        return list(self._all)

    def add(self, followed: Sequence[Followed]) -> None:
        """Look at these from now on."""
        self._all += followed

    def remove(self, followed: Sequence[Followed]) -> None:
        """Look at these no more."""
        self._all = [each for each in self._all if each not in followed]
        self._reduced.difference_update(followed)

    @torch.no_grad()
    def look(self, others_follow: bool = True) -> None:
        """See what is left of all gradients, and whether all were finite (`Applied.look`); every rank calls it."""
        by_transport: dict[Transport, list[tuple[Followed, Tensor]]] = {}
        for each in self._all:
            each.feedback.look(others_follow=others_follow)
            if each.transport is not None and (seen := each.seen()) is not None:
                by_transport.setdefault(each.transport, []).append((each, seen))
        self._verdicts = [each.feedback.finite for each in self._all]
        for transport, known in by_transport.items():
            infinite = torch.stack([~each.feedback.finite for each, _ in known]).sum()
            told = torch.cat([*(seen.flatten() for _, seen in known), infinite.double()[None]])
            transport.all_reduce(told).wait()
            sums = told[:-1].split([seen.numel() for _, seen in known])
            for (each, seen), sum_ in zip(known, sums, strict=True):
                each.agree(sum_.view_as(seen), transport)
                each.feedback.finite = told[-1] == 0

    def begin(self, followed: Sequence[Followed], present: Sequence[int]) -> None:
        """A message is about to be reduced and stored; every rank calls it.

        The stage of a pipeline reduces behind its backwards: there a step lasts until a message comes again.
        """
        if not followed:
            return
        backward, group = backward_under_way(), followed[0].group
        device = group.device
        begins = backward != self._backward or any(each in self._reduced for each in followed)
        if begins:
            self.end(late=backward != self._backward)  # what is there is of a backward that raised, or of this one
            self.look()
            self._backward = backward
            self._reduced.clear()
            if device.type == "cuda":
                self._looked = torch.cuda.current_stream(device).record_event()
        if begins or backward == NO_BACKWARD:
            group.call_after_backward(self.end)
        if self._looked is not None:  # FSDP reduces on several streams
            torch.cuda.current_stream(device).wait_event(self._looked)
        self._reduced.update(followed)
        self._stored.update((each, list(present)) for each in followed)

    def catch_up(self) -> None:
        """Follow what was stored and is not followed yet, as where a backward has raised."""
        self.end(late=backward_under_way() != self._backward)

    @torch.no_grad()
    def end(self, late: bool = False) -> None:
        """All that was reduced has been stored (`Followed.follow`)."""
        stored, self._stored = self._stored, {}
        if self._backward != NO_BACKWARD:
            self._backward = None
        for each, present in stored.items():
            each.group.wait_until_stored()
            each.follow(present, late)
