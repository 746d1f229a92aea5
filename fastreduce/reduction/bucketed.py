"""BucketedGradients: which gradients travel in which bucket, and what one bucket's average takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compression import Compression
from ..errors import ReducerError, SettingError
from ..policy import Policy, assigned
from ..transports import Transport
from . import saved_residuals
from .averaging import Averaging, CompressedAveraging
from .bucket_streams import BucketStreams
from .buckets import BucketPlan, group_by_size, shortest
from .clocks import Seconds
from .gradients import BucketMembers, Collected, Gradients
from .jobs import Part
from .pipeline import BucketPipeline, warm_up
from .residuals.bucket_residuals import SlotResiduals
from .residuals.error_feedback import ErrorFeedback, agree_that_finite
from .residuals.notices import notice_unscaling
from .streams import Stream
from .uneven import UnevenInputs

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass
class BucketJob:
    """One bucket's reduction in one backward, and the stream that it belongs on."""

    pipeline: BucketPipeline
    found: Collected
    stream: Stream

    def begin(self) -> Part:
        """Compress it, and start its first collective."""
        return self.pipeline.begin(self.found.sources, self.found.targets, self.found.unused)


class BucketedGradients:
    """The gradients of `parameters`, laid out in buckets, each with the pipeline that averages it.

    `lay_out` comes first.

    Args:
        parameters: floating-point or complex leaves that require gradients.
        names: their names, which key saved residuals and appear in errors.
        transport: what moves wires.
        compression: the setting.
        bucket_caps: bytes of the first, second, … bucket; the last holds for all that follow.
        as_views: whether `.grad` become views of the buckets.
        dtype: what gradients are averaged in; None means each in the dtype of its parameter.
        leave_out: indices of parameters that travel in no bucket.
        frozen: other parameters, by name, that may be added later: a policy may have keys for them.

    Attributes:
        plan: the layout.
        pipelines: by bucket.
        streams: what they are reduced on.
        dtype: as given.
        frozen: as given; its owner takes out what has been added.
        gradients: where they lie.
        specs: of all parameters.
        indices: of the parameters that travel in buckets.
        uneven: which ranks bring gradients.
        is_laid_out: whether all is as the plan has it; its owner, who counts gradients by it, says so last.

    Raises:
        TensorError: if a parameter's dtype is not supported.
        BackendUnavailableError: if the kernels cannot run on the parameters' device.
    """

    plan: BucketPlan

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        transport: Transport,
        compression: Compression | Policy,
        *,
        bucket_caps: Sequence[int],
        as_views: bool,
        dtype: torch.dtype | None,
        leave_out: Iterable[int],
        frozen: Mapping[str, Tensor],
    ) -> None:
        self.transport, self.compression, self.frozen = transport, compression, frozen
        self.caps, self.as_views, self.dtype = shortest(bucket_caps), as_views, dtype
        self.gradients = Gradients(parameters, names, dtype)
        self.specs = self.gradients.specs
        left_out = set(leave_out)
        self.indices = [i for i in range(len(self.specs)) if i not in left_out]
        self.orders = [self.indices[::-1]]
        self.uneven = UnevenInputs()
        self.pipelines: list[BucketPipeline] = []
        self._members: list[BucketMembers] = []
        self.is_laid_out = False
        self.keeps_statistics = False
        self._warm: set[Compression] = set()
        self.settings = self.assign(compression)
        self.warm_up([compression])
        self._steps: dict[torch.device, Tensor] = {}
        self._told = 0  # what of them the host knows
        self._make_steps()
        self._averaging: Averaging = CompressedAveraging(self.settings, self._steps)
        self.streams = BucketStreams()
        self._make_streams()

    @property
    def are_compressed(self) -> bool:
        """Whether our kernels average buckets, and no user's hook."""
        return isinstance(self._averaging, CompressedAveraging)

    def assign(self, setting: Compression | Policy) -> list[Compression]:
        """The setting of each parameter; of one that travels in no bucket, too.

        Raises:
            SettingError: if a policy does not fit them.
        """
        return assigned(setting, self.gradients.names, self.gradients.parameters, self.frozen)

    def warm_up(self, settings: Iterable[Compression | Policy]) -> None:
        """Compile the kernels of settings that will be used."""
        for setting in dict.fromkeys(each for chosen in settings for each in self.assign(chosen)):
            if setting not in self._warm:
                for device, dtype in {(self.specs[i].device, self.specs[i].dtype) for i in self.indices}:
                    warm_up(dtype, device, setting, self.transport, self.keeps_statistics)
                self._warm.add(setting)

    def pipelines_under(self, setting: str, caps: Sequence[int] | None, transport: Transport) -> list[BucketPipeline]:
        """What would average the same gradients under another setting; nothing of what is in force changes.

        Args:
            setting: a spec string.
            caps: bytes of buckets; None means those in force.
            transport: what moves the wires, among the same ranks.

        Raises:
            SettingError: if it is no setting, or a policy does not fit the parameters.
        """
        settings = self.assign(Policy.of(setting))
        self.warm_up([Policy.of(setting)])
        averaging, groups = CompressedAveraging(settings, self._steps), self.groups(caps, settings)
        return averaging.make_pipelines(self.gradients, groups, transport, as_views=False)[1]

    # Layout

    def first_groups(self) -> list[list[int]]:
        """Reverse order: about that in which gradients arrive."""
        self.orders = [self.indices[::-1]]
        return self.groups()

    def groups(
        self, caps: Sequence[int] | None = None, settings: Sequence[Compression] | None = None
    ) -> list[list[int]]:
        """The parameters of each bucket, as buckets are or if they had such sizes, or settings."""
        told = caps or self.caps, settings or self.settings
        return [group for order in self.orders for group in group_by_size(self.specs, order, *told)]

    def switch(self, compression: Compression | Policy, caps: Sequence[int]) -> None:
        """Go on under another setting, with buckets of such sizes; what is under way has ended.

        Residuals move along, second-stage ones as part of the first stage. Where the new setting has no error feedback,
        they are added to the next gradients.
        """
        was_laid_out = self.is_laid_out  # else settings and sizes are not those of the plan
        kept = self._take_out_kept()
        kinds = _kinds(self.settings)
        self.use(compression)
        groups = [[slot.parameter for slot in bucket.slots] for bucket in self.plan.buckets]
        if not was_laid_out or tuple(caps) != self.caps or kinds != _kinds(self.settings):
            self.caps = tuple(caps)
            groups = self.groups()
        self.lay_out(groups)
        self._go_on_with(kept)

    def add(self, added: Gradients, left_out: Iterable[int]) -> None:
        """Average these, too, which are first in the order of buckets until `regroup`; residuals move along.

        Args:
            added: gradients of other parameters, in the same `dtype`.
            left_out: positions of those among them that travel in no bucket.

        Raises:
            SettingError: as `use`, or if a policy does not fit them.
        """
        kept = self._take_out_kept()
        first, left_out = len(self.specs), set(left_out)
        self.gradients.add(added)
        new = [first + i for i in range(len(added.specs)) if i not in left_out]
        self.indices += new
        self.orders = [new[::-1], *self.orders]
        self._make_steps()
        self._warm.clear()  # not for their dtypes and devices
        self.use(self.compression)
        self._make_streams()
        self.lay_out(self.groups())
        self._go_on_with(kept)

    def use(self, compression: Compression | Policy) -> None:
        """Lay buckets out for another setting from now on.

        Raises:
            SettingError: if a user's hook averages them.
        """
        if not self.are_compressed:
            raise SettingError(
                f"compression={str(compression)!r} and a communication hook exclude each other: both decide what goes "
                "on the wire"
            )
        self.warm_up([compression])
        self.compression, self.settings = compression, self.assign(compression)
        self._averaging = CompressedAveraging(self.settings, self._steps)

    def lay_out(self, groups: Iterable[Sequence[int]]) -> None:
        """Make buckets of these groups of parameters. What old ones keep is let go of first: memory holds it once."""
        self.streams.synchronize()
        self.is_laid_out = False
        self.pipelines, self._members = [], []
        self.gradients.forget_views()
        # Whose memory is let go of at the end, when nothing reads it any more.
        last = [parameter.grad for parameter in self.gradients.parameters]
        plan, pipelines = self._averaging.make_pipelines(self.gradients, groups, self.transport, self.as_views)
        members = [self.gradients.members(bucket) for bucket in plan.buckets]
        self.plan, self.pipelines, self._members = plan, pipelines, members
        self.uneven.lay_out()
        if self.keeps_statistics:
            for pipeline in self.pipelines:
                pipeline.keep_statistics()
        if self.as_views:
            for each, pipeline in zip(members, pipelines, strict=True):
                self.gradients.install_views(each, pipeline.make_views)
        self.streams.synchronize()
        del last

    def check_laid_out(self) -> None:
        """Raise what tells that gradients are in no bucket, or are counted by a plan that is over.

        Raises:
            ReducerError: if laying them out anew has failed, as where memory did not suffice.
        """
        if not self.is_laid_out:
            raise ReducerError(
                f"rank {self.transport.rank}: gradients would not be averaged, since buckets could not be laid out "
                "anew, as an error has told; what error feedback kept is lost. Wrap the module again, or set a "
                "compression that fits into memory"
            )

    def regroup(self, observed: Iterable[int]) -> None:
        """Lay buckets out in the order of `observed`, and what is not in it last, in buckets of its own.

        Residuals move along: second-stage ones as part of the first stage, because shards change hands.
        """
        here = set(self.indices)
        order = [i for i in observed if i in here]
        idle = sorted(here.difference(order))
        kept = self._take_out_kept()
        self.orders = [order, idle]
        self.lay_out(self.groups())
        self._go_on_with(kept)

    def move_to(self, transport: Transport) -> None:
        """Lay buckets out as at construction, for the ranks of another transport. Residuals move along."""
        kept = saved_residuals.collect(self.pipelines)
        self.transport = transport
        self._make_streams()
        self.lay_out(self.first_groups())
        self._go_on_with(kept)

    def _take_out_kept(self) -> dict[str, SlotResiduals]:
        """What error feedback keeps, for new pipelines."""
        self.tell_joined()
        self.is_laid_out = False
        return saved_residuals.collect_alike(self.pipelines)

    def _go_on_with(self, kept: Mapping[str, SlotResiduals]) -> None:
        """Put residuals into new pipelines; what becomes of averages that are in `.grad` still is watched there."""
        saved_residuals.restore(kept, self.pipelines)
        for pipeline, members in zip(self.pipelines, self._members, strict=True):
            if pipeline.kept is not None:
                pipeline.kept.follow_on(members.parameters, watched=not self.uneven.here)
        self.streams.synchronize()

    def average_with(self, averaging: Averaging) -> None:
        """Let another average the buckets, from the same groups, from now on."""
        self._averaging = averaging
        self._make_streams()
        self.lay_out([[slot.parameter for slot in bucket.slots] for bucket in self.plan.buckets])

    def _make_steps(self) -> None:
        """A number of the step on each device that has none."""
        for device in {self.specs[i].device for i in self.indices} - self._steps.keys():
            self._steps[device] = torch.full((1,), self._told, dtype=torch.int64, device=device)

    def _make_streams(self) -> None:
        devices = {self.specs[i].device for i in self.indices}
        self.streams.make(devices, lambda device: self._averaging.make_stream(device, self.transport))

    # One bucket's average

    def at_step(self, step: int) -> None:
        """What random bits follow from until the next call: a number on the device, which a CUDA graph counts on."""
        if step != self._told and any(each.compression.random_seed is not None for each in self.pipelines):
            for counted in self._steps.values():
                counted.add_(1) if step == self._told + 1 else counted.fill_(step)
            self._told = step

    def collect(self, index: int, used: Sequence[bool]) -> BucketJob:
        """A bucket's job; `used` tells by parameter whether a backward reached it on this rank."""
        found = self.gradients.collect(self._members[index], used)
        return BucketJob(self.pipelines[index], found, self.streams.by_device[self.plan.buckets[index].device])

    def let_go(self, jobs: Iterable[BucketJob]) -> None:
        """Let `.grad` be copies where the averages of jobs under way are still to be written, which are nobody's.

        On CPUs: a GPU's thread leaves a backward that raised behind its caller, who may have changed them by then.
        """
        if not self.streams.gpus:  # whatever stream a user's hook has there
            for job in jobs:
                self._members[job.pipeline.bucket.index].copy_out(job.found.targets)

    def run_broken(self, pipeline: BucketPipeline) -> None:
        """`BucketPipeline.run_broken`, behind which `.grad` hold what they held, also those in the wire."""
        members = self._members[pipeline.bucket.index]
        if pipeline.wires.in_place and members.views is not None:
            members.copy_out(members.views)
        pipeline.run_broken()

    def alone(self, index: int) -> bool:
        """Whether there is nothing to average and nothing to move."""
        pipeline = self.pipelines[index]
        return pipeline.alone and pipeline.kept is None and not self.as_views and self.dtype is None

    def unused(self, index: int, used: Sequence[bool]) -> set[int]:
        """The parameters of a bucket that this rank has not used."""
        return {i for i in self._members[index].indices if not used[i]}

    def settle(self, job: BucketJob, active_ranks: int) -> set[int]:
        """Store what arrived, as the mean over so many ranks; returns the parameters that no rank used."""
        pipeline, scale = job.pipeline, 1.0
        if active_ranks != self.transport.world_size:
            scale = self.transport.world_size / active_ranks
            torch._foreach_mul_(job.found.targets, scale)
            if pipeline.statistics is not None:
                pipeline.statistics.begin(made=False)
        bucket, left = pipeline.bucket, job.found.settle(pipeline.used_by_any)
        parameters = self._members[bucket.index].parameters
        if pipeline.statistics is not None:
            pipeline.statistics.describe(parameters, left)
        pipeline.follow(parameters, left, job.found.targets, scale)
        return {bucket.slots[position].parameter for position in left}

    def take_part(self) -> None:
        """Bring zeros to one reduction of every bucket, whose averages the other ranks apply."""
        for pipeline, members in zip(self.pipelines, self._members, strict=True):
            zeros = [pipeline.used.new_zeros(slot.numel) for slot in pipeline.bucket.slots]
            pipeline.run(zeros, zeros, range(len(zeros)))
            if pipeline.kept is not None:
                left = (pipeline.used_by_any == 0).nonzero().flatten().tolist()
                pipeline.follow(members.parameters, left, watched=False)

    def keep_statistics(self) -> None:
        """Let decompression count non-finite elements and sum squares from now on; its kernels are compiled here."""
        if not self.keeps_statistics:
            self.keeps_statistics = True
            notice_unscaling()
            warm, self._warm = self._warm, set()
            self.warm_up(list(warm))
            for pipeline in self.pipelines:
                pipeline.keep_statistics()

    def settings_text(self) -> str:
        """Which parameters have which setting, as one line."""
        names: dict[str, list[str]] = {}
        for i in self.indices:
            names.setdefault(str(self.settings[i]), []).append(self.specs[i].name)
        return "; ".join(f"{setting}: {', '.join(of)}" for setting, of in names.items())

    def agree_that_finite(self) -> None:
        """One verdict for all buckets of a step."""
        rest = [p.finite for p in self.pipelines if p.kept is None and p.finite is not None]
        agree_that_finite(self.feedbacks, rest)

    def look(self, others_follow: bool = True) -> None:
        """Let error feedback see what has become of the last averages (`Applied.look`)."""
        for pipeline, members in zip(self.pipelines, self._members, strict=True):
            if pipeline.kept is not None:
                pipeline.kept.look(members.parameters, others_follow)

    def tell_joined(self, divisor: int | None = None) -> None:
        """Where ranks have joined, let them hear what became of the last averages (`UnevenInputs.tell`).

        And let them keep statistics if others do, or the first clipping behind the join would sum otherwise here.
        """
        if self.uneven.tell(self.transport, self.pipelines, self.keeps_statistics, divisor):
            self.keep_statistics()

    def end_join(self) -> None:
        """All ranks have joined."""
        self.tell_joined()
        self.uneven.end()
        for pipeline in self.pipelines:
            pipeline.watches_for_others = False

    @property
    def feedbacks(self) -> list[ErrorFeedback]:
        """What is kept of each bucket, under error feedback or after it."""
        return [pipeline.kept for pipeline in self.pipelines if pipeline.kept is not None]

    # Figures

    @property
    def wire_device(self) -> torch.device:
        """Where tensors are that the transport moves."""
        return self.specs[0].device if self.transport.enqueues else torch.device("cpu")

    @property
    def seconds(self) -> Seconds:
        """Time that the last reduction spent in each stage, summed over the buckets."""
        stages = [pipeline.seconds for pipeline in self.pipelines]
        return Seconds(
            sum(s.compress for s in stages), sum(s.reduce for s in stages), sum(s.decompress for s in stages)
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(pipeline.sent_bytes for pipeline in self.pipelines)


def _kinds(settings: Sequence[Compression]) -> list[int]:
    """Which parameters have one setting: the same lists mean the same buckets."""
    place = {setting: i for i, setting in enumerate(dict.fromkeys(settings))}
    return [place[setting] for setting in settings]
