"""Train on scikit-learn's digits with ranks that may be lost, and come back, without a restart.

fastreduce launch --elastic --nproc-per-node 3 --max-restarts 10 examples/elastic_train.py --steps 2000

Kill a rank while it trains (kill -9 PID): the others go on, and the one that is started in its place joins them.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits

from fastreduce import DistributedDataParallel as DDP
from fastreduce import elastic

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--timeout", type=float, default=10.0, help="seconds after which a silent rank is lost")
parser.add_argument("--compression")
args = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32).to(device) / 16, torch.tensor(digits.target).to(device)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
ddp = DDP(model, elastic=True, compression=args.compression)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
sampler = elastic.BatchSampler(len(x), 32)  # each sample once an epoch, whoever is there

members = elastic.join(ddp, timeout=args.timeout, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
print(f"process {os.getpid()} is rank {members.rank} of {members.size}, at step {members.step}", flush=True)
members.on_change(lambda now: print(f"rank {now.rank} of {now.size} from step {now.step} on", flush=True))

for batch in sampler:
    if members.step >= args.steps:  # the same step on all of them
        break
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(ddp(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    scheduler.step()
    if members.rank == 0 and members.step % 200 == 0:
        print(f"step {members.step}: loss {loss.item():.3f}", flush=True)
