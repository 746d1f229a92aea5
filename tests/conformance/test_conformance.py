"""torch's own DDP tests with our class: a quick selection. `make conformance` runs all, beside torch's class."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.known_differences import KNOWN_DIFFERENCES, WITHOUT_BASELINE
from tests.conformance.run import Server

QUICK = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_comm_hook_logging",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_join_model_equivalence",
    "test_ddp_shared_grad_acc_unused_params",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
]
OTHERS = [
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_ignore_params_arg",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_uneven_input_exception",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_static_graph_api_cpu",
    "test_stateless_api_with_ddp",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.parametrize("test", [*QUICK, *(pytest.param(test, marks=pytest.mark.long) for test in OTHERS)])
def test_passes_with_our_class(server: Server, test: str) -> None:
    result = server.run(test, "fastreduce", timeout=60)
    assert result.outcome == "passed", result.message


def test_failure_is_reported(server: Server) -> None:
    result = server.run("test_ddp_device", "torch", timeout=60)
    assert result.outcome == "failed" and "AssertionError" in result.message


def test_lists_agree(server: Server) -> None:
    assert KNOWN_DIFFERENCES and WITHOUT_BASELINE  # docs/sharp-bits.md could be read
    assert not KNOWN_DIFFERENCES.keys() & WITHOUT_BASELINE.keys()
    assert not {*QUICK, *OTHERS} & (KNOWN_DIFFERENCES.keys() | WITHOUT_BASELINE.keys())
    assert len(set(server.tests) - WITHOUT_BASELINE.keys()) > 50
