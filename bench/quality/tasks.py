"""What is trained: two ordinary tasks, and two in which small gradients lie beside large ones, each by two optimizers.

None is learned to a loss of nearly zero, of which one percent would be nothing: text is what it is, digits lie under
noise, classes are drawn from probabilities, and weights do not become as large as the smallest features would need.
Rates and batches are such that `fp16`, which hardly changes a gradient, ends well within one percent of `none`: at
higher rates a training's end is chance, and five seeds decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastreduce.cli.compare.digits.training import load_digits, make_network

from ..kernels.formats import texts
from ..training.timed_models import Gpt2

Batch = tuple[Tensor, ...]

BATCH = 8  # that of the GPT; the others' are multiples
NOISE = 1.5  # over the digits' own deviation
FEATURES, LOUD, SMALLEST = 64, 200.0, 1e-4


@dataclass(frozen=True)
class Data:
    """A model, which takes a batch and returns its mean loss; for each step a batch of all ranks; what is held out."""

    model: nn.Module
    steps: Sequence[Batch]
    held_out: Sequence[Batch]


@dataclass(frozen=True)
class Task:
    """What is trained: `make` draws it for so many steps. Learning rates fall to zero on a straight line."""

    name: str
    make: Callable[[int], Data]
    steps: int
    rates: dict[str, float]


class Loss(nn.Module):
    """A network, and what its output is held against."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        return self.loss(self.network(inputs), wanted)


def draw_gpt(steps: int) -> Data:
    """One block of GPT-2, 71 thousand parameters, on the bytes of Python's own library."""
    return Data(Gpt2(64, 1, 256, 64), list(islice(texts(64, BATCH), steps)), list(islice(texts(64, 64), 8)))


def draw_cnn(steps: int) -> Data:
    """Three convolutions and two linear layers, 77 thousand parameters, on scikit-learn's digits under noise."""
    digits = load_digits(int(torch.randint(2**31, ())))

    def draw(images: Tensor, labels: Tensor, count: int) -> Batch:
        chosen = torch.randint(len(labels), (count,))
        clean = images[chosen]
        return clean + NOISE * torch.randn_like(clean), labels[chosen]

    batches = [draw(digits.train_images, digits.train_labels, 64) for _ in range(steps)]
    held_out = [draw(digits.test_images, digits.test_labels, 4096)]
    return Data(Loss(make_network(8), F.cross_entropy), batches, held_out)


def draw_loud(steps: int) -> Data:
    """A perceptron, 10 thousand parameters, with one feature 200 times as large as the others; classes by another."""
    size = torch.ones(FEATURES)
    size[0] = LOUD
    first, second = torch.randn(FEATURES, 32) * 1.5 / math.sqrt(FEATURES), torch.randn(32, 10) * 4.5 / math.sqrt(32)

    def draw(count: int) -> Batch:
        x = torch.randn(count, FEATURES)
        return x * size, torch.multinomial((torch.tanh(x @ first) @ second).softmax(1), 1).squeeze(1)

    network = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 10))
    return Data(Loss(network, F.cross_entropy), [draw(64) for _ in range(steps)], [draw(4096)])


def draw_spread(steps: int) -> Data:
    """A linear regression, 4 thousand parameters, whose features are from 1 down to 1e-4 in size."""
    size, wanted = SMALLEST ** torch.linspace(0, 1, FEATURES), torch.randn(FEATURES, 64) / 5

    def draw(count: int) -> Batch:
        x = torch.randn(count, FEATURES)
        return x * size, x @ wanted

    network = nn.Linear(FEATURES, 64, bias=False)
    nn.init.zeros_(network.weight)
    return Data(Loss(network, F.mse_loss), [draw(64) for _ in range(steps)], [draw(2048)])


TASKS = {
    "gpt": Task("GPT, text", draw_gpt, 200, {"adamw": 2e-3, "sgd": 0.1}),
    "cnn": Task("CNN, digits", draw_cnn, 200, {"adamw": 2e-3, "sgd": 0.03}),
    "loud": Task("one loud feature", draw_loud, 300, {"adamw": 3e-3, "sgd": 1e-3}),
    "spread": Task("features over 1e4", draw_spread, 300, {"adamw": 0.3, "sgd": 20}),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, rate, fused=True),
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9, fused=True),
}


@lru_cache(maxsize=1)
def data_of(task: str, seed: int, steps: int) -> Data:
    """A task drawn from a seed, kept while settings take turns at it."""
    torch.manual_seed(seed)
    return TASKS[task].make(steps)


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean over batches of one size."""
    return sum(float(model(*batch)) for batch in batches) / len(batches)
