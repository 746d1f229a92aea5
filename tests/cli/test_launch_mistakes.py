"""`fastreduce launch` and `run`, typed wrongly: the message says what may have been meant."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from fastreduce.cli import main
from tests.support.commands import FASTREDUCE, run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("launch --compression fp16 SCRIPT", "unrecognized arguments: --compression; --compression is an option of "
         "fastreduce run"),
        ("run --compresion fp16 SCRIPT", "unrecognized arguments: --compresion; did you mean --compression?"),
        ("launch --nprocs 2 SCRIPT", "unrecognized arguments: --nprocs; did you mean --nproc-per-node?"),
        ("launch --nproc-per-node two SCRIPT", "Unsupported nproc_per_node value: two; allowed: a number, auto, cpu"),
        ("launch --nproc-per-node 2", "no script is given: it stands behind the options"),
        ("run --compression auto SCRIPT", "or a policy, auto4 or 'key: setting; key: setting', did you mean 'auto4'?"),
    ],
)  # fmt: skip
def test_what_may_have_been_meant(arguments: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')\n")
    with patch.dict(os.environ):  # what `run` tells its ranks is for these alone
        ended = CliRunner().invoke(main, [str(script) if word == "SCRIPT" else word for word in arguments.split()])
    assert ended.exit_code in (1, 2) and told in ended.stderr, ended.stderr
    assert "it was started" not in ended.stderr + capfd.readouterr().err


@pytest.mark.long
def test_ranks_that_are_asked_for_behind_the_script_are_told_to_come_before_it(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    ended = run(FASTREDUCE, "run", script, "--nproc_per_node=2")
    assert ended.stdout == "['--nproc_per_node=2']\n"
    assert f"--nproc_per_node=2 stands behind {script}, which gets it" in ended.stderr
    ended = run(FASTREDUCE, "run", "--nproc-per-node", "1", script, "--nproc_per_node=2")
    assert "stands behind" not in ended.stderr


def test_without_a_temporary_folder_it_says_where_one_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "train.py").write_text("raise SystemExit('it was started')\n")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")  # nobody can make it
    with patch.dict(os.environ):
        ended = CliRunner().invoke(main, ["launch", "--nproc-per-node", "2", str(tmp_path / "train.py")])
    assert ended.exit_code == 2 and "a temporary folder cannot be made, of which TMPDIR says where: " in ended.stderr
    assert "No such file or directory: '/proc/nowhere/fastreduce-launch-" in ended.stderr
