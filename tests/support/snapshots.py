"""A training to be saved: all that it holds, with randomness of every kind in its steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fastreduce import ShardSampler, load_checkpoint, save_checkpoint
from tests.support.models import batch, wrap

FEEDBACK = "int8:error_feedback"


class Training:
    """All that a training holds, with randomness of every kind in its steps."""

    def __init__(self, setting: str, seed: int = 0, clips: bool = False, bucket_cap_mb: float = 0.002) -> None:
        torch.manual_seed(seed)
        random.seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())
        net = nn.Sequential(nn.Linear(20, 23), nn.Dropout(), nn.Tanh(), nn.Linear(23, 26), nn.BatchNorm1d(26))
        self.model = wrap("ours", net.append(nn.Linear(26, 3)), bucket_cap_mb=bucket_cap_mb, compression=setting)
        torch.manual_seed(seed + dist.get_rank())
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.sampler = ShardSampler(100)
        self.indices: Iterator[int] | None = None
        self.clips = clips
        self.norms: list[Any] = []

    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "sampler")}

    def steps(self, n: int) -> None:
        self.indices = self.indices or iter(self.sampler)
        for _ in range(n):
            rows = [next(self.indices) for _ in range(3)]
            self.optimizer.zero_grad()
            x = batch(dist.get_rank(), rows[0], 5, 20) * random.random() + float(np.random.rand())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.model(x).float().square().mean()
            self.scaler.scale(loss).backward()
            if self.clips:
                self.scaler.unscale_(self.optimizer)
                self.norms.append(self.model.clip_grad_norm_(0.01))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def all(self) -> dict[str, Any]:
        reducer = self.model.reducer.state_dict()
        states = {name: copy.deepcopy(part.state_dict()) for name, part in self.parts().items()}
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {**states, "reducer": reducer, "random": draws}


def switch_and_resume(
    rank: int, world_size: int, old: str, new: str, before: int, path: Path, cap: float | None = None
) -> Any:
    """States and norms of a training that changed its setting and went on, and of one from its checkpoint."""
    training = Training(old, clips=True)
    training.steps(before)
    save_checkpoint(path, **training.parts())
    if new != old or cap is not None:
        training.model.set_compression(new, at=before, bucket_cap_mb=cap)
    training.steps(3)
    switched = training.all(), training.norms[before:]
    again = Training(new, seed=5, clips=True, **({} if cap is None else {"bucket_cap_mb": cap}))
    load_checkpoint(path, **again.parts())
    again.steps(3)
    resumed = again.all(), again.norms
    for state, _ in (switched, resumed):
        del state["reducer"]["schedule"]  # it tells how the setting came
    return switched, resumed


def save(rank: int, world_size: int, path: Path, setting: str = FEEDBACK, times: int = 1) -> dict[str, Any]:
    training = Training(setting)
    for time in range(times):
        training.steps(2)
        save_checkpoint(path, **training.parts(), epoch=time)
    return training.all()
