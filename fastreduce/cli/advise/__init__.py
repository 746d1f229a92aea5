"""`fastreduce advise`: what a step takes under each setting, bucket size and transport, and whether to compress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ... import Compression, FastreduceError, TopK
from ...distributed.launcher import MOST_RANKS
from ...policy import Policy
from ..compare import starting
from ..compare.script.plan import BASE, Plan, read_words
from ..ending import check_variables, fail, make_folder, need
from ..output import make_console

DEFAULT_SETTINGS = ["none", "fp16", "bf16", "fp8", "int8", "int4:error_feedback"]
ROUNDS = 8
BUILT_IN = ["-m", "fastreduce.cli.compare.digits.alone"]


def advise(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[-m] SCRIPT [ARGUMENTS]]",
            help="A training script and its arguments; without it a small built-in network.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str], typer.Option(metavar="SPEC ...", help="Settings to choose from; none is always there.")
    ] = DEFAULT_SETTINGS,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Processes on this machine; 1 is one process, which may start ranks itself.",
            show_default="2",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=0,
            max=starting.MOST_ROUNDS,
            help="Rounds in which the best predicted settings are really run beside none; from 6 on, ratios have an "
            "interval. 0: the advice is a prediction.",
        ),
    ] = ROUNDS,
    nodes: Annotated[
        int | None,
        typer.Option(min=2, help="Project to so many hosts, each with the ranks of this one, of which nothing runs."),
    ] = None,
    gbits: Annotated[float | None, typer.Option(min=0.001, help="Gbit/s of each host's adapter, for --nodes.")] = None,
    out: Annotated[Path, typer.Option(help="Where advice.json and the training's output go.")] = Path("out/advise"),
    timeout: Annotated[float, typer.Option(help="Seconds after which a training that takes no step is ended.")] = 300.0,
    launch: starting.LaunchOption = None,
    nnodes: starting.NnodesOption = 1,
    node_rank: starting.NodeRankOption = None,
    master_addr: starting.MasterAddrOption = None,
    master_port: starting.MasterPortOption = starting.MASTER_PORT,
) -> None:
    """Say whether to compress the gradients of a training here, with which setting, in which buckets, and why.

    Starts the script's ranks, unedited, with our DistributedDataParallel in the place of torch's.
    Measures the link, the kernels of each setting at the sizes of its buckets, and when each gradient comes; predicts
    the step under each setting, with its parts, and with other buckets and over the other transports of this machine;
    then runs the best ones beside none, and says how far off that was.

    Prints tables, an advice and its reason, and writes advice.json.
    """
    if (nodes is None) != (gbits is None):
        fail("--nodes and --gbits go together: hosts, and what their adapters move")
    need("scipy", *([] if words else ["sklearn"]))
    script, module = read_words(words or BUILT_IN)
    try:
        chosen = tuple(dict.fromkeys([BASE, *(str(Policy.of(name)) for name in settings)]))
    except FastreduceError as error:
        fail(str(error))
    gathered = [name for name in chosen if _is_gathered(Policy.of(name))]
    if nodes is not None and gathered:
        fail(
            f"--nodes with {gathered[0]!r}: what a rank sends under topk grows with the number of ranks, of which "
            "projections know nothing; leave one of them out"
        )
    starting.check_timeout(timeout)
    check_variables()
    here = starting.find_nodes(nnodes, node_rank, master_addr, master_port)
    if nodes is not None and here is not None:
        fail(
            f"--nodes {nodes} and --nnodes {nnodes}: --nodes projects from the ranks of one host, and --nnodes starts "
            "them on several; give one of them"
        )
    command = starting.read_launch(launch, ranks, here)
    from . import measure  # which needs scipy
    from .prediction import Link
    from .report import FILE

    make_folder(out, [FILE])
    link = None if nodes is None or gbits is None else Link(nodes, gbits)
    plan = Plan(
        words=script,
        module=module,
        settings=chosen,
        ranks=0 if command else ranks or 2,
        rounds=rounds,
        steps=measure.CHECK_STEPS,
        out=out,
        timeout=timeout,
        launch=command,
        nodes=here,
    )
    measure.run(plan, link, make_console())


def _is_gathered(setting: Compression | Policy) -> bool:
    """Whether each rank sends what it has to all others."""
    settings = [each for _, each in setting.rules] if isinstance(setting, Policy) else [setting]
    return any(isinstance(each, TopK) for each in settings)
