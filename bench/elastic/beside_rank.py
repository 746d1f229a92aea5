"""One process of `python -m bench.elastic.beside`: a training by one of several wrappers, a line for each step.

`python -m bench.elastic.beside_rank KIND ADDRESS FOLDER NAME STEPS`, with RANK and WORLD_SIZE. KIND is torchft, manager
(torchft's, without its wrapper), elastic, fixed (ours with fixed ranks) or torch; ADDRESS that of a store, of torchft
that of its lighthouse. NAME.steps is as that of bench.elastic_ranks; NAME.lost has the moments of steps that were made
and not committed.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastreduce import DistributedDataParallel, elastic

LAYERS, WIDTH, BATCH, TIMEOUT = 6, 256, 8, 5.0

Wrapped = tuple[Any, Any, Callable[[], int], Callable[[], int]]  # module, optimizer, committed steps, how many train


def by_elastic(model: nn.Module, address: str) -> Wrapped:
    ddp = DistributedDataParallel(model, elastic=True, transport="gloo")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    members = elastic.join(ddp, store=address, timeout=TIMEOUT, optimizer=optimizer)
    return ddp, optimizer, lambda: members.step, lambda: members.size


class Averaging:
    """An optimizer that averages gradients first, by torchft's manager."""

    def __init__(self, manager: Any, model: nn.Module, optimizer: Any) -> None:
        self._manager, self._model, self._optimizer = manager, model, optimizer

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        for work in [self._manager.allreduce(parameter.grad) for parameter in self._model.parameters()]:
            work.wait()
        self._optimizer.step()


def by_torchft(model: nn.Module, address: str, wraps: bool = True) -> Wrapped:
    torchft: Any = importlib.import_module("torchft")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of this replica alone

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{os.environ['RANK']}",
        lighthouse_addr=address,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=socket.gethostname(),
        timeout=timedelta(seconds=TIMEOUT),
    )
    manager.kept_store = store
    managed = torchft.Optimizer(manager, optimizer)
    counts = manager.current_step, manager.num_participants
    if wraps:
        return torchft.DistributedDataParallel(manager, model), managed, *counts
    return model, Averaging(manager, model, managed), *counts


def by_fixed(kind: str) -> Callable[[nn.Module, str], Wrapped]:
    def wrap(model: nn.Module, address: str) -> Wrapped:
        host, _, port = address.rpartition(":")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ddp: Any = nn.parallel.DistributedDataParallel(model)
        if kind == "fixed":
            ddp = DistributedDataParallel(model, transport="gloo")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        steps = [0]
        optimizer.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
        return ddp, optimizer, lambda: steps[0], lambda: size

    return wrap


KINDS: dict[str, Callable[[nn.Module, str], Wrapped]] = {
    "torchft": by_torchft,
    "manager": partial(by_torchft, wraps=False),
    "elastic": by_elastic,
    "fixed": by_fixed("fixed"),
    "torch": by_fixed("torch"),
}


def main() -> None:
    kind, address, folder, name, steps = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    wrapped, optimizer, committed, size = KINDS[kind](model, address)
    last, end = Path(folder, "last step"), int(steps) or None
    with (
        Path(folder, f"{name}.steps").open("a", buffering=1) as file,
        Path(folder, f"{name}.lost").open("a", 1) as lost,
    ):
        while end is None or committed() < end:
            if end is None and last.exists():
                end = int(last.read_text())
            before = committed()
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            loss = wrapped(x).square().mean()
            loss.backward()
            optimizer.step()
            if committed() > before:
                file.write(f"{committed()} {time.time()} {size()} 0 - {loss.item()}\n")
            else:
                lost.write(f"{time.time()}\n")
    os._exit(0)  # what each library's threads do at exit is not measured


if __name__ == "__main__":
    main()
