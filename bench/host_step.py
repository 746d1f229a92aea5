"""What a step costs the host on a GPU, measured without one: `python -m bench.host_step [TREE …]` compares checkouts.

Triton's own launcher works over a driver that does nothing (`tests/support/cuda_stub.py`), torch's own scopes of
streams over calls that do nothing, and collectives enqueue nothing; CPU tensors stand for CUDA tensors. So all of our
Python runs as on a GPU, with the driver's part left out, 2 to 4 µs a launch. What is measured is the CPU time of the
thread that calls. torch's class runs the kernels of its CPU build, in place of launches, over gloo, whose threads do
not count. Beside them stands a launch as Triton makes it, which keeps nothing for the next one: a measure of the
machine.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from fastreduce.run.orders import order

from .paired import ratio, turns

BUCKETS, PARAMETERS = 20, 300
STEPS = 3  # of a contestant in a round
ROOT = Path(__file__).parents[1]
HOOKS_ALONE = "none, 1 rank"  # nothing is launched there
SETTINGS = ("fp16", "none", "int8", "int8:error_feedback")
LAUNCH, LAUNCHES = "a launch by Triton", 20  # the mean of so many


def compare(trees: Sequence[Path], rounds: int) -> list[dict[str, list[float]]]:
    """CPU seconds of steps by contestant, for each checkout: these take turns, in an order that changes."""
    left_out = ("TRITON_INTERPRET", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "-m", "bench.host_step", "--serve"]
    workers = [
        subprocess.Popen(command, cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for tree in trees
    ]
    seconds: list[dict[str, list[float]]] = [{} for _ in trees]
    try:
        for worker, found in turns(zip(workers, seconds, strict=True), rounds):
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            for name, each in json.loads(worker.stdout.readline()).items():
                found.setdefault(name, []).extend(each)
    finally:
        for worker in workers:
            with suppress(OSError):
                worker.communicate(timeout=30)
    return seconds


def serve() -> None:
    """For each line that comes: one round of all contestants, and a line of JSON."""
    from tests.support import cuda_stub

    cuda_stub.activate()  # before anything imports Triton
    import torch
    import torch.distributed as dist

    from .training.steps import set_up_process, wrapped
    from .training.timed_models import build

    set_up_process()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    x = torch.zeros(())
    with cuda_stand_in():
        # More than the first ten steps, whose times our logger takes.
        contestants, _ = wrapped(_settings(), _model(), x, dist.group.WORLD, warm_up=12)
        optimizers = {
            name: torch.optim.SGD(each.plain.parameters(), lr=1e-9, foreach=True) for name, each in contestants.items()
        }
        for name, contestant in contestants.items():
            if contestant.setting.wrapper == "fastreduce":
                assert len(contestant.wrapped.reducer.pipelines) == BUCKETS, name
        launch, (other, y) = _launch_by_triton(), build("linear", 128, 0)

        def neutral() -> None:
            other(y).square().sum().backward()
            other.zero_grad()

        def step(name: str) -> float:
            start = time.thread_time()
            contestants[name].step(x)
            optimizers[name].step()
            seconds = time.thread_time() - start
            contestants[name].drop_gradients()
            return seconds

        steps, numbers = {name: partial(step, name) for name in contestants}, itertools.count()
        gc.collect()
        gc.disable()
        for _ in sys.stdin:
            seconds: dict[str, list[float]] = {name: [] for name in (*contestants, LAUNCH)}
            for number in itertools.islice(numbers, STEPS):
                start = time.thread_time()
                for _ in range(LAUNCHES):
                    launch()
                seconds[LAUNCH].append((time.thread_time() - start) / LAUNCHES)
                for name, taken in behind_neutral_steps(steps, neutral, number).items():
                    seconds[name].append(taken)
            gc.collect()
            print(json.dumps(seconds), flush=True)


def behind_neutral_steps(
    steps: Mapping[str, Callable[[], float]], neutral: Callable[[], object], number: int
) -> dict[str, float]:
    """What each contestant's step takes in a round, in the order of the round of this number.

    Before each comes the same step of another model, so that nobody finds another's code in the processor's caches, or
    its own: behind an unwrapped step the unwrapped one, from which all others are counted, would.
    """
    found = {}
    for name in order(list(steps), number):
        neutral()
        found[name] = steps[name]()
    return found


def _launch_by_triton() -> Callable[[], object]:
    """One of a sum of two ranks' shards."""
    import torch

    from fastreduce.kernels import triton_cast
    from fastreduce.kernels.slots import spare
    from fastreduce.kernels.triton_tiles import double_bits

    received, shard = torch.zeros(2, 64), torch.zeros(64)
    passed = received, shard, 64, double_bits(0.5), None, None, None, 0, 0
    told: dict[str, Any] = {"RANKS": 2, "SPARE": spare(2), "TILE": triton_cast.TILE}
    launch = partial(triton_cast._reduce[(1,)], *passed, **told, num_warps=4, enable_fp_fusion=False)
    launch()  # compiled
    return launch


def _model() -> Any:
    """Parameters of 64 elements whose gradients lie where they lay before, as a GPU's allocator places them."""
    import torch
    from torch import Tensor, nn

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, grads: list[Tensor], *rows: Tensor) -> Tensor:
            ctx.grads = grads
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> Any:
            return None, *(grad.data for grad in ctx.grads)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList([torch.zeros(64) for _ in range(PARAMETERS)])
            self.grads = [torch.ones(64) for _ in range(PARAMETERS)]

        def forward(self, _: Tensor) -> Tensor:
            return Backward.apply(self.grads, *self.rows)  # type: ignore[no-any-return, no-untyped-call]

    return Model()


def _settings() -> dict[str, Any]:
    import torch

    from fastreduce.transports import LocalTransport, Transport
    from fastreduce.transports.base import Done

    from .training.steps import Setting

    class Nothing(Transport):
        """Two ranks' collectives, none of which is enqueued."""

        name, rank, world_size, enqueues = "nothing", 0, 2, True

        def all_reduce(self, tensor: torch.Tensor) -> Done:
            return Done()

        def all_to_all(self, received: torch.Tensor, wire: torch.Tensor) -> Done:
            return Done()

        def all_gather(self, wire: torch.Tensor) -> Done:
            return Done()

        def exchange(self, value: Any) -> list[Any]:
            return [value, value]

        def abort(self) -> None:
            return

        def close(self) -> None:
            return

    cap = {"bucket_cap_mb": PARAMETERS // BUCKETS * 64 * 4 / 2**20}
    views = {"gradient_as_bucket_view": True}
    transports = {"1 rank": lambda group: LocalTransport(), "2 ranks": lambda group: Nothing()}
    ours = {
        f"{compression}, {ranks}": Setting(
            "fastreduce", {"compression": compression, **cap}, kernels="triton", transport=transport
        )
        for ranks, transport in transports.items()
        for compression in SETTINGS
    }
    return {
        **ours,
        "torch": Setting("torch", cap),
        "torch, views": Setting("torch", {**cap, **views}),
        "torch fp16 hook, views": Setting("torch", {**cap, **views}, hook=True),
        "unwrapped": Setting(""),
    }


@contextmanager
def cuda_stand_in() -> Iterator[None]:
    """CPU tensors go the way of CUDA tensors, on streams that exist only by their numbers."""
    import torch

    from fastreduce.ops import backends
    from fastreduce.reduction import averaging
    from fastreduce.reduction.residuals import error_feedback
    from fastreduce.reduction.streams import CudaStream
    from fastreduce.reduction.telemetry import nonfinite

    class HostStream:
        device, device_index, device_type = torch.device("cuda", 0), 0, 1

        def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int = 1, **_: int) -> None:
            self.stream_id = stream_id

        def record_event(self) -> HostStream:
            return self

        def wait_event(self, event: HostStream) -> None:
            return

        def wait_stream(self, stream: HostStream) -> None:
            return

    current = [0, 0, 1]

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        current[0] = stream_id

    calls = {
        "_cuda_getCurrentStream": lambda index: current,
        "_cuda_setStream": set_stream,
        "_cuda_getDevice": lambda: 0,
    }
    with (
        patch.object(backends, "why_not", lambda name, device: None),
        patch.object(averaging, "one_by_one", lambda device, transport: True),
        patch.object(averaging, "make_stream", lambda device, transport: CudaStream(device, None)),
        patch.object(error_feedback, "reads_late", lambda tensor: True),
        patch.object(nonfinite, "reads_late", lambda tensor: True),
        patch.object(torch.cuda, "Stream", HostStream),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "_get_device_index", lambda device, optional=False: 0),
        patch.multiple(torch._C, create=True, **calls),
    ):
        yield


def main(
    trees: Annotated[list[Path] | None, typer.Argument(help="Checkouts to compare; by default this one alone.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which every checkout has its turn.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Where the table goes as JSON, too.")] = None,
) -> None:
    """A table: of each checkout the CPU time that a wrapper adds, and the others' share of the first one's."""
    trees = trees or [ROOT]
    if len({Path(tree, "bench", "host_step.py").read_bytes() for tree in trees}) > 1:
        print(
            "Each checkout measures by a bench/host_step.py of its own, and these differ: so may the figures, by that."
        )
    found = compare(trees, rounds)
    measured = [each.pop(LAUNCH, None) for each in found]  # not in older checkouts
    launches = [None if each is None else round(1e6 * statistics.median(each), 1) for each in measured]
    rows = {name: _row(name, found) for name in list(found[0])[:-1]}
    print(f"{LAUNCH}, µs: {', '.join(map(str, launches))}")
    print(f"CPU µs that a wrapper adds to a step of {PARAMETERS} parameters, and a bucket of {BUCKETS} beyond hooks:")
    for name, row in rows.items():
        line = "".join(f"{step:9.0f} {bucket:6.1f}" for step, bucket in zip(row["step"], row["bucket"], strict=True))
        line += "".join("   {:.3f} ({:.3f} to {:.3f})".format(*figure) for figure in row["ratio"])
        print(f"{name:30}{line}")
    if out is not None:
        from fastreduce.cli.compare.results import describe
        from fastreduce.run.machine import machine

        about = {"checkouts": list(map(_commit, trees)), "rounds": rounds, "launch": launches}
        told = {**describe(machine("cpu")), **about}
        out.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")


def _commit(tree: Path) -> str:
    return subprocess.check_output(["git", "-C", tree, "rev-parse", "HEAD"], text=True).strip()


def _row(name: str, found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[Any]]:
    """By checkout, µs that a contestant adds to a step and to a bucket; of others the share of the first one's step."""

    def more(each: Mapping[str, Sequence[float]], than: str) -> list[float]:
        return [1e6 * (a - b) for a, b in zip(each[name], each[than], strict=True)]

    steps = [more(each, "unwrapped") for each in found]
    return {
        "step": [round(statistics.median(step)) for step in steps],
        "bucket": [round(statistics.median(more(each, HOOKS_ALONE)) / BUCKETS, 1) for each in found],
        "ratio": [[round(bound, 3) for bound in ratio(step, steps[0])] for step in steps[1:]],
    }


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else typer.run(main)
