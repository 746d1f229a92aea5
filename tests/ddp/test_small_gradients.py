"""Gradients of very different sizes in one block: what fp8 is for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import tolerances
from tests.support.models import wrap


def _fit(setting: str) -> float:
    """The mean squared error of a regression at its end: 64 features, the last 1e-4 of the first, under Adam."""
    torch.manual_seed(0)
    size, wanted = 10 ** torch.linspace(0, -4, 64), torch.randn(64, 1) / 5
    model = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = wrap("ours", model, compression=setting)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.1), []
    for _ in range(1000):
        x = torch.randn(64, 64)
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(x * size), x @ wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-200:]) / 200


@pytest.mark.long
def test_fp8_trains_what_int8_cannot_see(alone: None):
    wanted = _fit("none")
    assert abs(_fit("fp8") - wanted) <= tolerances.SMALL_LOSS * wanted
    for setting in ("int8", "int8:error_feedback"):
        assert _fit(setting) > 1.1 * wanted, "small gradients are zero beside large ones"


@pytest.mark.long
def test_stochastic_rounding_sees_more_of_them_than_rounding_to_nearest(alone: None):
    """At its end a loss is above that of `none` by 11 % to nearest, and by 4 % by chance."""
    wanted, nearest, stochastic = (_fit(setting) for setting in ("none", "int4", "int4:rounding=stochastic"))
    assert stochastic - wanted < 0.6 * (nearest - wanted)
