"""Contestants in a wrapper's place: what the wrapper stays beside that."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fastreduce import DistributedDataParallel, GradientReducer
from fastreduce.run.contestants import NO_REDUCTION, take


def _wrapped() -> Any:
    return DistributedDataParallel(nn.Linear(3, 2))


@pytest.mark.parametrize("name", ["none", "torch", NO_REDUCTION])
def test_a_wrapper_ends_with_its_last_reference_and_keeps_what_a_script_has_put_there(group_of_one: None, name: str):
    model = _wrapped()
    model.clip_grad_norm_ = lambda: "mine"
    take(model, name)
    assert model.clip_grad_norm_() == "mine"
    model(torch.ones(1, 3)).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.clip_grad_norm_() == "mine" and isinstance(copied.reducer, GradientReducer)
    take(model, "fp16")
    assert model.clip_grad_norm_() == "mine" and isinstance(model.reducer, GradientReducer)
    del model.clip_grad_norm_, copied
    model(torch.ones(1, 3)).sum().backward()
    take(model, name)
    gc.collect()
    gc.disable()
    try:
        ended = weakref.ref(model)
        del model
        assert ended() is None
    finally:
        gc.enable()
