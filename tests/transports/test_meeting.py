"""Meetings of ranks in a store."""

from __future__ import annotations

import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fastreduce import TransportError
from fastreduce.transports import meeting, store_client
from fastreduce.transports.deadlines import in_background
from fastreduce.transports.meeting import (
    AbsentError,
    clear,
    look_for,
    meet,
    new_place,
    notes,
    until_cleared,
    wait_until,
)
from fastreduce.transports.ranks import client_of
from fastreduce.transports.store_client import StoreClient
from tests.support.ranks import RankPool


def _meet_often(rank: int, world_size: int, times: int) -> list[list[str]]:
    """One after the other under one name; a rank may be slow to read."""
    group = dist.new_group()
    store, ranks, found = client_of(group).at("often"), range(world_size), []
    slow = random.Random(rank)
    for number in range(times):
        until_cleared(store, 20.0)
        meet(store, rank, ranks, 20.0, f"{number} of {rank}")
        time.sleep(slow.choice([0.0, 0.0, 0.003]))
        found.append(notes(store, ranks))
        clear(store, ranks)
    return found


def test_the_next_meeting_begins_when_everybody_has_read_what_the_last_one_brought(ranks3: RankPool):
    expected = [[f"{number} of {rank}" for rank in range(3)] for number in range(100)]
    assert ranks3.run(_meet_often, len(expected)) == [expected] * 3


def test_who_is_interrupted_while_it_waits_is_counted_once_when_it_comes_again():
    store = StoreClient(dist.HashStore(), 20.0).at("interrupted")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        meet(store, 0, range(2), 20.0, look=interrupted)
    with pytest.raises(AbsentError, match="rank 1 did not come"):
        meet(store, 0, range(2), 0.1)


def _in_a_meeting(store: StoreClient, rank: int) -> None:
    meet(store.at("named"), rank, range(3), 20.0)


def _in_a_place(store: StoreClient, rank: int) -> None:
    new_place(store, rank, 3, 20.0)


@pytest.mark.parametrize(
    ("late", "come"),
    [
        (0, _in_a_meeting),
        pytest.param(1, _in_a_place, marks=pytest.mark.long),
        pytest.param(0, _in_a_place, marks=pytest.mark.long),
        pytest.param(1, _in_a_meeting, marks=pytest.mark.long),
    ],
)
def test_while_a_rank_does_not_come_the_first_of_the_others_says_so(
    come: Callable[[StoreClient, int], None],
    late: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(meeting, "SAY_SECONDS", 1.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    others = [rank for rank in range(3) if rank != late]
    with ThreadPoolExecutor(3) as threads:
        coming = [threads.submit(come, StoreClient(store, 20.0), rank) for rank in others]
        time.sleep(3.5)
        coming.append(threads.submit(come, StoreClient(store, 20.0), late))
        for each in coming:
            each.result(20.0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines  # after one second and after two
    for line in lines:
        assert line.startswith(f"rank {others[0]} has waited ") and f" s for rank {late} (line " in line
        assert f" of {__file__}, in {come.__name__}), and waits up to 20 s" in line


def test_who_has_done_its_part_may_have_ended():
    """The last one comes, and its process ends, between two looks: nobody is missing."""
    store = StoreClient(dist.HashStore(), 20.0).at("ended")

    def came_and_ended() -> None:
        meet(store, 1, range(2), 20.0)
        raise AbsentError([1])

    meet(store, 0, range(2), 20.0, look=came_and_ended)


def test_who_ends_in_a_meeting_that_it_has_come_to_is_not_waited_for():
    store = StoreClient(dist.HashStore(), 20.0).at("came")
    with pytest.raises(AbsentError, match="rank 0, 2 did not come"):
        meet(store, 1, range(3), 0.1)
    store.delete("gone 1")  # as if it had been killed while it waited
    store.add("count", 1)
    looks = []

    def gone() -> None:
        if looks:
            meet(store, 2, range(3), 20.0)
        looks.append(1)
        raise AbsentError([1])

    meet(store, 0, range(3), 20.0, look=gone)


def test_a_store_that_answers_late_makes_nobody_missing():
    """Who has done its part, and ended, was named where the store took more than a second to say so."""
    store, looks = StoreClient(dist.HashStore(), 20.0).at("late"), list[int]()

    def done(client: StoreClient) -> bool:
        if looks:
            client.call(lambda _: time.sleep(1.5))
        return bool(looks)

    def ended() -> list[int]:
        looks.append(1)
        return looks

    assert wait_until(store, done, 20.0, look_for(ended))


def test_who_has_left_since_it_found_another_gone_is_not_named_beside_it():
    store = StoreClient(dist.HashStore(), 20.0).at("left")

    def gone() -> None:
        raise AbsentError([1, 2])

    for rank in (2, 0):
        with pytest.raises(AbsentError, match="is gone") as raised:
            meet(store, rank, range(3), 20.0, look=gone)
        assert list(raised.value.missing) == [1]
    store.set("complete", "")  # a meeting that one of them has not left
    with pytest.raises(AbsentError, match="rank 1, 2 is gone"):
        until_cleared(store, 20.0, gone)


def test_a_connection_is_told_from_what_other_threads_open_meanwhile():
    """A pair of sockets, as of a data loader: its peers have no port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    opened: list[socket.socket] = []

    class Beside:
        port = store.port

        def clone(self) -> Any:
            opened.extend(socket.socketpair())
            return store.clone()  # type: ignore[attr-defined]

    made: Any = Beside()
    client = StoreClient(made, 20.0)
    try:
        client.set("here", "text")
        found = client._caller._line._socket
        assert found is not None
        assert found.getpeername()[1] == store.port
    finally:
        client._caller._line.end()
        for each in opened:
            each.close()
    with pytest.raises(TransportError, match="this process is ending"):
        client.read("here")  # nobody would answer


def test_a_holder_that_has_ended_is_told_without_what_torch_logs_of_it(capfd: pytest.CaptureFixture[str]):
    """A rank says its last word to a store whose holder has ended before it, as scripts do, one after the other."""
    holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = StoreClient(dist.TCPStore("127.0.0.1", holder.port), 20.0)
    client.set("key", "value")
    del holder
    for _ in range(3):  # torch sends the first, and the next is a broken pipe
        with pytest.raises(TransportError, match="the store is gone, and with it"):
            client.set("key", "other")
    assert capfd.readouterr().err == ""


class _Own(dist.Store):
    """A store of the user's, of the methods that torch's own groups need; a read writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def deleteKey(self, key: str) -> bool:  # as torch's groups call it
        return self.values.pop(key, None) is not None


def test_a_holder_that_was_killed_while_it_was_asked_has_ended():
    """The connection is reset then, not closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine: list[socket.socket] = []

        class Holder:
            port = server.getsockname()[1]

            def clone(self) -> _Own:
                mine.append(socket.create_connection(("127.0.0.1", self.port)))
                return _Own()

        held: Any = Holder()
        client = StoreClient(held, 20.0)
        client.set("key", "value")
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
    with pytest.raises(TransportError, match="the store is gone, and with it"):
        client.set("key", "other")
    mine[0].close()


def test_what_ends_as_garbage_on_the_stores_thread_is_answered_there():
    client, said = StoreClient(dist.HashStore(), 5.0), list[str | None]()

    class Ends:
        def __del__(self) -> None:
            said.append(client.read("key"))

    client.set("key", "value")
    client.call(lambda store: Ends() and None)
    assert said == ["value"]


def test_what_ends_as_garbage_while_the_stores_thread_is_made_is_answered(monkeypatch: pytest.MonkeyPatch):
    client, said = StoreClient(dist.HashStore(), 5.0), list[str | None]()

    class Thread(threading.Thread):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.name == "fastreduce-store" and not said:
                said.append("asked")
                said.append(client.read("key"))

    monkeypatch.setattr(threading, "Thread", Thread)
    in_background(lambda: client.set("key", "value"), 20.0)
    assert said == ["asked", None] and client.read("key") == "value"


def test_what_asks_while_the_stores_thread_starts_is_answered(monkeypatch: pytest.MonkeyPatch):
    """A signal's handler, or what ends as garbage: the one that is to start the thread goes on behind it only."""
    client, said, threads = StoreClient(dist.HashStore(), 5.0), list[str | None](), list[threading.Thread]()

    class Thread(threading.Thread):
        def start(self) -> None:
            if self.name == "fastreduce-store":
                threads.append(self)
                if len(threads) == 1:
                    said.append(client.read("key"))
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    in_background(lambda: client.set("key", "value"), 20.0)
    late, first = threads
    late.join(20.0)
    assert said == [None] and client.read("key") == "value" and first.is_alive() and not late.is_alive()


def test_a_call_that_is_taken_back_as_the_thread_comes_to_it_leaves_no_silence(monkeypatch: pytest.MonkeyPatch):
    """Or all later ones, which it lets nobody make, raised until the process ends, though the store answers."""
    client, free = StoreClient(dist.HashStore(), 20.0), threading.Event()

    class Taken(Future[Any]):
        def cancel(self) -> bool:
            cancelled = super().cancel()
            free.set()
            client.call(lambda store: None)
            return cancelled

    client.set("key", "value")
    busy = threading.Thread(target=client.call, args=(lambda store: free.wait(),))
    busy.start()
    hasty = client.at("", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(store_client, "Future", Taken)
        with pytest.raises(TransportError, match=r"does not answer within 0\.1 s"):
            hasty.read("key")
    busy.join()
    time.sleep(0.1)
    assert hasty.read("key") == "value"


def test_a_signal_while_the_store_is_asked_is_no_silence_of_its_holder():
    def late(*_: Any) -> None:
        raise TimeoutError("the user's")

    client, before = StoreClient(dist.HashStore(), 20.0), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeoutError, match="the user's"):
            client.call(lambda store: time.sleep(0.3))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.read("key") is None


@pytest.mark.long
def test_a_users_own_store_need_not_compare():
    own = _Own()
    store = StoreClient(own, 5.0).at("here")
    assert store.read("key") is None and not store.has("key") and store.absent(["key"]) == [0]
    store.set("key", "")
    assert store.read("key") == "" and store.has("key") and store.read_each(["key", "no"]) == ["", None]
    meet(store.at("meeting"), 0, [0], 5.0, "note")
    assert notes(store.at("meeting"), [0]) == ["note"]


@pytest.mark.long
def test_an_error_of_the_stores_own_timeout_is_a_transport_error():
    own = _Own()
    with patch.object(own, "set", side_effect=TimeoutError("asleep")), pytest.raises(TransportError, match="answer"):
        StoreClient(own, 5.0).set("key", "value")
