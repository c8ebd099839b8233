"""What shared code knows of schedulers: the variables of their jobs, read from the module of each.

The module of a scheduler is code for nodes: it needs the standard library, and of this package what a run carries. It
has two classes: ``Environment``, below, and ``Job``, see :class:`allranks.agent.batch_job.BatchJob`. Nothing imports
such a module: it is loaded by its name, from the table here or from an entry point of another package.
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

#: The kinds of cluster with a scheduler: what each is for the launcher, and the module for nodes.
KINDS = {
    "slurm": ("allranks.clusters.slurm:SlurmCluster", "allranks.agent.slurm_job"),
    "pbs": ("allranks.clusters.pbs:PbsCluster", "allranks.agent.pbs_job"),
    "grid_engine": ("allranks.clusters.grid_engine:GridEngineCluster", "allranks.agent.grid_engine_job"),
}
#: Where another package names its kind of cluster, and the words of people for ours.
CLUSTERS = "allranks.clusters"
SAME = {
    **dict.fromkeys(("sge", "uge", "gridengine", "ge"), "grid_engine"),
    **dict.fromkeys(("openpbs", "pbspro", "pbs_pro", "torque"), "pbs"),
    "sbatch": "slurm",
    "qsub": "pbs",
}
#: Where another package names the module of its kind: one file on the top level, which is copied into each run.
GROUP = "allranks.schedulers"


class SchedulerEnvironment(EnvironmentKind):
    """The variables of a scheduler's jobs, and how it identifies a rank. ``name`` is what people call it."""

    #: Set in each job: its id; and a variable that nothing else sets, where the name of that one may mean anything.
    job_id: ClassVar[str]
    allocation: ClassVar[str] = ""
    #: Prefixes of what belongs to one job: the scheduler's commands in it must not read that as their options.
    of_a_job: ClassVar[tuple[str, ...]]
    #: Start so, but say where the scheduler itself is.
    kept: ClassVar[tuple[str, ...]] = ()
    #: What each task has of its own, where the supervisor hands its environment to tasks: see agent/tasks.py.
    of_a_task: ClassVar[tuple[str, ...]] = ()
    #: Whether it signals the end of the job to the supervisor alone, and may start nothing on a node beside its task:
    #: that then reads signals from a file.
    starts_tasks_alone: ClassVar[bool] = False
    #: How many CPUs the job has on a node, where its tasks may use more; the first that is set counts.
    cpus: ClassVar[tuple[str, ...]] = ()
    #: When the time limit is reached, in seconds since 1970.
    end_time: ClassVar[tuple[str, ...]] = ()

    def job(self, environ: Mapping[str, str]) -> str:
        """Return the id of the job that this is in; empty outside of one."""
        return environ.get(self.job_id, "") if environ.get(self.allocation or self.job_id) else ""

    def outside_of_jobs(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment without what belongs to one job."""
        return {name: each for name, each in environ.items() if name in self.kept or not name.startswith(self.of_a_job)}

    def job_key(self, env: Mapping[str, str]) -> str:
        """Return the job's id, with the scheduler's name."""
        return f"{self.name.lower()}.{env.get(self.job_id)}"


def kinds() -> list[str]:
    """Return all kinds of cluster, those of other packages too."""
    return sorted({"local", "ssh", "pdsh", *KINDS, *(point.name for point in plugins.points(CLUSTERS))})


def load(module: str) -> SchedulerEnvironment:
    """Return the variables of the scheduler whose module has this name."""
    environment: SchedulerEnvironment = import_module(module).Environment()
    return environment


def file_to_copy(module: str) -> Path | None:
    """Return the file of another package's module, which a run's code needs; None for one of ours, which is in it."""
    if module.startswith("allranks."):
        return None
    spec = find_spec(module) if "." not in module else None
    if not (spec and spec.origin and not spec.submodule_search_locations):
        why = "it is copied into each run, so it has to be one file on the top level of what is installed"
        raise AllranksError(f"the module of the scheduler, {module}, cannot be used", why=why)
    return Path(spec.origin)


def environments(*, others: bool = True) -> Iterator[tuple[str, SchedulerEnvironment]]:
    """Yield kind and variables of each scheduler; ``others`` of other packages last, since finding them is slow."""
    for kind, (_, module) in KINDS.items():
        yield kind, load(module)
    for point in plugins.points(GROUP) if others else ():
        yield point.name, plugins.load(point, "scheduler").Environment()


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what belongs to the job that this process may run in: it would leak into a new."""
    kept = dict(environ)
    for _, environment in environments():
        kept = environment.outside_of_jobs(kept)
    return kept
