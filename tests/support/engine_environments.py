"""What engines set for a process: Slurm and Open MPI in real jobs, Kubeflow by the code of its operator."""

from __future__ import annotations

# sbatch -N 2 -n 4: the script itself, and what it shares with its steps.
BATCH_JOB = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "alpha[01-02]",
    "SLURM_NODELIST": "alpha[01-02]",
    "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
}
BATCH_SCRIPT = {
    **BATCH_JOB,
    "SLURMD_NODENAME": "alpha01",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
SALLOC_SHELL = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "alpha01",
    "SLURM_NODELIST": "alpha01",
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "3",
}


def srun(rank: int, **more: str) -> dict[str, str]:
    """One of the four tasks of `srun` in that script: three on the first node, one on the second."""
    node, local_rank = (0, rank) if rank < 3 else (1, 0)
    step = {
        "SLURM_DISTRIBUTION": "block",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "alpha[01-02]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
    }
    task = {"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank, "SLURM_NODEID": node}
    return {**BATCH_JOB, **step, **{name: str(number) for name, number in task.items()}, **more}


def srun_on_one_node(rank: int, **more: str) -> dict[str, str]:
    """One of the two tasks of `srun -n 2 -N 1` in that script."""
    node = {
        "SLURM_STEPID": "1",
        "SLURM_STEP_ID": "1",
        "SLURM_NNODES": "1",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "alpha01",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    return srun(rank, **node, **more)


def pmi2(rank: int) -> dict[str, str]:
    """One of the two tasks of `srun -n 2 -N 1 --mpi=pmi2`."""
    return srun_on_one_node(rank, PMI_FD="13", PMI_JOBID="2.1", PMI_RANK=str(rank), PMI_SIZE="2")


def mpirun(rank: int, size: int = 3) -> dict[str, str]:
    """One of the ranks of Open MPI's `mpirun` on one host."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
    sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return {"PMIX_NAMESPACE": "705822721", **dict.fromkeys(names, str(rank)), **dict.fromkeys(sizes, str(size))}


def torchrun(rank: int, size: int) -> dict[str, str]:
    """One of the ranks of torchrun on one host."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "41769", "TORCHELASTIC_RUN_ID": "none"}
    return {**{name: str(number) for name, number in numbers.items()}, **meeting}


def kubeflow(pod: int, pods: int = 2, per_pod: str = "auto", address: str = "digits-master-0") -> dict[str, str]:
    """A pod of a PyTorchJob with a master, under Kubeflow's training operator 1.9; `per_pod` is its nprocPerNode."""
    world_size = pods * (int(per_pod) if per_pod.isdecimal() else 1)
    meeting = {"MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "MASTER_ADDR": address, "PET_MASTER_ADDR": address}
    numbers = {"WORLD_SIZE": world_size, "RANK": pod, "PET_NODE_RANK": pod, "PET_NNODES": pods}
    texts = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": per_pod}
    return {**texts, **meeting, **{name: str(number) for name, number in numbers.items()}}


def elastic_kubeflow() -> dict[str, str]:
    """A pod of a PyTorchJob with an elastic policy, which has workers and no master."""
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": "digits-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:3",
        "PET_MAX_RESTARTS": "3",
    }
