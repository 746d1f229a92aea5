"""Commands whose output cannot be written: one line, exit code 1, and their results all the same."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from fastreduce.cli import main
from fastreduce.cli.doctor import show
from fastreduce.cli.doctor.rows import FAILED, MISSING, Row
from tests.support.commands import INSTALLED, ROOT, run
from tests.support.results_files import of_a_script, write

SCRIPT = ROOT / "tests" / "support" / "trained_script.py"
FULL = "fastreduce: cannot write to stdout: No space left on device\n"
TRACE = '{"displayTimeUnit": "ms", "baseTimeNanoseconds": 0, "fastreduce": {"run": "this"}, "traceEvents": [\n{}\n]}\n'


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["--version"], ""),
        (["--help"], ""),
        (["run", "--help"], ""),
        (["trace", "FOLDER"], "trace.json"),
        (["report", "FOLDER/results.json"], "report.html"),
    ],
    ids=["version", "help", "help of run", "trace", "report"],
)
def test_a_full_disk_is_one_line(
    arguments: list[str],
    written: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "rank0.json").write_text(TRACE)
    write(of_a_script(), tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            main([word.replace("FOLDER", str(tmp_path)) for word in arguments])
        assert sys.stdout is full
    assert (end.value.code, capsys.readouterr().err) == (1, FULL)
    assert not written or (tmp_path / written).stat().st_size > 0


@pytest.mark.long
@pytest.mark.parametrize("unwritable", ["> /dev/full", ">&-"])
def test_a_process_ends_without_another_word(unwritable: str):
    """As Python has, where it ends and text is left in a buffer."""
    done = run("sh", "-c", f"{INSTALLED} --version {unwritable}")
    assert (done.returncode, done.stderr) == ((1, FULL) if "full" in unwritable else (0, ""))


@pytest.mark.long
def test_a_comparison_that_nobody_reads_on_is_measured_to_its_end(tmp_path: Path):
    options = f"--ranks 2 --settings fp16 --rounds 0 --train 5 --seeds 1 --out {tmp_path}"
    done = run("bash", "-c", f"{INSTALLED} compare {options} {SCRIPT} 5 | head -1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (1, "fastreduce: cannot write to stdout: Broken pipe\n")
    assert done.stdout.count("\n") == 1 and "--train 5 --seeds 1: none, fp16." in done.stdout
    assert {"compare.png", "results.json"} <= set(os.listdir(tmp_path))


@pytest.mark.long
def test_the_command_is_a_module_too(tmp_path: Path):
    """Of this interpreter, where another environment's command is first on PATH, or none is, as under mpirun."""
    script = tmp_path / "train.py"
    script.write_text("import os\nos.write(1, f'rank {os.environ[\"RANK\"]}\\n'.encode())\n")  # whole, beside the other
    command = sys.executable, "-m", "fastreduce"
    assert run(*command, "--version").stdout == run(INSTALLED, "--version").stdout
    done = run(*command, "launch", "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == ["rank 0", "rank 1"]


@pytest.mark.long
def test_a_console_that_lacks_a_letter_ends_no_command(tmp_path: Path):
    results = write(of_a_script(), tmp_path)
    command = f"PYTHONIOENCODING=iso8859-1 {INSTALLED} report {results} --out {tmp_path}/–.html"
    done = run("bash", "-c", command)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "–.html").exists() and "?.html" in done.stdout


class _Own:
    """What a script puts in the place of stdout: it can write, and no more."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return


def test_a_stdout_of_a_scripts_own_ends_no_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", _Own())
    with pytest.raises(SystemExit) as end:
        main(["compare", "--help"])
    assert end.value.code == 0


C_LOCALE = "env -u LC_CTYPE LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["compare --help", "report FOLDER/results.json --out FOLDER/–.html"])
def test_a_locale_without_letters_ends_no_command(arguments: str, tmp_path: Path):
    """As of a container without any: Python's stdout is ASCII then, and so are files that are opened without a word."""
    write(of_a_script(), tmp_path)
    done = run("bash", "-c", f"{C_LOCALE} {INSTALLED} {arguments.replace('FOLDER', str(tmp_path))}")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii()
    if "html" in arguments:
        assert "↕" in (tmp_path / "–.html").read_text("utf-8")


def test_marks_of_the_doctor_differ_in_ascii(monkeypatch: pytest.MonkeyPatch):
    console = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(console, "ascii", "replace"))
    show({"section": [Row("one", "1"), Row("two", "2", MISSING), Row("three", "3", FAILED)]}, ["three"])
    sys.stdout.flush()
    assert [line.split()[:2] for line in console.getvalue().decode().splitlines()[1:4]] == [
        ["+", "one"],
        ["-", "two"],
        ["x", "three"],
    ]


@pytest.mark.parametrize(
    "command", ["compare NAME", "compare --settings none NAME", "run NAME", "report FILE --out NAME"]
)
def test_a_name_that_is_too_long_for_a_file_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, name = write(of_a_script(), tmp_path), "a" * 300
    with patch.dict(os.environ), pytest.raises(SystemExit) as end:  # what `run` tells its ranks is for these alone
        main([word.replace("NAME", name).replace("FILE", str(path)) for word in command.split()])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith(f"fastreduce {command.split()[0]}: ") and said.count("\n") == 1
