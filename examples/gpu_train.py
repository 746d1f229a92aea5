"""GPT-2 or ResNet-50 on random data, and how fast: one rank a GPU. Without GPUs, tiny models on CPU ranks.

torchrun --nproc_per_node=8 examples/gpu_train.py --model gpt2 --compression fp16
fastreduce launch --nproc-per-node 2 examples/gpu_train.py --model resnet50 --steps 20
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from models import make, make_batch

from fastreduce import DistributedDataParallel as DDP

WARM_UP = 5


def parse() -> argparse.Namespace:
    gpus = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt2", "resnet50"], default="gpt2")
    parser.add_argument("--size", choices=["full", "tiny"], default="full" if gpus else "tiny")
    parser.add_argument("--batch", type=int, help="sequences or images of each rank; default: 8 or 64, tiny ones 4")
    parser.add_argument("--steps", type=int, default=50, help=f"timed ones, after {WARM_UP}")
    parser.add_argument("--compression", help="none, fp16, bf16, int8, int8:error_feedback, …")
    args = parser.parse_args()
    args.batch = args.batch or (4 if args.size == "tiny" else 8 if args.model == "gpt2" else 64)
    return args


def set_up() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def train(args: argparse.Namespace, device: torch.device) -> tuple[float, list[float], int]:
    """Seconds per timed step, the losses, and what a rank trains on in a step: tokens or images."""
    torch.manual_seed(0)
    net = make(args.model, args.size).to(device)
    torch.manual_seed(1 + dist.get_rank())
    batch = make_batch(net, args.batch, device)  # the same in every step, so that the loss must fall
    ddp = DDP(net, device_ids=[device.index], compression=args.compression, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    losses = torch.zeros(WARM_UP + args.steps, device=device)
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            finish(device)
            start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = ddp(*batch)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    finish(device)
    return (time.perf_counter() - start) / args.steps, losses.tolist(), batch[-1].numel()


def finish(device: torch.device) -> None:
    """Wait for the GPU, then for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    args = parse()
    device = set_up()
    seconds, losses, items = train(args, device)
    if dist.get_rank() == 0:
        ranks, kind = dist.get_world_size(), "tokens" if args.model == "gpt2" else "images"
        print(
            f"{args.model} ({args.size}), {ranks} ranks on {device.type}, compression {args.compression or 'none'}: "
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {1e3 * seconds:.1f} ms per step, "
            f"{ranks * items / seconds:,.0f} {kind} per second"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
