"""The plan for a PBS cluster: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import pbs_allocation, pbs_directives, pbs_jobs
from allranks.clusters.pbs_log import OWN_LOG, OWN_LOG_OF_TASKS
from allranks.clusters.pbs_script import batch_script
from allranks.clusters.queued_plan import QueuedPlanning, asked_gpus, settled_already, with_log_paths
from allranks.errors import JobError
from allranks.plan.directives import Directive, fits
from allranks.plan.entry import name_of
from allranks.plan.parts import Parts
from allranks.plan.plan import Plan, Reason

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.clusters.pbs_jobs import Flavour
    from allranks.job.spec import Job

#: What -o takes: what stands before a colon is a host, and each version has variables of its own.
_PLAIN_PATH = re.compile(r"[^:\"'\\#,$%^]+")


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on a PBS cluster; inside an allocation, on its nodes.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other, or the allocation has other nodes.
        LaunchError: the PBS that is here is none.
    """
    inside = pbs_allocation.is_inside(request.environ)
    if inside:
        job, gpus = pbs_allocation.within(request.job, request.environ)
        return _Planning(request, job, gpus, inside=True).plan()
    job = _with_nodes(with_log_paths(request, "the script could not say anything"))
    return _Planning(request, job, asked_gpus(job, pbs_directives.own_gpus(job)), inside=False).plan()


def _with_nodes(job: Job) -> Job:
    """Return the job with the number of nodes that PBS will give: exactly so many.

    Raises:
        JobError: the job and the user's own directives ask for different numbers.
    """
    resources, own = job.resources, pbs_directives.own_count(job)
    most = resources.nodes[1]
    if own is not None and "nodes" in resources.model_fields_set and own != most:
        raise JobError(
            f"{most} nodes are asked for by resources.nodes, and {own} by scheduler.directives",
            why=f"scheduler.directives asks for {pbs_directives.own_nodes(job)}",
            fix="leave one of them out",
        )
    count = own or most
    return job.model_copy(update={"resources": resources.model_copy(update={"nodes": (count, count)})})


class _Planning(QueuedPlanning):
    """The plan for a request, and what it is made from."""

    kind, scheduler = "pbs", "PBS"
    submit, script_name = pbs_jobs.SUBMIT, contract.PBS_SCRIPT
    hands_on = False
    foreign = ("gpu_request",)

    def make_directives(self) -> tuple[Directive, ...]:
        """Return what qsub is asked for."""
        output = self._log if self._names_log else None
        return pbs_directives.directives(self.job, self.layout.nproc_per_node, output, self._flavour)

    def script(self, parts: Parts) -> str:
        """Write the script."""
        asked = self.job.scheduler
        default = shlex.quote(f"{self.run_dir}/pbs-") + '"${PBS_JOBID%%.*}".out'
        logs = [shlex.quote(asked.output) if asked.output else default]
        logs += [shlex.quote(asked.error)] if asked.error else []
        return batch_script(parts, [] if self.inside else logs)

    def reasons(self) -> Iterator[Reason]:
        """Yield each decision, and why it was made; the names of logs among them."""
        yield from super().reasons()
        for key in () if self.inside else ("output", "error"):
            if path := getattr(self.job.scheduler, key):
                yield Reason(f"scheduler.{key}", path, "what the script says")

    def options(self) -> list[str]:
        """Return the options of qsub; who submits a script that is all there is hands over the secrets."""
        return ["-v", ",".join(self.secrets)] if self.secrets and self.request.standalone else []

    @property
    def allocation(self) -> str:
        """What to call the allocation that this is inside of."""
        return pbs_allocation.name_of(self.request.environ)

    @property
    def _flavour(self) -> Flavour:
        return pbs_jobs.flavour_for(self.job, self.request.environ)

    @property
    def _log(self) -> str:
        is_array = self.job.scheduler.array and self._flavour == "openpbs"
        return f"{self.run_dir}/{OWN_LOG_OF_TASKS if is_array else OWN_LOG}"

    @property
    def _names_log(self) -> bool:
        return fits(self._log) and bool(_PLAIN_PATH.fullmatch(str(self.run_dir))) and not self.request.standalone

    def notes(self) -> Iterator[str]:
        """Say what the job asks for and does not get, and what is not as one may think."""
        resources, asked = self.job.resources, self.request.job.resources
        if self.inside:
            yield from settled_already(self.request.job)
            return
        if not (self.job.scheduler.flavour or pbs_jobs.flavour(self.request.environ)):
            yield "there is no qstat here to tell which PBS this is: taken for OpenPBS (scheduler.flavour)"
        name = pbs_directives.short_name(name_of(self.job))
        if name != name_of(self.job):
            yield f"PBS knows the job as {name}: not every version takes longer names, or other characters"
        if asked.nodes[0] < asked.nodes[1]:
            yield f"resources.nodes: PBS gives the same number of nodes always, {resources.nodes[1]} are asked for"
        if resources.spares:
            yield "resources.spares: nodes are kept ready over SSH only"
        if resources.gpu_type:
            yield "resources.gpu_type is not used: sites have names of their own; scheduler.constraint: gpu_model=a100"
        if not (resources.cpus_per_node or pbs_directives.own_nodes(self.job)):
            yield "resources.cpus_per_node is not given: most sites then give one CPU"
        if pbs_directives.own_nodes(self.job):
            yield from self._not_asked()
        if not self._names_log:
            yield f"what PBS itself says is where qsub is typed, in {name}.o<job>, when the job has ended"
        if self.is_direct and self.job.launch.max_restarts:
            yield "launch.max_restarts: ranks are started once; launcher torchrun starts them anew"

    def _not_asked(self) -> Iterator[str]:
        """Say what is not asked for, because the user's own directives ask for the nodes."""
        resources, asked = self.job.resources, self.job.scheduler
        used = [f"resources.{key}" for key in ("cpus_per_node", "memory") if getattr(resources, key)]
        used += [f"scheduler.{key}" for key in ("constraint", "include", "exclusive") if getattr(asked, key)]
        if used:
            yield f"scheduler.directives asks for the nodes: {', '.join(used)} not used"
