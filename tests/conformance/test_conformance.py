"""torch's own DDP tests with our class: a quick selection. `make conformance` runs all, beside torch's class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.known_differences import KNOWN_DIFFERENCES, WITHOUT_BASELINE
from tests.conformance.run import Server, judge

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
    result = server.run(test, "fastreduce", timeout=120)
    assert result.outcome == "passed", result.message


def test_failure_is_reported(server: Server) -> None:
    result = server.run("test_ddp_device", "torch", timeout=120)
    assert result.outcome == "failed" and "AssertionError" in result.message


def test_lists_agree(server: Server) -> None:
    assert KNOWN_DIFFERENCES and WITHOUT_BASELINE  # docs/sharp-bits.md could be read
    assert not KNOWN_DIFFERENCES.keys() & WITHOUT_BASELINE.keys()
    assert not {*QUICK, *OTHERS} & (KNOWN_DIFFERENCES.keys() | WITHOUT_BASELINE.keys())
    assert len(set(server.tests) - WITHOUT_BASELINE.keys()) > 50


SHARDED = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest

class TestOfThree(FSDPTest):
    def _train(self, mesh=None):
        model = fully_shard(torch.nn.Linear(4, 4).cuda(), mesh=mesh)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        self.assertEqual(model.bias.grad.full_tensor(), torch.full((4,), 2.0))
        return type(model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm).__name__

    @skip_if_lt_x_gpu(8)
    def test_same(self):
        self._train()

    def test_sees_the_difference(self):
        self.assertEqual(self._train(), "DefaultReduceScatter")

    def test_hybrid(self):
        self._train(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
"""


@pytest.mark.long
def test_tests_of_fsdp2_run_with_our_reduction(tmp_path: Path) -> None:
    (tmp_path / "test_fully_shard_three.py").write_text(SHARDED)
    (tmp_path / "test_fully_shard_newer.py").write_text("from torch.distributed.fsdp import not_yet")
    with Server(sources=tmp_path) as server:
        assert {test.partition(".Test")[0] for test in server.tests} == {"three"}
        found = {test.rpartition(".")[2]: judge(server, test, timeout=120) for test in server.tests}
    assert {name: verdict.text for name, verdict in found.items()} == {
        "test_same": "same",
        "test_sees_the_difference": "DIFFERENT",
        "test_hybrid": "refused",
    }
    assert "CompressedReduceScatter" in found["test_sees_the_difference"].results[-1].message
    assert "fastreduce.fsdp.replicate(model, mesh['replicate']" in found["test_hybrid"].results[-1].message
