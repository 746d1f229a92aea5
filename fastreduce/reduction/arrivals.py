"""Which gradients of a backward have arrived: hooks on AccumulateGrad nodes, and what they count."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from .autograd_stack import is_within_another
from .buckets import BucketPlan

# More than any hook fires in a backward that nobody counts.
_UNCOUNTED = 1 << 60


class Arrivals:
    """Counts gradients down to full buckets, a thousand of them in little over a millisecond.

    A hook sits on each parameter's AccumulateGrad node, as torch's do: it runs after every hook of the
    user, and leaks nothing. In a counted backward it calls `on_full` when a bucket's last gradient has
    arrived. Where arrivals are to be reported, or a gradient arrives more often than `fires` tells, it
    calls `on_report` with the parameter's index.

    Attributes:
        used: for each parameter, whether a gradient arrived since `forget_used`, counted or not.
        order: parameter indices in the order of arrival, as far as they were noted in it.
        fires: how often each parameter's hook fires in one backward.
        waiting: for each bucket, how many slots it still waits for.
        bucket_of: the bucket of each parameter.
        attached: whether hooks are on the parameters.
    """

    def __init__(
        self, parameters: Sequence[Tensor], on_full: Callable[[], None], on_report: Callable[[int], None]
    ) -> None:
        self._parameters: list[Tensor] = []
        self.used, self.bucket_of, self.waiting = list[bool](), list[int](), [0]
        self.order, self.fires, self._remaining = list[int](), list[int](), list[int]()
        self._hook = self._make_hook(weakly(on_full), weakly(on_report))
        self._hooks: list[Callable[..., None]] = []
        self._nodes: dict[int, Node] = {}
        self._handles: list[Any] = []
        self._local = False  # whether a forward has been since `forget_used` whose backward is not reduced
        self.attached = True
        self.add(parameters)

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Count the gradients of these, too, once they are laid out."""
        first, new = len(self._parameters), len(parameters)
        self._parameters += parameters
        self.used += [False] * new
        self.bucket_of += [0] * new
        self._remaining += [_UNCOUNTED] * new
        self.fires += [1] * new
        self._hooks += [partial(self._hook, i) for i in range(first, first + new)]
        if self.attached:
            self.attach()

    def attach(self) -> None:
        """Put the hooks on the nodes that parameters have now; one that changed its dtype or device has a new one.

        Those of forwards whose backward may come keep theirs. One that is frozen has none, and gets its hook once it
        is trained again (`follow`, `unseen`).
        """
        self.attached = True
        self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
        for i in filter(self._is_elsewhere, range(len(self._parameters))):
            # Nodes die with their last reference, and hooks with their node.
            node = self._nodes[i] = accumulation_node(self._parameters[i])
            self._handles.append(node.register_hook(self._hooks[i]))

    def follow(self, is_back: Callable[[int], bool], armed: bool) -> None:
        """Put the hooks on the nodes that parameters have since they were cast or moved, once they are back.

        The first one tells, for some 15 µs: most modules are moved as a whole. Of parts `unseen` tells.

        Args:
            is_back: whether a parameter is again what it was.
            armed: whether the next backward, that of the forward which ends here, is reduced.
        """
        self._local |= not armed
        first = next((i for i, p in enumerate(self._parameters) if p.requires_grad), None)
        if self.attached and first is not None and self._is_elsewhere(first) and is_back(first):
            if self._local or any(self.used):  # what such a backward has brought is in `.grad` still
                for i in self.unseen():
                    self.used[i] = True
            self.attach()

    def unseen(self) -> set[int]:
        """Parameters that are not known to be used, have had another node since their hook was put, and a gradient.

        It is not all zeros, else an earlier step's may be. `Tensor.set_` gives them another node, too, as
        `torch.nn.utils.parametrize` calls it.
        """
        if not self.attached or all(self.used):
            return set()
        return {i for i, used in enumerate(self.used) if not used and self._has_missed(i) and self._has_any(i)}

    def reached(self) -> set[int]:
        """Those with another node that the backward which ends here has come to, but for a re-entrant checkpoint's."""
        if not self.attached:
            return set()
        return {i for i in range(len(self.used)) if self._has_missed(i) and self._is_reached(i)}

    def _has_missed(self, i: int) -> bool:
        """Whether a parameter has a gradient that its hook may not have seen."""
        return self._parameters[i].grad is not None and self._is_elsewhere(i)

    def _has_any(self, i: int) -> bool:
        grad = self._parameters[i].grad
        return grad is not None and bool(grad.any())

    def _is_reached(self, i: int) -> bool:
        try:
            return torch._C._will_engine_execute_node(accumulation_node(self._parameters[i]))
        except RuntimeError:  # autograd.grad with respect to it
            return False

    def _is_elsewhere(self, i: int) -> bool:
        parameter = self._parameters[i]
        return parameter.requires_grad and accumulation_node(parameter) is not self._nodes.get(i)

    def _make_hook(self, on_full: Callable[[], None], on_report: Callable[[int], None]) -> Callable[..., None]:
        # One function for all parameters stays in the processor's cache where a thousand closures do not.
        # The lists are changed in place only, so that it can hold them and nothing else.
        used, remaining, bucket_of, waiting = self.used, self._remaining, self.bucket_of, self.waiting

        def gradient_arrived(i: int, _: object = None, grads: Sequence[Tensor | None] = (None,)) -> None:
            if grads[0] is not None:  # else an output was left out of the loss: the node runs, and accumulates nothing
                used[i] = True
            left = remaining[i] = remaining[i] - 1
            if left == 0:
                bucket = bucket_of[i]
                missing = waiting[bucket] = waiting[bucket] - 1
                if missing == 0:
                    on_full()
            elif left < 0:
                on_report(i)

        return gradient_arrived

    def lay_out(self, plan: BucketPlan) -> None:
        """Count for the buckets of `plan` from now on; what is in none of them belongs to one that is never full."""
        self._slots = [*(len(bucket.slots) for bucket in plan.buckets), _UNCOUNTED]
        self.bucket_of[:] = [len(plan.buckets)] * len(self.bucket_of)
        for bucket in plan.buckets:
            for slot in bucket.slots:
                self.bucket_of[slot.parameter] = bucket.index
        self.stop()

    def stop(self) -> None:
        """Count no more until `report` or `count`."""
        self._remaining[:] = [_UNCOUNTED] * len(self._remaining)
        self.waiting[:] = self._slots

    def report(self) -> None:
        """Report every arrival."""
        self._remaining[:] = [0] * len(self._remaining)

    def count(self) -> None:
        """Count a backward down from its beginning."""
        self._remaining[:] = self.fires

    @property
    def counted_any(self) -> bool:
        """Whether a gradient has arrived since `count`."""
        return self._remaining != self.fires

    @property
    def missing(self) -> list[bool]:
        """Since `count`, for each parameter: whether less has arrived than in the first backward."""
        return [left > 0 for left in self._remaining]

    def again(self, i: int) -> None:
        """Treat the arrival of parameter `i` as if it had come now."""
        self._hooks[i]()

    def learn_fires(self) -> None:
        """Take from `order` how often each hook fires: re-entrant checkpointing can make it more than once."""
        for i, times in Counter(self.order).items():
            self.fires[i] = times

    def last_seen(self) -> list[int]:
        """The parameters of `order`, each at its last arrival."""
        return list(dict.fromkeys(reversed(self.order)))[::-1]

    def forget_used(self) -> None:
        """Start anew with what is used."""
        self._local = False
        self.used[:] = [False] * len(self.used)

    def forget_thrown_away(self) -> None:
        """What earlier backwards brought, and nobody has kept, was not used."""
        if any(self.used):  # which it is after a backward that was not reduced
            self.used[:] = [used and p.grad is not None for used, p in zip(self.used, self._parameters, strict=True)]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        self.attached = False
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], {}


class Reached:
    """Which parameters backward has reached, for those who average without hooks that count.

    A hook lies on the parameter itself, which is not kept alive, and is called before its gradient accumulates.

    Args:
        before: called before a backward's first gradient accumulates, of one within another only where it is the first.

    Attributes:
        any: whether one has come since the last `end`.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = weakly(before)
        self.any = False
        self._newest = -1  # of the backwards that have come, by torch's number
        self._reached: set[int] = set()  # identities
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[Any] = []

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _watches(self, parameter: Tensor) -> bool:
        known = self._watched.get(id(parameter))
        return known is not None and known() is parameter

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Put hooks on parameters that have none."""
        for parameter in parameters:
            if parameter.requires_grad and not self._watches(parameter):
                self._watched[id(parameter)] = weakref.ref(parameter)
                hook = partial(weakly(self._arrive), id(parameter))
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saved without it, and no warning
                self._handles.append(parameter.register_hook(hook))

    def begin(self) -> None:
        """Call `before`, unless a gradient has come since the last `end`."""
        if not self.any:
            self.any = True
            self._before()

    def _arrive(self, identity: int, grad: Tensor | None) -> None:
        if (backward := torch._C._current_graph_task_id()) > self._newest:
            self._newest = backward
            if not self.any or not is_within_another():
                self.any = True
                self._before()
        if grad is not None:
            self._reached.add(identity)

    def take(self, parameters: Sequence[Tensor]) -> list[int]:
        """Positions of those that no backward has reached since they were last taken; new ones count as reached."""
        left = [i for i, p in enumerate(parameters) if id(p) not in self._reached and self._watches(p)]
        self.watch(parameters)
        self._reached.difference_update(map(id, parameters))
        return left

    def end(self) -> None:
        """What has come until now has been averaged."""
        self.any = False


def makes_graph() -> bool:
    """Whether a backward can follow what is computed here."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def accumulation_node(leaf: Tensor) -> Node:
    """The AccumulateGrad node of a leaf, which dies with its last reference."""
    if type(leaf) is Parameter and torch.is_grad_enabled():  # in each forward: two thirds of the time
        view = leaf.view_as(leaf).grad_fn
        if view is not None:  # else the forward is inside a transform of torch.func
            node = view.next_functions[0][0]
            assert node is not None
            return node
    # Else, for a subclass, the node of a view.
    with torch._C.DisableTorchFunctionSubclass(), temporarily_clear_interpreter_stack():
        return get_gradient_edge(leaf).node


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method that does not keep its object alive, and does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
