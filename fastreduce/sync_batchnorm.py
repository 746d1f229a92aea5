"""SyncBatchNorm for CPUs too: batch normalisation over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from .errors import MismatchError, SettingError, TensorError, TransportError

FIRST_CHANNELS = 256  # as many as a rank's first message has room for: those of layers with more take two


class SyncBatchNorm(_BatchNorm):
    """torch's SyncBatchNorm, which works on CPUs as well; for CUDA tensors it is torch's own code.

    Outputs, gradients and running statistics are those of one process over the batches of all ranks together,
    whose sizes may differ and may be zero. In evaluation, and on one rank, it is BatchNorm. Input is `[N, C, …]`
    in any floating-point dtype; FP16 and BF16 have their statistics in FP32.

    Every rank of the group must run the layer in training, in the same order as the others, as with torch's: a
    rank that leaves it out makes the others wait until the group's timeout.

    It is no subclass of `torch.nn.SyncBatchNorm`, since torch's DistributedDataParallel refuses those on a CPU,
    but, as that one, of the base of all BatchNorm layers.

    Args:
        num_features: channels, C.
        eps: added to the variance.
        momentum: of the running statistics; None means their average over all batches.
        affine: whether it has weight and bias.
        track_running_stats: whether it keeps running statistics.
        process_group: the ranks; None means all.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        **options: what else the installed torch's layer takes.

    Raises:
        TensorError: if the input has fewer than two dimensions, or not as many channels as the layer.
        ValueError: on every rank, if there is one value per channel in all batches together (as BatchNorm).
        MismatchError: on every rank, if ranks run layers of different numbers of channels at the same time.
        TransportError: if a rank does not come within the timeout.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.size(1) == 0:
            raise TensorError(f"SyncBatchNorm takes input [N, C, …] with C > 0; got {list(input.shape)}")
        if input.size(1) != self.num_features:  # other ranks' messages have another size: gloo would end the process
            raise TensorError(
                f"SyncBatchNorm of {self.num_features} channels takes input [N, {self.num_features}, …]; got "
                f"{list(input.shape)}"
            )

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        """Called by torch's forward; `_check_input_dim` has looked."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, over all ranks."""
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        group = self.process_group or dist.group.WORLD
        if not self.training or group is None or dist.get_world_size(group) < 2:
            return super().forward(input)
        return self._normalize(input, group)

    @torch._disable_dynamo  # it would trace the collectives into a graph of other numbers
    def _normalize(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        self._check_input_dim(input)
        mean, variance, count = _statistics(input.detach(), group)
        if count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {list(input.shape)} on rank "
                f"{dist.get_rank()} and no more on all ranks"
            )
        self._track(mean, variance, count)
        dtype = _dtype_of_statistics(input)
        inverse = (variance + self.eps).rsqrt()
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean.to(dtype), inverse.to(dtype), count, group
        )
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        if not self.track_running_stats:
            return
        batches, momentum = self.num_batches_tracked, self.momentum  # each may be None, as in torch's layers
        if batches is not None:
            batches.add_(1)
        if momentum is None:
            momentum = 0.0 if batches is None else 1 / int(batches)
        if count and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1))
            for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_(running * (1 - momentum) + found * momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Put a layer of this class in the place of every BatchNorm layer, with its parameters and statistics.

        Args:
            module: what holds the layers, changed in place; or such a layer itself.
            process_group: the ranks whose batches are normalised together; None means all.

        Returns:
            `module`, or the new layer where it is a BatchNorm layer itself.

        Raises:
            SettingError: if a lazy layer does not know its channels yet.
        """
        if isinstance(module, _BatchNorm):
            return cls._converted(module, process_group)
        converted = {m: cls._converted(m, process_group) for m in module.modules() if isinstance(m, _BatchNorm)}
        for parent in list(module.modules()):
            for name, child in parent._modules.items():  # a layer that is used twice stays one layer
                if isinstance(child, _BatchNorm):
                    parent._modules[name] = converted[child]
        return module

    @classmethod
    def _converted(cls, layer: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
        if any(map(is_lazy, [*layer.parameters(), *layer.buffers()])):
            raise SettingError(f"{layer} does not know its channels yet: run a forward first, then convert")
        new = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
            device="meta",
        )
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        return new.train(layer.training)


def _dtype_of_statistics(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Mean and variance (FP64, the same bits on every rank) and number of values per channel over all ranks."""
    channels = input.size(1)
    count = input.numel() // channels
    # gloo ends the process that gets a longer message than it waits for: all have one size until ranks know their own
    size = max(2 + 2 * channels, first := 2 + 2 * FIRST_CHANNELS)
    mine = torch.zeros(size, dtype=torch.float64, device="cpu")
    mine[0], mine[1] = channels, count
    if count:
        mean, variance = torch.batch_norm_update_stats(input.to(_dtype_of_statistics(input)), None, None, 0.0)
        torch.cat([mean, variance], out=mine[2 : 2 + 2 * channels])
    rows = mine.new_empty(dist.get_world_size(group), size)
    _gather(rows[:, :first], mine[:first], group, channels)
    _check_channels(rows[:, 0].tolist(), group)
    if size > first:
        _gather(rows[:, first:], mine[first:], group, channels)
    counts, means, variances = rows[:, 1 : 2 + 2 * channels].split([1, channels, channels], dim=1)
    total = int(counts.sum())
    shares = counts / max(total, 1)
    overall = (means * shares).sum(0)
    return overall, ((variances + (means - overall) ** 2) * shares).sum(0), total


def _gather(rows: Tensor, mine: Tensor, group: dist.ProcessGroup, channels: int) -> None:
    """Fill each row with what its rank has in `mine`."""
    told = [torch.empty_like(mine) for _ in rows]
    _together(dist.all_gather, told, mine, group=group, channels=channels)
    torch.stack(told, out=rows)


def _check_channels(channels: Sequence[float], group: dist.ProcessGroup) -> None:
    others = [i for i, each in enumerate(channels) if each != channels[0]]
    if others:
        ranks = dist.get_process_group_ranks(group)
        raise MismatchError(
            f"ranks differ in the SyncBatchNorm that they run: rank {ranks[0]} has one of {channels[0]:g} channels, "
            f"rank {ranks[others[0]]} one of {channels[others[0]]:g}. In training every rank must run the same layers, "
            "in the same order"
        )


def _together(collective: Callable[..., Any], *args: Any, group: dist.ProcessGroup, channels: int) -> None:
    try:
        collective(*args, group=group)
    except RuntimeError as error:
        raise TransportError(
            f"rank {dist.get_rank()}: {collective.__name__} of a SyncBatchNorm over {channels} channels failed: "
            f"{error}. In training every rank must run the layer, in the same order as the others"
        ) from error


class _Normalize(torch.autograd.Function):
    """Normalise with given statistics, which depend on the inputs of all ranks: backward goes through them.

    torch's kernels for evaluation do the work, told of a variance of one: theirs would round 1/σ otherwise than
    those for training do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.group = count, group
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return torch.batch_norm(input, scale, shift, mean, torch.ones_like(mean), False, 0.0, 0.0, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        channels, dtype = mean.numel(), mean.dtype
        grad, values = grad.to(dtype), input.to(dtype)
        sums = mean.new_zeros(2, channels)  # of the gradient, and of its product with the normalised input
        if input.numel():
            _, centred, sums[0] = torch.ops.aten.native_batch_norm_backward(
                grad, values, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True]
            )
            sums[1] = centred * inverse
        of_weight, of_bias = (sums[i].to(weight.dtype) if weight is not None else None for i in (1, 0))
        of_input = None
        if ctx.needs_input_grad[0]:
            overall = sums.to(torch.float64, copy=True)
            _together(dist.all_reduce, overall, group=ctx.group, channels=channels)
            averages = (overall / max(ctx.count, 1)).to(dtype)
            shape = (1, channels, *[1] * (input.dim() - 2))
            scale = inverse if weight is None else inverse * weight.to(dtype)
            of_input = grad - averages[0].view(shape)
            of_input.addcmul_(values - mean.view(shape), (inverse * averages[1]).view(shape), value=-1)
            of_input = of_input.mul_(scale.view(shape)).to(input.dtype)
        return (
            of_input,
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            *[None] * 4,
        )
