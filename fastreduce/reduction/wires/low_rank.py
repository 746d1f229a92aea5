"""PowerSGD for one bucket: two thin factors travel in the place of each matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...compression import PowerSGD
from ...transports import Transport, Work
from ..buckets import Bucket, Slot, round_up, table_of
from ..clocks import Point
from ..residuals.applied import norms_of
from ..residuals.bucket_residuals import Share
from ..residuals.error_feedback import ErrorFeedback
from ..residuals.staged_rows import StagedRows
from ..shared_buffers import SharedBuffers
from .base import BucketWires

_EXCHANGED, _SUMMED = int(Point.EXCHANGED), int(Point.SUMMED)
STIR = 2.0**-10  # how much of the first right factor stays in each later one


class _Matrix(NamedTuple):
    """A slot that travels as factors, and where these lie among those of its bucket."""

    position: int
    slot: Slot
    shape: tuple[int, int]
    left: slice
    right: slice


class LowRank(BucketWires):
    """The factors of one bucket's matrices, and the wire that they travel in (Vogels et al. 2019, PowerSGD).

    1. `compress`: the gradient and what was kept of earlier ones → M, a matrix for each slot that the setting
       compresses, and M·right → left, [rows, rank]. Other slots and the used-flags come behind, in the same part of the
       wire.
    2. The left factors are summed over the ranks. `reduce`: their columns become orthonormal (`basis`), and
       basisᵀ·M → right, [rank, columns].
    3. The right factors are summed. Meanwhile M − basis·(own right) is kept. Its mean over the ranks is
       that of the paper's residual, M less the average. But in the paper's what ranks differ by grows from step to
       step; here each basis takes its part out.
    4. `decompress`: basis·right → averages.

    The next `right` begins as the last one (warm start), its columns orthonormal, and a little of the first one, which
    is random: so a direction that all factors had lost comes back once what is kept of it is large, and a zero gradient
    leaves a start for the next.

    All ranks have the same bits, whatever their threads: what is worked out alike on every rank, bases and averages,
    is done element by element, in a fixed order; products of libraries make only what is summed over ranks, or kept.

    Args:
        bucket: whose gradients.
        setting: the rule, and the rank.
        transport: the ranks.
        average: what sums are multiplied by.
        staging: memory for M, if other buckets use it in turn; on a GPU alone.

    Attributes:
        wire: FP32, of two parts, which are summed one after the other.
        feedback: what was not sent.
    """

    feedback: ErrorFeedback

    def __init__(
        self, bucket: Bucket, setting: PowerSGD, transport: Transport, average: float, staging: SharedBuffers
    ) -> None:
        self._bucket, self._transport, self.shard = bucket, transport, transport.rank
        self._kernels, self._rank, self._average = ops.choose(bucket.device), setting.rank, average
        self._matrices, self._small = _divide(bucket, setting)
        rows = sum(matrix.shape[0] for matrix in self._matrices)
        columns = sum(matrix.shape[1] for matrix in self._matrices)
        self._table = table_of([*(bucket.slots[i].numel for i in self._small), len(bucket.slots)], setting.alignment)
        start = round_up(rows * self._rank, setting.alignment)
        end = start + self._table.total
        self.wire = torch.zeros(end + columns * self._rank, dtype=torch.float32, device=bucket.device)
        self._first, self._second = self.wire[:end], self.wire[end:]
        self._left = self.wire[: rows * self._rank].view(rows, self._rank)
        self._right = self._second.view(self._rank, columns)
        self._flat = self.wire[start:end]  # of the small slots
        offsets = self._table.offsets.tolist()
        self._flats = [
            self._flat[offset:][: bucket.slots[i].numel] for i, offset in zip(self._small, offsets, strict=False)
        ]
        self._basis = torch.zeros_like(self._left)
        self._own = torch.zeros_like(self._right)
        self._last = torch.zeros_like(self._right)  # right factors, of the last step in which all was finite
        self._before = torch.zeros_like(self._right)  # the same, from where the reduction under way started
        self._first_ones = self._draw(bucket, columns)
        self._groups = (
            _Orthonormal([matrix.left for matrix in self._matrices], bucket.device, self._kernels.orthonormal),
            _Orthonormal([matrix.right for matrix in self._matrices], bucket.device, self._kernels.orthonormal),
        )
        share = Share(slice(0, bucket.total), slice(0, 0), transport.world_size)
        self.feedback = ErrorFeedback(bucket, share, setting.alignment)
        self._rows = StagedRows(self.feedback, bucket, staging, "M", self._views_of)

    def _draw(self, bucket: Bucket, columns: int) -> Tensor:
        """The first right factors, `[columns, rank]`, small: by name of the parameter alone."""
        drawn = torch.zeros(columns, self._rank, dtype=torch.float32, device="cpu")
        for matrix in self._matrices:
            generator = torch.Generator().manual_seed(int(bucket.table.keys[matrix.position]))
            numbers = torch.randn(matrix.shape[1], self._rank, dtype=torch.float32, generator=generator, device="cpu")
            drawn[matrix.right] = numbers * (STIR * matrix.shape[1] ** -0.5)
        return drawn.to(bucket.device)

    def _views_of(self, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of a row of residuals, the matrices and the small slots."""
        parts = [row[slot.offset :][: slot.numel] for slot in self._bucket.slots]
        matrices = [parts[matrix.position].view(matrix.shape) for matrix in self._matrices]
        return matrices, [parts[i] for i in self._small]

    def compress(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None) -> None:
        """Gradients and used-flags → the first part of the wire."""
        small = [*(grads[i] for i in self._small), used]
        self._kernels.flatten(small, self._table, self._flat, self._average, finite)
        self._rows.load()
        (kept, kept_small), (made, made_small) = self._rows.now()
        if self._small:
            torch._foreach_add_(self._flats, kept_small, alpha=self._average)
            torch._foreach_zero_(made_small)
        if not self._matrices:
            return
        with self.feedback.changing():
            self._before.copy_(self._last)
            self.feedback.stored = False
        start = self._groups[1](self._last.t()).add_(self._first_ones)
        for matrix, old, new in zip(self._matrices, kept, made, strict=True):
            torch.add(_as(grads[matrix.position], matrix.shape), old, out=new)
            torch.mm(new, start[matrix.right], out=self._left[matrix.left])
        self._left.mul_(self._average)

    def reduce(self, mark: Callable[[int], None]) -> Work:
        """The sums of both parts of the wire; what the factors do not hold is kept while the second is under way."""
        work = self._transport.all_reduce(self._first)
        if not self._matrices:
            return work
        work.wait()
        mark(_EXCHANGED)
        self._project()
        mark(_SUMMED)
        work = self._transport.all_reduce(self._second)
        self._keep_rest()
        return work

    def _project(self) -> None:
        """The sums of left factors → `basis`, and with it this rank's right factors → the second part of the wire."""
        self._basis.copy_(self._groups[0](self._left))
        for matrix, made in zip(self._matrices, self._rows.now()[1][0], strict=True):
            torch.mm(self._basis[matrix.left].t(), made, out=self._own[:, matrix.right])
        torch.mul(self._own, self._average, out=self._right)

    def _keep_rest(self) -> None:
        """What this rank's factors do not hold of M → what is kept; nothing of what is not finite."""
        made = self._rows.now()[1][0]
        for matrix, values in zip(self._matrices, made, strict=True):
            values.addmm_(self._basis[matrix.left], self._own[:, matrix.right], alpha=-1)
        if self._rows.is_staged or not self._own.isfinite().all():
            for values in made:
                values.nan_to_num_(0.0, 0.0, 0.0)
        self._rows.store()

    def decompress(
        self, averaged: Sequence[Tensor], used: Tensor, finite: Tensor | None, statistics: Tensor | None
    ) -> None:
        """Wire → averages and used-flags; `finite` becomes 0 if they are not, and the last right factors stay."""
        assert finite is not None
        self._kernels.unflatten(self._flat, self._table, [*(averaged[i] for i in self._small), used], 1.0, None, finite)
        whole = self.wire.isfinite().all()
        finite.mul_(whole)
        with self.feedback.changing():
            torch.where(whole, self._right, self._last, out=self._last)
        self._multiply(averaged, finite)

    def _multiply(self, averaged: Sequence[Tensor], finite: Tensor | None) -> None:
        for matrix in self._matrices:
            into = _as(averaged[matrix.position], matrix.shape)
            self._kernels.multiply(self._basis[matrix.left], self._right, matrix.right.start, into, finite)

    def launch_kernels(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None, in_wire: bool) -> None:
        """Launch both kernels once, where none need be a matrix."""
        self.compress(grads, used, finite)
        one = self.wire.new_zeros(1, 1)
        self._kernels.orthonormal(one.double()[None])
        left, right = self.wire.new_zeros(1, self._rank), self.wire.new_zeros(self._rank, 1)
        self._kernels.multiply(left, right, 0, one)

    @property
    def sent_by_stage(self) -> dict[str, int]:
        """(N-1)/N of both parts, twice (ring all-reduce)."""
        whole, second = (self._sent(part) for part in (self.wire, self._second))
        return {"wire stage 1": whole - second, "wire stage 2": second} if self._matrices else {"wire": whole}

    def _sent(self, part: Tensor) -> int:
        return 2 * part.nbytes * (self._transport.world_size - 1) // self._transport.world_size

    def magnitudes(self) -> Tensor:
        """Of each slot's average: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        made = [self._flat.new_empty(slot.numel) for slot in self._bucket.slots]
        for i, flat in zip(self._small, self._flats, strict=True):
            made[i] = flat
        self._multiply(made, None)
        return norms_of(made)

    # The warm start, by slot

    def factor(self, position: int) -> Tensor | None:
        """What the next right factor of a slot begins from, `[rank, columns]`; None where it travels whole."""
        found = [matrix.right for matrix in self._matrices if matrix.position == position]
        return self._last[:, found[0]].clone() if found else None

    def factors(self) -> dict[str, Tensor]:
        """The same of all, by parameter name; during a reduction, on whatever thread, what that one started from."""
        with self.feedback.changing():
            if self._last.is_cuda:
                torch.cuda.synchronize(self._last.device)  # the reduction is on another stream
            factors = (self._last if self.feedback.stored else self._before).clone()
            if self._last.is_cuda:
                torch.cuda.synchronize(self._last.device)  # nor may it go on before the copy is made
        return {matrix.slot.name: factors[:, matrix.right].clone() for matrix in self._matrices}

    def go_on(self, position: int, factor: Tensor) -> None:
        """Begin from what another bucket's `factor` gave, as far as it has columns for this rank."""
        for matrix in self._matrices:
            if matrix.position == position and factor.shape[1] == matrix.shape[1]:
                count = min(len(factor), self._rank)
                self._last[:, matrix.right] = 0
                self._last[:count, matrix.right] = factor[:count]


def _divide(bucket: Bucket, setting: PowerSGD) -> tuple[list[_Matrix], list[int]]:
    """The slots that travel as factors, and the positions of the others."""
    matrices, small, row, column = [], list[int](), 0, 0
    for position, slot in enumerate(bucket.slots):
        rows, columns = slot.rows, slot.numel // max(1, slot.rows)
        if setting.compresses(rows, columns):
            places = slice(row, row + rows), slice(column, column + columns)
            matrices.append(_Matrix(position, slot, (rows, columns), *places))
            row, column = row + rows, column + columns
        else:
            small.append(position)
    return matrices, small


def _as(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    """A dense tensor's elements in memory order, as a matrix."""
    return tensor.detach().as_strided(shape, (shape[1], 1))


class _Orthonormal:
    """Makes the columns of many matrices orthonormal, those of like sizes together.

    Args:
        places: the rows of each matrix among those of all.
        device: where they are.
        make: the kernel.
    """

    def __init__(self, places: Sequence[slice], device: torch.device, make: Callable[[Tensor], None]) -> None:
        self._make = make
        sizes: dict[int, list[slice]] = {}
        for place in places:
            sizes.setdefault(1 << (place.stop - place.start - 1).bit_length(), []).append(place)
        # By size, the rows of its matrices, `[matrices, size]`; those that are missing are one behind the last.
        end = max((place.stop for place in places), default=0)
        self._rows = []
        for size, group in sizes.items():
            rows = torch.full((len(group), size), end, device="cpu")
            for i, place in enumerate(group):
                rows[i, : place.stop - place.start] = torch.arange(place.start, place.stop, device="cpu")
            self._rows.append(rows.to(device))

    def __call__(self, stacked: Tensor) -> Tensor:
        """`[rows of all matrices, rank]`, FP32 → the same with orthonormal columns.

        A column is zero where it depends on those before, and all of a matrix NaN where a number in it is not finite.
        """
        padded = torch.nn.functional.pad(stacked, (0, 0, 0, 1))
        made = torch.empty_like(padded, memory_format=torch.contiguous_format)
        for rows in self._rows:
            columns = padded[rows].double()
            self._make(columns)
            made[rows] = columns.float()
        return made[:-1]
