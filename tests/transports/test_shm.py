"""Memory that ranks share: sums by bits at any address, the life of segments, and why ranks cannot share any."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import re
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import transports
from fastreduce.transports import ShmTransport, make_transport
from fastreduce.transports.shm import connection, segments
from tests.support import ranks as support
from tests.support.commands import free_port, with_environment
from tests.support.fork_server import PR_SET_PDEATHSIG, server
from tests.support.models import assert_same_bits, batch, wrap
from tests.support.ranks import RankPool, message, run_ranks
from tests.support.threads import threads_of_all
from tests.support.transport_cases import collect, expected

PIECE = segments.GEOMETRY.cell_bytes
CLONE_NEWNS = 0x00020000
RING = PIECE * segments.GEOMETRY.cells
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def world() -> Any:
    return dist.group.WORLD


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)).to(
        dtype
    )


def _summed(rank: int, world_size: int) -> list[Tensor]:
    """Sizes around what is sent whole, a piece and the ring, and an address that is no multiple of an element."""
    transport, found = ShmTransport(world()), []
    for dtype in DTYPES:
        size = dtype.itemsize
        sizes = (connection.ONE_SHOT_BYTES // (world_size - 1) // size, PIECE // size, RING // size)
        for numel in (n + more for n in sizes for more in (-1, 0, 1, 37)):
            values = _values(rank, numel, dtype)
            transport.all_reduce(values).wait()
            found.append(values)
        odd = bytearray(size * 50_001 + 1)
        values = torch.frombuffer(odd, dtype=dtype, offset=1, count=50_001).copy_(_values(rank, 50_001, dtype))
        transport.all_reduce(values).wait()
        found.append(values.clone())
    for kind in (torch.int64, torch.complex64):
        values = (_values(rank, 1000, torch.float32) * 100).to(kind)
        transport.all_reduce(values).wait()
        found.append(values)
    return found


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_sums_have_the_bits_of_torchs_in_rank_order(request: pytest.FixtureRequest, world_size: int):
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    found = pool.run(_summed)
    for other in found[1:]:
        assert_same_bits(other, found[0], "ranks differ")
    for values in found[0]:
        kind = values.dtype
        if kind in DTYPES:
            terms = [_values(r, values.numel(), kind) for r in range(world_size)]
        else:
            terms = [(_values(r, 1000, torch.float32) * 100).to(kind) for r in range(world_size)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        assert_same_bits(values, total, f"{values.numel()} of {kind}")


def _on_two_cores(rank: int, world_size: int) -> list[Any]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    return collect(ShmTransport(world()))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [3, 5, 8])
def test_many_ranks_on_two_cores(world_size: int):
    for rank, (_, _, size, *seen) in enumerate(run_ranks(_on_two_cores, world_size)):
        assert_same_bits(seen, expected(rank, size), f"rank {rank}")


def _in_another_order(rank: int, world_size: int) -> list[Tensor]:
    """Begun in one order on all ranks, as it must be, and waited for in another on each."""
    transport = ShmTransport(world())
    tensors = [torch.full((n,), rank + 1.0) for n in (3, 200_000, 1_000_000, 17)]
    works = [transport.all_reduce(tensor) for tensor in tensors]
    for i in range(4):
        works[(i + rank) % 4].wait()
    return tensors


def test_works_may_be_waited_for_in_any_order(ranks3: RankPool):
    for tensors in ranks3.run(_in_another_order):
        assert all(bool((tensor == 6).all()) for tensor in tensors)


def _other_sizes(rank: int, world_size: int) -> list[str]:
    found = []
    for of_rank in ((5, 6), (500_000, 5), (torch.float32, torch.float16)):
        transport = ShmTransport(world())
        transport.exchange(0)
        told = of_rank[rank]
        tensor = torch.ones(told) if isinstance(told, int) else torch.ones(10, dtype=told)
        found.append(message(lambda t=transport, x=tensor: t.all_reduce(x).wait()))
        transport.close()
    return found


def test_ranks_that_come_with_other_sizes_are_told():
    for rank, texts in enumerate(run_ranks(_other_sizes, 2)):
        for text in texts:
            assert f"rank {rank} of 2: all_reduce over shm failed" in text, text
        assert any(f"Rank {1 - rank} is in another call, or came with another size" in text for text in texts), texts


# Life


def _in(folder: str) -> Any:
    return patch.object(segments, "FOLDER", Path(folder))


def _constructed(rank: int, world_size: int, folder: str, times: int) -> list[Any]:
    """Descriptors, threads and mapped segments after the first and the last of many, beside groups of their own."""
    process, seen, groups = psutil.Process(), [], [world(), dist.new_group(), dist.new_group()]

    def construct(number: int) -> None:
        group = groups[number % 3]
        transport = make_transport(group, "cpu", "shm")
        tensor = torch.ones(10)
        transport.all_reduce(tensor).wait()
        assert tensor[0] == world_size
        transport.close()

    with _in(folder):
        for i in range(times):
            construct(i)
            if i in (9, times - 1):
                maps = Path("/proc/self/maps").read_text()
                seen.append((process.num_fds(), threads_of_all(), maps.count(segments.PREFIX)))
    return [*seen, os.listdir(folder)]


@pytest.mark.parametrize("times", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_constructions_leave_nothing(ranks2: RankPool, tmp_path: Path, times: int):
    for early, late, left in ranks2.run(_constructed, str(tmp_path), times):
        assert early[0] >= late[0] and early[1:] == late[1:] and left == []


def _groups(rank: int, world_size: int) -> tuple[int, int]:
    """Descriptors and segments after groups that have been destroyed, each with a transport of its own."""
    for _ in range(20):
        group: Any = dist.new_group()
        transport = ShmTransport(group)
        transport.exchange(rank)
        transport.close()
        del transport
        dist.destroy_process_group(group)
        del group
    return psutil.Process().num_fds(), Path("/proc/self/maps").read_text().count(segments.PREFIX)


def test_segments_end_with_their_group():
    for descriptors, mapped in run_ranks(_groups, 2):
        assert mapped <= 4 and descriptors < 100


def _behind_a_failure(rank: int, world_size: int) -> int:
    """Tensors that collectives behind a failed one keep alive."""
    transport, left = ShmTransport(world()), []
    transport.exchange(rank)
    transport._lease.connection.abort()
    for _ in range(3):
        tensor = torch.ones(10)
        left.append(weakref.ref(tensor))
        assert "failed" in message(lambda x=tensor: transport.all_reduce(x).wait())
        del tensor
    return sum(tensor() is not None for tensor in left)


def test_collectives_behind_a_failure_keep_nothing():
    assert run_ranks(_behind_a_failure, 2) == [0, 0]


def _killed(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    with _in(folder):
        transport = ShmTransport(world())
        transport.exchange(rank)
        assert os.listdir(folder) == []  # without a name already
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        return message(lambda: transport.all_reduce(torch.ones(1 << 20)).wait()), time.monotonic() - start


def test_a_killed_rank_is_seen_at_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support, "GRACE_SECONDS", 100.0)  # until both others have told
    pool = RankPool(3)
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(_killed_and_tell, str(tmp_path))
    finally:
        pool.kill()
    texts = re.findall(r"told: TransportError: (.*)", str(caught.value))
    assert len(texts) == 2 and all("No word from rank 1: it has exited" in text for text in texts), str(caught.value)
    assert os.listdir(tmp_path) == []


def _killed_and_tell(rank: int, world_size: int, folder: str) -> None:
    text, seconds = _killed(rank, world_size, folder)
    assert seconds < 60, seconds  # not the group's ten minutes
    raise AssertionError(f"told: {text}")


def _forked(rank: int, world_size: int) -> bool:
    """A child that ends, and closes what it inherited, is not taken for the rank."""
    transport = ShmTransport(dist.new_group(timeout=datetime.timedelta(seconds=60)))  # type: ignore[arg-type]
    transport.exchange(rank)
    child = os.fork()
    if child == 0:
        try:
            transport.abort()
            os.closerange(3, 200)
            os._exit(0)
        finally:
            os._exit(1)  # else its error would be taken for the rank's
    assert os.waitpid(child, 0)[1] == 0
    if rank == 0:
        time.sleep(1)  # the other waits, and looks
    tensor = torch.ones(1000)
    transport.all_reduce(tensor).wait()
    return bool((tensor == 2).all())


@pytest.mark.long
def test_a_forked_child_changes_nothing():
    assert run_ranks(_forked, 2) == [True, True]


# Why not


def _why(rank: int, world_size: int, what: str) -> list[str]:
    """What an explicit request says, by the wrapper and the transport, where ranks cannot share memory."""
    places = {"host": (connection, "boot", lambda: f"host {rank}"), "version": (segments, "VERSION", 1 + rank)}
    with patch.object(*places[what]):
        group: Any = dist.new_group()
        transport = ShmTransport(group)
        return [
            message(lambda: transport.exchange(0)),
            message(lambda: wrap("ours", nn.Linear(2, 2), process_group=group, transport="shm")),
        ]


def test_ranks_of_two_hosts_are_told_so(ranks2: RankPool):
    for rank, texts in enumerate(ranks2.run(_why, "host")):
        for text in texts:
            assert text.startswith(f"BackendUnavailableError: rank {rank} of 2: ranks share no memory over hosts: "), (
                text
            )
            assert text.endswith("use transport='gloo'"), text


def test_another_version_is_told(ranks2: RankPool):
    for texts in ranks2.run(_why, "version"):
        assert all("runs another version of fastreduce" in text for text in texts), texts


def _wrap_in_mounts(pipe: Connection, mount: str, ranks: list[int]) -> None:
    """For `server().fork`: send what each of these ranks prints where `mount` has been run, "" where it may not be."""
    ctypes.CDLL(None).unshare(CLONE_NEWNS)
    if subprocess.run(f"mount --make-rprivate / && {mount}", shell=True, capture_output=True).returncode:
        pipe.send([""])
        return
    pipes = []
    for rank in ranks:
        ours, theirs = Pipe(duplex=False)
        if not os.fork():
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.environ["RANK"] = str(rank)
            theirs.send(_wrapped_over_shm())
            return
        theirs.close()
        pipes.append(ours)
    pipe.send([each.recv() for each in pipes])
    for _ in ranks:
        os.wait()


def _wrapped_over_shm() -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return message(lambda: wrap("ours", nn.Linear(3, 3), transport="shm"))
    finally:
        dist.barrier()  # rank 0 holds the store
        dist.destroy_process_group()


def _mounted(mounts: list[str]) -> list[str]:
    """What two ranks are told in one mount namespace or two, whose /dev/shm these commands mount."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [[0, 1]] if len(mounts) == 1 else [[0], [1]]
    started = [
        server().fork(_wrap_in_mounts, mount, here, env=with_environment(**where))
        for mount, here in zip(mounts, ranks, strict=True)
    ]
    try:
        told = [process.pipe.recv() if process.pipe.poll(90) else ["nothing within 90 s"] for process in started]
    finally:
        for process in started:
            process.kill()
    if "" in told[0]:
        pytest.skip("this root may not mount")
    return [text for here in told for text in here]


@pytest.mark.slow
def test_too_little_room_is_told_by_every_rank_with_what_helps():
    for rank, text in enumerate(_mounted(["mount -t tmpfs -o size=1m tmpfs /dev/shm"])):
        assert f"rank {rank} of 2: ranks cannot share memory here. Rank " in text, text
        assert re.search(r"says: \d+ bytes in /dev/shm: no room: \d+ bytes are free .*--shm-size", text), text


@pytest.mark.slow
def test_too_many_files_are_told_by_every_rank():
    for text in _mounted(["mount -t tmpfs -o size=64m,nr_inodes=1 tmpfs /dev/shm"]):
        assert text.endswith("bytes in /dev/shm: no room: it holds as many files as it may"), text


@pytest.mark.slow
def test_ranks_that_cannot_see_proc_share_memory_all_the_same():
    """As in some sandboxes; torch's class works there."""
    assert _mounted(["mount -t tmpfs tmpfs /proc"]) == ["no error"] * 2


@contextlib.contextmanager
def _small_folder(path: Path) -> Iterator[str]:
    """A file system in memory, of 64 MB."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        yield str(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _filled(rank: int, world_size: int, folder: str) -> list[str]:
    """What carries a wrapper's gradients within a host that trains while the folder fills up, and those of the next."""

    def made() -> Any:
        return wrap("ours", nn.Linear(300, 300, bias=False))

    def train(ddp: Any, steps: int) -> None:
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.full((1, 300), rank + 1.0)).sum().backward()
            assert (ddp.module.weight.grad == (world_size + 1) / 2).all()

    def name(ddp: Any) -> str:
        transport = ddp.reducer.transport
        found: str = transport.levels.moves.name if transport.name == "two_level" else transport.name
        return found

    def fill() -> None:
        with open(f"{folder}/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    with _in(folder):
        before, filler = made(), threading.Thread(target=fill)
        train(before, 3)
        if rank == 0:
            filler.start()
        train(before, 60)
        if rank == 0:
            filler.join()
            assert os.statvfs(folder).f_bavail == 0
        dist.barrier()
        train(before, 30)
        after = made()
        train(after, 3)
        return [name(before), name(after)]


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["", "aab"], ids=["one host", "two hosts"])
def test_a_folder_that_fills_up_in_mid_training_disturbs_none_and_the_next_wrapper_takes_gloo(
    hosts: str, tmp_path: Path
):
    """What a segment takes is its own from the beginning: no rank ends by SIGBUS."""
    with _small_folder(tmp_path / "shm") as folder:
        first, second, *alone = run_ranks(_filled, max(2, len(hosts)), folder, hosts=hosts)
    assert first == second == ["shm", "gloo"] and alone == [["local", "local"]] * bool(hosts)


@pytest.mark.slow
def test_another_containers_memory_is_told():
    own = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    for text in _mounted([own, own]):
        assert "not seen from here: it has a /dev/shm of its own, as containers do" in text, text


# Asking for it, and where it is chosen


def _asked(rank: int, world_size: int) -> list[str]:
    def name(**options: Any) -> str:
        model = wrap("ours", nn.Linear(4, 4), **options)
        model(batch(rank, 0, 2, 4)).sum().backward()
        data = model._get_ddp_logging_data()
        return f"{model.reducer.transport.name} {data['transport']}"

    os.environ["FASTREDUCE_TRANSPORT"] = "gloo"
    found = [name(transport="shm"), name(), name(transport="gloo")]
    os.environ["FASTREDUCE_TRANSPORT"] = "shm"
    found += [name(), name(transport="gloo")]
    os.environ["FASTREDUCE_TRANSPORT"] = "udp"
    return [*found, message(name), message(lambda: name(transport="tcp"))]


def test_transports_are_asked_for_by_name(ranks2: RankPool):
    for seen in ranks2.run(_asked):
        assert seen == [
            "shm shm",
            "gloo gloo",
            "gloo gloo",
            "shm shm",
            "gloo gloo",
            "SettingError: FASTREDUCE_TRANSPORT=udp: allowed: gloo, shm, mpi, nccl, two_level",
            "SettingError: transport='tcp': allowed: gloo, shm, mpi, nccl, two_level",
        ]


def _chosen(rank: int, world_size: int) -> list[str]:
    """Over the ranks of one host; over those of two; where little memory is free; loaded by one rank; the log."""

    def name(group: dist.ProcessGroup) -> str:
        model = wrap("ours", nn.Linear(4, 4), process_group=group)
        model(batch(rank, 0, 2, 4)).sum().backward()
        return model.reducer.transport.name

    os.environ.pop("FASTREDUCE_TRANSPORT", None)
    one, two, full = dist.new_group(), dist.new_group(), dist.new_group()
    found = [name(one)]
    with patch.dict(os.environ, FASTREDUCE_HOST=f"node {rank}"):
        found.append(name(two))
    told: list[str] = []
    with patch.object(transports, "SPARE", 1 << 40), patch.object(transports.logger, "info", _noted(told)):
        found.append(name(full))
    seen = [make_transport(group, "cpu", alone=True).name for group in (one, two, full)] if rank == 0 else []
    return [*found, *seen, *told]


def _noted(told: list[str]) -> Callable[..., None]:
    return lambda text, *args: told.append(text % args)


def test_it_is_chosen_where_ranks_share_a_host_with_room(ranks2: RankPool):
    first, second = ranks2.run(_chosen)
    for found in (first, second):
        assert found[:3] == ["shm", "gloo", "gloo"]
        assert re.search(r"go over gloo: .* says: \d+ bytes in /dev/shm: no room: \d+ bytes are free", found[-1])
    assert first[3:-1] == ["shm", "gloo", "gloo"] and len(second) == 4


def test_one_rank_alone_shares_nothing(group_of_one: None):
    assert make_transport(world(), "cpu", "shm").name == "local"
    assert "moves tensors on cuda" in message(lambda: make_transport(world(), "cpu", "nccl"))
