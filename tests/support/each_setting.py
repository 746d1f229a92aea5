"""Settings for `parametrize`: those that `make test` leaves to `make test-all` are `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from .models import SETTINGS, TWO_SHOT

PICKED = {"none", "fp16", "bf16:accumulate=wire", "int8:error_feedback", "int4"}
"""Together they take every way through compress, reduce and decompress."""


def _each(settings: Iterable[str]) -> list[Any]:
    return [name if name in PICKED else pytest.param(name, marks=pytest.mark.long) for name in settings]


EACH_SETTING, EACH_TWO_SHOT = _each(SETTINGS), _each(TWO_SHOT)
EACH_COMPRESSION = EACH_SETTING[2:]  # without none's
