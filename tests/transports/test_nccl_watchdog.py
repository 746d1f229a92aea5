"""What the thread that watches NCCL's communicators asks of CUDA, without a GPU."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fastreduce.transports.nccl import library
from tests.support import nccl_cases
from tests.support.ranks import run_ranks


def test_a_watchdog_has_a_context_when_it_asks_the_driver_for_a_capture_mode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """torch's `set_device` gives a thread none for the GPU that is its current one anyway."""
    contexts: list[torch.device] = []
    modes, refuses = [], [False]

    def give_a_context(device: torch.device) -> tuple[int, int]:
        contexts.append(device)
        return 0, 0

    def exchange(mode: Any) -> int:
        if refuses[0] or not contexts:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        modes.append(mode._obj.value)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", give_a_context)
    library.Cuda().enter_watchdog(torch.device("cuda", 0))
    assert modes == [1] and not caplog.records
    refuses[0] = True
    library.Cuda().enter_watchdog(torch.device("cuda", 0))
    assert "NCCL's watchdog on cuda:0: the driver refuses its thread a capture mode" in caplog.text


def test_a_process_ends_behind_communicators_whose_group_is_gone(tmp_path: Path):
    """A thread that comes back from C++ when Python has gone aborts the process: seen on a GPU."""
    place = nccl_cases.OnHost(str(tmp_path))
    run_ranks(nccl_cases.run_case, 1, nccl_cases.lets_go_of_what_has_not_ended, place, 2.0)
    assert (tmp_path / "ended").exists()
