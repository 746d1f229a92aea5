"""Snapshots: resumed bit for bit, whole or not there, and plain state dicts for everybody else."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import itertools
import logging
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import SettingError, ShardSampler, load_checkpoint, save_checkpoint
from fastreduce.reduction import saved_residuals
from tests.support.commands import ROOT, TORCHRUN, run, started, with_environment
from tests.support.models import assert_same_bits, batch, wrap
from tests.support.ranks import RankPool

FEEDBACK = "int8:error_feedback"
EXAMPLE = ROOT / "examples" / "snapshot_train.py"


class Training:
    """All that a training holds, with randomness of every kind in its steps."""

    def __init__(self, setting: str, seed: int = 0, clips: bool = False) -> None:
        torch.manual_seed(seed)
        random.seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())
        net = nn.Sequential(nn.Linear(20, 23), nn.Dropout(), nn.Tanh(), nn.Linear(23, 26), nn.BatchNorm1d(26))
        self.model = wrap("ours", net.append(nn.Linear(26, 3)), bucket_cap_mb=0.002, compression=setting)
        torch.manual_seed(seed + dist.get_rank())
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.sampler = ShardSampler(100)
        self.indices: Iterator[int] | None = None
        self.clips = clips
        self.norms: list[Any] = []

    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "sampler")}

    def steps(self, n: int) -> None:
        self.indices = self.indices or iter(self.sampler)
        for _ in range(n):
            rows = [next(self.indices) for _ in range(3)]
            self.optimizer.zero_grad()
            x = batch(dist.get_rank(), rows[0], 5, 20) * random.random() + float(np.random.rand())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = self.model(x).float().square().mean()
            self.scaler.scale(loss).backward()
            if self.clips:
                self.scaler.unscale_(self.optimizer)
                self.norms.append(self.model.clip_grad_norm_(0.01))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def all(self) -> dict[str, Any]:
        reducer = self.model.reducer.state_dict()
        states = {name: copy.deepcopy(part.state_dict()) for name, part in self.parts().items()}
        draws = [float(torch.rand(())), random.random(), float(np.random.rand())]
        return {**states, "reducer": reducer, "random": draws}


# Resuming


@pytest.mark.parametrize(
    ("setting", "clips"), [("none", True), ("fp16", False), ("fp16", True), (FEEDBACK, False), (FEEDBACK, True)]
)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(
    ranks: RankPool, setting: str, clips: bool, tmp_path: Path
):
    for before in (0, 1, 2, 3):
        path = tmp_path / "a folder that is not there" / str(before) / "snapshot.pt"
        for rank, (extra, uninterrupted, resumed) in enumerate(ranks.run(_resume, setting, clips, before, path)):
            assert extra == {"epoch": 7, "best": {"loss": 0.5, "at": [1, 2]}, "mask": torch.tensor(1)}
            assert_same_bits(resumed, uninterrupted, f"rank {rank}, after {before}")
        of_ranks = [f".rank{rank}" for rank in range(ranks.world_size)] if setting == FEEDBACK else []
        assert sorted(file.suffix for file in path.parent.iterdir()) == [".pt", *of_ranks]


def _resume(rank: int, world_size: int, setting: str, clips: bool, before: int, path: Path) -> Any:
    training = Training(setting, clips=clips)
    training.steps(before)
    extra = {"epoch": 7, "best": {"loss": 0.5, "at": [1, 2]}, "mask": torch.tensor(1)}
    save_checkpoint(path, **training.parts(), **extra)
    training.steps(3)
    uninterrupted = training.all(), training.norms[before:]
    again = Training(setting, seed=5, clips=clips)
    found = load_checkpoint(path, **again.parts())
    again.steps(3)
    return found, uninterrupted, (again.all(), again.norms)


def test_at_another_world_size_every_rank_gets_the_mean_of_the_residuals(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Path
):
    old = ranks3.run(_save, tmp_path / "snapshot.pt")
    reducers = [state["reducer"] for state in old]
    of_shards = saved_residuals.of_shards(reducers, 128)
    for state, before, after in ranks2.run(_load_elsewhere, tmp_path / "snapshot.pt"):
        assert_same_bits(state["model"], old[0]["model"])
        assert_same_bits(state["optimizer"], old[0]["optimizer"])
        for name, residual in state["reducer"]["residuals"].items():
            mean = torch.stack([of["residuals"][name] for of in reducers]).mean(0)
            assert_same_bits(residual, mean + of_shards[name], "with what was lost of the averages")
            assert residual.any()
        assert after == before, "random states are those of this run"


def _save(rank: int, world_size: int, path: Path, setting: str = FEEDBACK, times: int = 1) -> dict[str, Any]:
    training = Training(setting)
    for time in range(times):
        training.steps(2)
        save_checkpoint(path, **training.parts(), epoch=time)
    return training.all()


def _load_elsewhere(rank: int, world_size: int, path: Path) -> Any:
    training = Training(FEEDBACK, seed=5)
    before = random.getstate(), torch.get_rng_state().tolist()
    load_checkpoint(path, **training.parts())
    after = random.getstate(), torch.get_rng_state().tolist()
    state = training.all()
    training.steps(1)
    return state, before, after


def test_random_states_can_be_left_alone(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_save, tmp_path / "snapshot.pt")
    assert ranks2.run(_load_without_random_states, tmp_path / "snapshot.pt") == [True, True]


def _load_without_random_states(rank: int, world_size: int, path: Path) -> bool:
    training = Training(FEEDBACK, seed=5)
    before = torch.get_rng_state()
    load_checkpoint(path, rng=False, **training.parts())
    return torch.equal(before, torch.get_rng_state())


def test_another_compression_goes_on_without_residuals_and_says_so(ranks2: RankPool, tmp_path: Path):
    old = ranks2.run(_save, tmp_path / "snapshot.pt")
    for rank, (weights, kept, lines) in enumerate(ranks2.run(_load_otherwise, tmp_path / "snapshot.pt")):
        assert_same_bits(weights, old[0]["model"])
        assert kept == {}
        assert len(lines) == (rank == 0) and all(FEEDBACK in line and "'fp16'" in line for line in lines)


def _load_otherwise(rank: int, world_size: int, path: Path) -> Any:
    training = Training("fp16", seed=5)
    with _log() as lines:
        load_checkpoint(path, **training.parts())
    return training.model.state_dict(), training.model.reducer.state_dict()["residuals"], lines


class _log:
    """The lines that fastreduce logs."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("fastreduce").addHandler(self.handler)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fastreduce").removeHandler(self.handler)


# Files


def test_the_previous_snapshot_is_kept_and_no_other_file(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    (tmp_path / "snapshot.pt.0123abcd.unfinished").touch()  # left behind by a crash
    (tmp_path / "snapshot.pt.0123abcd.rank1").touch()
    (tmp_path / "snapshot.pt.best").touch()  # somebody else's
    ranks2.run(_save, path, FEEDBACK, 3)
    names = sorted(file.name for file in tmp_path.iterdir())
    tags = {name.split(".")[2] for name in names if ".rank" in name}
    assert len(tags) == 2
    expected = ["snapshot.pt", "snapshot.pt.best", "snapshot.pt.previous"]
    assert names == sorted(expected + [f"snapshot.pt.{tag}.rank{rank}" for tag in tags for rank in (0, 1)])
    assert torch.load(path)["epoch"] == 2
    previous = tmp_path / "snapshot.pt.previous"
    assert torch.load(previous)["epoch"] == 1
    assert [loaded["epoch"] for loaded in ranks2.run(_load, previous, FEEDBACK)] == [1, 1]


def _load(rank: int, world_size: int, path: Path, setting: str) -> Any:
    return load_checkpoint(path, **Training(setting, seed=5).parts())


def _damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "half":
        del data[len(data) // 2 :]
    elif how == "last byte":
        del data[-1]
    elif how == "one bit":
        data[data.rfind(torch.load(path)["model"]["0.weight"].numpy().tobytes()) + 5] ^= 4
    else:
        data[:] = b"no snapshot" * 100
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["empty", "half", "last byte", "one bit", "other"])
def test_a_damaged_file_is_an_error_on_every_rank_and_the_previous_one_is_there(
    ranks2: RankPool, how: str, tmp_path: Path
):
    path = tmp_path / "snapshot.pt"
    ranks2.run(_save, path, "fp16", 2)
    _damaged(path, how)
    for name, text, changed in ranks2.run(_fail_to_load, path, "fp16"):
        assert (name, changed) == ("CheckpointError", False)
        assert f"{path} is truncated, corrupt or no snapshot" in text
        assert text.endswith(f"The snapshot before it is {path}.previous")
    good = path.with_name("snapshot.pt.previous")
    assert [loaded["epoch"] for loaded in ranks2.run(_load, good, "fp16")] == [0, 0]


def _fail_to_load(rank: int, world_size: int, path: Path, setting: str, **parts: Any) -> tuple[str, str, bool]:
    training = Training(setting, seed=5)
    before = copy.deepcopy([part.state_dict() for part in training.parts().values()])
    name, text = "nothing", ""
    try:
        load_checkpoint(path, **training.parts(), **parts)
    except Exception as error:
        name, text = type(error).__name__, str(error)
    try:
        assert_same_bits([part.state_dict() for part in training.parts().values()], before)
    except AssertionError:
        return name, text, True
    return name, text, False


def test_a_broken_file_does_not_take_the_place_of_the_previous_one(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(_save, path, "fp16", 2)
    _damaged(path, "half")
    ranks2.run(_save, path, "fp16", 1)
    assert torch.load(tmp_path / "snapshot.pt.previous")["epoch"] == 0
    assert torch.load(path)["epoch"] == 0


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_residual_file_that_is_not_whole_is_an_error_on_every_rank(ranks2: RankPool, how: str, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(_save, path)
    (file,) = tmp_path.glob("*.rank1")
    file.unlink() if how == "missing" else _damaged(file, "other")
    for name, text, changed in ranks2.run(_fail_to_load, path, FEEDBACK):
        assert (name, changed) == ("CheckpointError", False)
        assert text.startswith("rank 1, reading residuals") and file.name in text


def test_a_save_that_fails_leaves_what_was_there(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(_save, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    bad = {
        "a NumPy number": (np.float64(0.5), ["numpy", "float(x)"]),
        "an object": (Path("x"), ["pathlib"]),
        "what cannot be pickled": (None, ["lambda"]),
    }
    for case, (value, words) in bad.items():
        for name, text in ranks2.run(_fail_to_save, path, value):
            assert name == "CheckpointError" and text.startswith("rank 0, writing"), f"{case}: {text}"
            assert all(word in text for word in words), text
        now = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name in before}
        assert now == before
    assert not list(tmp_path.glob("*.unfinished"))
    ranks2.run(_save, path)
    assert len(list(tmp_path.glob("*.rank*"))) == 4


def _fail_to_save(rank: int, world_size: int, path: Path, value: Any) -> tuple[str, str]:
    training = Training(FEEDBACK)
    training.steps(1)
    try:
        save_checkpoint(path, **training.parts(), extra=(lambda: 1) if value is None else value)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_rank_that_cannot_write_is_an_error_on_all(ranks2: RankPool, tmp_path: Path):
    for name, text in ranks2.run(_fail_to_save_on_one, tmp_path):
        assert name == "CheckpointError" and text.startswith("rank 1, writing residuals"), text
    assert not list(tmp_path.glob("good/snapshot.pt"))


def _fail_to_save_on_one(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    training = Training(FEEDBACK)
    training.steps(1)
    if rank == 1:
        folder.joinpath("bad").write_text("a file where a folder should be")
    try:
        save_checkpoint(folder / ("bad" if rank else "good") / "snapshot.pt", **training.parts())
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


KILLED = """
import os, signal, sys, torch
from fastreduce import load_checkpoint, save_checkpoint

path, net, found = sys.argv[1], torch.nn.Linear(2, 2), []
save_checkpoint(path, net=net, epoch=0)

def killing_at(point, function):
    def guarded(*args, **kwargs):
        global calls
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*args, **kwargs)
    return guarded

for point in range(100):
    child = os.fork()
    if child == 0:
        calls = 0
        for name in ("open", "fsync", "unlink", "link", "replace"):
            setattr(os, name, killing_at(point, getattr(os, name)))
        save_checkpoint(path, net=net, epoch=point + 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found.append(load_checkpoint(path, net=net)["epoch"])
    if status == 0:
        break
print(*found)
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_snapshot(tmp_path: Path):
    done = run(sys.executable, "-c", KILLED, tmp_path / "snapshot.pt", seconds=120)
    assert done.returncode == 0, done.stderr
    epochs = [int(epoch) for epoch in done.stdout.split()]
    assert len(epochs) > 5 and epochs == sorted(epochs)
    assert epochs[0] == 0 and epochs[-1] == len(epochs), "the last save was not killed"
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"snapshot.pt", "snapshot.pt.previous"}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such file": ({}, "FileNotFoundError", "elsewhere"),
    "no such part": ({"ema": nn.Linear(1, 1)}, "CheckpointError", "no part 'ema'; it has 'model', 'optimizer'"),
    "a number": ({"epoch": 3}, "SettingError", "epoch=3 cannot load a state"),
}


def test_bad_input_is_an_error_on_every_rank(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_save, tmp_path / "snapshot.pt")
    for case, (parts, error, message) in BAD.items():
        path = tmp_path / ("elsewhere" if case == "no such file" else "snapshot.pt")
        for name, text, changed in ranks2.run(_fail_to_load_parts, path, parts):
            assert (name, changed) == (error, False), case
            assert message in text


def _fail_to_load_parts(rank: int, world_size: int, path: Path, parts: Any) -> tuple[str, str, bool]:
    return _fail_to_load(rank, world_size, path, FEEDBACK, **parts)


def test_the_name_of_our_own_entry_is_taken(tmp_path: Path):
    with pytest.raises(SettingError, match="fastreduce"):
        save_checkpoint(tmp_path / "snapshot.pt", fastreduce=1)


# Without us


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 23), nn.BatchNorm1d(23), nn.Linear(23, 3))


def test_a_snapshot_loads_in_plain_torch(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    (state, _) = ranks2.run(_save_net, path)
    net = _net(1)
    optimizer = torch.optim.Adam(net.parameters())
    snapshot = torch.load(path, weights_only=True)
    net.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    assert_same_bits(dict(net.state_dict()), state)


def _save_net(rank: int, world_size: int, path: Path) -> dict[str, Tensor]:
    model: Any = torch.compile(wrap("ours", _net(), compression=FEEDBACK), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(rank, 0, 4, 20)).square().mean().backward()
    optimizer.step()
    save_checkpoint(path, model=model, optimizer=optimizer)
    return {name.removeprefix("_orig_mod.module."): value for name, value in model.state_dict().items()}


def test_files_that_torch_wrote_load(ranks2: RankPool, tmp_path: Path):
    net = _net()
    state = net.state_dict()
    prefixed = {f"module.{name}": value for name, value in state.items()}
    files: dict[str, Any] = {
        "a dict of parts": {"model": state, "epochs": 3},
        "with a wrapper's prefix": {"model": prefixed, "epochs": 3},
        "a module's state dict": state,
        "a wrapper's state dict": prefixed,
    }
    for name, value in files.items():
        torch.save(value, tmp_path / name)
        for rest, found in ranks2.run(_load_net, tmp_path / name):
            assert rest == ({"epochs": 3} if "epochs" in value else {})
            for kind in ("bare", "torch", "ours"):
                assert_same_bits(found[kind], dict(state), name)


def _load_net(rank: int, world_size: int, path: Path) -> Any:
    found = {}
    for kind in ("bare", "torch", "ours"):
        net = _net(1)
        rest = load_checkpoint(path, model=net if kind == "bare" else wrap(kind, net))
        found[kind] = dict(net.state_dict())
    return rest, found


def test_one_process_without_a_group_saves_and_loads(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    net = _net()
    save_checkpoint(path, model=net, epoch=1)
    expected = torch.rand(3)
    again = _net(1)
    assert load_checkpoint(path, model=again, scaler=None) == {"epoch": 1}
    assert torch.equal(torch.rand(3), expected)
    assert_same_bits(dict(again.state_dict()), dict(net.state_dict()))
    for rest, found in ranks2.run(_load_net, path):
        assert rest == {"epoch": 1}
        assert_same_bits(found["ours"], dict(net.state_dict()))


# The example


OPTIONS = ["--batch_size=128", f"--compression={FEEDBACK}"]


@pytest.mark.timeout(240)
def test_the_example_goes_on_after_its_ranks_were_killed_as_if_nothing_had_happened(ranks2: RankPool, tmp_path: Path):
    whole, killed = (tmp_path / name / "snapshot.pt" for name in ("whole", "killed"))
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", EXAMPLE, *OPTIONS]
    command += ["--max_epochs=100000", f"--snapshot_path={killed}"]
    with started(*command, env=with_environment(GLOO_SOCKET_IFNAME="lo"), together=True) as process:
        assert process.stdout is not None
        seen = list(itertools.takewhile(lambda line: not line.startswith("epoch 1: loss"), process.stdout))
        assert process.poll() is None, "".join(seen)
        for rank in psutil.Process(process.pid).children(recursive=True):
            rank.kill()  # in some later epoch, or at its end
        output, _ = process.communicate()
        assert process.returncode != 0, output

    epoch = torch.load(killed)["epoch"]
    until = [*OPTIONS, f"--max_epochs={epoch + 3}"]
    output = ranks2.run(_run_example, [*until, f"--resume_path={killed}"], timeout=120)[0]
    assert _losses(output).keys() == {epoch + 1, epoch + 2}
    output = ranks2.run(_run_example, [*until, f"--snapshot_path={whole}"], timeout=120)[0]
    losses = _losses(output)
    assert losses.keys() == set(range(epoch + 3)) and losses[epoch + 2] < losses[0] / 2
    assert_same_bits(_all_of(killed.parent), _all_of(whole.parent))


def _losses(output: str) -> dict[int, float]:
    lines = re.findall(r"^epoch (\d+): loss (\S+), saved", output, flags=re.MULTILINE)
    return {int(epoch): float(loss) for epoch, loss in lines}


def _run_example(rank: int, world_size: int, arguments: list[str]) -> str:
    spec = importlib.util.spec_from_file_location("snapshot_train", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        example.train(example.parse(arguments))
    return output.getvalue()


def _all_of(folder: Path) -> dict[str, Any]:
    """The last snapshot and its residual files, without what differs between runs: the tag, and what nobody seeded."""
    found = {"snapshot.pt": torch.load(folder / "snapshot.pt", weights_only=True)}
    tag = found["snapshot.pt"]["fastreduce"].pop("tag")
    for of_rank in found["snapshot.pt"]["fastreduce"]["ranks"]:
        del of_rank["random"]["python"], of_rank["random"]["numpy"]
    for rank in (0, 1):
        found[f"rank{rank}"] = torch.load(folder / f"snapshot.pt.{tag}.rank{rank}", weights_only=True)
        assert found[f"rank{rank}"].pop("fastreduce") == tag
    return found


def test_the_code_in_the_documentation_is_the_examples_or_runs():
    text = EXAMPLE.parents[1].joinpath("docs", "from-torchrun.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = EXAMPLE.read_text().splitlines()
    apart = [block for block in blocks if not all(line in lines for line in block.splitlines())]
    assert len(blocks) == 3 and len(apart) == 1
    exec(compile(apart[0], "from-torchrun.md", "exec"), {})
