"""What all ranks do together when a snapshot is written or read: each learns of the others' values, and of errors."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment.signals import is_of_signal
from ..errors import CheckpointError, SettingError, TransportError
from ..reduction.telemetry.flight_recorder import all_recorders
from ..reduction.telemetry.watch import explain_elsewhere
from ..transports.messages import gather_bytes
from ..transports.ranks import check_process, group_device
from . import snapshot_file
from .snapshot_file import State

T = TypeVar("T")

CHUNK = 64 << 20
MOST = 1 << 40  # bytes of a file, and of what one rank brings to it


def this_rank() -> int:
    """In the default group; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Of the default group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_all(doing: str, function: Callable[[], T], exchange: bool = True, own: bool = False) -> list[T]:
    """What `function` returns on every rank (without `exchange`, here only); an error on one is an error on all.

    Where it raised, that is a CheckpointError too, but for what was given here, a failed transport, or what a signal's
    handler raised, and under `own`.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as found:
        error = found
    mine = (value if exchange else None, error and f"{type(error).__name__}: {error}")
    told: list[Any] = _exchange(mine, doing) if dist.is_initialized() else [mine]
    if error is not None and (own or isinstance(error, (SettingError, TransportError)) or is_of_signal(error)):
        raise error
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise CheckpointError(f"rank {rank}, {doing}: {text}") from error
    return [of for of, _ in told] if exchange else [value]  # type: ignore[list-item]


def _exchange(value: Any, doing: str) -> list[Any]:
    """Every rank's value, as a snapshot file holds it: plain data and tensors, nothing that executes."""
    check_process(f"rank {this_rank()} of {world_size()}, {doing}: it was called")
    told = []
    with _all_come(doing):
        gathered = gather_bytes(snapshot_file.dump(value), _gather, MOST)
    for rank, data in enumerate(gathered):
        try:
            told.append(snapshot_file.load(io.BytesIO(data), tuple))
            _, text = told[-1]
            if not isinstance(text, (str, NoneType)):
                raise TypeError(f"an error's text was expected, not {text!r:.80}")
        except Exception as error:
            raise CheckpointError(f"rank {rank}, {doing}: it sent no plain values: {error}") from error
    return told


@contextmanager
def _all_come(doing: str) -> Iterator[None]:
    """Around collectives of torch's, whose errors name neither the call nor who has to make it."""
    try:
        yield
    except TransportError:
        raise
    except RuntimeError as error:
        if is_of_signal(error):
            raise
        told = TransportError(
            f"rank {this_rank()} of {world_size()}, {doing}: {error}. Another rank has ended, is elsewhere, or did not "
            "come within the timeout: save_checkpoint and load_checkpoint are called by every rank, not by rank 0 alone"
        )
        of_all = [each for each in all_recorders() if each.world_size == world_size()]  # else they number ranks anew
        raise explain_elsewhere(told, of_all[-1] if of_all else None) from error


def _gather(mine: Tensor) -> list[Tensor]:
    device = _device()
    moved = mine.to(device)
    gathered = [torch.empty_like(moved) for _ in range(world_size())]
    dist.all_gather(gathered, moved)
    return [part.cpu() for part in gathered]


def _device() -> torch.device:
    """Where tensors that the default group moves are."""
    assert dist.group.WORLD is not None
    return group_device(dist.group.WORLD)


File = io.BufferedReader | io.BytesIO


def load_file(path: Path) -> State:
    """What rank 0 finds in the file, on every rank; the others hold the whole file beside it meanwhile."""
    snapshot, wrong = State(), None
    file: File = io.BytesIO()
    with ExitStack() as stack:
        if this_rank() == 0:
            try:
                opened = stack.enter_context(path.open("rb"))
                file = opened if opened.seekable() else io.BytesIO(opened.read())  # a pipe
                snapshot = snapshot_file.parse(file, path)
            except Exception as error:  # no memory, too, or a path that is none
                wrong = error
        size = _tell_size(file, wrong, path)
        if world_size() == 1:
            return snapshot
        whole, lost = _broadcast(file, size, path)

    def parse() -> State:
        if lost is not None:
            raise lost
        return snapshot if this_rank() == 0 else snapshot_file.parse(whole, path)

    return on_all(f"reading {path}", parse, exchange=False)[0]


def _tell_size(file: File, wrong: Exception | None, path: Path) -> int:
    """The bytes in rank 0's file, on every rank; or the error of what went `wrong` there."""
    size, number, text = 0 if wrong is not None else file.seek(0, os.SEEK_END), None, None
    if isinstance(wrong, OSError):
        number, text = wrong.errno, wrong.strerror or str(wrong)
    elif wrong is not None:
        where = "" if isinstance(wrong, CheckpointError) else f"rank 0, reading {path}: {type(wrong).__name__}: "
        text = f"{where}{wrong}"
    if world_size() > 1:
        (size, number), text = _exchange(((size, number), text), f"reading {path}")[0]
    if wrong is not None and is_of_signal(wrong):
        raise wrong
    if text is not None:
        raise CheckpointError(text) if number is None else OSError(number, text, str(path))
    return size


def _broadcast(file: File, size: int, path: Path) -> tuple[io.BytesIO, OSError | None]:
    """The bytes of rank 0's file, on the others; there an error in reading it, which is to be told."""

    def make_room() -> io.BytesIO:
        return io.BytesIO(bytes(size if this_rank() else min(CHUNK, size)))

    room, lost = on_all(f"reading {path}", make_room, exchange=False)[0], None
    parts = torch.frombuffer(room.getbuffer(), dtype=torch.uint8).split(CHUNK)
    file.seek(0)
    for start in range(0, size, CHUNK):
        part = parts[start // CHUNK] if this_rank() else parts[0][: size - start]
        if this_rank() == 0:
            try:
                file.readinto(part.numpy().data)
            except OSError as error:
                lost = error
        moved = part.to(_device())
        with _all_come(f"reading {path}"):
            dist.broadcast(moved, 0)
        if moved is not part:
            part.copy_(moved)
    return room, lost
