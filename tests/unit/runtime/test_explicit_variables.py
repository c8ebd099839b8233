"""RANK and WORLD_SIZE win over whatever schedulers left, and what ``init`` itself leaves in the environment."""

from __future__ import annotations

import os

import pytest
from test_rank_environment import ALONE, HYDRA, MPIRUN, SRUN, TORCHRUN, without

from allranks.errors import RankEnvironmentError
from allranks.runtime.environment import RankEnvironment, detect, export
from packages import FRAMEWORKS

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOUND = RankEnvironment("torchrun", 3, 4, 1, 2, 1, "gpu01", 29500, 2)
#: What a task of a scheduler hands on to the torchrun that it runs: whole, half, or of another job.
DEBRIS = {
    "Slurm": SRUN,
    "Slurm without sizes": without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "Slurm with a strange list": {**SRUN, "SLURM_STEP_NODELIST": "gpu[07"},
    "PBS without a node file": {"PBS_JOBID": "12.server", "PBS_NODENUM": "1", "PBS_TASKNUM": "2"},
    "PBS without the node file": {"PBS_NODENUM": "1", "PBS_NODEFILE": "/nowhere"},
    "Open MPI": MPIRUN,
    "Open MPI on several hosts": {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"},
    "half of Open MPI": without(MPIRUN, "OMPI_COMM_WORLD_SIZE"),
    "MPICH": HYDRA,
    "half of MPICH": without(HYDRA, "PMI_SIZE"),
    "all of them": {**SRUN, **MPIRUN, **HYDRA, "PBS_NODENUM": "1"},
}


@pytest.fixture(params=DEBRIS.values(), ids=DEBRIS.keys())
def debris(request):
    return request.param


def test_rank_and_world_size_are_read_and_nothing_else(debris):
    assert detect({**debris, **TORCHRUN}) == FOUND
    five = without(TORCHRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    assert detect({**debris, **five}) == RankEnvironment("torchrun", 3, 4, 1, None, None, "gpu01", 29500)
    assert detect({**debris, "RANK": "0", "WORLD_SIZE": "1"}).kind == "torchrun"


def test_half_set_explicit_variables_are_named_whatever_a_scheduler_left(debris):
    with pytest.raises(RankEnvironmentError, match="RANK is set, but WORLD_SIZE is not"):
        detect({**debris, **without(TORCHRUN, "WORLD_SIZE")})
    with pytest.raises(RankEnvironmentError, match="MASTER_PORT are set, but MASTER_ADDR is not"):
        detect({**debris, **without(TORCHRUN, "MASTER_ADDR")})


def test_a_world_size_that_only_repeats_the_schedulers_is_accepted():
    assert detect({**SRUN, "WORLD_SIZE": "7"}).kind == "Slurm"
    with pytest.raises(RankEnvironmentError, match="WORLD_SIZE is set, but RANK is not"):
        detect({**SRUN, "WORLD_SIZE": "8"})


@pytest.fixture
def unset(monkeypatch):
    """Unset torchrun's variables; whatever the test does to them is undone."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def exported():
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.usefixtures("unset")
def test_export_sets_what_torchrun_sets_and_it_stays():
    put_back = export(detect(SRUN), 2)
    expected = ["3", "1", "7", "2", "gpu07", str(detect(SRUN).master_port)]
    assert exported() == expected
    put_back()
    assert exported() == expected


@pytest.mark.usefixtures("unset")
def test_a_world_of_one_exports_no_master_and_takes_the_rest_away():
    put_back = export(ALONE, 1)
    assert exported() == ["0", "0", "1", "1", None, None]
    put_back()
    assert exported() == [None] * 6


def test_a_world_of_one_leaves_what_was_set_by_others(unset, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "gpu01")
    monkeypatch.setenv("LOCAL_RANK", "0")
    put_back = export(ALONE, 1)
    os.environ["RANK"] = "5"
    put_back()
    assert exported() == ["5", "0", None, None, "gpu01", None]


WORLD_OF_ONE = """
import allranks, os, subprocess, sys
from pathlib import Path
inner = Path("inner.py")
inner.write_text("import os; print('inner', os.environ['WORLD_SIZE'], flush=True)")
with allranks.init() as ctx:
    assert ctx.environment == "single process"
    run = [sys.executable, "-m", "allranks", "run", str(inner), "--nproc-per-node", "2"]
    raise SystemExit(subprocess.run(run).returncode)
"""


def test_a_script_alone_can_start_a_run(clean_env, tmp_path, run_python):
    done = run_python(WORLD_OF_ONE, env=clean_env, cwd=tmp_path)
    assert done.rc == 0, done.stderr
    assert done.stdout.count("inner 2") in (1, 2)  # Once where equal lines are folded.


FRAMEWORK = """
import os, runpy, sys, allranks
when, *sys.argv = sys.argv[1:]
script = sys.argv[0]
with allranks.init() as ctx:
    if when == "while open":
        runpy.run_path(script, run_name="__main__")
if when == "after the close":
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("when", ["while open", "after the close"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_lightning_and_accelerate_work_in_a_world_of_one(clean_env, tmp_path, pytestconfig, run_python, name, when):
    """It takes more than 10 s on a slow machine: it imports a framework."""
    script = pytestconfig.rootpath / "tests" / "scripts" / f"{name}_script.py"
    options = ["--devices=1"] if name == "lightning" else []
    done = run_python(FRAMEWORK, when, script, *options, env=clean_env, cwd=tmp_path)
    assert done.rc == 0, done.stderr
    assert f"{name}: rank 0 of 1 steps 8\n" in done.stdout
