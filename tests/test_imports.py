"""The import rule: who may import whom inside the project, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fastreduce"

# Module or sub-package of fastreduce → what it may import of the project, beside its own siblings.
# ddp → reducer → {buckets, compression, ops, transports}; ops → backends → kernels; nothing below ddp
# imports it. `kernels.slots` is the kernels' data type, no kernel; "" is fastreduce itself, the public names.
BASE = {"errors", "buckets", "compression", "ops", "transports"}
PARTS = BASE | {
    "applied",
    "agreement",
    "arrivals",
    "clipping",
    "error_feedback",
    "gradients",
    "nonfinite",
    "pipeline",
    "residuals",
    "shared_buffers",
    "sparse",
    "streams",
}
TOP = PARTS | {"checkpoint", "data", "ddp", "functional", "reducer", "sync_batchnorm"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "errors": set(),
    "packages": set(),
    "variables": {"errors"},
    "clocks": set(),
    "applied": {"errors"},
    "error_feedback": {"applied", "buckets"},
    "shared_buffers": set(),
    "streams": {"errors", "transports"},
    "compression": {"errors", "kernels.slots", "variables"},
    "caches": {"errors", "variables"},
    "transports": {"caches", "errors", "packages"},
    "buckets": {"errors", "compression", "kernels.slots"},
    "backends": {"caches", "errors", "kernels", "packages"},
    "ops": {"errors", "backends", "kernels.slots"},
    "agreement": {"errors", "ops", "transports"},
    "arrays": {"errors"},
    "arrivals": {"buckets"},
    "mixed_precision": set(),
    "sync_batchnorm": {"errors"},
    "data": {"errors"},
    "snapshot_file": {"errors"},
    "checkpoint": {"errors", "reducer", "snapshot_file", "transports"},
    "gradients": BASE,
    "sparse": {"errors", "transports"},
    "pipeline": BASE | {"clocks", "error_feedback", "kernels.slots", "shared_buffers", "streams"},
    "nonfinite": {"pipeline"},
    "residuals": BASE | {"error_feedback", "pipeline"},
    "clipping": BASE | {"applied", "pipeline"},
    "bucketed": PARTS,
    "reducer": PARTS | {"bucketed"},
    "comm_hook": BASE | {"pipeline", "streams"},
    "torch_logger": {"buckets"},
    "torch_reducer": PARTS | {"bucketed", "comm_hook", "mixed_precision", "reducer", "torch_logger"},
    "hooks": PARTS,
    "replacement": {"ddp"},
    "startup": set(),
    "run": {"compression", "replacement"},
    "lightning": {"ddp", "errors"},
    "functional": PARTS | {"arrays", "bucketed"},
    "wrapping": PARTS,
    "ddp": PARTS | {"mixed_precision", "reducer", "sync_batchnorm", "torch_logger", "torch_reducer", "wrapping"},
    "": TOP,
    "processes": {"errors"},
    "distributed": TOP | {"arrays", "bucketed", "kernels.slots", "processes", "variables"},
    "cli": TOP
    | {"", "backends", "caches", "distributed", "kernels.slots", "packages", "processes", "replacement", "variables"},
}


def _modules() -> dict[str, Path]:
    """Name below fastreduce ("" for the package itself) → file, of every module."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")]  # rglob leaves symlinks out
    return {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): file
        for file in files
    }


def _imports(name: str, source: str, package: bool, modules: set[str]) -> set[str]:
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
                found.add("kernels at top level")
    return found


def _layer(name: str) -> str:
    return name.split(".")[0]


def _forbidden(name: str, imported: set[str]) -> list[str]:
    layer = _layer(name)
    allowed = MAY_IMPORT[layer]
    return sorted(
        target
        for target in imported
        if not (target in allowed or _layer(target) in allowed or (layer and _layer(target) == layer))
    )


MODULES = _modules()


@pytest.mark.parametrize("name", sorted(MODULES), ids=lambda name: name or "fastreduce")
def test_module_imports_only_what_stands_below_it(name: str):
    assert _layer(name) in MAY_IMPORT, f"{MODULES[name]} has no line in MAY_IMPORT: say where it stands"
    file = MODULES[name]
    imported = _imports(name, file.read_text(), file.name == "__init__.py", set(MODULES))
    assert _forbidden(name, imported) == []


@pytest.mark.parametrize(
    ("name", "source", "forbidden"),
    [
        ("ops", "from . import backends\nfrom .errors import TensorError", []),
        ("ops", "from .kernels.slots import SlotTable", []),
        ("ops", "from .kernels import reference", ["kernels.reference"]),
        ("reducer", "def late():\n    from .ddp import DistributedDataParallel", ["ddp"]),
        ("reducer", "from . import DistributedDataParallel", [""]),
        ("reducer", "import fastreduce.ddp", ["ddp"]),
        ("transports.local", "from .base import Transport\nfrom ..errors import TransportError", []),
        ("transports.local", "from .. import ops", ["ops"]),
        ("kernels.reference", "import torch\nfrom .slots import SlotTable", []),
        ("kernels.reference", "from ..errors import TensorError", ["errors"]),
        ("backends", "from kernels import reference", ["kernels at top level"]),
        ("cli.compare", "from fastreduce import DistributedDataParallel\nfrom . import plots", []),
    ],
)
def test_the_rule_catches_what_it_should(name: str, source: str, forbidden: list[str]):
    modules = {*MAY_IMPORT, "cli.plots", "kernels.reference", "kernels.slots"}
    assert _forbidden(name, _imports(name, source, False, modules)) == forbidden
