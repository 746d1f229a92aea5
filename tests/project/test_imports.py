"""The import rule: a module imports from the floors below its own, and never sideways; read from the source."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.commands import ROOT

PACKAGE = ROOT / "fastreduce"

# From the ground up; "fastreduce" is the package itself, the public names.
HOUSE = [
    {"errors", "version"},
    {"environment"},
    {"compression", "data", "sync_batchnorm"},
    {"policy"},
    {"ops", "transports"},
    {"reduction"},
    {"ddp", "checkpoint", "hooks", "fsdp"},
    {"fastreduce", "run", "lightning", "distributed", "elastic"},
    {"cli"},
    {"__main__"},
]
# Likewise, of modules and of rooms with modules in them.
REDUCTION = [
    {
        "agreement",
        "arrays",
        "autograd_stack",
        "buckets",
        "clocks",
        "distributed_autograd",
        "jobs",
        "schedule",
        "shared_buffers",
        "sparse",
    },
    {"arrivals", "gradients", "residuals", "statistics", "streams"},
    {"wires"},
    {"pipeline"},
    {"averaging", "bucket_streams", "saved_residuals", "uneven"},
    {"bucketed"},
    {"agreed_schedule", "events", "launches", "left_over", "one_call", "saved_state"},
    {"telemetry"},
    {"backward"},
    {"reducer"},
]
KERNELS_FOR_ALL = {"kernels.slots", "kernels.numba_cache", "kernels.numba_cpu_elements"}
HIJACKER = "top-level kernels"  # which would be the Hugging Face package of that name


def _refused(importer: str, imported: str) -> bool:
    """Whether a module may not import another; both as names below fastreduce, "" for the package itself."""
    room, target = ([part or "fastreduce" for part in name.split(".")] for name in (importer, imported))
    if imported == HIJACKER:
        return True
    if "kernels" in (room[0], target[0]):
        return target[0] != room[0] and not (room[0] == "ops" or imported in KERNELS_FOR_ALL)
    if room[0] == target[0] == "reduction" and room[1] != target[1]:
        return _floor(REDUCTION, room[1]) <= _floor(REDUCTION, target[1])
    if room[0] == target[0]:
        return False
    return _floor(HOUSE, room[0]) <= _floor(HOUSE, target[0])


def _floor(floors: list[set[str]], name: str) -> int:
    found = [number for number, names in enumerate(floors) if name in names]
    assert len(found) == 1, f"{name} stands on no floor: say on which"
    return found[0]


def _modules() -> dict[str, Path]:
    """Name below fastreduce ("" for the package itself) → file, of every module."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")]  # rglob leaves symlinks out
    return {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): file
        for file in files
    }


@functools.cache
def _imports(name: str, source: str, package: bool, modules: frozenset[str]) -> set[str]:
    """Modules of the project that a module imports, wherever in it, as names below fastreduce."""
    found = set()
    here = ["fastreduce", *name.split(".")] if name else ["fastreduce"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + package - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            inside = origin.removeprefix("fastreduce").removeprefix(".")
            names = {alias.name: f"{inside}.{alias.name}".lstrip(".") for alias in node.names}
            targets = [f"{origin}.{n}" if path in modules else origin for n, path in names.items()]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "fastreduce":
                found.add(target.removeprefix("fastreduce").removeprefix("."))
            elif target.split(".")[0] == "kernels":
                found.add(HIJACKER)
    return found - {name}


MODULES = _modules()
ALL = frozenset(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES), ids=lambda name: name or "fastreduce")
def test_module_imports_only_from_below(name: str):
    file = MODULES[name]
    imported = _imports(name, file.read_text(), file.name == "__init__.py", ALL)
    assert [other for other in sorted(imported) if _refused(name, other)] == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        name: {other for other in _imports(name, file.read_text(), file.name == "__init__.py", ALL) if other}
        for name, file in MODULES.items()
    }
    assert set(TopologicalSorter(graph).static_order()) >= set(MODULES) - {""}


@pytest.mark.parametrize(
    ("name", "source", "refused"),
    [
        ("ops.backends", "from ..kernels import reference\nfrom ..errors import TensorError", []),
        ("reduction.pipeline", "from ..kernels.slots import SlotTable\nfrom .streams import Stream", []),
        ("reduction.pipeline", "from ..kernels import reference", ["kernels.reference"]),
        ("reduction.pipeline", "from .reducer import GradientReducer", ["reduction.reducer"]),
        ("reduction.pipeline", "from ..ddp.wrapper import device_of", ["ddp.wrapper"]),
        ("reduction.reducer", "def late():\n    from ..ddp import DistributedDataParallel", ["ddp"]),
        ("reduction.reducer", "from .. import DistributedDataParallel", [""]),
        ("reduction.reducer", "import fastreduce.ddp", ["ddp"]),
        ("transports.local", "from .base import Transport\nfrom ..errors import TransportError", []),
        ("transports.local", "from ..ops import backends", ["ops.backends"]),
        ("kernels.reference", "import torch\nfrom .slots import SlotTable", []),
        ("kernels.reference", "from ..errors import TensorError", ["errors"]),
        ("ops.backends", "from kernels import reference", [HIJACKER]),
        ("cli.compare", "from fastreduce import DistributedDataParallel\nfrom . import digits", []),
    ],
)
def test_the_rule_catches_what_it_should(name: str, source: str, refused: list[str]):
    imported = _imports(name, source, False, ALL)
    assert [other for other in sorted(imported) if _refused(name, other)] == refused
