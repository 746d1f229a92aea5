"""all_reduce_gradients: into whose memory averages go, and how long what is kept between calls stays."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastreduce import all_reduce_gradients
from fastreduce.transports import LocalTransport, Work
from tests.support.ranks import RankPool


def _inference(rank: int, world_size: int, setting: str) -> list[float]:
    """Averages of inference tensors and of others, first under inference mode and then outside of it."""
    plain, parameter = torch.ones(40), nn.Parameter(torch.ones(40))
    with torch.inference_mode():
        contiguous, strided, grad = torch.ones(40), torch.ones(80)[::2], torch.ones(80)[::2]
    parameter.grad, found = grad, list[float]()
    for mode in (True, False):
        with torch.inference_mode():
            for tensor in (plain, contiguous, strided, grad):
                tensor.fill_(rank + 1.0)
        with torch.inference_mode(mode):
            all_reduce_gradients([plain, contiguous, strided, parameter], setting)
        found += [float(tensor[-1]) for tensor in (plain, contiguous, strided, grad)]
    return found


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_inference_tensors_are_averaged_within_inference_mode_and_outside(ranks2: RankPool, setting: str):
    for found in ranks2.run(_inference, setting):
        assert found == pytest.approx(8 * [1.5], abs=0.02)


class Frozen(LocalTransport):
    """A user's own transport that takes no attributes once it is made."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if "_meeting" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("setting", ["int8", "int8:error_feedback"])
def test_a_users_transport_ends_with_its_last_name(setting: str):
    parameter, gone = nn.Parameter(torch.ones(1000)), list[Any]()
    for _ in range(2):
        transport = Frozen()
        gone.append(weakref.ref(transport))
        parameter.grad = torch.ones(1000)
        all_reduce_gradients([parameter], setting, transport=transport)
        del transport
        gc.collect()
    assert [each() for each in gone] == [None, None]


class _Counting(LocalTransport):
    calls = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        self.calls += 1
        return super().all_reduce(tensor)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        self.calls += 1
        return super().all_to_all(received, wire)


def test_a_copy_of_a_transport_reduces_itself():
    first = _Counting()
    all_reduce_gradients([torch.ones(300)], "int8", transport=first)
    before, second = first.calls, copy.copy(first)
    all_reduce_gradients([torch.ones(300)], "int8", transport=second)
    assert before > 0 and (first.calls, second.calls) == (before, 2 * before)
