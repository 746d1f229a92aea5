"""`fastreduce run` and `python -m fastreduce.run`: unedited scripts get our class, and see what plain Python shows."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchs_parser
from typer.testing import CliRunner

from fastreduce.cli import main
from fastreduce.run import replacement, why_not_found
from tests.support.commands import INSTALLED, PYTHON, TORCHRUN, finish, run, started, with_environment
from tests.support.run_scripts import MODULE, RUN, said

BOTH_WAYS = pytest.mark.parametrize("command", [RUN, pytest.param(MODULE, marks=pytest.mark.long)], ids=["run", "-m"])


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["fastreduce run", "torchrun -m fastreduce.run"])
def test_an_unedited_script_gets_our_class_and_its_own_options(script: Path, launcher: str):
    """Two of them are named as ours are. Launcher and ranks begin as users' do."""
    torchrun = ["--standalone", "--nproc_per_node=2"]
    own = ["--compression", "int8", "--", "--help"]
    if launcher == "fastreduce run":
        done = run(INSTALLED, "run", "--compression", "bf16", *torchrun, script, *own)
    else:
        done = run(TORCHRUN, *torchrun, "-m", "fastreduce.run", "--compression", "bf16", script, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"CLASS fastreduce.ddp bf16 0.5 {own} 7" in done.stdout
    processes = "2 modules in 2 processes" if launcher == "fastreduce run" else "1 module in 1 process"
    assert said(done) == [
        "fastreduce: Linear is wrapped by fastreduce, compression bf16",
        f"fastreduce run: {processes} wrapped by fastreduce, compression bf16",
    ]


@pytest.mark.long
@pytest.mark.parametrize("end", ["os._exit(3)", "", "raise SystemExit(3)", "os.kill(os.getpid(), 15)"])
def test_no_file_stays_however_the_script_ends(script: Path, tmp_path: Path, end: str):
    folder = tmp_path / "temporary"
    folder.mkdir()
    script.write_text(f"import os\n{end}\n")
    done = run(*MODULE, script, env={**with_environment(), "TMPDIR": str(folder)})
    assert done.returncode == (0 if not end else -15 if "kill" in end else 3), done.stderr
    assert [path.name for path in folder.iterdir() if path.name.startswith("fastreduce")] == []


def test_a_script_may_put_a_function_around_torchs_init(script: Path):
    """Before ours is imported: which arguments there are is known from when torch was."""
    script.write_text(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "construct = DistributedDataParallel.__init__\n"
        "DistributedDataParallel.__init__ = lambda self, *args, **kwargs: construct(self, *args, **kwargs)\n"
        + script.read_text().replace("DDP(", "DDP(static_graph=True, module=")
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(*MODULE, script, env={**with_environment(), **place})
    assert done.returncode == 0 and "CLASS fastreduce.ddp" in done.stdout, done.stderr


@pytest.mark.long
def test_a_file_that_has_the_place_of_a_closed_record_is_left_alone(script: Path, tmp_path: Path):
    script.write_text(
        "import os\nos.closerange(3, 100)\nfiles = [open(f'mine{i}', 'w') for i in range(20)]\n"
        + script.read_text().replace("import sys\n", "import sys\nsys.path.insert(0, os.path.dirname(__file__))\n")
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run(*MODULE, script, env={**with_environment(), **place}, cwd=tmp_path)
    assert done.returncode == 0 and "CLASS fastreduce.ddp" in done.stdout, done.stderr
    assert "what was wrapped is not known: the script has closed" in done.stderr
    assert [path.read_text() for path in tmp_path.glob("mine*")] == 20 * [""]


@BOTH_WAYS
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "fp17", "SCRIPT"], "unknown compression 'fp17'"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "missing.module"], "there is no module 'missing.module'"),
        ([], "usage:"),
        (["--compresion", "fp16", "SCRIPT"], "usage:"),
    ],
)
def test_bad_input_is_an_error_before_anything_starts(
    script: Path, command: list[str], arguments: list[str], message: str
):
    arguments = [str(script) if a == "SCRIPT" else a for a in arguments]
    if command is RUN:
        ended = CliRunner().invoke(main, ["run", *arguments])
        code, out, err = ended.exit_code, ended.stdout, ended.stderr
    else:
        done = run(*command, *arguments)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_rank_of_mpiruns_refuses_what_is_for_ranks_that_are_started_here(
    script: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, number in {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(number))
    monkeypatch.delenv("RANK", raising=False)
    ended = CliRunner().invoke(main, ["run", "--max-restarts", "3", "--log-dir", "logs", str(script)])
    assert ended.exit_code == 2
    assert "--max-restarts, --log-dir: " in ended.stderr and "takes --compression, --trace and -m" in ended.stderr


def test_a_module_that_another_finder_finds_is_there(monkeypatch: pytest.MonkeyPatch):
    """As one that is installed to be edited."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert why_not_found("module", "edited.train") == ""
    assert why_not_found("module", "missing.train") == "there is no module 'missing.train'"


def test_a_setting_in_the_environment_is_checked_too(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "fp17")
    done = CliRunner().invoke(main, ["run", str(script)])
    assert done.exit_code == 2 and done.stderr.startswith(
        "fastreduce run: FASTREDUCE_COMPRESSION: unknown compression 'fp17'"
    )


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TRANSPORT", "shmm", "FASTREDUCE_TRANSPORT=shmm: allowed: gloo, shm, mpi, nccl, two_level"),
        (
            "KERNELS",
            "numba",
            "FASTREDUCE_KERNELS=numba: unknown kernel backend 'numba'; allowed: reference, numba_cpu, ",
        ),
        ("DUMP_SIGNAL", "KILL", "FASTREDUCE_DUMP_SIGNAL=KILL: allowed: USR1, USR2, none"),
        ("DEBUG", "yes", "FASTREDUCE_DEBUG=yes: allowed: 1 or true, 0 or false"),
    ],
)
def test_a_variable_that_only_ranks_read_is_checked_too(
    script: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
):
    monkeypatch.setattr(sys.modules["fastreduce.cli.run"], "start", lambda _: pytest.fail("a rank is started"))
    monkeypatch.setenv(f"FASTREDUCE_{name}", value)
    done = CliRunner().invoke(main, ["run", str(script)])
    assert done.exit_code == 2 and done.stderr.startswith(f"fastreduce run: {allowed}"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_in_the_place_of_a_folder_is_said_with_its_option(script: Path, tmp_path: Path):
    done = CliRunner().invoke(main, ["run", "--trace", str(script), str(script)])
    assert done.exit_code == 2 and done.stderr.startswith(f"fastreduce run: --trace {script}: "), done.stderr
    (tmp_path / "rank.0").touch()
    ended = run(*RUN, "--log-dir", tmp_path, script)
    said = f"fastreduce run: --log-dir {tmp_path}: cannot make {tmp_path}/rank.0: File exists\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_help_says_it_all_in_words_that_hold_here():
    done = CliRunner().invoke(main, ["run", "--help"])
    text = " ".join(done.stdout.split())
    assert (
        "fastreduce run [--compression SPEC] [--trace DIR] [options of torchrun] [--gpus N] script.py [its arguments]"
        in text
    )
    if "--shutdown-timeout" in torchs_parser()._option_string_actions:  # not in every torch
        assert "--shutdown-timeout" in text and "without it 30 after Ctrl-C or SIGTERM" in text
    assert "Ranks on this machine; without it one." in text
    other = " ".join(CliRunner().invoke(main, ["launch", "--help"]).stdout.split())
    assert "fastreduce launch [options of torchrun] [--gpus N] script.py" in other
    if "--shutdown-timeout" in text:
        assert "and 2 where one has failed." in other
    for wrong in ("30 seconds", "sub-directory", "job-level"):
        assert wrong not in text and wrong not in other


SHOW = """
import json, os, sys
os.chdir("/")
spec = __spec__ and [__spec__.name, __spec__.origin]
print(json.dumps([__file__, sys.argv, sys.path, __name__, __package__, spec, sorted(vars()), str(type(__loader__))]))
"""


@pytest.mark.parametrize(
    "words",
    [
        "show.py",
        *(pytest.param(words, marks=pytest.mark.long) for words in ("./show.py", "sub/../show.py")),
        "sub/link.py",
        "folder",
        "-m pkg.show",
        "-m pkg",
    ],
)
def test_a_script_sees_what_plain_python_shows_it(tmp_path: Path, words: str):
    """File, arguments, whole path, module: the worker by itself, under which both ways of a run start a script."""
    for name in ("show.py", "folder/__main__.py", "pkg/show.py", "pkg/__main__.py", "pkg/__init__.py", "sub/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "init" in name else SHOW)
    (tmp_path / "sub" / "link.py").symlink_to("../show.py")
    record = tmp_path / "record"
    record.touch()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("_FASTREDUCE")}
    ours = {**plain, **replacement.environment(str(record))}
    expected = run(sys.executable, *words.split(), "--lr", "1", cwd=tmp_path, env=plain)
    kind = ["module" if words.startswith("-m") else "script", words.split()[-1]]
    worker = Path(replacement.__file__).parent / "worker.py"
    done = run(sys.executable, worker, *kind, "--lr", "1", cwd=tmp_path, env=ours)
    assert json.loads(done.stdout) == json.loads(expected.stdout), done.stderr
    assert done.stderr == expected.stderr == ""


@BOTH_WAYS
def test_both_ways_run_modules_and_relative_scripts(tmp_path: Path, command: list[str]):
    (tmp_path / "show.py").write_text("import os, sys; os.chdir('/'); print(__file__, *sys.argv, sys.path[0])")
    done = run(*command, "show.py", "--help", cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/show.py show.py --help {tmp_path}\n", done.stderr
    assert said(done) == [
        "fastreduce run: no module was wrapped: "
        "no Python process of this run that we reached made a DistributedDataParallel, or trained what fully_shard has "
        "sharded"
    ]
    done = run(*command, "-m", "show", "--", "1", cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/show.py {tmp_path}/show.py -- 1 {tmp_path}\n", done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", [RUN, MODULE], ids=["run", "-m"])
def test_an_error_shows_the_scripts_frames_only_and_an_exit_code_is_one_line(tmp_path: Path, command: list[str]):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nif sys.argv[1:]:\n    sys.exit(int(sys.argv[1]))\nraise ValueError('boom')\n")
    done = run(*command, path)
    assert done.returncode == 1
    trace = f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n    raise ValueError('
    assert trace in done.stderr and done.stderr.count("File ") == 1
    done = run(*command, path, "3")
    assert done.returncode == 3
    if command is RUN:
        assert done.stderr == "fastreduce run: rank 0 failed with exit code 3\n"


@pytest.mark.long
def test_ctrl_c_is_one_line_and_130(tmp_path: Path):
    path = tmp_path / "waits.py"
    path.write_text("import os, threading; os.write(1, b'up\\n'); threading.Event().wait()")
    # Who has not ended after 2 s is named; how fast ranks are on a busy machine is no matter here.
    patient = (
        "from fastreduce.cli import main\nfrom fastreduce.cli.launch import torchs_launcher\n"
        "torchs_launcher.BROKEN_SECONDS = 29\nmain()"
    )
    with started(PYTHON, "-c", patient, "run", "--nproc-per-node", "2", path) as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        os.killpg(launcher.pid, signal.SIGINT)
        done = finish(launcher, 100)
    assert (done.returncode, done.stderr) == (130, "fastreduce run: SIGINT: all ranks were ended\n")


@pytest.mark.parametrize("name", ["FASTREDUCE_LAUNCHER", "FASTREDUCE_ONE_GPU", "FASTREDUCE_NODE_SECONDS"])
def test_rubbish_in_the_launchers_variables_is_one_line(script: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "rubbish")
    for command in ("run", "launch"):
        done = CliRunner().invoke(main, [command, "--nproc-per-node", "1", str(script)])
        assert done.exit_code == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"fastreduce {command}: {name}=rubbish: ")


@pytest.mark.long
def test_a_run_that_traces_nothing_does_not_show_the_trace_of_another(script: Path, tmp_path: Path):
    folder, empty = tmp_path / "trace", tmp_path / "empty.py"
    empty.write_text("raise SystemExit(4)")
    first = run(*RUN, "--trace", folder, "--nproc-per-node", 2, script)
    assert f"fastreduce run: the trace is {folder / 'trace.json'}: open it at https://ui.perfetto.dev" in said(first)
    again = run(*RUN, "--trace", folder, empty)
    assert again.returncode == 4
    assert said(again)[1:] == [f"fastreduce run: no rank wrote a trace: what {folder} holds is of an earlier run"]
