"""Logging data, introspection and TORCH_DISTRIBUTED_DEBUG, with torch's class and with ours, on the same ranks."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce.ddp.reducer import CPP_ONLY, TorchReducer
from tests.support.models import (
    EXACT,
    Branches,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool

KINDS = ("torch", "ours")


# Logging data


def _logged(rank: int, world_size: int, find: bool) -> dict[str, list[dict[str, Any]]]:
    """Logging data after construction and before some steps; where torch searches, its buckets are ours at once."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        model = wrap(kind, whole_(Branches()), find_unused_parameters=find, bucket_cap_mb=64 / 2**20)
        model._set_ddp_runtime_logging_sample_rate(4)
        seen[kind] = [model._get_ddp_logging_data()]
        for step in range(14):
            model(whole_batch(rank, step, 3, 4), use="abc" if step < 12 or not find else "a").sum().backward()
            if step in (0, 1, 5, 11, 13):
                seen[kind].append(model._get_ddp_logging_data())
    return seen


TIMES = {f"{what}_time" for what in ("forward_compute", "backward_compute", "backward_comm")}
TIMES |= {"backward_compute_comm_overlap_time"}


@pytest.mark.parametrize("find", [False, True])
def test_logging_data_has_torchs_keys_and_values(ranks2: RankPool, find: bool):
    for seen in ranks2.run(_logged, find):
        for ours, torchs in zip(seen["ours"], seen["torch"], strict=True):
            assert not torchs.keys() - ours.keys()
            for key, value in torchs.items():
                if (
                    key == "bucket_sizes"
                ):  # torch begins with one bucket, unless it searches; there its order is another
                    assert sorted(value.split(", ")) == sorted(ours[key].split(", ")) or (not find and "," not in value)
                elif key in ("has_rebuilt_buckets", "num_buckets_reduced") or key.startswith(("rebuilt", "prev_")):
                    pass  # compared below: torch never rebuilds where it searches
                elif key == "unused_parameter_size" or "_time" not in key:
                    assert ours[key] == value, key
        ours, torchs = seen["ours"][-1], seen["torch"][-1]
        assert ours["iteration"] == 12
        assert {k for k in ours if k in TIMES} == TIMES and all(ours[f"avg_{k}"] >= 0 for k in TIMES)
        if not find:
            for key in ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "has_rebuilt_buckets"):
                assert ours[key] == torchs[key], key
            assert ours["prev_iteration_grad_ready_order_indices"] == torchs["prev_iteration_grad_ready_order_indices"]
        assert ours["forward_compute_time_start"] <= ours["backward_compute_time_start"]
        assert ours["backward_compute_time_start"] <= ours["backward_comm_time_start"] <= ours["backward_comm_time_end"]


def test_times_are_taken_in_the_first_ten_steps_and_then_at_the_sample_rate(alone: None):
    model, sampled = wrap("ours", nn.Linear(4, 4)), []
    for step in range(1, 301):
        model(torch.ones(1, 4)).sum().backward()
        if model.logger._times is not None:
            sampled.append(step)
    assert sampled == [*range(1, 11), 100, 200, 300]


def test_times_of_one_rank_and_of_steps_without_a_backward_are_times(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    for step in range(6):
        loss = model(torch.ones(1, 4)).sum()
        if step in (0, 1, 4):
            loss.backward()
        data = model._get_ddp_logging_data()
        assert all(data[name] >= 0 for name in data.keys() & TIMES), step
    assert data["backward_compute_time_end"] <= data["backward_comm_time_start"] <= data["backward_comm_time_end"]


def _pause_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(lambda _: time.sleep(0.02))


def test_communication_begins_with_the_first_bucket(alone: None):
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrap("ours", body, compression="int8", bucket_cap_mb=1e-5)
    body[0].register_forward_hook(_pause_in_backward)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
    assert model._get_ddp_logging_data()["backward_compute_comm_overlap_time"] >= 0.02e9


# Introspection


def test_what_only_the_cpp_reducer_has_is_an_attribute_error_that_says_what_to_use(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    cpp = {name for kind in (dist.Reducer, dist.Logger) for name in dir(kind) if not name.startswith("__")}
    for name, instead in CPP_ONLY.items():
        assert name in cpp and not hasattr(TorchReducer, name)
        with pytest.raises(AttributeError, match=r"only torch's C\+\+ reducer") as caught:
            getattr(model.reducer, name)
        assert instead in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = model.reducer.no_such_thing


def test_everything_else_of_the_cpp_reducer_and_logger_is_there(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    mixed_precision = {"_autograd_hook", "_set_mixed_precision_param_dtype"}
    for ours, kind in ((model.reducer, dist.Reducer), (model.logger, dist.Logger)):
        for name in dir(kind):
            if not name.startswith("__") and not name.startswith("_pybind11") and name not in mixed_precision:
                assert hasattr(ours, name) or name in CPP_ONLY, name


# TORCH_DISTRIBUTED_DEBUG


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((record.levelname, record.getMessage()))


def _debugged(rank: int, world_size: int, level: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    records, logger = _Records(), logging.getLogger("fastreduce")
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        model = wrap("ours", whole_(Branches()), bucket_cap_mb=64 / 2**20, **options)
        for step in range(12):
            model.zero_grad()
            use = "abc" if rank == 0 or step < 2 else "ab" if step % 2 else "a"
            (model(whole_batch(rank, step, 3, 4), use=use).sum() * EXACT).backward()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
        logger.removeHandler(records)
        logger.setLevel(logging.NOTSET)
    return records.texts


def test_debug_level_info_logs_the_buckets_when_they_are_built_and_rebuilt(ranks2: RankPool):
    for rank, texts in enumerate(ranks2.run(_debugged, "INFO", {})):
        assert [kind for kind, _ in texts] == ["INFO", "INFO"]
        (_, built), (_, rebuilt) = texts
        assert built.startswith(f"rank {rank}: buckets: 4 of 64, 80, 80, 80 bytes\nbucket 0: float32")
        assert rebuilt.startswith(f"rank {rank}: buckets were rebuilt: 4 of 64, 80, 80, 80 bytes\n")


def test_debug_level_detail_names_unused_parameters_once_a_set(ranks2: RankPool):
    first, second = ranks2.run(_debugged, "DETAIL", {})
    assert [kind for kind, _ in first] == ["INFO", "INFO"]
    warned = [text for kind, text in second if kind == "WARNING"]
    assert len(warned) == 2
    assert "rank 1: no gradient arrived for b.weight, b.bias, c.weight." in warned[0]
    assert "rank 1: no gradient arrived for c.weight." in warned[1]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_where_torch_allows_unused_parameters_nobody_is_warned(ranks2: RankPool, options: dict[str, bool]):
    for texts in ranks2.run(_debugged, "DETAIL", options):
        assert {kind for kind, _ in texts} == {"INFO"}


def test_without_a_debug_level_nothing_is_logged(ranks2: RankPool):
    assert ranks2.run(_debugged, "OFF", {}) == [[], []]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, 2, dtype=torch.float16).view(torch.complex32).squeeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.turn.to(torch.complex64) * x).abs().sum()


def _complex_halves(rank: int, world_size: int) -> None:
    seen = []
    for kind in KINDS:
        ddp = wrap(kind, Halves())
        for step in range(2):
            ddp.zero_grad()
            ddp(whole_batch(rank, step, 6)).backward()
        grad = ddp.module.turn.grad
        assert grad.dtype is torch.complex32
        seen.append((ddp._get_ddp_logging_data()["dtypes"], torch.view_as_real(grad).tolist()))
    assert seen[0] == seen[1]


def test_parameters_of_complex_halves_are_logged_and_averaged_as_by_torch(ranks2: RankPool):
    ranks2.run(_complex_halves)
