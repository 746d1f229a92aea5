"""What fastreduce does for one sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compression import KINDS, Compression, NoCompression, OfWholeParameters
from ..environment.exits import Exit, each_at_exit
from ..errors import MismatchError, SettingError, brief
from ..ops import FLOATS
from ..policy import AnySetting, Policy, assigned
from ..reduction.agreement import check_agreement, describe_tensor
from ..reduction.pipeline import warm_up as warm_up_pipelines
from ..reduction.shared_buffers import SharedBuffers
from ..transports import Transport, make_transport
from . import wires
from .all_gather import CompressedAllGather
from .followed import Follower
from .kept import Kept
from .reduce_scatter import CompressedReduceScatter
from .replicas import ReplicaAverage
from .torch_fsdp import Group, groups_of, sharded_beside


class ShardedModel:
    """The reductions of a model that `fully_shard` has sharded; what `torch.distributed.checkpoint` calls Stateful.

    Args:
        model: the model.

    Attributes:
        compression: what `compress` was given, a setting or a policy; None before.

    Raises:
        SettingError: if nothing in it is sharded, or something by what cannot be replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = groups_of(model)
        self._model = weakref.ref(model)
        self._members = [member for group in self._groups for member in group.members]
        self._scatters: list[CompressedReduceScatter] = []
        self._averages: list[ReplicaAverage] = []
        self._transports: list[Transport] = []
        self._replicas: Transport | None = None
        self.compression: Compression | Policy | None = None
        self._follower = Follower()
        self._groups[0].when_gathered_first(self._look_for_others)
        self._close = weakref.finalize(self, _close, self._transports)
        self._close.atexit = False
        _alive.add(self)

    def _look_for_others(self) -> None:
        """Whether what is trained was all there when we were called."""
        model = self._model() if self._reductions else None
        if model is not None and (name := sharded_beside(model, self._groups)) is not None:
            which = f"module {name!r}" if name else "the root module"
            raise SettingError(
                f"fastreduce.fsdp: {which} was sharded after compress or replicate was called for the model, which "
                "would leave its gradients to torch: call them behind the last fully_shard"
            )

    @property
    def _reductions(self) -> list[CompressedReduceScatter | ReplicaAverage]:
        return [*self._scatters, *self._averages]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one backward for its gradients, by the reductions that were replaced."""
        return sum(reduction.sent_bytes for reduction in self._reductions)

    @property
    def transport_name(self) -> str:
        """What moves gradients, as in `transport=`; of several transports the first one's."""
        return self._transports[0].name

    def close(self) -> None:
        """End the connections; the model trains no more."""
        self._close()

    def compress(
        self, compression: AnySetting | Policy, all_gather: AnySetting | Policy, transport: str | None
    ) -> None:
        """Replace the reduce-scatter of every group, and where asked the all-gather (`fastreduce.fsdp.compress`)."""
        if self._scatters:
            raise SettingError("fastreduce.fsdp.compress: called already for this model; call it once")
        for group in self._groups:
            if isinstance(group.reduce_scatter, CompressedReduceScatter):
                raise SettingError(
                    f"fastreduce.fsdp.compress: called already for {group}, with another part of the model; call it "
                    "once for each module, as with the whole model and a policy of parameters' names"
                )
        settings, error = self._settings(compression, "compress", _why_not_scattered)
        gathered: dict[str, Compression] = {}
        if all_gather is not None:
            gathered, wrong = self._settings(all_gather, "compress(all_gather=…)", _why_not_gathered)
            for group in self._groups:
                wrong = wrong or group.gathered_otherwise()
            error = error or wrong
        by_ranks: dict[tuple[int, ...], list[Group]] = {}
        for group in self._groups:
            by_ranks.setdefault(tuple(dist.get_process_group_ranks(group.ranks)), []).append(group)
        scatters, gathers = dict[Group, CompressedReduceScatter](), dict[Group, CompressedAllGather]()
        with self._all_or_nothing():
            for groups in by_ranks.values():
                made = self._connect(groups[0].ranks, groups, transport, settings, error, gathered)
                for group, dtype, setting in self._kinds(groups, settings):
                    wires.warm_up(dtype, group.device, setting, made.world_size)
                buffers = SharedBuffers()
                for group in groups:
                    scatters[group] = CompressedReduceScatter(group, settings, made, buffers, self._follower)
                floating = [group for group in groups if group.gather_dtype.is_floating_point]  # torch has the others
                if gathered and floating:  # over connections of its own: on a GPU both are under way at once
                    gathers |= self._gathers(
                        floating, gathered, self._connect(groups[0].ranks, groups, transport, gathered)
                    )
        for group, scatter in scatters.items():  # all that may fail has been done
            group.reduce_with(scatter)
            scatter.owner = self
        for group, gather in gathers.items():
            group.gather_with(gather)
        self._scatters += scatters.values()
        self.compression = Policy.of(compression)

    def _gathers(
        self, groups: Sequence[Group], settings: Mapping[str, Compression], made: Transport
    ) -> dict[Group, CompressedAllGather]:
        for device, dtype, setting in dict.fromkeys(
            (group.device, group.gather_dtype, settings[member.name]) for group in groups for member in group.members
        ):
            wires.warm_up_gather(dtype, device, setting, made.world_size)
        return {group: CompressedAllGather(group, settings, made) for group in groups}

    def replicate(self, ranks: dist.ProcessGroup, compression: AnySetting | Policy, transport: str | None) -> None:
        """Average every group's shard over `ranks` (`fastreduce.fsdp.replicate`)."""
        if self._averages:
            raise SettingError("fastreduce.fsdp.replicate: called already for this model; call it once")
        settings, error = self._settings(compression, "replicate", _why_not_averaged)
        for group in self._groups:
            error = error or group.hooked() or group.sharded_over(ranks)
        with self._all_or_nothing():
            made = self._connect(ranks, self._groups, transport, settings, error)
            for group, dtype, setting in self._kinds(self._groups, settings):
                warm_up_pipelines(dtype, group.device, setting, made)
            averages = [ReplicaAverage(group, settings, made, self._follower) for group in self._groups]
        for group, average in zip(self._groups, averages, strict=True):
            group.replicas = made.world_size
            group.average_with(average, average.forget)
            average.owner = self
        self._replicas = made
        self._averages += averages

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Around what may fail half-way: its connections and residuals end with it, and it may be called again."""
        before, followed = len(self._transports), self._follower.all
        try:
            yield
        except BaseException:
            self._follower.remove([each for each in self._follower.all if each not in followed])
            while len(self._transports) > before:
                self._transports.pop().close()
            raise

    def _settings(
        self, compression: AnySetting | Policy, call: str, why_not: Callable[[Compression], str]
    ) -> tuple[dict[str, Compression], SettingError | None]:
        """The setting of each parameter; an error is for all ranks to know."""
        try:
            setting = Policy.of(compression)
            if isinstance(setting, Compression) and setting.warm_up:
                raise SettingError(
                    f"fastreduce.fsdp.{call}: {str(setting)!r}: it counts no steps, so it takes no warm_up"
                )
            names = [member.name for member in self._members]
            chosen = assigned(setting, names, [member.parameter for member in self._members])
            settings = dict(zip(names, chosen, strict=True))
            for member in self._members:
                if member.parameter.requires_grad and member.parameter.is_complex():
                    raise SettingError(
                        f"fastreduce.fsdp.{call}: parameter {member.name!r} is {member.parameter.dtype}, and what "
                        f"is sharded is reduced in {', '.join(map(str, FLOATS))}: let its real and imaginary parts be "
                        "parameters of their own"
                    )
            for each in dict.fromkeys(settings.values()):
                if why := why_not(each):
                    raise SettingError(f"fastreduce.fsdp.{call}: {str(each)!r}{why}")
        except SettingError as error:
            return {}, error
        return settings, None

    def _connect(
        self,
        ranks: dist.ProcessGroup,
        groups: Sequence[Group],
        asked: str | None,
        settings: Mapping[str, Compression],
        error: Exception | None = None,
        gathered: Mapping[str, Compression] = MappingProxyType({}),
    ) -> Transport:
        """A transport, on which all ranks have agreed."""
        made = make_transport(ranks, groups[0].device, asked)
        members = [member for group in groups for member in group.members]
        told = {}
        for member in members:
            also = f", gathered under {gathered[member.name]}" if member.name in gathered else ""
            named = f"{settings.get(member.name)}{also}"
            told[f"the parameter {member.name!r}"] = f"{named}, {_describe(member.parameter)}"
        try:
            check_agreement(made, told, error)
        except BaseException:
            made.close()
            raise
        self._transports.append(made)
        return made

    def _kinds(
        self, groups: Iterable[Group], settings: Mapping[str, Compression]
    ) -> list[tuple[Group, torch.dtype, Compression]]:
        """What kernels will meet: a group of each kind."""
        found = {
            (group.device, group.reduce_dtype, settings[member.name]): group
            for group in groups
            for member in group.members
        }
        return [(group, dtype, setting) for (_, dtype, setting), group in found.items()]

    # What error feedback keeps

    def _kept(self) -> list[Kept]:
        return [kept for reduction in self._reductions for kept in reduction.kept()]

    def state_dict(self) -> dict[str, Any]:
        """What error feedback keeps; every rank calls it, as `torch.distributed.checkpoint` does.

        DTensors by parameter name, sharded as the parameters are: the mean of what ranks keep, which is what counts. It
        is loaded on any number of ranks. Where every average has been applied or thrown away, as between two steps,
        all ranks go on with that mean, so that a training which loads it has the bits of this one.
        """
        kept, state = self._kept(), dict[str, Any]()
        self._follower.look(others_follow=False)
        settled = all(each.is_settled for each in kept)
        for transport in self._transports if kept else ():  # one dimension of the mesh after the other: of all ranks
            settled = all(told is True for told in transport.exchange(settled))
        for each in kept:
            state.setdefault(each.kind, {}).update(each.save(settled, self._replicas))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, and `torch.distributed.checkpoint` has loaded; every rank calls it.

        Raises:
            SettingError: if the state has residuals of other parameters, or some that do not lie as theirs do, or is
                no such state.
            MismatchError: where another rank's is.
        """
        kept = self._kept()
        error = self._why_not_loaded(kept, state)
        why = str(error or "")
        for transport in self._transports if kept else ():  # one dimension of the mesh after the other: of all ranks
            told = transport.exchange(why)
            why = why or next((str(each) for each in told if each), "")
        if why:
            raise error or MismatchError(f"fastreduce.fsdp: another rank cannot load its state: {why}")
        for each in kept:
            each.load(state[each.kind])

    def _why_not_loaded(self, kept: Sequence[Kept], state: Mapping[str, Any]) -> SettingError | None:
        """An error, if a state is not of what is kept."""
        if not isinstance(state, Mapping) or not all(isinstance(of_kind, Mapping) for of_kind in state.values()):
            return SettingError(
                f"fastreduce.fsdp: load_state_dict({brief(state)}); allowed: what state_dict() has given"
            )
        ours = {(each.kind, member.name): member for each in kept for member in each.members}
        theirs = {(kind, name) for kind in state for name in state[kind]}
        for kind, name in sorted(ours.keys() ^ theirs, key=str):  # names may be anything
            where = "this model" if (kind, name) in ours else "the state"
            return SettingError(f"fastreduce.fsdp: only {where} has residuals of parameter {name!r} under {kind!r}")
        for (kind, name), member in ours.items():
            lies = _lies(state[kind][name])
            if lies != _lies(member.parameter):
                return SettingError(
                    f"fastreduce.fsdp: the state's residual of parameter {name!r} under {kind!r} is {lies}; allowed: "
                    f"{_lies(member.parameter)}, as state_dict() gives, and torch.distributed.checkpoint loads into it"
                )
        return None


_ALLOWED = ", ".join(name for name, kind in KINDS.items() if not issubclass(kind, OfWholeParameters))


def _why_not_averaged(setting: Compression) -> str:
    """Why an all-reduce between replicas cannot have a setting; ""."""
    if setting.random_seed is not None:
        return ": it counts no steps, so it takes no rounding=stochastic"
    if isinstance(setting, OfWholeParameters):
        return f": it is made of whole gradients, and a shard is a part of one; allowed: {_ALLOWED}"
    return ""


def _why_not_scattered(setting: Compression) -> str:
    """Why a reduce-scatter cannot have a setting; ""."""
    why = _why_not_averaged(setting)
    if not why and not setting.two_shot and not isinstance(setting, NoCompression):
        return (
            " is summed by the transport's all-reduce, and sharded gradients are reduced by an all-to-all and our "
            f"kernel: write {setting.name!r}"
        )
    return why


def _why_not_gathered(setting: Compression) -> str:
    """Why an all-gather of parameters cannot have a setting; ""."""
    if why := _why_not_averaged(setting):
        return why
    if setting.error_feedback:
        return ": parameters are gathered from what they are each time, so it takes no error_feedback"
    if not setting.two_shot and not isinstance(setting, NoCompression):
        return f" says how gradients are summed, and nothing is summed in an all-gather: write {setting.name!r}"
    return ""


def _describe(parameter: Tensor) -> str:
    return f"{describe_tensor(parameter)}, {tuple(map(str, parameter.placements))}"  # type: ignore[attr-defined]


def _lies(tensor: Any) -> str:
    if not isinstance(tensor, DTensor):
        return f"a {type(tensor).__name__}"
    return f"a DTensor of shape {tuple(tensor.shape)}, {tuple(map(str, tensor.placements))}"


def _close(transports: list[Transport]) -> None:
    for transport in reversed(transports):
        transport.close()


_alive: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
each_at_exit(Exit.REDUCERS, ShardedModel.close, _alive)
