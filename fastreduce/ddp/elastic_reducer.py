"""ElasticReducer: a reducer whose ranks may be lost, and come, while it trains."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compression import PowerSGD
from ..environment.variables import folder_asked_for
from ..errors import NotInitializedError, ReducerError, SettingError, TransportError
from ..reduction.arrivals import weakly
from ..reduction.bucketed import BucketJob
from ..reduction.launches import Made
from ..reduction.schedule import Schedule
from ..reduction.telemetry.trace import VARIABLE as TRACE
from ..sync_batchnorm import SyncBatchNorm
from ..transports import Transport
from .reducer import TorchReducer

# By device, what moves wires between ranks that come and go; the first where nobody asks for one.
TRANSPORTS: dict[str, tuple[str | None, ...]] = {"cpu": (None, "gloo", "shm"), "cuda": ("nccl",)}
PAUSE_SECONDS = 1e-4  # between two looks at a GPU that averages


class ElasticGroup(Protocol):
    """Those who train together, as the reducer needs them.

    Attributes:
        transport: what moves wires among those present.
    """

    transport: Transport

    def before_forward(self, step: int) -> None:
        """Between two steps, with so many committed: let in who waits."""

    def commit(self) -> None:
        """Return when every rank has called it: all of them have all averages of the step.

        Raises:
            TransportError: if a rank is lost.
        """

    def check_member(self) -> None:
        """Raise if the others have gone on without this rank, which was stopped for long.

        Raises:
            TransportError: if they have.
        """

    def abort(self) -> None:
        """End what is under way."""

    def regroup(self, step: int, whole: bool) -> bool:
        """Meet those who are left, and connect with them.

        Args:
            step: how many steps this rank has committed; another one is under way.
            whole: whether this rank has all of its averages.

        Returns:
            Whether they count: every rank that is left has them.

        Raises:
            TransportError: if this rank is out, or the step fails again and again, though nobody is lost.
        """


class _AgainError(TransportError):
    """Those who are left reduce the step under way again."""


class ElasticReducer(TorchReducer):
    """A TorchReducer over a group that loses ranks and gets others.

    The law of a step:

    1. Before a bucket is reduced, its gradients are copied (as much memory as the gradients take).
    2. When all averages of the step are here, and before an optimizer sees one, ranks commit: a small all-reduce.
       Who has passed it knows that every rank has all averages. Of a GPU's the host has waited for the end.
    3. Where a collective fails, this rank aborts what is under way and meets those who are left
       (`ElasticGroup.regroup`). If one of them has passed the commit, or all have all averages, these count, the lost
       ones' gradients included. Otherwise local gradients are put back, and reduced again among those who are left; so
       often as it takes.
    4. Then, or where the averages counted before the next forward, buckets are laid out for the new ranks. What error
       feedback keeps on this rank goes along; what lost ranks kept is lost, and new ones begin with none.

    Buckets keep the order in which they were made: ranks never compare the order in which gradients arrive.
    """

    group: ElasticGroup | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("sparse"):
            raise SettingError("elastic=True with sparse gradients: they travel in no bucket, and cannot be put back")
        super().__init__(*args, **kwargs, rebuilds=False)
        _check_schedule(self.schedule)
        if any(isinstance(setting, PowerSGD) for setting in self.buckets.settings):
            raise SettingError(
                "elastic=True with powersgd: its factors follow from earlier ones, which new ranks have not"
            )
        self._copies: dict[int, Tensor] = {}  # memory, by parameter
        self._kept: list[tuple[Tensor, Tensor]] = []  # gradients of this step, and what was in them
        self.events.launching.append(weakly(self._keep))
        self.events.arrived.append(weakly(self._commit))
        self.backward.recover = weakly(self._recover)

    @property
    def _joined(self) -> ElasticGroup:
        if self.group is None:
            raise NotInitializedError(
                "a forward with elastic=True: call members = fastreduce.elastic.join(ddp, …) first"
            )
        return self.group

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients enabled."""
        group = self._joined
        if self.backward.is_here:
            return False
        self.drop_broken_backward()
        group.before_forward(self.step)
        self.follow()
        return super()._rebuild_buckets()

    def drop_broken_backward(self) -> None:
        """Called before every forward.

        Raises:
            ReducerError: if there is one, or if a backward is under way.
        """
        self.backward.check_ended()
        if self.backward.running:
            raise ReducerError(
                "a backward raised before its end, and with elastic=True a step cannot be left out on one rank alone: "
                "end this process, and start it again"
            )

    def follow(self) -> None:
        """Go on over the transport of those who are there now."""
        transport = self._joined.transport
        if transport is not self.transport:
            self.move_to(lambda: transport, compared=True)  # when they joined
            self.logger.update(rank=transport.rank, world_size=transport.world_size)

    def check_member(self) -> None:
        """Raise if the others have gone on without this rank.

        Raises:
            TransportError: if they have.
        """
        if self.group is not None:
            self.group.check_member()

    # A step

    def arm(self) -> None:
        """Make the next backward reduce."""
        self._kept.clear()
        super().arm()

    @torch.no_grad()
    def _keep(self, job: BucketJob) -> None:
        """Copy a bucket's gradients, into memory that is kept for that."""
        copies, grads = [], []
        for slot in job.pipeline.bucket.slots:
            grad = self.buckets.gradients.parameters[slot.parameter].grad
            if grad is not None:
                copy = self._copies.get(slot.parameter)
                if copy is None or copy.stride() != grad.stride():
                    copy = self._copies[slot.parameter] = torch.empty_like(grad)
                copies.append(copy)
                grads.append(grad)
        if grads:
            torch._foreach_copy_(copies, grads)
            self._kept += zip(grads, copies, strict=True)

    def _put_back(self) -> None:
        for grad, copy in self._kept:
            grad.copy_(copy)

    def _commit(self) -> None:
        """All averages have come, or are enqueued on a GPU."""
        self._wait_for_averages()
        try:
            self._joined.commit()
        except TransportError as error:
            if not self._joined.regroup(self.step, whole=True):
                raise _AgainError(str(error)) from error

    def _wait_for_averages(self) -> None:
        """Wait for the GPU that computes them, which in a collective with a lost rank it does until that is aborted."""
        for device in self.buckets.streams.gpus:
            averages = torch.cuda.current_stream(device).record_event()
            while not averages.query():
                self.transport.check()
                time.sleep(PAUSE_SECONDS)
        self.transport.check()  # what is aborted ends, too

    def finish_on_gpus(self) -> None:
        """Wait until nothing is under way on them."""
        self.buckets.streams.synchronize()

    def _recover(self, error: TransportError, step: int, launches: Made) -> None:
        """A collective has failed: let the step under way begin again among those who are left."""
        errors = [error, *self._end(launches)]
        if not isinstance(error, _AgainError):
            self._joined.regroup(step, whole=False)
        for each in errors:
            _let_go(each)
        self._put_back()
        self.follow()
        self.buckets.look()  # earlier averages in `.grad`, to which this step's gradients were added, are there still

    def _end(self, launches: Made) -> list[TransportError]:
        """Wait until nothing writes to gradients any more; returns what collectives have raised."""
        self._joined.abort()
        for _, pending in launches:
            pending.cancel()
        errors = []
        for _, pending in launches:
            try:
                pending.result()
            except CancelledError:
                pass
            except TransportError as error:
                errors.append(error)
        self.finish_on_gpus()
        return errors

    def schedule_of(self, state: Mapping[str, Any]) -> Schedule:
        """As in GradientReducer; buckets keep the order in which they were made.

        Raises:
            SettingError: also if the setting is to change later.
        """
        schedule = super().schedule_of(state)
        _check_schedule(schedule)
        return schedule

    def state_dict(self) -> dict[str, Any]:
        """As in GradientReducer, of this rank as if it were alone: who loads it does so before `elastic.join`."""
        return {**super().state_dict(), "rank": 0, "world_size": 1, "shard_residuals": []}

    def take_over(self, step: int) -> None:
        """Go on after so many steps of others; residuals, as those of a checkpoint, are of steps of long ago."""
        self.schedule.step = step
        self.lay_out()

    # What is refused

    def set_compression(self, setting: Any, at: int | None = None, bucket_bytes: float | None = None) -> None:
        """Refused.

        Raises:
            SettingError: always.
        """
        raise SettingError(f"set_compression({setting!r}) with elastic=True: those who come later would not know of it")

    def use_hook(self, state: object, hook: Any) -> None:
        """Refused.

        Raises:
            SettingError: always.
        """
        raise SettingError(f"communication hook {hook!r} with elastic=True: what it keeps and sends is not known here")

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        raise SettingError("join() with elastic=True: a rank that has no more inputs leaves (members.leave())")

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        raise SettingError("_update_process_group with elastic=True: fastreduce.elastic.join says who takes part")


def _let_go(error: BaseException) -> None:
    """Forget the frames of what has been made up for: connections would stay until Python collects its garbage."""
    each: BaseException | None = error
    is_ours = True
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        if is_ours:  # frames around those have what failed, too, and jobs keep what they raised
            each.__traceback__ = None
        is_ours = is_ours and each.__cause__ is not None  # else it may be what a user handles
        each = each.__cause__ or each.__context__


def _check_schedule(schedule: Schedule) -> None:
    if schedule.due < math.inf:
        raise SettingError(
            "elastic=True with a setting that changes in mid-run (warm_up, a callable of the step): take one"
        )


def group_of_one() -> dist.ProcessGroup:
    """The default process group of a process of an elastic job: itself alone; others come and go beside it.

    Raises:
        SettingError: if there is one of several ranks.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() > 1:
        raise SettingError(
            f"elastic=True in a process group of {dist.get_world_size()} ranks, which cannot lose one: leave "
            "init_process_group out (or MPI: Open MPI, without ULFM, ends the job with its first rank); "
            "fastreduce.elastic.join connects the ranks"
        )
    return group


def check_elastic(module: nn.Module, arguments: Mapping[str, Any], transport: object) -> None:
    """Raise SettingError for what cannot go on without a lost rank, with the reason."""
    devices = {str(p.device): p.device.type for p in module.parameters()}
    if len(devices) > 1 or not TRANSPORTS.keys() >= set(devices.values()):
        raise SettingError(
            f"elastic=True with parameters on {', '.join(devices)}: allowed: a module on the CPU, or on one GPU"
        )
    for kind in devices.values():
        allowed = TRANSPORTS[kind]
        if transport is not None and transport not in allowed:
            names = " or ".join(repr(name) for name in allowed if name)
            raise SettingError(f"elastic=True with transport={transport!r} on {kind}: allowed: {names}")
    if any(isinstance(m, (nn.SyncBatchNorm, SyncBatchNorm)) for m in module.modules()):
        raise SettingError("elastic=True with SyncBatchNorm: its collectives in forward cannot lose a rank")
    if arguments["process_group"] is not None or arguments["device_mesh"] is not None:
        raise SettingError("elastic=True with process_group or device_mesh: fastreduce.elastic.join connects the ranks")
    if arguments["gradient_as_bucket_view"]:
        raise SettingError(
            "elastic=True with gradient_as_bucket_view: gradients would lie where a broken collective writes"
        )
    for name in ("mixed_precision", "delay_all_reduce_named_params"):
        if arguments[name] is not None:
            raise SettingError(f"elastic=True with {name}: what it keeps between backwards cannot be put back")
    if folder_asked_for(TRACE) is not None:
        raise SettingError(f"elastic=True with {TRACE}: ranks that come and go have no common clock")
