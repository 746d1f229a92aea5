"""FSDP2 of torch as far as it is private: no other module of ours touches a name that torch may change.

A name that it touches stands in `torch_names.py` too, which looks for it in the installed torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..compression import Compression
from ..errors import ReducerError, SettingError, listed
from ..transports import Transport
from .torch_names import PLACE  # they are there

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # what torch.compile and activation checkpointing add to names
NO_BACKWARD = -1
_meshes: Any = importlib.import_module(f"{PLACE}._fsdp_common")
_collectives: Any = importlib.import_module(f"{PLACE}._fsdp_collectives")
_states: Any = importlib.import_module(f"{PLACE}._fsdp_state")


class Member:
    """One parameter of a group.

    Attributes:
        name: as in the model's `named_parameters`, without what torch.compile and checkpointing add.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self._inner = name, inner

    @property
    def parameter(self) -> Any:
        """The sharded parameter, a DTensor, as it is in the module and in the optimizer."""
        return self._inner.sharded_param

    @property
    def local(self) -> Tensor:
        """This rank's part of it."""
        local: Tensor = self.parameter.detach().to_local()
        return local

    @property
    def piece(self) -> int:
        """Elements of each rank's part of its gradient, with padding."""
        return int(self._inner.padded_sharded_param_size.numel())

    @property
    def gather_dtype(self) -> torch.dtype:
        """What it is gathered in, as its mixed precision says and it is now."""
        dtype: torch.dtype = self.parameter.dtype
        return self._inner.mp_policy.param_dtype or dtype if dtype.is_floating_point else dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What its gradient is reduced in, as its mixed precision says and it is now."""
        computed = self.gather_dtype
        if hasattr(self._inner, "sharded_grad_dtype"):  # since torch 2.15 it is not that of what is computed
            computed = self.parameter.grad_dtype or self.parameter.dtype
        return self._inner.mp_policy.reduce_dtype or computed

    @property
    def steps_in_backward(self) -> bool:
        """Whether a hook may apply its average as soon as that is stored."""
        return bool(getattr(self.parameter, "_post_accumulate_grad_hooks", None))

    def will_be_reduced(self, with_zeros: bool) -> bool:
        """Whether it has a gradient that FSDP has not reduced."""
        if not hasattr(self._inner, "_unsharded_param"):
            return False
        unsharded = self._inner._unsharded_param
        has_grad = self._inner.unsharded_accumulated_grad is not None or unsharded.grad is not None
        return has_grad or (with_zeros and unsharded.requires_grad)

    def wait_until_stored(self) -> None:
        """Let the host wait for a gradient that is on its way to it."""
        if self._inner.grad_offload_event is not None:
            self._inner.grad_offload_event.synchronize()


class Group:
    """The parameters whose gradients FSDP reduces as one message: mostly those of one `fully_shard`.

    Attributes:
        name: of its module; "" for the root.
        members: its parameters, in FSDP's order.
        present: positions of those that are in the message under way, as they follow each other there.
        replicas: among how many our all-reduce averages its shards.
    """

    def __init__(self, name: str, members: list[Member], inner: Any) -> None:
        self.name, self.members, self._inner = name, members, inner
        self.present: list[int] = []
        self.replicas = 1
        self._watched = False
        self._when_stored: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"module {self.name!r}" if self.name else "the root module"

    @property
    def listed(self) -> str:
        """Names of its parameters, of many the first ones."""
        return listed([member.name for member in self.members])

    def by_setting(self, settings: Mapping[str, Compression], positions: Iterable[int]) -> dict[Compression, list[int]]:
        """Positions of members by their setting, which `settings` has by name."""
        found: dict[Compression, list[int]] = {}
        for i in positions:
            found.setdefault(settings[self.members[i].name], []).append(i)
        return found

    @property
    def trained(self) -> list[int]:
        """Positions of the members that require gradients now."""
        return [i for i, member in enumerate(self.members) if member.parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._inner.device
        return device

    @property
    def ranks(self) -> dist.ProcessGroup:
        """Among which parameters are sharded."""
        ranks: dist.ProcessGroup = self._inner._reduce_scatter_process_group
        return ranks

    @property
    def order(self) -> list[int]:
        """Positions of the members, as they follow each other in a message."""
        found: list[int] | None = getattr(self._inner, "_reduce_scatter_param_indices", None)  # since torch 2.15
        return found or list(range(len(self.members)))

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are reduced in, as its mixed precision says and parameters are now."""
        trained = self.trained or [i for i, each in enumerate(self.members) if each.reduce_dtype.is_floating_point]
        dtypes = {self.members[i].reduce_dtype for i in trained}
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    @property
    def gather_dtype(self) -> torch.dtype:
        """What parameters are gathered in, where it is one dtype."""
        return self.members[0].gather_dtype

    @property
    def divides_by(self) -> float | None:
        """What `set_gradient_divide_factor` was told."""
        factor: float | None = self._inner.gradient_divide_factor
        return factor

    def scales(self) -> tuple[float, float]:
        """What turns into `.grad` the sum of what ranks scatter, and the mean of shards over replicas, as factors."""
        inner = self._inner
        _, post, by, _ = _collectives._get_gradient_divide_factors(
            self.ranks,
            None,
            self.reduce_dtype,
            self.device.type,
            self.divides_by,
            inner.force_sum_reduction_for_comms,
        )
        behind = (1 if self.divides_by is None else self.replicas) / (post or 1.0)
        return scale_of(by, self.ranks.size()) * behind, behind

    @property
    def reduces(self) -> bool:
        """What `set_requires_gradient_sync` was told."""
        return bool(self._inner.reduce_grads)

    @property
    def reduce_scatter(self) -> Any:
        """What FSDP calls for a reduce-scatter."""
        return self._inner._reduce_scatter_comm

    @property
    def is_replaced(self) -> bool:
        """Whether somebody has replaced torch's reduce-scatter."""
        return type(self.reduce_scatter) is not _collectives.DefaultReduceScatter

    @property
    def reduces_over_replicas(self) -> bool:
        """What `set_requires_all_reduce` was told."""
        return bool(self._inner.all_reduce_grads)

    def refuse_replicated(self) -> None:
        """Refuse a group that FSDP also replicates.

        Raises:
            SettingError: saying what to write instead.
        """
        mesh = self._inner.mesh_info
        if not isinstance(mesh, _meshes.FSDPMeshInfo):
            raise SettingError(
                f"fastreduce.fsdp: {self} is replicated, not sharded: torch averages its gradients by an all-reduce "
                "that cannot be replaced, and never calls a reduce-scatter. Instead of replicate(model), wrap it: "
                "fastreduce.DistributedDataParallel(model, compression=…)"
            )
        if isinstance(mesh, _meshes.HSDPMeshInfo):
            names = mesh.mesh.mesh_dim_names or ("replicate", "shard")
            raise SettingError(
                f"fastreduce.fsdp: {self} is sharded and replicated over the 2-D mesh {tuple(names)}: torch then "
                "averages over replicas by an all-reduce that cannot be replaced. Shard over one dimension of the "
                f"mesh, fully_shard(module, mesh=mesh[{names[-1]!r}]), and let fastreduce average over the other: "
                f"fastreduce.fsdp.replicate(model, mesh[{names[0]!r}], 'int8:error_feedback')"
            )

    def reduce_with(self, reduce_scatter: Any) -> None:
        """Let `reduce_scatter` be called in place of torch's; `present` tells of what."""
        self._inner._reduce_scatter_comm = reduce_scatter
        self._watch()

    def gathered_otherwise(self) -> SettingError | None:
        """An error, if parameters are gathered in more ways than one."""
        before, after = self._inner.mesh_info, self._inner.post_forward_mesh_info
        if after is not None and after != before:
            return SettingError(
                f"fastreduce.fsdp.compress(all_gather=…): {self} is gathered by fewer ranks in backward, as "
                "reshard_after_forward says; allowed with all_gather are True and False"
            )
        dtypes = sorted({str(member.gather_dtype) for member in self.members})
        if len(dtypes) > 1:
            return SettingError(
                f"fastreduce.fsdp.compress(all_gather=…): {self} has parameters of {' and '.join(dtypes)}, which FSDP "
                "gathers as bytes: give those of one dtype a fully_shard of their own, or all one param_dtype "
                "(MixedPrecisionPolicy)"
            )
        if any(hasattr(member.local, "fsdp_pre_all_gather") for member in self.members):
            return SettingError(
                f"fastreduce.fsdp.compress(all_gather=…): parameters of {self} say themselves how they are gathered "
                "(fsdp_pre_all_gather)"
            )
        return None

    def gather_with(self, all_gather: Any) -> None:
        """Let `all_gather` be called in place of torch's."""
        self._inner._all_gather_comm = all_gather

    def hooked(self) -> SettingError | None:
        """An error, if `set_all_reduce_hook` was called for it."""
        if self._inner._all_reduce_hook is None:
            return None
        return SettingError(f"fastreduce.fsdp.replicate: {self} has an all-reduce hook already (set_all_reduce_hook)")

    def sharded_over(self, replicas: dist.ProcessGroup) -> SettingError | None:
        """An error, if it is sharded among ranks that are to be its replicas."""
        shards, over = (dist.get_process_group_ranks(each) for each in (self.ranks, replicas))
        if len(both := sorted({*shards}.intersection(over))) < 2:
            return None
        return SettingError(
            f"fastreduce.fsdp.replicate: {self} is sharded among ranks {shards}, of which {both} are in over, too, and "
            "hold other parts of its parameters; allowed: ranks that hold the same parts, the other dimension of its "
            "mesh, such as mesh['replicate']"
        )

    def average_with(self, hook: Callable[[Tensor], None], forget: Callable[[], None]) -> None:
        """Let `hook` be called with the shard that a reduce-scatter has made; `present` tells of what.

        `forget` is called where `reset_iter_state` lets FSDP forget what it has not stored.
        """
        self._inner._all_reduce_hook = hook
        self._watch()
        reset = getattr(self._inner, "_reset_iter_state", None)  # newer than what else we touch
        if reset is not None:

            def reset_and_forget() -> None:
                reset()
                forget()

            self._inner._reset_iter_state = reset_and_forget

    def when_gathered_first(self, call: Callable[[], None]) -> None:
        """Call once, right before the parameters of its root are gathered for the first time; every rank does."""
        begin = self._inner.lazy_init

        def call_and_begin() -> None:
            self._inner.lazy_init = begin
            call()
            begin()

        self._inner.lazy_init = call_and_begin

    def _watch(self) -> None:
        """Note what is in a message before FSDP puts it together, and tells of it no more than its size."""
        if self._watched:
            return
        self._watched, post_backward = True, self._inner.post_backward

        @torch._disable_dynamo
        def noted(*unused: Any) -> None:
            with_zeros = getattr(self._inner, "reduce_scatter_unused_params", False)
            self.present = [i for i in self.order if self.members[i].will_be_reduced(with_zeros)]
            try:
                post_backward(*unused)
            finally:
                calls, self._when_stored = self._when_stored, []
            for call in calls:
                call()

        self._inner.post_backward = noted

    def call_after_backward(self, call: Callable[[], None]) -> None:
        """Call when the backward under way has ended, behind FSDP's own callback.

        Outside of any, as the stages of a pipeline reduce: when the gradients of the message under way are stored.
        """
        if backward_under_way() == NO_BACKWARD:
            self._when_stored.append(call)
        else:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(call)

    def wait_until_stored(self) -> None:
        """Let the current stream, or where gradients are offloaded the host, wait for the last reduced gradients."""
        event = self._inner._post_reduce_event
        if event is not None and self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).wait_event(event)
        for member in self.members:
            member.wait_until_stored()


def groups_of(model: nn.Module) -> list[Group]:
    """The groups of a model, in the order of its modules.

    Raises:
        SettingError: if nothing in it is sharded, or something by what cannot be replaced.
    """
    names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
    groups: list[Group] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        for inner in _inner(module):
            if id(inner) not in seen:  # several modules may have one in common
                seen.add(id(inner))
                members = [Member(names.get(id(each.sharded_param), ""), each) for each in inner.fsdp_params]
                groups.append(Group(_plain(name), members, inner))
    if not groups:
        raise SettingError(
            f"fastreduce.fsdp: no module of this {type(model).__name__} is sharded: call "
            "torch.distributed.fsdp.fully_shard on its modules and on itself first"
        )
    for group in groups:
        group.refuse_replicated()
        unnamed = [member for member in group.members if not member.name]
        if unnamed:
            raise SettingError(
                f"fastreduce.fsdp: {group} holds parameters that are unsharded now: call this between two steps, or "
                "reshard() the module first"
            )
    return groups


def sharded_beside(model: nn.Module, groups: Iterable[Group]) -> str | None:
    """The name of a module in a model that is sharded, and not by these groups; None where there is none."""
    known = {id(group._inner) for group in groups}
    for name, module in model.named_modules():
        if any(id(inner) not in known for inner in _inner(module)):
            return _plain(name)
    return None


def _inner(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 there is one, or None
        yield from several if several is not None else filter(None, [state._fsdp_param_group])


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def scale_of(op: Any, ranks: int) -> float:
    """What a sum is to be multiplied by, as a reduce operation of torch says.

    Raises:
        SettingError: if it is neither a mean nor a sum.
    """
    state = op.__getstate__()  # a kind, or with PREMUL_SUM a kind and a factor
    kind, factor = state if isinstance(state, tuple) else (op, None)
    if factor is not None:
        return float(factor)
    if kind == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if kind == dist.ReduceOp.SUM:
        return 1.0
    raise SettingError(f"fastreduce.fsdp: a reduce-scatter by {op}; allowed: AVG, SUM and PREMUL_SUM")


def used_elsewhere(name: str, transport: Transport, whom: str) -> ReducerError:
    """What to raise, where another rank, or replica, has a gradient of a parameter, and this one has none."""
    return ReducerError(
        f"fastreduce.fsdp: parameter {name!r} has a gradient on another {whom}, and none on rank {transport.rank} of "
        f"{transport.world_size}, where FSDP stores none either: {whom}s would train different parameters from here "
        "on. Call set_reduce_scatter_unused_params(True) on the model"
    )


def when_training_begins(call: Callable[[nn.Module], None]) -> None:
    """Call with the root of every sharded model, right before its parameters are gathered for the first time.

    Every rank does, since every rank gathers. Who is the root is known no sooner.
    """
    state: Any = _states.FSDPState
    begin = state._lazy_init

    @functools.wraps(begin)
    def begin_and_call(self: Any) -> None:
        begun = self._is_root is not None
        begin(self)
        if not begun:
            call(self._modules[0])

    state._lazy_init = begin_and_call


def backward_under_way() -> int:
    """A number of the backward that this thread is in; NO_BACKWARD for none."""
    number: int = torch._C._current_graph_task_id()
    return number
