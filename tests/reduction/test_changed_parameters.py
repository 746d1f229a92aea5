"""Parameters whose memory is exchanged after their places in the buckets were made: an error, not others' memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fastreduce
from fastreduce import TensorError

pytestmark = pytest.mark.usefixtures("group_of_one")

CHANGES: dict[str, Callable[[], Tensor]] = {
    "smaller": lambda: torch.zeros(3),
    "larger": lambda: torch.zeros(5000),
    "wider": lambda: torch.zeros(1000, dtype=torch.float64),
}


class Unused(nn.Module):
    """A parameter that no backward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


@pytest.mark.parametrize("setting", ["fp16", "bf16", "int8", "int8:error_feedback"])
@pytest.mark.parametrize("change", ["smaller", "larger"])
def test_an_unused_parameter_of_another_size_is_named(setting: str, change: str):
    ddp = fastreduce.DistributedDataParallel(Unused(), compression=setting, find_unused_parameters=True)
    ddp(torch.ones(3, 4)).sum().backward()
    ddp.module.unused.data = CHANGES[change]()
    with pytest.raises(TensorError, match=r"'unused' has \d+ numbers of torch\.float32, and had 1000 of"):
        ddp(torch.ones(3, 4)).sum().backward()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="needs a torch that has grad_dtype")
def test_gradients_of_another_dtype_than_their_parameter_are_named():
    model = nn.Linear(4, 2).bfloat16()
    model.weight.grad_dtype = torch.float32  # type: ignore[assignment]
    ddp = fastreduce.DistributedDataParallel(model, compression="int8")
    with pytest.raises(TensorError, match=r"'weight' is torch\.float32 .*, and the parameter torch\.bfloat16"):
        ddp(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_with_residuals_of_another_size_or_dtype_is_named(change: str):
    parameter = nn.Parameter(torch.zeros(1000))
    for _ in range(2):
        parameter.grad = torch.ones(1000)
        fastreduce.all_reduce_gradients([parameter], "int8:error_feedback")
    parameter.grad = None
    parameter.data = CHANGES[change]()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TensorError, match=r"'tensor 0' has \d+ numbers of torch\.float\d\d, and had 1000 of"):
        fastreduce.all_reduce_gradients([parameter], "int8:error_feedback")
