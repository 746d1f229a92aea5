"""The context of torch's `join()` for one module."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from .reducer import TorchReducer


class JoinContext(Join):
    """Torch's, for a module that `reducer` reduces, or torch itself (None).

    Who leaves it owes the others nothing: a backward that raised here, and was caught, is made up for first.
    """

    def __init__(self, module: Joinable, reducer: TorchReducer | None, *args: Any, **kwargs: Any) -> None:
        super().__init__([module], *args, **kwargs)
        self._reducer = reducer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._enable and self._reducer is not None:
            self._reducer.make_up_for_raised()
        super().__exit__(kind, error, traceback)
