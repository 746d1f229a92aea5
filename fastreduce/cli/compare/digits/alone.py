"""The built-in network in a script of its own, in torch's DDP: `python -m fastreduce.cli.compare.digits.alone`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from .training import load_digits, make_network

WIDTH, BATCH = 64, 16  # as `fastreduce compare` has them


def main() -> None:
    """Train until somebody ends it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits(0)
    model = DistributedDataParallel(make_network(WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    chosen = torch.Generator().manual_seed(dist.get_rank())
    while True:
        some = torch.randint(len(digits.train_labels), (BATCH,), generator=chosen, device="cpu")
        optimizer.zero_grad()
        cross_entropy(model(digits.train_images[some]), digits.train_labels[some]).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
