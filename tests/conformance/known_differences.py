"""What torch's tests expect and we do otherwise, as data. An entry that starts passing fails the full run."""

from __future__ import annotations

# Pass with torch's class under the shim, and not with ours: test → reason.
KNOWN_DIFFERENCES: dict[str, str] = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        "hands the wrapper's logger to a C++ function that takes torch's own only"
    ),
    "test_ddp_control_flow_same_across_ranks": (
        "reads the C++ reducer's private `_get_local_used_map`, then expects an error for unused parameters with "
        "find_unused_parameters=False, which give the correct average here"
    ),
    "test_ddp_control_flow_different_across_ranks": (
        "reads the C++ reducer's private `_get_local_used_map`, then expects an error for unused parameters with "
        "find_unused_parameters=False, which give the correct average here"
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": (
        "expects an error for unused parameters with find_unused_parameters=False, which give the correct average here"
    ),
    "test_ddp_multiple_nested_unused_params_error": (
        "expects an error for unused parameters with find_unused_parameters=False, which give the correct average here"
    ),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": (
        "expects an error for unused parameters with find_unused_parameters=False, which give the correct average here"
    ),
    "test_invalid_static_graph": "expects an error for a graph that changes under static_graph=True, which works here",
    "test_different_graph_across_ranks": (
        "expects that buckets are never rebuilt under find_unused_parameters=True; ours are, once, in an order that "
        "all ranks agree on"
    ),
    "test_skip_all_reduce_unused_parameters": (
        "counts reduced buckets, of which skip_all_reduce_unused_params=True saves one; it is accepted here, and "
        "changes nothing"
    ),
    "test_ddp_profiling_autograd_profiler": (
        "expects to find the all-reduces and the graph search in the profile of the thread of backward; ours run on "
        "a thread of their own, and no graph is searched"
    ),
    "test_ddp_profiling_torch_profiler": (
        "expects to find the all-reduces and the graph search in the profile of the thread of backward; ours run on "
        "a thread of their own, and no graph is searched"
    ),
}

# Fail with torch's class too, under the shim: test → reason. They are not run.
WITHOUT_BASELINE: dict[str, str] = {
    "test_ddp_device": "looks at the index of the device that inputs are moved to",
    "test_ddp_logging_data_gpu": "looks at the device ids in the logging data",
    "test_ddp_profiling_execution_trace": "needs NCCL",
    "test_ddp_has_finalized": "leaves a rank in a collective, which only NCCL aborts; torch skips it everywhere",
    "test_ddp_hook_pickling_powerSGD": "loads what torch.load has refused since 2.6; torch skips it everywhere",
}
