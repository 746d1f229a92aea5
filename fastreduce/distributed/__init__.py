"""Process groups, collectives, point-to-point and launching, in the words of torch, Genesis and MegEngine."""

from ..ddp import DistributedDataParallel
from ..errors import NotInitializedError
from ..reduction.one_call import all_reduce_gradients
from . import functional
from .broadcasting import bcast_list_
from .callbacks import make_allreduce_cb
from .client import get_client, group_barrier, synchronized
from .collectives import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from .launcher import launcher, spawn
from .point_to_point import remote_recv, remote_send
from .process_groups import barrier, destroy_process_group, init_process_group, new_group
from .queries import (
    get_backend,
    get_local_device,
    get_local_rank,
    get_rank,
    get_world_size,
    is_initialized,
    is_main_process,
)
from .works import Work

__all__ = [
    "DistributedDataParallel",
    "NotInitializedError",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_gradients",
    "all_to_all",
    "barrier",
    "bcast_list_",
    "broadcast",
    "destroy_process_group",
    "functional",
    "gather",
    "get_backend",
    "get_client",
    "get_local_device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group_barrier",
    "init_process_group",
    "is_initialized",
    "is_main_process",
    "launcher",
    "make_allreduce_cb",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "remote_recv",
    "remote_send",
    "scatter",
    "send",
    "spawn",
    "synchronized",
]
