"""The plan for a cluster with a scheduler: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks.contract import NodeSpec
from allranks.errors import JobError
from allranks.job.units import format_count
from allranks.plan import batch, environment
from allranks.plan.directives import Directive
from allranks.plan.entry import find_entry, name_of
from allranks.plan.layout import lay_out
from allranks.plan.machine import Machine
from allranks.plan.orders import orders
from allranks.plan.parts import Parts
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.resolve import environment_of, only_over_ssh, python_of, python_reason, workdir_of

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: The script's name where it is started, not submitted.
INSIDE_SCRIPT = "script.sh"


@dataclass(frozen=True)
class Gpus:
    """GPUs of an allocation.

    Attributes:
        count: how many of each node can be used.
        why: where that is from.
        must_be_asked: whether a step gets them only if it asks for them.
        note: what is not as one may think.
    """

    count: int
    why: str
    must_be_asked: bool = False
    note: str | None = None


class QueuedPlanning(ABC):
    """What the plan for a request is made from, and the plan.

    Args:
        request: what the plan is made from.
        job: its job, with what an allocation has settled.
        gpus: of each node; None where only the nodes know.
        inside: whether this is inside an allocation.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other.
    """

    kind: str
    scheduler: str
    #: The command that submits a script, and the script's name where it is submitted.
    submit: str
    script_name: str
    #: Whether the environment of the one who submits a script comes with it.
    hands_on: bool
    #: Keys of the job's scheduler that another one has.
    foreign: tuple[str, ...]

    def __init__(self, request: Request, job: Job, gpus: Gpus | None, *, inside: bool) -> None:
        _refuse(job, gpus, self.scheduler)
        self.request, self.job, self.gpus, self.inside = request, job, gpus, inside
        self.run_dir, self.workdir = request.run_dir, workdir_of(job, request.folder)
        self.python = python_of(job, request.environ)
        self.entry = find_entry(job, self.workdir, same_python=self.python[0] == sys.executable)
        self.layout = lay_out(job, self._node())
        self.secrets = environment.secrets(job)
        self._environ = request.environ if self.hands_on or inside else {}
        self._settings = environment.settings(job, None, self._environ)
        self.directives = () if inside else self.make_directives()

    @abstractmethod
    def make_directives(self) -> tuple[Directive, ...]:
        """Return what the scheduler is asked for."""

    @abstractmethod
    def script(self, parts: Parts) -> str:
        """Write the script."""

    @abstractmethod
    def options(self) -> list[str]:
        """Return the options that the script is submitted with."""

    @abstractmethod
    def notes(self) -> Iterator[str]:
        """Say what the job asks for and does not get, and what is not as one may think."""

    @property
    @abstractmethod
    def allocation(self) -> str:
        """What to call the allocation that this is inside of."""

    def plan(self) -> Plan:
        """Make the plan."""
        job, spec = self.job, self._spec()
        script = PlanFile(
            INSIDE_SCRIPT if self.inside else self.script_name,
            self.script(self._parts(spec)),
            spec.file_mode | (0o100 if self.inside else 0),
        )
        orders = () if self.request.standalone else (PlanFile(batch.SPEC_FILE, spec.to_json(), spec.file_mode),)
        return Plan(
            run_id=spec.run_id,
            name=name_of(job),
            cluster=self._cluster,
            kind=self.kind,
            run_dir=spec.run_dir,
            workdir=str(self.workdir),
            nnodes=spec.nnodes,
            nproc_per_node=spec.nproc_per_node,
            backend=self.layout.backend,
            stop_timeout=job.launch.stop_timeout,
            files=(script, *orders),
            commands=(NodeCommand(0, self._cluster, self._command(script.path)),),
            secrets=self.secrets,
            reasons=tuple(self.reasons()),
            notes=(*self.notes(), *self._notes()),
            group_readable=job.runs.group_readable,
            min_nodes=spec.min_nodes,
            ranks_unknown=self._ranks_unknown,
        )

    @property
    def is_direct(self) -> bool:
        """Whether the ranks are started without agents."""
        return self.job.launch.launcher == "direct"

    @property
    def _cluster(self) -> str:
        return self.allocation if self.inside else self.job.cluster

    def _node(self) -> Machine:
        gpus = self.gpus or Gpus(1, "scheduler.directives asks for them")
        return Machine(self.job.resources.cpus_per_node or 1, gpus.count, gpus.why)

    @property
    def _per_gpu(self) -> bool:
        counts_gpus = self.job.launch.nproc_per_node in ("auto", "gpu")
        return counts_gpus and (self.gpus is None or self.gpus.count > 0)

    @property
    def _ranks_unknown(self) -> bool:
        return self._per_gpu and self.gpus is None

    def _spec(self) -> NodeSpec:
        nodes = self.job.resources.nodes
        return orders(self.job, self.run_dir, self.entry, self.layout, self.python, nodes=nodes)

    def _parts(self, spec: NodeSpec) -> Parts:
        by_hand = f"bash {INSIDE_SCRIPT}" if self.inside else f"{self.submit} {self.script_name}"
        each = "a rank for each GPU" if self._ranks_unknown else format_count(spec.nproc_per_node, "rank")
        ranks = f"{format_count(spec.nnodes, 'node')} x {each}"
        return Parts(
            title=f"allranks {allranks.__version__}: run {spec.run_id}, {ranks}; to start it by hand: {by_hand}",
            job=self.job,
            directives=self.directives,
            spec=spec,
            workdir=str(self.workdir),
            environment=environment_of(self.job, self.request.folder),
            python=self.python,
            own_python=sys.executable,
            settings=self._settings,
            secrets=self.secrets,
            backend=self.layout.backend,
            per_gpu=self._per_gpu,
            standalone=self.request.standalone,
            inside=self.inside,
        )

    def _command(self, script: str) -> tuple[str, ...]:
        path = str(self.run_dir / script)
        return ("bash", path) if self.inside else (self.submit, *self.options(), path)

    def reasons(self) -> Iterator[Reason]:
        """Yield each decision, and why it was made."""
        launch, environ = self.job.launch, self._environ
        port = str(launch.master_port) if launch.master_port else "a port from the job's id"
        why = "as asked" if launch.master_addr or launch.master_port else "free there, and no other job's"
        yield Reason(self.entry.kind, self.entry.target, self.entry.why)
        yield python_reason(self.job, self.request.environ)
        yield from self.layout.reasons
        yield from (directive.reason for directive in self.directives)
        yield Reason("master", f"{launch.master_addr or 'the first node'}, {port}", why)
        yield from environment.decided_on_nodes(self.job, environ)
        yield from self._settings
        yield from environment.kept(self.job, None, environ)

    def _notes(self) -> Iterator[str]:
        job, resources = self.job, self.job.resources
        if resources.hosts or resources.hostfile:
            chooses = f"{self.scheduler} chooses the nodes"
            yield f"resources.hosts is not used: {chooses}; scheduler.include names some of them"
        yield from only_over_ssh(job)
        defaults = type(job.scheduler)()
        if foreign := [key for key in self.foreign if getattr(job.scheduler, key) != getattr(defaults, key)]:
            named = ", ".join(f"scheduler.{key}" for key in foreign)
            yield f"{named}: {self.scheduler} has no such thing, not used"
        if self._ranks_unknown:
            yield "the ranks are counted on the nodes: one for each GPU that scheduler.directives gets"


def asked_gpus(job: Job, own: int | None) -> Gpus | None:
    """Return the GPUs of each node that a job asks for; None if only the nodes know.

    Args:
        job: the job.
        own: how many the user's own directives ask for; None if they do not tell.
    """
    asked = job.resources.gpus_per_node
    if asked is not None:
        return Gpus(asked, f"gpus_per_node is {asked}")
    why = "scheduler.directives asks for them" if own else "none are asked for"
    return None if own is None else Gpus(own, why)


def with_log_paths(request: Request, why: str) -> Job:
    """Return the job with the scheduler's own logs as absolute paths: where it is submitted does not matter then.

    Args:
        request: what the plan is made from.
        why: what becomes of a job whose log has no folder.

    Raises:
        JobError: the folder of such a log is not there.
    """
    asked = request.job.scheduler
    paths = {key: str(request.folder / path) for key in ("output", "error") if (path := getattr(asked, key))}
    for key, path in paths.items():
        folder = Path(path).parent
        if not (request.standalone or "%" in str(folder) or folder.is_dir()):
            raise JobError(
                f"scheduler.{key}: there is no folder {folder}",
                why=why,
                fix=f"mkdir -p {shlex.quote(str(folder))}",
            )
    return request.job.model_copy(update={"scheduler": asked.model_copy(update=paths)})


def settled_already(job: Job) -> Iterator[str]:
    """Yield the notes on what a job asks for and the allocation that it is started in has settled."""
    defaults, scheduler, resources = type(job.scheduler)(), job.scheduler, job.resources
    used = [f"scheduler.{name}" for name, value in scheduler if value != getattr(defaults, name)]
    used += [f"resources.{name}" for name in ("time", "memory", "cpus_per_node") if getattr(resources, name)]
    if used:
        yield f"inside an allocation, which has settled it: {', '.join(used)} not used"
    if "requeue" in job.retry.model_fields_set and job.retry.requeue:
        yield "retry.requeue: inside an allocation there is no queue to go back into"


def _refuse(job: Job, gpus: Gpus | None, scheduler: str) -> None:
    """Refuse what no scheduler can do.

    Raises:
        JobError: the job asks for it.
    """
    launch, counts_gpus = job.launch, job.launch.nproc_per_node in ("auto", "gpu")
    if launch.launcher == "legacy":
        why = f"torch.distributed.launch gave way to torchrun, and cannot be told of several nodes by {scheduler}"
        raise JobError(f"launcher legacy does not exist on cluster {job.cluster}", why=why, fix="--launcher torchrun")
    if not launch.agent and launch.launcher != "direct":
        why = f"the nodes and their places are known to the agents alone, which {scheduler} starts"
        raise JobError(f"launch.agent cannot be false on cluster {job.cluster}", why=why, fix="--launcher direct")
    if launch.nproc_per_node == "cpu" and not job.resources.cpus_per_node:
        why = f"how many CPUs {scheduler} gives is not known yet"
        raise JobError("one rank for each CPU was asked for", why=why, fix="--cpus-per-node 8")
    if launch.launcher == "direct" and counts_gpus and gpus is None:
        why = "scheduler.directives asks for GPUs, but does not tell how many there are on each node"
        raise JobError("launcher direct must know the number of ranks on each node", why=why, fix="--nproc-per-node 4")
