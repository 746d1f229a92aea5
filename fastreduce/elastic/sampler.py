"""BatchSampler: this process's samples, step by step, in a training that loses ranks and gets others."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ..data import epoch_order
from ..errors import NotInitializedError, SettingError
from .dealing import Deal

SAME = ("n", "shuffle", "seed")  # where a state is loaded


class BatchSampler:
    """Lists of this process's indices, one for each step of an elastic training, without an end.

    Each sample of an epoch is in one committed step, however ranks come and go: what a lost rank had for a step that
    was committed without it is dealt out again, and those who come take of what is left. Where an epoch ends within a
    step, the rest of that step is of the next one; orders are those of torch's DistributedSampler. Pass it to
    `fastreduce.elastic.join(ddp, sampler=sampler)`, which gives the state to those who come, and iterate over it, or
    give it to a loader, `DataLoader(data, batch_sampler=sampler)`: one batch for one step, accumulated backwards
    included.

    Args:
        data: the number of samples, or what has that length.
        batch_size: samples of one process in a step.
        shuffle: whether every epoch has an order of its own; otherwise it is 0, 1, 2, …
        seed: of the shuffling, the same on all.
        ahead: how many batches a loader fetches before their step: `num_workers * prefetch_factor` of torch's.

    Raises:
        SettingError: if there are no samples, or `batch_size` or `ahead` is out of range.
    """

    def __init__(
        self, data: int | Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0, ahead: int = 0
    ) -> None:
        n = data if isinstance(data, (int, np.integer)) else len(data)
        for name, value, least in (("data", n, 1), ("batch_size", batch_size, 1), ("ahead", ahead, 0)):
            if not isinstance(value, (int, np.integer)) or value < least:
                raise SettingError(f"{name}={value!r}: allowed: whole numbers from {least} on")
        self.n, self.batch_size, self.ahead = int(n), int(batch_size), int(ahead)  # NumPy's are in no state
        self.shuffle, self.seed = bool(shuffle), operator.index(seed)
        self._deal = Deal(self.batch_size, self.ahead + 1)
        self._member: int | None = None
        self._counted = 0
        self._orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def __repr__(self) -> str:
        return (
            f"BatchSampler({self.n}, {self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, ahead={self.ahead})"
        )

    @property
    def epoch(self) -> int:
        """How many epochs are over, each sample of which was in a committed step: the same on all between two steps."""
        return self._deal.lowest // self.n

    def __iter__(self) -> Iterator[list[int]]:
        """Give the indices of this process in the next step, then in the one after it, and so on.

        Raises:
            NotInitializedError: before `fastreduce.elastic.join`.
            SettingError: if a batch is asked for too early, or steps were made without one.
        """
        if self._member is None:
            raise NotInitializedError("BatchSampler: call fastreduce.elastic.join(ddp, sampler=sampler) first")
        step = self._counted
        while True:
            ahead = step - self._counted
            if ahead < 0:
                raise SettingError(f"{-ahead} step(s) were made without a batch of {self!r}: take one for each")
            if ahead > self.ahead:
                raise SettingError(
                    f"{self!r} was asked for a batch {ahead} step(s) ahead: make a step with each, and where a loader "
                    "fetches batches before their step, pass ahead=num_workers * prefetch_factor"
                )
            numbers = self._deal.hands[self._member][ahead * self.batch_size : (ahead + 1) * self.batch_size]
            yield [self._index(number) for number in numbers]
            step += 1

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, self.n)
        if epoch not in self._orders:
            first = self.epoch
            self._orders = {each: order for each, order in self._orders.items() if each >= first}
            self._orders[epoch] = epoch_order(self.n, self.shuffle, self.seed, epoch)
        return int(self._orders[epoch][place])

    # What Membership calls

    def join(self, member: int) -> None:
        """This process is that one from now on."""
        self._member = member

    def share(self, members: Sequence[int]) -> None:
        """These train now."""
        self._deal.share(members)

    def bring(self, members: Sequence[int]) -> None:
        """The averages of the step under way are theirs."""
        self._deal.bring(members)

    def count(self) -> None:
        """The step under way is committed, with what was brought."""
        self._deal.count()
        self._counted += 1

    # State

    def state_dict(self) -> dict[str, Any]:
        """What is done and who has what: the same on all between two steps."""
        deal = self._deal
        hands = {member: [*hand] for member, hand in deal.hands.items()}
        settings = {name: getattr(self, name) for name in (*SAME, "batch_size", "ahead")}
        return {**settings, "top": deal.top, "back": [*deal.back], "hands": hands}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, also with other processes, or another `batch_size`.

        Raises:
            SettingError: for another number of samples, or another order.
        """
        for name in SAME:
            if state[name] != getattr(self, name):
                own = getattr(self, name)
                raise SettingError(f"{name}={own}: this state of a BatchSampler has {name}={state[name]}")
        deal = self._deal
        deal.top, deal.back = int(state["top"]), [*state["back"]]
        deal.hands = {int(member): [*hand] for member, hand in state["hands"].items()}
        if any(state[name] != getattr(self, name) for name in ("batch_size", "ahead")):
            deal.take_back([*deal.hands])
