"""Who tells what became of averaged gradients: optimizers' steps, `GradScaler.unscale_`, clipping, and users."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...environment.once import once
from ...errors import SettingError, TensorError, brief
from .factors import ONE, Factor, finite_number, number_in

Read = dict[int, tuple[Tensor, float]]  # numbers of devices that the host has waited for, by a tensor's identity


class Listener(Protocol):
    """Gradients of one reduction, of whose changes it is told."""

    def intact(self) -> dict[int, int]:
        """Identities of the gradients that are as they were left, by the positions of their slots."""

    def refresh(self, positions: Iterable[int]) -> None:
        """Take the gradients of slots as they are now."""

    def multiply(self, positions: Iterable[int], by: Factor, expected: bool) -> None:
        """Take note that gradients have been multiplied; `expected`: those of the next step will be, too."""

    def step(self, parameters: Set[int], expected: Factor, applies: Factor, read: Read) -> None:
        """An optimizer applies the gradients of the parameters with these identities."""

    def tell(self, parameters: Set[int], factor: float) -> None:
        """A user says what became of the gradients of the parameters with these identities."""


_live: weakref.WeakSet[Listener] = weakref.WeakSet()
_changing_live = threading.Lock()
_optimized: set[int] = set()  # identities of parameters that a torch optimizer has stepped
_let_go: set[int] = set()  # of those that are gone, or DTensors that hold other memory since `Module.to` has moved them
_optimizers = weakref.WeakValueDictionary[int, torch.optim.Optimizer]()  # by identity, those that have stepped


def held(tensor: Tensor) -> Tensor:
    """What may be referred to weakly: of a DTensor what it holds, since `Module.to` swaps it where nobody does so.

    Its `to_local` makes another tensor of a parameter's each time.
    """
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def listen(listener: Listener) -> None:
    """Tell it from now on, while somebody else keeps it."""
    notice()
    with _changing_live:
        _live.add(listener)


def leave(listener: Listener) -> None:
    """Tell it no more."""
    with _changing_live:
        _live.discard(listener)


def is_optimized(parameter: Tensor | None) -> bool:
    """Whether a torch optimizer has stepped it: then its next step will tell, too."""
    if id(parameter) in _let_go:
        gone = set(_let_go)
        for reference in _optimizers.valuerefs():
            if (optimizer := reference()) is not None:
                _parameters_of(optimizer)  # what it has is not gone
        _let_go.difference_update(gone)  # what was optimized by others only is forgotten
    return id(parameter) in _optimized


def know_optimized(parameters: Iterable[Tensor]) -> None:
    """A torch optimizer has stepped these, in the process that saved them, and goes on."""
    for parameter in parameters:
        if (identity := id(parameter)) not in _optimized:
            _optimized.add(identity)
            weakref.finalize(held(parameter), _forget, identity).atexit = False


def _forget(identity: int) -> None:
    _optimized.discard(identity)
    _let_go.add(identity)


def _all() -> list[Listener]:
    with _changing_live:
        return list(_live)


@contextlib.contextmanager
def multiplied(grads: Iterable[Tensor], by: Callable[[], Factor], expected: bool = False) -> Iterator[None]:
    """Around an operation that multiplies gradients in place.

    Args:
        grads: the gradients.
        by: what by; asked only where error feedback follows them.
        expected: whether those of the next step will be multiplied by as much, as a loss scale is taken out.
    """
    identities = set(map(id, grads)) if _live else set()
    before = [(applied, applied.intact()) for applied in _all()]
    yield
    factor = None
    for applied, intact in before:
        positions = [i for i, identity in intact.items() if identity in identities]
        if positions:
            factor = by() if factor is None else factor
            applied.multiply(positions, factor, expected)
        applied.refresh(intact)


def note_applied(parameters: Iterable[Tensor], factor: float = 1.0) -> None:
    """Say what became of the averaged gradients of `parameters`, where error feedback cannot see it.

    What `int8:error_feedback` adds to the next gradients follows what was applied of the last ones. It sees the steps
    of torch's optimizers, `GradScaler` and clipping by itself. An update that is no `torch.optim.Optimizer` says so:
    call this between that and the next forward. So does a loop that divides all gradients in place in every step, as by
    a loss scale or a number of accumulated backwards, after the optimizer's step: else that counts as clipping, and
    error feedback does less the larger the number is.

    Args:
        parameters: parameters.
        factor: how much of the averaged gradients was applied: 1 for all, a loss scale aside; 0 if they were thrown
            away.

    Raises:
        SettingError: if `factor` is no number, or NaN or infinite.
        TensorError: if `parameters` are something else, such as a module or names with parameters.
    """
    number = finite_number(factor)
    if number is None:
        raise SettingError(f"note_applied: factor={brief(factor)}; allowed: finite numbers")
    if isinstance(parameters, (Tensor, str)) or not isinstance(parameters, Iterable):
        raise TensorError(f"note_applied: a {type(parameters).__name__}; allowed: parameters, as model.parameters()")
    identities = set[int]()
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise TensorError(
                f"note_applied: among the parameters is a {type(parameter).__name__}; allowed: parameters, as "
                "model.parameters()"
            )
        identities.add(id(parameter))
    for applied in _all():
        applied.tell(identities, number)


@once
def notice() -> None:
    """Let optimizers and `GradScaler.unscale_` tell from now on: those that step are known when somebody listens."""
    notice_unscaling()
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


# What has been told of a step that is going on, by the id of an optimizer, whose class may have no hash.
_told: dict[int, weakref.ref[torch.optim.Optimizer]] = {}


@torch._disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gradients are as the optimizer gets them, unless a closure or the optimizer's own hooks come after this."""
    _told.pop(id(optimizer), None)  # of a step that raised
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not _live:
        _parameters_of(optimizer)
    elif hasattr(optimizer, "found_inf") or (closure is None and not optimizer._optimizer_step_pre_hooks):
        _told[id(optimizer)] = weakref.ref(optimizer)
        _tell_step(optimizer)


@torch._disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    told = _told.pop(id(optimizer), None)
    if _live and (told is None or told() is not optimizer):
        _tell_step(optimizer)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Set[int]:
    """Identities of what an optimizer steps, which are known from now on."""
    _optimizers[id(optimizer)] = optimizer
    groups = [group["params"] for group in getattr(optimizer, "param_groups", ())]
    identities = set(map(id, itertools.chain(*groups)))
    if not identities <= _optimized:
        know_optimized(itertools.chain(*groups))
    return identities


def _tell_step(optimizer: torch.optim.Optimizer) -> None:
    parameters = _parameters_of(optimizer)
    # A fused optimizer takes the loss scale out itself, and leaves the step out where a gradient is not finite.
    scale, found = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    expected = 1.0 / number_in(scale) if isinstance(scale, Tensor) else ONE
    applies = 1.0 - number_in(found) if isinstance(found, Tensor) else ONE
    read: Read = {}  # the loss scale that all buckets share, once
    for applied in _all():
        applied.step(parameters, expected, applies, read)


@once
def notice_unscaling() -> None:
    """Let `GradScaler.unscale_` count as a change of gradients; by itself its operation leaves their versions alone."""
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

    def and_count(tensors: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
        with multiplied(tensors, lambda: number_in(inverse_scale), expected=True):
            with torch._C._AutoDispatchBelowADInplaceOrView():
                unscale(tensors, found_inf, inverse_scale)
            torch.autograd.graph.increment_version(tensors)

    library = torch.library.Library("aten", "IMPL")
    library.impl(unscale, and_count, "ADInplaceOrView")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []  # an implementation ends with its library
