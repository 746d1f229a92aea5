"""Parameters that are unfrozen while a model trains, where they cannot be averaged, or ranks differ in it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastreduce import MismatchError, ReducerError, SettingError, TensorError, TransportError
from fastreduce.run.contestants import why_fixed
from tests.ddp.test_thawed import half_frozen, one_step
from tests.support.models import (
    Branches,
    assert_same_bits,
    average_of_whole,
    grads_of,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool, run_ranks


def test_another_backward_through_an_older_forward_that_left_something_out_ends_as_without_it(ranks2: RankPool):
    ranks2.run(_left_out)


def _left_out(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen())
    output = ddp(whole_batch(rank, 0, 3, 4), "ab")
    output.sum().backward(retain_graph=True)
    ddp.module.trunk.requires_grad_(True)
    with ddp.no_sync():
        ddp(whole_batch(rank, 1, 3, 4)).sum().backward()
    with pytest.raises(ReducerError, match=r"first gradients for 'c.weight' and further ones for 'a.weight'"):
        output.sum().backward()


def test_where_some_have_joined_and_under_a_hook_it_is_an_error(ranks2: RankPool):
    ranks2.run(_refused)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen())
    ddp.register_comm_hook(None, allreduce_hook)
    one_step(ddp, rank, 0)
    ddp.module.trunk.requires_grad_(True)
    with pytest.raises(ReducerError, match=rf"rank {rank}: parameter 'trunk.weight' was .*unfrozen"):
        one_step(ddp, rank, 1)
    with pytest.raises(SettingError, match=r"a communication hook averages, .* without 'trunk.bias'"):
        ddp.reducer.add([ddp.module.trunk.bias], ["trunk.bias"])
    ddp = wrap("ours", half_frozen())
    with ddp.join():
        for step in range(1 + rank):
            ddp.module.trunk.requires_grad_(step > 0)
            if step == 0:
                one_step(ddp, rank, step)
            else:
                with pytest.raises(ReducerError, match=rf"rank {rank}: parameter 'trunk.weight' was .*unfrozen"):
                    one_step(ddp, rank, step)


def test_ranks_that_differ_in_it_are_told(ranks2: RankPool):
    ranks2.run(_differing)


def _differing(rank: int, world_size: int) -> None:
    model = half_frozen()
    model.a.requires_grad_(False)
    ddp = wrap("ours", model)
    one_step(ddp, rank, 0)
    (model.a if rank else model.trunk).requires_grad_(True)
    with pytest.raises(MismatchError, match=r"ranks differ in parameter '\w+.weight' from step 1 on"):
        one_step(ddp, rank, 1)
    model.requires_grad_(True)
    for step in (1, 2):
        one_step(ddp, rank, step)
        expected = average_of_whole(lambda: whole_(Branches()), step, range(world_size))
        assert_same_bits(grads_of(model), expected, f"rank {rank}, step {step}")


def test_a_dtype_that_one_rank_cannot_average_is_an_error_of_the_next_forward_on_all(ranks2: RankPool):
    ranks2.run(_unsupported_on_one)


def _unsupported_on_one(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen())
    if rank == 1:
        ddp.module.trunk.to(torch.float8_e5m2)
    ddp.module.trunk.requires_grad_(True)
    ddp.set_compression("fp16")
    with pytest.raises(TensorError if rank == 1 else MismatchError, match=r"'trunk.weight' is torch.float8_e5m2"):
        one_step(ddp, rank, 0)
    assert str(ddp.compression) == "fp16"


def test_a_module_that_takes_the_place_of_the_wrapped_one_is_looked_at_too(alone: None):
    ddp = wrap("ours", half_frozen())
    for step in range(20):
        one_step(ddp, 0, step)
    ddp.module = Branches()
    with pytest.raises(ReducerError, match=r"rank 0: parameter 'trunk.weight' was added, replaced"):
        one_step(ddp, 0, 20)


def test_a_rank_that_alone_unfreezes_is_told_what_is_to_be_done():
    run_ranks(_alone, 2)


def _alone(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen())
    for step in range(2):
        one_step(ddp, rank, step)
    ddp.module.trunk.requires_grad_(rank == 0)
    expected = r"'trunk.weight' too: every rank is to unfreeze the same" if rank == 0 else "Rank 0 is in another call"
    with pytest.raises(TransportError, match=expected):
        one_step(ddp, rank, 2)


def test_a_comparison_by_turns_ends_with_the_reason(alone: None):
    ddp = wrap("ours", half_frozen())
    assert why_fixed(ddp) == ""
    ddp.module.trunk.requires_grad_(True)
    assert "unfreezes parameters" in why_fixed(ddp)


def test_what_a_state_puts_in_the_place_of_a_part_that_is_left_out_by_turns_is_found_at_once(alone: None):
    model = wrap("ours", Branches())
    for step in range(20):
        model(torch.ones(2, 4), "abc"[: 2 + step % 2]).sum().backward()
    model.load_state_dict({"module.c.weight": torch.zeros(4, 4)}, strict=False, assign=True)
    with pytest.raises(ReducerError, match=r"parameter 'c\.weight' was added, replaced"):
        model(torch.ones(2, 4), "abc").sum().backward()
