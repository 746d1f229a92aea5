"""The environment as it was, and a script with a module beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support.run_scripts import SCRIPT


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was, since the commands change their process's."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path
