"""What other ranks and strangers write is data: nothing that they send is executed, and errors say who sent it."""

from __future__ import annotations

import ast
import contextlib
import datetime
import io
import json
import os
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import fastreduce.distributed as dist
from fastreduce import CheckpointError, DistributedDataParallel, TransportError, load_checkpoint, save_checkpoint
from fastreduce.distributed import values
from fastreduce.distributed.headers import NUMEL, Header
from fastreduce.transports import GlooTransport, ShmTransport, messages, store_client
from fastreduce.transports.messages import LIMIT, checked, decode, encode, gather_bytes, numbers, of_types
from fastreduce.transports.shm import connection
from fastreduce.transports.shm.segments import CannotShareError, Geometry, Segment
from tests.support.commands import ROOT
from tests.support.ranks import RankPool, message, run_ranks

PACKAGE = ROOT / "fastreduce"

# What can execute what it reads → where it may stand, and why.
READERS = {
    "pickle.loads": {"processes.py": "pipes between a process and the children that it has started itself"},
    "pickle.load": {"launcher.py": "multiprocessing's own pipe, from the process that started this one"},
    "torch.load(weights_only=True)": {"snapshot_file.py": "plain data and tensors"},
    "exec": {"worker.py": "the user's own script, which the command was given"},
}

LIBRARIES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "add_safe_globals"}
CALLS |= {"send_object_list", "recv_object_list", "irecv"}  # the last is mpi4py's


class Evil:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def evil(marker: Path | str) -> bytes:
    """Text in ASCII, so that it travels wherever texts do."""
    return re.sub(rb"[\x80-\xff]", lambda found: b"\\u%04x" % found[0][0], pickle.dumps(Evil(str(marker)), protocol=0))


def test_the_pickle_of_these_tests_runs_where_it_is_loaded(tmp_path: Path):
    pickle.loads(evil(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()


# What the source may call


def _calls(file: Path) -> list[str]:
    """Calls in a file that could execute what they read."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        first, last = name.split(".")[0], name.split(".")[-1]
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        if name == "torch.load" and options.get("weights_only") == "True":
            found.append("torch.load(weights_only=True)")
        elif (
            name in ("torch.load", "eval", "exec")
            or (first in ("np", "numpy") and options.get("allow_pickle", "False") != "False")
            or (first in LIBRARIES and last in ("load", "loads", "Unpickler"))
            or last in CALLS
        ):
            found.append(name)
    return found


def test_nothing_else_in_the_package_can_execute_what_it_reads():
    for file in PACKAGE.rglob("*.py"):
        for call in _calls(file):
            assert file.name in READERS.get(call, {}), f"{file}: {call}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
        "world.irecv()",
        "eval(x)",
    ],
)
def test_the_rule_catches_what_it_should(tmp_path: Path, source: str):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [call for call in _calls(file) if call not in READERS or file.name not in READERS[call]]


# Messages


@pytest.mark.parametrize("value", [None, True, -3, 1.5, "ü", [1, [2, "x"]], {"a": {"b": [None]}}, float("inf")])
def test_messages_come_as_they_went(value: Any):
    assert decode(encode(value), 0, lambda told: told) == value


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, {1, 2}, torch.ones(1), object(), [object()]])
def test_what_is_no_message_is_not_sent(value: Any):
    with pytest.raises(TypeError, match="a message with"):
        encode(value)


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"[" * 100_000, b"[1,", b"\xff\xfe", b"1" * 5000, pytest.param(None, id="pickle")]
)
def test_what_is_none_names_the_rank(tmp_path: Path, data: bytes | None):
    with pytest.raises(TransportError, match=r"rank 3 sent .* which is no message of fastreduce"):
        decode(evil(tmp_path / "ran") if data is None else data, 3, lambda told: told)
    assert not (tmp_path / "ran").exists()


def test_sizes_and_shapes_are_checked():
    with pytest.raises(TransportError, match=f"rank 1 sends a message of {LIMIT + 1} bytes"):
        gather_bytes(b"", lambda mine: [mine, torch.tensor([LIMIT + 1])])
    with pytest.raises(TransportError, match="rank 1 sends a message of -1 bytes"):
        gather_bytes(b"", lambda mine: [mine, torch.tensor([-1])])
    told: Any
    for told in ([0, 5], [0, 0], [-1], "01", [True], [1.0], None):
        with pytest.raises(TransportError, match="rank 1 is in another call: it sent no order of its parameters"):
            checked([[0], told], lambda value: numbers(value, 5), "order of its parameters")
    assert checked([[3, 1]], lambda value: numbers(value, 5), "order") == [[3, 1]]
    for told in (["x"], ["x", 1.5], None, {"x": 1}):
        with pytest.raises(ValueError, match="a list of str, int was expected"):
            of_types(told, str, int)


@pytest.mark.parametrize(
    "numbers",
    [
        [99],
        [-1],
        [0, 2],
        [0, 0, -1],
        [0, 0, 14],
        [0, 0, 1, -5],
        [0, 0, 1, 5, 7],
        [0, 0, 2, 1 << 40, 1 << 40],
        [0, 0, 99],
    ],
    ids=str,
)
def test_headers_are_checked(numbers: list[int]):
    encoded = torch.tensor(numbers + [0] * (NUMEL - len(numbers)))
    with pytest.raises(TransportError, match=r"remote_recv: rank 4 sent .* which is no shape and dtype"):
        Header.decode("remote_recv", 4, encoded)
    of = Header((3, 0, 2), torch.int64, True)
    assert Header.decode("", 0, of.encode(torch.device("cpu"))) == of


# Values of the key-value client


VALUES: list[Any] = [
    None,
    True,
    7,
    2.5,
    "text",
    b"\x00\xff",
    1 + 2j,
    [1, (2, "x")],
    {"a": {1: (2, 3)}, "set": {1, 2}},
    {values.KIND: "a key of ours"},
    torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    torch.empty(0, 3),
    torch.tensor(1.5),
    torch.tensor([1 + 1j]),
    np.arange(4, dtype=np.int16).reshape(2, 2),
    np.float32(1.5),
    np.str_(""),
    np.bytes_(b""),
    np.bytes_(b"ab\x00c"),
    np.complex128(1 + 2j),
    np.float64(0.1),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_values_come_as_they_went(value: Any):
    came = values.decode(values.encode(value))
    assert type(came) is type(value) and repr(came) == repr(value)


def test_other_values_are_refused_and_their_texts_too(tmp_path: Path):
    for value in (object(), Evil("x"), nn.Linear(1, 1), lambda: 0, np.array([object()]), [object()]):
        with pytest.raises(TypeError, match="cannot be given to other ranks by user_set; allowed: None, bools"):
            values.encode(value)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(
        TypeError, match=r"a list cannot be given .* by user_set: it is nested deeper than 100 levels, or"
    ):
        values.encode(endless)
    with pytest.raises(TypeError, match="a int cannot be given to other ranks by user_set: Exceeds the limit"):
        values.encode(10**5000)
    deep: Any = 1
    for _ in range(values.MOST_LEVELS):
        deep = (deep,)
    assert values.decode(values.encode(deep)) == deep
    bad = [
        "",
        "{",
        '{"kind of value": "object"}',
        '{"kind of value": "tensor", "dtype": "save", "shape": [], "data": ""}',
    ]
    bad += ['{"kind of value": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}', "[" * 100_000]
    for text in [*bad, evil(tmp_path / "ran").decode()]:
        with pytest.raises(ValueError):
            values.decode(text)
    assert not (tmp_path / "ran").exists()


# On real ranks: everything that rank 1 writes into the store, and everything that it sends, is a pickle


def _everything(rank: int, world_size: int, folder: str, where: str) -> dict[str, str]:
    """What rank 0 is told while rank 1 plants pickles; on rank 1 calls end as they may."""
    pickled = evil(f"{folder}/ran").decode()
    told: dict[str, str] = {}
    keys: set[str] = set()
    group: Any = torch_dist.new_group(timeout=SECONDS)

    def planted(function: Callable[..., Any]) -> Callable[..., Any]:
        def plant(self: Any, key: str, value: str) -> Any:
            keys.add(key)
            return function(self, key, pickled)

        return plant

    def attempt(name: str, call: Callable[[], Any]) -> None:
        told[name] = message(call)

    patches: list[Any] = []
    if rank == 1 and where == "messages":
        patches = [patch.object(messages, "encode", lambda value: pickled.encode())]
    elif rank == 1:
        for name in ("set", "append", "set_first"):
            original = getattr(store_client.StoreClient, name)
            patches.append(patch.object(store_client.StoreClient, name, planted(original)))
    model = nn.Linear(3, 3)
    with contextlib.ExitStack() as stack, patch.dict(os.environ, FASTREDUCE_DEBUG="1"):
        for planting in patches:
            stack.enter_context(planting)
        attempt("wrap", lambda: DistributedDataParallel(model, process_group=group))
        attempt("exchange", lambda: GlooTransport(group).exchange([1]))
        attempt("all_reduce", lambda: dist.all_reduce(torch.ones(2), group=group))
        attempt("all_to_all", lambda: dist.all_to_all([torch.ones(1)] * 2, [torch.ones(1)] * 2, group=group))
        attempt("barrier", lambda: dist.barrier(group, timeout=SECONDS))
        other = 1 - rank
        tensor = torch.ones(2)
        send = (lambda: dist.send(tensor, other, group)) if rank else (lambda: dist.recv(tensor, other, group))
        attempt("send", send)
        client = dist.get_client()
        if rank == 1:
            client.user_set("planted", 1)
            told["keys"] = " ".join(sorted(keys))
        else:
            attempt("client", lambda: client.user_get("planted"))
    return told


SECONDS = datetime.timedelta(seconds=20)


@pytest.mark.parametrize("where", ["messages", pytest.param("store", marks=pytest.mark.long)])
def test_a_rank_that_plants_pickles_runs_nothing_and_is_named(tmp_path: Path, where: str):
    first, second = run_ranks(_everything, 2, str(tmp_path), where, check_exit=False)
    assert not (tmp_path / "ran").exists(), first
    shown = {name: text for name, text in first.items() if "os\\nmkdir" in text or "posix" in text}
    if where == "messages":
        for name in ("wrap", "exchange"):
            assert "rank 1 sent b'cposix\\nmkdir" in first[name], first
    else:
        assert {"all_reduce", "all_to_all", "client"} <= set(shown), (first, second)
        assert all("rank 1 has cposix" in first[name] for name in ("all_reduce", "all_to_all"))
        assert "user_set" in first["client"]
        assert len(second["keys"].split()) >= 3, second


def _introduces(rank: int, world_size: int, text: str) -> str:
    """What a rank is told over shared memory where rank 1 introduces itself by `text`."""
    with contextlib.ExitStack() as stack:
        if rank == 1:
            other = SimpleNamespace(dumps=lambda _: text, loads=json.loads)
            stack.enter_context(patch.object(connection, "json", other))
        return message(lambda: ShmTransport(torch_dist.new_group()).exchange(rank))


@pytest.mark.parametrize(
    "text", ["{}", "no json", '["host", 7, "place"]', '["host", "name", "../../../tmp/elsewhere"]']
)
def test_a_rank_that_introduces_itself_otherwise_is_named(ranks2: RankPool, text: str):
    for rank, said in enumerate(ranks2.run(_introduces, text)):
        assert said.startswith(
            f"TransportError: rank {rank} of 2: connecting over shm failed. rank 1 sent {text[:40]!r}"
        )


# Readers of files


def test_readers_of_snapshots_run_nothing(tmp_path: Path):
    marker, path = tmp_path / "ran", tmp_path / "snapshot.pt"
    model = nn.Linear(2, 2)
    buffer = io.BytesIO()
    torch.save({"model": Evil(str(marker))}, buffer)
    for data in (buffer.getvalue(), evil(marker), pickletools.optimize(pickle.dumps(Evil(str(marker))))):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="truncated, corrupt or no snapshot"):
            load_checkpoint(path, model=model)
        Path(f"{path}.previous").write_bytes(data)  # whose tag the next one looks at
        path.unlink()
        save_checkpoint(path, model=model)
        assert not marker.exists()


def _planted_snapshot(rank: int, world_size: int, folder: str, what: str) -> str:
    """Rank 1 brings a pickle to a save or a load; what rank 0 is told."""
    from fastreduce.checkpoint import snapshot_file

    model, path = nn.Linear(2, 2), Path(folder, "snapshot.pt")
    if what == "load":
        save_checkpoint(path, model=model)
    buffer = io.BytesIO()
    torch.save(Evil(f"{folder}/ran"), buffer)
    bring = patch.object(snapshot_file, "dump", lambda value: buffer.getvalue())
    with bring if rank == 1 else contextlib.nullcontext():
        return message(lambda: (load_checkpoint if what == "load" else save_checkpoint)(path, model=model))


@pytest.mark.parametrize("what", ["save", "load"])
def test_ranks_of_a_snapshot_run_nothing(tmp_path: Path, ranks2: RankPool, what: str):
    for told in ranks2.run(_planted_snapshot, str(tmp_path), what):
        assert told.startswith("CheckpointError: rank 1, ") and "it sent no plain values" in told
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["shorter", "a link", "a folder", "a pipe", "of another rank"])
def test_only_the_segment_that_was_to_come_is_mapped(tmp_path: Path, kind: str):
    geometry, path, other = Geometry(cells=2, cell_bytes=4096), tmp_path / "segment", tmp_path / "other"
    before = len(os.listdir("/proc/self/fd"))
    made = Segment.make(other, 0 if kind == "of another rank" else 1, 2, geometry)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":
        path.symlink_to(other)
    else:
        other.rename(path)
    if kind == "shorter":
        os.truncate(path, geometry.nbytes - 4096)  # to touch what is missing would be SIGBUS
    with pytest.raises(CannotShareError):
        Segment.open(path, 1, 2, geometry)
    del made
    assert len(os.listdir("/proc/self/fd")) == before
