"""Where each parameter's gradient lies, and what stands in for it when it is missing or lies differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import TensorError
from .buckets import Bucket, ParameterSpec, matrix_rows

Action = Callable[[], Any]


@dataclass
class Collected:
    """One bucket's gradients, ready for its pipeline.

    `sources` are averaged into `targets`. `unused` are the positions of slots that this rank did not use. When the
    average has arrived, `.grad` of the parameters in `repoint` become the targets, whatever a hook has put there
    meanwhile, and `late` holds for single slots one action if any rank used the slot, another if none did.
    """

    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    repoint: list[Tensor] = field(default_factory=list)
    late: list[tuple[int, Action | None, Action | None]] = field(default_factory=list)

    def point_used(self) -> None:
        """Let `.grad` of what this rank used be the views already: hooks that read it take that for granted."""
        self._point()
        for _, if_used, if_unused in self.late:
            if if_used is not None and if_used is if_unused:
                if_used()

    def settle(self, used_by_any: Tensor) -> list[int]:
        """Do what was to be done on arrival; returns the positions of slots that no rank used."""
        self._point()
        if not self.unused and all(if_used is if_unused for _, if_used, if_unused in self.late):
            for _, action, _ in self.late:
                if action is not None:
                    action()
            return []
        flags = used_by_any.tolist()
        for position, if_used, if_unused in self.late:
            action = if_used if flags[position] > 0 else if_unused
            if action is not None:
                action()
        return [position for position in self.unused if flags[position] == 0]

    def _point(self) -> None:
        for parameter, target in zip(self.repoint, self.targets, strict=False):
            if parameter.grad is not target:
                parameter.grad = target


@dataclass
class BucketMembers:
    """One bucket's parameters and what their gradients should look like; `strides` is None if all are contiguous.

    `views` have been handed out as `.grad`, `kept` are the same for nobody else, and stay where they are.
    """

    indices: list[int]
    parameters: list[Tensor]
    dtype: torch.dtype
    numels: list[int]
    strides: list[tuple[int, ...]] | None
    views: list[Tensor] | None = None
    kept: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def copy_out(self, tensors: Iterable[Tensor]) -> None:
        """Let `.grad` be copies where they lie in the memory of these, unless a user has made them views of others.

        Who keeps all gradients in one tensor zeroes and reads that, and would never see those again that left it.
        """
        there = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided or (self.views is None and grad._is_view()):
                continue
            if grad.untyped_storage().data_ptr() in there:
                parameter.grad = grad.clone()

    def fit(self, grads: list[Any]) -> bool:
        """Whether all gradients are there and lie as their slots do; a thousand of them cost 0.2 ms."""
        try:
            laid_out = (
                all(map(Tensor.is_contiguous, grads))
                if self.strides is None
                else [grad.stride() for grad in grads] == self.strides
            )
        except (TypeError, AttributeError, RuntimeError):  # None, or sparse
            return False
        return (
            laid_out
            and not any(map(Tensor.is_neg, grads))
            and list(map(Tensor.numel, grads)) == self.numels
            and {grad.dtype for grad in grads} == {self.dtype}
        )


class Gradients:
    """The gradients of `parameters`, as real numbers, in the memory order of their parameters.

    Args:
        parameters: leaves that require gradients.
        names: their names.
        dtype: what gradients are averaged in; None means each in the dtype of its parameter.
        layouts: tensors in whose memory order slots lie, where they have the parameters' shapes; None: in its own.

    Attributes:
        layouts: of each gradient, as real numbers, a tensor without memory that has its sizes and strides.

    Raises:
        TensorError: if a parameter is neither floating-point nor complex, not strided, or made of other tensors.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        dtype: torch.dtype | None = None,
        layouts: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self.views: list[Tensor | None] = [None] * len(self.parameters)
        self.specs: list[ParameterSpec] = []
        # Under another dtype parameters change theirs in every step, and hooks follow them.
        self._wrapped_as = [(p.dtype, p.device) for p in self.parameters] if dtype is None else []
        # As they were then: a memory format set later does not move slots, which other ranks know.
        self.layouts: list[Tensor] = []
        for name, parameter, given in zip(self.names, self.parameters, layouts or [None] * len(names), strict=True):
            if hasattr(parameter, "__tensor_flatten__"):  # a tensor made of others, without memory of its own
                raise TensorError(
                    f"parameter {name!r} is a {type(parameter).__name__}, which holds other tensors and no memory of "
                    "its own; allowed: plain tensors. Average those that it holds"
                )
            real = _real(parameter)
            if real.dtype not in ops.FLOATS:
                raise TensorError(
                    f"parameter {name!r} is {parameter.dtype}; its real numbers must be one of "
                    f"{', '.join(map(str, ops.FLOATS))}"
                )
            if real.layout is not torch.strided:
                raise TensorError(f"parameter {name!r} is {real.layout}; allowed: torch.strided. Pass its to_dense()")
            layout = given if given is not None and given.shape == real.shape else _layout_of(real)
            self.layouts.append(layout)
            self.specs.append(ParameterSpec(name, real.numel(), dtype or real.dtype, real.device, matrix_rows(layout)))
        self._contiguous = [layout.is_contiguous() for layout in self.layouts]

    def add(self, others: Gradients) -> None:
        """Take in those of other parameters, behind those that are here; lists are changed in place."""
        self.parameters += others.parameters
        self.names += others.names
        self.views += others.views
        self.specs += others.specs
        self.layouts += others.layouts
        self._wrapped_as += others._wrapped_as
        self._contiguous += others._contiguous

    def is_as_wrapped(self, i: int) -> bool:
        """Whether a parameter has the dtype and the device that it had at construction."""
        parameter = self.parameters[i]
        return not self._wrapped_as or self._wrapped_as[i] == (parameter.dtype, parameter.device)

    def check_unmoved(self, indices: Sequence[int]) -> None:
        """Raise if a parameter was cast or moved since construction: autograd has then dropped our hook on it.

        Raises:
            TensorError: naming it.
        """
        for i in indices:
            if not self.is_as_wrapped(i):
                parameter, (dtype, device) = self.parameters[i], self._wrapped_as[i]
                raise TensorError(
                    f"parameter {self.names[i]!r} was {dtype} on {device} when it was wrapped, and is "
                    f"{parameter.dtype} on {parameter.device} now: its gradients no longer arrive. Cast or move the "
                    "module first, then wrap it"
                )

    def members(self, bucket: Bucket) -> BucketMembers:
        """What `collect` needs to know of a bucket, worked out once."""
        indices = [slot.parameter for slot in bucket.slots]
        return BucketMembers(
            indices,
            [self.parameters[i] for i in indices],
            bucket.dtype,
            [slot.numel for slot in bucket.slots],
            None if all(self._contiguous[i] for i in indices) else [self.layouts[i].stride() for i in indices],
        )

    @torch.no_grad()
    def install_views(self, members: BucketMembers, make_views: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Let `.grad` of a bucket's parameters be views from now on; gradients that exist move into them.

        Those of a parameter that is elsewhere meanwhile stay there, and are copied when it is back.
        """
        members.kept = make_views([self.layouts[i] for i in members.indices])
        members.views = [view.detach() for view in members.kept]
        members.addresses = list(map(Tensor.data_ptr, members.kept))
        for i, view in zip(members.indices, members.views, strict=True):
            grad, self.views[i] = self.parameters[i].grad, view
            if grad is not None and self.is_as_wrapped(i):
                view.copy_(_real(grad.resolve_conj()))
                self._point(i, view)

    def forget_views(self) -> None:
        """Hold views no more that were made; those in `.grad` stay there."""
        self.views = [None] * len(self.views)

    @staticmethod
    def _takes_in(view: Tensor) -> bool:
        """Whether views hold gradients from their coming on, and not averages only: each is in memory once then.

        That is one copy more, which a GPU's memory is worth; on CPUs a backward takes longer with it.
        """
        return view.is_cuda

    @torch.no_grad()
    def take_in(self, i: int) -> None:
        """Let a gradient that has come lie in its view alone, where there is one that takes it in and it fits."""
        grad, view = self.parameters[i].grad, self.views[i]
        if grad is None or grad is view or view is None or not self._takes_in(view):
            return
        if grad.layout is torch.strided and self._fits(grad, i) and _real(grad).data_ptr() != view.data_ptr():
            view.copy_(_real(grad))
            self._point(i, view)

    def collect(self, members: BucketMembers, used: Sequence[bool]) -> Collected:
        """The gradients of one bucket; `used` tells by parameter whether a backward reached it on this rank.

        Raises:
            TensorError: if a gradient is not dense, or has another size or dtype than its slot.
        """
        grads: list[Any] = [parameter.grad for parameter in members.parameters]
        if members.views is not None:
            self._replace_moved(members, members.views)
        if all(map(used.__getitem__, members.indices)) and members.fit(grads):
            if members.views is not None and self._takes_in(members.views[0]):
                grads = self._take_in_all(members, members.views, grads)
            return Collected(grads, members.views or grads, repoint=members.parameters)
        for i in filter(used.__getitem__, members.indices):
            self.take_in(i)
        with torch.no_grad():
            return self._collect_each(members, [parameter.grad for parameter in members.parameters], used)

    @torch.no_grad()
    def _take_in_all(self, members: BucketMembers, views: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """`take_in` of a whole bucket, whose gradients all fit: one launch."""
        strays = [k for k, (grad, view) in enumerate(zip(grads, views, strict=True)) if grad is not view]
        if strays:
            torch._foreach_copy_([views[k] for k in strays], [grads[k] for k in strays])
            for k in strays:
                members.parameters[k].grad = views[k]
        return views

    def _replace_moved(self, members: BucketMembers, views: list[Tensor]) -> None:
        """Make views anew whose memory is another by now: `p.grad.data = …`, or `module.to(…)`, which does that."""
        if list(map(Tensor.data_ptr, views)) != members.addresses:
            for position, i in enumerate(members.indices):
                if views[position].data_ptr() != members.addresses[position]:
                    self.views[i] = views[position] = members.kept[position].detach()

    def _collect_each(self, members: BucketMembers, grads: Sequence[Any], used: Sequence[bool]) -> Collected:
        found = Collected()
        for position, (i, grad) in enumerate(zip(members.indices, grads, strict=True)):
            self._check_unchanged(i, members.numels[position], members.dtype)
            if grad is not None and used[i] and self.views[i] is None and self._fits(grad, i):
                source = target = _real(grad)
                back = partial(self._put_back, i, grad)
                found.late.append((position, back, back))
            else:
                source, target = self._stand_in(found, position, i, grad, used[i])
            found.sources.append(source)
            found.targets.append(target)
        self.check_unmoved([members.indices[position] for position in found.unused])
        return found

    def _check_unchanged(self, i: int, numel: int, dtype: torch.dtype) -> None:
        """Raise if a gradient has another size or dtype than its slot: kernels take the slot's for granted."""
        parameter, now = self.parameters[i], self.specs[i].dtype
        count = real_numel(parameter)
        if count != numel or now is not dtype:
            raise TensorError(
                f"{self.names[i]!r} has {count} numbers of {now}, and had {numel} of {dtype} when its place among the "
                "gradients was made: wrap the module again, or pass another tensor"
            )

    def _stand_in(
        self, found: Collected, position: int, i: int, grad: Tensor | None, used: bool
    ) -> tuple[Tensor, Tensor]:
        if grad is not None and grad.layout is not torch.strided:
            raise TensorError(f"the gradient of {self.names[i]!r} is {grad.layout}; only dense ones are reduced")
        dtype = self.parameters[i].dtype
        if grad is not None and self._wrapped_as and grad.dtype is not dtype:
            raise TensorError(
                f"the gradient of {self.names[i]!r} is {grad.dtype} (grad_dtype), and the parameter {dtype}: gradients "
                "are averaged in the dtype of their parameter"
            )
        if grad is not None and _is_lazy_view(grad):
            grad = self.parameters[i].grad = grad.resolve_conj().resolve_neg()
        if not used:
            found.unused.append(position)
        view = self.views[i]
        if view is None:
            return self._collect_staged(found, position, i, grad, used)
        return self._collect_view(found, position, i, grad, view, used)

    def _collect_staged(
        self, found: Collected, position: int, i: int, grad: Tensor | None, used: bool
    ) -> tuple[Tensor, Tensor]:
        staged = self._staging(i)
        if grad is None:
            found.late.append((position, lambda: self._point(i, staged), None))
        else:
            real = _real(grad)
            staged.copy_(real)

            def copy_back() -> None:
                if grad.dtype is self.parameters[i].dtype:
                    real.copy_(staged)
                else:  # it came in another precision than its parameter has now
                    grad.data = staged.to(self.parameters[i].dtype)
                self._put_back(i, grad)

            found.late.append((position, copy_back, copy_back if used else None))
        return staged, staged

    def _collect_view(
        self, found: Collected, position: int, i: int, grad: Tensor | None, view: Tensor, used: bool
    ) -> tuple[Tensor, Tensor]:
        def point() -> None:
            self._point(i, view)

        if grad is None:
            view.zero_()
            found.late.append((position, point, None))
            return view, view
        real = _real(grad)
        if real.data_ptr() == view.data_ptr():
            if not used:
                saved = view.clone()
                found.late.append((position, None, lambda: view.copy_(saved)))
            return view, view
        found.late.append((position, point, point if used else None))
        if self._fits(grad, i):
            return real, view
        return self._staging(i).copy_(real), view

    def _put_back(self, i: int, grad: Tensor) -> None:
        """Where a hook has taken it out of `.grad`, or put another there, since it was collected."""
        if self.parameters[i].grad is not grad:
            self.parameters[i].grad = grad

    def _point(self, i: int, real: Tensor) -> None:
        parameter = self.parameters[i]
        # Detached, since autograd refuses `.grad.detach_()` of a view.
        parameter.grad = torch.view_as_complex(real).detach() if parameter.is_complex() else real.to(parameter.dtype)

    def _fits(self, grad: Tensor, i: int) -> bool:
        if _is_lazy_view(grad) or grad.numel() != self.parameters[i].numel():
            return False
        if _real(grad).dtype is not self.specs[i].dtype:
            return False
        return grad.is_contiguous() if self._contiguous[i] else _real(grad).stride() == self.layouts[i].stride()

    def _staging(self, i: int) -> Tensor:
        return torch.zeros_like(self.layouts[i], dtype=self.specs[i].dtype, device=self.parameters[i].device)


def _layout_of(real: Tensor) -> Tensor:
    """The memory order of a tensor, or of one that is not dense that of its elements, without memory."""
    layout = torch.empty_like(real, device="meta")
    return layout if ops.is_dense(real) else layout.contiguous()


def real_numel(tensor: Tensor) -> int:
    """How many real numbers a tensor has."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _is_lazy_view(tensor: Tensor) -> bool:
    """Whether memory holds the conjugate or the negative of what the tensor means."""
    return tensor.is_conj() or tensor.is_neg()
