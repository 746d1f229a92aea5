"""Who is known to be gone, by a clock of the test's own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fastreduce.elastic import presence
from fastreduce.elastic.presence import Presence
from fastreduce.elastic.times import Times
from fastreduce.environment.fates import introduction
from fastreduce.transports.store_client import StoreClient


def test_time_in_which_a_process_stood_still_is_no_silence_of_others(monkeypatch: pytest.MonkeyPatch):
    """As where a whole job is suspended, and its processes go on one after the other."""
    clock, store = [0.0], StoreClient(dist.HashStore(), 20.0)
    monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    here = Presence(store, Times(timeout=10.0), 0, "digest", "", lambda generation: None)
    other = here.id + 1
    store.set(f"beat {other}", "1")
    store.set(f"process {other}", json.dumps([1, "host", "digest", "", introduction()]))

    def looks(seconds: int) -> list[list[int]]:
        found = []
        for _ in range(seconds):
            clock[0] += 1
            found.append(here.gone([here.id, other]))
        return found

    assert looks(4) == [[]] * 4  # it is silent from the first one on
    clock[0] += 100
    assert looks(6) == [[]] * 6
    assert looks(3)[-1] == [other]
    store.set(f"beat {other}", "2")
    assert looks(11) == [[]] * 11
    here.leave()
