"""The rows of residuals that error feedback keeps of a bucket, in FP32, BF16 or 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import ops
from ..shared_buffers import zeros

KEEP, GO_ON = (1.0, 0.0), (0.0, 1.0)  # weights of the old and the new residual
BASE = 2  # the number of the third row


class Rows:
    """Two rows over the elements from `first` of a bucket, of which row `turn` counts; no host waits for a device.

    What is not FP32 is decoded where anything but a kernel looks at it, in plain torch, and encoded again where it is
    changed: values of what has not been changed stay the same (a block may get a smaller exponent, of larger codes).

    Args:
        first: see above.
        numel: the number of elements, whole blocks.
        turn: INT32 `[1]`.
        block: elements of a block.
        dtype: FP32, BF16, or uint8 for 8 bits: a code an element and a byte a block (kernels/README.md).
        shape: with it, so many of each, side by side.

    Attributes:
        rows: `[2, *shape, numel]`; in 8 bits `[2, bytes]`, all elements' codes and then their blocks' exponents.
        base: a third row, of slots whose averages are in `.grad` still: what row `turn` was before.
    """

    def __init__(
        self, first: int, numel: int, turn: Tensor, block: int, dtype: torch.dtype, shape: tuple[int, ...] = ()
    ) -> None:
        self.first, self.shape, self._turn, self._block = first, (*shape, numel), turn, block
        self._total = math.prod(self.shape)
        of_row = (ops.residual_bytes(self._total, block),) if dtype is torch.uint8 else self.shape
        # What is let go of is the system's at once, where malloc would keep it between gradients.
        self.rows = zeros(2 * math.prod(of_row), dtype, turn.device).view(2, *of_row)
        self.base: Tensor | None = None

    def clone(self, turn: Tensor) -> Rows:
        """A copy, whose row `turn` counts."""
        copied = Rows(self.first, 0, turn, self._block, self.rows.dtype)
        copied.shape, copied._total = self.shape, self._total
        copied.rows, copied.base = self.rows.clone(), None if self.base is None else self.base.clone()
        return copied

    def zeros(self) -> Tensor:
        """FP32 of the shape of a row."""
        return torch.zeros(self.shape, dtype=torch.float32, device=self._turn.device)

    def part(self, start: int, stop: int) -> slice:
        """Elements `start` to `stop` of the bucket, as far as they are here."""
        start, stop = (min(max(end - self.first, 0), self.shape[-1]) for end in (start, stop))
        return slice(start, stop)

    # A row by its number

    def _stored(self, row: int) -> Tensor:
        stored = self.base if row == BASE else self.rows[row]
        assert stored is not None
        return stored

    def _parts(self, row: int, part: slice) -> list[Tensor]:
        """Views of what holds elements of a row; in 8 bits codes and exponents of whole blocks."""
        stored, block = self._stored(row), self._block
        if stored.dtype is not torch.uint8:
            return [stored[..., part]]
        codes = stored[: self._total].view(torch.int8).view(self.shape)
        exponents = stored[self._total :][: self._total // block].view(*self.shape[:-1], self.shape[-1] // block)
        blocks = slice(part.start // block, -(-part.stop // block))
        return [codes[..., blocks.start * block : blocks.stop * block], exponents[..., blocks]]

    def read(self, row: int, part: slice = slice(None)) -> Tensor:
        """Elements in FP32: a view of FP32, else a copy."""
        part = slice(*part.indices(self.shape[-1])[:2])
        parts = self._parts(row, part)
        if len(parts) == 1:
            return parts[0].float()
        codes, exponents = parts
        start = part.start // self._block * self._block
        return ops.decode_residuals(codes, exponents, self._block)[..., part.start - start : part.stop - start]

    def write(self, row: int, values: Tensor, part: slice = slice(None)) -> None:
        """Store FP32 elements from the beginning of a block on; in 8 bits zeros fill the last one."""
        part = slice(*part.indices(self.shape[-1])[:2])
        parts = self._parts(row, part)
        if len(parts) == 1:
            parts[0].copy_(values)
        else:
            codes, exponents = parts
            filled = pad(values, (0, -(part.stop - part.start) % self._block))
            ops.encode_residuals(filled, codes, exponents, self._block)

    @contextmanager
    def changing(self, row: int, part: slice = slice(None)) -> Iterator[Tensor]:
        """Whole blocks in FP32, to be changed in place."""
        values = self.read(row, part)
        yield values
        if self.rows.dtype is not torch.float32:
            self.write(row, values, part)

    def clear(self, row: int, part: slice = slice(None)) -> None:
        """Zeros in place of whole blocks."""
        for stored in self._parts(row, slice(*part.indices(self.shape[-1])[:2])):
            stored.zero_()

    def scale(self, factor: float) -> None:
        """Multiply all."""
        for row in (0, 1) if self.base is None else (0, 1, BASE):  # both: which one counts only the device knows
            with self.changing(row) as values:
                values.mul_(factor)

    # The row that was written last, and row `turn`

    def blend(self, start: int, stop: int, old: float, new: float) -> None:
        """The row that was written last → the sum of row `turn` and itself, with these weights."""
        self._blend(self.part(start, stop), None, old, new)

    def blend_blocks(self, old: Tensor, new: Tensor, block: int) -> None:
        """The same for everything, with weights `[blocks of the bucket, 1]`."""
        *shape, numel = self.shape
        here = slice(self.first // block, (self.first + numel) // block)
        self._blend(slice(0, numel), (*shape, numel // block, block), old[here], new[here])

    def _blend(self, part: slice, shape: tuple[int, ...] | None, old: float | Tensor, new: float | Tensor) -> None:
        late = reads_late(self.rows)
        for turned in (0, 1) if late else (int(self._turn),):
            weights: tuple[float | Tensor, float | Tensor] = old, new
            if late:
                here = self._turn == turned
                weights = torch.where(here, old, 0.0), torch.where(here, new, 1.0)
            elif not isinstance(old, Tensor) and weights == KEEP:
                for kept, stored in zip(self._parts(turned, part), self._parts(1 - turned, part), strict=True):
                    stored.copy_(kept)
                return
            before = self.read(turned, part)
            with self.changing(1 - turned, part) as values:
                after = values if shape is None else values.view(shape)
                _blend(before if shape is None else before.view(shape), after, *weights)

    def keep_base(self, start: int, stop: int, where: Tensor | None = None) -> None:
        """Copy row `turn`, unless a device says not to."""
        if self.base is None:
            self.base = torch.zeros_like(self.rows[0])
        part = self.part(start, stop)
        for base, first, second in zip(*(self._parts(row, part) for row in (BASE, 0, 1)), strict=True):
            kept = torch.where(self._turn == 0, first, second)
            base.copy_(kept if where is None else torch.where(where, kept, base))

    def restore_base(self, start: int, stop: int) -> None:
        """Copy it back."""
        part = self.part(start, stop)
        for turned in (0, 1):
            for base, row in zip(self._parts(BASE, part), self._parts(turned, part), strict=True):
                row.copy_(torch.where(self._turn == turned, base, row))


def reads_late(tensor: Tensor) -> bool:
    """Whether the host would have to wait in order to read `tensor`."""
    return tensor.is_cuda


def _blend(old: Tensor, new: Tensor, old_weight: float | Tensor, new_weight: float | Tensor) -> None:
    """`new` → the sum of both with their weights, in place."""
    if isinstance(old_weight, Tensor) or isinstance(new_weight, Tensor):
        new.mul_(new_weight).addcmul_(old, old_weight)  # type: ignore[arg-type]
    else:
        new.mul_(new_weight).add_(old, alpha=old_weight)
