"""GPT-2 and ResNet-50 in their usual sizes, and tiny ones of the same make."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer's layer: attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Token ids `[batch, context]` → the loss of predicting each next one."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, tokens: int = 50257, context: int = 1024):
        super().__init__()
        self.tokens, self.context = tokens, context
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.token.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Bottleneck(nn.Module):
    """A ResNet's block: 1×1, 3×3 and 1×1 convolutions, added to what came in."""

    def __init__(self, come: int, width: int, stride: int) -> None:
        super().__init__()
        go = 4 * width
        self.path = nn.Sequential(
            *convolution(come, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, go, 1),
        )  # fmt: skip
        same = come == go and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(come, go, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images `[batch, 3, size, size]` and their labels → the loss."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, size: int = 224):
        super().__init__()
        self.classes, self.size = classes, size
        layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        come = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(come, width << stage, 2 if stage and not i else 1))
                come = 4 * width << stage
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(come, classes))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


def convolution(come: int, go: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(come, go, size, stride, size // 2, bias=False), nn.BatchNorm2d(go)


def make(model: str, size: str) -> nn.Module:
    """`gpt2` or `resnet50`, `full` or `tiny`."""
    if model == "gpt2":
        return GPT2() if size == "full" else GPT2(layers=2, width=32, heads=2, tokens=128, context=32)
    return ResNet() if size == "full" else ResNet(blocks=(1, 1, 1, 1), width=8, classes=10, size=32)


def make_batch(net: nn.Module, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """Random data for one step."""
    if isinstance(net, GPT2):
        return (torch.randint(net.tokens, (count, net.context), device=device),)
    assert isinstance(net, ResNet)
    images = torch.randn(count, 3, net.size, net.size, device=device)
    return images, torch.randint(net.classes, (count,), device=device)
