"""Samples of an elastic training: each is in one committed step of an epoch, over histories of losses and arrivals."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from fastreduce import DistributedDataParallel, NotInitializedError, SettingError, ShardSampler, elastic
from fastreduce.checkpoint import snapshot_file
from fastreduce.elastic import membership
from fastreduce.elastic.dealing import Deal
from fastreduce.elastic.generations import Generation, Note, Stage

STEPS = 40


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    for member in list(membership._alive):  # a process is a member once
        member.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


class Process:
    """One of a training: what it knows of all, and the batches that it has drawn for this step and those to come."""

    def __init__(self, number: int, deal: Deal) -> None:
        self.number, self.deal = number, deal
        self.step, self.stage = 0, Stage.BETWEEN
        self.drawn: list[list[int]] = []

    def draw(self) -> None:
        """As early as it may."""
        size = self.deal.size
        hand = self.deal.hands[self.number]
        for i in range(len(self.drawn), self.deal.steps):
            self.drawn.append(hand[i * size : (i + 1) * size])
        assert [number for batch in self.drawn for number in batch] == hand, "what was fetched ahead is still its own"

    def count(self) -> None:
        self.deal.count()
        self.step += 1
        self.stage = Stage.COUNTED


class Training:
    """Processes that make the moves of `Membership`, in an order and with losses by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size, steps = self.chance.randint(1, 3), self.chance.randint(1, 3)
        self.here = {number: Process(number, Deal(size, steps)) for number in range(self.chance.randint(1, 5))}
        self.came, self.trained = len(self.here), Counter[int]()
        self.happened = Counter[str]()
        for process in self.here.values():
            process.deal.share([*self.here])

    def lose(self, at_most: int) -> None:
        """Somebody is gone, but never all."""
        for number in self.chance.sample([*self.here], min(at_most, len(self.here) - 1)):
            del self.here[number]

    def regroup(self) -> None:
        """One generation: what `Membership` does when it has met, whether it then connects or not."""
        notes = {number: Note(each.step, each.stage) for number, each in self.here.items()}
        generation = Generation(1, tuple(self.here), notes, (), "")
        for process in self.here.values():
            if process.stage is Stage.WHOLE and generation.counts(process.step):
                process.count()
            process.deal.share(generation.members)

    def let_in(self) -> None:
        """One comes; before it has the state others may be lost, or it itself."""
        for process in self.here.values():
            process.stage = Stage.BETWEEN
        new, self.came = self.came, self.came + 1
        members = [*self.here, new]
        while True:
            for process in self.here.values():
                process.deal.share(members)
            if self.chance.random() < 0.7:
                source = next(iter(self.here.values()))
                self.here[new] = Process(new, copy.deepcopy(source.deal))
                self.here[new].step = source.step
                return
            self.happened["lost while one comes"] += 1
            if self.chance.random() < 0.5:
                self.regroup()
                return
            self.lose(1)
            members = [*self.here, new]

    def make_step(self) -> None:
        """Those who are left reduce until a step is committed."""
        step = max(process.step for process in self.here.values())
        while True:
            for process in self.here.values():
                process.stage = Stage.UNDER_WAY
            brought = {number: process.drawn[0] for number, process in self.here.items()}
            event = self.chance.choice(["none", "none", "before", "commit", "twice"])
            self.happened[event] += 1
            whole = [each for each in self.here.values() if event != "before" or self.chance.random() < 0.5]
            for process in whole:
                process.deal.bring([*self.here])
                process.stage = Stage.WHOLE
            if event == "commit":  # some have passed it
                for process in self.here.values():
                    if self.chance.random() < 0.5:
                        process.count()
                self.lose(2)
            elif event == "before":
                self.lose(2)
            elif event == "twice" and len(self.here) > 2:  # the only one without averages is lost a generation later
                first, *_, last = self.here.values()
                first.stage = Stage.UNDER_WAY
                del self.here[last.number]
                self.regroup()
                del self.here[first.number]
            elif event == "none":
                for process in self.here.values():
                    process.count()
            self.regroup()
            if all(process.step > step for process in self.here.values()):
                self.trained.update(number for batch in brought.values() for number in batch)
                for process in self.here.values():
                    process.drawn.pop(0)
                return

    def check(self) -> None:
        first, *others = (process.deal for process in self.here.values())
        known = {name: value for name, value in vars(first).items() if name != "_brought"}
        assert all(vars(deal) | known == vars(deal) for deal in others), "all know the same"
        assert set(first.hands) == set(self.here)
        everything = [*self.trained.elements(), *first.back, *(n for hand in first.hands.values() for n in hand)]
        assert sorted(everything) == list(range(first.top)), "each is trained, left, or in one hand"
        assert first.lowest == next(number for number in range(first.top + 1) if number not in self.trained)


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 1500), marks=pytest.mark.long)])
def test_each_number_is_trained_once_however_processes_come_and_go(seeds: range):
    happened = Counter[str]()
    for seed in seeds:
        training = Training(seed)
        for _ in range(STEPS):
            for process in training.here.values():
                process.draw()
            if training.chance.random() < 0.3:
                training.let_in()
                for process in training.here.values():
                    process.draw()
            training.make_step()
            training.check()
        happened += training.happened
    assert happened.keys() == {"none", "before", "commit", "twice", "lost while one comes"}


def _join(sampler: elastic.BatchSampler) -> tuple[DistributedDataParallel, elastic.Members]:
    ddp = DistributedDataParallel(nn.Linear(2, 1), elastic=True)
    return ddp, elastic.join(ddp, store=dist.HashStore(), least=1, timeout=5, sampler=sampler)


def test_epochs_are_those_of_torchs_sampler_and_a_batch_may_be_of_two():
    sampler = elastic.BatchSampler([None] * 10, 4, seed=3)
    ddp, members = _join(sampler)
    loader: DataLoader[int] = DataLoader(range(10), batch_sampler=sampler)
    taken: list[int] = []
    state = {}
    for samples in loader:
        ddp(torch.ones(1, 2)).sum().backward()
        taken += samples.tolist()
        if members.step == 3:
            state = copy.deepcopy(sampler.state_dict())
        if sampler.epoch == 2:
            break
    theirs = DistributedSampler(range(10), 1, 0, seed=3)
    for epoch in range(2):
        theirs.set_epoch(epoch)
        assert taken[10 * epoch : 10 * (epoch + 1)] == list(theirs)
    assert (members.step, len(taken)) == (5, 20)
    members.leave()
    again = elastic.BatchSampler(10, 3, seed=3)
    again.load_state_dict(state)
    _join(again)
    assert next(iter(again)) == taken[12:15], "on from a checkpoint, also with another batch"
    with pytest.raises(SettingError, match=r"seed=4.*has seed=3"):
        elastic.BatchSampler(10, 3, seed=4).load_state_dict(state)


def test_a_batch_belongs_to_a_step():
    sampler = elastic.BatchSampler(10, 2, shuffle=False, ahead=1)
    with pytest.raises(NotInitializedError, match=r"fastreduce\.elastic\.join") as found:
        next(iter(sampler))
    assert "init_process_group" not in str(found.value), "which would not help"
    ddp, _ = _join(sampler)
    batches = iter(sampler)
    assert list(islice(batches, 2)) == [[0, 1], [2, 3]] and next(iter(sampler)) == [0, 1]
    with pytest.raises(SettingError, match=r"2 step\(s\) ahead.*num_workers \* prefetch_factor"):
        next(batches)
    batches = iter(sampler)
    next(batches)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    with pytest.raises(SettingError, match=r"1 step\(s\) were made without a batch"):
        next(batches)


@pytest.mark.long
def test_torchs_loader_fetches_ahead_in_workers():
    sampler = elastic.BatchSampler(12, 2, ahead=2)
    ddp, _ = _join(sampler)
    taken: list[int] = []
    for samples in DataLoader(range(12), batch_sampler=sampler, num_workers=1, prefetch_factor=2):
        ddp(torch.ones(1, 2)).sum().backward()
        taken += samples.tolist()
        if sampler.epoch == 2:
            break
    assert sorted(taken[:12]) == sorted(taken[12:]) == list(range(12))


def test_numpys_numbers_are_taken_and_the_state_is_plain():
    numbers: Any = {"shuffle": np.bool_(True), "seed": np.int64(3), "ahead": np.int8(1)}
    sampler = elastic.BatchSampler(np.int64(10), np.int64(2), **numbers)  # type: ignore[arg-type]
    plain = elastic.BatchSampler(10, 2, seed=3, ahead=1)
    for each in (sampler, plain):
        each.share([4])
    assert sampler.state_dict() == plain.state_dict() and repr(sampler) == repr(plain)
    kept = io.BytesIO()
    torch.save(sampler.state_dict(), kept)
    kept.seek(0)
    snapshot_file.check_plain(kept)  # else nobody could be sent it, and come in


@pytest.mark.parametrize(("batch_size", "ahead"), [(2, 4), (10, 0)])
def test_what_was_in_a_larger_hand_is_dealt_anew(batch_size: int, ahead: int):
    before = elastic.BatchSampler(100, batch_size, shuffle=False, ahead=ahead)
    before.share([0])
    after = elastic.BatchSampler(100, 2, shuffle=False)
    after.load_state_dict(before.state_dict())
    after.share([0, 1])
    assert after.state_dict()["hands"] == {0: [0, 1], 1: [2, 3]}, "the lowest of what is left, by turns"


def test_what_deals_wrongly_is_refused():
    for options, told in (((0, 4), "data=0"), ((4, 0), "batch_size=0"), ((4, "2"), "batch_size='2'")):
        with pytest.raises(SettingError, match=f"{told}: allowed: whole numbers from 1 on"):
            elastic.BatchSampler(*options)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="ahead=-1"):
        elastic.BatchSampler(4, 1, ahead=-1)
    ddp = DistributedDataParallel(nn.Linear(2, 1), elastic=True)
    with pytest.raises(SettingError, match=r"sampler= is a ShardSampler.*elastic\.BatchSampler"):
        elastic.join(ddp, store=dist.HashStore(), sampler=ShardSampler(4, rank=0, world_size=1))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [401, 402])
def test_real_processes_train_each_sample_once_where_some_are_killed(seed: int):
    pytest.importorskip("typer")
    from bench.elastic.kills import CASES, run

    found = run(seed, *CASES[seed % len(CASES)])
    assert found["kills"] and not found["hangs"], found["output"][-3000:]
    assert (found["differing"], found["miscounted"]) == ([], [])
