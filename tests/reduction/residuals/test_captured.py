"""Error feedback in CUDA graphs: what would be done once, and then again by every replay, is refused.

There is no GPU: what is asked of a device is whether a graph is captured, and that is answered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastreduce import Compression, note_applied
from fastreduce.errors import ReducerError
from fastreduce.reduction.residuals import error_feedback
from fastreduce.reduction.residuals.error_feedback import ErrorFeedback
from fastreduce.reduction.residuals.notices import multiplied
from fastreduce.transports import LocalTransport
from tests.support.bucket_pipelines import Buckets
from tests.support.models import batch

SHAPES = [(1000,), (300,), (1,)]
SETTINGS = ["int8:error_feedback", "int4:error_feedback=8bit", "topk:ratio=0.1,min_numel=1"]


class Trained:
    """One rank's bucket of three parameters, behind three steps of which each average was applied."""

    def __init__(self, setting: str) -> None:
        self._buckets = Buckets(LocalTransport(), Compression.parse(setting), SHAPES)
        (self._pipeline,) = self._buckets.pipelines
        self.parameters: list[nn.Parameter] = self._buckets.parameters
        feedback = self._pipeline.feedback
        assert feedback is not None
        self.feedback: ErrorFeedback = feedback
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        for step in range(3):
            self.reduce(step)
            self.unscale(0.125)
            self.optimizer.step()

    def reduce(self, step: int, followed: bool = True) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad = batch(i, step, len(parameter))
        grads: list[Tensor] = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        with torch.no_grad():
            self._pipeline.run(grads, grads)
        if followed:
            self._pipeline.follow(self.parameters, [])

    def unscale(self, by: float) -> None:
        """As a GradScaler does it."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        with multiplied(grads, lambda: by, expected=True):
            torch._foreach_mul_(grads, by)


def _applied(trained: Trained) -> None:
    trained.unscale(0.125)
    trained.optimizer.step()


def _told(factor: float) -> Callable[[Trained], None]:
    def tell(trained: Trained) -> None:
        trained.unscale(0.125)
        note_applied(trained.parameters, factor)

    return tell


def _under_another_scale(trained: Trained) -> None:
    trained.unscale(0.25)
    trained.optimizer.step()


def _clipped(trained: Trained) -> None:
    grads = [parameter.grad for parameter in trained.parameters if parameter.grad is not None]
    with multiplied(grads, lambda: 0.5):
        torch._foreach_mul_(grads, 0.5)
    _applied(trained)


def _thrown_away(trained: Trained) -> None:
    trained.optimizer.zero_grad()


def _accumulated(trained: Trained) -> None:
    """Averages are in `.grad` still."""


def _rescaled(trained: Trained) -> None:
    _applied(trained)
    trained.feedback.rescale(2.0)


def _summed_from_now_on(trained: Trained) -> None:
    trained.feedback.set_average_scale(1.0)
    _applied(trained)
    trained.feedback.set_average_scale(2.0)


REFUSED = {
    "under another loss scale": _under_another_scale,
    "clipped": _clipped,
    "applied in part, as told": _told(0.5),
    "thrown away, as told": _told(0.0),
    "thrown away": _thrown_away,
    "accumulated": _accumulated,
    "rescaled since": _rescaled,
    "another scale of averages since": _summed_from_now_on,
}


class _Operations(TorchDispatchMode):
    """What a graph would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def _captured() -> Any:
    return patch.object(error_feedback, "is_captured", lambda _: True)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("behind", REFUSED)
def test_what_every_replay_would_do_again_is_refused_and_nothing_is_lost(setting: str, behind: str):
    found = []
    for captured in (False, True):
        trained = Trained(setting)
        trained.reduce(3)
        REFUSED[behind](trained)
        trained.feedback.look()
        if captured:
            with _captured(), pytest.raises(ReducerError, match=r"CUDA graph.*Capture behind two steps"):
                trained.feedback.commit()
        trained.feedback.commit()
        found.append((trained.feedback.residual.clone(), trained.feedback.units_now()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_behind_a_reduction_whose_averages_were_not_stored_it_is_refused(setting: str):
    """Its backward raised: what it has turned is turned back once, or not at all."""
    trained = Trained(setting)
    trained.reduce(3, followed=False)
    with _captured(), pytest.raises(ReducerError, match="CUDA graph"):
        trained.feedback.commit()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("behind", [_applied, _told(1.0)], ids=["applied", "applied, as told"])
def test_what_is_captured_is_what_each_replay_needs(setting: str, behind: Callable[[Trained], None]):
    """Row `turn` changes where no kernel has changed it, and nothing else is in the graph."""
    found, names = [], []
    for captured in (False, True):
        trained = Trained(setting)
        for step in range(3, 6):
            trained.reduce(step)
            behind(trained)
            trained.feedback.look()
            if captured:
                with _captured(), _Operations() as operations:
                    trained.feedback.commit()
                names.append(operations.names)
            trained.feedback.commit()
        found.append((trained.feedback.residual.clone(), trained.feedback.units_now()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    turns = ["aten.bitwise_xor_.Scalar"] if setting.startswith("topk") else []
    assert names == [turns] * 3
