"""A small GPT on text that comes with Python: sharded within a node, averaged between nodes, gradients compressed.

torchrun --nproc_per_node=2 examples/fsdp_train.py --checkpoint runs/fsdp
torchrun --nproc_per_node=4 examples/fsdp_train.py --nodes 2        (on one machine, as if it were two of two ranks)

On each of two nodes:
torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 examples/fsdp_train.py --nodes 2
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GPT2
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastreduce.fsdp

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of this run")
    parser.add_argument("--nodes", type=int, default=1, help="replicas: parameters are sharded within each")
    parser.add_argument(
        "--compression",
        default="bf16",
        help="of what FSDP reduces; error feedback keeps 8 bytes a parameter on each rank",
    )
    parser.add_argument("--between-nodes", default="int8:error_feedback", help="of what nodes exchange")
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder, with one for each training that has ended; goes on from the last"
    )
    args = parser.parse_args()

    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(
        device, (args.nodes, dist.get_world_size() // args.nodes), mesh_dim_names=("replicate", "shard")
    )

    torch.manual_seed(0)
    model = GPT2(layers=2, width=128, heads=4, tokens=128, context=CONTEXT).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    reduction = fastreduce.fsdp.compress(model, args.compression)
    if args.nodes > 1:
        fastreduce.fsdp.replicate(model, mesh["replicate"], args.between_nodes)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = args.checkpoint.glob("*/.metadata") if args.checkpoint else []  # which is written last
    done = max((int(metadata.parent.name) for metadata in whole), default=0)
    if done:
        weights, moments = get_state_dict(model, optimizer)
        saved = args.checkpoint / str(done)
        dcp.load({"model": weights, "optimizer": moments, "reduction": reduction}, checkpoint_id=saved)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    text = torch.tensor([ord(letter) % 128 for topic in sorted(topics) for letter in topics[topic]])
    batches = torch.Generator()
    for step in range(done, done + args.steps):
        batches.manual_seed(step * dist.get_world_size() + dist.get_rank())
        starts = torch.randint(len(text) - CONTEXT, (8, 1), generator=batches)
        optimizer.zero_grad()
        loss = model(text[starts + torch.arange(CONTEXT)].to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(f"{reduction.sent_bytes} bytes of gradients sent by a rank in each step")

    if args.checkpoint is not None:
        weights, moments = get_state_dict(model, optimizer)
        last = args.checkpoint / str(done + args.steps)
        dcp.save({"model": weights, "optimizer": moments, "reduction": reduction}, checkpoint_id=last)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
