"""Every kernel operation over a model's buckets, beside the plain ways of doing the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fastreduce import BF16, Compression, TopK, ops
from fastreduce.kernels.slots import OF_AVERAGES, Draws
from fastreduce.ops.backends import Backend
from fastreduce.reduction.residuals.rows import Rows

from .kernel_cases import RANKS, WITHOUT, Case, Gradients, Model, Way, elements


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gradient_bytes(model: Model) -> int:
    return elements(model) * model[0].used.itemsize


def _targets(model: Model) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Where averages go: by bucket, and all of them."""
    targets = [[torch.zeros_like(grad) for grad in each.grads] for each in model]
    return targets, [grad for grads in targets for grad in grads]


def _draws(model: Model, setting: Compression, who: int = 0) -> Draws | None:
    """What a setting's random bits follow from."""
    step = torch.ones(1, dtype=torch.int64, device=model[0].used.device)
    return None if setting.random_seed is None else Draws(setting.random_seed, who, step)


def _in_shards(wire: Tensor, ranks: int) -> Tensor:
    """A row for each rank, each of a multiple of 16 elements as plans have them; what is left over is left out."""
    return wire[: len(wire) // (16 * ranks) * 16 * ranks].view(ranks, -1)


def _same_twice(wire: Tensor) -> Tensor:
    """The first shard of a wire, as if every rank had sent it: with zeros in the same padding."""
    return wire.view(RANKS, -1)[:1].repeat(RANKS, 1)


def flatten_bf16_stochastic(model: Model) -> Case:
    """Gradients → BF16 wires, rounded by chance."""
    wires, drawn = [each.flat(torch.bfloat16) for each in model], _draws(model, BF16(rounding="stochastic"))

    def run(kernels: Backend, draws: Draws | None = drawn) -> None:
        for each, wire in zip(model, wires, strict=True):
            kernels.flatten([*each.grads, each.used], each.bucket.table, wire, 1.0, draws=draws)

    nbytes = _nbytes(wires) + _gradient_bytes(model)
    return Case(run, wires, nbytes, to_nearest=lambda kernels: run(kernels, None))


def flatten(model: Model, dtype: torch.dtype, scale: float) -> Case:
    """Gradients → wires in `dtype`."""
    wires = [each.flat(dtype) for each in model]
    views = [each.views(wire) for each, wire in zip(model, wires, strict=True)]

    def run(kernels: Backend) -> None:
        for each, wire in zip(model, wires, strict=True):
            kernels.flatten([*each.grads, each.used], each.bucket.table, wire, scale)

    def cat_cast_divide() -> list[Tensor]:
        flats = [torch.cat([grad.view(-1) for grad in each.grads]).to(dtype) for each in model]
        return flats if scale == 1 else [flat.div_(1 / scale) for flat in flats]

    def copy_into_views() -> None:
        for each, wire, into in zip(model, wires, views, strict=True):
            for view, grad in zip(into, each.grads, strict=True):
                view.copy_(grad)
            if scale != 1:
                wire.mul_(scale)

    def foreach() -> None:
        for each, into in zip(model, views, strict=True):
            torch._foreach_copy_(into, each.grads)
            if scale != 1:
                torch._foreach_mul_(into, scale)

    def foreach_copy() -> None:
        for each, wire, into in zip(model, wires, views, strict=True):
            torch._foreach_copy_(into, each.grads)
            wire.mul_(scale)

    plain: dict[str, Way] = {
        "cat, cast, divide": cat_cast_divide,
        "copy_, mul_": copy_into_views,
        "foreach copy_, foreach mul_": foreach,
    }
    if scale != 1:
        plain["foreach copy_, mul_"] = foreach_copy
    outputs = [view for into in views for view in into]
    return Case(run, outputs, _nbytes(outputs) + _gradient_bytes(model), plain)


def unflatten(model: Model, dtype: torch.dtype, scale: float) -> Case:
    """Wires in `dtype` → gradients."""
    wires = [each.filled_wire(dtype) for each in model]
    views = [each.views(wire) for each, wire in zip(model, wires, strict=True)]
    targets, outputs = _targets(model)

    def run(kernels: Backend) -> None:
        for each, wire, grads in zip(model, wires, targets, strict=True):
            kernels.unflatten(wire, each.bucket.table, [*grads, each.used], scale)

    def cast_divide_copy() -> None:
        for each, wire, grads in zip(model, wires, targets, strict=True):
            flat = wire.to(each.used.dtype, copy=True)
            if scale != 1:
                flat.div_(1 / scale)
            for grad, view in zip(grads, each.views(flat), strict=True):
                grad.copy_(view)

    def copy_from_views() -> None:
        for out_of, grads in zip(views, targets, strict=True):
            for grad, view in zip(grads, out_of, strict=True):
                grad.copy_(view)
                if scale != 1:
                    grad.mul_(scale)

    def foreach() -> None:
        for out_of, grads in zip(views, targets, strict=True):
            torch._foreach_copy_(grads, out_of)
            if scale != 1:
                torch._foreach_mul_(grads, scale)

    def multiply_out() -> None:
        for out_of, grads in zip(views, targets, strict=True):
            for grad, view in zip(grads, out_of, strict=True):
                torch.mul(view, scale, out=grad)

    plain: dict[str, Way] = {
        "cast, divide, copy_": cast_divide_copy,
        "copy_, mul_": copy_from_views,
        "foreach copy_, foreach mul_": foreach,
    }
    if scale != 1:
        plain["mul(out=)"] = multiply_out
    return Case(run, outputs, _nbytes(outputs) + elements(model) * dtype.itemsize, plain)


def reduce_shards(model: Model, dtype: torch.dtype, scale: float, ranks: int = RANKS) -> Case:
    """So many ranks' shards of every wire → one."""
    received = [_in_shards(each.filled_wire(dtype), ranks) for each in model]
    shards = [torch.zeros_like(rows[0]) for rows in received]
    totals = [torch.zeros_like(shard, dtype=torch.float32) for shard in shards]

    def run(kernels: Backend) -> None:
        for rows, shard in zip(received, shards, strict=True):
            kernels.reduce_shards(rows, shard, scale)

    def sum_and_scale() -> None:
        for rows, shard in zip(received, shards, strict=True):
            shard.copy_(rows.sum(0, dtype=torch.float32).mul_(scale))

    def add_in_place() -> None:
        for rows, shard, total in zip(received, shards, totals, strict=True):
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)
            shard.copy_(total.mul_(scale))

    plain: dict[str, Way] = {"sum, mul_, copy_": sum_and_scale, "copy_, add_, mul_, copy_": add_in_place}
    return Case(run, shards, _nbytes(received) + _nbytes(shards), plain)


def reduce_shards_bf16_stochastic(model: Model) -> Case:
    """Two ranks' shards of every BF16 wire → one, rounded by chance."""
    received = [_same_twice(each.filled_wire(torch.bfloat16)) for each in model]
    shards, setting = [torch.zeros_like(rows[0]) for rows in received], BF16(rounding="stochastic")
    drawn = _draws(model, setting, OF_AVERAGES)
    tables = [each.bucket.table.shard(0, shard.numel()) for each, shard in zip(model, shards, strict=True)]

    def run(kernels: Backend, draws: Draws | None = drawn) -> None:
        for rows, shard, table in zip(received, shards, tables, strict=True):
            more = (table, draws) if draws else ()
            kernels.reduce_shards(rows, shard, 1 / RANKS, *more)

    nbytes = _nbytes(received) + _nbytes(shards)
    return Case(run, shards, nbytes, to_nearest=lambda kernels: run(kernels, None))


def flatten_fp16(model: Model) -> Case:
    """Gradients → FP16 wires with block exponents."""
    wires = [each.fp16_wire() for each in model]

    def run(kernels: Backend) -> None:
        for each, wire in zip(model, wires, strict=True):
            kernels.flatten_fp16([*each.grads, each.used], each.bucket.table, wire, RANKS, 1)

    return Case(run, wires, _nbytes(wires) + _gradient_bytes(model))


def unflatten_fp16(model: Model) -> Case:
    """FP16 wires with block exponents → gradients."""
    wires = [each.filled_fp16_wire() for each in model]
    targets, outputs = _targets(model)

    def run(kernels: Backend) -> None:
        for each, wire, grads in zip(model, wires, targets, strict=True):
            kernels.unflatten_fp16(wire, RANKS, each.bucket.table, [*grads, each.used], 1.0)

    return Case(run, outputs, _nbytes(wires) + _nbytes(outputs))


def reduce_fp16(model: Model) -> Case:
    """Two ranks' FP16 shards of every wire → one."""
    received = [each.filled_fp16_wire().view(RANKS, -1) for each in model]
    shards = [torch.zeros_like(rows[0]) for rows in received]

    def run(kernels: Backend) -> None:
        for rows, shard in zip(received, shards, strict=True):
            kernels.reduce_fp16(rows, shard, 1 / RANKS)

    return Case(run, shards, _nbytes(received) + _nbytes(shards))


def _residuals(gradients: Gradients, setting: Compression) -> Tensor:
    """Two rows of residuals, of which the first is full of numbers."""
    flat = gradients.flat(torch.float32).normal_(std=0.01)
    turn = torch.zeros(1, dtype=torch.int32, device=flat.device)
    rows = Rows(0, len(flat), turn, setting.block, setting.residual_dtype)
    rows.write(0, flat)
    return rows.rows


def _without_padding(row: Tensor, block: int) -> Tensor:
    """Codes and scales of a row in 8 bits; of another all of it."""
    return row[: row.numel() // (block + 1) * (block + 1)] if row.dtype is torch.uint8 else row


def quantize(model: Model, compression: str = "int8", error_feedback: bool | str = False) -> Case:
    """Gradients (+ residuals, in FP32, BF16 or 8 bits) → quantized wires (and new residuals)."""
    setting = Compression.parse(compression)
    if error_feedback:
        setting = replace(setting, error_feedback=error_feedback)  # type: ignore[call-arg]
    wires = [each.empty_quantized_wire(setting) for each in model]
    kept = [_residuals(each, setting) for each in model]
    turn = torch.zeros(1, dtype=torch.int32, device=model[0].used.device)
    residuals = [(rows, turn) if error_feedback else (None, None) for rows in kept]
    drawn = _draws(model, setting)

    def run(kernels: Backend, draws: Draws | None = drawn) -> None:
        for each, wire, rows_and_turn in zip(model, wires, residuals, strict=True):
            tensors, table, more = [*each.grads, each.used], each.bucket.table, {"form": setting.format, "draws": draws}
            kernels.quantize(tensors, table, wire, RANKS, setting.block, *rows_and_turn, **more)

    outputs = [*wires, *(_without_padding(rows[1], setting.block) for rows in kept if error_feedback)]
    nbytes = _nbytes([rows[0] for rows in kept if error_feedback]) + _gradient_bytes(model)
    nbytes += _nbytes(outputs)
    return Case(run, outputs, nbytes, to_nearest=drawn and (lambda kernels: run(kernels, None)))


def dequantize(model: Model, compression: str = "int8") -> Case:
    """Quantized wires → gradients."""
    setting = Compression.parse(compression)
    wires = [each.quantized_wire(setting) for each in model]
    targets, outputs = _targets(model)

    def run(kernels: Backend) -> None:
        for each, wire, grads in zip(model, wires, targets, strict=True):
            tensors, table = [*grads, each.used], each.bucket.table
            kernels.dequantize(wire, RANKS, setting.block, table, tensors, form=setting.format)

    return Case(run, outputs, _nbytes(wires) + _nbytes(outputs))


def dequantize_with_statistics(model: Model, compression: str = "int8") -> Case:
    """Quantized wires → gradients, and what their norm is made of."""
    setting = Compression.parse(compression)
    wires = [each.quantized_wire(setting) for each in model]

    def decompress(kernels: Backend, each: Gradients, wire: Tensor, grads: list[Tensor], *kept: Tensor) -> None:
        tensors, table = [*grads, each.used], each.bucket.table
        kernels.dequantize(wire, RANKS, setting.block, table, tensors, *kept, form=setting.format)

    return _with_statistics(model, wires, setting.block, decompress)


def unflatten_with_statistics(model: Model, dtype: torch.dtype, scale: float) -> Case:
    """Wires in `dtype` → gradients, and what their norm is made of."""
    wires = [each.filled_wire(dtype) for each in model]

    def decompress(kernels: Backend, each: Gradients, wire: Tensor, grads: list[Tensor], *kept: Tensor) -> None:
        kernels.unflatten(wire, each.bucket.table, [*grads, each.used], scale, *kept)

    return _with_statistics(model, wires, 0, decompress)


def _with_statistics(model: Model, wires: list[Tensor], block: int, decompress: Callable[..., None]) -> Case:
    """The same pass with and without; and without, then torch's norm and whether it is finite."""
    targets, outputs = _targets(model)
    kept = [torch.zeros(ops.statistics_shape(e.bucket.table, block), device=e.used.device) for e in model]

    def run(kernels: Backend) -> None:
        for each, wire, grads, statistics in zip(model, wires, targets, kept, strict=True):
            decompress(kernels, each, wire, grads, statistics)

    def without(kernels: Backend) -> None:
        for each, wire, grads in zip(model, wires, targets, strict=True):
            decompress(kernels, each, wire, grads)

    def then_norm(kernels: Backend) -> None:
        without(kernels)
        norms = torch._foreach_norm(outputs)
        torch.linalg.vector_norm(torch.stack(norms)).isfinite()

    beside = {WITHOUT: without, "without, foreach_norm, isfinite": then_norm}
    return Case(run, outputs, _nbytes(wires) + _nbytes(outputs), beside=beside)


def reduce_quantized(model: Model, compression: str = "int8") -> Case:
    """Two ranks' shards of every quantized wire → one."""
    setting = Compression.parse(compression)
    received = [_same_twice(each.quantized_wire(setting)) for each in model]
    shards, drawn = [torch.zeros_like(rows[0]) for rows in received], _draws(model, setting, OF_AVERAGES)
    tables = [each.bucket.table.shard(0, each.bucket.total // RANKS) for each in model]

    def run(kernels: Backend, draws: Draws | None = drawn) -> None:
        for rows, shard, table in zip(received, shards, tables, strict=True):
            after_the_last = setting.format.blocks(shard.numel(), setting.block)  # no block holds used-flags
            numbers = 1 / RANKS, setting.block, after_the_last
            more = (table, draws) if draws else ()
            kernels.reduce_quantized(rows, shard, *numbers, None, None, setting.format, *more)

    to_nearest = drawn and (lambda kernels: run(kernels, None))
    return Case(run, shards, _nbytes(received) + _nbytes(shards), to_nearest=to_nearest)


def take_largest(model: Model, ratio: float = 0.01) -> Case:
    """Gradients → of each its largest elements, with their places, and the rest."""
    grads = [
        _without_ties(grad.view(-1)) for each in model for grad in each.grads if TopK(ratio, 1).count(grad.numel())
    ]
    rests = [torch.zeros_like(grad) for grad in grads]
    counts = [TopK(ratio, 1).count(grad.numel()) for grad in grads]
    taken = [grad.new_zeros(count) for grad, count in zip(grads, counts, strict=True)]
    places = [grad.new_zeros(count, dtype=torch.int32) for grad, count in zip(grads, counts, strict=True)]

    def run(kernels: Backend) -> None:
        for grad, rest, values, where in zip(grads, rests, taken, places, strict=True):
            rest.copy_(grad)
            kernels.take_largest(rest, values, where)

    def topk() -> None:
        for grad, rest, values, where in zip(grads, rests, taken, places, strict=True):
            rest.copy_(grad)
            found = rest.abs().topk(len(values), sorted=False).indices.sort().values
            where.copy_(found)
            torch.index_select(rest, 0, found, out=values)
            rest.index_fill_(0, found, 0.0)

    nbytes = 3 * _nbytes(rests) + _nbytes(taken) + _nbytes(places)
    return Case(run, [*taken, *places, *rests], nbytes, {"copy_, abs, topk, index_fill_": topk})


def _without_ties(grad: Tensor) -> Tensor:
    """The same, but that no two magnitudes are equal: of those torch takes any."""
    order, ranks = grad.abs().argsort(), torch.arange(len(grad))
    bits = grad[order].abs().view(torch.int32).long()
    distinct = ((bits - ranks).cummax(0).values + ranks).int().view(torch.float32)
    return torch.empty_like(grad).index_copy_(0, order, torch.copysign(distinct, grad[order]))


def average_taken(model: Model, ratio: float = 0.01) -> Case:
    """What two ranks have taken of each gradient → averages."""
    targets, messages = [grad.view(-1).clone() for each in model for grad in each.grads], []
    counts = [TopK(ratio, 1).count(target.numel()) for target in targets]
    for target, count in zip(targets, counts, strict=True):
        message = torch.randn(RANKS, 2 * count)
        for places in message[:, count:].view(torch.int32):
            places.copy_(torch.randperm(target.numel())[:count].sort().values)
        messages.append(message)

    def run(kernels: Backend) -> None:
        for message, count, target in zip(messages, counts, targets, strict=True):
            kernels.average_taken(message, 0, count, count, 1 / RANKS, target)

    def index_add() -> None:
        for message, count, target in zip(messages, counts, targets, strict=True):
            target.zero_()
            for values, places in zip(message[:, :count], message[:, count:].view(torch.int32), strict=True):
                target.index_add_(0, places, values)
            target.mul_(1 / RANKS)

    return Case(run, targets, _nbytes(messages) + _nbytes(targets), {"zero_, index_add_, mul_": index_add})
