"""Where each parameter's gradient lies, and what stands in for it when it is missing or lies differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import ops
from .buckets import Bucket, ParameterSpec
from .errors import TensorError

Action = Callable[[], Any]


@dataclass
class Collected:
    """One bucket's gradients, ready for its pipeline.

    `sources` are averaged into `targets`. `unused` are the positions of slots that this rank did not
    use. `late` holds, for single slots, what to do when the average has arrived: one action if any
    rank used the slot, another if none did.
    """

    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    late: list[tuple[int, Action | None, Action | None]] = field(default_factory=list)

    def settle(self, used_by_any: Tensor) -> None:
        """Run the late actions; `used_by_any` are the bucket's reduced flags."""
        if not self.late:
            return
        flags = used_by_any.tolist()
        for position, if_used, if_unused in self.late:
            action = if_used if flags[position] > 0 else if_unused
            if action is not None:
                action()


class Gradients:
    """The gradients of `parameters`, as real numbers, in the memory order of their parameters.

    Raises:
        TensorError: if a parameter is neither floating-point nor complex.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self.views: list[Tensor | None] = [None] * len(self.parameters)
        self.specs: list[ParameterSpec] = []
        self._contiguous: list[bool] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            real = _real(parameter)
            if real.dtype not in ops.FLOATS:
                raise TensorError(
                    f"parameter {name!r} is {parameter.dtype}; its real numbers must be one of "
                    f"{', '.join(map(str, ops.FLOATS))}"
                )
            self.specs.append(ParameterSpec(name, real.numel(), real.dtype, real.device))
            self._contiguous.append(real.is_contiguous() or not ops.is_dense(real))

    @torch.no_grad()
    def install_views(self, bucket: Bucket, make_views: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Let `.grad` of a bucket's parameters be views from now on; gradients that exist move into them."""
        indices = [slot.parameter for slot in bucket.slots]
        for i, view in zip(indices, make_views([self._layout(i) for i in indices]), strict=True):
            grad, self.views[i] = self.parameters[i].grad, view
            if grad is not None:
                view.copy_(_real(grad))
                self._point(i, view)

    def collect(self, bucket: Bucket, used: Sequence[bool]) -> Collected:
        """The gradients of one bucket; `used` tells by parameter whether a backward reached it on this rank."""
        found = Collected()
        for position, slot in enumerate(bucket.slots):
            i = slot.parameter
            grad, view = self.parameters[i].grad, self.views[i]
            if grad is not None and grad.layout is not torch.strided:
                raise TensorError(f"the gradient of {slot.name!r} is {grad.layout}; only dense ones are reduced")
            if not used[i]:
                found.unused.append(position)
            if view is not None:
                pair = self._collect_view(found, position, i, grad, view, used[i])
            elif grad is not None and used[i] and self._fits(grad, i):
                pair = (_real(grad),) * 2
            else:
                pair = self._collect_staged(found, position, i, grad, used[i])
            found.sources.append(pair[0])
            found.targets.append(pair[1])
        return found

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
                real.copy_(staged)

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

    def _point(self, i: int, real: Tensor) -> None:
        parameter = self.parameters[i]
        parameter.grad = torch.view_as_complex(real) if parameter.is_complex() else real

    def _fits(self, grad: Tensor, i: int) -> bool:
        return grad.is_contiguous() if self._contiguous[i] else grad.stride() == self.parameters[i].stride()

    def _layout(self, i: int) -> Tensor:
        """Size and strides of gradient `i` in its slot, without memory."""
        layout = torch.empty_like(_real(self.parameters[i]), device="meta")
        return layout.contiguous() if self._contiguous[i] else layout

    def _staging(self, i: int) -> Tensor:
        return torch.zeros_like(self._layout(i), device=self.parameters[i].device)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
