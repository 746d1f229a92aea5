"""How many steps had an average that was not finite: counted where compression shows it, and reported once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..pipeline import BucketPipeline
from ..residuals.rows import reads_late

logger = logging.getLogger(__name__)


class NonFiniteSteps:
    """Counts steps with a NaN or an infinity in an average, on the devices where the averages are.

    Kernels that decompress tell it. Where averages stay in the wire, in the gradients' own dtype, nobody looks. No host
    waits for a device: what that has counted is reported a step or more later.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}
        self._copies: dict[torch.device, Tensor] = {}
        self._host = 0
        self._reported = False

    def count(self, pipelines: Sequence[BucketPipeline], rank: int) -> None:
        """Take note of one step."""
        known = [pipeline for pipeline in pipelines if pipeline.finite is not None]
        bad = [pipeline for pipeline in known if not reads_late(pipeline.verdicts) and not pipeline.finite]
        late = list({each.verdicts.device: each.verdicts for each in known if reads_late(each.verdicts)}.values())
        if not late:
            self._host += bool(bad)
        else:
            self._count_on(late[0].device, late, bool(bad))
        if not self._reported and (bad or any(self._copies.values())):
            self._reported = True
            logger.warning(
                "rank %d: averaged gradients are not finite for the first time%s They arrive so on every rank. Such "
                "steps are counted in ddp.reducer.nonfinite_steps, and not reported again.",
                rank,
                f". {bad[0].about}" if bad else ".",
            )

    def _count_on(self, device: torch.device, late: Sequence[Tensor], bad: bool) -> None:
        """Count a step once, by the verdicts of all devices and what the host has seen."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), dtype=torch.int64, device=device)
            self._copies[device] = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        if bad:
            self._counts[device].add_(1)
        else:
            found = (late[0] == 0).any()
            for verdicts in late[1:]:
                found |= (verdicts == 0).any().to(device, non_blocking=True)
            self._counts[device].add_(found)
        self._copies[device].copy_(self._counts[device], non_blocking=True)

    @property
    def total(self) -> int:
        """Steps so far; waits for the devices."""
        return self._host + sum(int(count) for count in self._counts.values())
