"""Which backwards are reduced, and what becomes of parameters without a gradient, beside torch's class."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import errors
from tests.support.each_setting import EACH_SETTING, PICKED
from tests.support.models import (
    EXACT,
    SETTINGS,
    Boom,
    Branches,
    Grads,
    Heads,
    assert_same_bits,
    bits,
    equal_on_all,
    grads_of,
    play,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import OVER_HOSTS, RankPool

# When a backward is reduced


def _play_both(rank: int, world_size: int, ops: str, options: dict[str, Any], forward: dict[str, Any]) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        mine = {k: v for k, v in options.items() if not k.startswith("torch:")}
        if kind == "torch":
            mine.update({k.removeprefix("torch:"): v for k, v in options.items() if k.startswith("torch:")})
        seen[kind] = play(wrap(kind, whole_(Branches()), **mine), ops.split(), rank, **forward)
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}: {ops}")
    return seen["ours"]


def _synced(results: list[list[Grads]]) -> list[bool]:
    """For every backward, whether all ranks ended it with the same gradients."""
    return [
        all(torch.equal(bits(a), bits(b)) for other in seen[1:] for a, b in _pairs(seen[0], other))
        for seen in zip(*results, strict=True)
    ]


def _pairs(a: Grads, b: Grads) -> list[tuple[Tensor, Tensor]]:
    assert [g is None for g in a.values()] == [g is None for g in b.values()]
    return [(x, y) for x, y in zip(a.values(), b.values(), strict=True) if x is not None and y is not None]


NO_SYNC = {
    "forward and backward outside": ("f1 b1 z f2 b2", "11"),
    "forward and backward inside": ("( f1 b1 ) z ( f2 b2 )", "00"),
    "forward inside, backward outside": ("f1 b1 z ( f2 ) b2", "10"),
    "forward outside, backward inside": ("f1 b1 z f2 ( b2 )", "11"),
    "forward outside, backward inside, in the first step": ("f2 ( b2 )", "1"),
    "three micro steps, then a synced one": ("( f1 b1 f2 b2 f3 b3 ) f4 b4 z ( f5 b5 ) f6 b6", "000101"),
    "a synced step, then a local one on top, then a synced one": ("f1 b1 ( f2 b2 ) f3 b3", "101"),
    "nested": ("( ( f1 b1 ) f2 b2 ) f3 b3", "001"),
    "entered before the first forward": ("( f1 b1 ) f2 b2 ( f3 ) b3", "010"),
    "require_backward_grad_sync set by hand": ("- f1 b1 + f2 b2 z - f3 + b3 z f4 - b4 +", "0101"),
    "accumulated without no_sync": ("f1 b1 f2 b2 f3 b3", "111"),
    "zeroed in place": ("f1 b1 Z ( f2 b2 ) f3 b3 Z f4 b4", "1011"),
    "two forwards, two backwards": ("f1 b1 z f2 f3 b2 b3", "110"),
    "a local and a synced forward, backwards in the other order": ("f1 b1 z ( f2 ) f3 b3 b2", "110"),
}


@pytest.mark.parametrize("order", NO_SYNC)
def test_no_sync_is_torchs_in_every_order(ranks_views: tuple[RankPool, bool], order: str):
    ranks, views = ranks_views
    ops, synced = NO_SYNC[order]
    results = ranks.run(_play_both, ops, {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-6}, {})
    assert _synced(results) == [s == "1" for s in synced]


@OVER_HOSTS
def test_the_second_backward_of_one_forward_stays_local_as_torchs(ranks: RankPool, views: bool):
    results = ranks.run(_play_both, "f1 r1 b1 z f2 r2 z b2 f3 b3", {"gradient_as_bucket_view": views}, {})
    assert _synced(results) == [True, False, True, False, True]


@OVER_HOSTS
def test_a_backward_of_the_bare_module_stays_local_and_takes_no_part(ranks: RankPool):
    results = ranks.run(_play, "m1 b1 z f2 b2 z m3 b3 z f4 b4", {})
    assert _synced(results) == [False, True, False, True]
    for rank, seen in enumerate(results):
        bare = whole_(Branches())
        (bare(whole_batch(rank, 3, 3, 4)).sum() * EXACT).backward()
        assert_same_bits(seen[2], grads_of(bare))


def _play(rank: int, world_size: int, ops: str, options: dict[str, Any]) -> list[Grads]:
    return play(wrap("ours", whole_(Branches()), **options), ops.split(), rank)


def test_a_bare_backward_between_forward_and_backward_equals_torch(ranks2: RankPool):
    ranks2.run(_play_both, "f1 b1 z m2 f3 b3 z f4 b4", {}, {})


class Hides(Branches):
    """Returns no tensor."""

    loss: Tensor

    def forward(self, x: Tensor, use: str = "abc") -> None:  # type: ignore[override]
        self.loss = super().forward(x, use).sum() * EXACT


def _within_a_hook(rank: int, world_size: int) -> list[Grads]:
    seen: dict[str, list[Grads]] = {}
    for kind in ("torch", "ours"):
        model, seen[kind] = wrap(kind, whole_(Hides()), bucket_cap_mb=1e-6), []
        for step in range(3):
            model.zero_grad()
            model(whole_batch(rank, step, 3, 4))
            outer = torch.ones(1, requires_grad=True) * 2
            outer.register_hook(lambda _, model=model: model.module.loss.backward())
            outer.backward()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    return seen["ours"]


def test_a_backward_within_a_hook_of_another_one_is_reduced_as_torchs(ranks2: RankPool):
    """The forward returns nothing, and yet the end is known: a hook's own backward is no part of that around it."""
    equal_on_all(ranks2.run(_within_a_hook, timeout=60))


def _take_out(parameter: Tensor) -> None:
    parameter.grad = None


def _copy(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def _fill(parameter: Tensor) -> None:
    parameter.grad = torch.full_like(parameter, 7)


BEHIND = {"taken out": _take_out, "copied": _copy, "another": _fill}


def _changed_behind(rank: int, world_size: int, how: str, setting: str, transposed: bool) -> list[Grads]:
    """The first layer's hook changes the last one's `.grad`, whose bucket is under way by then."""
    seen: dict[str, list[Grads]] = {}
    for kind in ("torch", "ours") if setting == "none" else ("ours", "undisturbed"):
        net = whole_(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
        last = net[3].weight
        if transposed:
            last.data = last.data.t().contiguous().t()
        options = {} if kind == "torch" else {"compression": setting}
        model, seen[kind] = wrap(kind.replace("undisturbed", "ours"), net, bucket_cap_mb=1e-6, **options), []
        for step in range(4):
            model.zero_grad()
            if step == 2 and kind != "undisturbed":
                net[0].weight.register_post_accumulate_grad_hook(lambda _, last=last: BEHIND[how](last))
            model(whole_batch(rank, step, 3, 4)).sum().backward()
            seen[kind].append(grads_of(net))
    ours, other = (seen[kind] for kind in sorted(seen))
    assert_same_bits(ours, other, f"rank {rank}")
    return ours


@pytest.mark.parametrize(
    ("transposed", "setting", "how"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[1] != "none" or (case[0] and case[2] != "copied")))
        for case in itertools.product([False, True], ["none", "fp16"], BEHIND)
    ],
)
def test_a_hook_that_changes_a_grad_behind_its_buckets_launch_changes_no_average(
    ranks2: RankPool, how: str, setting: str, transposed: bool
):
    equal_on_all(ranks2.run(_changed_behind, how, setting, transposed))


class Keeps(Branches):
    """Returns a tensor of its own with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.trunk.weight * 2

    def forward(self, x: Tensor, use: str = "abc") -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, use), self.kept


def _returned_again(rank: int, world_size: int) -> int:
    model = wrap("ours", Keeps())
    for step in range(4):
        loss, kept = model(whole_batch(rank, step, 3, 4))
        loss.sum().backward()
    return len(kept._backward_hooks)


def test_a_tensor_that_every_forward_returns_has_one_hook(ranks2: RankPool):
    assert ranks2.run(_returned_again) == [1, 1]


# Parameters without a gradient


UNUSED = {
    "the same on all ranks": ("f1:a b1 z f2:ab b2 z f3:b b3 f4:ab b4", None),
    "kept from the last step": ("f1:abc b1 f2:a b2 f3:ac b3 Z f4:b b4", None),
    "other ones on other ranks": ("f1:! b1 z f2:! b2 f3:! b3 Z f4:! b4", ("a", "b", "ac")),
    "on one rank only": ("f1:! b1 z f2:! b2 f3:! b3", ("abc", "ab", "abc")),
    "used under no_sync only": ("( f1:ab b1 ) f2:b b2 z ( f3:a b3 ) f4:b b4 z f5:b b5", None),
    "used under no_sync by one rank only": ("( f1:! b1 ) f2:b b2 z ( f3:! b3 ) f4:b b4 f5:b b5", ("ab", "b", "b")),
    "used under no_sync only, and zeroed in place": ("f1:abc b1 Z ( f2:ab b2 ) Z f3:c b3", None),
    "from the third step on": ("f1:a b1 z f2:a b2 z f3:abc b3 z f4:abc b4 z f5:a b5", None),
    "stale and unused, then used by one rank": ("f1:abc b1 f2:a b2 f3:! b3 f4:a b4", ("abc", "a", "a")),
}


@pytest.mark.parametrize("case", UNUSED)
def test_unused_parameters_end_as_with_torchs_search(ranks_views: tuple[RankPool, bool], case: str):
    _check_unused(*ranks_views, case, ours_finds=False)


SOME_UNUSED = ("kept from the last step", "other ones on other ranks", "used under no_sync only, and zeroed in place")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case not in SOME_UNUSED)) for case in UNUSED]
)
def test_find_unused_parameters_is_accepted_and_changes_nothing(ranks_views_crossed: tuple[RankPool, bool], case: str):
    _check_unused(*ranks_views_crossed, case, ours_finds=True)


def _check_unused(ranks: RankPool, views: bool, case: str, ours_finds: bool) -> None:
    ops, by_rank = UNUSED[case]
    options = {
        "gradient_as_bucket_view": views,
        "bucket_cap_mb": 1e-6,
        "find_unused_parameters": ours_finds,
        "torch:find_unused_parameters": True,
    }
    results = ranks.run(_play_unused, ops, by_rank, options)
    assert all(_synced(results)[i] for i in range(len(results[0])) if "(" not in ops)


def _play_unused(
    rank: int, world_size: int, ops: str, by_rank: tuple[str, ...] | None, options: dict[str, Any]
) -> list[Grads]:
    if by_rank:
        ops = ops.replace(":!", f":{by_rank[rank]}")
    return _play_both(rank, world_size, ops, options, {})


THROWN_AWAY = {
    "before the forward": "f1:abc b1 z ( f2:ab b2 f3:b b3 ) z f4:c b4",
    "between forward and backward": "f1:abc b1 z ( f2:ab b2 f3:b b3 ) f4:c z b4",
}


BETWEEN = ("bf16:accumulate=wire", "int8:error_feedback")


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        pytest.param(
            case,
            setting,
            marks=[pytest.mark.long] * (setting not in PICKED or (setting in BETWEEN) != case.startswith("between")),
        )
        for case in THROWN_AWAY
        for setting in SETTINGS
    ],
)
def test_what_was_used_and_thrown_away_is_not_used(ranks_views: tuple[RankPool, bool], case: str, setting: str):
    """The reduced backward leaves it alone, as if those before had not been."""
    ranks, views = ranks_views
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-6, "compression": setting}
    with_it = ranks.run(_play, THROWN_AWAY[case], options)
    without = ranks.run(_play, "f1:abc b1 z f4:c b4", options)
    for some, others in zip(with_it, without, strict=True):
        assert {name for name, grad in some[-1].items() if grad is None} == {"a.weight", "a.bias", "b.weight", "b.bias"}
        assert_same_bits(some[-1], others[-1])


@pytest.mark.parametrize("setting", EACH_SETTING)
def test_used_flags_travel_under_every_setting(ranks_views: tuple[RankPool, bool], setting: str):
    ranks, views = ranks_views
    results = ranks.run(_flags, setting, views)
    equal_on_all([seen for seen, _ in results])
    seen, stale = results[0]
    first, second = seen
    assert [name for name, grad in first.items() if grad is None] == ["c.weight"]
    assert all(grad is not None for grad in second.values())
    for _, stale in results:
        assert stale == 7.0


def _flags(rank: int, world_size: int, setting: str, views: bool) -> tuple[list[Grads], float]:
    model = wrap("ours", Branches(), compression=setting, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    use = "a" if rank == 0 else "b"
    seen = []
    for step, name in enumerate((use, use + "c" if rank == 0 else use)):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4), use=name).sum().backward()
        seen.append(grads_of(model.module))
    for parameter in model.module.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(7.0)
    model(whole_batch(rank, 3, 3, 4), use=use).sum().backward()
    return seen, float(model.module.c.weight.grad.mean())


@OVER_HOSTS
@pytest.mark.parametrize("find", [False, True])
def test_losses_over_disjoint_parts_of_one_forward_may_have_a_backward_each(ranks: RankPool, find: bool):
    for seen in ranks.run(_two_parts, find):
        for step, grads in enumerate(seen):
            model = whole_(Heads())
            for rank in range(ranks.world_size):
                outputs = model(whole_batch(rank, step, 3, 4))
                ((outputs["first"] + outputs["rest"][0]).sum() * EXACT).backward()
            average = {name: g / ranks.world_size for name, g in grads_of(model).items() if g is not None}
            assert_same_bits(grads, average, f"step {step}")


def _two_parts(rank: int, world_size: int, find: bool) -> list[Grads]:
    seen: dict[str, list[Grads]] = {}
    for kind in ("ours",) if find else ("torch", "ours"):  # torch's search takes one backward only
        model, seen[kind] = wrap(kind, whole_(Heads()), find_unused_parameters=find), []
        for step in range(4):
            model.zero_grad()
            outputs = model(whole_batch(rank, step, 3, 4))
            (outputs["first"].sum() * EXACT).backward(retain_graph=find)
            (outputs["rest"][0].sum() * EXACT).backward()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen.get("torch", seen["ours"]))
    return seen["ours"]


def test_a_second_backward_with_first_and_further_gradients_is_refused(ranks2: RankPool):
    for message in ranks2.run(_overlapping):
        assert "a.weight" in message and "trunk" in message and "Sum the losses" in message


class Three(nn.Module):
    """Heads of their own, as large as each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x).sum() for head in self.heads]


def _parts(
    rank: int, world_size: int, parts: list[str], timeout: float, before: str = "012"
) -> tuple[list[Grads], str]:
    """Backwards over sums of heads: those `before`, then those of this rank, then all; until an error."""
    seconds = datetime.timedelta(seconds=timeout)
    group = dist.new_group(range(world_size), timeout=seconds)
    model, seen = wrap("ours", whole_(Three()), bucket_cap_mb=1e-6, process_group=group), []
    for step, sums in enumerate((before, parts[rank], "012")):
        model.zero_grad()
        heads = model(whole_batch(rank, step, 3, 4))
        for chosen in sums.split():
            try:
                (sum(heads[int(i)] for i in chosen) * EXACT).backward()
            except (errors.ReducerError, errors.TransportError) as error:
                return seen, str(error)
        seen.append(grads_of(model.module))
    return seen, ""


@pytest.mark.long
def test_a_second_backward_that_brings_first_gradients_on_some_ranks_only_is_an_error(ranks2: RankPool):
    """The others' next step would take them for its own."""
    (before, error), (others, theirs) = ranks2.run(_parts, ["01 2", "01"], 4.0, timeout=60)
    assert len(before) == 1 and len(others) == 2
    assert error.startswith("rank 0: a second backward through one forward brought first gradients for 'heads.2.")
    assert "on all ranks it must bring some, or on none: rank 1 did not come within 4 s" in error
    assert "Rank 0" in theirs


@pytest.mark.parametrize(
    ("before", "parts", "raise_"),
    [
        pytest.param("012", ["0 12", "01 2"], [True, False], marks=pytest.mark.long),
        ("012", ["0 1 2", "0 2 1"], [True, True]),
        pytest.param("0", ["0 12", "01 2"], [True, False], marks=pytest.mark.long),
    ],
    ids=["in the first backward", "in a second one", "behind a step without them"],
)
def test_a_first_gradient_that_comes_after_the_others_were_averaged_is_an_error(
    ranks2: RankPool, before: str, parts: list[str], raise_: list[bool]
):
    found = ranks2.run(_parts, parts, 4.0, before, timeout=60)
    for (_, error), raises in zip(found, raise_, strict=True):
        assert ("this rank's first gradient for 'heads." in error) == raises


def _overlapping(rank: int, world_size: int) -> str:
    """Both losses go through the trunk, only the second one through branch a: torch's class cannot do it either."""

    class Split(Branches):
        def forward(self, x: Tensor, use: str = "") -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.trunk(x)
            return self.b(x), self.a(x)

    model = wrap("ours", whole_(Split()))
    first, second = model(whole_batch(rank, 0, 3, 4))
    first.sum().backward(retain_graph=True)
    with pytest.raises(errors.ReducerError) as caught:
        second.sum().backward()
    return str(caught.value)


class _WithoutGradient(torch.autograd.Function):
    """A product whose backward leaves the factor out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class _Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _WithoutGradient.apply(self.layer(x), self.factor)
        return found


def test_a_parameter_reached_without_a_gradient_keeps_none_where_torch_has_zeros(ranks2: RankPool):
    for found in ranks2.run(_reached_without_gradient):
        assert found == {"torch": "zeros", "ours": "None"}


def _reached_without_gradient(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for kind in ("torch", "ours"):
        model = wrap(kind, _Factor())
        model(torch.randn(3, 4)).square().mean().backward()
        grad = model.module.factor.grad
        found[kind] = "None" if grad is None else "zeros" if not grad.any() else "others"
        assert model.module.layer.weight.grad.any()
    return found


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, boom: bool = False) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(Boom.apply(x, boom))  # type: ignore[no-untyped-call]


def test_what_a_second_backward_brought_before_it_raised_is_averaged_with_the_next_one(ranks2: RankPool):
    assert_same_bits(*ranks2.run(_second_raises))


def _second_raises(rank: int, world_size: int) -> Grads:
    model, x = wrap("ours", _TwoHeads()), torch.full((2, 4), rank + 1.0, requires_grad=True)
    first, second = model(x, boom=True)
    first.sum().backward()
    with pytest.raises(ValueError, match="boom"):
        second.sum().backward()
    model(x)[0].sum().backward()
    return grads_of(model.module)


def test_a_third_backward_over_what_the_second_one_brought_stays_local(ranks2: RankPool):
    ranks2.run(_third_stays_local)


def _third_stays_local(rank: int, world_size: int) -> None:
    model = wrap("ours", _TwoHeads())
    first, second = model(torch.ones(2, 4))
    first.sum().backward()
    ((rank + 1) * second.sum()).backward(retain_graph=True)
    second.sum().backward()
    assert (model.module.second.bias.grad == 3.0 + 2.0).all()  # the average of 2 and 4, and what is this rank's
