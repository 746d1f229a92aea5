"""What this machine has, for `fastreduce doctor`: processors, GPUs and their links, libraries, variables."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import warnings
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from ... import __version__
from ...environment import variables
from ...environment.caches import ensure
from ...environment.cores import usable_cores
from ...environment.packages import pip_install
from ...run.machine import processor
from ...transports.mpi.library import INSTALL_LIBMPI, INSTALL_MPI4PY
from ...transports.nccl.library import version_name
from ..variables import CHECKS
from .rows import FAILED, MISSING, OK, Row, one_line, row

PROBE_SECONDS = 20
VARIABLES = {name: variable.meaning for name, variable in variables.VARIABLES.items()} | {
    "CUDA_VISIBLE_DEVICES": "the GPUs that a process sees, in this order",
    "GLOO_SOCKET_IFNAME": "the network interface that gloo uses",
    "NCCL_ALGO": "which algorithms NCCL may choose (Ring, Tree, …)",
    "NCCL_DEBUG": "what NCCL prints: WARN for errors, INFO for its choices too",
    "NCCL_DEBUG_FILE": "where NCCL prints to",
    "NCCL_DEBUG_SUBSYS": "the parts of NCCL that print",
    "NCCL_IB_DISABLE": "1 leaves InfiniBand and RoCE aside, and uses sockets",
    "NCCL_IB_GID_INDEX": "the entry of the address table that RoCE uses",
    "NCCL_IB_HCA": "the InfiniBand or RoCE adapters that NCCL uses",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1 lets several ranks share a GPU (tests)",
    "NCCL_NET_GDR_LEVEL": "how near a GPU must be to the adapter to write to it directly",
    "NCCL_NVLS_ENABLE": "whether NCCL sums in NVLink switches",
    "NCCL_P2P_DISABLE": "1 forbids direct copies between GPUs, over NVLink or PCIe",
    "NCCL_P2P_LEVEL": "how near two GPUs must be to copy directly",
    "NCCL_PROTO": "which protocols NCCL may choose (LL, LL128, Simple)",
    "NCCL_SHM_DISABLE": "1 forbids shared memory between processes of one machine",
    "NCCL_SOCKET_IFNAME": "the network interfaces that NCCL connects over",
    "NUMBA_ENABLE_CUDASIM": "1 runs numba_cuda kernels in Numba's simulator (tests)",
    "TRITON_INTERPRET": "1 runs Triton kernels in its interpreter (tests)",
}
SHOWN = ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME")
"""What is listed even if it is not set."""
PREFIXES = ("NCCL_", "GLOO_", variables.PREFIX)
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the processor's PCIe bridge",
    "NODE": "one NUMA node",
    "SYS": "between processors",
}
# In a process of its own, since a broken MPI aborts; it is not initialised, so nothing starts.
MPI_PROBE = """
import contextlib, ctypes, json, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
cuda = None
with contextlib.suppress(OSError, AttributeError):
    cuda = bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())
print(json.dumps([MPI.Get_library_version().splitlines()[0], cuda]))
"""
SLOW_NAME_SECONDS = 0.5
SLOW_NAME_HELP = (
    "give each node a line such as '::ffff:10.0.0.2 node2' in /etc/hosts, and '::ffff:127.0.0.1 localhost', "
    "or export RES_OPTIONS='timeout:1 attempts:1'"
)


def machine_rows() -> list[Row]:
    """Python, system and processor."""
    return [
        Row("fastreduce", f"{__version__}, {Path(__file__).parents[2]}"),
        Row("Python", f"{platform.python_version()}, {sys.executable}"),
        row("system", lambda: f"{_distribution()}, Linux {platform.release()}, {' '.join(platform.libc_ver())}"),
        row("processor", lambda: f"{processor()}, {platform.machine()}"),
        row("cores", lambda: f"{usable_cores()} to use of {os.cpu_count()}"),
        row("memory", lambda: f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"),
        row("name service", _name_service),
    ]


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unnamed distribution"


def _name_service() -> str | Row:
    """Whether the name behind an address is told at once; torch's store asks for that of whoever connects, in turn."""
    start = time.perf_counter()
    with contextlib.suppress(OSError):  # no name, or nobody who would know one
        socket.getnameinfo(("::ffff:127.0.0.1", 1), 0)
    seconds = time.perf_counter() - start
    if seconds < SLOW_NAME_SECONDS:
        return "answers at once"
    what = f"no answer within {seconds:.1f} s: ranks wait that long for each one that connects"
    return Row("name service", what, MISSING, SLOW_NAME_HELP)


# GPUs


def gpu_rows() -> list[Row]:
    """The driver, each GPU, and what joins each two of them."""
    with warnings.catch_warnings(record=True) as told:  # torch warns of a driver that is too old
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = [row("driver", _driver)]
    if not count:
        reason = str(told[0].message).splitlines()[0] if told else f"torch {torch.__version__} sees none"
        rows.append(Row("GPU", reason, MISSING, "" if rows[0].state == MISSING else _cuda_build_help()))
    rows += [row(f"GPU {i}", partial(_gpu, i)) for i in range(count)]
    matrix = _link_matrix() if count > 1 else {}
    rows += [row(f"GPU {i}, {j}", partial(_link, i, j, matrix)) for i in range(count) for j in range(i)]
    return rows


def _cuda_build_help() -> str:
    if torch.version.cuda is not None:
        return "look at CUDA_VISIBLE_DEVICES, and at nvidia-smi"
    return "this torch is built without CUDA: pip install torch from an index of CUDA builds"


def _driver() -> str | Row:
    said = _ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    if said:
        return f"NVIDIA {said[0]}"
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        return kernel_module.read_text().splitlines()[0]
    return Row("driver", "no NVIDIA driver", MISSING, "apt-get install nvidia-driver, on a machine that has a GPU")


def _ask_nvidia_smi(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    return done.stdout if done.returncode == 0 else ""


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return (
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}, "
        f"{found.multi_processor_count} multiprocessors"
    )


def _link(i: int, j: int, matrix: dict[tuple[int, int], str]) -> str:
    direct = torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i)
    name = matrix.get((i, j), "")
    over = f"{name} ({LINKS.get('NV' if name.startswith('NV') else name, 'unknown')})" if name else "link unknown"
    return f"{over}, {'peer access' if direct else 'no peer access: NCCL copies through memory of the host'}"


def _link_matrix() -> dict[tuple[int, int], str]:
    """What nvidia-smi calls the link between GPUs, where it counts them as this process does."""
    try:
        return {} if os.environ.get("CUDA_VISIBLE_DEVICES") else parse_topology(_ask_nvidia_smi("topo", "-m"))
    except (OSError, subprocess.SubprocessError):
        return {}


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m` → the name of the link between each two GPUs."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    names = [words[0] for words in rows]
    cells = [words[1 : len(names) + 1] for words in rows]
    return {(i, j): cell for i, line in enumerate(cells) for j, cell in enumerate(line) if cell != "X"}


# Libraries


def library_rows() -> list[Row]:
    """Versions; what is not installed says so, with the command that installs it."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    return [
        Row("torch", f"{torch.__version__}, {cuda}, {gloo}"),
        _package("numba", "pip install numba", "numba"),
        _package("triton", "pip install triton", "triton", "pytorch-triton"),
        _package("numba-cuda", pip_install("numba-cuda[cu{}]"), "numba-cuda"),
        _package("CuPy", pip_install("cupy-cuda{}x"), "cupy-cuda13x", "cupy-cuda12x", "cupy"),
        row("NCCL", _nccl),
        *_mpi_rows(),
    ]


def _package(name: str, command: str, *distributions: str) -> Row:
    for distribution in distributions:
        try:
            return Row(name, f"{version(distribution)} ({distribution})" if name == "CuPy" else version(distribution))
        except PackageNotFoundError:
            pass
    return Row(name, "not installed", MISSING, command)


def _nccl() -> str | Row:
    try:
        ensure("CUPY_CACHE_DIR")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return Row(
            "NCCL",
            f"not reached, since CuPy cannot be imported: {one_line(error)}",
            MISSING,
            pip_install("cupy-cuda{}x"),
        )
    if not nccl.available:
        return Row("NCCL", "CuPy finds no libnccl", MISSING, pip_install("nvidia-nccl-cu{}"))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    paths = sorted(path for path in mapped if Path(path).name.startswith("libnccl.so"))
    return f"{version_name(nccl.get_version())}, {' and '.join(paths)}"


def _mpi_rows() -> list[Row]:
    folders = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpirun = shutil.which("mpirun", path=folders)
    found = Row("mpirun", mpirun) if mpirun else Row("mpirun", "not found", MISSING, INSTALL_LIBMPI)
    mpi4py = _package("mpi4py", INSTALL_MPI4PY, "mpi4py")
    return [mpi4py, *([] if mpi4py.state == MISSING else [row("MPI library", _mpi_library)]), found]


def _mpi_library() -> str | Row:
    command = [sys.executable, "-c", MPI_PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Row("MPI library", f"cannot be loaded: {why}", MISSING, INSTALL_LIBMPI)
    name, cuda = json.loads(done.stdout)
    takes = {True: "takes CUDA addresses", False: "takes no CUDA addresses", None: "does not say whether it takes CUDA"}
    return f"{name.partition(', package')[0]}, {takes[cuda]}"


# Variables


def variable_rows() -> list[Row]:
    """Those that are set, and those of `SHOWN`, each with what it does."""
    names = {name for name in os.environ if name.startswith(PREFIXES)} | {n for n in VARIABLES if n in os.environ}
    return [_variable(name) for name in [*SHOWN, *sorted(names - set(SHOWN))]]


def _variable(name: str) -> Row:
    about = VARIABLES.get(name)
    if about is None and name.startswith(variables.PREFIX):
        meant = variables.unknown().get(name)
        value = f"{os.environ[name]}  (fastreduce knows no such variable)"
        return Row(name, value, MISSING, f"export {meant}, if that was meant" if meant else "")
    if name in CHECKS:
        try:
            CHECKS[name]()
        except ValueError as error:
            return Row(name, str(error), FAILED)
    given = f"={os.environ[name]}" if name in os.environ else "not set"
    return Row(name, f"{given}  ({about or 'passed through'})", OK if name in os.environ else MISSING)
