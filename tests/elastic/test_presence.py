"""Who is known to be gone, by a clock of the test's own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fastreduce.elastic import presence
from fastreduce.elastic.generations import Generation, Meetings, Note, Stage
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

    def looks(times: int, every: int = 1) -> list[list[int]]:
        found = []
        for _ in range(times):
            clock[0] += every
            found.append(here.gone([here.id, other]))
        return found

    assert looks(4) == [[]] * 4  # it is silent from the first one on
    clock[0] += 100  # of which 5 count
    assert looks(4) == [[], [], [], [other]]
    store.set(f"beat {other}", "2")
    assert looks(11) == [[]] * 11
    store.set(f"beat {other}", "3")  # looks that take long are no pause
    assert looks(5, every=4) == [[], [], [], [other], [other]]
    here.leave()


def test_one_that_beats_and_does_not_come_is_left_out():
    """As one whose loop waits for something of the user's. It does not come in by itself; others do, between steps."""
    store, times = StoreClient(dist.HashStore(), 20.0), Times(timeout=0.2)
    first, second, third, stranger = (
        Presence(store, times, place, digest, "", lambda generation: None)
        for place, digest in enumerate(["alike", "alike", "alike", "another"])
    )
    meetings, before = Meetings(first), Generation(1, (first.id, second.id), {}, (), "alike")
    found = meetings.next(before, Note(3, Stage.UNDER_WAY))
    assert (found.members, found.out) == ((first.id,), (second.id,))
    found = meetings.next(found, Note(3, Stage.BETWEEN))
    assert (found.members, found.out) == ((first.id, third.id), (second.id,))
    for each in (first, second, third, stranger):
        each.leave()
