"""Settings for `parametrize`: those that `make test` leaves to `make test-all` are `long`."""

from __future__ import annotations

import pytest

from .models import SETTINGS

PICKED = {"none", "fp16", "bf16:accumulate=wire", "int8:error_feedback", "int4"}
"""Together they take every way through compress, reduce and decompress."""
EACH_SETTING = [name if name in PICKED else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS]
EACH_COMPRESSION = EACH_SETTING[2:]  # without none's
