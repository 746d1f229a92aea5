"""Genesis' distributed training script carried over: NCCL where it can run, else gloo; one process a device.

torchrun --nproc_per_node=2 examples/genesis_train.py --compression fp16
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastreduce.distributed as dist


def set_up() -> torch.device:
    try:
        dist.init_process_group(backend="nccl")
    except RuntimeError as error:
        if "NCCL library not available" not in str(error):
            raise
        print(f"rank without NCCL, taking gloo: {error}")
        dist.init_process_group(backend="gloo")
    return dist.get_local_device()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    device = set_up()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device)[rank::world_size] / 16
    labels = torch.tensor(digits.target, device=device)[rank::world_size]

    torch.manual_seed(rank)  # the wrapper gives every rank rank 0's weights
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = dist.DistributedDataParallel(
        model,
        device_ids=[device.index],
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
        compression=args.compression,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        total = torch.zeros((), device=device)
        batches = list(zip(images.split(64), labels.split(64), strict=True))[: len(digits.data) // world_size // 64]
        for batch, target in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(batches):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
