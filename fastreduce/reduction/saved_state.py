"""What a reducer's buckets save, each rank its own, and go on from: settings, layout and residuals, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compression import Compression
from ..errors import SettingError
from ..policy import Policy
from . import saved_residuals
from .bucketed import BucketedGradients


def save(buckets: BucketedGradients) -> dict[str, Any]:
    """Residuals by parameter name, for averages of all ranks, with the layout of the buckets."""
    names, scale, transport = buckets.gradients.names, buckets.uneven.scale, buckets.transport
    setting = str(buckets.compression)
    saved = saved_residuals.save(buckets.plan, buckets.pipelines, transport.rank, transport.world_size, setting)
    if scale != 1.0:  # in a join, or behind one
        saved["residuals"] = {name: kept * scale for name, kept in saved["residuals"].items()}
        saved["shard_residuals"] = [kept * scale for kept in saved["shard_residuals"]]
        saved["units"] = {name: unit / scale for name, unit in saved["units"].items()}
    return {
        **saved,
        "settings": {name: str(each) for name, each in zip(names, buckets.settings, strict=True)},
        "caps": list(buckets.caps),
        "orders": [[names[i] for i in order] for order in buckets.orders],
        "statistics": buckets.keeps_statistics,
    }


def pick(states: Sequence[Mapping[str, Any]], buckets: BucketedGradients) -> Mapping[str, Any]:
    """The state that this rank is to go on from: its own, or one made of all ranks' of another world size.

    What it numbers by parameters, it numbers as this reducer does.

    Raises:
        SettingError: if the states are of different compressions, or of other parameters, or ranks are missing.
    """
    compression = str(states[0]["compression"] if states else buckets.compression)
    transport = buckets.transport
    chosen = saved_residuals.pick(states, transport.rank, transport.world_size, compression)
    names, fires = buckets.gradients.names, chosen["fires"]
    saved = list(chosen.get("settings") or names)  # an older state names what is in buckets alone
    saved_residuals.check_names(saved, names)
    if len(fires) != len(names):
        raise SettingError(f"the state is of {len(fires)} parameters, this reducer of {len(names)}")
    saved_residuals.check_parameters(chosen, [buckets.specs[i] for i in buckets.indices])
    here, fires_of = {name: i for i, name in enumerate(names)}, dict(zip(saved, fires, strict=True))
    order = [here[saved[i]] for i in chosen["order"]]
    return {**chosen, "order": order, "fires": [fires_of[name] for name in names]}


def restore(state: Mapping[str, Any], buckets: BucketedGradients) -> None:
    """Lay buckets out as they were, under the setting that saved them, with their residuals.

    Raises:
        SettingError: if that is another setting than the one in force, and a user's hook averages. Nothing has changed.
    """
    by_name = {name: Compression.parse(spec) for name, spec in state.get("settings", {}).items()}
    saved = Policy(chooser=lambda name, _: by_name[name]) if by_name else Compression.parse(state["compression"])
    if buckets.assign(saved) != buckets.settings:
        buckets.use(saved)
    index_of = {name: i for i, name in enumerate(buckets.gradients.names)}
    buckets.caps = tuple(state.get("caps", buckets.caps))
    orders = state.get("orders", [[name for bucket in state["buckets"] for name in bucket]])
    buckets.orders = [[index_of[name] for name in order] for order in orders]
    buckets.keeps_statistics = False  # else the next clipping would not read gradients, as that after the save did
    buckets.lay_out([[index_of[name] for name in bucket] for bucket in state["buckets"]])
    buckets.uneven.scale = 1.0
    state = saved_residuals.fold_moved(state, buckets.pipelines)
    saved_residuals.restore(saved_residuals.kept_in(state), buckets.pipelines)
    for pipeline, kept in zip(buckets.pipelines, state["shard_residuals"], strict=False):
        if pipeline.feedback is not None and len(kept):
            pipeline.feedback.replace(None, kept)
    if state.get("statistics"):
        buckets.keep_statistics()
