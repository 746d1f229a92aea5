"""What started this process, and which rank it is: the variables of mpirun and of srun, told in those of torchrun.

The nearest to the process wins: RANK and WORLD_SIZE (torchrun, fastreduce launch, Kubeflow, Ray, your own), then
mpirun's, then srun's. One may have started the other, so that the variables of several are there: srun starts torchrun
and the daemons of mpirun.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ..errors import SettingError

logger = logging.getLogger(__name__)

TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Rank, number of ranks, and both on this host: Open MPI's names, then those of MPICH and Intel MPI.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# A process's number on its host alone: Open MPI, MVAPICH, MPICH and Intel MPI, PALS. Slurm's number is that of mpirun's
# daemon where there is one.
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
)
MPI_JOB = "PMIX_NAMESPACE"  # differs between jobs of Open MPI
# A batch script has SLURM_PROCID and SLURM_NTASKS too, and a shell of salloc the latter, and neither is a rank: only
# what srun starts has the numbers of a step.
SRUN_NAMES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
PORTS = range(20_000, 32_000)  # below those that Linux gives to whoever asks for any


@dataclass(frozen=True)
class Place:
    """This process among the ranks, as mpirun or srun has it."""

    engine: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __str__(self) -> str:
        return f"{self.engine} says rank {self.rank} of {self.world_size}"


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place as mpirun, or else srun, has it; None where neither has started it.

    Raises:
        SettingError: if one of their variables is no number, or srun's contradict each other.
    """
    for names in MPI_NAMES:
        if all(name in environment for name in names):
            return Place("mpirun", *(_number(environment, name) for name in names))
    if all(name in environment for name in SRUN_NAMES):
        rank, size, local_rank, _ = (_number(environment, name) for name in SRUN_NAMES)
        return Place("srun", rank, size, local_rank, _tasks_here(environment, size))
    return None


def translate(environment: MutableMapping[str, str] = os.environ, address: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where mpirun or srun knows them and they are not set.

    With `address` also MASTER_ADDR and MASTER_PORT: rank 0's host, which of several hosts only srun tells, and a port
    by the number of the job, as srun and Open MPI tell it. Ranks of one host stay on loopback.

    Where RANK and WORLD_SIZE are both set to another place they are taken, and nothing else is set. Where it was not
    torchrun that set them, rank 0 logs that.

    Raises:
        SettingError: if RANK or WORLD_SIZE is set alone, and not to what the engine says; if the engine does not tell
            where rank 0 is; if RANK and WORLD_SIZE are Kubeflow's, and meant for torchrun.
    """
    _check_pod(environment)
    place = find_place(environment)
    if place is None:
        return
    numbers = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    told = dict(zip(TORCH_NAMES, map(str, numbers), strict=True))
    given = {name: environment[name] for name in TORCH_NAMES[:2] if name in environment}
    if any(told[name] != value for name, value in given.items()):
        shown = " and ".join(f"{name}={value}" for name, value in given.items())
        if len(given) == 1:
            raise SettingError(f"{shown} is set, and {place}: set both RANK and WORLD_SIZE, or unset it")
        if "TORCHELASTIC_RUN_ID" not in environment and environment["RANK"] == "0":
            logger.warning("%s are taken, though %s: unset them if they are left over", shown, place)
        return
    where = _address(place, environment) if address else {}
    for name, value in {**told, **where}.items():
        environment.setdefault(name, value)


def _check_pod(environment: Mapping[str, str]) -> None:
    """Raise SettingError where RANK is a pod's number, and WORLD_SIZE counts ranks that torchrun has not started."""
    per_pod = environment.get("PET_NPROC_PER_NODE", "")  # "auto" counts as one
    of_pod = environment.get("RANK", "") == environment.get("PET_NODE_RANK")
    if (
        of_pod
        and per_pod.isdecimal()
        and int(per_pod) > 1
        and not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & environment.keys()
    ):
        raise SettingError(
            f"PET_NPROC_PER_NODE={per_pod} asks for several ranks in this pod, and RANK={environment['RANK']} is the "
            "pod's number: start the script with torchrun or fastreduce launch, which read the PET_ variables, or set "
            "nprocPerNode to 1"
        )


def _address(place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be set so that ranks find rank 0."""
    missing = sorted({"MASTER_ADDR", "MASTER_PORT"} - environment.keys())
    if not missing:
        return {}
    several = place.local_world_size < place.world_size
    job = environment.get(MPI_JOB, "") if MPI_NAMES[0][0] in environment else ""
    if place.engine == "srun":
        host = _first_host(environment) if several and "MASTER_ADDR" in missing else ""
        port = _port(f"{environment.get('SLURM_JOB_ID', '')}.{environment['SLURM_STEP_ID']}")
    elif several and ("MASTER_ADDR" in missing or not job):
        raise SettingError(
            f"{' and '.join(missing)} not set: mpirun started ranks on several hosts, and does not tell where rank 0 "
            "is. Set MASTER_ADDR to rank 0's host (mpirun -x MASTER_ADDR=HOST; with MPICH and Intel MPI -genv "
            'MASTER_ADDR HOST, and MASTER_PORT too), or take init_process_group("mpi"), which needs neither'
        )
    else:
        host, port = "", _port(job)
    if several:
        return {"MASTER_ADDR": host, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


def _first_host(environment: Mapping[str, str]) -> str:
    """The first node of the step, where srun starts rank 0."""
    listed, nodes = environment.get("SLURM_STEP_NODELIST", ""), _number(environment, "SLURM_STEP_NUM_NODES")
    hosts = expand_hosts(listed)
    if len(hosts) != nodes:
        raise SettingError(
            f"SLURM_STEP_NODELIST={listed} was read as {len(hosts)} hosts, and SLURM_STEP_NUM_NODES is {nodes}: set "
            "MASTER_ADDR to rank 0's host"
        )
    if "arbitrary" in environment.get("SLURM_DISTRIBUTION", ""):
        raise SettingError(
            f"MASTER_ADDR not set: under srun's --distribution=arbitrary rank 0 may be on any of {listed}: set it to "
            "the first host of your list"
        )
    return hosts[0]


def _port(job: str) -> str:
    return str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])


def _tasks_here(environment: Mapping[str, str], size: int) -> int:
    """Of SLURM_STEP_TASKS_PER_NODE, such as 2(x3),1, this node's."""
    text, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(environment, "SLURM_NODEID")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise SettingError(f"SLURM_STEP_TASKS_PER_NODE={text}: numbers such as 2(x3),1 were expected")
        counts += [int(found[1])] * int(found[2] or 1)
    if sum(counts) != size or node >= len(counts):
        raise SettingError(
            f"SLURM_STEP_TASKS_PER_NODE={text}, SLURM_STEP_NUM_TASKS={size} and SLURM_NODEID={node} contradict each "
            "other"
        )
    return counts[node]


def expand_hosts(text: str) -> list[str]:
    """The names in a node list of Slurm, in its order: `gpu[08-10,12],login` is five names.

    Raises:
        SettingError: for a list that is not written as Slurm writes them.
    """
    entry = r"(?:[^,\[\]]|\[[^\[\]]+\])+"
    if not re.fullmatch(f"{entry}(?:,{entry})*", text):
        raise SettingError(f"{text!r} is no list of nodes, such as gpu[08-10,12],login")
    names: list[str] = []
    for one in re.findall(entry, text):
        expanded = [""]
        for word, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]+)\]", one):
            ends = [word] if word else [end for part in ranges.split(",") for end in _range(part, text)]
            expanded = [name + end for name in expanded for end in ends]
        names += expanded
    return names


def _range(part: str, text: str) -> list[str]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if found is None:
        raise SettingError(f"{text!r} is no list of nodes: {part!r} is no range, such as 08-10")
    first, last = found[1], found[2] or found[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise SettingError(f"{name}={text}: a number was expected, as the engine sets it")
    return int(text)
