"""Ours in the place of torch's DistributedDataParallel, in processes that know nothing of fastreduce.

Imports the standard library alone, and ours (0.4 s) when a module is wrapped: a process that wraps none pays nothing.

1. `environment` makes the environment of a run: `startup/sitecustomize.py` comes first in every Python that it starts.
2. `join_run`, called from there, lets torch's class be replaced once torch is imported. Nobody else imports it.
3. `fully_shard` is watched: what it has sharded is ours to reduce from its first forward on (`sharded.py`).
4. The class itself stays, so that it does not matter who holds it, since when and by which name: what it constructs
   becomes ours, and a class derived from it is derived from ours from then on. Dynamo finds the active module there.
5. Where FASTREDUCE_SEED is set, Python, NumPy and torch are seeded before the script sees them.
6. Each wrapping leaves a line in the run's record as it happens, by what reduces its gradients; `summary` counts them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

RUN = "_FASTREDUCE_RUN"  # of whom, for whom and where the record is: {"prefix": …, "owner": …, "record": …}
ORDERS = "_FASTREDUCE_ORDERS"  # of `fastreduce compare`: run/orders.py
SEED = "FASTREDUCE_SEED"
STARTUP = str(Path(__file__).parent / "startup")
TORCHS_MODULE = "torch.nn.parallel.distributed"
SHARDING = "torch.distributed.fsdp._fully_shard._fully_shard"  # where fully_shard is
NONE_WRAPPED = (
    "no module was wrapped: no Python process of this run that we reached made a DistributedDataParallel, or trained "
    "what fully_shard has sharded"
)
HOW = {"wrapped": "wrapped by fastreduce", "sharded": "sharded by FSDP2 and reduced by fastreduce"}
NOT_OURS = {"wrapped": "wrapped by torch's class", "sharded": "sharded by FSDP2 and left as they are"}
MEMORY = "fastreduce-run"  # name of a record that is in memory
OURS = "_transport_argument"  # an attribute that our __init__ sets before it calls torch's

_record = ""  # the file that wrappings are noted in; "": nobody wants to know
_said = False


def environment(record: str, owner: int = 0) -> dict[str, str]:
    """What to add to a process's environment so that it and all that it starts are part of a run.

    Args:
        record: an empty file.
        owner: a process that says at its end what was wrapped; 0: none.
    """
    before = os.environ.get("PYTHONPATH")
    entries = [entry for entry in before.split(os.pathsep) if entry != STARTUP] if before else []
    run = {"prefix": os.path.realpath(sys.prefix), "owner": owner, "record": record}
    return {"PYTHONPATH": os.pathsep.join([STARTUP, *entries]), RUN: json.dumps(run)}


def record_in_memory() -> str:
    """A new record that ends with this process, whatever ends it, and is there for what it executes: its path."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create(MEMORY, 0)}"


def _open(record: str, flags: int) -> int:
    """Open a record.

    Raises:
        OSError: if it is not there any more.
    """
    file = os.open(record, flags | os.O_NONBLOCK)
    if record.startswith("/proc/") and not os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{MEMORY}"):
        os.close(file)  # a file of the script's, which has closed the record
        raise OSError(f"the script has closed {record}")
    return file


def join_run() -> None:
    """Replace torch's class in this process when it imports it, if its interpreter is the run's."""
    global _record
    run = json.loads(os.environ.get(RUN, "{}"))
    if run.get("prefix") != os.path.realpath(sys.prefix):
        return
    _record = run["record"]
    _when_loaded[TORCHS_MODULE] = replace
    _when_loaded[SHARDING] = watch_sharding
    if (number := seed()) is not None:
        _seed(number)
    sys.meta_path.insert(0, _Finder())
    if run["owner"] == os.getpid():
        atexit.register(_say_summary, os.getpid())


def seed() -> int | None:
    """What FASTREDUCE_SEED says; None where it is not set.

    Raises:
        ValueError: if that is no whole number below 2^32.
    """
    text = os.environ.get(SEED, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 11 and int(text) < 2**32):
        raise ValueError(f"{SEED}={text:.40}: give a whole number below 2^32")
    return int(text)


def _seed(number: int) -> None:
    """Seed Python now, NumPy and torch when they have been loaded."""
    import random

    random.seed(number)
    _when_loaded["numpy"] = lambda numpy: numpy.random.seed(number)
    _when_loaded["torch"] = lambda torch: torch.manual_seed(number)


_when_loaded: dict[str, Callable[[Any], object]] = {}  # by module


class _Finder:
    """Finds modules to which something is done when they have been loaded, and the fastreduce that this file is of."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's spec, for these."""
        if name == "fastreduce":
            folder = Path(__file__).parents[1]
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        if (do := _when_loaded.get(name)) is None:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_do(module: ModuleType) -> None:
                load(module)
                do(module)

            spec.loader.exec_module = load_and_do  # type: ignore[method-assign]
        return spec


def replace(module: ModuleType) -> None:
    """Let `module.DistributedDataParallel`, torch's class, construct ours."""
    from inspect import signature  # torch has imported it; other processes need not

    torchs = module.DistributedDataParallel
    construct = torchs.__init__
    if hasattr(construct, "of_torch"):
        return

    @functools.wraps(construct)
    def construct_ours(self: Any, *args: Any, **kwargs: Any) -> None:
        why = ""
        if OURS not in vars(self):  # else our __init__ is at work, and this is its call of torch's
            why = _become_ours(self, torchs)
            if not why:
                _ours().__init__(self, *args, **kwargs)
                return
        construct(self, *args, **kwargs)
        _note(self, why or _why_torch_reduces(self))

    torchs.signature_before_run = signature(torchs)  # for ours, if the script puts a function around __init__
    set_state = torchs.__setstate__

    @functools.wraps(set_state)
    def set_state_and_note(self: Any, state: dict[str, Any]) -> None:
        set_state(self, state)
        if OURS not in state:
            _note(self, "it was unpickled, not constructed")

    construct_ours.of_torch = (construct, set_state)  # type: ignore[attr-defined]
    torchs.__init__, torchs.__setstate__ = construct_ours, set_state_and_note


def watch_sharding(module: ModuleType) -> None:
    """Let `module.fully_shard`, torch's function, say that there will be sharded models (`sharded.py`)."""
    fully_shard = module.fully_shard

    @functools.wraps(fully_shard)
    def shard_and_watch(*args: Any, **kwargs: Any) -> Any:
        _watch_sharded()
        return fully_shard(*args, **kwargs)

    for each in list(sys.modules.values()):  # who has imported it before, too
        if getattr(each, "__dict__", {}).get("fully_shard") is fully_shard:
            each.fully_shard = shard_and_watch  # type: ignore[attr-defined]


@functools.cache
def _watch_sharded() -> None:
    try:
        from .sharded import watch
    except Exception as error:
        write_down("sharded", "what fully_shard has sharded", "", "", _cannot_import(error))
    else:
        watch(ORDERS in os.environ, write_down)


def _cannot_import(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"fastreduce cannot be imported by {sys.executable}: {type(error).__name__}: {text}"


def restore(module: ModuleType) -> None:
    """Undo `replace`. What has become ours stays so."""
    torchs = module.DistributedDataParallel
    if hasattr(torchs.__init__, "of_torch"):
        torchs.__init__, torchs.__setstate__ = torchs.__init__.of_torch
    sys.modules["torch.nn.parallel"].DistributedDataParallel = torchs  # type: ignore[attr-defined]


def _become_ours(model: Any, torchs: type) -> str:
    """Make a new object of torch's class one of ours; if that cannot be, why."""
    if ORDERS in os.environ and json.loads(os.environ[ORDERS])["keeps_torchs_class"]:
        return "fastreduce compare measures torch's own"
    if sys.modules["torch"]._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
        return 'torch._dynamo.config.optimize_ddp is "python_reducer", which reduces by itself'
    try:
        ours = _ours()
    except Exception as error:
        return _cannot_import(error)
    take_name(sys.modules[TORCHS_MODULE])
    kind = type(model)
    if kind is torchs:
        model.__class__ = ours
    # Not issubclass, which remembers a no.
    for each in () if ours in kind.__mro__ else kind.__mro__[::-1]:
        if torchs in each.__bases__:
            try:
                each.__bases__ = tuple(ours if base is torchs else base for base in each.__bases__)
            except TypeError as error:
                return f"{each.__name__} cannot be derived from ours: {error}"
    return ""


def take_name(module: ModuleType) -> None:
    """Let torch.nn.parallel.DistributedDataParallel be ours, for scripts that compare `type(model)` with it.

    Modules of torch that are imported later set the active module there, so Dynamo is shown both places.
    """
    torchs, ours = module.DistributedDataParallel, _ours()
    sys.modules["torch.nn.parallel"].DistributedDataParallel = ours  # type: ignore[attr-defined]

    def active_ddp_module(cls: type) -> Any:
        active = torchs._active_ddp_module
        return ours._active_ddp_module if active is None else active

    torchs._get_active_ddp_module = classmethod(active_ddp_module)


def _ours() -> Any:
    from ..ddp import DistributedDataParallel

    return DistributedDataParallel


def _why_torch_reduces(model: Any) -> str:
    if not hasattr(model, "reducer"):
        return "delay_all_reduce_named_params names all of its parameters"
    ours = type(model.reducer).__module__.startswith("fastreduce.")
    return "" if ours else f"{type(model).__name__} makes a reducer of its own"


def _note(model: Any, why: str) -> None:
    """Write down who reduces the gradients of `model`: fastreduce, if there is no `why`."""
    kind, inside = type(model).__name__, type(model.module).__name__
    if ORDERS in os.environ:
        from . import measuring

        measuring.attach(model)
    if why:
        warnings.warn(f"torch's own DistributedDataParallel reduces the gradients of this {kind}: {why}", stacklevel=3)
    setting = "" if why else str(model.compression)
    write_down("wrapped", f"{kind}({inside})", inside, setting, why, model.process_group.rank())


def write_down(how: str, what: str, name: str, setting: str, why: str, rank: int = 0) -> None:
    """Say once, and leave in the run's record, who reduces the gradients of a module.

    Args:
        how: "wrapped" or "sharded".
        what: it is, in the record.
        name: of its class.
        setting: ours, if there is no `why`.
        why: it is not us.
        rank: of this process; 0 says it.
    """
    global _said
    if not (why or _said) and rank == 0:
        _said = True
        print(f"fastreduce: {name} is {HOW[how]}, compression {setting}", file=sys.stderr, flush=True)
    line = json.dumps({"pid": os.getpid(), "how": how, "what": what, "setting": setting, "why": why})
    try:
        file = _open(_record, os.O_WRONLY | os.O_APPEND)
    except OSError:  # nobody wants to know, or the run is over
        return
    with contextlib.suppress(OSError):
        os.write(file, f"{line}\n".encode())  # whole, whoever writes beside it
    os.close(file)


def summary(record: Path, alone: bool = False) -> str:
    """One line: how many modules were wrapped by us, under which setting, and which by torch's class and why; or "".

    `alone`: one process was started, since nobody said how many, and if it started no ranks, that is a slip perhaps.
    """
    try:
        with open(_open(str(record), os.O_RDONLY), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.endswith("}\n")]
    except OSError as error:  # long runs outlive temporary files
        return f"what was wrapped is not known: {error}"
    torchs = Counter((line["how"], line["what"], line["why"]) for line in lines if line["why"])
    parts = []
    for how, reduced in HOW.items():
        ours = [line for line in lines if line["how"] == how and not line["why"]]
        if not ours:
            continue
        settings = Counter(line["setting"] for line in ours)
        named = ", ".join(f"{name} ({n})" for name, n in settings.items()) if len(settings) > 1 else ours[0]["setting"]
        processes = len({line["pid"] for line in ours})
        where = "1 process" if processes == 1 else f"{processes} processes"
        parts.append(f"{_modules(len(ours))} in {where} {reduced}, compression {named}")
    for (how, what, why), count in torchs.items():
        parts.append(f"{_modules(count)} {NOT_OURS[how]}: {what}, because {why}")
    if alone and len({line["pid"] for line in lines}) == 1:
        parts.append("one rank has nobody to average with: --nproc-per-node N starts N")
    return "; ".join(parts)


def _modules(count: int) -> str:
    return "1 module" if count == 1 else f"{count} modules"


def _say_summary(owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends as Python does
        return
    text = summary(Path(_record)) or NONE_WRAPPED
    if os.environ.get("RANK", "0") == "0" or ", because " in text:
        print(f"fastreduce run: {text}", file=sys.stderr, flush=True)
