"""The schedulers that shared code knows, and the variables of their jobs.

A scheduler's module runs on nodes: it may use the standard library and the parts of this package that a run carries. It
has two classes: ``Environment``, a :class:`SchedulerEnvironment`, and ``Job``, see
:class:`allranks.agent.batch_job.BatchJob`. No code imports such a module directly: it is loaded by name, from the table
here or from an entry point of another package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from allranks.errors import AllranksError
from allranks.system import plugins
from allranks.system.rank_environment import EnvironmentKind

#: Kinds of cluster with a scheduler: the launcher's module, and the module for nodes.
KINDS = {
    "slurm": ("allranks.clusters.slurm:SlurmCluster", "allranks.agent.slurm_job"),
    "pbs": ("allranks.clusters.pbs:PbsCluster", "allranks.agent.pbs_job"),
    "grid_engine": ("allranks.clusters.grid_engine:GridEngineCluster", "allranks.agent.grid_engine_job"),
}
#: Entry-point group of kinds of cluster, and names of our own kinds for messages.
CLUSTERS = "allranks.clusters"
SAME = {
    **dict.fromkeys(("sge", "uge", "gridengine", "ge"), "grid_engine"),
    **dict.fromkeys(("openpbs", "pbspro", "pbs_pro", "torque"), "pbs"),
    "sbatch": "slurm",
    "qsub": "pbs",
}
#: Entry-point group of modules for nodes: one top-level file each, which is copied into each run.
GROUP = "allranks.schedulers"


class SchedulerEnvironment(EnvironmentKind):
    """The variables of a scheduler's jobs and ranks. ``name`` is its usual name."""

    #: The variable with the job's id; if its name is ambiguous, also one that only this scheduler sets.
    job_id: ClassVar[str]
    allocation: ClassVar[str] = ""
    #: Prefixes of variables that belong to a job: the scheduler's commands must not read them as options.
    of_a_job: ClassVar[tuple[str, ...]]
    #: Variables with these prefixes that locate the scheduler itself, and are kept.
    kept: ClassVar[tuple[str, ...]] = ()
    #: Variables that each task keeps instead of the supervisor's: see agent/tasks.py.
    of_a_task: ClassVar[tuple[str, ...]] = ()
    #: Whether it signals only the supervisor at the end of the job, and runs only one process per task: tasks then read
    #: signals from a file.
    starts_tasks_alone: ClassVar[bool] = False
    #: Variables with the job's CPUs on a node, if its tasks could use more; the first one set counts.
    cpus: ClassVar[tuple[str, ...]] = ()
    #: Variables with the end of the time limit, in seconds since 1970.
    end_time: ClassVar[tuple[str, ...]] = ()

    def job(self, environ: Mapping[str, str]) -> str:
        """Return the id of the current job; empty outside of jobs."""
        return environ.get(self.job_id, "") if environ.get(self.allocation or self.job_id) else ""

    def outside_of_jobs(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment without the variables of a job."""
        return {name: each for name, each in environ.items() if name in self.kept or not name.startswith(self.of_a_job)}

    def job_key(self, env: Mapping[str, str]) -> str:
        """Return the scheduler's name and the job's id."""
        return f"{self.name.lower()}.{env.get(self.job_id)}"


def kinds() -> list[str]:
    """Return all kinds of cluster, including those of other packages."""
    return sorted({"local", "ssh", "pdsh", *KINDS, *(point.name for point in plugins.points(CLUSTERS))})


def load(module: str) -> SchedulerEnvironment:
    """Return the environment class's instance of a scheduler's module."""
    environment: SchedulerEnvironment = import_module(module).Environment()
    return environment


def file_to_copy(module: str) -> Path | None:
    """Return the file of another package's module, to copy into a run's code; None for our own modules."""
    if module.startswith("allranks."):
        return None
    spec = find_spec(module) if "." not in module else None
    if not (spec and spec.origin and not spec.submodule_search_locations):
        why = "it is copied into each run, so it has to be one file on the top level of what is installed"
        raise AllranksError(f"the module of the scheduler, {module}, cannot be used", why=why)
    return Path(spec.origin)


def environments(*, others: bool = True) -> Iterator[tuple[str, SchedulerEnvironment]]:
    """Yield kind and environment of each scheduler; ``others`` of other packages come last: finding them is slow."""
    for kind, (_, module) in KINDS.items():
        yield kind, load(module)
    for point in plugins.points(GROUP) if others else ():
        yield point.name, plugins.load(point, "scheduler").Environment()


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the current job, which would leak into a new one."""
    kept = dict(environ)
    for _, environment in environments():
        kept = environment.outside_of_jobs(kept)
    return kept
