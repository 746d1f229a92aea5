"""Under `fastreduce run` every name and subclass of torch's class is ours, and what stays torch's is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fastreduce
from fastreduce.run import replacement
from tests.support.commands import INSTALLED, run, with_environment
from tests.support.run_scripts import ALONE, child, said

NAMES = """
from torch.nn.parallel import DistributedDataParallel as Early
from torch.nn.parallel.distributed import DistributedDataParallel as Direct

class Framework(Direct):  # as mmengine's
    def __init__(self, module, flag, **kwargs):
        super().__init__(module=module, **kwargs)
        self.flag = flag

class OldStyle(Framework):
    def __init__(self, module):
        Direct.__init__(self, module)

class Own(Direct):  # a reducer of its own
    def _ddp_init_helper(self, *args):
        self.reducer = None

alone()
for kind in (Early, Direct, lambda m: Framework(m, 1), OldStyle):
    ddp = kind(torch.nn.Linear(1, 1))
    assert all(isinstance(ddp, known) for known in (Early, Direct, torch.nn.parallel.DistributedDataParallel))
    assert type(ddp.reducer).__module__ == "fastreduce.ddp.reducer", type(ddp)
assert type(Early(torch.nn.Linear(1, 1))) in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
import fastreduce, inspect
assert isinstance(ddp, fastreduce.DistributedDataParallel)
assert list(inspect.signature(Direct).parameters)[:2] == ["module", "device_ids"]
"""


WARNED = """
alone()
inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0], check_reduction=True)
torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(inner))
"""


@pytest.mark.long
def test_what_the_class_warns_of_is_told_of_the_lines_of_the_script_that_wrap(tmp_path: Path):
    """Not of the line of ours that stands between."""
    script = tmp_path / "wraps.py"
    script.write_text(ALONE + WARNED)
    done = child(f"import runpy; runpy.run_path({str(script)!r})", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (ALONE + WARNED).splitlines()
    first, second = (1 + lines.index(line) for line in WARNED.splitlines()[2:])
    assert f"{script}:{first}: UserWarning: device_ids=[0]" in done.stderr
    assert f"{script}:{first}: FutureWarning: The `check_reduction` argument" in done.stderr
    assert f"{script}:{second}: UserWarning: module '0' is wrapped already" in done.stderr


@pytest.mark.long
def test_what_the_class_warns_of_is_told_of_the_script_however_the_path_of_the_package_is_spelled(tmp_path: Path):
    script, folder = tmp_path / "wraps.py", f"{tmp_path.parent}//{tmp_path.name}"
    own = ["import sys", f"sys.path.insert(0, {folder!r})", "import fastreduce"]
    (tmp_path / "fastreduce").symlink_to(Path(fastreduce.__file__).parent)
    wraps = "fastreduce.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0], check_reduction=True)"
    script.write_text("\n".join([*own, ALONE, "alone()", wraps]))
    done = run(sys.executable, script, env=with_environment(PYTHONPATH=""))
    assert done.returncode == 0, done.stderr
    line = 1 + script.read_text().splitlines().index(wraps)
    for kind in ("UserWarning: device_ids=[0]", "FutureWarning: The `check_reduction` argument"):
        assert f"{script}:{line}: {kind}" in done.stderr


def test_every_name_and_subclass_is_ours_and_what_stays_torchs_is_said_when_it_is_made_and_at_the_end(tmp_path: Path):
    more = """
Own(torch.nn.Linear(1, 1))
torch._dynamo.config.optimize_ddp = "python_reducer"
Early(torch.nn.Linear(1, 1))
"""
    done = child(ALONE + NAMES + more, tmp_path)
    assert done.returncode == 0, done.stderr
    own = "Own makes a reducer of its own"
    dynamo = 'torch._dynamo.config.optimize_ddp is "python_reducer", which reduces by itself'
    assert f"torch's own DistributedDataParallel reduces the gradients of this Own: {own}" in done.stderr
    assert replacement.summary(tmp_path / "record") == (
        "5 modules in 1 process wrapped by fastreduce, compression none; "
        f"1 module wrapped by torch's class: Own(Linear), because {own}; "
        f"1 module wrapped by torch's class: DistributedDataParallel(Linear), because {dynamo}"
    )


@pytest.mark.long
def test_a_wrapper_that_was_pickled_without_a_run_is_torchs_and_said_to_be(tmp_path: Path):
    save = """
alone()
torch.save(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)), PATH)
"""
    load = """
alone()
torch.load(PATH, weights_only=False)(torch.ones(1, 1)).sum().backward()
"""
    name = f"PATH = {str(tmp_path / 'model')!r}"
    assert run(sys.executable, "-c", ALONE + name + save).returncode == 0
    done = child(ALONE + name + load, tmp_path)
    assert done.returncode == 0, done.stderr
    assert replacement.summary(tmp_path / "record") == (
        "1 module wrapped by torch's class: DistributedDataParallel(Linear), because it was unpickled, not constructed"
    )


@pytest.mark.long
def test_a_record_that_is_gone_or_torn_fails_nobody(tmp_path: Path):
    record = tmp_path / "record"
    done = run(sys.executable, "-c", ALONE + NAMES, env={**with_environment(), **replacement.environment(str(record))})
    assert done.returncode == 0, done.stderr
    assert replacement.summary(record).startswith("what was wrapped is not known: ")
    record.write_text('{"pid": 1, "how": "wrapped", "what": "DDP(Net)", "setting": "int8", "why": ""}\n{"pid": 2, "wh')
    assert replacement.summary(record) == "1 module in 1 process wrapped by fastreduce, compression int8"


def test_one_rank_that_nobody_asked_for_is_told_of(tmp_path: Path):
    record = tmp_path / "record"
    line = '{"pid": %d, "how": "wrapped", "what": "DDP(Net)", "setting": "int8", "why": ""}\n'
    record.write_text(line % 1)
    hint = "; one rank has nobody to average with: --nproc-per-node N starts N"
    assert replacement.summary(record, alone=True) == replacement.summary(record) + hint
    record.write_text(line % 1 + line % 2)
    assert replacement.summary(record, alone=True) == replacement.summary(record)
    record.write_text("")
    assert replacement.summary(record, alone=True) == ""


@pytest.mark.long
def test_where_fastreduce_cannot_be_imported_torchs_class_trains_and_it_is_said(tmp_path: Path):
    code = """
import sys
sys.modules["fastreduce.ddp"] = None
alone()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
"""
    done = child(ALONE + code, tmp_path)
    assert done.returncode == 0, done.stderr
    said = replacement.summary(tmp_path / "record")
    assert said.startswith("1 module wrapped by torch's class: DistributedDataParallel(Linear), because fastreduce ")
    assert "cannot be imported by" in said and "fastreduce.ddp" in said and "UserWarning: torch's own" in done.stderr


REPLICATE = """
from torch.distributed._composable.replicate import replicate
from torch._dynamo.backends.distributed import DDPOptimizer

alone()
splits = []
compile_fn = DDPOptimizer.compile_fn
def count(self, graph, inputs):
    compiled = compile_fn(self, graph, inputs)
    splits.append(len(self.buckets))
    return compiled
DDPOptimizer.compile_fn = count

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Framework(torch.nn.parallel.distributed.DistributedDataParallel):
    pass

for kind in ("plain", "subclass", "replicate"):
    torch._dynamo.reset()
    splits.clear()
    if kind == "replicate":
        model = torch.compile(replicate(Net(), bucket_cap_mb=1.1), backend="eager")
    else:
        kinds = {"plain": torch.nn.parallel.DistributedDataParallel, "subclass": Framework}
        model = torch.compile(kinds[kind](Net(), bucket_cap_mb=1.1), backend="eager")
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
    assert splits and splits[0] > 1, (kind, splits)
    print(kind, splits[0])
"""


@pytest.mark.long
def test_dynamo_splits_graphs_at_our_buckets_and_replicate_is_ours(tmp_path: Path):
    """Held against torch's own class: the same script without a run."""
    done = child(ALONE + REPLICATE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert replacement.summary(tmp_path / "record") == "3 modules in 1 process wrapped by fastreduce, compression none"
    assert done.stdout == run(sys.executable, "-c", ALONE + REPLICATE).stdout


TENSOR_PARALLEL = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
ddp = torch.nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])
parameters = list(net.parameters())  # as torch.distributed.tensor.parallel.ddp has made them
ddp(torch.ones(3, 4) * (1 + dist.get_rank())).sum().backward()
if dist.get_rank() == 0:
    print([parameter.grad.flatten().tolist() for parameter in parameters])
dist.destroy_process_group()
"""


@pytest.mark.long
def test_beside_tensor_parallelism_ours_gives_torchs_gradients(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(TENSOR_PARALLEL)
    ours, torchs = (run(INSTALLED, command, "--nproc-per-node", 2, path) for command in ("run", "launch"))
    assert ours.returncode == 0, ours.stderr
    assert said(ours)[-1] == "fastreduce run: 2 modules in 2 processes wrapped by fastreduce, compression none"
    assert ours.stdout == torchs.stdout and len(json.loads(ours.stdout)) == 4
