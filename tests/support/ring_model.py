"""The rings of shared memory under every interleaving: their own source, run step by step.

`fastreduce/transports/shm/ring.py` and `flags.py` are read, and each function becomes a generator that yields before it
touches a word that ranks share, or moves data. A rank is then an automaton: where it stands is where its generators
stand, with their variables. All states that ranks can be in together are visited, once each.

Moves of data are not steps of their own: they are made at once, and looked at then. Who writes into a cell must have
*loaded by itself* that every other rank has taken what was there; who reads, that its owner has sent or summed it. So
what is shown does not rest on the order in which a processor makes stores visible: a load that acquires what was stored
with release is all that is used. A move that comes later in truth finds words that are no smaller.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastreduce.kernels.numba_cpu_elements import LINE, slot_at
from fastreduce.transports.shm import elements, flags, ring, segments

UNIT = LINE  # bytes; parts of pieces are this long here
SEGMENT, TENSORS = 1 << 20, 1 << 30  # apart: rank r's segment begins at (r + 1) · SEGMENT, its tensor behind TENSORS
# Moves of data, by their arguments: to where, and from where; 0 is memory of the rank alone.
MOVES: dict[str, Callable[..., tuple[int, list[int]]]] = {
    "copy": lambda to, source, count: (to, [source]),
    "add": lambda to, first, second, count, dtype: (to, [first, second]),
    "multiply": lambda to, source, count, factor, dtype: (to, [source]),
    "encode": lambda pieces, shard, first, count, to: (to, []),
    "average": lambda pieces, first, count, terms, bases, rank, at, own, to: (
        to,
        [own if other == rank else base + at for other, base in enumerate(bases)],
    ),
    "decode": lambda pieces, shard, first, count, source: (0, [source]),
}
PRIMITIVES = {"load_acquire", "store_release", "_load_sleep", "_store_sleep", "_futex", *MOVES}
NOTHING = {"fence", "pause"}  # words are stored in order here

Operation = tuple[Any, ...]


def generators(change: Callable[[str], str] = lambda source: source) -> dict[str, Any]:
    """The functions by name, as generators; `change` may break their source."""
    found = {}
    for module in (flags, ring):
        for name, value in vars(module).items():
            if hasattr(value, "py_func") and value.py_func.__module__ == module.__name__:
                source = change(textwrap.dedent(inspect.getsource(value.py_func)))
                found[name] = ast.parse(source).body[0]
    stepping = set(PRIMITIVES)
    while True:  # who calls what steps, steps
        more = {n for n, tree in found.items() if n not in stepping and _calls(tree) & stepping}
        if not more:
            break
        stepping |= more
    constants = {n: v for module in (segments, elements, flags, ring) for n, v in vars(module).items() if n.isupper()}
    names: dict[str, Any] = {**constants, "slot_at": slot_at.py_func}
    for tree in found.values():
        tree.decorator_list = []  # type: ignore[attr-defined]
        changed = ast.fix_missing_locations(_Steps(stepping).visit(tree))
        exec(compile(ast.Module([changed], []), "model", "exec"), names)
    return names


def _calls(tree: ast.AST) -> set[str]:
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


class _Steps(ast.NodeTransformer):
    def __init__(self, stepping: set[str]) -> None:
        self._stepping = stepping

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in PRIMITIVES:
            return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        if name in NOTHING:
            return ast.Constant(0)
        return ast.YieldFrom(node) if name in self._stepping else node


@dataclass
class _Local:
    """Where one rank stands: what it does next, and how it came here (the answers that it was given)."""

    operation: Operation
    answers: tuple[Any, ...]
    seen: tuple[tuple[int, int], ...]  # words of others → the most that was loaded
    looked: bool = False  # whether the move that comes next, if it is one, was looked at
    next: dict[Any, int] = field(default_factory=dict)


class WrongError(AssertionError):
    """What a rank did, or cannot do any more."""


class Model:
    """Every state of `ranks` ranks that run the collectives `calls`, one after the other.

    Args:
        calls: kind of each collective, and how many pieces it has.
        ranks: their number.
        cells: of each ring.
        change: what breaks the source.
    """

    def __init__(
        self, calls: list[tuple[int, int]], ranks: int, cells: int, change: Callable[[str], str] = lambda s: s
    ) -> None:
        self.ranks, self.cells, self.calls = ranks, cells, calls
        self._names = generators(change)
        self._cell_bytes = UNIT * ranks
        self._bases = tuple((r + 1) * SEGMENT for r in range(ranks))
        self._locals: list[list[_Local]] = [[] for _ in range(ranks)]
        self._known: list[dict[Any, int]] = [{} for _ in range(ranks)]
        self._places: dict[int, int] = {}  # address of a word → its place in a state

    def _program(self, rank: int) -> Iterator[Operation]:
        first = 0
        for kind, pieces in self.calls:
            at, part = [0, 0, 0, -1], UNIT
            whole = {
                ring.ALL_REDUCE: part * self.ranks,
                ring.ALL_TO_ALL: part,
                ring.TWO_SHOT: 1,
                ring.REDUCE_SCATTER: 1,
            }
            tensor, total = TENSORS * (rank + 1), pieces * whole.get(kind, self._cell_bytes)
            tensors = ((tensor,), (tensor + TENSORS // 4,), (0,), (total,), 1, tensor + TENSORS // 2)
            arguments = (kind, first, pieces, tensors, total, UNIT, at)  # of a two-shot, the bytes of a block
            sizes = (self.cells, self._cell_bytes, 0, 0, 1)
            status = yield from self._names["advance"](self._bases, rank, *sizes, *arguments)
            if status != ring.DONE:
                raise WrongError(f"rank {rank} ends with status {status}")
            first += pieces
        yield ("end",)

    def _step(self, rank: int, number: int, answer: Any) -> int:
        """The state behind a state of one rank that was given an answer."""
        local = self._locals[rank][number] if number >= 0 else None
        if local is not None and answer in local.next:
            return local.next[answer]
        answers = () if local is None else (*local.answers, answer)
        program: Any = self._program(rank)
        operation, seen = next(program), dict[int, int]()
        for given in answers:
            if operation[0] == "load_acquire" and operation[1] // SEGMENT != rank + 1:
                seen[operation[1]] = max(seen.get(operation[1], 0), given)
            operation = program.send(given)
        operation = tuple(operation)
        key = (operation, _place(program), known := tuple(sorted(seen.items())))
        if key not in self._known[rank]:
            self._known[rank][key] = len(self._locals[rank])
            self._locals[rank].append(_Local(operation, answers, known))
        found = self._known[rank][key]
        if local is not None:
            local.next[answer] = found
        return found

    def run(self) -> int:
        """Visit every state; returns their number.

        Raises:
            WrongError: if a rank touches a cell too early, or all that have not ended sleep.
        """
        start = (tuple(self._step(r, -1, None) for r in range(self.ranks)), (), frozenset[int]())
        todo, visited = [start], {start}
        while todo:
            places, words, sleepers = todo.pop()
            ended = moved = 0
            for rank in range(self.ranks):
                local = self._locals[rank][places[rank]]
                if local.operation[0] == "end":
                    ended += 1
                    continue
                if rank in sleepers:
                    continue
                moved += 1
                reached = self._do(rank, places, words, sleepers)
                if reached not in visited:
                    visited.add(reached)
                    todo.append(reached)
            if not moved and ended < self.ranks:
                raise WrongError(f"rank {sorted(sleepers)} sleeps for ever")
        return len(visited)

    def _do(self, rank: int, places: Any, words: tuple[int, ...], sleepers: frozenset[int]) -> Any:
        """One step of a rank, and the moves of data and the loads of its own words behind it."""
        number = places[rank]
        while True:
            local = self._locals[rank][number]
            name, *arguments = local.operation
            answer: Any = 0
            if name in ("load_acquire", "_load_sleep"):
                answer = self._load(words, arguments[0])
            elif name in ("store_release", "_store_sleep"):
                words = self._stored(words, *arguments)
            elif name == "_futex" and arguments[2] == flags.WAIT:
                if self._load(words, arguments[1]) == 1 and rank not in sleepers:
                    return (*places[:rank], number, *places[rank + 1 :]), words, sleepers | {rank}
                answer = -1
            elif name == "_futex":
                sleepers -= {arguments[1] // SEGMENT - 1}
            elif name in MOVES and not local.looked:
                self._look(rank, local)
                local.looked = True
            number = self._step(rank, number, answer)
            name, *arguments = self._locals[rank][number].operation
            own = name == "load_acquire" and arguments[0] // SEGMENT == rank + 1
            if not own and name not in MOVES:
                return (*places[:rank], number, *places[rank + 1 :]), words, sleepers

    def _load(self, words: tuple[int, ...], address: int) -> int:
        place = self._places.setdefault(address, len(self._places))
        return words[place] if place < len(words) else 0

    def _stored(self, words: tuple[int, ...], address: int, value: int) -> tuple[int, ...]:
        """The words with one changed; zeros at the end are left out, so that equal memories are equal."""
        place = self._places.setdefault(address, len(self._places))
        changed = [*words, *[0] * (place + 1 - len(words))]
        changed[place] = value
        while changed and not changed[-1]:
            changed.pop()
        return tuple(changed)

    def _look(self, rank: int, local: _Local) -> None:
        """Whether this rank has seen by itself that it may read and write where it does."""
        name, *arguments = local.operation
        to, sources = MOVES[name](*arguments)
        stage, kind, piece = self._stage(rank, local)
        seen = dict(local.seen)

        def has(owner: int, word: int, count: int) -> bool:
            return owner == rank or seen.get(self._bases[owner] + word, 0) >= count

        for address in (to, *sources):
            owner = address // SEGMENT - 1
            if not 0 <= owner < self.ranks:
                continue  # a tensor, which is this rank's
            assert (address % SEGMENT - segments.DATA) // self._cell_bytes == piece % self.cells
            if address == to and owner != rank:
                raise WrongError(f"rank {rank} writes into the segment of rank {owner}")
            if address == to and not all(has(r, segments.TAKEN, piece + 1 - self.cells) for r in range(self.ranks)):
                raise WrongError(f"rank {rank} writes piece {piece} where another may read the one before")
            summed = stage == "_take" and kind in (ring.ALL_REDUCE, ring.TWO_SHOT)
            word = segments.SUMMED if summed else segments.SENT
            if address != to and not has(owner, word, piece + 1):
                raise WrongError(f"rank {rank} reads piece {piece} of rank {owner} before it is there")

    def _stage(self, rank: int, local: _Local) -> tuple[str, int, int]:
        """The stage that a rank is in, the kind of collective, and the number of the piece."""
        program: Any = self._program(rank)
        next(program)
        for given in local.answers:
            program.send(given)
        frames = {frame.f_code.co_name: frame.f_locals for frame in _frames(program)}
        stage = next(name for name in ("_send", "_sum", "_take") if name in frames)
        there = frames["advance"]
        return stage, there["kind"], there["first"] + there["number"]


def _frames(program: Any) -> Iterator[Any]:
    while program is not None and hasattr(program, "gi_frame"):
        yield program.gi_frame
        program = program.gi_yieldfrom


def _place(program: Any) -> tuple[Any, ...]:
    return tuple(
        (frame.f_code.co_name, frame.f_lasti, *(_frozen(name, value) for name, value in frame.f_locals.items()))
        for frame in _frames(program)
    )


def _frozen(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return name, *(_frozen("", part) for part in value)
    return name, value if isinstance(value, (int, str)) else 0
