"""The README's code blocks do what it says: scripts and commands run, diffs give scripts, targets exist.

- ```python blocks are run. One that begins with `# file: NAME` is written as that file, and run by itself
  only if no command below runs it.
- ```bash and ```console blocks: lines with torchrun, fastreduce or python are run where those files are,
  unless they end in `# not run`. make, pip and git lines are not run; make's targets must exist.
- ```diff blocks: the lines that stay and the added ones must compile.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.commands import FASTREDUCE, PYTHON, ROOT, TORCHRUN, run

README = ROOT / "README.md"
SECONDS = 300

pytestmark = [
    pytest.mark.skipif(not README.exists(), reason="no README.md yet"),
    pytest.mark.timeout(SECONDS + 30),
]


def _blocks(text: str, *languages: str) -> list[str]:
    fenced = re.findall(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```\s*$", text, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, language, body in fenced if language in languages]


def _commands(text: str) -> list[str]:
    """The lines that a reader would type, with their comments."""
    lines = []
    for body in _blocks(text, "bash"):
        lines += body.replace("\\\n", " ").splitlines()
    for body in _blocks(text, "console"):
        lines += [line[2:] for line in body.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _program(command: str) -> str:
    """The first word that is no assignment to an environment variable."""
    return next(word for word in command.split() if not re.match(r"\w+=", word))


TEXT = README.read_text() if README.exists() else ""
COMMANDS = _commands(TEXT)
READERS = "yours.py"  # a script of the reader's
RUN = [line for line in COMMANDS if _program(line) in ("torchrun", "fastreduce", "python") and READERS not in line]
FILES = {match[1]: body for body in _blocks(TEXT, "python") if (match := re.match(r"# file: (\S+)\s*\n", body))}
SCRIPTS = [body for body in _blocks(TEXT, "python") if body not in FILES.values()]
SCRIPTS += [body for name, body in FILES.items() if not any(name in shlex.split(line) for line in RUN)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: a directory with the README's files in it."""
    path = tmp_path_factory.mktemp("readme")
    for name, body in FILES.items():
        path.joinpath(name).write_text(body)
    return path


def _run(command: str, folder: Path) -> None:
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    words = shlex.split(command, comments=True)
    typed = words if words[0] in (FASTREDUCE, PYTHON, TORCHRUN) else ["bash", "-c", command]
    done = run(*typed, cwd=folder, env=environment, together=True, seconds=SECONDS)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_python_block_runs(script: str, folder: Path):
    path = folder / "block.py"
    path.write_text(script)
    _run("python block.py", folder)


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command: str, folder: Path):
    _run(command, folder)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line not in RUN])
def test_command_that_is_not_run_is_one_we_know(command: str):
    assert READERS in command or _program(command) in ("make", "pip", "git", "cd", ".ci/run")
    if _program(command) == "make":
        words = shlex.split(command, comments=True)[1:]
        targets = set(re.findall(r"^(\w[\w-]*):", ROOT.joinpath("Makefile").read_text(), flags=re.MULTILINE))
        assert {word for word in words if "=" not in word} <= targets


@pytest.mark.parametrize("diff", _blocks(TEXT, "diff"))
def test_diff_gives_a_script(diff: str):
    kept = [line[1:] for line in diff.splitlines() if not line.startswith(("-", "+++", "@@"))]
    compile(textwrap.dedent("\n".join(kept)), "README.md", "exec")
