"""Train on scikit-learn's digits with snapshots, and go on from one as if nothing had happened.

torchrun --nproc_per_node=2 examples/snapshot_train.py --snapshot_path runs/snapshot.pt --max_epochs 5
torchrun --nproc_per_node=2 examples/snapshot_train.py --resume_path runs/snapshot.pt --max_epochs 10
"""

import argparse

import torch
import torch.distributed as dist
from rich.progress import track
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fastreduce import DistributedDataParallel as DDP
from fastreduce import SyncBatchNorm, load_checkpoint, save_checkpoint
from fastreduce.distributed import destroy_process_group, init_process_group


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--snapshot_path", help="where snapshots go; default: where --resume_path is")
    parser.add_argument("--save_every", type=int, default=1, help="epochs between snapshots")
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--resume_path", help="the snapshot to go on from")
    parser.add_argument("--batch_size", type=int, default=64, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    return parser.parse_args(arguments)


def train(args: argparse.Namespace) -> None:
    snapshot_path = args.snapshot_path or args.resume_path or "snapshot.pt"
    rank = dist.get_rank()
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.BatchNorm1d(128),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        torch.nn.Linear(128, 10),
    )
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = DDP(model, compression=args.compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    torch.manual_seed(rank)  # dropout differs between ranks

    first = 0
    if args.resume_path:
        first = load_checkpoint(args.resume_path, model=ddp, optimizer=optimizer)["epoch"] + 1
    for epoch in range(first, args.max_epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in track(loader, f"epoch {epoch}", disable=rank != 0):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ddp(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        line = f"epoch {epoch}: loss {total.item() / (len(loader) * dist.get_world_size()):.4f}"
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.max_epochs:
            save_checkpoint(snapshot_path, model=ddp, optimizer=optimizer, epoch=epoch)
            line += f", saved to {snapshot_path}"
        if rank == 0:
            print(line, flush=True)


def main() -> None:
    args = parse()
    init_process_group("gloo")  # torchrun's ranks, and those of mpirun and srun
    train(args)
    destroy_process_group()


if __name__ == "__main__":
    main()
