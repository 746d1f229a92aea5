"""Models that a script of a run has sharded with `fully_shard`: we reduce their gradients from the first step on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import SettingError
from ..fsdp import compress
from ..fsdp.torch_fsdp import Group, groups_of, when_training_begins
from . import measuring
from .contestants import TORCHS
from .orders import Orders

HANDS_OFF = "the script itself says what reduces its gradients"


def watch(is_compared: bool, write_down: Callable[..., None]) -> None:
    """Reduce the gradients of every sharded model that this process begins to train from now on.

    Args:
        is_compared: whether contestants reduce them by turns.
        write_down: else is told who reduces them (`replacement.write_down`).
    """
    when_training_begins(partial(_begin, is_compared, write_down))


def _begin(is_compared: bool, write_down: Callable[..., None], model: nn.Module) -> None:
    """Called on every rank of a model, before its first forward."""
    name, groups = type(model).__name__.removeprefix("FSDP"), list[Group]()
    try:
        groups = groups_of(model)
        why = HANDS_OFF if any(group.is_replaced for group in groups) else ""
    except SettingError as error:
        why = str(error)
    if is_compared:
        if why:
            advice = ", by fastreduce.fsdp.compress or otherwise: leave it to compare" if groups else ""
            refusal = f"contestants cannot reduce the gradients of this {name}: {why}{advice}"
            raise SettingError(f"fastreduce compare: {refusal}")
        measuring.attach(MeasuredModel(model, groups, Orders.read().first))
        return
    try:
        setting = "" if why else str(compress(model).compression)
    except Exception as error:  # a script that goes on behind it leaves them to torch
        write_down("sharded", name, name, "", str(error), dist.get_rank())
        raise
    write_down("sharded", name, name, setting, why, dist.get_rank())


class MeasuredModel:
    """A sharded model, to `measuring.MeasuredTraining` as a wrapper of torch's is.

    Args:
        module: the root of its sharded modules.
        groups: of its parameters.
        contestant: what reduces its gradients.
    """

    _comm_hooks = ()
    _join_config = SimpleNamespace(enable=False)

    def __init__(self, module: nn.Module, groups: list[Group], contestant: str) -> None:
        self.module, self._groups = module, groups
        self.process_group: Any = dist.group.WORLD
        self.device_type = groups[0].device.type
        self.transport_name = "" if contestant in TORCHS else compress(module, contestant).transport_name

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of a forward that begins now reduces gradients."""
        return self._groups[0].reduces
