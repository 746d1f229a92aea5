"""torch DDP's `mixed_precision=`: forward and backward in a low precision, the optimizer in the parameters' own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _alloc_storage, _free_storage


class LowPrecision:
    """Switches parameters between two storages: their own, and a low copy that lives from forward to backward.

    torch's constructor has made the storages, `_fp_param` and `_mp_param`, for every parameter that it
    does not ignore. Gradients have the dtype that their parameter has when they arrive.

    Args:
        parameters: those of the module.
        dtype: that of the copies; None: their parameter's.

    Attributes:
        needed: whether a forward with gradients has used the copy, whose backward may come.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = [p for p in parameters if not getattr(p, "_ddp_ignored", False)]
        self.dtype = dtype
        self._lowered = self.needed = False

    def lower(self) -> None:
        """Switch to the copy, made anew, and cast gradients that have been accumulated to its dtype (as torch)."""
        self.needed |= torch.is_grad_enabled()
        if self._lowered:  # no synchronised backward since the last forward
            return
        self._lowered = True
        with torch.no_grad():
            for parameter in self._parameters:
                low: Tensor = parameter._mp_param  # type: ignore[attr-defined]
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]  # a user may have given it another
                _alloc_storage(low, parameter.size())
                low.copy_(parameter)
                parameter.data = low
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.to(low.dtype)

    def restore(self) -> None:
        """Switch back, and free the copy."""
        if not self._lowered:
            return
        self._lowered = self.needed = False
        for parameter in self._parameters:
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]
            _free_storage(parameter._mp_param)  # type: ignore[attr-defined]

    def raise_gradients(self) -> None:
        """Cast what is left in low precision, gradients that no rank used, to the parameters' own dtype."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.dtype is not parameter.dtype:
                parameter.grad.data = parameter.grad.to(parameter.dtype)


def put_own(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook behind a module's `state_dict`: where parameters are their low copies, let it hold their own storage."""
    for own, parameter in module._parameters.items():
        name = prefix + own
        saved, low = state.get(name), getattr(parameter, "_mp_param", None)
        if saved is None or saved is parameter or low is None:  # not saved, under keep_vars=True, or ignored
            continue
        if saved.data_ptr() == low.data_ptr():
            state[name] = parameter._fp_param  # type: ignore[union-attr]
