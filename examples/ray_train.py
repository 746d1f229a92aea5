"""Digits under Ray Train, in our class, with checkpoints: where a worker dies, Ray starts the workers again.

python examples/ray_train.py --workers 2 --compression fp16 --storage_path runs
"""

import argparse
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

from fastreduce import DistributedDataParallel as DDP
from fastreduce import load_checkpoint, save_checkpoint


def train(config: dict) -> None:
    """What each worker runs. Ray has made the process group, and set RANK, LOCAL_RANK and the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data[rank::size], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[rank::size])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    ddp = DDP(model, compression=config["compression"])  # in place of ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)

    first = 0
    before = ray.train.get_checkpoint()
    if before is not None:
        with before.as_directory() as folder:
            first = load_checkpoint(f"{folder}/snapshot.pt", model=ddp, optimizer=optimizer)["epoch"] + 1
    steps = len(digits.data) // size // 25  # the same on every rank
    for epoch in range(first, config["epochs"]):
        total = torch.zeros(())
        for i in range(steps):
            optimizer.zero_grad()
            batch = slice(25 * i, 25 * (i + 1))
            loss = torch.nn.functional.cross_entropy(ddp(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        metrics = {"epoch": epoch, "loss": total.item() / (steps * size), "wrapped by": type(ddp).__module__}
        with tempfile.TemporaryDirectory() as folder:  # Ray puts those of all workers into one checkpoint
            save_checkpoint(f"{folder}/snapshot.pt", model=ddp, optimizer=optimizer, epoch=epoch)
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
        if rank == 0:
            print(f"epoch {epoch}: loss {metrics['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    parser.add_argument("--storage_path", default="runs", help="where Ray keeps checkpoints: all nodes must see it")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"compression": args.compression, "epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            storage_path=str(Path(args.storage_path).resolve()), failure_config=FailureConfig(max_failures=2)
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print("result:", result.metrics)


if __name__ == "__main__":
    main()
