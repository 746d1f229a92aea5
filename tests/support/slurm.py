"""A Slurm cluster of several nodes on this machine: one slurmctld, a slurmd for each node, settings of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Done, end, free_port, run

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo", "squeue")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
START_SECONDS, SECONDS = 60, 240

missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
needs_slurm = pytest.mark.skipif(
    bool(missing) or os.geteuid() != 0, reason="no slurm-wlm, or not root, whose daemons start jobs"
)

# Nodes are called by addresses of loopback, so that the first one's name leads to it, as it does in a cluster. Who asks
# is believed (auth/none): the daemons listen on this machine alone.
SETTINGS = """\
ClusterName=fastreduce
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
KillWait=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@dataclass
class Cluster:
    """Its commands, and the folder of its settings and logs."""

    folder: Path

    def environment(self, **more: str) -> dict[str, str]:
        """What jobs get: this tree, one thread, and no settings of the user's."""
        names = ("FASTREDUCE_", "SLURM_", "SRUN_", "SBATCH_", "OMPI_", "PMI", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return {**kept, "PATH": PATH, **ours, **more}

    def run(self, *command: object, cwd: Path | None = None, seconds: float = SECONDS, **more: str) -> Done:
        """Run a command of Slurm's to its end, within `seconds`; all output in one."""
        return run(*command, cwd=cwd, env=self.environment(**more), seconds=seconds, together=True)

    def logs(self) -> str:
        """What the daemons wrote last."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(folder: Path, nodes: int = 2, cores: int = 4) -> Iterator[Cluster]:
    """A running cluster; its jobs and daemons are gone afterwards."""
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    names = [f"127.0.0.{i + 1}" for i in range(nodes)]
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cores} State=UNKNOWN"
        for name in names
    ]
    settings = SETTINGS.format(host=host, port=free_port(), folder=folder, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(settings)
    made = Cluster(folder)
    daemons: list[subprocess.Popen[str]] = []

    def start(*command: str) -> None:
        daemons.append(
            subprocess.Popen(
                command, env=made.environment(), text=True, stdin=subprocess.DEVNULL, start_new_session=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip

    try:
        start("slurmctld", "-D")
        for name in names:
            (folder / name).mkdir()
            start("slurmd", "-D", "-N", name)
        deadline = time.monotonic() + START_SECONDS
        while made.run("sinfo", "--noheader", "--format=%D %T").stdout.split() != [str(nodes), "idle"]:
            if time.monotonic() > deadline:
                pytest.skip(f"Slurm is installed and does not start here within {START_SECONDS} s\n{made.logs()}")
            time.sleep(0.2)
        yield made
        made.run("scancel", "--signal=KILL", "--full", "--user=root")
    finally:
        for daemon in reversed(daemons):
            end(daemon)
