"""What each rank runs: one network per setting, all in training side by side, in rounds."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .... import DistributedDataParallel
from ....run.orders import order

TORCH = "torch DDP"
TORCH_FP16 = "torch fp16 hook"
BARE = "no wrapper"

WARM_UP_STEPS = 3  # the first step learns the order of gradients, the second lays the buckets out anew
INSPECTIONS = 10  # rounds, evenly spread, in which gradients are compared


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
    device: str = "cpu"  # or "cuda": each rank its own GPU

    @property
    def contenders(self) -> tuple[str, ...]:
        """Our settings, torch's wrapper in two ways, and the network without a wrapper."""
        return (*self.settings, TORCH, TORCH_FP16, BARE)

    @property
    def steps_each(self) -> int:
        """Steps that each contender takes: warm-up, then in every round an untimed one and the timed ones."""
        return WARM_UP_STEPS + self.rounds * (1 + self.steps)

    def inspects(self, round_number: int) -> bool:
        """Whether the untimed step of a round is inspected."""
        return round_number % -(-self.rounds // INSPECTIONS) == 0


@dataclass
class Record:
    """What one rank saw of one contender; the outer lists of seconds are rounds, the inner ones steps."""

    parameters: int = 0
    transport: str = ""  # of ours
    sent_bytes: int = 0
    step_seconds: list[list[float]] = field(default_factory=list)
    stage_seconds: list[list[tuple[float, float, float]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)
    weights: str = ""


def transport_of(records: Mapping[str, Record]) -> str:
    """What moves gradients under our settings."""
    return next(record.transport for record in records.values() if record.transport)


@dataclass(frozen=True)
class Digits:
    """scikit-learn's handwritten digits, 8 by 8 pixels: four fifths to train on, one fifth held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(seed: int, device: str = "cpu") -> Digits:
    """The same split for the same seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    scaled = (pixels - pixels.mean()) / pixels.std()
    split = train_test_split(scaled, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images = (
        torch.tensor(x, dtype=torch.float32, device="cpu").view(-1, 1, 8, 8) for x in split[:2]
    )
    train_labels, test_labels = (torch.tensor(y, device="cpu") for y in split[2:])
    return Digits(*(each.to(device) for each in (train_images, train_labels, test_images, test_labels)))


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
        self.network = make_network(experiment.width).to(experiment.device)
        self._on_gpu = experiment.device == "cuda"
        self.model = _wrap(name, self.network)
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9, fused=True)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.0, experiment.steps_each)
        self._batches = iter(batches)
        parameters = sum(p.numel() for p in self.network.parameters())
        transport = self.model.reducer.transport.name if isinstance(self.model, DistributedDataParallel) else ""
        self.record = Record(parameters, transport, _sent_bytes(name, self.model, parameters, experiment.ranks))

    def step(self) -> None:
        """An ordinary step."""
        self._forward_backward(*next(self._batches))
        self._update()

    def timed_steps(self, count: int) -> None:
        """Ordinary steps: a round's times, of the steps and of the communication thread."""
        steps, stages = [], []
        for images, labels in itertools.islice(self._batches, count):
            start = time.perf_counter()
            self._forward_backward(images, labels)
            self._update()
            if self._on_gpu:
                torch.cuda.synchronize()
            steps.append(time.perf_counter() - start)
            if isinstance(self.model, DistributedDataParallel):
                seconds = self.model.reducer.seconds
                stages.append((seconds.compress, seconds.reduce, seconds.decompress))
        self.record.step_seconds.append(steps)
        self.record.stage_seconds.append(stages)

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
        self._update()

    def _forward_backward(self, images: Tensor, labels: Tensor) -> None:
        self._optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.record.losses.append(loss.item())

    def _update(self) -> None:
        self._optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def finish(self, digits: Digits) -> Record:
        """Add what the trained network knows, and a fingerprint of it."""
        predicted = self.network(digits.test_images).argmax(1)
        self.record.correct = (predicted == digits.test_labels).tolist()
        fingerprint = hashlib.sha256()
        for parameter in self.network.parameters():
            fingerprint.update(parameter.cpu().numpy().data)
        self.record.weights = fingerprint.hexdigest()
        return self.record


def train(rank: int, report: Callable[[tuple[int, int]], None], experiment: Experiment) -> dict[str, Record]:
    """Train every contender on this rank's share of the digits; rank 0 reports the round after each step.

    1. Warm-up steps, so that what happens once is over: kernels compile, buckets find their order.
    2. Rounds. In each, every contender takes an untimed step, in some rounds inspected, which also brings its
       weights back into the caches; then all ranks start `steps` timed ones together. All contenders see
       the same batches.
    3. The trained networks are tested.
    """
    torch.set_num_threads(1)
    digits = load_digits(experiment.seed, experiment.device)
    batches = _batches(digits, experiment, rank)
    contenders = {name: Contender(name, experiment, batches) for name in experiment.contenders}
    twin = make_network(experiment.width).to(experiment.device)

    def tell(round_number: int, steps: int) -> None:
        if rank == 0:
            report((round_number, steps))

    for contender in contenders.values():
        for _ in range(WARM_UP_STEPS):
            contender.step()
        tell(0, WARM_UP_STEPS)
    for round_number in range(experiment.rounds):
        for name in order(experiment.contenders, round_number):
            contender = contenders[name]
            if experiment.inspects(round_number) and name != BARE:
                contender.inspected_step(twin)
            else:
                contender.step()
            dist.barrier()
            contender.timed_steps(experiment.steps)
            tell(round_number + 1, 1 + experiment.steps)
    return {name: contender.finish(digits) for name, contender in contenders.items()}


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
    share = torch.arange(rank, len(digits.train_labels), experiment.ranks, device="cpu")
    wanted = experiment.steps_each * experiment.batch
    generator = torch.Generator().manual_seed(experiment.seed + rank)
    passes = [
        share[torch.randperm(len(share), generator=generator, device="cpu")] for _ in range(wanted // len(share) + 1)
    ]
    chosen = torch.cat(passes)[:wanted].split(experiment.batch)
    return [(digits.train_images[indices], digits.train_labels[indices]) for indices in chosen]


def _gradient(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in network.parameters() if p.grad is not None])
