"""What is left to do when a process ends: in one order, all of it, in every way to end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import fastreduce.distributed
import fastreduce.elastic.membership
import fastreduce.fsdp
import fastreduce.hooks
import fastreduce.transports.shm.connection
from fastreduce.environment import exits
from fastreduce.environment.exits import Exit
from fastreduce.transports.mpi import communicator  # noqa: F401
from tests.support.commands import PYTHON, TORCHRUN, run, with_environment

PACKAGE = Path(fastreduce.__file__).parent

REGISTER = """
import os, sys
from fastreduce.environment.exits import Exit, at_exit

def say(name):
    print(name, flush=True)
    if name == "REDUCERS":
        raise SystemExit("an end that fails")

for step in reversed(Exit):
    at_exit(step, lambda name=step.name: say(name))
"""
# The interpreter's own way, a child made by fork, one that `multiprocessing` forks, and what launched ranks do.
WAYS = {
    "return": "",
    "exit": "sys.exit(0)",
    "raise": "raise ValueError",
    "fork": "if os.fork():\n    os.wait()\n    os._exit(0)",
    "multiprocessing": "import multiprocessing as mp\nmp.get_context('fork').Process().start()\nos.wait()\nos._exit(0)",
    "launched": "import atexit\natexit._run_exitfuncs()\nos._exit(0)",
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way != "raise")) for way in WAYS])
def test_all_ends_run_once_in_order_though_one_fails(way: str):
    done = run(sys.executable, "-c", REGISTER + WAYS[way])
    assert done.stdout.split() == [step.name for step in Exit]
    assert "an end that fails" in done.stderr


EACH = """
import os
import sys

from fastreduce.environment.exits import Exit, each_at_exit

def end(number):
    print(number, flush=True)
    if number == 1:
        raise SystemExit("an end that fails")

numbers = [1, 2, 3]
each_at_exit(Exit.REDUCERS, end, numbers)
sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # a fork's own says nothing in the end
"""


def test_each_of_a_kind_is_ended_though_one_fails():
    done = run(PYTHON, "-c", EACH)
    assert done.stdout.split() == ["1", "2", "3"]
    assert "an end that fails" in done.stderr


FORKED = """
import os, sys
from fastreduce.environment.exits import Exit, at_exit

mapping, numbers = {"parent": "s"}, {1, 2}
at_exit(Exit.TELL, lambda: print(os.getpid() == parent, mapping, flush=True), mapping)
at_exit(Exit.FILES, lambda: print(os.getpid() == parent, numbers, flush=True), numbers)
at_exit(Exit.MPI, lambda: print("nothing is in it", flush=True), [])
parent = os.getpid()
if os.fork():
    os.wait()
else:
    numbers.add(3)
"""


def test_a_fork_ends_what_it_has_made_and_nothing_of_its_parents():
    done = run(PYTHON, "-c", FORKED)
    assert done.stdout.splitlines() == ["False {3}", "True {'parent': 's'}", "True {1, 2}"], done.stderr


CHILD = """
import multiprocessing
import sys
import threading

def child():
    from fastreduce.environment.exits import Exit, at_exit
    at_exit(Exit.TRACES, lambda: print("traces", flush=True))
    threading.Timer(1.0, lambda: print("thread", flush=True)).start()

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_child_ends_what_it_has_made_where_its_parent_knows_nothing_of_us(method: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(CHILD)
    done = run(sys.executable, script, method)
    assert done.stdout == "thread\ntraces\n", done.stderr


def test_each_end_is_in_its_step():
    ends = {step.name: [end.__module__.removeprefix("fastreduce.") for end, _ in exits._ends[step]] for step in Exit}
    where = {step: sorted(modules) for step, modules in ends.items()}
    where["FILES"] = []  # where a folder was made
    assert where == {
        "TELL": ["reduction.telemetry.watch", "transports.mpi.communicator", "transports.shm.connection"],
        "DELIVER": ["distributed.point_to_point"],
        "REDUCERS": [
            "elastic.membership",
            "fsdp.model",
            "hooks",
            "reduction.reducer",
            "reduction.telemetry.watch",
        ],
        "NCCL": ["transports.nccl.connection", "transports.nccl.watchdog"],
        "GLOO": ["transports.deadlines", "transports.gloo"],
        "STORE": ["transports.store_client"],
        "TRACES": ["reduction.telemetry.counter_files", "reduction.telemetry.trace"],
        "FILES": [],
        "SIGNALS": ["environment.stacks"],
        "MPI": [],  # where we have initialised it
    }


def test_nothing_else_waits_for_the_exit():
    for file in PACKAGE.rglob("*.py"):
        text, name = file.read_text(), str(file.relative_to(PACKAGE))
        if name not in ("environment/exits.py", "run/replacement.py"):
            assert not re.search(r"\batexit\.register|from atexit", text), name
        assert text.count("weakref.finalize(") == len(re.findall(r"\.atexit = False", text)), name


KEPT = """
import torch
import fastreduce
from fastreduce.environment.exits import Exit, at_exit
from fastreduce.reduction.reducer import GradientReducer
from fastreduce.transports import LocalTransport

class Transport(LocalTransport):
    def close(self):
        print("closed", flush=True)
        super().close()

def reducer():
    return GradientReducer([torch.ones(3, requires_grad=True)], ["p"], Transport(), fastreduce.NoCompression())

kept = [reducer(), reducer()]
kept[0].close()
del kept[0]
at_exit(Exit.NCCL, lambda: print("NCCL", flush=True))
at_exit(Exit.TELL, lambda: print("TELL", flush=True))
"""


def test_reducers_end_once_and_before_what_they_work_on():
    done = run(PYTHON, "-c", KEPT)
    assert done.stdout.split() == ["closed", "TELL", "closed", "NCCL"], done.stderr


LEASED = """
import contextlib
import threading
import time
from pathlib import Path
import torch
import torch.distributed as dist
from fastreduce import all_reduce_gradients
from fastreduce.environment.exits import Exit, at_exit
from fastreduce.hooks import CompressState, compress
from fastreduce.transports import GlooTransport

def threads(named):
    found = set()
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if named in file.read_text():
                found.add(file.parent.name)
    return found

def left():
    of_gloo = threads("gloo") - of_the_group
    return len(of_gloo), [t.name for t in threading.enumerate() if "communication" in t.name]

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
of_the_group = threads("")  # a thread has no name yet when it begins
ddp.register_comm_hook(CompressState("fp16"), compress)
ddp(torch.ones(2, 3)).sum().backward()
all_reduce_gradients([torch.ones(3)], transport="gloo")
mine = GlooTransport(dist.group.WORLD)
mine.all_reduce(torch.ones(3)).wait()
assert left()[0] > 0 and left()[1]

def settled():
    deadline = time.monotonic() + 30  # what has been waited for is still seen, for a moment
    while left() != (0, []) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left()

at_exit(Exit.STORE, lambda: print(f"{settled()}\\n", end="", flush=True))  # in one write, beside the other rank's
"""


@pytest.mark.long
def test_no_thread_of_ours_or_gloos_goes_on_where_a_script_holds_transports(tmp_path: Path):
    """One that outlives Python aborts the process, now and then."""
    script = tmp_path / "train.py"
    script.write_text(LEASED)
    done = run(TORCHRUN, "--nproc-per-node", 2, script, env=with_environment(GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["(0, [])", "(0, [])", ""], done.stdout


INTERRUPTED = """
import os
import signal
import sys
import threading
import time
import torch.distributed as dist
from fastreduce.environment.exits import Exit, at_exit
from fastreduce.transports import GlooTransport, gloo

def connecting():
    return [thread.name for thread in threading.enumerate() if "background" in thread.name]

def settled():
    deadline = time.monotonic() + 3
    while connecting() and time.monotonic() < deadline:
        time.sleep(0.01)
    return connecting()

def interrupt():
    while not connecting():
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

def go():
    time.sleep(6)  # rank 0 has ended meanwhile
    os._exit(0)

dist.init_process_group("gloo")
if dist.get_rank():
    gloo.in_background = lambda *_: go()
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    at_exit(Exit.STORE, lambda: print(settled()))
    threading.Thread(target=interrupt, daemon=True).start()
GlooTransport(dist.group.WORLD).exchange(0)
"""


@pytest.mark.long
def test_an_interrupt_while_gloo_connects_leaves_no_thread_behind(tmp_path: Path):
    """It would wait for the address of a rank that does not come, and abort the process."""
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    done = run(TORCHRUN, "--nproc-per-node", 2, script, env=with_environment(GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", done.stdout


SILENT = """
import os
import signal
import sys
import time
import torch.distributed as dist
from fastreduce.transports.store_client import StoreClient

reading, writing = os.pipe()
holder = os.fork()
if not holder:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    time.sleep(60)
    os._exit(0)

class Goes:
    def __del__(self, kill=os.kill, number=signal.SIGKILL, sleep=time.sleep):
        kill(holder, number)
        sleep(2)

client = StoreClient(dist.TCPStore("127.0.0.1", int(os.read(reading, 9))), 2.0)
client.set("key", "value")
os.kill(holder, signal.SIGSTOP)
os.waitpid(holder, os.WUNTRACED)  # all of its threads have
sys.modules["goes"] = Goes()  # which Python lets go of when it has begun to end
client.read("key")
"""


@pytest.mark.long
def test_a_holder_of_the_store_that_ends_while_python_goes_does_not_abort_the_process():
    done = run(sys.executable, "-c", SILENT)
    assert "which holds the store, does not answer within 2 s" in done.stderr
    assert done.returncode == 1, done.stderr


@pytest.mark.long
def test_nor_where_the_client_has_been_dropped_amid_a_call():
    read = 'client.read("key")'
    assert SILENT.endswith(f"{read}\n")
    ending = f"try:\n    {read}\nexcept RuntimeError as error:\n    print(error)\ndel client\n"
    done = run(sys.executable, "-c", SILENT.removesuffix(f"{read}\n") + ending)
    assert "which holds the store, does not answer within 2 s" in done.stdout
    assert done.returncode == 0, done.stderr
