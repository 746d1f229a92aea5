"""What NCCL ranks do in tests: on CPU tensors over the stand-in, and on real GPUs (test_nccl.py, test_nccl_gpu.py)."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from fastreduce import TransportError, all_reduce_gradients
from fastreduce.transports import GlooTransport, NcclTransport, nccl
from tests.support import nccl_stand_in
from tests.support.models import Grads, assert_same_bits, batch, grads_of, mlp, wrap


@dataclass
class OnHost:
    """CPU tensors over the stand-in, which works below `directory`."""

    directory: str
    timeout: float = 5.0  # seconds, where ranks do not come; what comes has to be done by then, too
    starts: float = 0.0  # or as often as long as a further communicator takes to start
    device = torch.device("cpu")

    def installed(self) -> Any:
        return nccl_stand_in.installed(self.directory)

    @contextlib.contextmanager
    def asynchronous(self) -> Iterator[Callable[[], None]]:
        """A stream that works beside the main thread; yields what waits for it."""
        with nccl_stand_in.Stream().as_current() as stream:
            yield stream.synchronize


class OnGpu:
    """CUDA tensors on the first GPU."""

    device = torch.device("cuda", 0)
    timeout, starts = 8.0, 4.0  # a further communicator starts meanwhile, with several ranks on one GPU

    def installed(self) -> Any:
        return torch.cuda.device(self.device)

    @contextlib.contextmanager
    def asynchronous(self) -> Iterator[Callable[[], None]]:
        stream = torch.cuda.Stream(self.device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield torch.cuda.synchronize


Place = OnHost | OnGpu


def run_case(rank: int, world_size: int, case: Callable[..., Any], place: Place, *args: Any) -> Any:
    """What `ranks2.run` and the like call."""
    with place.installed():
        return case(rank, world_size, place, *args)


def world() -> Any:
    return dist.group.WORLD


def short_group(place: Place) -> Any:
    """A group with a short timeout, in which the first start of CUDA and NCCL does not count: it takes a while.

    The start of its own communicator does count, and how long that takes is seen first, with another one.
    """
    size, seconds = dist.get_world_size(), place.timeout
    works_again(world(), size, place)
    if place.starts:
        start = time.monotonic()
        works_again(dist.new_group(), size, place)
        longest = torch.tensor(time.monotonic() - start)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds = max(seconds, place.starts * longest.item())
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds))


def caught(call: Callable[[], object]) -> str:
    """What a TransportError says."""
    try:
        call()
    except TransportError as error:
        return str(error)
    return "nothing"


# Collectives


def _whole(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 12, whose sums fit into 8 bits."""
    generator = torch.Generator().manual_seed(rank)
    low = 0 if dtype == torch.uint8 else -2
    return (12 * torch.randint(low, 3, (numel,), generator=generator)).to(dtype)


def every_collective(rank: int, size: int, place: Place) -> None:
    """Every operation and dtype, several sizes; reductions bit for bit beside torch's own over gloo."""
    transport, device = NcclTransport(world()), place.device
    assert (transport.name, transport.rank, transport.world_size) == ("nccl", rank, size)
    for dtype in nccl.DTYPES:
        for numel in (0, 7, 1000):
            mine, whole = _whole(rank, numel, dtype), _whole(rank, numel * size, dtype)
            everybody = [_whole(r, numel * size, dtype).view(size, -1) for r in range(size)]
            where = f"{numel} of {dtype}"

            summed = mine.clone()
            dist.all_reduce(summed)
            found = mine.to(device, copy=True)
            transport.all_reduce(found).wait()
            assert_same_bits(found.cpu(), summed, f"all_reduce, {where}")

            wire = whole.to(device, copy=True)
            received = torch.full_like(wire, 77).view(size, -1)
            transport.all_to_all(received, wire).wait()
            assert_same_bits(received.cpu(), torch.stack([e[rank] for e in everybody]), f"all_to_all, {where}")
            assert_same_bits(wire.cpu(), whole, "all_to_all only reads the wire")
            transport.all_gather(wire).wait()
            gathered = torch.stack([everybody[r][r] for r in range(size)]).flatten()
            assert_same_bits(wire.cpu(), gathered, f"all_gather, {where}")

    values = transport.exchange({"rank": rank, "text": "x" * (10 * rank), "nothing": None})
    assert values == [{"rank": r, "text": "x" * (10 * r), "nothing": None} for r in range(size)]
    transport.close()


def random_floats_sum_as_over_gloo(rank: int, size: int, place: Place) -> None:
    """Two ranks: a sum of two is the same in any order."""
    transport = NcclTransport(world())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mine = batch(rank, 0, 70_001, dtype=dtype)
        expected, found = mine.clone(), mine.to(place.device, copy=True)
        dist.all_reduce(expected)
        transport.all_reduce(found).wait()
        assert_same_bits(found.cpu(), expected, str(dtype))
    transport.close()


def other_settings_reduce_as_over_gloo(rank: int, size: int, place: Place) -> None:
    """`all_reduce_gradients` beside the CPU and gloo: two-shots have the same bits on every number of ranks."""
    settings = ["none:accumulate=fp32", "fp16", "bf16", "int8", "int8:error_feedback", "int8:block=64"]
    for setting in [*settings, "none"][: len(settings) + (size == 2)]:
        seen = []
        for transport, device in ((NcclTransport(world()), place.device), (GlooTransport(world()), "cpu")):
            tensors = [batch(rank, step, numel) for step, numel in enumerate((1, 129, 5000, 70))]
            moved = [t.to(device, copy=True) for t in tensors]
            for _ in range(3):
                all_reduce_gradients(moved, setting, transport=transport)
            seen.append([t.cpu() for t in moved])
            transport.close()
        assert_same_bits(seen[0], seen[1], setting)


def ddp_trains_alike(rank: int, size: int, place: Place) -> None:
    """Beside torch's class on two ranks, and beside our own over gloo under compression; several buckets."""

    def trained(kind: str, **options: Any) -> list[Grads]:
        torch.manual_seed(0)
        model = wrap(kind, mlp().to(place.device), bucket_cap_mb=0.004, **options)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step, 4, 20).to(place.device)).square().mean().backward()
            seen.append(grads_of(model.module))
            optimizer.step()
        return seen

    if size == 2:
        assert_same_bits(trained("ours", transport=NcclTransport(world())), trained("torch"), "none")
    for setting in ("fp16", "int8") if place.device.type == "cpu" else ():
        ours = trained("ours", transport=NcclTransport(world()), compression=setting)
        assert_same_bits(ours, trained("ours", transport=GlooTransport(world()), compression=setting), setting)


def communicators_are_taken_again(rank: int, size: int, place: Place) -> None:
    """By the second wrapper over a group; another group has its own."""
    made = []
    groups = [world(), dist.new_group()]
    for group in [*groups, *groups]:
        transport = NcclTransport(group)
        wire = torch.ones(5, device=place.device)
        transport.all_reduce(wire).wait()
        assert wire.tolist() == [size] * 5
        made.append(transport._communicators[wire.device])
        transport.close()
        text = caught(lambda: transport.all_reduce(wire))  # noqa: B023
        assert "this NCCL transport is closed" in text
    assert made[0] is made[2] and made[1] is made[3] and made[0] is not made[1]
    held = [NcclTransport(groups[1]) for _ in range(2)]
    wires = [torch.full((4,), i + 1.0, device=place.device) for i in range(2)]
    for transport, wire in zip(held, wires, strict=True):
        transport.all_reduce(wire).wait()
    assert [wire[0].item() for wire in wires] == [size, 2 * size]
    assert len({id(t._communicators[wires[0].device]) for t in held}) == 2
    for transport in held:
        transport.close()


def groups_of_some_ranks(rank: int, size: int, place: Place) -> None:
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        transport = NcclTransport(group)
        wire = torch.full((3,), rank + 1.0, device=place.device)
        transport.all_reduce(wire).wait()
        assert wire.tolist() == [1.0 + size] * 3
        transport.close()
    dist.barrier()


# Failing. The last rank is the one that does not come.


def absent_from_connecting(rank: int, size: int, place: Place) -> str:
    group, text = short_group(place), "nothing"
    if rank != size - 1:
        text = caught(lambda: NcclTransport(group).all_reduce(torch.ones(4, device=place.device)))
    dist.barrier()
    works_again(group, size, place)
    return text


def absent_on_a_stream(rank: int, size: int, place: Place) -> tuple[str, float]:
    """The main thread waits for the stream: the error is raised there. Then a new transport serves."""
    group = short_group(place)
    transport, wire = NcclTransport(group), torch.ones(4 * size, device=place.device)
    text = later = "nothing"
    start = time.monotonic()
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        synchronize()
        if rank != size - 1:
            start = time.monotonic()
            transport.tell_watchdog("Bucket 3 holds a, b.")
            transport.all_gather(wire).wait()
            text = caught(lambda: (synchronize(), come_by()))
            later = caught(lambda: transport.all_reduce(wire))
    took = time.monotonic() - start
    dist.barrier()
    transport.close()
    works_again(group, size, place)
    assert text == later
    return text, took


def come_by() -> bool:
    """What is raised from outside comes between two steps of Python."""
    for _ in range(10):
        time.sleep(0)
    return True


def works_again(group: Any, size: int, place: Place) -> None:
    transport, wire = NcclTransport(group), torch.ones(3, device=place.device)
    transport.all_reduce(wire).wait()
    assert wire.tolist() == [size] * 3
    transport.close()


def left_early(rank: int, size: int, place: Place, end: str) -> str:
    """The last rank closes or aborts its transport, the others begin one collective more."""
    transport, wire = NcclTransport(world()), torch.ones(4 * size, device=place.device)
    text = "nothing"
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        synchronize()
        if rank == size - 1:
            getattr(transport, end)()
        else:
            transport.all_gather(wire).wait()
            text = caught(lambda: (synchronize(), come_by()))
            transport.close()
        dist.barrier()
    works_again(world(), size, place)
    return text


def exits(rank: int, size: int, place: Place) -> None:
    """The last rank ends without a word; the others fail the run with what they are told."""
    group = short_group(place)
    transport, wire = NcclTransport(group), torch.ones(4, device=place.device)
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        synchronize()
        if rank == size - 1:
            os._exit(0)
        transport.all_reduce(wire).wait()
        text = caught(lambda: (synchronize(), come_by()))
    raise AssertionError(f"told: {text}")


def ends_cleanly(rank: int, size: int, place: Place) -> str:
    """A fresh process, which must exit cleanly after an abort, a new process group, and with a transport in use."""
    text = absent_on_a_stream(rank, size, place)[0] if size > 1 else "nothing"
    store: Any = _get_process_group_store(world())
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    for _ in range(2):  # of the same name in the same store: nothing of the first is left for the second
        works_again(world(), size, place)
        dist.barrier()
        dist.destroy_process_group()
        # torch's gloo itself meets addresses of the first there, now and then; NCCL asks for ranks and store only.
        dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    global in_use
    in_use = NcclTransport(world())
    in_use.all_reduce(torch.ones(3, device=place.device)).wait()
    return text


in_use: NcclTransport


def lets_go_of_what_has_not_ended(rank: int, size: int, place: OnHost, seconds: float) -> None:
    """The script ends behind a group whose communicator takes its time to end, and tells in a file that it has."""
    destroy = nccl_stand_in.NcclCommunicator.destroy

    def slowly(self: nccl_stand_in.NcclCommunicator) -> None:
        time.sleep(seconds)
        Path(place.directory, "ended").touch()
        destroy(self)

    nccl_stand_in.NcclCommunicator.destroy = slowly  # type: ignore[method-assign]
    group = dist.new_group()
    works_again(group, size, place)
    dist.destroy_process_group(group)
    del group
    gc.collect()
