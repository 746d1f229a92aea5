"""One training: ranks are threads of this process, and reduce through the reducer and pipelines that processes have."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastreduce import GradientReducer
from fastreduce.policy import Policy
from fastreduce.transports import Transport
from tests.support.thread_ranks import in_threads

from .tasks import OPTIMIZERS, TASKS, Data, data_of, held_out_loss

INSPECTIONS = 10  # steps, evenly spread, whose averages are held against exact ones
TIMEOUT = 300.0  # seconds that a rank waits for the others


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    task: str
    optimizer: str
    ranks: int
    setting: str
    seed: int
    steps: int


def train(training: Training) -> dict[str, Any]:
    """A row: the training, the loss on what is held out at its end, bytes an element, vNMSE, seconds."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    model, sent, vnmse = trained(training)
    loss = held_out_loss(model, data_of(training.task, training.seed, training.steps).held_out)
    figures = {"loss": loss, "bytes": round(sent, 4), "vnmse": float(f"{vnmse:.4g}")}
    return {**asdict(training), **figures, "seconds": round(time.perf_counter() - begin, 2)}


def trained(training: Training) -> tuple[nn.Module, float, float]:
    """Rank 0's model at the end; bytes an element that a rank sends, over those of an all-reduce; the mean vNMSE."""
    data = data_of(training.task, training.seed, training.steps)
    models = [copy.deepcopy(data.model) for _ in range(training.ranks)]
    gradients: list[list[Tensor]] = [[] for _ in models]

    def run(rank: int, transport: Transport) -> tuple[float, float]:
        return _Rank(training, data, models[rank], transport, gradients).train()

    return models[0], *in_threads(training.ranks, run, timeout=TIMEOUT)[0]


def make_optimizer(training: Training, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """With the schedule of its learning rate."""
    optimizer = OPTIMIZERS[training.optimizer](model.parameters(), TASKS[training.task].rates[training.optimizer])
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, training.steps)


def share(batch: tuple[Tensor, ...], rank: int, ranks: int) -> tuple[Tensor, ...]:
    """A rank's part of a batch."""
    return tuple(part.chunk(ranks)[rank] for part in batch)


class _Rank:
    """One rank's model, optimizer and reducer; `gradients` is where all lay out what they bring to inspected steps."""

    def __init__(
        self, training: Training, data: Data, model: nn.Module, transport: Transport, gradients: list[list[Tensor]]
    ) -> None:
        self._data, self._model, self._gradients = data, model, gradients
        self._rank, self._ranks = transport.rank, transport.world_size
        self._parameters = list(model.parameters())
        # Buckets are sent when backward has ended, so that `computed` sees what this rank brings to each of them.
        self._reducer = GradientReducer(
            self._parameters,
            [name for name, _ in model.named_parameters()],
            transport,
            Policy.of(training.setting),
            overlaps=False,
        )
        self._optimizer, self._schedule = make_optimizer(training, model)

    def train(self) -> tuple[float, float]:
        """Take all steps; bytes, and on rank 0 vNMSE."""
        found = []
        every = max(2, len(self._data.steps) // INSPECTIONS)  # ranks are at most one step apart
        try:
            for step, batch in enumerate(self._data.steps):
                inspects = step % every == every // 2
                self._reducer.events.computed[:] = [self._lay_out] if inspects else []
                self._forward_backward(share(batch, self._rank, self._ranks))
                if inspects and self._rank == 0:
                    found.append(self._lost())
                self._optimizer.step()
                self._schedule.step()
        finally:
            self._reducer.close()
        elements = sum(parameter.numel() for parameter in self._parameters)
        each_way = self._reducer.sent_bytes * self._ranks / (2 * (self._ranks - 1))
        return each_way / elements, sum(found) / max(1, len(found))

    def _forward_backward(self, batch: tuple[Tensor, ...]) -> None:
        self._reducer.rebuild_buckets()
        self._optimizer.zero_grad()
        loss = self._model(*batch)
        self._reducer.arm()
        self._reducer.watch([loss])
        loss.backward()

    def _lay_out(self) -> None:
        self._gradients[self._rank] = [parameter.grad.double() for parameter in self._parameters]

    def _lost(self) -> float:
        """vNMSE: the sum of the squares of what the averages are off by, over the sum of the exact ones' squares."""
        exact = [sum(each) / self._ranks for each in zip(*self._gradients, strict=True)]
        off = sum(float((p.grad - mean).square().sum()) for p, mean in zip(self._parameters, exact, strict=True))
        return off / sum(float(mean.square().sum()) for mean in exact)
