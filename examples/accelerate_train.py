"""An ordinary script for accelerate. Nothing in it wraps the model: `prepare` does, in our class if started so:

fastreduce run --compression fp16 --nproc_per_node=2 examples/accelerate_train.py
"""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastreduce import DistributedDataParallel


def prepare() -> tuple[Accelerator, Any, Any, Any]:
    options = DistributedDataParallelKwargs(bucket_cap_mb=1, gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[options])

    digits = load_digits()
    images = torch.tensor(digits.data[:1024], dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target[:1024]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer, loader


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, epochs: int = 2) -> list[float]:
    losses = []
    for _ in range(epochs):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    accelerator, model, optimizer, loader = prepare()
    assert isinstance(model, DistributedDataParallel), "start this script with fastreduce run"
    losses = train(accelerator, model, optimizer, loader)
    accelerator.print(f"fastreduce {model.compression}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
