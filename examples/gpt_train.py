"""A small GPT on text that comes with Python, the language's reference, in torch's own DDP.

torchrun --nproc_per_node=2 examples/gpt_train.py --steps 300
fastreduce compare --train 300 examples/gpt_train.py
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONTEXT = 64


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.token(text) + self.place.weight[: text.shape[1]]
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 64 letters per rank and step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    text = torch.tensor([ord(letter) % 128 for topic in sorted(topics) for letter in topics[topic]])
    ddp = DDP(GPT(args.width, args.layers))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    # Of no two seeds and ranks the same: `compare --seeds` takes 0, 1, 2, …
    batches = torch.Generator().manual_seed(torch.initial_seed() % 2**31 * dist.get_world_size() + dist.get_rank())
    for step in range(args.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (args.batch, 1), generator=batches)
        letters = text[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
