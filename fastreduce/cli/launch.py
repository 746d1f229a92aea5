"""`fastreduce launch`: torch's elastic launcher, local by default, that says once why a rank failed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import torch.distributed.elastic.multiprocessing as elastic_processes
import typer
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch
from typer.core import TyperCommand

from . import worker
from .elastic import LOCAL, LocalRendezvous, Logs, Ranks, cause, fail, open_port, say
from .nodes import limit_seconds

DEFAULT_PORT = 29500  # torch's, where several nodes must agree without a word


class LaunchCommand(TyperCommand):
    """Leaves all arguments, `--help` and `--` too, to torchrun's parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep them as they are."""
        ctx.args = args
        return args


def launch(context: typer.Context) -> None:
    """Start a script on several ranks, on this machine or on several.

    fastreduce launch [options of torchrun] [--gpus N] script.py [arguments of the script]
    """
    options = _parse(context.args)
    _check_script(options)
    try:
        limit_seconds()
    except ValueError as error:
        fail(str(error))
    ranks = _decide_ranks(options)
    listener = _listen(options)
    with tempfile.TemporaryDirectory(prefix="fastreduce-launch-") as scratch:
        logs = Logs(options, Path(scratch))
        _set_up_process(options, ranks, alone=listener is not None)
        options.log_dir = os.devnull  # else torch makes folders of its own
        try:
            config, python, _ = torchrun.config_from_args(options)
        except (AssertionError, RuntimeError, ValueError) as error:
            fail(str(error))
        config.logs_specs = logs
        config.log_line_prefix_template = config.log_line_prefix_template or "[rank ${rank}] "
        if listener is not None:
            local = LocalRendezvous(listener)
            rendezvous_handler_registry.register(LOCAL, lambda _: local)
            config.rdzv_backend = LOCAL
        kind = "program" if options.no_python else "module" if options.module else "script"
        python = sys.executable if options.no_python else python
        arguments = ["-u", worker.__file__, kind, options.training_script, *options.training_script_args]
        code = _run(elastic_launch(config, python), arguments)
    raise typer.Exit(code)


def _set_up_process(options: Namespace, ranks: int, alone: bool) -> None:
    """What ranks inherit, and how torch's launcher behaves in this process."""
    os.environ[worker.LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # what went wrong is said here
    if (seconds := getattr(options, "shutdown_timeout", None)) is not None:  # torch's option, in its newer versions
        Ranks.grace_seconds = seconds
    least, most = torchrun.parse_min_max_nnodes(options.nnodes)
    # Where nodes may come and go or ranks start again, the rendezvous deals with it.
    Ranks.watches_nodes = least == most > 1 and options.max_restarts == 0
    elastic_processes.SubprocessContext = Ranks  # type: ignore[misc]


def _run(start: elastic_launch, arguments: list[str]) -> int:
    """The exit code of the job, after all of its processes have ended."""
    try:
        start(*arguments)
    except ChildFailedError as error:
        if Ranks.nodes is not None and (node := Ranks.nodes.suspect()):
            say(node)
        Ranks.leave(Ranks.why)
        return _exit_code(cause(error.failures.values()))
    except (SignalException, KeyboardInterrupt) as error:
        received = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        say(f"{received.name}: all ranks were ended")
        Ranks.leave(f"it received {received.name}")
        return 128 + received
    except (OSError, RuntimeError) as error:  # a rendezvous that failed, or a node that is gone
        Ranks.leave(str(error).splitlines()[0])
        fail(str(error).splitlines()[0], code=1)
    Ranks.leave()
    return 0


def _parser() -> ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "fastreduce launch"
    parser.description = launch.__doc__
    parser.add_argument(
        "--gpus", type=int, help="Ranks on this machine, each with one GPU of its own, device 0 to it; as CPU ranks "
        "where there is no GPU."
    )  # fmt: skip
    parser.add_argument("--script", help="The script; what these options do not name are its arguments.")
    given = os.environ.get
    parser.set_defaults(nproc_per_node=given("PET_NPROC_PER_NODE"), master_port=given("PET_MASTER_PORT"))
    return parser


def _parse(arguments: list[str]) -> Namespace:
    if not any(word == "--script" or word.startswith("--script=") for word in _before_script(arguments)):
        return _parser().parse_args(arguments)
    parser = _parser()
    parser.allow_abbrev = False
    for action in [a for a in parser._actions if a.dest.startswith("training_script")]:
        parser._remove_action(action)
    options, rest = parser.parse_known_args(arguments)
    options.training_script = options.script
    options.training_script_args = rest[1:] if rest[:1] == ["--"] else rest
    return options


def _before_script(arguments: list[str]) -> list[str]:
    """The launcher's options at the front, up to a script that is given by position."""
    actions = _parser()._option_string_actions
    end = 0
    while end < len(arguments) and arguments[end].startswith("-"):
        action = actions.get(arguments[end])
        end += 2 if action is not None and action.nargs is None else 1
    return arguments[:end]


def _check_script(options: Namespace) -> None:
    name = options.training_script
    if options.module:
        package = name.partition(".")[0]
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            fail(f"there is no module {name!r}")
    elif options.no_python:
        if shutil.which(name) is None:
            fail(f"there is no program {name!r}")
    elif not Path(name).exists():
        fail(f"there is no script {name!r}")


def _decide_ranks(options: Namespace) -> int:
    """How many ranks this machine runs."""
    devices = torch.cuda.device_count()
    if options.gpus is not None:
        if options.nproc_per_node is not None:
            fail("--gpus and --nproc-per-node both say how many ranks to start: give one of them")
        if devices == 0:
            say(f"no GPU on this machine: --gpus {options.gpus} starts CPU ranks")
        elif options.gpus > devices:
            fail(f"--gpus {options.gpus}: this machine has {devices}")
        else:
            os.environ[worker.ONE_GPU] = "1"
        options.nproc_per_node = str(options.gpus)
    elif options.nproc_per_node is None:
        if devices == 0:
            fail("this machine has no GPU: say how many ranks to start, as in --nproc-per-node 2")
        options.nproc_per_node = str(devices)
    try:
        ranks: int = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        fail(f"--nproc-per-node: {error}")
    if ranks < 1:
        fail(f"{ranks} ranks: at least 1 is needed")
    options.nproc_per_node = str(ranks)
    return ranks


def _listen(options: Namespace) -> socket.socket | None:
    """On one node: where the ranks meet, open on `--master-addr` only. torch's own store listens on every interface."""
    try:
        nodes = torchrun.parse_min_max_nnodes(options.nnodes)[1]
    except (RuntimeError, ValueError):
        fail(f"--nnodes {options.nnodes}: give a number, or a range as in 1:4")
    alone = options.standalone or (nodes == 1 and options.rdzv_backend == "static" and not options.rdzv_endpoint)
    if alone:
        return open_port(options.master_addr.strip("[]"), 0 if options.standalone else options.master_port or 0)
    options.master_port = options.master_port or DEFAULT_PORT
    if options.rdzv_backend == "static" and not options.rdzv_endpoint and options.node_rank == 0:
        open_port("", options.master_port).close()  # torch's own message is long
    return None


def _exit_code(failure: ProcessFailure) -> int:
    code: int = failure.error_file_data.get("exit_code", failure.exitcode)
    return 128 - code if code < 0 else code
