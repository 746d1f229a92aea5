"""When error feedback looks at averages, for those who average without hooks that count; the order that hooks see."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastreduce.reduction.arrivals import Reached
from fastreduce.reduction.residuals.applied import Applied, norms_of
from fastreduce.transports import LocalTransport
from tests.support.thread_ranks import make_reducer


class _Looks:
    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.reached = Reached(self.look)
        self.reached.watch(model.parameters())

    def look(self) -> None:
        self.count += 1


def test_each_backward_looks_once_before_its_first_gradient():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    looks = _Looks(model)
    for number in range(1, 4):  # accumulated, and averaged behind the last
        model(torch.ones(1, 3)).sum().backward()
        assert looks.count == number
    looks.reached.end()
    model(torch.ones(1, 3)).sum().backward()
    assert looks.count == 4


def test_a_re_entrant_checkpoint_begins_no_backward_of_its_own():
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))
    looks = _Looks(model)
    x = torch.ones(1, 3, requires_grad=True)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    x.sum().backward()
    assert looks.count == 1


def test_what_arrives_twice_is_in_the_order_of_last_arrivals():
    model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
    reducer = make_reducer(model, LocalTransport())
    reducer.arm()
    y = x = torch.ones(1, 3, requires_grad=True)
    for layer in (model[0], model[1], model[0]):
        y = checkpoint(layer, y, use_reentrant=True)
    y = y * 1
    reducer.watch([y])
    y.sum().backward()
    assert reducer.arrival_order == [1, 0] and x.grad is not None


class _Average:
    """One parameter's, and what is known of it."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.parameter.grad = torch.full((1,), 2.0)
        self._norms = norms_of([self.parameter.grad])
        torch.optim.SGD([self.parameter], 1.0)
        self.applied = Applied([self.parameter], (), self.magnitudes, 1.0, watched=True, older={})

    def magnitudes(self) -> Tensor:
        return self._norms.clone()


def test_another_tensor_in_grad_is_no_average_but_where_copies_are_made():
    for copies, there in ((False, set()), (True, {0})):
        average = _Average()
        average.parameter.grad = torch.full((1,), -0.5)  # norms cannot tell that it is no fourth of the average
        average.applied.look(copies=copies)
        assert average.applied.carried() == there
        average.applied.end()
