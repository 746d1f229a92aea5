"""`python -m bench.kernels.residuals`: gradients far below their block's largest, by what keeps residuals.

One rank averages 1,024 gradients whose sizes span 1e4 within each block, many times. Printed is how far the mean of
what arrived is from that of what was sent, relative to each size: with residuals in FP32 only what is late.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from fastreduce import Compression
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.transports import LocalTransport

NUMEL = 1024
SETTINGS = [f"{name}:error_feedback{kept}" for name in ("int8", "int4") for kept in ("", "=bf16", "=8bit")]


def errors(setting: str, noise: float, steps: int) -> Tensor:
    """Of each gradient, which is a constant plus noise, both of its own size: the error of the mean over that size."""
    torch.manual_seed(0)
    compression = Compression.parse(setting)
    specs = [ParameterSpec("gradient", NUMEL, torch.float32, torch.device("cpu"))]
    (bucket,) = build_plan(specs, [[0]], alignment=compression.alignment, shards=1).buckets
    pipeline = BucketPipeline(bucket, compression, LocalTransport())
    size = 1e-4 ** torch.linspace(0, 1, 128).repeat(NUMEL // 128)[torch.randperm(NUMEL)]
    constant = size * torch.randn(NUMEL)
    parameter = nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.SGD([parameter], 0.0)
    off = torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(steps):
        gradient = constant + noise * size * torch.randn(NUMEL)
        parameter.grad = gradient.clone()
        pipeline.run([parameter.grad], [parameter.grad])
        off += parameter.grad.double() - gradient
        pipeline.follow([parameter], [])
        optimizer.step()
    return (off / steps).abs() / size


def main(
    settings: Annotated[list[str] | None, typer.Argument(help="Settings with error feedback.")] = None,
    steps: Annotated[int, typer.Option(help="Steps.")] = 3000,
) -> None:
    """Print the error of the mean over many steps."""
    print("| setting | gradients | off by, on average | at most |\n| --- | --- | --- | --- |")
    for setting in settings or SETTINGS:
        for what, noise in (("with noise", 1.0), ("the same in every step", 0.0)):
            found = errors(setting, noise, steps)
            print(f"| `{setting}` | {what} | {100 * float(found.mean()):.2f} % | {100 * float(found.max()):.1f} % |")


if __name__ == "__main__":
    typer.run(main)
