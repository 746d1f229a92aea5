"""MegEngine's data-parallel tutorial carried over: softmax regression on digits, gradients summed by a callback.

python examples/megengine_train.py        (one rank a GPU, two without; another number: megengine_train.py 4)
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import fastreduce.distributed as dist

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count() or 2


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 10))
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images @ self.weight + self.bias


@dist.launcher(n_gpus=RANKS)
def main() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32)[rank::world_size]
    labels = torch.tensor(digits.target)[rank::world_size]

    model = Softmax()
    dist.bcast_list_([*model.parameters(), *model.buffers()])
    callback = dist.make_allreduce_cb("sum")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(callback)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    for epoch in range(5):
        total, steps = 0.0, -(-len(images) // 100)
        for batch, target in zip(images.split(100), labels.split(100), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            total += dist.functional.all_reduce_sum(loss.detach()).item() / world_size
        if rank == 0:
            print(f"epoch {epoch}: loss {total / steps:.3f}", flush=True)


if __name__ == "__main__":
    main()
