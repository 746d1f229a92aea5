"""Snapshots: resumed bit for bit, and plain state dicts for everybody else."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import itertools
import logging
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import load_checkpoint, save_checkpoint
from fastreduce.reduction import saved_residuals
from tests.support.commands import ROOT, TORCHRUN, started, with_environment
from tests.support.models import Breaking, assert_same_bits, batch, wrap
from tests.support.ranks import RankPool
from tests.support.snapshots import FEEDBACK, Training, save

EXAMPLE = ROOT / "examples" / "snapshot_train.py"


# Resuming


@pytest.mark.parametrize(
    ("setting", "clips"),
    [
        ("none", True),
        pytest.param("fp16", False, marks=pytest.mark.long),
        pytest.param("fp16", True, marks=pytest.mark.long),
        pytest.param(FEEDBACK, False, marks=pytest.mark.long),
        (FEEDBACK, True),
    ],
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


@pytest.mark.parametrize("setting", ["none", pytest.param(FEEDBACK, marks=pytest.mark.long)])
def test_going_back_to_a_snapshot_repeats_what_was_done_since_bit_for_bit(
    ranks2: RankPool, setting: str, tmp_path: Path
):
    # Before the first clipping decompression summed no squares up, so that this read the gradients.
    for rank, (first, again) in enumerate(ranks2.run(_go_back, setting, tmp_path / "snapshot.pt")):
        assert_same_bits(again, first, f"rank {rank}")


def _go_back(rank: int, world_size: int, setting: str, path: Path) -> Any:
    training = Training(setting, clips=True)
    training.scaler = torch.amp.GradScaler("cpu", enabled=False)  # behind `unscale_` clipping reads gradients anyway
    save_checkpoint(path, **training.parts())
    training.steps(3)
    first = training.all(), list(training.norms)
    load_checkpoint(path, **training.parts())
    training.indices, training.norms = None, []
    training.steps(3)
    return first, (training.all(), training.norms)


@pytest.mark.parametrize("kept", ["true", pytest.param("8bit", marks=pytest.mark.long)])
def test_the_first_step_behind_a_snapshot_may_be_left_out(ranks2: RankPool, kept: str, tmp_path: Path):
    # What error feedback kept counts on, since its averages were not applied: the optimizer would have told.
    for rank, (first, again) in enumerate(ranks2.run(_leave_out, f"int4:error_feedback={kept}", tmp_path / "s.pt")):
        assert_same_bits(again, first, f"rank {rank}")


def _leave_out(rank: int, world_size: int, setting: str, path: Path) -> Any:
    def steps(training: Training, ends: Sequence[bool]) -> None:
        for step, applied in enumerate(ends):
            training.model(batch(rank, step, 5, 20)).square().mean().backward()
            if applied:
                training.optimizer.step()
            training.optimizer.zero_grad()

    training = Training(setting)
    steps(training, [True, True])
    save_checkpoint(path, **training.parts())
    steps(training, [False, True, True])
    first = training.all()
    again = Training(setting, seed=5)
    load_checkpoint(path, **again.parts())
    steps(again, [False, True, True])
    return first, again.all()


def test_what_cannot_name_optimized_parameters_is_refused_before_anything_is_loaded(ranks2: RankPool, tmp_path: Path):
    for others in ranks2.run(_load_others, tmp_path / "snapshot.pt"):
        assert all(said.startswith("CheckpointError") and "optimized=" in said for said in others), others


def _load_others(rank: int, world_size: int, path: Path) -> list[str]:
    training = Training("none")
    training.steps(1)
    save_checkpoint(path, **training.parts())
    whole, said = torch.load(path), []
    for other in (3, None, ["0.weight"], {"model": 3}, {"model": "0.weight"}, {"model": [torch.ones(2)]}):
        dist.barrier()
        if rank == 0:
            torch.save({**whole, "fastreduce": {**whole["fastreduce"], "optimized": other}}, path)
        again = Training("none", seed=5)
        own = copy.deepcopy(again.model.state_dict())
        try:
            load_checkpoint(path, **again.parts())
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        assert_same_bits(again.model.state_dict(), own)
    return said


def test_at_another_world_size_every_rank_gets_the_mean_of_the_residuals(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Path
):
    old = ranks3.run(save, tmp_path / "snapshot.pt")
    reducers = [state["reducer"] for state in old]
    of_shards = saved_residuals.of_shards(reducers, saved_residuals.alignments(reducers[0]))
    for state, before, after in ranks2.run(_load_elsewhere, tmp_path / "snapshot.pt"):
        assert_same_bits(state["model"], old[0]["model"])
        assert_same_bits(state["optimizer"], old[0]["optimizer"])
        for name, residual in state["reducer"]["residuals"].items():
            mean = torch.stack([of["residuals"][name] for of in reducers]).mean(0)
            assert_same_bits(residual, mean + of_shards[name], "with what was lost of the averages")
            assert residual.any()
        assert after == before, "random states are those of this run"


def _load_elsewhere(rank: int, world_size: int, path: Path) -> Any:
    training = Training(FEEDBACK, seed=5)
    before = random.getstate(), torch.get_rng_state().tolist()
    load_checkpoint(path, **training.parts())
    after = random.getstate(), torch.get_rng_state().tolist()
    state = training.all()
    training.steps(1)
    return state, before, after


def test_random_states_can_be_left_alone(ranks2: RankPool, tmp_path: Path):
    ranks2.run(save, tmp_path / "snapshot.pt")
    assert ranks2.run(_load_without_random_states, tmp_path / "snapshot.pt") == [True, True]


def _load_without_random_states(rank: int, world_size: int, path: Path) -> bool:
    training = Training(FEEDBACK, seed=5)
    before = torch.get_rng_state()
    load_checkpoint(path, rng=False, **training.parts())
    return torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("setting", ["none", FEEDBACK])
def test_snapshots_after_backwards_that_raised_on_one_rank(ranks2: RankPool, setting: str, tmp_path: Path):
    for missed in ranks2.run(_after_broken, setting, tmp_path / "snapshot.pt", timeout=60):
        assert missed == [True, True]


def _after_broken(rank: int, world_size: int, setting: str, path: Path) -> list[bool]:
    """One rank's backward raises, and is caught, before all save and before all load."""
    net, missed = Breaking(), []
    model = wrap("ours", net, bucket_cap_mb=1e-6, compression=setting)

    def step(broken: int) -> bool:
        """Whether this rank has no averages."""
        net.zero_grad()
        loss = model(batch(rank, 0, 3, 4), boom=rank == broken).sum()
        with pytest.raises(ValueError, match="boom") if rank == broken else contextlib.nullcontext():
            loss.backward()
        return rank == broken or bool(net.a.weight.grad.isnan().all())

    step(-1)
    missed.append(step(0))
    save_checkpoint(path, model=model)
    saved = copy.deepcopy(net.state_dict())
    missed.append(step(1))
    load_checkpoint(path, model=model)
    assert_same_bits(net.state_dict(), saved)
    assert not step(-1)
    return missed


@pytest.mark.long
def test_handlers_that_save_while_averages_are_waited_for_leave_them_to_come(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_save_in_handlers, tmp_path / "snapshot.pt", timeout=60)


class _Slow:
    """What takes longer to save than a rank waits for averages until it asks whether they can come."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(3.0)
        return {}


def _save_in_handlers(rank: int, world_size: int, path: Path) -> None:
    """All ranks get a signal: rank 0 waits in its backward for rank 1, which is late."""
    net = nn.Linear(4, 4)
    ddp = wrap("ours", net, transport="shm")
    ddp(batch(rank, 0, 3, 4)).sum().backward()
    before = signal.signal(signal.SIGALRM, lambda *_: save_checkpoint(path, model=ddp, slow=_Slow()))
    ddp.zero_grad()
    loss = (rank + 1) * ddp(torch.zeros(2, 4)).sum()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    if rank == 1:
        time.sleep(1.0)
    loss.backward()
    signal.signal(signal.SIGALRM, before)
    assert (net.bias.grad == 3.0).all()
    assert_same_bits(torch.load(path)["model"], net.state_dict())


@pytest.mark.parametrize("aside", [False, True], ids=["in a hook", "on another thread"])
def test_a_snapshot_that_is_written_during_a_backward_leaves_it_alone(ranks2: RankPool, aside: bool, tmp_path: Path):
    ranks2.run(_save_during_backward, aside, tmp_path / "snapshot.pt", timeout=60)


def _save_during_backward(rank: int, world_size: int, aside: bool, path: Path) -> None:
    undisturbed = Training(FEEDBACK)
    undisturbed.steps(3)
    expected = undisturbed.all()
    training = Training(FEEDBACK)
    training.steps(2)
    parameters = dict(training.model.module.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}, training.model.reducer.state_dict()

    def save_meanwhile(_: Tensor) -> None:
        if aside:
            thread = threading.Thread(target=save_checkpoint, args=(path,), kwargs={"model": training.model})
            thread.start()
            thread.join()
        else:
            save_checkpoint(path, model=training.model)

    handle = parameters["0.weight"].register_hook(save_meanwhile)  # all other buckets are on their way
    training.steps(1)
    handle.remove()
    assert_same_bits(training.all(), expected, f"rank {rank}")
    again = Training(FEEDBACK, seed=5)
    load_checkpoint(path, model=again.model)
    found = {name: p.detach() for name, p in again.model.module.named_parameters()}, again.model.reducer.state_dict()
    assert_same_bits(found, before, f"rank {rank}, as before the step")


def test_another_compression_adds_the_residuals_to_its_first_gradients(ranks2: RankPool, tmp_path: Path):
    old = ranks2.run(save, tmp_path / "snapshot.pt")
    for rank, (state, left, lines) in enumerate(ranks2.run(_load_otherwise, tmp_path / "snapshot.pt")):
        assert_same_bits(state["model"], old[0]["model"])
        assert_same_bits(state["reducer"]["residuals"], old[rank]["reducer"]["residuals"])
        assert not any(residual.any() for residual in left.values())
        assert lines == []


def _load_otherwise(rank: int, world_size: int, path: Path) -> Any:
    training = Training("fp16", seed=5)
    with _log() as lines:
        load_checkpoint(path, **training.parts())
    state = training.all()
    training.steps(2)
    assert str(training.model.compression) == "fp16"
    return state, training.model.reducer.state_dict()["residuals"], lines


def test_residuals_of_other_parameters_are_left_out_and_it_says_so(ranks2: RankPool, tmp_path: Path):
    ranks2.run(save, tmp_path / "snapshot.pt")
    for rank, (kept, lines) in enumerate(ranks2.run(_load_into_another, tmp_path / "snapshot.pt")):
        assert not any(residual.any() for residual in kept.values())
        assert len(lines) == 1 and "is only in this reducer" in lines[0], rank


def _load_into_another(rank: int, world_size: int, path: Path) -> Any:
    model = wrap("ours", _net(), compression=FEEDBACK)
    with _log() as lines, contextlib.suppress(RuntimeError):  # torch's, of the module itself
        load_checkpoint(path, model=model.reducer)
    return model.reducer.state_dict()["residuals"], lines


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
    prefixed, compiled, inside = (
        {f"{prefix}{name}": value for name, value in state.items()}
        for prefix in ("module.", "_orig_mod.module.", "module._orig_mod.")
    )
    files: dict[str, Any] = {
        "a dict of parts": {"model": state, "epochs": 3},
        "with a wrapper's prefix": {"model": prefixed, "epochs": 3},
        "a module's state dict": state,
        "a wrapper's state dict": prefixed,
        "a compiled wrapper's": compiled,
        "a compiled module's in a wrapper": inside,
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


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_example_goes_on_after_its_ranks_were_killed_as_if_nothing_had_happened(ranks2: RankPool, tmp_path: Path):
    whole, killed = (tmp_path / name / "snapshot.pt" for name in ("whole", "killed"))
    command = [TORCHRUN, "--standalone", "--nproc_per_node=2", EXAMPLE, *OPTIONS]
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
    output = ranks2.run(_run_example, [*until, f"--resume_path={killed}"])[0]
    assert _losses(output).keys() == {epoch + 1, epoch + 2}
    output = ranks2.run(_run_example, [*until, f"--snapshot_path={whole}"])[0]
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
