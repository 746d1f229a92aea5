"""Snapshots of a training: written whole or not at all, and resumed bit for bit."""

from __future__ import annotations

import glob
import logging
import os
import re
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..errors import CheckpointError, SettingError, TransportError, brief
from ..reduction.reducer import GradientReducer
from ..reduction.residuals.notices import is_optimized, know_optimized
from ..reduction.telemetry.watch import in_other_call
from . import random_states, snapshot_file
from .parts import load_into, refuse_sharded, state_of
from .ranks import load_file, on_all, this_rank, world_size
from .snapshot_file import OURS, State

FilePath = str | os.PathLike[str]

ANY_TAG = "[0-9a-f]" * 8  # as a glob and as a regular expression
RESIDUALS = ("residuals", "shard_residuals", "units")

logger = logging.getLogger(__name__)


def save_checkpoint(path: FilePath, /, **parts: Any) -> None:
    """Write a snapshot of a training; every rank calls it, between two steps.

    What has a `state_dict` is saved by it, other values (numbers, strings, tensors, lists and dicts of them) as they
    are. Of a wrapped model it is the state of the module inside, so `torch.load(path)["model"]` loads into that
    without us. Beside the parts, a snapshot has the random states of all ranks (Python, NumPy, torch, this rank's
    CUDA device) and the layout of buckets.

    Rank 0 writes: a new file, which then takes the name `path`, where there is a whole one at any time. The one
    before stays as `path` + ".previous". Under error feedback each rank writes its residuals beside it, into
    `path`.TAG.rankR. Folders are created. Where `path` is a symbolic link, the files are where it leads. On return
    everything is on disk. Two jobs need two paths: each would delete what the other one writes. Under
    `elastic=True` the first of the members writes, for itself, and what others keep is not in it.

    Args:
        path: the file.
        **parts: `model=ddp, optimizer=optimizer, scaler=scaler, epoch=epoch`, or any other names.

    Raises:
        SettingError: if a part is called `fastreduce`, or `path` names no file, or a folder or device; on the others a
            CheckpointError.
        CheckpointError: on every rank, if one could not write, if a part is sharded, or if a value is of a type that
            `torch.load(weights_only=True)` refuses. What was on disk is still there.
        TransportError: if another rank does not call it within the timeout of the default group, or has ended; under
            `elastic=True` if the others have gone on without this process. What was on disk is still there.
    """
    if _is_elastic(parts) and any(reducer.transport.rank for reducer in _reducers(parts).values()):
        return  # parameters are the same on all members: the first one writes
    _drop_broken_backwards(parts)
    states: State = {}
    reducers: dict[str, State] = {}

    def collect() -> tuple[str, State, bool]:
        if OURS in parts:
            raise SettingError(f"a part of a snapshot cannot be called {OURS!r}")
        snapshot_file.check_name(path)
        states.update({name: state_of(part) for name, part in parts.items() if not isinstance(part, GradientReducer)})
        for name, state in states.items():
            refuse_sharded(name, state)
        reducers.update({name: reducer.state_dict() for name, reducer in _reducers(parts).items()})
        layouts = {name: {k: v for k, v in state.items() if k not in RESIDUALS} for name, state in reducers.items()}
        for layout in layouts.values():
            if this_rank():  # the same on every rank
                for same in ("buckets", "orders", "settings", "factors"):
                    del layout[same]
        kept = any(state["residuals"] for state in reducers.values())
        return secrets.token_hex(4), {"random": random_states.take(), "reducers": layouts}, kept

    with in_other_call(reducer.recorder for reducer in _reducers(parts).values()):
        collected = on_all(f"collecting {path}", collect)
    path = snapshot_file.target_of(Path(path))
    tag = collected[0][0]
    if not re.fullmatch(ANY_TAG, tag):
        raise CheckpointError(f"rank 0, collecting {path}: it sent the tag {tag!r:.40}")

    with_residuals = any(kept for *_, kept in collected)  # not every rank need have some
    beside = path.with_name(f"{path.name}.{tag}.rank{this_rank()}")

    def write_residuals() -> None:
        tensors = {name: {key: state[key] for key in RESIDUALS} for name, state in reducers.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        if with_residuals:
            snapshot_file.write({**tensors, OURS: tag}, beside)

    ours = {
        "tag": tag if with_residuals else None,
        "ranks": [state for _, state, _ in collected],
        "optimized": {name: _optimized(reducer) for name, reducer in _reducers(parts).items()},
    }

    def check_members() -> None:
        for reducer in _reducers(parts).values():
            reducer.check_member()

    def write_snapshot() -> list[str]:
        if this_rank():
            return []
        check_members()  # else what is left behind may be what another one writes
        for left_behind in path.parent.glob(f"{glob.escape(path.name)}.{ANY_TAG}.unfinished"):
            left_behind.unlink()
        unfinished = path.with_name(f"{path.name}.{tag}.unfinished")
        snapshot_file.write({**states, OURS: ours}, unfinished)
        try:
            check_members()
            snapshot_file.put_in_place(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        return [str(ours["tag"]), str(snapshot_file.tag_of(snapshot_file.previous_of(path)))]

    try:
        on_all(f"writing residuals beside {path}", write_residuals)
        kept = on_all(f"writing {path}", write_snapshot)[0]
    except (CheckpointError, TransportError) as error:
        # Told by all: rank 0 has put the snapshot in place, or will not. Not where others have not told.
        if (isinstance(error, CheckpointError) or _is_elastic(parts)) and snapshot_file.tag_of(path) != tag:
            with suppress(OSError):  # it may not be there
                beside.unlink()
        raise
    for file in path.parent.glob(f"{glob.escape(path.name)}.{ANY_TAG}.rank*"):
        if file.name.split(".")[-2] not in kept:
            file.unlink(missing_ok=True)


def load_checkpoint(path: FilePath, /, *, rng: bool = True, **parts: Any) -> State:
    """Load a snapshot into `parts`; every rank calls it, after wrapping the model.

    Rank 0 reads the file and sends it to the others. At the world size of the snapshot training then goes on bit
    for bit. At another, every rank gets the mean of the residuals, and keeps its own random states. Where the wrapper
    averages other parameters than the one that was saved (one is frozen, say), residuals, buckets and the schedule are
    left out, all of them, with a warning in the log.

    The schedule of settings goes on too, with what `set_compression` had set. A model that was wrapped under another
    setting than the one that was saved goes on under its own, and what error feedback kept moves along, by the rule of
    `set_compression`.

    Files that `torch.save` wrote load as well: a dict with these parts, or the state dict of one module, with or
    without the prefix of a wrapper. Only tensors and plain values are read (`weights_only`).

    Args:
        path: the file; with ".previous", the snapshot before it.
        rng: whether random states are restored.
        **parts: what to load, under the names that it was saved under; None is left alone.

    Returns:
        The rest of what was saved: `load_checkpoint(path, model=ddp)["epoch"]`.

    Raises:
        SettingError: if a part cannot load a state, or `path` is none, or a callable that `set_compression` had set is
            not there; on the others a CheckpointError. Nothing has been loaded then.
        Exception: what a part's `load_state_dict` raised here; on the others a CheckpointError. Parts before it have
            been loaded.
        OSError: on every rank, if rank 0 cannot read the file: FileNotFoundError where it is not there,
            IsADirectoryError where that is a folder.
        CheckpointError: on every rank, if the file or a residual file is truncated, corrupt or not there, or a
            part is not in it, or only what one rank had of a sharded one. Nothing has been loaded then.
        TransportError: if another rank does not call it within the timeout of the default group, or has ended.
    """
    parts = {name: part for name, part in parts.items() if part is not None}

    def check_given() -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise SettingError(f"path={brief(path)}: allowed: a string or a path, and parts by name, such as model=ddp")
        for name, part in parts.items():
            if isinstance(part, type) or not hasattr(part, "load_state_dict"):
                raise SettingError(f"{name}={part!r} cannot load a state; what else was saved is returned")

    _drop_broken_backwards(parts)
    with in_other_call(reducer.recorder for reducer in _reducers(parts).values()):
        on_all(f"reading {path}", check_given)  # not every rank need have been given the same
    path = snapshot_file.found_at(Path(path))
    snapshot = load_file(path)
    ours: State = snapshot.pop(OURS, {"tag": None, "ranks": []})
    wanted = {name: part for name, part in parts.items() if not isinstance(part, GradientReducer)}
    if len(wanted) == 1 and snapshot and all(isinstance(value, Tensor) for value in snapshot.values()):
        snapshot = dict.fromkeys(wanted, snapshot)  # a module's own state dict

    def look_for_parts() -> None:
        for name in wanted:
            if name not in snapshot:
                raise CheckpointError(f"{path} has no part {name!r}; it has {', '.join(map(repr, snapshot))}")
            refuse_sharded(f"{path}: {name}", snapshot[name])

    on_all(f"reading {path}", look_for_parts)  # not every rank need load the same
    reducers = _reducers(parts)
    states = on_all(f"reading residuals beside {path}", lambda: _reducer_states(path, ours, reducers), exchange=False)

    def look_at_schedules() -> None:
        for name, (state, *_) in states[0].items():
            reducers[name].schedule_of(state)

    on_all(f"reading {path}", look_at_schedules)
    optimized = on_all(f"reading {path}", lambda: _checked_names(ours), exchange=False)[0]
    for reducer in reducers.values():
        reducer.restore_precision()  # else the next backward would put back what was there before

    def load_parts() -> None:
        for name, part in wanted.items():
            load_into(part, snapshot.pop(name))

    on_all(f"loading {path}", load_parts, own=True)
    for name, state in states[0].items():
        try:
            reducers[name].load_state_dict(state)
        except SettingError as error:
            logger.warning("%s: residuals, buckets and schedule of %r are not loaded: %s", path, name, error)
    for name, reducer in reducers.items():
        _know_optimized(reducer, optimized.get(name, ()), wanted)
    if rng and len(ours["ranks"]) == world_size() and not _is_elastic(parts):  # else all would draw alike
        random_states.put_back(ours["ranks"][this_rank()]["random"])
    return snapshot


def _reducers(parts: Mapping[str, Any]) -> dict[str, GradientReducer]:
    found = {}
    for name, part in parts.items():
        part = getattr(part, "_orig_mod", part)
        part = part.reducer if isinstance(part, TorchDDP) else part
        if isinstance(part, GradientReducer):
            found[name] = part
    return found


def _optimized(reducer: GradientReducer) -> list[str]:
    """Names of the parameters that a torch optimizer has stepped, so that a step without it is known for one."""
    gradients = reducer.buckets.gradients
    return [name for name, each in zip(gradients.names, gradients.parameters, strict=True) if is_optimized(each)]


def _checked_names(ours: State) -> dict[str, list[str]]:
    """What `_optimized` told of each reducer; nothing in an older snapshot.

    Raises:
        CheckpointError: if something else is there.
    """
    names = ours.get("optimized", {})
    if not isinstance(names, dict) or not all(map(_is_list_of_names, names.values())):
        raise CheckpointError(f"optimized={brief(names)} is in it; allowed: lists of names of parameters, by part")
    return names


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _know_optimized(reducer: GradientReducer, names: Collection[str], parts: Mapping[str, Any]) -> None:
    """Go on knowing it of what an optimizer among the parts steps; another script may update it by hand."""
    optimizers = [part for part in parts.values() if isinstance(part, Optimizer)]
    stepped = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    gradients = reducer.buckets.gradients
    named = zip(gradients.names, gradients.parameters, strict=True)
    know_optimized(each for name, each in named if name in names and id(each) in stepped)


def _drop_broken_backwards(parts: Mapping[str, Any]) -> None:
    """Where a backward has raised on this rank alone, the others are in it still: they would not come."""
    for reducer in _reducers(parts).values():
        reducer.make_up_for_raised()


def _is_elastic(parts: Mapping[str, Any]) -> bool:
    """Whether this process is a group by itself, whose members may come and go."""
    return any(getattr(getattr(part, "_orig_mod", part), "_elastic", False) for part in parts.values())


def _reducer_states(path: Path, ours: State, reducers: Mapping[str, GradientReducer]) -> dict[str, list[State]]:
    """What each reducer is to load: this rank's state, or, at another world size, all ranks'."""
    ranks: list[State] = ours["ranks"]
    needed = [this_rank()] if len(ranks) == world_size() else range(len(ranks))
    states: dict[str, list[State]] = {}
    for name in reducers:
        if not ranks or name not in ranks[0]["reducers"]:
            continue
        saved = [{**ranks[0]["reducers"][name], **ranks[r]["reducers"][name]} for r in needed]
        states[name] = [{**state, "residuals": {}, "shard_residuals": []} for state in saved]
    if ours["tag"] is not None and states:
        for position, rank in enumerate(needed):
            tensors = _read_residuals(path, f"{ours['tag']}.rank{rank}")
            for name, of_ranks in states.items():
                of_ranks[position].update(tensors[name])
    return states


def _read_residuals(path: Path, suffix: str) -> State:
    for folder in (path.parent, snapshot_file.target_of(path).parent):
        for file in folder.glob(f"*.{suffix}"):  # a snapshot may have been renamed
            with file.open("rb") as stream:
                return snapshot_file.parse(stream, file)
    raise CheckpointError(f"there is no {path.name}.{suffix}, which belongs to the snapshot: keep the files together")
