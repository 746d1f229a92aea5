"""Imports of modules whose kernels Numba compiles: where a script has another `print`, or no folder can be written."""

from __future__ import annotations

import builtins
import gc
import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import BuiltinFunctionType, ModuleType

from .caches import numba_caching

HALF_TO_SINGLE = "define float @f(half %x) { %y = fpext half %x to float\n ret float %y }"


def why_not_compiled() -> str | None:
    """The reason why Numba compiles no kernels of ours in this process, or None."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set, under which Numba compiles nothing: unset it"
    if not _has_f16c():
        named = [name for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES") if name in os.environ]
        whose = f"the processor of {' and '.join(named)}" if named else "this processor"
        return f"{whose} has no F16C instructions, which the FP16 kernels need"
    return None


@cache
def _has_f16c() -> bool:
    """Whether the processor that Numba compiles for, its features in Numba's variables, converts FP16 by itself.

    Where it does not, LLVM calls a function that nobody has, and ends the process.
    """
    llvm = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name.lower() == "generic" else llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=name, features=features)
    return "hfsf" not in machine.emit_assembly(llvm.parse_assembly(HALF_TO_SINGLE))


def import_compiled(names: Iterable[str], package: str | None) -> list[ModuleType]:
    """Modules that declare kernels, imported as `importlib.import_module` does.

    Raises:
        BackendUnavailableError: if no folder for what Numba compiles can be written.
        ImportError: if one cannot be imported.
    """
    with pythons_print():
        try:
            return [importlib.import_module(name, package) for name in names]
        except RuntimeError as error:
            if "cannot cache" not in str(error):  # Numba finds no folder that it can write
                raise
            with numba_caching():
                return [importlib.import_module(name, package) for name in names]


@contextmanager
def pythons_print() -> Iterator[None]:
    """While Numba is imported: let `print` be Python's, which Numba looks up in `builtins` to compile calls of it.

    Many scripts put a function in its place that prints on rank 0 alone, and wrap a module afterwards. Python itself
    keeps the one that it began with.
    """
    given = builtins.print
    own = given if isinstance(given, BuiltinFunctionType) else next(filter(_is_pythons_print, gc.get_objects()), given)
    builtins.print = own
    try:
        yield
    finally:
        builtins.print = given


def _is_pythons_print(found: object) -> bool:
    return type(found) is BuiltinFunctionType and (found.__module__, found.__qualname__) == ("builtins", "print")
