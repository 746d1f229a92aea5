"""Traces: what the files hold, against the format as it is documented, and that ranks' clocks are brought together."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, record_function

from fastreduce import SettingError
from fastreduce.cli import main as cli
from fastreduce.environment.variables import folder_asked_for
from fastreduce.reduction import clocks
from fastreduce.reduction.clocks import now
from fastreduce.reduction.telemetry import trace, trace_files
from fastreduce.reduction.telemetry.clock_offsets import Offset
from fastreduce.reduction.telemetry.trace_files import merge
from tests.support.models import grads_of, wrap
from tests.support.ranks import RankPool

SKEW = 0.05  # seconds by which rank 1's clock is ahead
ALIGNED = 100e-6
STEPS = 45  # clocks are compared in steps 0, 20 and later
STAGES = {
    "int8": ["ready", "compress", "wire stage 1", "sum", "wire stage 2", "decompress"],
    "none": ["ready", "compress", "wire", "decompress"],
}
PHASES = {"after averages", "optimizer", "data", "forward", "backward", "wait for averages"}
# Trace Event Format (Google, "Trace Event Format", 2016): which fields an event has, by its phase, and their types.
NUMBER = (int, float)
FIELDS: dict[str, dict[str, Any]] = {
    "X": {"name": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "ts": NUMBER, "s": str, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
METADATA: dict[str, dict[str, type]] = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
}


def _read(path: Path) -> list[dict[str, Any]]:
    """The events of a file that keeps to the format."""
    whole = json.loads(path.read_text())
    assert isinstance(whole["baseTimeNanoseconds"], int) and whole["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = whole["traceEvents"]
    for event in events:
        fields = FIELDS[event["ph"]]
        assert event.keys() == fields.keys() | {"ph"}, event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event.get("dur", 0) >= 0 and event.get("s", "t") == "t"
        if event["ph"] == "M":
            expected = METADATA[event["name"]]
            assert event["args"].keys() == expected.keys(), event
            assert all(isinstance(event["args"][name], kind) for name, kind in expected.items()), event
    return events


def _train(rank: int, world_size: int, folder: str, setting: str) -> tuple[Offset, list[Any]]:
    """With a clock that is ahead on rank 1; returns the offset found, and all gradients of a run without a trace."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(clocks, "now", lambda: now() + SKEW)
        seen = []
        for name in (folder, ""):
            torch.manual_seed(0)
            patch.setenv("FASTREDUCE_TRACE", name)
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
            ddp = wrap(
                "ours", model, compression=setting, bucket_cap_mb=0.03, find_unused_parameters=True, transport="gloo"
            )
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            for step in range(STEPS):
                optimizer.zero_grad()
                with ddp.no_sync() if step % 5 == 4 else contextlib.nullcontext():
                    ddp(torch.full((4, 64), float(rank + step))).square().mean().backward()
                optimizer.step()
            with ddp.join():
                for _ in range(3 + rank):
                    ddp(torch.ones(4, 64)).sum().backward()
            seen.append(grads_of(ddp.module))
            if name:
                assert ddp.reducer.trace is not None
                offset = ddp.reducer.trace.offset
            ddp.reducer.close()
        dist.barrier()
    return offset, seen


@pytest.mark.parametrize("setting", ["int8", pytest.param("none", marks=pytest.mark.long)])
def test_a_trace_of_two_ranks_whose_clocks_differ(ranks2: RankPool, tmp_path: Path, setting: str):
    """Beside no_sync, join and find_unused_parameters, and with the gradients' bits as without."""
    apart_by = ALIGNED
    for rank, (offset, (traced, untraced)) in enumerate(ranks2.run(_train, str(tmp_path), setting)):
        assert traced.keys() == untraced.keys()
        assert all(torch.equal(traced[name], untraced[name]) for name in traced)
        # On a busy machine no round trip may be so quick: then the bound that goes with the offset counts.
        assert offset.bound < SKEW / 10 and abs(offset.seconds - SKEW * rank) < max(ALIGNED, offset.bound), offset
        apart_by = max(apart_by, offset.bound)
    apart = [_read(tmp_path / f"rank{rank}.json") for rank in range(2)]
    events = _read(tmp_path / "trace.json")
    assert Counter(map(json.dumps, events)) == Counter(map(json.dumps, apart[0] + apart[1]))
    assert [event["pid"] for event in events] == [0] * len(apart[0]) + [1] * len(apart[1])

    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks.keys() == names.keys()
    for slices in tracks.values():  # one after the other, on each track, as doubles and as Perfetto's nanoseconds
        for a, b in itertools.pairwise(slices):
            assert a["ts"] + a["dur"] <= b["ts"], (a, b)
            assert int(a["ts"] * 1000) + int(a["dur"] * 1000) <= int(b["ts"] * 1000), (a, b)
    by_step = defaultdict(list)
    for (rank, tid), slices in tracks.items():
        for event in slices:
            by_step[rank, event["args"]["step"], names[rank, tid]].append(event)
    for rank in range(2):
        assert {event["name"] for event in by_step[rank, 30, "step"]} == PHASES
        assert [event["name"] for event in by_step[rank, 30, "bucket 1"]] == STAGES[setting]
    assert by_step[0, 30, "bucket 1"][0]["args"]["holds"].startswith(("3.", "2.", "1."))

    # Nothing arrives before it was sent.
    sends = STAGES[setting].index("compress")
    for step in range(1, STEPS // 5 * 4):
        mine, theirs = (by_step[rank, step, "bucket 0"] for rank in range(2))
        last = len(STAGES[setting]) - 2
        for one, other in ((mine, theirs), (theirs, mine)):
            sent = one[sends]["ts"] + one[sends]["dur"]
            assert other[last]["ts"] + other[last]["dur"] >= sent - 1e6 * apart_by, step


def test_what_is_left_of_a_killed_rank_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    head = '{"displayTimeUnit": "ms", "baseTimeNanoseconds": 0, "fastreduce": {"run": "%s"}, "traceEvents": [\n'
    event = '{"ph":"M","name":"thread_name","pid":%d,"tid":1,"args":{"name":"}}"}}'
    with pytest.raises(FileNotFoundError, match=r"holds no rank0\.json"):
        merge(tmp_path)
    (tmp_path / "rank7.json").write_text(head % "older" + event % 7 + "\n]}\n")
    (tmp_path / "rank0.json").write_text(head % "this" + event % 0 + "\n]}\n")
    (tmp_path / "rank1.json").write_text(head % "this" + event % 1 + ",\n" + (event % 1)[:-2])
    (tmp_path / "rank2.json").touch()  # of one that was killed before it wrote anything
    os.utime(tmp_path / "rank7.json", (0, 0))
    with pytest.raises(SystemExit) as end:
        cli(["trace", str(tmp_path)])
    assert end.value.code == 0 and "perfetto" in capsys.readouterr().out
    assert [event["pid"] for event in _read(tmp_path / "trace.json")] == [0, 1]
    (tmp_path / "rank2.json").write_text("something else")
    with pytest.raises(ValueError, match="no trace of fastreduce"):
        merge(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path):
    (tmp_path / "rank0.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"rank0\.json is no trace of fastreduce: "):
        merge(tmp_path)


def test_a_merge_that_fails_leaves_nothing_behind(tmp_path: Path):
    head = '{"displayTimeUnit": "ms", "baseTimeNanoseconds": 0, "fastreduce": {"run": "this"}, "traceEvents": [\n'
    (tmp_path / "rank0.json").write_text(head + "{}\n]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "_events", None)
        with pytest.raises(TypeError):
            merge(tmp_path)
    assert os.listdir(tmp_path) == ["rank0.json"]


def _beside_profiler(rank: int, world_size: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTREDUCE_TRACE", folder)
        ddp = wrap("ours", nn.Linear(64, 64))
        with profile() as profiler:
            for _ in range(3):
                output = ddp(torch.ones(4, 64))
                with record_function("ours waits"):
                    output.sum().backward()
        if not (child := os.fork()):  # a worker of a data loader, which ends as Python does
            ddp.reducer.trace.close()
            os._exit(0)
        os.waitpid(child, 0)
        ddp.reducer.close()
    if rank == 0:
        profiler.export_chrome_trace(f"{folder}/profile.json")
    dist.barrier()


def test_times_are_those_of_torchs_profiler(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_beside_profiler, str(tmp_path))
    theirs = json.loads((tmp_path / "profile.json").read_text())
    ours = json.loads((tmp_path / "rank0.json").read_text())
    assert ours["baseTimeNanoseconds"] == theirs["baseTimeNanoseconds"]
    around = [e for e in theirs["traceEvents"] if e.get("name") == "ours waits" and e.get("cat") == "user_annotation"]
    inside = [event for event in _read(tmp_path / "rank0.json") if event["name"] == "backward"]
    assert len(around) == len(inside) == 3
    for outer, inner in zip(around, inside, strict=True):  # to a tenth of a millisecond; backward begins inside
        assert outer["ts"] - 100 < inner["ts"] < inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"] + 100


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTREDUCE_TRACE", str(tmp_path / "file" / "in"))
    with pytest.raises(SettingError, match="FASTREDUCE_TRACE="):
        folder_asked_for("FASTREDUCE_TRACE")


def _beside_another(rank: int, world_size: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTREDUCE_TRACE", folder)
        ddp = wrap("ours", nn.Linear(4, 4))
    path = Path(folder) / f"rank{rank}.json"
    with path.open("wb") as other:
        other.write(b"older")
        ddp(torch.ones(2, 4)).sum().backward()
        other.write(b"more of another job")
    ddp.reducer.close()


def test_another_program_in_the_folder_ends_no_training(ranks2: RankPool, tmp_path: Path):
    (tmp_path / "rank9.json").write_text("")
    ranks2.run(_beside_another, str(tmp_path))
    for rank in range(2):
        assert _read(tmp_path / f"rank{rank}.json")


def _reduces_now_and_then(rank: int, world_size: int, folder: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTREDUCE_TRACE", folder)
        patch.setattr(trace, "MOST_PHASES", 40)
        ddp, most = wrap("ours", nn.Linear(2, 2)), 0
        for step in range(300):
            with ddp.no_sync() if step % 100 != 50 else contextlib.nullcontext():
                ddp(torch.ones(1, 2)).sum().backward()
            assert ddp.reducer.trace is not None
            most = max(most, len(ddp.reducer.trace._phases))
        ddp.reducer.close()
    return most


def test_steps_that_nobody_reduces_are_written_too_and_not_kept(ranks2: RankPool, tmp_path: Path):
    assert max(ranks2.run(_reduces_now_and_then, str(tmp_path))) <= 40
    forwards = [event["args"]["step"] for event in _read(tmp_path / "rank0.json") if event["name"] == "forward"]
    assert forwards == sorted(forwards) and set(forwards) == {0, 1, 2, 3}
    assert forwards.count(1) == forwards.count(2) == 100
