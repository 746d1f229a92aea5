"""`fastreduce compare script.py`: what is the script's, and runs from end to end, with verdicts that are known."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import psutil
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from fastreduce.cli import main
from fastreduce.cli.compare.script import measure, speed, trainings
from fastreduce.cli.compare.script.plan import Plan
from tests.support.commands import FASTREDUCE, ROOT, command_line, finish, started
from tests.support.fork_server import Forked, run_command, server
from tests.support.installed_torch import lacks_bf16_hook

MODULE = "tests.support.trained_script"
SCRIPT = str(ROOT / "tests" / "support" / "trained_script.py")


def _invoke(out: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", "--out", str(out), *map(str, arguments)])


# Arguments


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that would be run."""
    plans: list[Plan] = []
    monkeypatch.setattr(measure, "run", lambda plan, _: plans.append(plan))
    return plans


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ([SCRIPT], ("none", "fp16", "bf16", "int8", "int8:error_feedback"), (SCRIPT,)),
        ([SCRIPT, "--settings", "x", "--", "-m"], None, (SCRIPT, "--settings", "x", "--", "-m")),
        (["--settings", "int8", "fp16", SCRIPT, "10"], ("none", "int8", "fp16"), (SCRIPT, "10")),
        (["--settings", "int8", "--ranks", "2", SCRIPT, "--lr=1"], ("none", "int8"), (SCRIPT, "--lr=1")),
        (["--settings", "int8", "--", SCRIPT], ("none", "int8"), (SCRIPT,)),
        (["--settings", "none", "torch:fp16", "none", SCRIPT], ("none", "none again", "torch:fp16"), (SCRIPT,)),
        (
            ["--ranks", "2", "-m", "tests.support.trained_script", "--help"],
            None,
            ("tests.support.trained_script", "--help"),
        ),
    ],
)
def test_what_stands_behind_the_script_is_the_scripts(
    arguments: list[str], settings: tuple[str, ...] | None, words: tuple[str, ...], asked: list[Plan], tmp_path: Path
):
    result = _invoke(tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert asked[0].words == words and asked[0].module == ("-m" in arguments[:3])
    assert settings is None or asked[0].settings == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "missing.module"], "there is no module 'missing.module'"),
        (["-m"], "-m needs the name of a module"),
        (["--settings", "fp17", SCRIPT], "unknown compression 'fp17'"),
        (["--settings", "torch:int8", SCRIPT], "of torch there are: torch, torch:fp16, torch:bf16"),
        (["--train", "some", SCRIPT], "--train some: give a number of steps, or whole"),
        (["--rounds", "0", SCRIPT], "--rounds 0 takes no times: then give --train, for losses"),
        (["--train", "9", "--metric-line", "(.)", SCRIPT], "--metric-line and --metric-file need --train whole"),
        (["--train", "whole", "--metric-line", "(", SCRIPT], "--metric-line (: missing )"),
        (
            ["--train", "whole", "--metric-line", "a", SCRIPT],
            "one pair of parentheses says where",
        ),
        (["--target", "nan", SCRIPT], "--target nan: give a number"),
        (["--margin", "nan", SCRIPT], "--margin nan: give percent, 0 or more"),
        (["--margin", "-1", SCRIPT], "--margin -1: give percent, 0 or more"),
        (["--timeout", "nan", SCRIPT], "--timeout nan: give seconds, 1 or more"),
        (["--train", "whole", "--metric-file", "", SCRIPT], "--metric-file '': give a file, as in metrics.json:loss"),
        (["--train", "whole", "--metric-file", ":loss", SCRIPT], "--metric-file ':loss': give a file"),
        (["--weights-from", "", SCRIPT], "unknown compression ''"),
        (
            ["--seed", "4294967294", "--seeds", "3", "--train", "9", SCRIPT],
            "--seed 4294967294 --seeds 3: the last one is 4294967296; allowed: up to 4294967295",
        ),
        ([""], "there is no script ''"),
        (["tests"], "'tests' is a folder without a __main__.py: give the script in it"),
        (["--width", "8", "--device", "cpu", SCRIPT], "--device, --width: for the built-in network only"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, asked: list[Plan], tmp_path: Path):
    result = _invoke(tmp_path, *arguments)
    assert (result.exit_code, asked) == (2, [])
    (line,) = result.stderr.splitlines()
    assert line.startswith("fastreduce compare: ") and message in line


@pytest.mark.parametrize("command", ["compare", "advise"])
def test_a_variable_that_every_training_would_fail_by_is_named_before(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("FASTREDUCE_TRANSPORT", "bogus")
    for script in ([], [SCRIPT])[command == "advise" :]:
        result = CliRunner().invoke(main, [command, "--out", str(tmp_path / "out"), *script])
        assert result.exit_code == 2 and not (tmp_path / "out").exists()
        assert result.stderr.startswith(f"fastreduce {command}: FASTREDUCE_TRANSPORT=bogus: allowed: "), result.stderr


# From end to end


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings begin as forks, with torch imported; others here begin as users'."""

    def start(command: list[str], env: dict[str, str], stdout: TextIO, **_: Any) -> Forked:
        assert command[1:3] == ["-c", trainings.COMMAND]
        return server().fork(run_command, FASTREDUCE, command[3:], None, env=env, output=(stdout.fileno(),) * 2)

    processes = SimpleNamespace(**vars(subprocess))
    processes.Popen = start
    monkeypatch.setattr(trainings, "subprocess", processes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A comparison in which int8 is known to be bad, and none is held against itself."""
    out = tmp_path_factory.mktemp("compare") / "new"
    options = ["--settings", "none", "int8", "none", "--rounds", 6, "--steps", 2, "--train", "whole", "--seeds", 2]
    options += ["--target", 30, "--metric-line", r"accuracy ([\d.]+)"]
    # A turn is five steps: 6 rounds of 6 contestants, with torch's bf16 hook, which gloo has not, 7.
    return _invoke(out, "--ranks", 2, *options, SCRIPT, 250, "outlier"), out


@pytest.mark.timeout(400)
@pytest.mark.long
@lacks_bf16_hook
def test_verdicts_that_are_known(finished: tuple[Result, Path]):
    result, _ = finished
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "none again is equal: loss equal to the last bit; metric equal to the last bit." in text
    assert re.search(r"int8 does not pay: step \d.*; loss higher by more than 1 %: \+\d", text)
    assert "torch:bf16 was left out: BF16 all reduce communication hook" in text
    for name in ("none", "none again", "int8", "torch", "torch:fp16", "no reduction"):
        assert re.search(rf"^{name} +\d", result.output, re.MULTILINE), name
    *lines, _ = result.output.splitlines()  # the last has a path, which must be whole to be copied
    assert max(map(len, lines)) <= 120 and "\x1b" not in result.output


@pytest.mark.long
@lacks_bf16_hook
def test_results_hold_every_turn_and_training(finished: tuple[Result, Path]):
    results = json.loads((finished[1] / "results.json").read_text())
    turns = results["turns"]
    rounds = [[turn["contestant"] for turn in turns if turn["round"] == number] for number in range(6)]
    assert all(sorted(r) == sorted(rounds[0]) and len(r) == 6 for r in rounds) and len({tuple(r) for r in rounds}) > 3
    assert all(np.shape(turn["seconds"]) == (2, 2) and np.min(turn["seconds"]) > 0 for turn in turns)
    assert results["flights"].keys() == {"none", "none again", "int8"}  # torch's reducer keeps none
    for flight in results["flights"].values():
        assert sum(flight["took"].values()) == pytest.approx(flight["seconds"]) and len(flight["buckets"]) == 1
        assert flight["buckets"][0]["exchanged"] is None, "shared memory averages in one"
    assert results["missing"] == [] and results["wrapped"]["parameters"] == 128 and results["wrapped"]["ranks"] == 2
    none, again, int8 = (results["quality"][name]["outcomes"] for name in ("none", "none again", "int8"))
    assert [outcome["losses"] for outcome in none] == [outcome["losses"] for outcome in again]
    assert len(none[0]["losses"]) == 250 and none[0]["losses"] != none[1]["losses"]  # seeds differ
    assert none[0]["losses"][0] == int8[0]["losses"][0]  # the same seed
    assert results["quality"]["none"]["reached"] == 2 and results["quality"]["int8"]["reached"] == 0
    assert results["quality"]["none"]["metric_mean"] == pytest.approx(1 / (1 + none[0]["losses"][-1]), rel=0.2)
    assert {verdict["setting"] for verdict in results["verdicts"]} == {"none again", "int8", "torch", "torch:fp16"}


@pytest.mark.long
def test_a_report_is_beside_the_results(finished: tuple[Result, Path]):
    page = (finished[1] / "report.html").read_text()
    assert "<h1>int8 does not pay.</h1>" in page and 'id="differences"' in page and 'id="group-errors"' in page


@pytest.mark.long
def test_plot_shows_three_panels(finished: tuple[Result, Path]):
    picture = imread(finished[1] / "compare.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 2000
    assert len(np.unique(picture[..., :3].reshape(-1, 3), axis=0)) > 100


def test_a_folder_with_the_name_of_a_setting_is_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Plan]
):
    (tmp_path / "int8").mkdir()
    monkeypatch.chdir(tmp_path)
    _invoke(tmp_path / "out", "--settings", "none", "int8", SCRIPT, "int8")
    assert [(plan.settings, plan.words) for plan in asked] == [(("none", "int8"), (SCRIPT, "int8"))]


@pytest.mark.usefixtures("forked")
def test_a_script_that_fails_is_named_at_once_with_its_setting_and_seed(tmp_path: Path):
    options = ["--rounds", 0, "--train", 5, "--seeds", 2, "--seed", 3, "--settings", "none", "int8"]
    result = _invoke(tmp_path, "--ranks", 1, *options, SCRIPT, 9, "failing")
    assert result.exit_code == 7
    assert (
        "the training under int8 with seed 3 failed with exit code 7: rank 0 has left the script after step 3; "
        in result.stderr
    )
    assert "failed with exit code 7\n" in result.stderr.split("ends with")[1]
    assert "Missing: 3 of 4 trainings for quality." in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["missing"] == ["3 of 4 trainings for quality"]
    assert [(each["seed"], each["step"]) for each in results["gradient_errors"]] == [(3, step) for step in range(1, 6)]
    assert all(set(each["errors"]["int8"]) == {"all", "weights"} for each in results["gradient_errors"])
    assert "Missing: 3 of 4 trainings for quality." in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("forked")
def test_a_signal_waits_until_what_was_measured_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And what the ranks have started, which their script ends behind its last step, ends with the training."""
    write = measure.write_page  # type: ignore[attr-defined]

    def interrupted(out: Path) -> str:
        signal.raise_signal(signal.SIGINT)
        return write(out)

    monkeypatch.setattr(measure, "write_page", interrupted)
    options = ["--rounds", 0, "--train", 3, "--seeds", 1, "--settings", "none"]
    result = _invoke(tmp_path, "--ranks", 1, *options, SCRIPT, 9, "helped")
    assert result.exit_code == 130
    assert "fastreduce compare: SIGINT: what was measured is written first; once more ends at once\n" in result.stderr
    assert f"Wrote {tmp_path}" in result.stdout and (tmp_path / "report.html").exists()
    (helper,) = re.findall(r"helped by (\d+)", (tmp_path / "logs" / "none-seed0.txt").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(helper)).wait(20)


@pytest.mark.usefixtures("forked")
@pytest.mark.long
@lacks_bf16_hook
def test_rounds_that_a_short_script_does_not_reach_are_said_to_be_missing(tmp_path: Path):
    """A round of five contestants is 20 steps, after 5."""
    options = ["--ranks", 2, "--settings", "none", "--rounds", 3, "--steps", 1]
    result = _invoke(tmp_path, *options, SCRIPT, 50)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "Missing: 1 of 3 rounds of speed: they take 65 steps, the script fewer." in said
    assert re.search(
        r"torch is undecided: step \d\.\d\d of none, which decides nothing: intervals need 6 rounds\.", said
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.long
def test_a_script_that_is_too_short_for_times_is_trained_all_the_same(tmp_path: Path):
    options = ["--ranks", 2, "--settings", "none", "--rounds", 6, "--steps", 1, "--train", "whole", "--seeds", 1]
    result = _invoke(tmp_path, *options, SCRIPT, 10)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"Missing: all 6 rounds of speed: {SCRIPT} ended before a round was over: six, the fewest that" in said
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["turns"], len(results["quality"]["none"]["outcomes"][0]["losses"])) == ([], 10)
    assert "all 6 rounds of speed" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('hello')", "the training whose steps are timed made no DistributedDataParallel"),
        pytest.param(
            "import torch.distributed as d, torch; d.init_process_group('gloo'); "
            "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
            "ended before a round was over: six, the fewest that have an interval, take",
            marks=pytest.mark.long,
        ),
    ],
    ids=["no DDP", "no step"],
)
def test_a_script_with_nothing_to_compare_is_an_error(tmp_path: Path, code: str, message: str):
    script = tmp_path / "train.py"
    script.write_text(code)
    result = _invoke(tmp_path, "--ranks", 1, script)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not (tmp_path / "results.json").exists()


HANGING = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(9):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(1000)
    ddp(torch.ones(1, 2)).sum().backward()
"""
SPAWNING = """
import os, torch, torch.distributed as dist
def train(queue):
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(9):
        ddp(torch.ones(1, 2)).sum().backward()
    queue.put(1)
if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=train, args=[queue]).start()
    queue.get()
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.long
def test_a_training_that_takes_no_step_is_ended_and_says_which_rank_is_missing(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    result = _invoke(tmp_path, "--ranks", 2, "--settings", "none", "--timeout", 20, script)
    assert result.exit_code == 1
    said = "took no step for 20 s (--timeout): rank 0 is in step 4, rank 1 has ended step 3;"
    assert said in result.stderr, result.output


@pytest.mark.long
def test_nobody_waits_for_a_script_that_waits_for_its_ended_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainings, "END_SECONDS", 2)
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    result = _invoke(tmp_path, "--ranks", 1, "--settings", "none", "--rounds", 0, "--train", 5, "--seeds", 1, script)
    assert result.exit_code == 0, result.output
    outcomes = json.loads((tmp_path / "results.json").read_text())["quality"]["none"]["outcomes"]
    assert [len(outcome["losses"]) for outcome in outcomes] == [5]


@pytest.mark.usefixtures("forked")
@pytest.mark.long
def test_steps_that_the_script_does_not_take_are_missing_and_old_metrics_are_none(tmp_path: Path):
    options = ["--ranks", 2, "--settings", "none", "--rounds", 0, "--seeds", 1]
    result = _invoke(tmp_path, *options, "--train", 9, SCRIPT, 4)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "Missing: steps of 1 of 1 trainings: the script ends after 4, --train asks for 9." in said
    old = tmp_path / "metric"
    old.write_text("0.9")
    result = _invoke(tmp_path, *options, "--train", "whole", "--metric-file", old, SCRIPT, 4)
    assert result.exit_code == 2 and f"{old} is older than the training" in result.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.long
def test_a_script_with_a_hook_of_its_own_is_an_error(tmp_path: Path):
    result = _invoke(tmp_path, "--ranks", 2, SCRIPT, 9, "hooked")
    assert result.exit_code == 1
    assert "the script registers a communication hook, which decides what goes on the wire" in result.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.long
@pytest.mark.timeout(400)
@lacks_bf16_hook
def test_contestants_that_cannot_change_within_a_training_alternate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In `join()`; two ranks without torch's bf16 hook."""
    monkeypatch.setattr(speed, "ROUNDS_APART", 1)
    script = tmp_path / "train.py"
    text = Path(SCRIPT).read_text()
    script.write_text(
        text.replace("    for step in range(steps):", "    ddp.join().__enter__()\n    for step in range(steps):")
    )
    result = _invoke(tmp_path, "--ranks", 2, "--settings", "none", script, 60)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["apart"].startswith("the script trains in join()")
    assert {turn["contestant"] for turn in results["turns"]} == {
        "none",
        "none again",
        "torch",
        "torch:fp16",
        "no reduction",
    }
    assert "intervals need 6 rounds" in " ".join(result.output.split())


@pytest.mark.long
@pytest.mark.parametrize("received", [signal.SIGINT, 15, 9])
def test_no_rank_outlives_the_command(tmp_path: Path, received: signal.Signals):
    options = ["--ranks", 2, "--settings", "none", "--rounds", 5000, "--out", tmp_path]
    with started(FASTREDUCE, "compare", *options, SCRIPT, 10**9) as process:
        deadline = time.monotonic() + 200
        while not (tmp_path / "logs" / "speed.txt").exists() or len(ranks := _ranks(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(received)
        assert psutil.wait_procs(ranks, timeout=100)[1] == []
        done = finish(process, 60)
    if received != signal.SIGKILL:
        assert done.returncode == 128 + received
        assert done.stderr.endswith(f"fastreduce compare: {signal.Signals(received).name}: all ranks were ended\n")


def _ranks(command: int) -> list[psutil.Process]:
    children = psutil.Process(command).children(recursive=True)
    return [child for child in children if "worker.py " in command_line(child)]
