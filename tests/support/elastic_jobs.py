"""One process of the trainings in tests/elastic: its gradients are known, and the victim kills itself in some stage.

`python -m tests.support.elastic_jobs STORE FOLDER NAME STAGE TRANSPORT SETTING`, with RANK and WORLD_SIZE. STAGE is
forward, backward, collective, commit, between, none, or "stopped" for SIGSTOP in forward. TRANSPORT "nccl" is on a GPU,
which processes share, and without one the stand-in's, with CPU tensors. A line in FOLDER/NAME.json for each step: how
many trained, its samples, those that nobody has trained on yet, the averages, what the optimizer kept, and the
parameters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastreduce import DistributedDataParallel, elastic
from tests.support import nccl_stand_in

VICTIM, AT_STEP, STEPS_AFTER = 1, 3, 5
LAYERS, WIDTH = 4, 300
TIMEOUT = 40.0 if torch.cuda.is_available() else 10.0  # NCCL's start counts too, where processes share a GPU
SAMPLES, BATCH = 1_000_000, 2


def gradient(place: int, step: int) -> float:
    """That of every parameter of one process in one step, whose averages are told apart by it."""
    return float(2 ** (3 * place) * (1 + step % 5))


class Model(nn.Module):
    """Vectors in several buckets, whose gradients are what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(WIDTH) for _ in range(LAYERS))
        self.inside: Callable[[], None] = lambda: None

    def forward(self, by: float) -> Tensor:
        self.inside()
        return torch.stack([(layer * by).sum() for layer in self.layers]).sum()


def main() -> None:
    folder, transport = sys.argv[2], sys.argv[5]
    torch.set_num_threads(1)
    if transport != "nccl":
        train(torch.device("cpu"))
    elif torch.cuda.is_available():
        train(torch.device("cuda", 0))
    else:
        with nccl_stand_in.installed(folder), nccl_stand_in.asked_for_on_cpus():
            train(torch.device("cpu"))


def train(device: torch.device) -> None:
    store, folder, name, stage, transport, setting = sys.argv[1:]
    place = int(os.environ["RANK"])
    torch.manual_seed(place)
    model = Model().to(device)
    ddp = DistributedDataParallel(model, elastic=True, bucket_cap_mb=0.001, transport=transport, compression=setting)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.5)
    sampler = elastic.BatchSampler(SAMPLES, BATCH, shuffle=False)
    members = elastic.join(ddp, store=store, timeout=TIMEOUT, optimizer=optimizer, sampler=sampler)
    group: Any = ddp.reducer.group  # type: ignore[attr-defined]
    assert group.transport.name in (transport, "local")

    def end(here: str) -> None:
        if stage == here and place == VICTIM and members.step == AT_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        if stage == "stopped" and here == "forward" and place == VICTIM and members.step == AT_STEP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def in_a_collective(started: Callable[..., Any], *arguments: Any) -> Any:
        work = started(*arguments)
        end("collective")
        return work

    model.inside = lambda: end("forward")
    model.layers[1].register_hook(lambda _: end("backward"))  # others have been launched
    if place == VICTIM and stage == "collective":
        for method in ("all_reduce", "all_reduce_slots", "all_to_all", "two_shot"):
            if hasattr(group.transport, method):
                started = getattr(group.transport, method)
                setattr(group.transport, method, lambda *a, started=started: in_a_collective(started, *a))
    if place == VICTIM and stage == "commit":
        commit = group.commit

        def commit_unless_it_ends() -> None:
            end("commit")
            commit()

        group.commit = commit_unless_it_ends

    last = Path(folder, "last step")
    with Path(folder, f"{name}.json").open("a", buffering=1) as file:
        for batch in sampler:
            if last.exists() and members.step >= int(last.read_text()):
                break
            step = members.step
            optimizer.zero_grad()
            ddp(gradient(place, step)).backward()
            averages = [float(layer.grad.mean()) for layer in model.layers]
            same = all(bool((layer.grad == layer.grad[0]).all()) for layer in model.layers)
            optimizer.step()
            momentum = [float(optimizer.state[layer]["momentum_buffer"].sum()) for layer in model.layers]
            parameters = [float(layer.detach().double().sum()) for layer in model.layers]
            state = sampler.state_dict()
            samples = [state["top"], state["back"], *state["hands"].values()]
            told = [step, members.size, batch, samples, averages, same, momentum, parameters]
            file.write(json.dumps(told) + "\n")
            end("between")
            time.sleep(0.005)


if __name__ == "__main__":
    main()
