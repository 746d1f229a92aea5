"""Make docs/reference.md from what the code says of itself: docstrings, signatures, commands, tables.

python docs/make_reference.py
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from inspect import Parameter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import typer.core
import typer.main
from torch.distributed import ReduceOp
from torch.distributed import run as torchrun

import fastreduce
import fastreduce.distributed
import fastreduce.elastic
import fastreduce.fsdp
import fastreduce.hooks
from fastreduce import FastreduceError, Policy
from fastreduce.cli import main
from fastreduce.compression import KINDS, Compression
from fastreduce.environment import variables

POSITIONAL_ONLY, KEYWORD_ONLY = Parameter.POSITIONAL_ONLY, Parameter.KEYWORD_ONLY
VAR_POSITIONAL, VAR_KEYWORD = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
WIDTH = 100  # of a signature; longer ones take a line for each argument
HEAD = """\
# Reference

Made from the docstrings by `python docs/make_reference.py`; `tests/project/test_reference.py` compares.
`fastreduce.lightning` and `fastreduce.run` are described in [frameworks](frameworks.md), the kernels in
[kernels/README.md](../kernels/README.md).

{contents}
"""
GROUPS = {
    "Training": [
        "DistributedDataParallel",
        "all_reduce_gradients",
        "note_applied",
        "SyncBatchNorm",
        "Shadow",
        "GradientReducer",
    ],
    "Data and checkpoints": ["ShardSampler", "shard_range", "save_checkpoint", "load_checkpoint"],
}
SECTION = re.compile(r"^(Args|Returns|Raises):$")
ITEM = re.compile(r"^([\w*.]+(?:, [\w*.]+)*)(?: \([^)]*\))?: (.*)$")


def reference() -> str:
    """The whole page."""
    sections = {
        "Settings": settings(),
        **{f"fastreduce: {title.lower()}": listed(fastreduce, names) for title, names in GROUPS.items()},
        "fastreduce: errors": errors(),
        "fastreduce.distributed": module(fastreduce.distributed),
        "fastreduce.distributed.functional": module(fastreduce.distributed.functional),
        "fastreduce.elastic": module(fastreduce.elastic),
        "fastreduce.fsdp": module(fastreduce.fsdp),
        "fastreduce.hooks": module(fastreduce.hooks, ["CompressState", "compress"]),
        "Command line": commands(),
        "Environment variables": environment(),
    }
    contents = "\n".join(f"- [{title}](#{_anchor(title)})" for title in sections)
    parts = [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n".join([HEAD.format(contents=contents), *parts])


# Settings, errors, variables


def settings() -> str:
    """Spec strings: a row for each option of each kind."""
    rows = []
    for name, kind in KINDS.items():
        options = [f"`{f.name}`" + _default_of(f) for f in dataclasses.fields(kind)]
        rows.append([f"`{name}`", _first_paragraph(kind), ", ".join(options)])
    text = [
        "A setting is a spec string, `name` or `name:option=value,option`, or an instance of the class. It goes to "
        "`compression=`, to `--compression`, or into `FASTREDUCE_COMPRESSION`. [Which setting?](which-setting.md) says "
        "when to take which.\n",
        _table(["name", "on the wire", "options (defaults)"], rows),
    ]
    text += [described("fastreduce", each) for each in (Compression, *KINDS.values(), Policy)]
    return "\n".join(text)


def errors() -> str:
    """What is raised, and what else catches it."""
    found = [value for value in vars(fastreduce).values() if inspect.isclass(value)]
    classes = [value for value in found if issubclass(value, FastreduceError)]
    classes.sort(key=lambda each: (len(each.__mro__), each.__name__))
    rows = [
        [f"`{c.__name__}`", ", ".join(f"`{b.__name__}`" for b in c.__bases__), _first_paragraph(c)] for c in classes
    ]
    return _table(["error", "is also a", "raised for"], rows)


def environment() -> str:
    """The table of our variables."""
    rows = [[f"`{name}`", v.values, v.meaning] for name, v in variables.VARIABLES.items()]
    return (
        "What is not allowed is an error: before anything starts under `fastreduce run`, elsewhere where it is read; "
        "`fastreduce doctor` says which one is. A name that begins with `FASTREDUCE_` and is none of "
        "these is one line of the log, on rank 0. `fastreduce doctor` lists those that are set, with the variables of "
        f"NCCL and gloo.\n\n{_table(['variable', 'values', 'what it does'], rows)}"
    )


# Python


def module(where: ModuleType, names: Iterable[str] | None = None) -> str:
    """A module's own words, then its names."""
    names = sorted(where.__all__, key=str.lower) if names is None else names
    mine = [name for name in names if not inspect.ismodule(getattr(where, name))]
    again = [name for name in mine if where is fastreduce.distributed and hasattr(fastreduce, name)]
    text = render(inspect.getdoc(where) or "")
    if again:
        text += f"\nThe same as in `fastreduce`: {', '.join(f'`{name}`' for name in again)}.\n"
    return f"{text}\n{listed(where, [name for name in mine if name not in again])}"


def listed(where: ModuleType, names: Iterable[str]) -> str:
    """Functions and classes of a module."""
    return "\n".join(described(where.__name__, getattr(where, name)) for name in names)


def described(where: str, thing: Any) -> str:
    """A heading, the signature, the docstring; of a class its own public methods too."""
    name = thing.__name__
    text = [f"### {where}.{name}\n"]
    if not inspect.isabstract(thing) and thing is not Compression and name != "ReduceOp":
        text.append(f"```python\n{signature(name, thing)}\n```\n")
    text.append(render(_own_doc(thing)))
    if inspect.isclass(thing):
        for method, function in _methods(thing):
            text.append(f"#### {name}.{method}\n\n```python\n{signature(method, function)}\n```\n")
            text.append(render(inspect.getdoc(function) or ""))
    return "\n".join(text)


def _own_doc(thing: Any) -> str:
    ours = thing.__module__.startswith("fastreduce")
    return inspect.getdoc(thing) or "" if ours else f"torch's `{thing.__name__}`."


def _methods(kind: type) -> list[tuple[str, Callable[..., Any]]]:
    """Public methods that the class, or one of ours that it is made from, defines and describes."""
    if dataclasses.is_dataclass(kind) and kind is not Compression:
        return []
    found: dict[str, Callable[..., Any]] = {}
    for each in reversed([c for c in kind.__mro__ if c.__module__.startswith("fastreduce")]):
        for name, member in vars(each).items():
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
                found[name] = function
    if kind is Compression:
        found = {name: found[name] for name in ("parse", "resolve")}
    return list(found.items())


def signature(name: str, thing: Any) -> str:
    """On one line, or with a line for each argument."""
    made = getattr(thing, "__init__", None)
    # Where it names the arguments of the installed torch's class, that of the source.
    found = inspect.signature(_as_written(made) if hasattr(made, "__signature__") else thing)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    kinds = [parameter.kind for parameter in parameters]
    parts = []
    for i, parameter in enumerate(parameters):
        if parameter.kind is KEYWORD_ONLY and not {VAR_POSITIONAL, KEYWORD_ONLY} & {*kinds[:i]}:
            parts.append("*")
        star = "*" if parameter.kind is VAR_POSITIONAL else "**" if parameter.kind is VAR_KEYWORD else ""
        annotation = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        default = ""
        if parameter.default is not parameter.empty:
            default = f"{' = ' if annotation else '='}{_default(parameter.default)}"
        parts.append(f"{star}{parameter.name}{annotation}{default}")
        if parameter.kind is POSITIONAL_ONLY and POSITIONAL_ONLY not in kinds[i + 1 :]:
            parts.append("/")
    returned = found.return_annotation
    tail = "" if inspect.isclass(thing) or returned is found.empty else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){tail}"])


def _as_written(function: Any) -> Any:
    """The same function, whose signature is that of its source."""
    made = FunctionType(
        function.__code__, function.__globals__, argdefs=function.__defaults__, closure=function.__closure__
    )
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    return made


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return str(text).replace("typing.", "")


def _default(value: Any) -> str:
    if isinstance(value, datetime.timedelta):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, ReduceOp.RedOpType):
        return f"ReduceOp.{value.name}"
    return getattr(value, "__name__", None) or repr(value)


# Docstrings


def render(doc: str) -> str:
    """A docstring as Markdown: paragraphs as they are, items of its sections as lists."""
    out: list[str] = []
    section = ""
    for line in doc.splitlines():
        if found := SECTION.match(line):
            section = found[1]
            out += [] if section == "Args" else [f"{section}:", ""]
        elif not section:
            out.append(line)
        elif item := ITEM.match(line.strip()) if _indent(line) == 4 and section != "Returns" else None:
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            out.append(f"- {names}: {item[2]}")
        elif section == "Returns" or not line.strip():
            out.append(line.strip())
        else:
            out.append(f"  {line.strip()}")
    paragraphs = re.split(r"\n{2,}", "\n".join(out).strip())
    return "\n\n".join(f"```python\n{each}\n```" if _is_code(each) else each for each in paragraphs) + "\n"


def _is_code(paragraph: str) -> bool:
    """English does not parse as Python, unless it is one word."""
    try:
        return any(isinstance(node, (ast.Assign, ast.Call)) for node in ast.walk(ast.parse(paragraph)))
    except SyntaxError:
        return False


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _first_paragraph(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


# The command line


def commands() -> str:
    """Each command's help, and a table of its options."""
    group = typer.main.get_command(main)
    assert isinstance(group, typer.core.TyperGroup)
    text = []
    for name, command in group.commands.items():
        lines = []
        for paragraph in inspect.cleandoc(command.callback.__doc__ or "").split("\n\n"):
            usage = paragraph.startswith("fastreduce ")
            lines.append(f"```text\n{paragraph}\n```" if usage else paragraph)
        text.append(f"### fastreduce {name}\n\n" + "\n\n".join(lines) + "\n")
        rows = [_option(p) for p in command.params]
        if name in ("launch", "run"):
            rows = _torchrun_options(command.callback)
        if rows:
            text.append(_table(["option", "meaning", "default"], rows))
    return "\n".join(text)


def _default_of(field: dataclasses.Field[Any]) -> str:
    words = field.metadata.get("or", ())
    if words:
        return f" (or {', '.join(f'`={word}`' for word in words)})"
    return "" if field.type == "bool" else f" (`{field.default}`)"


def _option(option: Any) -> list[str]:
    names = option.opts if option.param_type_name == "option" else [option.metavar]
    opts = ", ".join(f"`{name}`" for name in names)
    help_, _, default = (option.help or "").partition("  [default: ")
    if not default and option.default is not None and not getattr(option, "is_flag", False):
        value = option.default
        default = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(getattr(value, "value", value))
        default = f"`{default}`"
    return [opts, help_, default.rstrip("]")]


def _torchrun_options(command: Any) -> list[list[str]]:
    """Those that torchrun does not have, of a command that takes the others from it."""
    module = importlib.import_module(command.__module__)
    theirs = torchrun.get_args_parser()._option_string_actions
    parser = module.run_parser() if command.__name__ == "run" else module.make_parser(command)
    actions = {id(a): a for s, a in parser._option_string_actions.items() if s not in theirs}
    rows = [[", ".join(f"`{s}`" for s in a.option_strings), a.help or "", ""] for a in actions.values()]
    return [
        *rows,
        [
            "all of `torchrun`'s",
            f"with `-` or `_`: `fastreduce {command.__name__} --help`, [launching](launching.md)",
            "",
        ],
    ]


# Markdown


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    Path(__file__).with_name("reference.md").write_text(reference())
