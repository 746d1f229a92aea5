"""What every test gets: one thread a process, poisoned `torch.empty`, hypothesis profiles, pools of ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in child processes
# Lightning asks MPI whether it runs under mpirun; a process alone, with Open MPI from a wheel, ends there without this.
os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
# torch's store asks a name service for the name of whoever connects: 5 s where a question is lost. Ask none,
# and let torch not warn of that: tests look at what users see.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# At SIGABRT every Python that tests start writes its stacks: so commands tell where they were that do not end in time.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its own functions look at it then

from tests.support import fork_server
from tests.support.compiled import compile_kernels
from tests.support.ranks import RankPool, one_thread_and_poison

one_thread_and_poison()

TIMELESS: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}  # machines may be busy
hypothesis.settings.register_profile("here", **TIMELESS)
hypothesis.settings.register_profile("ci", **TIMELESS, derandomize=True)
hypothesis.settings.register_profile("long", **TIMELESS, max_examples=2000)  # a hunt: --hypothesis-profile=long
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


# What takes longest, in `make test` or with what is `long`, is begun first, so that nobody waits for it in the end.
FIRST = (
    "test_numba_cuda.py",
    "test_faults.py",
    "test_aot.py",
    "test_compare_script.py",
    "test_switched_histories.py",
    "test_applied.py",
    "test_ring_model.py",
    "test_mpi.py",
    "test_slurm.py",
    "test_transports.py",
    "test_shm.py",
    "test_launcher.py",
    "test_launch.py",
    "test_two_nodes.py",
    "test_examples.py",
    "test_bench_quick.py",
    "test_bench_gpu.py",
    "test_run_children.py",
    "test_run_names.py",
    "test_measuring.py",
    "test_nccl.py",
    "test_compare.py",
    "test_doctor.py",
    "test_frameworks.py",
    "test_readme.py",
    "test_two_levels.py",
    "test_wrapper.py",
    "test_training.py",
    "test_random_models.py",
    "test_int8.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, metavar="SECONDS", help="since 1970, when to begin no more tests")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The workers of pytest-xdist share fork servers, which end with the process that starts the workers."""
    node.workerinput["fork_servers"] = fork_server.share()


def pytest_configure(config: pytest.Config) -> None:
    # In the background of a script, and under nohup, what a test starts would not heed what the test sends it.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    gc.disable()  # a fifth of what importing takes; until all tests are collected
    if workerinput := getattr(config, "workerinput", None):
        fork_server.use(workerinput["fork_servers"])


def pytest_collection_finish() -> None:
    gc.freeze()  # nobody walks through torch and the tests again and again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    until = config.getoption("until")
    if until and all(item.get_closest_marker("long") for item in items):  # others are left out each time
        paths = list(dict.fromkeys(item.path for item in items))
        random.Random(until).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until and time.time() > until:
        pytest.skip(f"{item.path.name}: not begun, time was up")


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before tests run beside each other; a run that a test starts has pytest-xdist's variables, and is no worker."""
    worker = getattr(request.config, "workerinput", None)
    if worker is not None:
        items = request.session.items
        busy = min(worker["workercount"], len({item.path for item in items}))  # the first of them
        # Kernels of GPUs have time for their own tests only; those on CPU ranks, which come after them, find some.
        wait = not all(item.get_closest_marker("gpu") for item in items)
        compile_kernels(tmp_path_factory.getbasetemp().parent, int(worker["workerid"][2:]), busy, wait)


@pytest.fixture(autouse=True)
def no_word_for_later_ranks() -> Iterator[None]:
    """What a command tells its ranks by variables of ours would reach those of later tests: two never met so."""
    before = {name for name in os.environ if name.startswith("_FASTREDUCE")}
    yield
    left = {name for name in os.environ if name.startswith("_FASTREDUCE")} - before
    assert not left, f"left in the environment: {left}"


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks that live as long as the test session: `ranks2.run(fn, *args)`."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    """Three ranks that live as long as the test session."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks21() -> Iterator[RankPool]:
    """Three ranks on two hosts, as far as they know: they reduce in two levels."""
    with RankPool(3, hosts="aab") as pool:
        yield pool


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.long)], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """Two ranks, then three; under `OVER_HOSTS` three on two hosts, too."""
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool


@pytest.fixture(scope="session")
def preloaded() -> None:
    """The server behind start_method="forkserver" has imported torch: such ranks begin in no time."""
    multiprocessing.set_forkserver_preload(["fastreduce.distributed", "pytest"])
    forkserver.ensure_running()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import fastreduce.distributed as dist

    dist.init_process_group("gloo", world_size=1, rank=0)
    yield
    dist.destroy_process_group()
    assert not dist.is_initialized()
