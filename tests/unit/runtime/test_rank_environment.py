"""Who a rank is, from variables as the launchers really set them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.contract import FIRST_PORT, PORTS
from allranks.errors import RankEnvironmentError
from allranks.runtime.environment import RankEnvironment, detect

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NODELIST": "gpu[07-09],login1",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-09],login1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASK_PID": "4711",
}
# Seen with Open MPI 4.1.4 and MPICH 4.0.2.
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "2089811969",
    "PMIX_RANK": "1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
ALONE = RankEnvironment("single process")


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def test_nothing_set_is_a_single_process():
    assert detect({}) == ALONE
    assert detect({"RANK": "", "WORLD_SIZE": " "}) == ALONE


def test_torchrun():
    assert detect(TORCHRUN) == RankEnvironment("torchrun", 3, 4, 1, 2, 1, "gpu01", 29500, 2)


def test_the_five_variables_suffice():
    found = detect(without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"))
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, None, None)


def test_srun():
    found = detect(SRUN)
    assert (found.kind, found.rank, found.world_size) == ("Slurm", 3, 7)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
    assert found.master_addr == "gpu07"
    assert FIRST_PORT <= found.master_port < FIRST_PORT + PORTS
    assert detect({**SRUN, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}).local_world_size == 1


def test_all_ranks_of_a_step_derive_one_port_and_steps_differ():
    other_rank = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert detect(SRUN).master_port == detect(other_rank).master_port
    assert detect(SRUN).master_port != detect({**SRUN, "SLURM_STEP_ID": "1"}).master_port


def test_master_address_and_port_of_the_user_win():
    found = detect({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345"})
    assert (found.master_addr, found.master_port) == ("10.0.0.7", 12345)


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_the_shell_of_a_slurm_job_is_a_single_process(step):
    shell = {**without(SRUN, "SLURM_STEP_ID", "SLURM_STEPID"), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert detect(shell if step is None else {**shell, "SLURM_STEP_ID": step}) == ALONE


def test_a_shell_of_srun_pty_is_a_single_process_and_its_task_is_a_rank():
    terminal = {**SRUN, "SLURM_PTY_PORT": "44263"}
    assert detect(terminal) == ALONE
    assert detect({**terminal, "SLURM_TASK_PID": str(os.getpid())}).kind == "Slurm"


def test_open_mpi():
    found = detect(MPIRUN)
    assert (found.kind, found.rank, found.world_size) == ("Open MPI", 1, 2)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 0)
    assert found.master_addr == "127.0.0.1"
    assert found.master_port == detect({**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}).master_port


def test_hydra():
    found = detect(HYDRA)
    assert (found.kind, found.rank, found.world_size) == ("MPICH", 1, 2)
    assert (found.local_rank, found.local_world_size, found.master_addr) == (1, 2, "127.0.0.1")
    assert found.node_rank == 0


def test_hydra_on_several_hosts_reports_no_node_rank():
    found = detect({**HYDRA, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "n1"})
    assert (found.rank, found.local_rank, found.local_world_size, found.node_rank) == (1, 0, 1, None)


@pytest.mark.parametrize("variables", [MPIRUN, HYDRA])
def test_mpi_inside_a_slurm_job_knows_better_than_its_daemon(variables):
    assert detect({**SRUN, **variables}).rank == 1


def test_srun_with_a_pmi_plugin_is_slurm():
    assert detect({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "7"}).kind == "Slurm"


def test_several_hosts_under_mpi_need_a_master_address():
    with pytest.raises(RankEnvironmentError) as caught:
        detect({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"})
    assert str(caught.value) == (
        "MASTER_ADDR is not set, and Open MPI started ranks on several hosts\n"
        "  why: Open MPI does not report which host rank 0 is on\n"
        "  fix: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks"
    )
    found = detect({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "n1"})
    assert (found.master_addr, found.node_rank) == ("n1", None)


def test_half_set_says_what_is_there_what_is_missing_and_what_to_do():
    with pytest.raises(RankEnvironmentError) as caught:
        detect({"RANK": "0"})
    assert str(caught.value) == (
        "RANK is set, but WORLD_SIZE is not\n"
        "  why: the variables by which torchrun identifies a rank are only partly set\n"
        "  fix: set WORLD_SIZE too, or start the script with allranks run or torchrun, which set all of them; "
        "for a single process unset RANK"
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE is set, but RANK is not"),
        (
            without(TORCHRUN, "MASTER_ADDR"),
            "RANK and WORLD_SIZE and MASTER_PORT are set, but MASTER_ADDR is not",
        ),
        (
            without(TORCHRUN, "MASTER_PORT"),
            "RANK and WORLD_SIZE and MASTER_ADDR are set, but MASTER_PORT is not",
        ),
        (without(TORCHRUN, "LOCAL_RANK"), "RANK and WORLD_SIZE are set, but LOCAL_RANK is not"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK=one is not a number of 0 or more"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is not a number of 0 or more"),
        ({**TORCHRUN, "RANK": "²"}, "RANK=² is not a number of 0 or more"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a number of 1 or more"),
        ({**TORCHRUN, "MASTER_PORT": "ssh"}, "MASTER_PORT=ssh is not a number of 1 or more"),
        (
            without(SRUN, "SLURM_LOCALID"),
            "SLURM_PROCID and SLURM_STEP_NUM_TASKS are set, but SLURM_LOCALID is not",
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x3"},
            "SLURM_STEP_TASKS_PER_NODE=2x3 is not written like 2(x3),1",
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"},
            "SLURM_STEP_TASKS_PER_NODE=1(x999999999) is not written like 2(x3),1",
        ),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID=4 is not among the nodes"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[07"}, "invalid list of hosts: SLURM_STEP_NODELIST=gpu[07"),
        (
            without(MPIRUN, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not",
        ),
        (without(HYDRA, "MPI_LOCALRANKID"), "PMI_RANK and PMI_SIZE are set, but MPI_LOCALRANKID is not"),
    ],
)
def test_what_is_half_set_or_contradicts_itself_is_an_error(variables, text):
    with pytest.raises(RankEnvironmentError) as caught:
        detect(variables)
    assert caught.value.what.startswith(text)
    assert caught.value.why
    assert caught.value.fix


class TestPbs:
    @pytest.fixture
    def nodefile(self, tmp_path):
        path = tmp_path / "nodes"
        path.write_text("n1\nn2\nn3\n")
        return {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(path)}

    def test_pbsdsh_with_one_task_a_node(self, nodefile):
        found = detect({**nodefile, "PBS_NODENUM": "2", "PBS_TASKNUM": "1"})
        assert (found.kind, found.rank, found.world_size) == ("PBS", 2, 3)
        assert (found.local_rank, found.local_world_size, found.node_rank) == (0, 1, 2)
        assert found.master_addr == "n1"

    def test_hosts_that_repeat(self, nodefile):
        Path(nodefile["PBS_NODEFILE"]).write_text("n1\nn2\nn1\nn2\n")
        tasks = [("0", "0"), ("0", "2"), ("1", "1"), ("1", "3")]
        found = [detect({**nodefile, "PBS_NODENUM": n, "PBS_VNODENUM": line}) for n, line in tasks]
        assert [(rank.rank, rank.local_rank, rank.node_rank) for rank in found] == [
            (0, 0, 0),
            (1, 1, 0),
            (2, 0, 1),
            (3, 1, 1),
        ]
        with pytest.raises(RankEnvironmentError, match="which of the 2 tasks on n2 this one is"):
            detect({**nodefile, "PBS_NODENUM": "1"})

    def test_the_shell_of_a_job_is_a_single_process(self, nodefile):
        shell = {**nodefile, "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_ENVIRONMENT": "PBS_BATCH"}
        assert detect(shell) == ALONE
        assert detect({**shell, "PBS_ENVIRONMENT": "PBS_INTERACTIVE"}) == ALONE
        assert detect({**shell, "PBS_TASKNUM": "2"}).rank == 0
        assert detect({**shell, "PBS_NODENUM": "1"}).rank == 1

    def test_an_mpi_without_local_ranks_is_named_and_does_not_start_single_processes(self, nodefile):
        shell = {**nodefile, "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_ENVIRONMENT": "PBS_BATCH"}
        with pytest.raises(RankEnvironmentError, match="PMI_RANK and PMI_SIZE are set, but MPI_LOCALRANKID is not"):
            detect({**shell, "PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n1"})

    def test_no_node_file(self, nodefile):
        with pytest.raises(RankEnvironmentError, match="PBS_NODENUM is set, but PBS_NODEFILE is not"):
            detect({"PBS_NODENUM": "1"})
        with pytest.raises(RankEnvironmentError, match="cannot read PBS_NODEFILE=/nowhere"):
            detect({"PBS_NODENUM": "1", "PBS_NODEFILE": "/nowhere"})
        with pytest.raises(RankEnvironmentError, match="PBS_NODENUM=3 is not among the 3 hosts"):
            detect({**nodefile, "PBS_NODENUM": "3"})
