"""`fastreduce launch`: torch's elastic launcher, local by default, that says once why a rank failed."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.elastic.multiprocessing as elastic_processes
import typer
from torch.distributed import run as torchrun
from torch.distributed.elastic.events import get_logging_handler
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch
from typer.core import TyperCommand

from ...distributed.launcher import MOST_RANKS
from ...environment.cores import usable_cores
from ...errors import headline
from ...run import why_not_found, worker
from .each_for_itself import EachForItself
from .elastic_nodes import ElasticNodes
from .nodes import Nodes, limit_seconds
from .rendezvous import LOCAL, STATIC, LocalRendezvous, open_port, static_rendezvous
from .torchs_launcher import Logs, Ranks, cause, exit_code_of, fail, say

DEFAULT_PORT = 29500  # torch's, where several nodes must agree without a word
OF_RUN = {"--compression", "--trace"}  # which launch does not have
HELP = {  # of torchrun's options that mean something else here
    "nproc_per_node": "Ranks on this machine: a number, auto, cpu or gpu; without it one a GPU.",
    "training_script": "The script, or with -m the module; what follows is its own, as it is.",
    "log_dir": "Folder for the ranks' output, which goes to rank.N/stdout and rank.N/stderr in it, N being the global "
    "rank, and after a restart to attempt_1/rank.N/...; to the console too, unless --redirects says otherwise.",
    "master_port": "Port of the first node where ranks meet; on one node a free one, on several 29500.",
    "shutdown_timeout": "Seconds that ranks have to end before SIGKILL; without it 30 after Ctrl-C or SIGTERM, "
    "and 2 where one has failed.",
}


class LaunchCommand(TyperCommand):
    """Leaves all arguments, `--help` and `--` too, to torchrun's parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep them as they are."""
        ctx.args = args
        return args


def launch(context: typer.Context) -> None:
    """Start a script on several ranks, on this machine or on several.

    fastreduce launch [options of torchrun]
                      [--gpus N] script.py [arguments of the script]
    """
    options = parse(make_parser(launch), context.args)
    raise typer.Exit(start(options))


def start(options: Namespace) -> int:
    """Start the ranks on this machine and wait for their end: the exit code.

    Raises:
        typer.Exit: with a message, if the options or the environment are wrong; nothing has started.
    """
    _check_environment()
    kind = "module" if options.module else "program" if options.no_python else "script"
    if why := why_not_found(kind, options.training_script):
        fail(why)
    if not 0 < options.monitor_interval < math.inf:
        fail(f"--monitor-interval {options.monitor_interval}: give seconds, more than 0")
    ranks = _decide_ranks(options)
    try:
        get_logging_handler(options.event_log_handler)
    except KeyError:
        fail(f"--event-log-handler {options.event_log_handler}: give null, or console")
    listener = _listen(options)
    try:
        folder = tempfile.TemporaryDirectory(prefix="fastreduce-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        fail(f"a temporary folder cannot be made, of which TMPDIR says where: {error}")
    with folder as scratch:
        logs = Logs(options, ranks, Path(scratch))
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
        elif config.rdzv_backend == "static":
            rendezvous_handler_registry.register(STATIC, partial(static_rendezvous, elastic=options.elastic))
            config.rdzv_backend = STATIC
        python = sys.executable if options.no_python else python
        arguments = ["-u", worker.__file__, kind, options.training_script, *options.training_script_args]
        return _run(elastic_launch(config, python), arguments)


def _set_up_process(options: Namespace, ranks: int, alone: bool) -> None:
    """What ranks inherit, and how torch's launcher behaves in this process."""
    os.environ[worker.LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # what went wrong is said here
    if hasattr(options, "shutdown_timeout"):  # in newer versions of torch
        Ranks.grace_seconds, Ranks.hint = options.shutdown_timeout, ": --shutdown-timeout gives more"
    least, most = torchrun.parse_min_max_nnodes(options.nnodes)
    # Where nodes may come and go or ranks start again, the rendezvous deals with it.
    if least == most > 1 and options.elastic and options.rdzv_backend == "static":
        Ranks.watch = partial(ElasticNodes, tell=say)
    elif least == most > 1 and options.max_restarts == 0 and not options.elastic:
        Ranks.watch = Nodes
    if options.elastic:
        EachForItself.restarts, options.max_restarts = options.max_restarts, 0
    elastic_processes.SubprocessContext = EachForItself if options.elastic else Ranks  # type: ignore[misc]


def _run(start: elastic_launch, arguments: list[str]) -> int:
    """The exit code of the job, after all of its processes have ended."""
    Ranks.outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in (signal.SIGTERM, signal.SIGHUP):  # until the ranks start, from when on torch does the same
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_by)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, Ranks.pass_on)
    try:
        start(*arguments)
    except ChildFailedError as error:
        if Ranks.nodes is not None and (node := Ranks.nodes.suspect()):
            say(node)
        Ranks.leave(Ranks.why)
        code = exit_code_of(cause(error.failures.values()))
        return 128 - code if code < 0 else code
    except (SignalException, KeyboardInterrupt) as error:
        received = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        say(f"{received.name}: all ranks were ended")
        Ranks.leave(f"it received {received.name}")
        return 128 + received
    except (OSError, RuntimeError, ValueError) as error:  # a rendezvous that is none or failed, or a node that is gone
        Ranks.leave(headline(error))
        fail(headline(error), code=1)
    Ranks.leave(Ranks.lost)
    if Ranks.lost:
        fail(Ranks.lost, code=1)
    return 0


def _end_by(number: int, frame: object) -> NoReturn:
    received = signal.Signals(number)
    raise SignalException(received.name, received)


def make_parser(function: Callable[[typer.Context], None]) -> ArgumentParser:
    """The parser of torchrun, with our options, defaults and words, for a command: its docstring says what and how."""
    parser = torchrun.get_args_parser()
    parser.prog = f"fastreduce {function.__name__}"
    if words := inspect.getdoc(function):  # python -OO leaves none
        parser.description, parser.usage = words.split("\n\n")
    parser.add_argument(
        "--gpus", type=int, help="Ranks on this machine, each with one GPU of its own, device 0 to it; as CPU ranks "
        "where there is no GPU."
    )  # fmt: skip
    parser.add_argument(
        "--elastic", action="store_true", help="When a rank fails, let the others go on (fastreduce.elastic.join), and "
        "start it again by itself, so often as --max-restarts says."
    )  # fmt: skip
    parser.add_argument("--script", help="The script; what these options do not name are its arguments.")
    parser.error = partial(_explain, parser, parser.error)  # type: ignore[method-assign]
    given = os.environ.get
    parser.set_defaults(nproc_per_node=given("PET_NPROC_PER_NODE"), master_port=given("PET_MASTER_PORT"))
    for action in parser._actions:
        action.help = HELP.get(action.dest, action.help)
    return parser


def _explain(parser: ArgumentParser, refuse: Callable[[str], NoReturn], message: str) -> NoReturn:
    """Refuse arguments, with what may have been meant."""
    _, found, rest = message.partition("unrecognized arguments: ")
    if found:
        word = rest.split()[0].partition("=")[0]
        known = [name for name in parser._option_string_actions if name.startswith("--") and "_" not in name]
        alike = [name for name in known if name[:6] == word[:6]]
        close = difflib.get_close_matches(word, alike or known, 1, cutoff=0.0 if alike else 0.6)
        if word in OF_RUN:
            message += f"; {word} is an option of fastreduce run"
        elif close:
            message += f"; did you mean {close[0]}?"
    elif "required: training_script" in message:
        message = "no script is given: it stands behind the options"
    refuse(message)


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """The options in front of the script; what stands behind it, or behind `--`, is the script's, as it is."""
    end = _options_end(parser, arguments)
    if not any(word == "--script" or word.startswith("--script=") for word in arguments[:end]):
        script = arguments[end:]
        apart = script[:1] == ["--"]
        if apart:
            del script[0]
        options = parser.parse_args([*arguments[:end], *script[:1]])
        options.training_script_args = script[1:]
        ranks = [word for word in script[1:] if re.match("--nproc[-_]per[-_]node(=|$)", word)]
        if ranks and not apart and options.nproc_per_node is None and options.gpus is None:
            say(f"{ranks[0]} stands behind {script[0]}, which gets it; options of {parser.prog} come before it")
        return options
    parser.allow_abbrev = False
    for action in [a for a in parser._actions if a.dest.startswith("training_script")]:
        parser._remove_action(action)
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = parser.parse_known_args(arguments[:separator])
    options.training_script = options.script
    options.training_script_args = rest + arguments[separator + (not rest) :]
    return options


def _options_end(parser: ArgumentParser, arguments: list[str]) -> int:
    """Where the script stands that is given by position, or `--` before it."""
    actions = parser._option_string_actions
    end = 0
    while end < len(arguments) and arguments[end].startswith("-"):
        word = arguments[end]
        if word == "--":
            break
        meant = {id(a): a for name, a in actions.items() if word.startswith("--") and name.startswith(word)}
        action = actions.get(word) or (meant.popitem()[1] if len(meant) == 1 else None)  # abbreviated
        end += 2 if action is not None and action.nargs is None else 1
    return end


def _check_environment() -> None:
    for name, option in ((worker.LAUNCHER, ""), (worker.ONE_GPU, ", and give --gpus")):
        if name in os.environ:
            fail(f"{name}={os.environ[name]}: the launcher sets this for its ranks, and nobody else: unset it{option}")
    try:
        limit_seconds()
    except ValueError as error:
        fail(str(error))


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
        allowed = "; allowed: a number, auto, cpu, gpu" if "Unsupported" in str(error) else ""
        fail(f"--nproc-per-node: {error}{allowed}")
    if not 1 <= ranks <= MOST_RANKS:
        fail(f"{ranks} ranks: give 1 to {MOST_RANKS} on one machine")
    options.nproc_per_node = str(ranks)
    return ranks


def _listen(options: Namespace) -> socket.socket | None:
    """On one node: where the ranks meet, open on `--master-addr` only. torch's own store listens on every interface."""
    try:
        nodes = torchrun.parse_min_max_nnodes(options.nnodes)[1]
    except (RuntimeError, ValueError):
        nodes = 0
    if nodes < 1:
        fail(f"--nnodes {options.nnodes}: give a number, or a range as in 1:4")
    if options.master_port is not None and not 0 <= options.master_port < 1 << 16:
        fail(f"--master-port {options.master_port}: give 0 to {(1 << 16) - 1}; 0 is a free one, on one node")
    if options.rdzv_backend == "static" and not options.standalone and not 0 <= options.node_rank < nodes:
        fail(f"--node-rank {options.node_rank} with --nnodes {nodes}: give 0 to {nodes - 1}, which of them this is")
    alone = options.standalone or (nodes == 1 and options.rdzv_backend == "static" and not options.rdzv_endpoint)
    if alone:
        return open_port(options.master_addr.strip("[]"), 0 if options.standalone else options.master_port or 0)
    options.master_port = options.master_port or DEFAULT_PORT
    if options.rdzv_backend == "static" and not options.rdzv_endpoint and options.node_rank == 0:
        open_port("", options.master_port).close()  # torch's own message is long
    return None
