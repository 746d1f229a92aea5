"""The usual mpi4py training script on scikit-learn's digits, carried over; docs/from-mpi.md shows both.

mpirun -n 4 python examples/mpi_train.py --compression fp16
"""

import argparse

import torch
from sklearn.datasets import load_digits

import fastreduce.distributed as dist
from fastreduce import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data[rank::size], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[rank::size])

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    ddp = DDP(model, compression=args.compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    steps = len(digits.data) // size // 25  # the same on every rank
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for i in range(steps):
            batch = slice(25 * i, 25 * (i + 1))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce_gradients([total], "none")  # whatever FASTREDUCE_COMPRESSION says
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / steps:.3f}")
    print(f"rank {rank} of {size}: done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
