"""Hypothesis draws programs: models, and how they are trained."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.random_models import DTYPES, FP32_ONLY, KINDS, Block, Program, synced_backwards

LETTERS = "abcdef"


@st.composite
def _blocks(draw: st.DrawFn, static: bool) -> tuple[Block, ...]:
    """Block 0 is plain: backward then reaches a parameter on every rank (where it does not, torch's class hangs)."""
    blocks = [Block("linear")]
    for position in range(1, draw(st.integers(2, len(LETTERS)))):
        checkpointed = draw(st.sampled_from(["", "", "", "hooks", "reentrant" if static else "hooks"]))
        earlier = draw(st.integers(0, position - 1))
        if draw(st.integers(0, 4)) == 0:
            first = earlier if blocks[earlier].module_of is None else blocks[earlier].module_of
            blocks.append(Block(blocks[first].kind, blocks[first].dtype, module_of=first, checkpoint=checkpointed))
            continue
        kind = draw(st.sampled_from(list(KINDS)))
        dtype = "float32" if kind in FP32_ONLY else draw(st.sampled_from(DTYPES))
        tied = None
        if kind == "linear" and blocks[earlier].kind == "linear" and draw(st.booleans()):
            tied = earlier
            dtype = blocks[earlier].dtype
        frozen = draw(st.integers(0, 5)) == 0 and tied is None
        blocks.append(Block(kind, dtype, weight_of=tied, frozen=frozen, checkpoint=checkpointed))
    return tuple(blocks)


# Patterns of one micro-step: forwards `f` and backwards `b` of two batches, `r` a backward that keeps the graph.
PATTERNS = ("f0 b0", "( f0 b0 )", "( f0 ) b0", "f0 ( b0 )", "f0 r0 b0", "( f0 b0 ) f1 b1")
WITH_TWO_FORWARDS = ("f0 f1 b0 b1", "f0 f1 b1 b0", "( f0 ) f1 b1 b0", "( f0 ) f1 b0 b1", "f0 ( f1 ) b1 b0")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws around what torch's class itself cannot do; the comments say where."""
    mode = draw(st.sampled_from(["search", "search", "all used", "static"]))
    static = mode == "static"
    blocks = draw(_blocks(static))
    letters = LETTERS[: len(blocks)]
    optional = st.sets(st.sampled_from(letters[1:])).map(lambda used: "a" + "".join(sorted(used)))

    def use() -> str:
        return "/".join(draw(optional) for _ in range(3)) if mode == "search" else draw(constant)

    constant = st.just(draw(optional) if static else letters)
    ops: list[str] = []
    count = 0
    two_forwards = False
    for _ in range(draw(st.integers(2, 4))):
        for _ in range(draw(st.integers(1, 2))):
            # With a static graph each forward has its own backward, and torch fails an assertion of its own
            # where the very first one is not reduced.
            patterns = PATTERNS if static else PATTERNS + WITH_TWO_FORWARDS
            pattern = "f0 b0" if static and not ops else draw(st.sampled_from(patterns))
            two_forwards |= pattern in WITH_TWO_FORWARDS
            # Torch's search looks at the latest forward only: forwards that are open together use the same blocks.
            common = use() if pattern in WITH_TWO_FORWARDS else ""
            for op in pattern.split():
                if op in "()":
                    ops.append(op)
                else:
                    name = f"{op[0]}{count + int(op[1])}"
                    ops.append(f"{name}:{common or use()}" if op[0] == "f" else name)
            count += 2
        # Where the last backward was local, torch expects to find the gradients it left.
        may_drop = mode != "search" or synced_backwards(ops)[-1]
        if draw(st.integers(0, 3)) == 0:
            ops.append(f"e{count}:{use()}")
        ops += ["s", *draw(st.sampled_from([["z"], ["z"], ["Z"], []] if may_drop else [["Z"], []]))]
    options: dict[str, Any] = {
        "bucket_cap_mb": draw(st.sampled_from([1e-6, 0.0002, 0.002, 25])),
        "gradient_as_bucket_view": draw(st.booleans()),
    }
    if static:
        options["static_graph"] = True
    # Rank 0's buffers are written before each forward: autograd refuses that between a forward and its backward.
    if draw(st.booleans()) or two_forwards:
        options["broadcast_buffers"] = False
    # Adam does not take lazily conjugated gradients.
    optimizers = ["SGD"] if any(block.kind == "complex" for block in blocks) else ["SGD", "AdamW"]
    return Program(
        blocks,
        " ".join(ops),
        draw(st.sampled_from(["tensor", "dict", "tuple"])),
        draw(st.sampled_from(optimizers)),
        mode == "search",
        options,
    )
