"""Which parameters of a wrapped module are averaged, and what it has beside them: frozen, unfrozen since, or new."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from torch import Tensor, nn

from ..errors import ReducerError
from .logger import TorchLogger
from .reducer import TorchReducer

_REQUIRES_GRAD = attrgetter("requires_grad")


def names_of(module: nn.Module, parameters: Iterable[Tensor]) -> list[str]:
    """The first name of each in a module that has them.

    Also of what a module's own `named_parameters` leaves out: torch's class asks each part for what it has itself.
    """
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(id(parameter), name)
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            names.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
    return [names[id(parameter)] for parameter in parameters]


class Trainable:
    """The parameters of a wrapper's module, as the wrapper looks after them.

    The module is given with each call: a script may put another one in its place.

    Args:
        module: what is wrapped.
        ignored: names of parameters that nobody averages.

    Attributes:
        frozen: by name, those that are not averaged, and required no gradient at construction; changed in place.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._ignored = ignored
        named = module.named_parameters()
        self.frozen = {name: p for name, p in named if not p.requires_grad and name not in ignored}

    @property
    def holds_thawed(self) -> bool:
        """Whether something requires a gradient by now that did not at construction, and is not averaged yet."""
        return any(map(_REQUIRES_GRAD, self.frozen.values()))

    def add_thawed(
        self,
        module: nn.Module,
        reducer: TorchReducer,
        logger: TorchLogger,
        find: Callable[[], tuple[list[Tensor], list[bool]]],
    ) -> None:
        """Let what was frozen at construction, and requires a gradient now, be averaged from the next forward on.

        Every rank calls it. Where that cannot be, `check` raises when its gradients have come: under a communication
        hook, which may keep something of buckets, and where ranks have joined, who do not look.

        Args:
            module: as it is now.
            reducer: what averages.
            logger: that of the wrapper.
            find: tells the parameters that require a gradient, and of each whether its gradient is sparse.
        """
        if not self.holds_thawed or not reducer.buckets.are_compressed:
            return
        if reducer.buckets.uneven.some_have_joined(reducer.transport.world_size):
            return
        thawed = {id(parameter): name for name, parameter in self.frozen.items() if parameter.requires_grad}
        found = [(parameter, sparse) for parameter, sparse in zip(*find(), strict=True) if id(parameter) in thawed]
        if found:  # else the module has them no longer
            parameters = [parameter for parameter, _ in found]
            names = names_of(module, parameters)
            reducer.add(parameters, names, [i for i, (_, sparse) in enumerate(found) if sparse])
            logger.added(parameters, names, reducer.plan, reducer.buckets.settings_text())
        for name in thawed.values():
            del self.frozen[name]

    def check(self, module: nn.Module, averaged: Collection[int], rank: int) -> None:
        """Raise if the module holds a trainable parameter that nobody averages.

        What was frozen, and has no gradient, is for the next forward.

        Args:
            module: as it is now.
            averaged: identities of those that somebody does.
            rank: this one.

        Raises:
            ReducerError: naming it.
        """
        known = {*averaged, *(id(parameter) for parameter in self.frozen.values() if parameter.grad is None)}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in known and name not in self._ignored:
                raise ReducerError(
                    f"rank {rank}: parameter {name!r} was added, replaced or unfrozen after the module was wrapped, so "
                    "its gradient is not averaged and replicas would drift apart. Wrap the module again "
                    "(fastreduce.DistributedDataParallel(ddp.module, …)), or freeze the parameter"
                )
