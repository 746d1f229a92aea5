"""Buckets laid out anew: what the old ones kept is out of memory before the new ones are made, on every way there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fastreduce
from fastreduce import ReducerError
from fastreduce.reduction import saved_residuals
from fastreduce.reduction.averaging import CompressedAveraging
from fastreduce.reduction.gradients import Gradients
from fastreduce.reduction.pipeline import BucketPipeline
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

SETTINGS = [
    "int8:error_feedback",
    "int4:error_feedback=8bit",
    "powersgd:rank=1,min_compression_rate=1",
    "topk:ratio=0.1",
]


class Layers(nn.Module):
    """Of which the first is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _wrap(setting: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return fastreduce.DistributedDataParallel(Layers(), compression=setting, bucket_cap_mb=0.005, **options)


def _step(ddp: Any) -> None:
    ddp.zero_grad()
    ddp(torch.full((2, 40), 1.0 + torch.distributed.get_rank())).square().sum().backward()


def _switch(ddp: Any) -> None:
    ddp.set_compression("int4:error_feedback")


def _other_sizes(ddp: Any) -> None:
    ddp.set_compression(str(ddp.compression), bucket_cap_mb=1)


def _load(ddp: Any) -> None:
    ddp.reducer.load_state_dict(ddp.reducer.state_dict())


def _unfreeze(ddp: Any) -> None:
    ddp.module.requires_grad_(True)


def _nothing(ddp: Any) -> None:
    """The step behind the first lays buckets out in the order of its gradients."""


WAYS = {"order": _nothing, "setting": _switch, "sizes": _other_sizes, "state": _load, "unfrozen": _unfreeze}


def _held(rank: int, world_size: int, setting: str, way: str, views: bool) -> list[int]:
    ddp, held = _wrap(setting, gradient_as_bucket_view=views), list[int]()
    for _ in range(1 if way == "order" else 2):
        _step(ddp)
    kept = [weakref.ref(each.feedback.residuals.untyped_storage()) for each in ddp.reducer.pipelines]
    kept += [weakref.ref(each) for each in ddp.reducer.pipelines]
    if views and way == "order":  # else `.grad` has them still
        kept += [weakref.ref(each) for each in ddp.reducer.buckets.gradients.views if each is not None]
    make = CompressedAveraging.make_pipelines

    def make_pipelines(*args: Any) -> Any:
        held.append(sum(each() is not None for each in kept))
        return make(*args)

    with patch.object(CompressedAveraging, "make_pipelines", make_pipelines):
        WAYS[way](ddp)
        _step(ddp)
    return held


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_residuals_of_old_buckets_are_gone_when_new_ones_are_made(
    ranks2: RankPool, setting: str, way: str, views: bool
):
    for held in ranks2.run(_held, setting, way, views):
        assert held, "buckets were not laid out anew"
        assert not any(held)


def _fails(*_: Any) -> None:
    raise MemoryError("no memory left")


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("change", [_switch, _other_sizes])
def test_a_layout_that_failed_is_told_of_at_the_next_forward_and_can_be_made_up_for(change: Callable[[Any], None]):
    ddp, other = _wrap("int8:error_feedback"), _wrap("none")
    for _ in range(2):
        _step(ddp)
    change(ddp)
    with patch.object(CompressedAveraging, "make_pipelines", _fails), pytest.raises(MemoryError):
        _step(ddp)
    for _ in range(2):
        with pytest.raises(ReducerError, match="rank 0: gradients would not be averaged, since buckets could not be"):
            _step(ddp)
    ddp.set_compression("none")
    _step(ddp)
    _step(other)
    assert_same_bits([p.grad for p in ddp.parameters()][2:], [p.grad for p in other.parameters()][2:])


@pytest.mark.usefixtures("group_of_one")
def test_a_state_whose_buckets_could_not_be_laid_out_is_told_of_and_can_be_loaded_again():
    ddp, other = _wrap("int8:error_feedback"), _wrap("int8:error_feedback")
    for _ in range(2):
        _step(ddp)
    saved = ddp.reducer.state_dict()
    with patch.object(saved_residuals, "restore", _fails), pytest.raises(MemoryError):
        ddp.reducer.load_state_dict(saved)
    with pytest.raises(ReducerError, match="gradients would not be averaged"):
        _step(ddp)
    for each in (ddp, other):
        each.reducer.load_state_dict(saved)
        _step(each)
    assert_same_bits([p.grad for p in ddp.parameters()][2:], [p.grad for p in other.parameters()][2:])


PARTS = {
    "residuals taken": (saved_residuals, "collect_alike"),
    "members": (Gradients, "members"),
    "views": (Gradients, "install_views"),
    "statistics": (BucketPipeline, "keep_statistics"),
    "residuals put": (saved_residuals, "restore"),
}
BLOCKS = 64, 128, 256


def _in_pairs(*pairs: tuple[int, int]) -> dict[str, str]:
    """A policy under which these layers share buckets."""
    return {
        f"{i}.weight": f"int8:error_feedback,block={block}"
        for pair, block in zip(pairs, BLOCKS, strict=True)
        for i in pair
    }


def _fails_in(rank: int, world_size: int, part: str) -> tuple[list[str], list[Tensor]]:
    """What three forwards behind a failed layout raise, and the gradients once it has been made up for."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(6)))
    first, second = _in_pairs((5, 4), (3, 2), (1, 0)), _in_pairs((5, 0), (4, 1), (3, 2))
    ddp = fastreduce.DistributedDataParallel(model, compression=first, gradient_as_bucket_view=True)
    ddp.reducer.keep_statistics()
    for _ in range(2):
        _step(ddp)
    ddp.set_compression(second)
    with patch.object(*PARTS[part], _fails), pytest.raises(MemoryError):
        _step(ddp)
    raised = list[str]()
    for act in (_step, _step, lambda ddp: ddp.reducer.state_dict()):
        try:
            act(ddp)
        except ReducerError as error:
            raised.append(str(error))
    ddp.set_compression(second)
    _step(ddp)
    return raised, [parameter.grad for parameter in ddp.parameters()]


@pytest.mark.parametrize("part", PARTS)
def test_where_a_layout_failed_in_any_part_nothing_is_averaged_by_an_old_plan_nor_saved(ranks2: RankPool, part: str):
    (raised, here), (_, there) = ranks2.run(_fails_in, part)
    assert len(raised) == 3
    assert all("rank 0: gradients would not be averaged" in each for each in raised)
    assert_same_bits(here, there)


@pytest.mark.usefixtures("group_of_one")
def test_behind_a_failed_layout_buckets_follow_the_settings_that_come_next():
    ddp = _wrap("none")
    _step(ddp)
    _step(ddp)
    ddp.set_compression({"*bias": "none", "*": "int8:error_feedback"})
    with patch.object(CompressedAveraging, "make_pipelines", _fails), pytest.raises(MemoryError):
        _step(ddp)
    ddp.set_compression({"*bias": "none", "*": "int8"})
    _step(ddp)
    for pipeline in ddp.reducer.pipelines:
        weights = {slot.name.endswith("weight") for slot in pipeline.bucket.slots}
        assert len(weights) == 1
        assert str(pipeline.compression) == ("int8" if weights.pop() else "none")


@pytest.mark.usefixtures("group_of_one")
def test_unfreezing_behind_a_layout_that_failed_tells_of_it():
    ddp = _wrap("int8:error_feedback")
    _step(ddp)
    _step(ddp)
    ddp.module.requires_grad_(True)
    with patch.object(CompressedAveraging, "make_pipelines", _fails), pytest.raises(MemoryError):
        _step(ddp)
    with pytest.raises(ReducerError, match="gradients would not be averaged"):
        _step(ddp)


def _alive_behind(rank: int, world_size: int) -> list[bool]:
    """Of the threads of streams that were made anew, which are there before their reducer ends, and behind that."""
    ddp = _wrap("none")
    _step(ddp)
    _unfreeze(ddp)
    for _ in range(2):
        _step(ddp)
    (stream,) = ddp.reducer.buckets.streams.by_device.values()
    threads = list(stream._threads)
    before = [thread.is_alive() for thread in threads]
    ddp.reducer.close()
    for thread in threads:
        thread.join(5)
    return before + [thread.is_alive() for thread in threads]


def test_streams_that_were_made_anew_end_with_the_reducer(ranks2: RankPool):
    assert ranks2.run(_alive_behind) == [[True, False]] * 2
