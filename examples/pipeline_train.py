"""A model in two halves on two ranks: activations travel forward, their gradients back, in micro-batches.

torchrun --nproc_per_node=2 examples/pipeline_train.py        (one process trains both halves, to the same losses)
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fastreduce.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)

    torch.manual_seed(0)  # every rank makes all halves alike and trains its own
    halves = [nn.Sequential(nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, 10)]
    mine = halves[rank] if last else nn.Sequential(*halves)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)

    def loss_of(outputs: Tensor, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels[batch]) / args.micro_batches

    for epoch in range(args.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        total, steps = torch.zeros(()), order.split(128)[:-1]
        for step in steps:
            optimizer.zero_grad()
            batches = step.chunk(args.micro_batches)
            if rank < last:  # the first half: a zero stands for each message until its gradient is taken
                sent = [dist.remote_send(mine(images[batch]), dest_rank=rank + 1) for batch in batches]
                for message in sent:
                    message.backward()
            for batch in batches if rank == last else ():
                loss = loss_of(mine(dist.remote_recv(src_rank=rank - 1) if last else images[batch]), batch)
                loss.backward()
                total += loss.detach()
            optimizer.step()
        if rank == last:
            print(f"epoch {epoch}: loss {total.item() / len(steps):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
