"""Models whose steps are timed, each with a batch for one rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TinyParameters(nn.Module):
    """A thousand parameters of 64 elements, and next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(64) for _ in range(1000)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.rows)) * x[0]


def linear_layers(width: int) -> nn.Module:
    """12 linear layers: 24.9 million parameters at a width of 1440. All gradients are within reach of FP16."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.ReLU())))
    for layer in model[::2].children():
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


class Gpt2Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2; 124 million parameters at a width of 768. Takes token numbers, returns the mean loss of the next ones."""

    def __init__(self, width: int, layers: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Gpt2Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(name: str, width: int, rank: int, tokens: int = 128) -> tuple[nn.Module, Tensor]:
    """A model, the same on every rank, and this rank's batch: of GPT-2 tokens, in sequences of 1,024 at most."""
    torch.manual_seed(0)
    if name == "gpt2":
        vocabulary = 50257 if width == 768 else 100
        sequence = min(tokens, 1024)
        model: nn.Module = Gpt2(width, 12 if width == 768 else 2, vocabulary, max(sequence, 128))
        torch.manual_seed(1 + rank)
        return model, torch.randint(vocabulary, (tokens // sequence, sequence))
    model = TinyParameters() if name == "tiny" else linear_layers(width)
    torch.manual_seed(1 + rank)
    return model, torch.randn(8, 64 if name == "tiny" else width)
