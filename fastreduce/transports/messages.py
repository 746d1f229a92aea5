"""What ranks tell each other: JSON, which cannot execute, checked when it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import TransportError

T = TypeVar("T")

LIMIT = 64 << 20  # bytes of one message: what a model of a million parameters says of itself


def encode(value: Any) -> bytes:
    """A message of None, bools, numbers, strings, lists (tuples travel as lists), and dicts with string keys.

    Raises:
        TypeError: for anything else, or more than 64 MiB.
    """
    _check(value)
    data = json.dumps(value).encode()
    if len(data) > LIMIT:
        raise TypeError(f"a message of {len(data)} bytes; allowed: up to {LIMIT}")
    return data


def _check(value: Any) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a message with the key {key!r}; allowed: strings")
            _check(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _check(part)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(
            f"a message with a {type(value).__name__}; allowed: None, bools, numbers, strings, lists and dicts of them"
        )


def decode(data: bytes | str, rank: int, check: Callable[[Any], T]) -> T:
    """What `check` makes of the message that `rank` sent; its ValueError and TypeError say what is wrong with it.

    Raises:
        TransportError: naming the rank and what was wrong.
    """
    try:
        if len(data) > LIMIT:
            raise ValueError(f"it has {len(data)} bytes; allowed: up to {LIMIT}")
        return check(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise TransportError(
            f"rank {rank} sent {data[:40]!r}{' …' if len(data) > 40 else ''}, which is no message of fastreduce: "
            f"{error or type(error).__name__}. Another version of it, or another program, writes there"
        ) from error


def numbers(value: Any, count: int) -> list[int]:
    """`value`, if it is a list of different whole numbers from 0 to before `count`.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < count for n in value):
        raise ValueError(f"a list of whole numbers from 0 to {count - 1} was expected, not {value!r:.80}")
    if len(set(value)) < len(value):
        raise ValueError(f"a number is there twice in {value!r:.80}")
    return value


def of_types(value: Any, *types: type | tuple[type, ...]) -> list[Any]:
    """`value`, if it is a list of one value of each of `types`.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, list) or len(value) != len(types) or not all(map(isinstance, value, types)):
        raise ValueError(f"a list of {_names(types)} was expected, not {value!r:.80}")
    return value


def _names(types: Iterable[type | tuple[type, ...]]) -> str:
    return ", ".join(" or ".join(t.__name__ for t in (kind if isinstance(kind, tuple) else (kind,))) for kind in types)


def checked(told: Iterable[Any], check: Callable[[Any], T], what: str) -> list[T]:
    """What `check` makes of each rank's value.

    Raises:
        TransportError: naming the first rank whose value it does not take, and `what` was to come.
    """
    found = []
    for rank, value in enumerate(told):
        try:
            found.append(check(value))
        except (ValueError, TypeError) as error:
            raise TransportError(f"rank {rank} is in another call: it sent no {what} ({error}).") from error
    return found


def gather_bytes(mine: bytes, gather: Callable[[Tensor], Sequence[Tensor]], limit: int = LIMIT) -> list[bytes]:
    """Every rank's bytes: gather the lengths, then the bytes, padded to the longest.

    Args:
        mine: this rank's.
        gather: every rank's version of a 1-D tensor on the CPU, in rank order.
        limit: the most bytes that a rank may send.

    Raises:
        TransportError: on every rank alike, naming the rank that sends more.
    """
    lengths = [int(length) for length in gather(torch.tensor([len(mine)], device="cpu"))]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= limit:
            raise TransportError(f"rank {rank} sends a message of {length} bytes; allowed: up to {limit}")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    if mine:
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    gathered = gather(padded) if len(padded) else [padded] * len(lengths)
    return [part[:n].numpy().tobytes() for part, n in zip(gathered, lengths, strict=True)]


def exchange_in_rows(value: Any, rank: int, ranks: int, all_gather: Callable[[Tensor], object]) -> list[Any]:
    """Every rank's value, by an all-gather of the rows of a tensor, in place."""

    def gather(mine: Tensor) -> list[Tensor]:
        rows = mine.new_zeros(ranks, len(mine))
        rows[rank] = mine
        all_gather(rows)
        return list(rows)

    return exchange(value, gather)


def exchange(value: Any, gather: Callable[[Tensor], Sequence[Tensor]]) -> list[Any]:
    """Every rank's value, by `gather` as above."""
    return [decode(data, rank, lambda told: told) for rank, data in enumerate(gather_bytes(encode(value), gather))]
