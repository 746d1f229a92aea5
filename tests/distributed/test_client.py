"""The key-value client: each value is popped once, and what the store cannot take does not end the connection to it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

import fastreduce.distributed as dist
from fastreduce import TransportError
from fastreduce.distributed.client import Client
from fastreduce.transports.store_client import MOST_BYTES, MOST_KEY_BYTES, StoreClient
from tests.support.ranks import RankPool


def _held() -> torch_dist.TCPStore:
    return torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_each_value_is_popped_by_one(group_of_one: None):
    held, popped = _held(), list[int]()
    setting, *popping = [Client(StoreClient(held, 20.0), 20.0) for _ in range(3)]  # a connection each
    came = threading.Semaphore(0)

    def pop(client: Client) -> None:
        while (value := client.user_pop("job")) >= 0:
            popped.append(value)
            came.release()

    threads = [threading.Thread(target=pop, args=(client,), daemon=True) for client in popping]
    for thread in threads:
        thread.start()
    for value in [*range(200), -1, -1]:
        setting.user_set("job", value)
        if value >= 0:
            assert came.acquire(timeout=20)
        else:
            while setting._store.has("job"):
                pass
    for thread in threads:
        thread.join(20)
    assert popped == list(range(200))


def test_what_was_popped_is_gone_and_can_be_set_again(group_of_one: None):
    client = Client(StoreClient(_held(), 0.3), 0.3)
    for value in ("first", "second"):
        client.user_set("key", value)
        assert client.user_get("key") == client.user_pop("key") == value
        for gone in (client.user_get, client.user_pop):
            with pytest.raises(TransportError, match="on rank 0: no rank has set 'key' within"):
                gone("key")


def _too_large(rank: int, world_size: int) -> list[str]:
    client, said = dist.get_client(), []
    calls = {
        "value": lambda: client.user_set("large", "x" * MOST_BYTES),
        "set": lambda: client.user_set("k" * MOST_KEY_BYTES, 1),
        "get": lambda: client.user_get("k" * MOST_KEY_BYTES),
        "pop": lambda: client.user_pop("k" * MOST_KEY_BYTES),
    }
    for name, call in calls.items():
        with pytest.raises(TransportError, match="allowed: up to ") as caught:
            call()
        said.append(str(caught.value))
        client.user_set(f"{name} by {rank}", "still works")
        assert client.user_get(f"{name} by {1 - rank}") == "still works"
    largest = "x" * (MOST_BYTES - 2), "k" * (MOST_KEY_BYTES - 100 - rank)
    client.user_set(largest[1], largest[0])
    assert client.user_pop(largest[1]) == largest[0]
    return said


def test_what_torchs_store_would_hang_up_on_is_refused_and_the_next_call_works(ranks2: RankPool):
    said, _ = ranks2.run(_too_large)
    assert said[0] == f"{MOST_BYTES + 2} bytes for the store at 'large'; allowed: up to {MOST_BYTES}"
    for text in said[1:]:
        assert f"a key of {MOST_KEY_BYTES + 18} bytes, 'kkkk" in text
        assert text.endswith(f" …; allowed: up to {MOST_KEY_BYTES}")
    assert [text.split(" ")[0] for text in said[2:]] == ["user_get", "user_pop"]


def test_a_key_that_is_deleted_while_it_is_read_holds_nobody_up():
    held, over = _held(), threading.Event()
    writing, reading = (StoreClient(held, 5.0) for _ in range(2))

    def write() -> None:
        while not over.is_set():
            writing.set("key", "value")
            writing.delete("key")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    found = {reading.read("key") for _ in range(2000)}
    over.set()
    thread.join(20)
    assert found == {None, "value"}
