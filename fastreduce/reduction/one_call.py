"""all_reduce_gradients: the same reduction for people without a module."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from ..compression import Compression
from ..errors import DeviceError, SettingError, TensorError, TransportError, brief, no_group
from ..policy import single
from ..transports import Transport, make_transport
from . import saved_residuals
from .agreement import check_agreement, describe_tensor
from .arrays import as_list, as_tensor
from .arrivals import Reached
from .averaging import CompressedAveraging
from .bucketed import BUCKET_BYTES
from .buckets import group_by_size
from .gradients import Gradients, real_numel
from .pipeline import BucketPipeline
from .residuals.bucket_residuals import SlotResiduals
from .residuals.error_feedback import ErrorFeedback, agree_that_finite
from .shared_buffers import SharedBuffers, Turns

KEPT = 256  # lists of shapes; under error feedback, calls for which a list of arrays is kept that has no residuals left
OPERATIONS = {"mean": None, "sum": 1}  # what the sum is divided by; None means the number of ranks


class _Reduction:
    """Plan and pipelines for one list of shapes, kept between calls; the latter may be let go of until the next."""

    def __init__(
        self,
        tensors: list[Tensor],
        transport: Transport,
        compression: Compression,
        op: str,
        layouts: Sequence[Tensor | None],
        memory: SharedBuffers,
    ) -> None:
        gradients = Gradients(tensors, _names(tensors), layouts=layouts)
        self.layouts, specs = gradients.layouts, gradients.specs
        # Of calls, counted: what random bits follow from.
        devices = {spec.device for spec in specs}
        self.steps = {device: torch.zeros(1, dtype=torch.int64, device=device) for device in devices}
        self._divisor = OPERATIONS[op]
        self._averaging = CompressedAveraging([compression] * len(specs), self.steps, self._divisor, memory)
        groups = group_by_size(specs, range(len(specs)), [BUCKET_BYTES])
        self._plan = self._averaging.plan_of(gradients, groups, transport)
        self.pipelines: list[BucketPipeline] = []
        self.prepare(transport)
        self.reached = Reached(self.look)
        if compression.error_feedback:
            self.reached.watch(tensor for tensor in tensors if tensor.requires_grad)

    def prepare(self, transport: Transport) -> None:
        """Make the pipelines, if there are none."""
        if not self.pipelines:
            self.pipelines = self._averaging.pipelines_of(self._plan, transport, as_views=False)
            for feedback in self.feedbacks:
                feedback.comes_back = transport.world_size / (self._divisor or transport.world_size)

    def let_go(self) -> None:
        """Of the pipelines on CPUs, in whose residuals nothing is left; a GPU's may be in a graph of the user's."""
        if all(device.type == "cpu" for device in self.steps):
            self.pipelines = []

    def look(self) -> None:
        """Let error feedback see what has become of the last averages."""
        for feedback in self.feedbacks:
            feedback.look()

    @property
    def feedbacks(self) -> list[ErrorFeedback]:
        """What is kept of each bucket, under error feedback."""
        return [pipeline.feedback for pipeline in self.pipelines if pipeline.feedback is not None]


class _Owners:
    """Whose residuals lie where: those of an array belong to it, in whatever list it comes.

    Weakly: a reduction is forgotten with the first of the arrays that it is for, which may end at any time, on another
    thread too: nothing here is gone through but in a copy.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._last: dict[tuple[int, ...], int] = {}  # of these calls, for each list
        self._reductions: dict[tuple[int, ...], _Reduction] = {}
        self._homes: dict[int, tuple[_Reduction, str]] = {}
        self._lists: dict[int, set[tuple[int, ...]]] = {}  # in which an array has come
        self._emptied: weakref.WeakSet[_Reduction] = weakref.WeakSet()  # the last ones whose residuals were moved
        self._layouts: dict[int, Tensor] = {}  # in whose memory order residuals of an array are, whatever it gets later

    def find(self, owners: list[Any]) -> _Reduction | None:
        """The reduction for a list of arrays that came before."""
        identities = tuple(map(id, owners))
        self._calls += 1
        if identities in self._reductions:
            self._last[identities] = self._calls
        return self._reductions.get(identities)

    def layouts(self, owners: list[Any], tensors: list[Tensor]) -> list[Tensor | None]:
        """In whose memory order the residuals of arrays are; None of an array that is new.

        Raises:
            TensorError: if an array has another size than its residuals.
        """
        layouts = [self._layouts.get(id(owner)) for owner in owners]
        for i, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
            if layout is not None and layout.numel() != (count := real_numel(tensor)):
                raise TensorError(
                    f"all_reduce_gradients: tensor {i} has {count} numbers, and had {layout.numel()} when error "
                    "feedback began to keep residuals of it: pass another tensor"
                )
        return layouts

    def add(self, owners: list[Any], reduction: _Reduction) -> None:
        """Take note of one for a new list.

        Raises:
            SettingError: if an array's life cannot be followed.
        """
        identities = tuple(map(id, owners))
        self._drop_old()
        for i, (owner, layout) in enumerate(zip(owners, reduction.layouts, strict=True)):
            if id(owner) not in self._lists:
                try:
                    weakref.finalize(owner, _forget, weakref.ref(self), id(owner)).atexit = False
                except TypeError as error:
                    raise SettingError(
                        f"all_reduce_gradients: error feedback keeps residuals for each array, and of tensor {i}, a "
                        f"{type(owner).__name__}, it cannot tell when it ends: pass a torch tensor or parameter"
                    ) from error
            self._lists.setdefault(id(owner), set()).add(identities)
            self._layouts.setdefault(id(owner), layout)
        self._reductions[identities], self._last[identities] = reduction, self._calls

    def _drop_old(self) -> None:
        """Counted in calls, so that all ranks drop the same ones, whenever their arrays end."""
        at_home = {id(reduction) for reduction, _ in list(self._homes.values())}
        for identities in [each for each, last in list(self._last.items()) if last < self._calls - KEPT]:
            reduction = self._reductions.get(identities)  # an array may end meanwhile
            if reduction is not None and id(reduction) not in at_home:
                self._drop(identities)

    def _drop(self, identities: tuple[int, ...]) -> None:
        self._last.pop(identities, None)
        if (reduction := self._reductions.pop(identities, None)) is not None:  # else another array has ended first
            reduction.reached.remove()
        for identity in identities:
            self._lists.get(identity, set()).discard(identities)

    def forget(self, identity: int) -> None:
        """An array has ended, and the lists that it was in; what is kept of others in them stays."""
        self._homes.pop(identity, None)
        self._layouts.pop(identity, None)
        for identities in self._lists.pop(identity, set()):
            self._drop(identities)

    def sharing(self, owners: list[Any]) -> list[_Reduction]:
        """Those that have averaged one of some arrays."""
        lists = {each for owner in owners for each in list(self._lists.get(id(owner), ()))}
        found = map(self._reductions.get, lists)
        return [reduction for reduction in found if reduction is not None]

    def bring_home(self, owners: list[Any], reduction: _Reduction) -> None:
        """Move the residuals of arrays that came in another list the last time."""
        arrived, left = dict[str, SlotResiduals](), dict[int, _Reduction]()
        for owner, name in zip(owners, _names(owners), strict=True):
            home = self._homes.get(id(owner))
            if home is not None and home[0] is not reduction:
                arrived[name] = _take(*home)
                left[id(home[0])] = home[0]
            self._homes[id(owner)] = reduction, name
        if arrived:
            saved_residuals.restore(arrived, reduction.pipelines)
        if left:
            self._let_go(left.values())

    def _let_go(self, left: Iterable[_Reduction]) -> None:
        """Of the pipelines of lists without residuals; not of those that had some until now: they may come by turns.

        Args:
            left: whose residuals have been moved, all or some.
        """
        at_home = {id(reduction) for reduction, _ in list(self._homes.values())}
        emptied = weakref.WeakSet(each for each in left if id(each) not in at_home)
        if emptied:
            for each in [*self._emptied]:
                if id(each) not in at_home and each not in emptied:
                    each.let_go()
            self._emptied = emptied


def _forget(owners: weakref.ref[_Owners], identity: int) -> None:
    if (alive := owners()) is not None:
        alive.forget(identity)


def _take(reduction: _Reduction, name: str) -> SlotResiduals:
    """What is kept of a tensor, out of a reduction."""
    ((pipeline, feedback, i),) = (
        (pipeline, pipeline.feedback, i)
        for pipeline in reduction.pipelines
        if pipeline.feedback is not None
        for i, slot in enumerate(pipeline.bucket.slots)
        if slot.name == name
    )
    found = pipeline.take(i)
    if parameters := feedback.followed:
        feedback.follow_on(parameters)  # the others' averages may not have been applied yet, nor thrown away
    return found


def _names(tensors: Sequence[Any]) -> list[str]:
    return [f"tensor {i}" for i in range(len(tensors))]


class _Kept:
    """Buffers of one transport, and residuals. They hold it, and so belong to it: only a cycle is left of both.

    Attributes:
        transport: weakly.
        reductions: by setting, operation and shapes.
        owners: under error feedback, by setting and operation.
        memory: that all of them use in turn, for wires on CPUs.
        turns: of the streams of a device, in all that is kept there: residuals move from list to list.
    """

    ATTRIBUTE = "_fastreduce_kept_between_calls"

    def __init__(self, transport: Transport) -> None:
        self.transport = weakref.ref(transport)
        self.reductions: dict[Any, _Reduction] = {}
        self.owners: dict[Any, _Owners] = {}
        self.memory, self.turns = SharedBuffers(), defaultdict[torch.device, Turns](Turns)
        _alive.add(self)

    @classmethod
    def of(cls, transport: Transport) -> _Kept:
        """That of a transport, which may be any user's class: of those that let nobody set attributes too."""
        attributes = vars(transport)
        kept: _Kept | None = attributes.get(cls.ATTRIBUTE)
        if kept is None or kept.transport() is not transport:  # it is a copy of that one
            kept = attributes[cls.ATTRIBUTE] = cls(transport)
        return kept


_transports: weakref.WeakKeyDictionary[Any, dict[tuple[str, str | None], Transport]] = weakref.WeakKeyDictionary()
_agreed: weakref.WeakSet[Transport] = weakref.WeakSet()  # those of the user's
_alive: weakref.WeakSet[_Kept] = weakref.WeakSet()


def all_reduce_gradients(
    tensors_or_parameters: Iterable[Any],
    compression: Compression | str | None = None,
    group: dist.ProcessGroup | None = None,
    transport: Transport | str | None = None,
    op: str = "mean",
) -> None:
    """Average gradients over the ranks, in place, between backward and the optimizer's step.

    Parameters, and other leaves that require gradients, are averaged in their `.grad`: None counts as
    zeros, and stays None where every rank has None. Other tensors are averaged themselves; what is
    there twice, once. Call it on every rank with the same shapes in the same order; a list of shapes that is new is
    compared between ranks. Buffers are kept for the 256 lists of shapes that came last; on CPUs all lists have one
    memory for wires. Under error feedback residuals are kept for each parameter, tensor or array as long as it lives,
    with the list in which it came last: pass parameters, and not their `.grad`, which lives for one step. Between two
    steps of the optimizer average a parameter under one setting: behind another one it is not known what clipping made
    of the first one's average, and what it left out is not owed. Under stochastic rounding bits follow from the number
    of earlier calls in this process with such a list, while its buffers are kept.

    Args:
        tensors_or_parameters: parameters, or dense floating-point or complex tensors; NumPy and CuPy arrays
            too, and whatever has `__dlpack__` or `__cuda_array_interface__`.
        compression: one setting, as a spec string or a `Compression`, without `warm_up`: no policy and no callable.
            None means FASTREDUCE_COMPRESSION, which must then hold such a setting, or `none`.
        group: the ranks; None means the default group.
        transport: what moves the data, or its name, over `group`: as in `DistributedDataParallel`.
        op: "mean", or "sum".

    Raises:
        SettingError: if `compression` is no setting, `op` no operation, `transport` no name of one, or this rank not in
            `group`.
        BackendUnavailableError: if the transport that was asked for cannot be used here; it says why.
        TensorError: if a tensor or array cannot be averaged in place.
        MismatchError: on every rank, if lists that are new on all ranks differ in shapes, dtypes or settings; on the
            others, if one raises the above in the first call.
        TransportError: if a rank does not come, or comes with another list where that of this rank is not new: after
            it no call over this group works any more. Over gloo, as between hosts, lists that differ in bytes and are
            new on no rank end the process: gloo aborts it.
        NotInitializedError: if torch.distributed is not initialised and no transport is given.
    """
    found, error = list[Any](), None
    try:
        found = as_list(tensors_or_parameters)
    except TensorError as wrong:
        error = wrong
    arrays = list({id(array): array for array in found}.values())  # a sum of sums would count it once more
    reduce_owned(arrays, arrays, compression, group, transport, op, error)


@torch.inference_mode(False)  # inference tensors have no version, and what is kept here serves calls outside too
@torch.no_grad()
def reduce_owned(
    arrays: Sequence[Any],
    owners: Sequence[Any],
    compression: Compression | str | None,
    group: dist.ProcessGroup | None,
    transport: Transport | str | None,
    op: str,
    error: TensorError | None = None,
) -> None:
    """`all_reduce_gradients`, with the objects whose residuals error feedback keeps, one for each array.

    An `error` in what it was given is raised, once other ranks have been told.
    """
    leaves, kept = list[Tensor](), list[Any]()
    for i, (array, owner) in enumerate(zip(arrays, owners, strict=True)):
        try:
            leaves.append(_as_leaf(as_tensor(array), i))
            kept.append(owner)
        except TensorError as found:  # which other ranks must be told
            error = error or found
    for kind in sorted({leaf.device.type for leaf in leaves}) or ["cpu"]:
        if isinstance(transport, Transport):
            chosen = _told_of(transport, group)
        else:
            chosen = transport_of(group, "all_reduce_gradients", kind, transport)
        here = [i for i, leaf in enumerate(leaves) if leaf.device.type == kind]
        _average([leaves[i] for i in here], [kept[i] for i in here], chosen, compression, op, error)


def _average(
    leaves: list[Tensor],
    owners: list[Any],
    transport: Transport,
    compression: Compression | str | None,
    op: str,
    error: TensorError | None,
) -> None:
    turns = _Kept.of(transport).turns
    for device in {leaf.device for leaf in leaves}:  # perhaps another stream than in the last call
        turns[device].use_here(device)
    reduction = _reduction_for(leaves, owners, transport, compression, op, error)
    gradients = Gradients(leaves, _names(leaves), layouts=reduction.layouts)
    used = [leaf.grad is not None for leaf in leaves]
    for pipeline in reduction.pipelines:
        members = gradients.members(pipeline.bucket)
        found = gradients.collect(members, used)
        pipeline.run(found.sources, found.targets, found.unused)
        torch.autograd.graph.increment_version(found.targets)
        left = found.settle(pipeline.used_by_any)
        if pipeline.feedback is not None:
            pipeline.feedback.follow(members.parameters, left, pipeline.magnitudes)
    agree_that_finite(reduction.feedbacks)
    for other in _sharing(owners):
        other.reached.end()
    for step in reduction.steps.values():
        step.add_(1)


def _sharing(owners: list[Any]) -> list[_Reduction]:
    """Reductions under error feedback, over whatever ranks, that have averaged one of some arrays."""
    every = [each for kept in list(_alive) for each in list(kept.owners.values())]
    return [reduction for each in every for reduction in each.sharing(owners)]


def _reduction_for(
    tensors: list[Tensor],
    owners: list[Any],
    transport: Transport,
    compression: Compression | str | None,
    op: str,
    wrong: TensorError | None,
) -> _Reduction:
    kept = _Kept.of(transport)
    known = kept.reductions
    if wrong is not None and (known or kept.owners):
        raise wrong  # at once: where others know their list, they exchange nothing
    layout = tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors)
    error: Exception | None = None
    setting, layouts = None, list[Tensor | None]([None] * len(tensors))
    try:
        if wrong is not None:
            raise wrong
        if not isinstance(op, str) or op not in OPERATIONS:
            raise SettingError(f"all_reduce_gradients: unknown op {op!r}; allowed: {', '.join(OPERATIONS)}")
        setting = single(compression, "all_reduce_gradients")
        if setting.error_feedback:
            homes = kept.owners.setdefault((setting, op), _Owners())
            found = homes.find(owners)
            layouts = homes.layouts(owners, tensors) if found is None else layouts
        else:
            found = known.pop((setting, op, layout), None)
            if found is not None:  # the last ones stay
                known[setting, op, layout] = found
    except (SettingError, TensorError) as refused:
        found, error = None, refused
    if found is None:
        names = _names(tensors)
        description = {"compression": str(setting), "op": op}
        description.update((name, describe_tensor(t)) for name, t in zip(names, tensors, strict=True))
        check_agreement(transport, description, error)
        assert setting is not None
        found = _Reduction(tensors, transport, setting, op, layouts, kept.memory)
        if setting.error_feedback:
            homes.add(owners, found)
        else:
            known[setting, op, layout] = found
            if len(known) > KEPT:
                del known[next(iter(known))]
    for other in _sharing(owners):
        if not other.reached.any:  # no gradient follows its last averages, but this call, which puts others there
            other.look()
    if setting is not None and setting.error_feedback:
        found.prepare(transport)
        found.reached.begin()
        homes.bring_home(owners, found)
    return found


def _as_leaf(tensor: Tensor, place: int) -> Tensor:
    """What has the gradient in its `.grad`: `tensor`, the one at `place`, itself where it is a leaf, or a new leaf."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"all_reduce_gradients: tensor {place} is on {tensor.device}; allowed: cpu, cuda")
    leaf = isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)
    written = tensor.grad if leaf else tensor
    named = f"{'the gradient of ' * leaf}tensor {place}"
    if written is not None and written.layout is not torch.strided:
        raise TensorError(f"{named} is {written.layout}; allowed: torch.strided. Pass its to_dense()")
    if written is not None and torch._debug_has_internal_overlap(written) == 1:
        raise TensorError(
            f"{named}, of shape {tuple(written.shape)} and strides "
            f"{written.stride()}, has several elements in one place of memory, as expand makes it, and cannot be "
            "averaged in place: pass a contiguous() one"
        )
    if leaf:
        if written is not None and written.is_inference():
            tensor.grad = written.detach()  # the same memory, which may be written
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError("a lazy conjugate or negative cannot be averaged in place: call resolve_conj() first")
    if tensor.requires_grad:
        raise TensorError("a tensor that autograd computed cannot be averaged in place: pass tensor.detach()")
    owner = tensor.detach()
    owner.grad = tensor.detach()
    return owner


def _told_of(transport: Transport, group: dist.ProcessGroup | None) -> Transport:
    """A transport of the user's, once the ranks of the group know of it: those that name one get an error then."""
    group = group or dist.group.WORLD
    if transport not in _agreed and group is not None and dist.get_world_size(group) == transport.world_size:
        make_transport(group, asked=transport)
        _agreed.add(transport)
    return transport


def transport_of(
    group: dist.ProcessGroup | None, call: str, device: str = "cpu", asked: str | None = None
) -> Transport:
    """The transport that calls over `group` share for a type of device; `call` asks, and is named in errors.

    Raises:
        NotInitializedError: if there is no group.
        SettingError: if this rank is not in it.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise no_group(call)
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise SettingError(f"{call} on rank {dist.get_rank()}: this rank is not in the group")
        raise TypeError(f"{call}: group={brief(group)}; allowed: a ProcessGroup, as new_group makes, or None")
    made = _transports.setdefault(group, {})
    if (device, asked) not in made:
        _drop_destroyed()
        made[device, asked] = make_transport(group, device, asked)
    return made[device, asked]


def _drop_destroyed() -> None:
    """Close what belongs to groups that were destroyed, which it keeps alive, with connections and buffers."""
    for group in [each for each in _transports if each not in _world.pg_map]:
        for transport in _transports.pop(group).values():
            vars(transport).pop(_Kept.ATTRIBUTE, None)
            with suppress(TransportError):
                transport.close()
