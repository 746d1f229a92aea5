"""The wrapper as an object: attributes, shared and frozen parameters, its end, and the processes that users start."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import fastreduce
from tests.support.commands import ROOT
from tests.support.fork_server import server
from tests.support.installed_torch import needs_streams
from tests.support.models import (
    EXACT,
    Branches,
    Breaking,
    Grads,
    assert_same_bits,
    average_of_whole,
    batch,
    equal_on_all,
    grads_of,
    mean_over_ranks,
    mlp,
    one_by_one,
    train,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool, run_ranks
from tests.support.threads import communication_threads, threads_left_over

# The class


def test_it_is_torchs_class_and_passes_attributes_and_state_through(ranks2: RankPool):
    for good in ranks2.run(_surface):
        assert good == []


def _surface(rank: int, world_size: int) -> list[str]:
    bad = []
    model = wrap("ours", mlp(), compression="fp16", gradient_as_bucket_view=True)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        bad.append("isinstance")
    for step in range(2):
        model(batch(rank, step, 4, 20)).sum().backward()
    if [n.removeprefix("module.") for n in model.state_dict()] != list(model.module.state_dict()):
        bad.append("state_dict")
    data = model._get_ddp_logging_data()
    if data["world_size"] != 2 or data["compression"] != "fp16" or data["backend_name"] != "gloo":
        bad.append(f"logging data {data}")
    copied = pickle.loads(pickle.dumps(model))
    deep = copy.deepcopy(model)
    for other in (copied, deep):
        grads = []
        for m in (model, other):
            m.zero_grad()
            m(batch(rank, 5, 4, 20)).sum().backward()
            grads.append(grads_of(m.module))
        assert_same_bits(grads[1], grads[0])
        if str(other.compression) != "fp16":
            bad.append("compression of a copy")
    return bad


class _WrapsParts(fastreduce.DistributedDataParallel):
    """A subclass that skips its base's `__init__`, as GAN trainers have it: what is averaged are its module's parts."""

    def __init__(self, module: nn.Module) -> None:
        super(fastreduce.DistributedDataParallel, self).__init__()
        self.module = module
        for name, part in module.named_children():
            if list(part.parameters()):
                module.add_module(name, wrap("ours", part))


def test_a_subclass_may_skip_the_constructor_and_wrap_parts_of_its_module(ranks2: RankPool):
    equal_on_all(ranks2.run(_wrap_parts))


def _wrap_parts(rank: int, world_size: int) -> Grads:
    model = _WrapsParts(mlp()).train()
    model.module(batch(rank, 0, 4, 20)).sum().backward()
    return grads_of(model.module)


class _Particular(nn.Module):
    """Names its parameters itself, by fewer arguments than torch's method has, and leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.hidden = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3, bias=False)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        """Without `hidden`."""
        for name, parameter in super().named_parameters(prefix, recurse):
            if "hidden" not in name:
                yield name, parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x).relu()
        return self.last(inner) * self.hidden(inner)


def test_a_module_that_names_its_parameters_itself_is_averaged_as_in_torchs_class(ranks2: RankPool):
    for names in ranks2.run(_particular):
        assert sorted(names) == ["first.bias", "first.weight", "hidden.weight", "last.bias", "last.weight"]


def _particular(rank: int, world_size: int) -> list[str]:
    grads, module = [], _Particular()
    for kind in ("ours", "torch"):
        model = wrap(kind, copy.deepcopy(module))
        model(batch(rank, 0, 4, 6)).square().sum().backward()
        parts = (model.module.first, model.module.last, model.module.hidden)
        grads.append({f"{i}.{name}": grad for i, part in enumerate(parts) for name, grad in grads_of(part).items()})
        if kind == "ours":
            names = list(model.compression_by_parameter())
    assert_same_bits(grads[0], grads[1])
    return names


@needs_streams
def test_a_module_that_names_its_parameters_itself_may_compute_in_bfloat16(ranks2: RankPool):
    ranks2.run(_particular_in_bfloat16)


def _particular_in_bfloat16(rank: int, world_size: int) -> None:
    module = _Particular()
    module.hidden.bfloat16()
    low = wrap("ours", module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    low(batch(rank, 0, 4, 6))
    assert low.state_dict()["module.first.weight"].dtype is torch.float32


def test_nothing_overlaps_once_a_wrapped_models_norms_share_statistics(ranks2: RankPool):
    assert ranks2.run(_converted) == [[True, False]] * 2


def _trace(rank: int, world_size: int) -> None:
    ddp = wrap("ours", mlp())
    for step in range(3):
        ddp(batch(rank, step, 3, 20)).square().sum().backward()
        if step:  # after the forward that lays buckets out anew, which torch's class cannot trace either
            traced = torch.jit.trace(ddp, (batch(rank, 9, 3, 20),))
            assert_same_bits(traced(batch(rank, 8, 3, 20)), ddp.module(batch(rank, 8, 3, 20)))


def test_torch_jit_traces_the_wrapper(ranks2: RankPool):
    """Its check found a view of a parameter in the first graph that the second one had not."""
    ranks2.run(_trace, timeout=60)


def _converted(rank: int, world_size: int) -> list[bool]:
    found = []
    with one_by_one():
        for convert in (False, True):
            ddp = wrap("ours", nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
            if convert:  # as fairseq2 does, after wrapping
                fastreduce.SyncBatchNorm.convert_sync_batchnorm(ddp)
            ddp(batch(rank, 0, 4, 6)).square().sum().backward()
            found.append(ddp.reducer.overlaps)
    return found


def test_device_ids_of_a_cpu_module_are_dropped_with_a_warning(ranks2: RankPool):
    for text in ranks2.run(_device_ids):
        assert "device_ids" in text and "CPU" in text


def _device_ids(rank: int, world_size: int) -> str:
    with pytest.warns(UserWarning, match="dropped") as caught:
        model = wrap("ours", nn.Linear(2, 2), device_ids=[rank], output_device=rank)
    model(torch.ones(1, 2)).sum().backward()
    return str(caught[0].message)


def test_frozen_and_ignored_parameters_are_left_alone(ranks2: RankPool):
    for frozen, ignored in ranks2.run(_frozen):
        assert frozen is None
        assert ignored in (4.0, 8.0)  # rank's own: not averaged to 6
    assert len({ignored for _, ignored in ranks2.run(_frozen)}) == 2


def _frozen(rank: int, world_size: int) -> tuple[Any, float]:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    body[0].weight.requires_grad_(False)
    fastreduce.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ["1.bias"])
    model = wrap("ours", body)
    (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return body[0].weight.grad, float(body[1].bias.grad[0])  # type: ignore[index, arg-type]


def test_shared_parameters_are_averaged_once(ranks2: RankPool):
    for grads in ranks2.run(_shared):
        expected = average_of_whole(lambda: _tie(Branches()), 2, range(2))
        assert_same_bits(grads, expected)


def _tie(model: Branches) -> Branches:
    model.b.weight = model.a.weight
    return model


def _shared(rank: int, world_size: int) -> Grads:
    model = wrap("ours", whole_(_tie(Branches())), bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module)


def test_two_wrapped_models_train_beside_each_other(ranks2: RankPool):
    equal_on_all(ranks2.run(_two_models))


def _two_models(rank: int, world_size: int) -> list[Grads]:
    one = wrap("ours", mlp(), compression="int8", bucket_cap_mb=0.004)
    two = wrap("ours", mlp(29, 3), bucket_cap_mb=0.004)
    alone = copy.deepcopy(one.module), copy.deepcopy(two.module)
    seen = []
    for step in range(4):
        for first, second in ((one, two), alone):
            first.zero_grad()
            second.zero_grad()
            second(first(batch(rank, step, 4, 20))[:, :29]).square().mean().backward()  # one backward through both
        seen += [grads_of(one.module), grads_of(two.module)]
        assert_same_bits(seen[-1], mean_over_ranks(grads_of(alone[1])), f"rank {rank}, step {step}")
    return seen


def test_model_reducer_and_thread_go_when_the_wrapper_is_deleted(ranks2: RankPool):
    for left, threads in ranks2.run(_deleted):
        assert left == []
        assert threads == 0


def _deleted(rank: int, world_size: int) -> tuple[list[str], int]:
    before = communication_threads()
    module = mlp()
    model = wrap("ours", module, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 20)).sum().backward()
    assert communication_threads() > before, "a thread to look for"
    references = {
        "module": weakref.ref(module),
        "wrapper": weakref.ref(model),
        "reducer": weakref.ref(model.reducer),
        "weight": weakref.ref(module[0].weight),
        "pipeline": weakref.ref(model.reducer.pipelines[0]),
    }
    del module, model
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None], threads_left_over(before)


def test_after_close_backward_is_local_and_the_wrapped_module_goes_on(ranks2: RankPool):
    for rank, (averaged, local, threads) in enumerate(ranks2.run(_closed)):
        assert averaged == 6.0 and local == 4.0 * (rank + 1) and threads == 0


def _closed(rank: int, world_size: int) -> tuple[float, float, int]:
    before = communication_threads()
    layer = nn.Linear(4, 4)
    model = wrap("ours", layer, bucket_cap_mb=1e-6)
    for _ in range(3):
        model.zero_grad()
        (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    averaged = float(layer.bias.grad[0])  # type: ignore[index]
    model.reducer.close()
    layer.zero_grad()
    (layer(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return averaged, float(layer.bias.grad[0]), threads_left_over(before)


# Processes that users start


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from fastreduce import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5)), compression="int8",
                bucket_cap_mb=1e-6)
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 20) * (dist.get_rank() + 1)).sum().backward()
    total = sum(p.grad.double().sum().item() for p in model.parameters())
    print(f"rank {dist.get_rank()} has {total!r}", flush=True)
    if sys.argv[1] == "destroyed":
        dist.destroy_process_group()

main()
"""


@pytest.mark.long
def test_torchrun_starts_it_and_it_ends_cleanly(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    done = subprocess.run([*command, "left"], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d has (\d+\.\d+)", done.stdout)  # two processes on one pipe: lines may run together
    assert len(said) == 2
    assert said[0] == said[1]


ENDS = ("left", "destroyed", "armed", "exits", "backward raises", "backward raises", "backward raised")


@pytest.mark.long
def test_processes_exit_cleanly_however_the_script_ends(tmp_path):
    started = [
        (how, server(rank).fork(_train_and_end, rank, how, str(tmp_path / str(number))))
        for number, how in enumerate(ENDS)
        for rank in range(2)
    ]
    ended = [(how, process.poll(100)) for how, process in started]
    for _, process in started:
        process.kill()
    assert [(how, code) for how, code in ended if code != (how == "backward raises")] == []


def _train_and_end(pipe: object, rank: int, how: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = wrap("ours", Breaking(), compression="int8", bucket_cap_mb=1e-6)
    sys.modules["keep"] = model  # alive while the interpreter goes down
    for step in range(4):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    if how == "destroyed":
        dist.destroy_process_group()
    elif how == "armed":
        model(whole_batch(rank, 4, 3, 4))
    elif how == "exits":
        raise SystemExit(0)
    elif how in ("backward raises", "backward raised"):
        try:
            model(whole_batch(rank, 4, 3, 4), boom=True, skip=rank == 0).sum().backward()
        except ValueError:
            if how == "backward raises":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                raise


def _spawned(rank: int, path: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    seen = train("ours", mlp, rank, compression="fp16", bucket_cap_mb=0.004)
    buffer = io.BytesIO()
    torch.save(seen, buffer)
    results.put((rank, buffer.getvalue()))


@pytest.mark.long
def test_mp_spawn_starts_it_and_it_ends_cleanly(tmp_path):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    spawned = mp.spawn(_spawned, (str(tmp_path / "store"), results), nprocs=2, join=False)
    seen = dict(results.get() for _ in range(2))
    deadline = time.monotonic() + 200
    while not spawned.join(timeout=1):  # raises where a process ended badly
        assert time.monotonic() < deadline
    assert [p.exitcode for p in spawned.processes] == [0, 0]
    assert_same_bits(torch.load(io.BytesIO(seen[0])), torch.load(io.BytesIO(seen[1])))


@pytest.mark.long
def test_a_group_that_is_destroyed_and_made_again_serves(ranks2: RankPool):
    assert run_ranks(_again, 2) == [[6.0, 6.0]] * 2


def _again(rank: int, world_size: int) -> list[float]:
    seen = []
    group = dist.new_group(backend="gloo")
    for attempt in range(2):
        model = wrap("ours", nn.Linear(4, 4), process_group=group)
        (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
        seen.append(float(model.module.bias.grad[0]))
        del model
        dist.destroy_process_group(group)
        if attempt == 0:
            group = dist.new_group(backend="gloo")
    return seen


def test_a_subgroup_averages_over_its_own_ranks(ranks3: RankPool):
    results = ranks3.run(_subgroup)
    assert results == [8.0, 4.0 * 2, 8.0]


def _subgroup(rank: int, world_size: int) -> float:
    group = dist.new_group([0, 2])
    layer = nn.Linear(4, 4)
    model = wrap("ours", layer, process_group=group) if rank != 1 else layer
    (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return float(layer.bias.grad[0])  # type: ignore[index]
