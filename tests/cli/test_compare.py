"""`fastreduce compare` without a script: arguments, statistics, ranks, and one small run from end to end."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import psutil
import pytest
import typer
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner, Result

from fastreduce.cli import ending, main
from fastreduce.cli.compare import digits
from fastreduce.cli.compare.digits import report
from fastreduce.cli.compare.digits.statistics import chance_of_disagreement, conclude, summarise
from fastreduce.cli.compare.digits.training import (
    BARE,
    TORCH,
    TORCH_FP16,
    WARM_UP_STEPS,
    Experiment,
    Record,
    load_digits,
)
from fastreduce.cli.compare.intervals import Estimate, estimate_median
from fastreduce.cli.compare.results import FORMAT
from fastreduce.cli.output import make_console
from fastreduce.distributed.processes import Group, run_ranks
from fastreduce.errors import RanksFailedError
from fastreduce.run.orders import order
from tests.support.commands import FASTREDUCE, PYTHON, command_line, finish, run, started


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


# Arguments


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """The experiments that would be run."""
    experiments: list[Experiment] = []
    monkeypatch.setattr(digits, "run", lambda experiment, *_: experiments.append(experiment))
    return experiments


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([], ("none", "fp16", "bf16", "int8", "int8:error_feedback")),
        (["--settings", "none", "fp16", "bf16"], ("none", "fp16", "bf16")),
        (["--settings", "none", "fp16", "--ranks", "2"], ("none", "fp16")),
        (["--settings", "none", "--settings", "fp16", "bf16"], ("none", "fp16", "bf16")),
        (["--settings=none", "fp16"], ("none", "fp16")),
        (["--settings", "none", "int8:block=64,error_feedback"], ("none", "int8:block=64,error_feedback")),
        (["--settings", "none", "int8", "int8:block=128", "fp16", "fp16"], ("none", "int8", "fp16")),
        (["--settings", "fp16"], ("none", "fp16")),
    ],
)
def test_settings(arguments: list[str], settings: tuple[str, ...], asked: list[Experiment], tmp_path: Path):
    result = _invoke("--out", str(tmp_path), *arguments)
    assert result.exit_code == 0, result.output
    assert asked[0].settings == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "none", "fp17"], r"unknown compression 'fp17'.*allowed: none, fp16, bf16, int8"),
        (["--settings", "int8:block=3"], r"block=3 in 'int8'; allowed: multiples of 16"),
        (["--settings", "--ranks", "2"], r"--settings needs at least one setting"),
        (["--settings"], r"--settings needs at least one setting"),
        (["--rounds", "0"], r"--rounds 0: for a script only"),
        (["--train", "10", "--margin", "2"], r"--train, --margin: for a script only"),
        (["--ranks", "0"], r"(?s)--ranks.*greater than or equal to 1|--ranks.*x>=1"),
        (
            ["--device", "cuda", "--ranks", "99"],
            r"--ranks 99 needs as many GPUs, and torch sees \d+; or take --device cpu",
        ),
        (["--ranks", "1000000000"], r"(?s)--ranks.*(less than or equal to|<=) ?4096"),
        (["--rounds", "1000000000"], r"(?s)--rounds.*(less than or equal to|<=) ?100000"),
        (["--seeds", "1000000000", __file__], r"(?s)--seeds.*(less than or equal to|<=) ?10000"),
        (["--device", "tpu"], r"(?s)'tpu' is not one of 'cpu', 'cuda'"),
        (["--ranks", "4000"], r"--ranks 4000 is more than this machine can time: at most \d+"),
        (["--out", "/dev/null/x"], r"cannot write to /dev/null/x"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, asked: list[Experiment], tmp_path: Path):
    result = _invoke("--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert re.search(message, re.sub(r"\s*│?\n│?\s*", " ", result.output)), result.output
    assert asked == []


def test_help_tells_the_defaults():
    text = re.sub(r"\s*│?\n│?\s*", " ", _invoke("--help").output)
    assert "one a GPU; without GPUs 2" in text and "cuda where there is a GPU" in text


def test_a_bad_setting_is_one_line():
    assert len(_invoke("--settings", "fp17").output.splitlines()) == 1


def test_missing_packages_are_named(asked: list[Experiment], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ending, "find_spec", lambda name: None if name == "sklearn" else name)
    result = _invoke()
    assert result.exit_code == 2
    assert result.output == "fastreduce compare: scikit-learn is missing: pip install scikit-learn\n"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["compare"], marks=pytest.mark.long, id="built in"),
        pytest.param(["compare", __file__], id="script"),
        pytest.param(["advise", __file__], marks=pytest.mark.long, id="advise"),
    ],
)
def test_an_installation_without_extras_is_told_what_to_add(words: list[str]):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['scipy', 'sklearn', 'matplotlib', 'jinja2', 'plotly']));"
        "from fastreduce.cli import main; main()"
    )
    done = run(PYTHON, "-c", code, *words)
    lacking = {"compare": ["scipy", "matplotlib"], "advise": ["scipy"]}[words[0]]
    lacking = ["scikit-learn", *lacking] if len(words) == 1 else lacking
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"missing: pip install {' '.join(lacking)}\n" in done.stderr


# Order and statistics


def test_over_two_cycles_every_contender_has_the_same_mean_place():
    names = ["a", "b", "c", "d", "e"]
    rounds = [order(names, i) for i in range(2 * len(names))]
    assert all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) == len(rounds)
    assert {sum(r.index(name) for r in rounds) for name in names} == {4 * len(names)}


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    """Of scripts, folders and settings: rich has emojis for some, and takes others for its markup."""
    name = "out/:key:/[bold]train[/bold].py"
    make_console().print(name)
    assert capsys.readouterr().out == f"{name}\n"


def test_interval_of_a_median():
    assert estimate_median(range(1, 21)) == estimate_median(range(20, 0, -1))
    twenty = estimate_median(range(1, 21))
    assert (twenty.median, twenty.low, twenty.high) == (10.5, 6, 15)  # binomial tables: 6th and 15th of 20
    six = estimate_median([1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert (six.low, six.high) == (1.1, 1.6) and six.differs
    five = estimate_median([2.0, 2.0, 2.0, 2.0, 2.0])
    assert math.isnan(five.low) and not five.differs


def test_intervals_hold_the_true_median_as_often_as_they_say():
    samples = np.random.default_rng(0).lognormal(size=(400, 15))
    intervals = [estimate_median(sample) for sample in samples]
    assert sum(e.low <= 1 <= e.high for e in intervals) / len(intervals) >= 0.95


def test_chance_of_disagreement():
    right, wrong = [True] * 10, [False] * 10
    assert chance_of_disagreement(right, right) == 1.0
    assert chance_of_disagreement(right, wrong) == pytest.approx(2 * 0.5**10)
    assert chance_of_disagreement([True, False], [False, True]) == 1.0


EXPERIMENT = Experiment(("none", "fp16"), ranks=2, width=4, batch=8, rounds=8, steps=2, seed=0)


def _ranks(
    factors: dict[str, float], correct: dict[str, list[bool]] | None = None, fp16_weights: tuple[str, str] = ("w", "w")
) -> list[dict[str, Record]]:
    """Two ranks on a machine that slows down from round to round; steps are `factors` of 10 ms at first."""
    ranks = []
    for rank in (0, 1):
        records = {}
        for name in EXPERIMENT.contenders:
            steps = [
                [0.01 * factors[name] * (1 + 0.3 * i) * (1 - 0.1 * rank)] * EXPERIMENT.steps
                for i in range(EXPERIMENT.rounds)
            ]
            ours = name in EXPERIMENT.settings
            records[name] = Record(
                parameters=1000,
                transport="shm" if ours else "",
                sent_bytes=4000,
                step_seconds=steps,
                stage_seconds=[[(0.001, 0.002 + 0.002 * rank, 0.003)] * len(r) if ours else [] for r in steps],
                losses=[1.0 + rank] * EXPERIMENT.steps_each,
                gradient_errors=[0.1, 0.2, 0.3],
                correct=(correct or {}).get(name, [True] * 20),
                weights=fp16_weights[rank] if name == "fp16" else "same",
            )
        ranks.append(records)
    return ranks


FACTORS = {"none": 1.0, "fp16": 0.8, TORCH: 1.0, TORCH_FP16: 1.2, BARE: 0.5}


def test_figures():
    none, fp16, torch, torch_fp16 = summarise(EXPERIMENT, _ranks(FACTORS))
    assert [f.name for f in (none, fp16, torch, torch_fp16)] == ["none", "fp16", TORCH, TORCH_FP16]
    for estimate in (fp16.ratio, fp16.ratio_to_torch):  # paired: the drift of the machine cancels
        assert (estimate.median, estimate.low, estimate.high) == pytest.approx((0.8, 0.8, 0.8))
    slowest = 10 * np.median(1 + 0.3 * np.arange(8))
    assert (none.step, none.compute) == pytest.approx((slowest, 0.5 * slowest))
    assert none.exposed == pytest.approx(none.step - none.compute)
    assert fp16.stages == pytest.approx({"compress": 1, "reduce": 3, "decompress": 3})
    assert torch.stages == {}
    assert fp16.gradient_error == 0.2 and fp16.sent_bytes == 4000 and fp16.accuracy == 1.0
    assert fp16.losses == [1.5] * EXPERIMENT.steps_each


def _conclusion(**changes: object) -> str:
    factors = {**FACTORS, **changes.pop("factors", {})}  # type: ignore[dict-item]
    return "\n".join(conclude(summarise(EXPERIMENT, _ranks(factors, **changes))))  # type: ignore[arg-type]


def test_conclusion_when_compression_pays():
    said = _conclusion()
    assert "Fastest here was fp16: a step takes 0.80× none (0.80–0.80), a real difference." in said
    assert "fp16 takes 0.80× its step (0.80–0.80), a real difference; torch's fp16 hook takes 1.20×" in said
    assert "100.0% under every setting" in said and "Warning" not in said


def test_conclusion_when_it_does_not_pay_and_torch_is_faster():
    said = _conclusion(factors={"fp16": 1.3, TORCH: 0.5})
    assert "Fastest here was none: compressing does not pay on this machine." in said
    assert "Next is fp16: a step takes 1.30× none (1.30–1.30), a real difference." in said
    assert "Beside torch's own DDP, none takes 2.00× its step (2.00–2.00), a real difference" in said


def test_conclusion_when_the_fastest_is_not_the_surest():
    none, fp16, *torchs = summarise(EXPERIMENT, _ranks(FACTORS))
    unsure = replace(fp16, ratio=Estimate(0.84, 0.80, 1.01))
    sure = replace(fp16, name="int8", ratio=Estimate(0.88, 0.74, 0.94))
    said = conclude([none, unsure, sure, *torchs])[0]
    assert said.startswith("Fastest here was fp16: a step takes 0.84× none (0.80–1.01), no real difference;")
    assert said.endswith("; really faster than none: int8 with 0.88× (0.74–0.94).")


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        ((1.03, 0.65, 1.63), "Fastest here was none; fp16 takes 1.03× none (0.65–1.63). Whether compressing pays"),
        ((0.84, 0.80, 1.01), "Fastest here was fp16: a step takes 0.84× none (0.80–1.01). Whether compressing pays"),
        ((0.84, math.nan, math.nan), "Fastest here was fp16: a step takes 0.84× none. Whether compressing pays"),
        ((1.01, 0.99, 1.02), "Fastest here was none: compressing does not pay on this machine. Next is fp16"),
        ((0.99, 0.98, 1.02), "Fastest here was fp16: a step takes 0.99× none (0.98–1.02): compressing does not pay"),
    ],
)
def test_an_interval_that_holds_1_leaves_it_undecided_and_says_what_decides(ratio: tuple[float, ...], said: str):
    none, fp16, *torchs = summarise(EXPERIMENT, _ranks(FACTORS))
    sentence = conclude([none, replace(fp16, ratio=Estimate(*ratio)), *torchs])[0]
    assert sentence.startswith(said)
    undecided = "undecided: from 6 rounds on" if math.isnan(ratio[1]) else "undecided: intervals that hold 1 narrow"
    assert (undecided in sentence) == ("Whether" in said)


def test_conclusion_names_lost_accuracy_and_ranks_that_drifted_apart():
    said = _conclusion(correct={"fp16": [False] * 10 + [True] * 10}, fp16_weights=("a", "b"))
    assert "50.0% (fp16) to 100.0% (none): different from none beyond chance: fp16 (McNemar" in said
    assert "Warning: at the end the ranks' weights differ under fp16." in said
    said = _conclusion(correct={"fp16": [False] * 2 + [True] * 18})
    assert "90.0% (fp16) to 100.0% (none): the differences are within chance" in said


def test_the_seed_fixes_the_split():
    first, again, other = load_digits(3), load_digits(3), load_digits(4)
    assert first.test_images.equal(again.test_images) and not first.test_images.equal(other.test_images)
    assert len(first.train_labels) == 1437 and len(first.test_labels) == 360


# Ranks


def _raise_on_one(rank: int, report: object, experiment: object = None) -> None:
    if rank == 1:
        raise ValueError("boom")
    threading.Event().wait()


def _die_on_one(rank: int, report: object) -> None:
    if rank == 1:
        os._exit(3)
    threading.Event().wait()


def _hang(rank: int, report: object) -> None:
    threading.Event().wait()


@pytest.mark.long
@pytest.mark.usefixtures("preloaded")
def test_a_rank_that_raises_ends_the_command_with_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digits, "run_ranks", functools.partial(run_ranks, start_method="forkserver"))
    before = set(multiprocessing.active_children())
    with pytest.raises(typer.Exit) as ended:
        digits.run(EXPERIMENT, tmp_path, Console(), _raise_on_one)
    assert ended.value.exit_code == 1
    shown = capsys.readouterr().err
    assert "rank 1 failed:\nTraceback" in shown and "in _raise_on_one" in shown and "ValueError: boom" in shown
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.long
@pytest.mark.usefixtures("preloaded")
def test_a_rank_that_dies_is_named():
    before = set(multiprocessing.active_children())
    with pytest.raises(RanksFailedError, match="rank 1 ended with exit code 3"):
        run_ranks(_die_on_one, Group(2, 2), on_report=print, start_method="forkserver")
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.long
@pytest.mark.usefixtures("preloaded")
def test_ranks_that_hang_are_ended():
    before = set(multiprocessing.active_children())
    with pytest.raises(RanksFailedError, match="no rank has reported anything for 2 s"):
        run_ranks(_hang, Group(2, 2), on_report=print, stall_seconds=2, start_method="forkserver")
    assert set(multiprocessing.active_children()) <= before


def _ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [child for child in launcher.children() if "spawn_main" in command_line(child)]


@pytest.mark.long
@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_the_command(tmp_path: Path, received: signal.Signals):
    sizes = ["--ranks", 2, "--width", 4, "--settings", "none", "--rounds", 100000, "--out", tmp_path]
    with started(FASTREDUCE, "compare", *sizes) as process:
        launcher, deadline = psutil.Process(process.pid), time.monotonic() + 150
        while len(ranks := _ranks_of(launcher)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        if received == signal.SIGKILL:  # the others end ranks that have not begun, too
            while min(rank.num_threads() for rank in ranks) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
        process.send_signal(received)
        assert len(ranks) == 2
        _, left = psutil.wait_procs(ranks, timeout=60)
        # Whoever inherits a rank may leave it as a zombie.
        assert all(rank.status() == psutil.STATUS_ZOMBIE for rank in left)
        done = finish(process, 100)
    if received != signal.SIGKILL:
        assert done.returncode == 128 + received
        early = r"Traceback \(most recent call last\):\n(?:  .*\n)+EOFError: Ran out of input\n"  # of ranks not begun
        told = re.sub(early, "", done.stderr)
        assert told == f"fastreduce compare: {received.name}: all ranks were ended\n", done.stderr


def _hold_the_interpreter(rank: int, report: Callable[[int], None]) -> None:
    """As a collective or a compiler that does not let other threads run."""
    report(os.getpid())
    ctypes.PyDLL(None).sleep(10_000)


def _run_ranks_that_hold_it() -> None:
    run_ranks(_hold_the_interpreter, Group(2, 2), on_report=lambda pid: print(pid, flush=True))


@pytest.mark.long
def test_a_rank_that_lets_no_thread_run_ends_with_its_parent():
    code = "from tests.cli.test_compare import _run_ranks_that_hold_it as run\nif __name__ == '__main__': run()"
    with started(sys.executable, "-c", code) as process:
        ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        assert psutil.wait_procs(ranks, timeout=300)[1] == []


# From end to end

SETTINGS = ["none", "fp16", "int8"]
ROUNDS, STEPS = 6, 2


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (lambda out: (out / "results.json").mkdir(), "results.json: it is a folder"),
        (lambda out: (out / "logs").touch(), "logs: it is no folder"),
    ],
)
@pytest.mark.parametrize("script", [[], [__file__]], ids=["built in", "script"])
def test_what_could_not_be_written_is_told_before_anything_is_measured(
    there: Callable[[Path], None], why: str, script: list[str], asked: list[Experiment], tmp_path: Path
):
    there(tmp_path)
    result = _invoke("--out", str(tmp_path), *script)
    assert (result.exit_code, asked) == (2, [])
    assert result.output == f"fastreduce compare: cannot write to {tmp_path}/{why}\n"


@pytest.mark.long
def test_results_that_cannot_be_written_in_the_end_are_shown(
    preloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "results.json"))

    monkeypatch.setattr(digits, "run_ranks", functools.partial(run_ranks, start_method="forkserver"))
    monkeypatch.setattr(report, "write_results", full)
    sizes = ["--width", "6", "--rounds", "3", "--steps", "2", "--settings", "none", "--ranks", "1"]
    result = _invoke(*sizes, "--out", str(tmp_path))
    assert result.exit_code == 1 and re.search(r"^none  +\d", result.output, re.MULTILINE), result.output
    said = f"fastreduce compare: cannot write to {tmp_path}/results.json: No space left on device"
    assert result.output.splitlines()[-1] == said


@pytest.fixture(scope="module")
def finished(preloaded: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A small run and where its files are. Its ranks begin as forks, with torch imported."""
    out = tmp_path_factory.mktemp("compare") / "new" / "folder"
    sizes = ["--width", "6", "--rounds", str(ROUNDS), "--steps", str(STEPS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "run_ranks", functools.partial(run_ranks, start_method="forkserver"))
        return _invoke("--ranks", "2", "--settings", *SETTINGS, *sizes, "--out", str(out)), out


def test_run_prints_a_table_and_a_conclusion_without_escapes(finished: tuple[Result, Path]):
    result, _ = finished
    assert result.exit_code == 0, result.output
    for name in [*SETTINGS, TORCH, TORCH_FP16, BARE]:
        assert re.search(rf"^{name}  +\d", result.output, re.MULTILINE), name
    assert "Fastest here was " in result.output and "Accuracy on the held-out digits is " in result.output
    assert "\x1b" not in result.output
    *lines, _ = result.output.splitlines()  # the last has a path, which must be whole to be copied
    assert max(map(len, lines)) <= 120 and len(lines) < 50


def test_results_hold_what_was_measured(finished: tuple[Result, Path]):
    results = json.loads((finished[1] / "results.json").read_text())
    settings = results["settings"]
    assert list(settings) == [*SETTINGS, TORCH, TORCH_FP16]
    assert results["experiment"]["seed"] == 0 and results["command"] and results["conclusion"]
    assert {"fastreduce", "torch", "numpy", "numba", "python"} == set(results["versions"])
    assert results["format"] == FORMAT and datetime.fromisoformat(results["date"]).tzinfo is not None
    assert re.fullmatch(r"([0-9a-f]{40}(\+changes)?)?", results["commit"])
    assert results["machine"]["cores"] >= 1 and results["machine"]["processor"]
    for figures in [*settings.values(), results["bare"]]:
        assert np.shape(figures["step_seconds"]) == (ROUNDS, STEPS)
        assert np.all(np.asarray(figures["step_seconds"]) > 0)
    for name, figures in settings.items():
        assert len(figures["losses"]) == WARM_UP_STEPS + ROUNDS * (1 + STEPS)
        assert figures["ratio"]["low"] <= figures["ratio"]["median"] <= figures["ratio"]["high"]
        assert figures["same_on_all_ranks"]
        assert set(figures["stages"]) == ({"compress", "reduce", "decompress"} if name in SETTINGS else set())
    assert settings["none"]["losses"][0] == settings["int8"]["losses"][0]  # the same seed, the same batch


def test_compression_sends_less_and_changes_gradients_no_more_than_its_format(finished: tuple[Result, Path]):
    settings = json.loads((finished[1] / "results.json").read_text())["settings"]
    sent = [settings[name]["sent_bytes"] for name in ("int8", "fp16", "none")]
    assert sent == sorted(set(sent))
    assert sent[2] == pytest.approx(settings[TORCH]["sent_bytes"], rel=0.05)
    for name, bound in {"none": 1e-6, TORCH: 1e-6, "fp16": 1e-3, TORCH_FP16: 2e-3, "int8": 5e-2}.items():
        assert max(settings[name]["gradient_errors"]) < bound, name
    assert settings["int8"]["gradient_error"] > settings["fp16"]["gradient_error"] > 1e-6


def test_a_report_is_beside_the_results(finished: tuple[Result, Path]):
    result, out = finished
    assert f" s, ours over shm. Wrote {out}/results.json, compare.png and report.html." in result.output
    page = (out / "report.html").read_text()
    assert "<h1>Fastest here was " in page


def test_plot_shows_something(finished: tuple[Result, Path]):
    picture = imread(finished[1] / "compare.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 1000
    assert len(np.unique(picture[::4, ::4, :3].reshape(-1, 3), axis=0)) > 100
