"""By how much a rank's clock is ahead of rank 0's, from round trips.

Each round, every rank notes its clock, gathers what all have noted, and notes it again. Rank r cannot have rank 0's
note before that was made, nor rank 0 rank r's: so the offset lies between `before of r - after of 0` and `after of r -
before of 0`. Where all rounds' intervals overlap is what is known: the fastest rounds decide. (F. Cristian,
Probabilistic clock synchronization, 1989, and the intersection of intervals of K. Marzullo and S. Owicki, 1983. NTP's
clock filter, RFC 5905, keeps the round of least delay, too.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...transports import Transport
from .. import clocks

DRIFT = 50e-6  # by which clocks of two machines may differ in speed


class Offset(NamedTuple):
    """Seconds."""

    seconds: float  # this rank's clock minus rank 0's
    bound: float  # the offset is not further away than this
    at: float  # rank 0's clock when it was measured: the same number on every rank


def measure(transport: Transport, device: torch.device, rounds: int) -> Offset:
    """The offset of `clocks.now()`; every rank calls it at once.

    Args:
        transport: the ranks.
        device: of tensors that it moves.
        rounds: how many.

    Raises:
        TransportError: if the collectives fail.
    """
    size, rank = transport.world_size, transport.rank
    if size == 1:
        return Offset(0.0, 0.0, clocks.now())
    before = torch.zeros(rounds, size, dtype=torch.float64, device="cpu")
    after = torch.zeros(size, rounds, dtype=torch.float64, device="cpu")
    for each in range(rounds):
        notes = torch.zeros(size, dtype=torch.float64, device=device)
        notes[rank] = clocks.now()
        transport.all_gather(notes).wait()
        before[each] = notes
        after[rank, each] = clocks.now()
    ends = after.to(device)
    transport.all_gather(ends.view(-1)).wait()
    after.copy_(ends)
    low = float((before[:, rank] - after[0]).max())
    high = float((after[rank] - before[:, 0]).min())
    at = float(before[0, 0])
    return Offset((low + high) / 2, max(0.0, (high - low) / 2), at) if rank else Offset(0.0, 0.0, at)


def closer(before: Offset, after: Offset) -> Offset:
    """The second of two measurements of one offset, as far as the first, which has had time to drift, tells more."""
    drift = DRIFT * (after.at - before.at)
    low = max(before.seconds - before.bound - drift, after.seconds - after.bound)
    high = min(before.seconds + before.bound + drift, after.seconds + after.bound)
    return Offset((low + high) / 2, (high - low) / 2, after.at) if low <= high else after
