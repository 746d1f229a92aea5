"""What each rank runs: one network per setting, all in training side by side, in rounds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .. import DistributedDataParallel

TORCH = "torch DDP"
TORCH_FP16 = "torch DDP fp16 hook"
BARE = "no wrapper"

WARM_UP_STEPS = 3  # the first step learns the order of gradients, the second lays the buckets out anew


@dataclass(frozen=True)
class Experiment:
    """What is compared, on how many ranks, with which network and for how long."""

    settings: tuple[str, ...]
    ranks: int
    width: int
    batch: int
    rounds: int
    steps: int
    seed: int

    @property
    def contenders(self) -> tuple[str, ...]:
        """Our settings, torch's wrapper in two ways, and the network without a wrapper."""
        return (*self.settings, TORCH, TORCH_FP16, BARE)

    @property
    def steps_each(self) -> int:
        """Steps that each contender takes: warm-up, then per round one that is inspected, then the timed ones."""
        return WARM_UP_STEPS + self.rounds * (1 + self.steps)


@dataclass
class Record:
    """What one rank saw of one contender; the outer lists of seconds are rounds, the inner ones steps."""

    parameters: int = 0
    sent_bytes: int = 0
    step_seconds: list[list[float]] = field(default_factory=list)
    stage_seconds: list[list[tuple[float, float, float]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)
    weights: str = ""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits, 8 by 8 pixels: four fifths to train on, one fifth held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int) -> Digits:
    """The same split for the same seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) for x in split[:2])
    train_labels, test_labels = (torch.tensor(y) for y in split[2:])
    return Digits(train_images, train_labels, test_images, test_labels)


def make_network(width: int) -> nn.Sequential:
    """Three convolutions, then two linear layers that hold most of the 4,500 × width² bytes."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 64 * width),
        nn.ReLU(),
        nn.Linear(64 * width, 10),
    )


class Contender:
    """One network in training under one setting."""

    def __init__(self, name: str, experiment: Experiment, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        torch.manual_seed(experiment.seed)
        self.network = make_network(experiment.width)
        self.model = _wrap(name, self.network)
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9, fused=True)
        self._batches = iter(batches)
        parameters = sum(p.numel() for p in self.network.parameters())
        self.record = Record(parameters, _sent_bytes(name, self.model, parameters, experiment.ranks))

    def step(self) -> None:
        """An ordinary step."""
        self._forward_backward(*next(self._batches))
        self._optimizer.step()

    def timed_step(self) -> None:
        """An ordinary step, with its time and the communication thread's added to the current round."""
        batch = next(self._batches)
        start = time.perf_counter()
        self._forward_backward(*batch)
        self._optimizer.step()
        self.record.step_seconds[-1].append(time.perf_counter() - start)
        if isinstance(self.model, DistributedDataParallel):
            seconds = self.model.reducer.seconds
            self.record.stage_seconds[-1].append((seconds.compress, seconds.reduce, seconds.decompress))

    def inspected_step(self, twin: nn.Module) -> None:
        """An ordinary step, whose averaged gradient is compared with an exact average from the same weights.

        Args:
            twin: a network without a wrapper, which makes this rank's gradient once more.
        """
        images, labels = next(self._batches)
        twin.load_state_dict(self.network.state_dict())
        twin.zero_grad()
        cross_entropy(twin(images), labels).backward()
        exact = _gradient(twin)
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        self._forward_backward(images, labels)
        error = (_gradient(self.network) - exact).norm() / exact.norm()
        self.record.gradient_errors.append(error.item())
        self._optimizer.step()

    def _forward_backward(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.record.losses.append(loss.item())

    @torch.no_grad()
    def finish(self, digits: Digits) -> Record:
        """Add what the trained network knows, and a fingerprint of it."""
        predicted = self.network(digits.test_images).argmax(1)
        self.record.correct = (predicted == digits.test_labels).tolist()
        fingerprint = hashlib.sha256()
        for parameter in self.network.parameters():
            fingerprint.update(parameter.numpy().data)
        self.record.weights = fingerprint.hexdigest()
        return self.record


def train(rank: int, report: Callable[[int], None], experiment: Experiment) -> dict[str, Record]:
    """Train every contender on this rank's share of the digits; rank 0 reports each step by its round.

    In each round every contender takes one inspected step and then `steps` timed ones. All start together
    and take the same batches.
    """

    def tell(round_number: int) -> None:
        if rank == 0:
            report(round_number)

    digits = load_digits(experiment.seed)
    batches = _batches(digits, experiment, rank)
    contenders = {name: Contender(name, experiment, batches) for name in experiment.contenders}
    twin = make_network(experiment.width)
    for contender in contenders.values():
        for _ in range(WARM_UP_STEPS):
            contender.step()
            tell(0)

    for round_number in range(experiment.rounds):
        for name in order(experiment.contenders, round_number):
            contender = contenders[name]
            if name == BARE:
                contender.step()
            else:
                contender.inspected_step(twin)
            tell(round_number + 1)
            contender.record.step_seconds.append([])
            contender.record.stage_seconds.append([])
            dist.barrier()
            for _ in range(experiment.steps):
                contender.timed_step()
                tell(round_number + 1)
    return {name: contender.finish(digits) for name, contender in contenders.items()}


def order(contenders: Sequence[str], round_number: int) -> list[str]:
    """Who comes after whom in a round: every second one is the last in reverse, then all move up by one."""
    shift = round_number // 2 % len(contenders)
    rotated = [*contenders[shift:], *contenders[:shift]]
    return rotated[::-1] if round_number % 2 else rotated


def _wrap(name: str, network: nn.Module) -> nn.Module:
    if name == BARE:
        return network
    if name not in (TORCH, TORCH_FP16):
        return DistributedDataParallel(network, compression=name)
    model = TorchDDP(network)
    if name == TORCH_FP16:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def _sent_bytes(name: str, model: nn.Module, parameters: int, ranks: int) -> int:
    if isinstance(model, DistributedDataParallel):
        return model.reducer.sent_bytes
    size = {TORCH: 4, TORCH_FP16: 2, BARE: 0}[name]
    return 2 * (ranks - 1) * size * parameters // ranks  # an all-reduce sends (N-1)/N of everything twice


def _batches(digits: Digits, experiment: Experiment, rank: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the training digits, shuffled anew in every pass."""
    share = torch.arange(rank, len(digits.train_labels), experiment.ranks)
    wanted = experiment.steps_each * experiment.batch
    generator = torch.Generator().manual_seed(experiment.seed + rank)
    passes = [share[torch.randperm(len(share), generator=generator)] for _ in range(wanted // len(share) + 1)]
    chosen = torch.cat(passes)[:wanted].split(experiment.batch)
    return [(digits.train_images[indices], digits.train_labels[indices]) for indices in chosen]


def _gradient(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in network.parameters() if p.grad is not None])
