"""Training that goes on without a lost rank, and lets it come back: over gloo, shared memory or NCCL."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..data import ShardSampler
from ..ddp import DistributedDataParallel
from ..ddp.checks import module_device
from ..ddp.elastic_reducer import TRANSPORTS as ALLOWED
from ..ddp.elastic_reducer import ElasticReducer
from ..errors import SettingError, TransportError
from ..transports import ENVIRONMENT_VARIABLE
from ..transports.deadlines import GRACE_SECONDS, in_background
from ..transports.nccl import library
from ..transports.store_client import StoreClient
from .membership import Membership, trains
from .sampler import BatchSampler
from .times import START_SECONDS, TIMEOUT

__all__ = ["BatchSampler", "Members", "join"]


class Members:
    """Those who train together now; `fastreduce.elastic.join` makes it.

    Attributes:
        rank: this process among them, 0 to size - 1; it may change with them.
        size: how many they are.
        step: how many steps all have committed, those before this process came included: the same on all of them
            between two steps.
        generation: how often those who train have met: one more whenever one is lost or comes.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    @property
    def rank(self) -> int:  # noqa: D102 (see above)
        return self._membership.rank

    @property
    def size(self) -> int:  # noqa: D102
        return self._membership.size

    @property
    def step(self) -> int:  # noqa: D102
        return self._membership.step

    @property
    def generation(self) -> int:  # noqa: D102
        return self._membership.generation.number

    def on_change(self, call: Callable[[Members], object]) -> None:
        """Call it with this object whenever others have come or gone, on the thread of the forward or backward."""
        self._membership.changes.append(lambda: call(self))

    def leave(self) -> None:
        """Take part no more; the others go on. At exit it is called by itself."""
        self._membership.leave()


def join(
    ddp: DistributedDataParallel,
    /,
    *,
    timeout: float = TIMEOUT,
    store: dist.Store | str | None = None,
    least: int | None = None,
    backwards: int = 1,
    **parts: Any,
) -> Members:
    """Train with all processes that join, and go on with those that are left when some are lost.

    Called once by each process, before its first forward, in the place of `init_process_group`. The first `least`
    begin together, with the state of the first of them. Who comes later, such as a process that was started in the
    place of a lost one, waits until those who train have ended a step, and gets the state of one of them over the
    transport: of the module, of `parts`, and the number of steps. `members.step` is the same on all of them, so loop
    over that.

    Args:
        ddp: made with `elastic=True`.
        timeout: seconds after which a rank that does not answer is lost. Longer than the longest step, and than what
            only some ranks do between two steps. Those whose process has ended on the same host are lost at once. All
            other times follow from it: `fastreduce doctor` prints them.
        store: where processes meet, which must outlive each of them: a store, or `host:port` of a TCPStore. None means
            that of the launcher, under `fastreduce launch --elastic`.
        least: how many begin; None means WORLD_SIZE.
        backwards: how many synchronised backwards your loop makes in one turn: 2 for a GAN with two optimizers, or for
            SAM; so many as you accumulate without `no_sync`. Who comes is let in where `members.step` is a multiple of
            it, since its own loop begins with a whole turn; otherwise parameters would differ from then on.
        **parts: what has a state, by name: `optimizer=optimizer, scheduler=scheduler, scaler=scaler`, and a
            `BatchSampler`, which then deals samples out; the same on all.

    Raises:
        SettingError: if there is no such store, or it is rank 0's own; if `timeout`, `least` or `backwards` is out of
            range; for a module that is not elastic, parts without a state, or LBFGS.
        MismatchError: if models or settings differ.
        BackendUnavailableError: for a module on a GPU, without NCCL.
        TransportError: if the store does not answer, or too few come within ten minutes, or all who have trained are
            gone.
    """
    reducer = getattr(ddp, "reducer", None)
    if not isinstance(reducer, ElasticReducer):
        raise SettingError("fastreduce.elastic.join takes a fastreduce.DistributedDataParallel(model, elastic=True)")
    if reducer.group is not None:
        raise SettingError("fastreduce.elastic.join was called for this module before")
    if trains():
        raise SettingError(
            "fastreduce.elastic.join was called for another module of this process, and a process is a member once: "
            "put both into one module and wrap that, or call leave() first"
        )
    if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise SettingError(f"timeout={timeout!r}: allowed: seconds, a number above 0")
    if least is not None and not (isinstance(least, int) and least > 0):
        raise SettingError(f"least={least!r}: allowed: whole numbers from 1 on, or None for WORLD_SIZE")
    if not (isinstance(backwards, int) and backwards > 0):
        raise SettingError(f"backwards={backwards!r}: allowed: whole numbers from 1 on")
    for name, part in parts.items():
        if isinstance(part, torch.optim.LBFGS):
            raise SettingError(
                f"{name}= is LBFGS, which calls backward so often as it likes in one step: who comes between two of "
                "them would begin a step of its own"
            )
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise SettingError(f"{name}={part!r} has no state: parts have a state_dict and a load_state_dict")
        if isinstance(part, ShardSampler):
            raise SettingError(
                f"{name}= is a ShardSampler, which deals to fixed ranks: take a fastreduce.elastic.BatchSampler"
            )
    if "model" in parts:
        raise SettingError("model=: that is the first argument")
    size = _number("WORLD_SIZE", 1) if least is None else least
    job = os.environ.get("TORCHELASTIC_RUN_ID", "job")
    client = StoreClient(_open(store, timeout), timeout).at(f"fastreduce/elastic/{job}")
    allowed = ALLOWED[module_device(ddp.module).type]
    asked = ddp._transport_argument or os.environ.get(ENVIRONMENT_VARIABLE) or allowed[0]
    if asked not in allowed:  # the variable may name one for other devices
        asked = allowed[0]
    if asked == "nccl":
        library.load_nccl()  # before others wait for this process
    membership = Membership(ddp, parts, client, timedelta(seconds=timeout), _number("RANK", 0), asked, backwards)
    reducer.group = membership
    try:
        membership.enter(size, START_SECONDS)
    except BaseException:  # who catches it, and goes on, would train alone
        reducer.group = None
        membership.leave()
        raise
    return Members(membership)


def _number(variable: str, least: int) -> int:
    """That of a variable of the launcher's; the least where nobody has set it."""
    text = os.environ.get(variable, str(least))
    if not text.isdecimal() or int(text) < least:
        raise SettingError(f"{variable}={text!r}: allowed: whole numbers from {least} on")
    return int(text)


def _open(store: dist.Store | str | None, timeout: float) -> dist.Store:
    if isinstance(store, dist.Store):
        return store
    if store is None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise SettingError(
                "fastreduce.elastic.join needs a store that outlives each rank: start the script with "
                "fastreduce launch --elastic, or pass store='host:port' of a "
                "torch.distributed.TCPStore that another process holds"
            )
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    host, _, port = store.rpartition(":") if isinstance(store, str) else ("", "", "")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingError(f"store={store!r}: allowed: a torch.distributed.Store, or host:port, up to 65535")

    def connect() -> dist.Store:
        limit = timedelta(seconds=timeout)
        return dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=limit, wait_for_workers=False)

    try:
        found: dist.Store = in_background(connect, timeout + GRACE_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(f"nobody holds a store at {store}: {error}") from error
    return found
