"""What control groups allow a process, read from real ones, and from directories as the kernel lays them out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from allranks.system import cgroups

ROOT = Path("/sys/fs/cgroup")
TOLD = "from allranks.system import cgroups as c; print(c.usable_cpus(), c.memory(), c.tasks())"
#: A rank that may use eight CPUs has so many for its data loader's workers.
WORKERS = "from allranks.runtime.data.workers import cpus_of; print(cpus_of(0, [(0, range(8))]))"
#: Of each controller of cgroup v1 the file of a limit, and one. Two CPUs at least would be told without that of one.
LIMITS = {
    "cpu": ("cpu.cfs_quota_us", 100_000),
    "memory": ("memory.limit_in_bytes", 512 << 20),
    "pids": ("pids.max", 77),
}


@contextmanager
def group(controller: str) -> Iterator[Path]:
    """Give the group of a controller that lies in one with a limit, and has none itself."""
    outer = ROOT / controller / f"allranks-{os.getpid()}"
    inner = outer / "step"
    inner.mkdir(parents=True)
    try:
        name, limit = LIMITS[controller]
        (outer / name).write_text(str(limit))
        yield inner
    finally:
        inner.rmdir()
        outer.rmdir()


@pytest.mark.skipif(
    not all(os.access(ROOT / controller / "cgroup.procs", os.W_OK) for controller in LIMITS),
    reason="this user may make no groups of cgroup v1 here",
)
@pytest.mark.parametrize(("code", "told"), [(TOLD, ["1", str(512 << 20), "77"]), (WORKERS, ["1"])])
def test_the_limits_of_a_real_group_are_those_around_it(code: str, told: list[str]) -> None:
    with ExitStack() as stack:
        groups = [stack.enter_context(group(controller)) for controller in LIMITS]
        joining = "".join(f"echo $$ >{each}/cgroup.procs; " for each in groups)
        command = ["sh", "-ec", f'{joining} exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == told


def laid_out(folder: Path, files: dict[str, str], groups: str, mounts: str) -> Path:
    """Lay out a hierarchy in a directory, and what ``/proc`` tells of it; return the latter."""
    for name, text in {**files, "proc/cgroup": groups, "proc/mountinfo": mounts.format(folder)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder / "proc"


V2 = "30 23 0:26 / {}/v2 rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def test_a_step_of_slurm_is_bound_by_its_job(tmp_path: Path) -> None:
    job = "v2/system.slice/slurmstepd.scope/job_7"
    files = {
        "v2/system.slice/pids.max": "max",
        f"{job}/memory.max": "8589934592",
        f"{job}/cpu.max": "100000 100000",
        f"{job}/pids.max": "max",
        f"{job}/step_0/memory.max": "max",
        f"{job}/step_0/cpu.max": "max 100000",
        f"{job}/step_0/user/task_0/memory.max": "max",
    }
    own = f"/{job.removeprefix('v2/')}/step_0/user/task_0"
    proc = laid_out(tmp_path, files, f"0::{own}", V2)
    assert (cgroups.usable_cpus(proc), cgroups.memory(proc), cgroups.tasks(proc)) == (1, 8 << 30, None)


def test_a_container_sees_its_own_group_as_the_outermost(tmp_path: Path) -> None:
    outside = "/docker/4f2a"
    mounts = "\n".join(
        f"3{number} 30 0:2{number} {outside} {{0}}/{name} ro - cgroup cgroup rw,{name}"
        for number, name in enumerate(("memory", "cpu,cpuacct", "pids"))
    )
    files = {
        "memory/memory.limit_in_bytes": "1073741824",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "pids/pids.max": "4096",
    }
    groups = f"12:pids:{outside}\n5:cpu,cpuacct:{outside}\n3:memory:{outside}\n1:name=systemd:{outside}"
    proc = laid_out(tmp_path, files, groups, mounts)
    bound = len(os.sched_getaffinity(0))
    assert (cgroups.usable_cpus(proc), cgroups.memory(proc), cgroups.tasks(proc)) == (bound, 1 << 30, 4096)


def test_a_group_outside_of_what_is_mounted_is_that_which_is(tmp_path: Path) -> None:
    proc = laid_out(tmp_path, {"v2/memory.max": "5000", "memory.max": "1"}, "0::/../other", V2)
    assert cgroups.memory(proc) == 5000


def test_where_there_are_no_groups_there_are_no_limits(tmp_path: Path) -> None:
    assert (cgroups.memory(tmp_path), cgroups.tasks(tmp_path)) == (None, None)
    assert cgroups.usable_cpus(tmp_path) == len(os.sched_getaffinity(0))
