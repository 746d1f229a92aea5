"""Real processes, of which one comes later: what it has to know of those who train, and who is not let in."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import DistributedDataParallel, TransportError, elastic, load_checkpoint, save_checkpoint
from fastreduce.ddp.elastic_reducer import group_of_one
from fastreduce.elastic import state
from fastreduce.elastic.generations import Generation
from fastreduce.elastic.membership import Membership
from fastreduce.transports import Transport
from tests.support.commands import with_environment
from tests.support.fork_server import server

SECONDS = 120.0
BEGUN, MORE = 6, 12  # steps of those who train when another one comes, and of both from then on


class Halves(nn.Module):
    """Two layers, of which a forward uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, x: Tensor, halves: str = "both") -> Tensor:
        found = {"first": self.first, "second": self.second}
        return torch.stack([(half(x) * self.scale).sum() for name, half in found.items() if halves in (name, "both")])


class Slow:
    """A part whose state takes longer than the timeout, both ways."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(4.0)
        return {"one": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        time.sleep(4.0)


def _turn(case: str, ddp: Any, optimizers: dict[str, torch.optim.Optimizer], step: int, late: bool) -> None:
    """What the loop does in one turn."""
    x = torch.ones(1, 3)
    first, second = optimizers.values()
    if case == "accumulated":
        if step % 4 == 0:
            first.zero_grad()
        ddp(x)  # of which no backward comes: who has been let in before it does not come again
        ddp(x).sum().backward()
        if (step + 1) % 4 == 0:
            first.step()
    elif case in ("turns", "half a turn"):
        halves = [("first", first), ("second", second)]
        for half, optimizer in halves[::-1] if late and case == "half a turn" else halves:
            ddp.zero_grad()
            ddp(x, half).square().sum().backward()
            optimizer.step()
        time.sleep(0.2)  # in which one knocks, and so is let in behind the first half, where that is allowed
    elif case == "unused":
        first.zero_grad(set_to_none=False)
        ddp(x, "both" if step < 3 else "first").sum().backward()
        first.step()
    else:
        first.zero_grad()
        ddp(x).sum().backward()
        first.step()


def _train(_: object, case: str, name: str, address: str, folder: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(ord(name))
    logging.basicConfig(filename=Path(folder, f"{name}.log"))
    late, last = name == "c", Path(folder, "last step")

    def note(told: list[Any]) -> None:
        with Path(folder, name).open("a") as lines:
            lines.write(json.dumps(told) + "\n")

    setting = "topk:ratio=0.4,min_numel=1" if case == "checkpoint" else "none"
    ddp = DistributedDataParallel(Halves(), elastic=True, compression=setting, find_unused_parameters=True)
    whole = list(ddp.parameters())
    optimizers = {
        "first": torch.optim.SGD(ddp.module.first.parameters() if "turn" in case else whole, lr=0.1, momentum=0.9),
        "second": torch.optim.SGD(ddp.module.second.parameters(), lr=0.1),
    }
    if case == "checkpoint":
        load_checkpoint(Path(folder, "run.pt"), model=ddp)
    if case == "cut short" and late:  # as if another rank were lost when those who train have sent everything
        broadcast, calls = state._broadcast, []

        def once_less(storages: Sequence[Tensor], size: int, transport: Transport, source: int) -> None:
            broadcast(storages, size, transport, source)
            calls.append(size)
            if len(calls) == 2:  # behind plain data, the tensors' memory
                raise TransportError("of the test")

        state._broadcast = once_less
    parts: dict[str, Any] = {**optimizers, **({"slow": Slow()} if case == "slow" else {})}
    timeout = 2.0 if case == "slow" else 10.0
    turns = 2 if "turn" in case else 1
    for p in whole:
        p.grad = torch.full_like(p, float(ord(name)))
    members = elastic.join(ddp, store=address, timeout=timeout, least=2, backwards=turns, **parts)
    assert late or all((p.grad == ord(name)).all() for p in whole), "those of a backward before anybody has trained"
    if not late:
        ddp.zero_grad()
    residuals = ddp.reducer.state_dict()["residuals"].values()
    note([float(sum(each.abs().sum() for each in residuals))])
    if late:
        Path(folder, "soon").write_text(str(members.step + MORE))
        Path(folder, "soon").replace(last)
    while not (last.exists() and members.step >= int(last.read_text())):
        _turn(case, ddp, optimizers, members.step, late)
        told = [p.detach().double().sum().item() for p in whole]
        grads = [0.0 if p.grad is None else p.grad.double().sum().item() for p in whole]
        note([members.step, members.size, members.generation, told, grads])
        if case == "cut short" and name == "a" and last.exists() and members.step == int(last.read_text()) - MORE // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    return 0


def _refused(_: object, address: str) -> int:
    ddp = DistributedDataParallel(nn.Linear(2, 2), elastic=True)
    try:
        elastic.join(ddp, store=address, timeout=10.0, least=2)
    except RuntimeError as error:
        return 7 if "has another model" in str(error) else 1
    return 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> None:
    """Of a training with fixed ranks, whose buckets have not been laid out anew yet, with residuals."""
    group_of_one()
    ddp = DistributedDataParallel(Halves(), compression="topk:ratio=0.4,min_numel=1")
    ddp(torch.rand(2, 3)).sum().backward()
    save_checkpoint(tmp_path / "run.pt", model=ddp)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    "case",
    [
        "unused",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("accumulated", "turns", "half a turn", "slow", "cut short", "checkpoint", "refused")
        ),
    ],
)
def test_one_that_comes_trains_as_the_others_do(tmp_path: Path, case: str):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address, running = f"127.0.0.1:{store.port}", {}

    def start(place: int, name: str) -> None:
        env = with_environment(RANK=str(place), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        running[name] = server(place).fork(_train, case, name, address, str(tmp_path), env=env)

    def told(name: str) -> list[Any]:
        path = tmp_path / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    try:
        for place, name in enumerate("ab"):
            start(place, name)
        deadline = time.monotonic() + SECONDS
        while min(len(told("a")), len(told("b"))) < BEGUN:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if case == "refused":
            env = with_environment(RANK="2", GLOO_SOCKET_IFNAME="lo")
            other = running["other"] = server().fork(_refused, address, env=env)
            assert other.poll(SECONDS) == 7
        start(2, "c")
        codes = {name: running[name].poll(SECONDS) for name in "abc"}
    finally:
        for process in running.values():
            process.kill()
    assert codes == {"a": -signal.SIGKILL if case == "cut short" else 0, "b": 0, "c": 0}
    (residual,), *steps = told("c")
    assert residual == 0.0, "those of a checkpoint are of long ago"
    assert len(steps) >= MORE / 2
    warned = "has other parameters than the rest" in (tmp_path / "c.log").read_text()
    assert warned == (case == "half a turn")
    if warned:
        return
    by_step: dict[int, set[str]] = {}
    for name in "abc":
        for step, _, _, parameters, grads in told(name)[1:]:
            by_step.setdefault(step, set()).add(json.dumps([parameters, grads]))
    assert max(map(len, by_step.values())) == 1, "all have the same parameters and averages in each step"
    if case == "accumulated":
        for step, _, _, _, grads in told("c")[1:]:
            assert grads[1] == pytest.approx(told("a")[1][4][1] * ((step - 1) % 4 + 1), rel=1e-5)
    if case in ("accumulated", "refused"):
        assert {generation for _, _, generation, _, _ in steps} == {2}, "nobody meets where nobody can come in"


def _go_on(_: object, name: str, address: str, folder: str) -> int:
    """Of a and b, b alone has connected with c when c is lost."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    patched: Any = Membership
    connect = Membership._connect

    def connect_too_late(self: Membership, generation: Generation) -> Transport:
        transport = connect(self, generation)
        if generation.number == 2:
            while not self._presence.gone(generation.members):
                time.sleep(0.01)
            transport.abort()
            raise TransportError("of the test")
        return transport

    if name == "a":
        patched._connect = connect_too_late
    elif name == "c":
        state.send = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    ddp = DistributedDataParallel(nn.Linear(3, 3), elastic=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    members, left = elastic.join(ddp, store=address, timeout=10.0, least=2, optimizer=optimizer), MORE
    while left:
        optimizer.zero_grad()
        ddp(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        Path(folder, name).write_text(str(members.generation))
        left -= members.generation > 2
        time.sleep(0.02)
    return 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_is_lost_while_it_comes_leaves_all_others_where_they_were(tmp_path: Path):
    """Else some would compare parameters one turn later, and others begin their step: another generation."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running: dict[str, Any] = {}

    def start(place: int, name: str) -> None:
        env = with_environment(RANK=str(place), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        arguments = name, f"127.0.0.1:{store.port}", str(tmp_path)
        running[name] = server(place).fork(_go_on, *arguments, env=env)

    try:
        start(0, "a")
        start(1, "b")
        deadline = time.monotonic() + SECONDS
        while not all((tmp_path / name).exists() for name in "ab"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        start(2, "c")
        codes = {name: running[name].poll(SECONDS) for name in "abc"}
    finally:
        for process in running.values():
            process.kill()
    assert codes == {"a": 0, "b": 0, "c": -signal.SIGKILL}
    assert [(tmp_path / name).read_text() for name in "ab"] == ["3", "3"]
