"""The plan for a Slurm cluster: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters import slurm_allocation, slurm_directives, slurm_jobs
from allranks.clusters.slurm_allocation import Gpus
from allranks.clusters.slurm_script import Parts, batch_script
from allranks.contract import NodeSpec
from allranks.errors import JobError
from allranks.job.units import format_count
from allranks.plan import batch, environment
from allranks.plan.directives import Directive, fits
from allranks.plan.entry import Entry, find_entry, name_of
from allranks.plan.layout import lay_out
from allranks.plan.machine import Machine
from allranks.plan.orders import orders
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.resolve import environment_of, only_over_ssh, python_of, workdir_of

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: The script's name where it is started, not submitted.
_SCRIPT = "script.sh"


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on a Slurm cluster; inside an allocation, on its nodes.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other, or the allocation is too small.
    """
    inside = slurm_allocation.is_inside(request.environ)
    within = slurm_allocation.within(request.job, request.environ) if inside else None
    job, gpus = within or (_with_paths(request), _gpus(request.job))
    _refuse(job, gpus)
    workdir = workdir_of(job, request.folder)
    python = python_of(job)
    entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
    return _Planning(request, job, gpus, workdir, python, entry, inside).plan()


def _with_paths(request: Request) -> Job:
    """Return the job with Slurm's own logs as absolute paths: where sbatch is typed does not matter then.

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
                why="Slurm before 23.02 ends such a job without a word",
                fix=f"mkdir -p {shlex.quote(str(folder))}",
            )
    return request.job.model_copy(update={"scheduler": asked.model_copy(update=paths)})


def _refuse(job: Job, gpus: Gpus | None) -> None:
    launch, counts_gpus = job.launch, job.launch.nproc_per_node in ("auto", "gpu")
    if launch.launcher == "legacy":
        why = "torch.distributed.launch gave way to torchrun, and cannot be told of several nodes by Slurm"
        raise JobError(f"launcher legacy does not exist on cluster {job.cluster}", why=why, fix="--launcher torchrun")
    if not launch.agent and launch.launcher != "direct":
        why = "the nodes and their places are known to the agents alone, which Slurm starts"
        raise JobError(f"launch.agent cannot be false on cluster {job.cluster}", why=why, fix="--launcher direct")
    if launch.nproc_per_node == "cpu" and not job.resources.cpus_per_node:
        why = "how many CPUs Slurm gives is not known yet"
        raise JobError("one rank for each CPU was asked for", why=why, fix="--cpus-per-node 8")
    if launch.launcher == "direct" and counts_gpus and gpus is None:
        why = "scheduler.directives asks for GPUs, but does not tell how many there are on each node"
        raise JobError("launcher direct must know the number of ranks on each node", why=why, fix="--nproc-per-node 4")


def _gpus(job: Job) -> Gpus | None:
    """Return the GPUs of each node that a job asks for; None if only the nodes know."""
    asked = job.resources.gpus_per_node
    if asked is not None:
        return Gpus(asked, f"gpus_per_node is {asked}")
    count = slurm_directives.own_gpus(job)
    why = "scheduler.directives asks for them" if count else "none are asked for"
    return None if count is None else Gpus(count, why)


class _Planning:
    """What the plan for a request is made from, and the plan."""

    def __init__(
        self,
        request: Request,
        job: Job,
        gpus: Gpus | None,
        workdir: Path,
        python: tuple[str, ...],
        entry: Entry,
        inside: bool,
    ) -> None:
        self._request, self._job, self._gpus = request, job, gpus
        self._workdir, self._python, self._entry = workdir, python, entry
        self._inside, self._run_dir = inside, request.run_dir
        self._layout = lay_out(job, self._node())
        self._secrets = environment.secrets(job)
        self._settings = environment.settings(job, None, request.environ)
        self._log = _log_in(str(self._run_dir))
        self._names_log = fits(self._log) and not request.standalone
        self._directives = () if inside else self._make_directives()

    def plan(self) -> Plan:
        """Make the plan."""
        job, spec = self._job, self._spec()
        script = PlanFile(
            _SCRIPT if self._inside else contract.SBATCH_SCRIPT,
            batch_script(self._parts(spec)),
            spec.file_mode | (0o100 if self._inside else 0),
        )
        orders = () if self._request.standalone else (PlanFile(batch.SPEC_FILE, spec.to_json(), spec.file_mode),)
        return Plan(
            run_id=spec.run_id,
            name=name_of(job),
            cluster=self._cluster,
            kind="slurm",
            run_dir=spec.run_dir,
            workdir=str(self._workdir),
            nnodes=spec.nnodes,
            nproc_per_node=spec.nproc_per_node,
            backend=self._layout.backend,
            stop_timeout=job.launch.stop_timeout,
            files=(script, *orders),
            commands=(NodeCommand(0, self._cluster, self._command(script.path)),),
            secrets=self._secrets,
            reasons=tuple(self._reasons()),
            notes=tuple(self._notes()),
            group_readable=job.runs.group_readable,
            min_nodes=spec.min_nodes,
            ranks_unknown=self._ranks_unknown,
        )

    @property
    def _cluster(self) -> str:
        """The name of the place: an allocation has that of its job."""
        return slurm_allocation.name_of(self._request.environ) if self._inside else self._job.cluster

    def _node(self) -> Machine:
        gpus = self._gpus or Gpus(1, "scheduler.directives asks for them")
        return Machine(self._job.resources.cpus_per_node or 1, gpus.count, gpus.why)

    @property
    def _per_gpu(self) -> bool:
        counts_gpus = self._job.launch.nproc_per_node in ("auto", "gpu")
        return counts_gpus and (self._gpus is None or self._gpus.count > 0)

    @property
    def _ranks_unknown(self) -> bool:
        return self._per_gpu and self._gpus is None

    def _spec(self) -> NodeSpec:
        nodes = self._job.resources.nodes
        parts = self._entry, self._layout, self._python
        return orders(self._job, self._run_dir, *parts, nodes=nodes)

    def _parts(self, spec: NodeSpec) -> Parts:
        by_hand = f"bash {_SCRIPT}" if self._inside else f"sbatch {contract.SBATCH_SCRIPT}"
        each = "a rank for each GPU" if self._ranks_unknown else format_count(spec.nproc_per_node, "rank")
        ranks = f"{format_count(spec.nnodes, 'node')} x {each}"
        return Parts(
            title=f"allranks {allranks.__version__}: run {spec.run_id}, {ranks}; to start it by hand: {by_hand}",
            job=self._job,
            directives=self._directives,
            spec=spec,
            workdir=str(self._workdir),
            environment=environment_of(self._job, self._request.folder),
            python=self._python,
            own_python=sys.executable,
            settings=self._settings,
            secrets=self._secrets,
            backend=self._layout.backend,
            per_gpu=self._per_gpu,
            standalone=self._request.standalone,
            inside=self._inside,
        )

    def _make_directives(self) -> tuple[Directive, ...]:
        output = self._log if self._names_log else None
        return slurm_directives.directives(self._job, self._layout.nproc_per_node, output)

    def _command(self, script: str) -> tuple[str, ...]:
        path = self._run_dir / script
        if self._inside:
            return ("bash", str(path))
        extra = ["--export=ALL"] if self._secrets else []
        if not (self._names_log or self._job.scheduler.output or self._request.standalone):
            extra.append(f"--output={self._log}")
        return slurm_jobs.submit_command(path, extra)

    def _reasons(self) -> Iterator[Reason]:
        launch, environ = self._job.launch, self._request.environ
        port = str(launch.master_port) if launch.master_port else "a port from the job's id"
        why = "as asked" if launch.master_addr or launch.master_port else "free there, and no other job's"
        yield Reason(self._entry.kind, self._entry.target, self._entry.why)
        yield from self._layout.reasons
        yield from (directive.reason for directive in self._directives)
        yield Reason("master", f"{launch.master_addr or 'the first node'}, {port}", why)
        yield from environment.decided_on_nodes(self._job, environ)
        yield from self._settings
        yield from environment.kept(self._job, None, environ)

    def _notes(self) -> Iterator[str]:
        """Say what the job asks for and does not get, and what is not as one may think."""
        job, resources, is_direct = self._job, self._job.resources, self._job.launch.launcher == "direct"
        if self._inside:
            assert self._gpus
            yield from slurm_allocation.notes(self._request.job, self._gpus)
        elif not resources.cpus_per_node:
            yield (
                "resources.cpus_per_node is not given: where the site gives none with each GPU, "
                f"a {'rank' if is_direct else 'node'} has one CPU"
            )
        overriding = (
            [] if self._inside else sorted(name for name in self._request.environ if name.startswith("SBATCH_"))
        )
        if overriding:
            yield f"set in your environment, and for sbatch above what the script asks for: {', '.join(overriding)}"
        if resources.hosts or resources.hostfile:
            yield "resources.hosts is not used: Slurm chooses the nodes; scheduler.include names some of them"
        yield from only_over_ssh(job)
        if resources.spares:
            yield "resources.spares: nodes are kept ready over SSH only; --nodes MIN:MAX goes on with fewer"
        if resources.gpu_type and not resources.gpus_per_node:
            yield "resources.gpu_type says nothing without resources.gpus_per_node"
        if self._ranks_unknown:
            yield "the ranks are counted on the nodes: one for each GPU that scheduler.directives gets"
        if is_direct and job.launch.max_restarts:
            yield "launch.max_restarts: srun starts the ranks once; launcher torchrun starts them anew"
        if is_direct and resources.nodes[0] < resources.nodes[1]:
            yield "launcher direct asks for a number of ranks on each node, for which Slurm may give the least nodes"
        if not (self._inside or self._names_log or job.scheduler.output):
            yield "a person who submits the script finds Slurm's own log, slurm-<job>.out, where sbatch is typed"


def _log_in(run_dir: str) -> str:
    """Return the name of Slurm's own log in a folder: a % is doubled, or in a name with a backslash that one is.

    In such a name Slurm replaces nothing, not even %j.
    """
    if "\\" in run_dir:
        return run_dir.replace("\\", "\\\\") + "/slurm.out"
    return f"{run_dir.replace('%', '%%')}/slurm-%j.out"
