"""An ordinary DDP script on scikit-learn's digits; only the import of DDP differs from torch's tutorial.

torchrun --nproc_per_node=2 examples/train.py --compression fp16
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fastreduce import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 64, 10),
    )
    ddp = DDP(model, compression=args.compression)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / (len(loader) * dist.get_world_size()):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
