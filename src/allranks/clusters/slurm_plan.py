"""The plan for a Slurm cluster: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import slurm_allocation, slurm_directives, slurm_jobs
from allranks.clusters.queued_plan import QueuedPlanning, asked_gpus, with_log_paths
from allranks.clusters.slurm_script import batch_script
from allranks.plan.directives import Directive, fits
from allranks.plan.parts import Parts
from allranks.plan.plan import Plan

if TYPE_CHECKING:
    from allranks.clusters.base import Request


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on a Slurm cluster; inside an allocation, on its nodes.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other, or the allocation is too small.
    """
    inside = slurm_allocation.is_inside(request.environ)
    within = slurm_allocation.within(request.job, request.environ) if inside else None
    job, gpus = within or (
        with_log_paths(request, "Slurm before 23.02 ends such a job without a word"),
        asked_gpus(request.job, slurm_directives.own_gpus(request.job)),
    )
    return _Planning(request, job, gpus, inside=inside).plan()


class _Planning(QueuedPlanning):
    """The plan for a request, and what it is made from."""

    kind, scheduler = "slurm", "Slurm"
    submit, script_name = slurm_jobs.SUBMIT, contract.SBATCH_SCRIPT
    hands_on = True
    foreign = ("project", "resources", "flavour", "start_with")

    def make_directives(self) -> tuple[Directive, ...]:
        """Return what sbatch is asked for."""
        output = self._log if self._names_log else None
        return slurm_directives.directives(self.job, self.layout.nproc_per_node, output)

    def script(self, parts: Parts) -> str:
        """Write the script."""
        return batch_script(parts)

    def options(self) -> list[str]:
        """Return the options of sbatch."""
        extra = ["--export=ALL"] if self.secrets else []
        if not (self._names_log or self.job.scheduler.output or self.request.standalone):
            extra.append(f"--output={self._log}")
        return [*extra] if self.request.standalone else ["--parsable", *extra]

    @property
    def allocation(self) -> str:
        """What to call the allocation that this is inside of."""
        return slurm_allocation.name_of(self.request.environ)

    @property
    def _log(self) -> str:
        return _log_in(str(self.run_dir))

    @property
    def _names_log(self) -> bool:
        return fits(self._log) and not self.request.standalone

    def notes(self) -> Iterator[str]:
        """Say what the job asks for and does not get, and what is not as one may think."""
        job, resources, is_direct = self.job, self.job.resources, self.is_direct
        if self.inside:
            assert self.gpus
            yield from slurm_allocation.notes(self.request.job, self.gpus)
        elif not resources.cpus_per_node:
            yield (
                "resources.cpus_per_node is not given: where the site gives none with each GPU, "
                f"a {'rank' if is_direct else 'node'} has one CPU"
            )
        overriding = [] if self.inside else sorted(name for name in self.request.environ if name.startswith("SBATCH_"))
        if overriding:
            yield f"set in your environment, and for sbatch above what the script asks for: {', '.join(overriding)}"
        if resources.spares:
            yield "resources.spares: nodes are kept ready over SSH only; --nodes MIN:MAX goes on with fewer"
        if resources.gpu_type and not resources.gpus_per_node:
            yield "resources.gpu_type says nothing without resources.gpus_per_node"
        if is_direct and job.launch.max_restarts:
            yield "launch.max_restarts: srun starts the ranks once; launcher torchrun starts them anew"
        if is_direct and resources.nodes[0] < resources.nodes[1]:
            yield "launcher direct asks for a number of ranks on each node, for which Slurm may give the least nodes"
        if not (self.inside or self._names_log or job.scheduler.output):
            yield "a person who submits the script finds Slurm's own log, slurm-<job>.out, where sbatch is typed"


def _log_in(run_dir: str) -> str:
    """Return the name of Slurm's own log in a folder: a % is doubled, or in a name with a backslash that one is.

    In such a name Slurm replaces nothing, not even %j.
    """
    if "\\" in run_dir:
        return run_dir.replace("\\", "\\\\") + "/slurm.out"
    return f"{run_dir.replace('%', '%%')}/slurm-%j.out"
