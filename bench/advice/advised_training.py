"""A training for `python -m bench.advice`: on this host, or one rank in each network namespace.

advised_training MODEL [NAMESPACE:ADDRESS …]
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..scaling.star import INTERFACE
from ..training.timed_models import Gpt2, linear_layers

MODELS = ["mlp", "gpt"]
PORT = 29500
PR_SET_PDEATHSIG = 1
BUCKET_MB = 1  # models are small, so that 24 cells take minutes; so are their buckets


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A model of some 1.3 million parameters, and a batch: next to no work, or much of it."""
    torch.manual_seed(0)
    if name == "mlp":
        return linear_layers(320), torch.randn(32, 320)
    return Gpt2(192, 3, 100, 128), torch.randint(100, (4, 64))


def train(name: str) -> None:
    """Until somebody ends it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = make(name)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
    while True:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()


def start(name: str, places: Sequence[str]) -> int:
    """One rank in each namespace, with a /dev/shm of its own, as on a host; the first exit code that is not 0, or 0."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, place in enumerate(places):
            namespace, _ = place.split(":")
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": places[0].split(":")[1],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
            }
            apart = ["ip", "netns", "exec", namespace, "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
            command = [*apart, sys.executable, "-m", "bench.advice.advised_training", name]
            ranks.append(subprocess.Popen(command, env=environment))
        return max(rank.wait() for rank in ranks)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(start(sys.argv[1], sys.argv[2:]))
    train(sys.argv[1])
