"""What the ranks run: a program that is not here may be one of the environment that the job sets up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from allranks.errors import JobError
from allranks.job.spec import Environment, Job
from allranks.plan.entry import Program, find_entry


def entry(folder: Path, binary: str, **environment: object) -> Program:
    job = Job(binary=binary, environment=Environment.model_validate(environment))
    return find_entry(job, folder, same_python=True)


@pytest.mark.parametrize(
    ("environment", "giver"),
    [
        ({"conda": "my-env"}, "environment.conda"),
        ({"venv": ".venv"}, "environment.venv"),
        ({"modules": ["gcc"]}, "environment.modules"),
        ({"setup": ["export PATH=/opt/x/bin:$PATH"]}, "environment.setup"),
        ({"node_setup": ["true"]}, "environment.node_setup"),
        ({"container": ["apptainer", "exec", "image.sif"]}, "environment.container"),
        ({"variables": {"PATH": "/opt/x/bin"}}, "environment.variables.PATH"),
        ({"venv": ".venv", "modules": ["gcc"]}, "environment.modules or environment.venv"),
    ],
)
def test_a_program_of_the_jobs_environment_is_left_to_the_node(
    tmp_path: Path, environment: dict[str, object], giver: str
):
    why = f"what the ranks run; not on PATH here: {giver} must bring it"
    assert entry(tmp_path, "no-such-program-here", **environment) == Program("binary", "no-such-program-here", why)


def test_a_program_that_nothing_can_bring_is_refused(tmp_path: Path):
    for environment in ({}, {"variables": {"A": "1"}}):
        with pytest.raises(JobError, match="no-such-program-here"):
            entry(tmp_path, "no-such-program-here", **environment)


def test_a_path_is_never_left_to_the_node(tmp_path: Path):
    with pytest.raises(JobError, match=r"^cannot run \./no-such"):
        entry(tmp_path, "./no-such", conda="my-env")
    (tmp_path / "program").write_text("#!/bin/sh\n")
    with pytest.raises(JobError) as caught:
        entry(tmp_path, "program", conda="my-env")
    assert caught.value.fix == "chmod +x program"
    (tmp_path / "ddp.py").write_text("")
    with pytest.raises(JobError) as caught:
        entry(tmp_path, "ddp.py")
    assert (caught.value.why, caught.value.fix) == ("it is a script", "allranks run ddp.py")


def test_a_program_that_is_here_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("here", "bin"):
        program = tmp_path / folder / f"of-{folder}"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}/usr/bin")
    here = tmp_path / "here"
    assert entry(here, "of-bin", conda="x") == Program("binary", f"{tmp_path}/bin/of-bin", "what the ranks run")
    assert entry(here, "of-here", conda="x") == Program("binary", f"{here}/of-here", "what the ranks run")


def test_a_program_of_a_virtual_environment_runs(allranks):
    """Its activation puts it on the PATH that the ranks have."""
    folder = allranks.folder / "v" / "bin"
    folder.mkdir(parents=True)
    (folder / "activate").write_text(f"export PATH={folder}:$PATH\n")
    (folder / "of-the-venv").write_text('#!/bin/sh\necho "rank $RANK $1"\n')
    (folder / "of-the-venv").chmod(0o755)
    allranks.job(f"binary: of-the-venv\nargs: [x]\nenvironment: {{venv: v, python: '{sys.executable}'}}\n")
    result = allranks("run")
    assert (result.rc, result.stdout) == (0, "[0] rank 0 x\n"), result.stderr


def test_the_script_that_was_meant(tmp_path: Path):
    (tmp_path / "train.py").touch()
    with pytest.raises(JobError) as caught:
        find_entry(Job(script="trian.py"), tmp_path, same_python=True)
    assert caught.value.fix == "did you mean train.py?"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n", "it is a batch script (#SBATCH)"),
        ("#PBS -l select=2\npython train.py\n", "it is a batch script (#PBS)"),
        ("#$ -pe gpu 2\npython train.py\n", "it is a batch script (#$)"),
        ("#!/bin/sh\nOMP_NUM_THREADS=1 torchrun train.py\n", "it starts torchrun"),
        ("#!/bin/sh\nexec python3 -m torch.distributed.run train.py\n", "it starts torch.distributed.run"),
        ("#!/bin/sh\naccelerate  launch \\\n  train.py\n", "it starts accelerate launch"),
        ("#!/bin/sh\n# torchrun is not needed\nexec python train.py\n", "it is a program of its own"),
        ("#!/bin/sh\npip show torchrun\naccelerate config\n", "it is a program of its own"),
    ],
)
def test_a_shell_script_that_starts_ranks_is_not_for_each_rank(tmp_path: Path, script: str, why: str):
    (tmp_path / "job.sh").write_text(script)
    with pytest.raises(JobError) as caught:
        find_entry(Job(script="job.sh"), tmp_path, same_python=True)
    own = why == "it is a program of its own"
    fix = "allranks run --binary ./job.sh" if own else "allranks convert job.sh makes a job file of it"
    assert (caught.value.what, caught.value.why) == ("job.sh is not a Python script", why)
    assert caught.value.fix is not None
    assert caught.value.fix.startswith(fix)


def test_a_python_script_with_directives_is_one(tmp_path: Path):
    (tmp_path / "job").write_text("#!/usr/bin/env python3\n#SBATCH -N 2\nprint(1)\n")
    assert find_entry(Job(script="job"), tmp_path, same_python=True).kind == "script"


def test_arguments_behind_a_script_go_into_args(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(JobError) as caught:
        find_entry(Job(script="train.py --data /x/y"), tmp_path, same_python=True)
    assert caught.value.why == "the arguments of a script go into args"
    assert caught.value.fix == (
        "in the job file 'script: train.py' and 'args: --data /x/y', or allranks run train.py -- --data /x/y"
    )
    (tmp_path / "train.py --data").write_text("")
    assert find_entry(Job(script="train.py --data"), tmp_path, same_python=True).target.endswith("/train.py --data")
