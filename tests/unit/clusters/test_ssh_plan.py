"""What comes before the nodes start, in the plan of machines that are reached over SSH."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from allranks.clusters.registry import load_kind
from allranks.job.load import load_job
from allranks.launch.submit import Launch, dry_run
from allranks.plan.plan import Plan


def plan_of(folder: Path, rest: str) -> Plan:
    """Plan a job on two hosts."""
    (folder / "train.py").write_text("")
    resources = "resources: {hosts: 'gpu[1-2]', gpus_per_node: 1}\nlaunch: {master_addr: gpu1}"
    (folder / "job.yaml").write_text(f"script: train.py\n{resources}\n{rest}\n")
    loaded = load_job(folder / "job.yaml", flags={}, environ={}, cwd=folder)
    return dry_run(Launch(loaded.job, "", folder, folder / "runs", {"PATH": os.environ["PATH"]}), load_kind("ssh"))


@pytest.mark.skipif(not shutil.which("rsync"), reason="there is no rsync")
def test_all_working_directories_are_copied_before_any_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "sync: rsync")
    (workdirs, runs), once = plan.copies, plan.once
    assert [(one.node, one.host) for one in workdirs] == [(one.node, one.host) for one in runs]
    assert [(one.node, one.host) for one in runs] == [(0, "gpu1"), (1, "gpu2")]
    assert {one.command[-2] for one in workdirs} == {f"{tmp_path}/"}
    assert {one.command[-2] for one in runs} == {f"{plan.run_dir}/"}
    assert (plan.before, once) == ((*workdirs, *runs), None)


def test_a_set_up_is_run_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "environment: {setup: [make data]}")
    assert plan.once is not None
    assert (plan.once.node, plan.once.host) == (0, "gpu1")
    assert shlex.split(plan.once.command[-1]) == ["bash", f"{plan.run_dir}/setup.sh"]
    assert (plan.copies, plan.before) == ((), (plan.once,))


@pytest.mark.parametrize("rest", ["environment: {setup: [make data]}", "sync: rsync"])
def test_a_plan_comes_back_from_json(tmp_path: Path, rest: str) -> None:
    if "rsync" in rest and not shutil.which("rsync"):
        pytest.skip("there is no rsync")
    plan = plan_of(tmp_path, rest)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    raw = plan.to_json()
    del raw["stdin"]  # As in a run of an earlier version, which can be resumed.
    assert Plan.from_json(json.loads(json.dumps(raw))) == plan


def test_hosts_are_left_out_without_a_scheduler(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "scheduler: {exclude: 'gpu1,gpu9', partition: gpu}")
    assert [node.host for node in plan.commands] == ["gpu2"]
    assert plan.notes == (
        "there is no scheduler here: scheduler.partition not used",
        "scheduler.exclude: gpu9 not among the hosts that are listed",
    )
