"""The phases: which cases and which tests belong to each, in what order, and each one's share of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import kernel_rows, probe, sharded_rows, step_rows
from .worker_cases import Case

# Minutes of thirty.
SHARES = {"probe": 1.5, "tests": 3.0, "kernels": 5.0, "steps": 8.0, "ranks": 8.0, "numba": 4.5}
GPU, NO_GPU = ("-m", "gpu"), ("-m", "not gpu and not long")


@dataclass(frozen=True)
class Suite:
    """A run of pytest: what it is called in the log, files and options; `ranks` chooses the tests of so many ranks.

    `of_goals` chooses those on which a goal stands, or the others.
    `spread` runs are for many processes at once, since compiling takes their time; those of several ranks never are.
    `shares` says that ranks share the GPU, which needs an NCCL that allows it.
    `leaves` is the share of the time that is there which those behind it are left, whatever it needs.
    """

    name: str
    arguments: Sequence[str]
    ranks: int | None = None
    of_goals: bool | None = None
    spread: bool = False
    shares: bool = False
    leaves: float = 0.0


def cases_of(phase: str, rehearsal: bool, out: Path) -> list[Case]:
    """A phase's cases, the most telling first."""
    if phase == "probe":
        return probe.cases(rehearsal)
    measured: dict[str, Callable[[], list[Case]]] = {
        "tests": list,
        "kernels": lambda: kernel_rows.cases(rehearsal, sharded_rows.cases(rehearsal)),
        "steps": lambda: step_rows.cases(rehearsal, out),
        "ranks": list,
        "numba": lambda: [*kernel_rows.numba_cases(rehearsal), *step_rows.numba_cases(rehearsal)],
    }
    return [probe.machine_case("cpu" if rehearsal else "cuda"), *measured[phase]()]


def tests_of(phase: str, rehearsal: bool) -> list[Suite]:
    """A phase's runs of pytest, after its cases."""
    kernels, nccl = "tests/kernels", "tests/transports/test_nccl_gpu.py"
    steps, sharded = "tests/ddp/test_gpu.py", "tests/fsdp/test_fsdp_gpu.py"
    if rehearsal:
        return {
            "tests": [Suite("kernels", [kernels, *NO_GPU, "-k", "triton and (no_slots or reduce_shards)"])],
            "ranks": [Suite("2 ranks", [steps, *NO_GPU], ranks=2)],
        }.get(phase, [])
    of_ranks = [nccl, steps, sharded, "tests/elastic/test_losses.py", *GPU, "-k", "not numba_cuda"]
    return {
        "tests": [
            Suite("kernels", [kernels, *GPU, "-k", "triton"], spread=True, leaves=0.4),
            *(Suite("one rank", of_ranks, ranks=1, of_goals=goals, spread=goals) for goals in (True, False)),
        ],
        "ranks": [
            Suite(f"{ranks} ranks", of_ranks, ranks=ranks, of_goals=goals, shares=True)
            for goals in (True, False)
            for ranks in (2, 4)
        ],
        "numba": [
            Suite("one rank", [steps, *GPU, "-k", "numba_cuda"], ranks=1),
            Suite("kernels", [kernels, *GPU, "-k", "numba_cuda"], spread=True),
        ],
    }.get(phase, [])
