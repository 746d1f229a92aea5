"""`fastreduce doctor`: what a bug report needs, and whether kernels and transports work on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...elastic.times import TIMEOUT, Times
from ...ops import backends
from ..output import make_console
from .choices import CPU, CUDA, kernel_rows, transport_rows, works
from .machine import gpu_rows, library_rows, machine_rows, variable_rows
from .rows import FAILED, MISSING, OK, Row, rows
from .self_tests import kernel_test, transport_test

# By state; the second one is for consoles without the first.
MARKS = {OK: ("✓", "+", "green"), MISSING: ("–", "-", "yellow"), FAILED: ("✗", "x", "bold red")}
Sections = dict[str, list[Row]]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Print what a bug report needs, and try kernels and transports out.

    Machine, GPUs and libraries; which kernels and which transport serve CPU and CUDA tensors, and why not the others;
    how long an elastic training waits for whom; the variables that are set. Then a test: kernels beside the reference,
    two ranks that average gradients over shared memory and gloo, and on a GPU an average over NCCL.

    The exit code is 0 if all that was chosen works, else 1.
    """
    console = Console(stderr=True)
    with console.status("looking at the machine") as status:
        sections = facts()
        status.update("trying kernels and transports out")
        sections["self-test"] = rows(lambda: self_test(sections))
    failed = [f"{section}: {r.name}" for section, found in sections.items() for r in found if r.state == FAILED]
    if as_json:
        print(json.dumps(to_json(sections, failed), indent=2, ensure_ascii=False))
    else:
        show(sections, failed)
    raise typer.Exit(1 if failed else 0)


def facts() -> Sections:
    """What can be told without trying it."""
    return {
        "machine": rows(machine_rows),
        "GPUs": rows(gpu_rows),
        "libraries": rows(library_rows),
        "kernels for CPU tensors": rows(lambda: kernel_rows(CPU)),
        "kernels for CUDA tensors": rows(lambda: kernel_rows(CUDA)),
        "transport for CPU tensors": rows(lambda: transport_rows(CPU)),
        "transport for CUDA tensors": rows(lambda: transport_rows(CUDA)),
        "times of elastic training": rows(lambda: [Row(name, told) for name, told in Times(TIMEOUT).told().items()]),
        "variables": rows(variable_rows),
    }


def self_test(sections: Sections) -> list[Row]:
    """Try out every kernel backend that can run, and the transports of the devices that have kernels."""
    found = []
    for device in [CPU, *([CUDA] if torch.cuda.is_available() else [])]:
        chosen = sections[f"kernels for {device.type.upper()} tensors"][0].value
        able = [name for name in backends.NAMES if backends.why_not(name, device) is None]
        tried = [name for name in able if name != "reference" or name == chosen]
        found += [kernel_test(name, device, name == chosen) for name in tried]
    for name, ranks, device in (("shm", 2, CPU), ("gloo", 2, CPU), ("nccl", 1, CUDA)):
        title = f"{name}, {ranks} rank{'s' if ranks > 1 else ''}"
        needed = [sections[f"{what} for {device.type.upper()} tensors"] for what in ("kernels", "transport")]
        cannot = next((r.value for r in needed[1] if r.name == name and r.state == MISSING), None)
        if not all(map(works, needed)):
            found.append(Row(title, f"not tried: nothing is chosen for {device.type.upper()} tensors", MISSING))
        elif cannot:
            found.append(Row(title, f"not tried: {cannot}", MISSING))
        else:
            found.append(transport_test(title, name, ranks, device.type))
    return found


def to_json(sections: Sections, failed: list[str]) -> dict[str, object]:
    """Section → name → value, state (ok, missing or failed) and help."""
    return {
        "verdict": "broken" if failed else "works",
        "failed": failed,
        "sections": {
            section: {r.name: {"value": r.value, "state": r.state, "help": r.help} for r in found}
            for section, found in sections.items()
        },
    }


def show(sections: Sections, failed: list[str]) -> None:
    """Print the report."""
    console = make_console()
    wide = max(len(r.name) for found in sections.values() for r in found)
    for section, found in sections.items():
        console.print(Text(section, style="bold"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=3, justify="right")
        table.add_column(width=wide)
        table.add_column(overflow="fold")
        for r in found:
            *marks, style = MARKS[r.state]
            table.add_row(Text(marks[console.options.ascii_only], style=style), Text(r.name), _value(r))
        console.print(table)
        console.print()
    if failed:
        console.print(Text(f"Verdict: broken. Failed: {'; '.join(failed)}.", style="bold red"))
    else:
        console.print(Text(f"Verdict: works. {_chosen(sections)}", style="bold green"))


def _value(found: Row) -> Text:
    text = Text(found.value)
    return text.append(f"\n→ {found.help}", style="cyan") if found.help else text


def _chosen(sections: Sections) -> str:
    parts = []
    for device in ("CPU", "CUDA"):
        kernels, transport = (sections[f"{what} for {device} tensors"] for what in ("kernels", "transport"))
        if works(kernels) and works(transport):
            parts.append(f"{device} tensors: {kernels[0].value} kernels, {transport[0].value}.")
    return " ".join(parts)
