"""What engines set, told in torchrun's variables: who is asked first, and what is never taken for a rank."""

from __future__ import annotations

import logging

import pytest

from fastreduce import SettingError
from fastreduce.environment.engines import PORTS, TORCH_NAMES, expand_hosts, find_place, translate
from tests.support import engine_environments as engines

Environment = dict[str, str]


def translated(environment: Environment) -> Environment:
    """What is set beside what was there; that must stay."""
    after = dict(environment)
    translate(after)
    assert environment.items() <= after.items()
    return {name: value for name, value in after.items() if name not in environment}


def numbers(environment: Environment) -> list[int]:
    """Rank, ranks, and both on this host, after the translation."""
    after = dict(environment)
    translate(after)
    return [int(after[name]) for name in TORCH_NAMES]


# Slurm


def test_srun_over_two_nodes_tells_ranks_hosts_and_the_first_node():
    seen = [translated(engines.srun(rank)) for rank in range(4)]
    assert [[int(one[name]) for name in TORCH_NAMES] for one in seen] == [
        [0, 4, 0, 3],
        [1, 4, 1, 3],
        [2, 4, 2, 3],
        [3, 4, 0, 1],
    ]
    assert {one["MASTER_ADDR"] for one in seen} == {"alpha01"} and "GLOO_SOCKET_IFNAME" not in seen[0]
    (port,) = {int(one["MASTER_PORT"]) for one in seen}
    assert port in PORTS


def test_srun_on_one_node_stays_on_loopback():
    seen = translated(engines.srun_on_one_node(1))
    assert [seen[name] for name in TORCH_NAMES] == ["1", "2", "1", "2"]
    assert (seen["MASTER_ADDR"], seen["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_jobs_and_steps_meet_at_ports_of_their_own():
    jobs = [(job, step) for job in range(100, 110) for step in range(3)]
    steps = [engines.srun(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job, step in jobs]
    assert len({translated(one)["MASTER_PORT"] for one in steps}) == len(steps)


@pytest.mark.parametrize("environment", [engines.BATCH_SCRIPT, engines.SALLOC_SHELL], ids=["sbatch", "salloc"])
def test_an_allocation_makes_no_ranks_of_a_process_that_srun_has_not_started(environment: Environment):
    assert environment["SLURM_NTASKS"] > "1"
    assert find_place(environment) is None
    assert translated(environment) == {}


def test_srun_with_pmi_gives_the_ranks_of_srun():
    place = find_place(engines.pmi2(1))
    assert place is not None and (place.engine, place.rank, place.world_size) == ("srun", 1, 2)


def test_what_is_given_stays():
    assert translated(engines.srun(1, MASTER_ADDR="head"))["MASTER_PORT"]
    assert "MASTER_ADDR" not in translated(engines.srun(1, MASTER_ADDR="head"))
    listed = {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_NODELIST": "alpha[01-03]"}  # not even read
    seen = translated(engines.srun(1, MASTER_ADDR="head", MASTER_PORT="29500", LOCAL_RANK="7", **listed))
    assert seen == {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "MASTER_ADDR not set: under srun's --distribution=arbitrary"),
        ({"SLURM_STEP_NODELIST": "alpha[01-03]"}, "alpha[01-03] was read as 3 hosts, and SLURM_STEP_NUM_NODES is 2"),
        ({"SLURM_STEP_NODELIST": "alpha[01-"}, "'alpha[01-' is no list of nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, "contradict each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many: numbers such as 2(x3),1"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 contradict each other"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID=first: a number was expected"),
    ],
)
def test_what_slurm_says_and_cannot_be_is_an_error(more: Environment, said: str):
    with pytest.raises(SettingError) as error:
        translate(engines.srun(0, **more))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("10.0.0.1", ["10.0.0.1"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[099-100]", ["r1n099", "r1n100", "r2n099", "r2n100"]),
        ("b2,a[3],b1", ["b2", "a3", "b1"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]):
    assert expand_hosts(text) == names


@pytest.mark.parametrize("text", ["", ",", "a,", "a[1-2", "a]1[", "a[]", "a[1-]", "a[x]", "a[[1]]", "a[1,,2]"])
def test_what_is_no_list_of_nodes(text: str):
    with pytest.raises(SettingError, match="is no list of nodes"):
        expand_hosts(text)


# mpirun


def test_mpirun_on_one_host_needs_no_address():
    seen = [translated(engines.mpirun(rank)) for rank in range(3)]
    assert [[int(one[name]) for name in TORCH_NAMES] for one in seen] == [[rank, 3, rank, 3] for rank in range(3)]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in seen}) == 1
    other = translated({**engines.mpirun(0), "PMIX_NAMESPACE": "705822722"})
    assert other["MASTER_PORT"] != seen[0]["MASTER_PORT"]


def test_mpirun_on_several_hosts_needs_one():
    environment = {**engines.mpirun(1, 4), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(SettingError, match=r'MASTER_ADDR and MASTER_PORT not set.*init_process_group\("mpi"\)'):
        translate(environment)
    assert numbers({**environment, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}) == [1, 4, 1, 2]


def test_mpirun_on_several_hosts_needs_no_port():
    of_two = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "head"}
    seen = [translated({**engines.mpirun(rank, 4), **of_two}) for rank in range(4)]
    assert len({one["MASTER_PORT"] for one in seen}) == 1
    assert not {"MASTER_ADDR", "GLOO_SOCKET_IFNAME"} & seen[0].keys()
    mpich = {
        "PMI_RANK": "2",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "2",
        "PMIX_NAMESPACE": "srun's",
    }
    with pytest.raises(SettingError, match="MASTER_PORT not set: mpirun started ranks on several hosts"):
        translate({**mpich, "MASTER_ADDR": "head"})  # it tells of no job


def test_mpich_and_intel_mpi_have_names_of_their_own():
    assert numbers({"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}) == [2, 3, 2, 3]


# Several at once: the nearest to the process wins


@pytest.mark.parametrize("outer", [engines.srun(0), engines.pmi2(0), engines.mpirun(0)], ids=["srun", "pmi2", "mpirun"])
def test_torchrun_wins(outer: Environment, caplog: pytest.LogCaptureFixture):
    environment = {**outer, **engines.torchrun(0, 8)}
    assert translated(environment) == {} and not caplog.records


def test_mpirun_wins_over_the_step_that_started_its_daemon():
    assert numbers({**engines.srun(3), **engines.mpirun(1)}) == [1, 3, 1, 3]


def test_ranks_of_your_own_win_and_one_line_tells(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert translated(engines.srun(1, RANK="1", WORLD_SIZE="1")) == {} and not caplog.records
        assert translated(engines.srun(1, RANK="0", WORLD_SIZE="1")) == {}
    (line,) = caplog.messages
    assert line.startswith("RANK=0 and WORLD_SIZE=1 are taken, though srun says rank 1 of 4")


def test_one_of_the_two_must_be_as_the_engine_says():
    assert numbers(engines.srun(3, WORLD_SIZE="4")) == [3, 4, 0, 1]
    assert numbers(engines.srun(3, RANK="3", WORLD_SIZE="4")) == [3, 4, 0, 1]
    with pytest.raises(SettingError, match="WORLD_SIZE=8 is set, and srun says rank 3 of 4: set both"):
        translate(engines.srun(3, WORLD_SIZE="8"))


# Kubeflow


def test_a_pod_with_one_rank_has_all_that_is_needed():
    assert translated(engines.kubeflow(1)) == {}
    assert translated(engines.kubeflow(1, per_pod="1")) == {}
    assert translated(engines.elastic_kubeflow()) == {}


def test_a_pod_for_several_ranks_needs_torchrun():
    pod = engines.kubeflow(1, per_pod="2")
    with pytest.raises(SettingError, match=r"PET_NPROC_PER_NODE=2 .* RANK=1 is the pod's number.*torchrun"):
        translate(pod)
    assert translated({**pod, **engines.torchrun(1, 4)}) == {}
