"""Steps that a CUDA graph captures: functions of a device, as those in `situations.py`.

The simulated device runs what is captured at once, and replays nothing. It refuses what a capture forbids: a host that
waits, work behind what is not captured, and at the end a stream that has joined it and that nobody has waited for.
"""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import Tensor

from .situations import Situation, _inputs, _wrap

WARM_UP, AFTER = 4, 2  # steps


def a_step_that_is_captured(setting: str, elsewhere: bool, views: bool, device: torch.device) -> list[Tensor]:
    """On a side stream; the wrapper was made there, or `elsewhere`, where autograd accumulates its gradients then."""
    streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def on(number: int) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(streams[number]) if streams else contextlib.nullcontext()

    with on(int(elsewhere)):
        ddp = _wrap(device, setting, gradient_as_bucket_view=views)
        inputs = [_inputs(device, step) for step in range(WARM_UP + 1 + AFTER)]
    if streams:
        streams[0].wait_stream(streams[1])
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)

    def train(step: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        ddp(inputs[step]).backward()
        optimizer.step()

    with on(0):
        for step in range(WARM_UP):
            train(step)
    if streams:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=streams[0]):
            train(WARM_UP)
    else:
        train(WARM_UP)
    with on(0):
        for step in range(WARM_UP + 1, len(inputs)):
            train(step)
        return [parameter.detach().cpu() for parameter in ddp.parameters()]


CAPTURES: dict[str, Situation] = {
    f"{setting}{', made elsewhere' * elsewhere}{', views' * views}": partial(
        a_step_that_is_captured, setting, elsewhere, views
    )
    for setting in ("none", "fp16", "int8:error_feedback", "int8:rounding=stochastic")
    for elsewhere in (False, True)
    for views in (False, True)
}
