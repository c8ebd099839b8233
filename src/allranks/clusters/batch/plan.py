"""The plan for a cluster with a scheduler: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters.batch.scheduler import Additions, Draft, Scheduler, UsableGpus
from allranks.contract import BatchSpec, NodeSpec
from allranks.errors import JobError, PreflightError
from allranks.job.units import format_count
from allranks.plan import environment
from allranks.plan.directives import warning_seconds, written
from allranks.plan.entry import find_entry, name_of
from allranks.plan.environment import environment_of, only_over_ssh, python_of, workdir_of
from allranks.plan.layout import Machine, agent_config, lay_out, this_machine
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.script import CODE, SPEC, batch_script, become, mark_log, node_script, required

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: The script's name where it is started, not submitted.
_INSIDE_SCRIPT = "script.sh"
#: In node.sh: names the node on which a line fails.
_FAILS = """trap 'echo "allranks: {host}: $BASH_COMMAND failed with exit code $?" >&2' ERR"""


def make_plan(scheduler: Scheduler, request: Request) -> Plan:
    """Decide what will be executed; inside an allocation, on its nodes.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other, or the allocation does not fit the job.
        LaunchError: the scheduler's commands are those of another one.
    """
    draft = _draft(scheduler, request)
    job, layout, inside, alone = draft.job, draft.layout, draft.inside, request.standalone
    added = scheduler.additions(draft)
    known = request.environ if scheduler.passes_environment or inside else {}
    settings = environment.settings(job, None, known)
    spec = agent_config(job, request.run_dir, draft.entry, layout, draft.python, nodes=job.resources.nodes)
    supervisor = _supervisor(scheduler, draft, added)
    node = _node_script(scheduler, draft, added, spec, settings)
    here = (node, {"node": asdict(spec), "supervisor": asdict(supervisor)}) if alone else None
    files = [PlanFile(supervisor.script, _script(scheduler, draft, added, spec, here), spec.file_mode | 0o100 * inside)]
    if not alone:
        files += [
            PlanFile(contract.NODE_ORDERS, spec.to_json(), spec.file_mode),
            PlanFile(contract.NODE_SCRIPT, node, spec.file_mode),
            PlanFile(contract.BATCH_ORDERS, supervisor.to_json(), spec.file_mode),
        ]
    words = ["bash"] if inside else [scheduler.submit, *added.options]
    if draft.secrets and alone and not (scheduler.passes_environment or inside):
        words += ["-v", ",".join(draft.secrets)]
    cluster = f"allocation {scheduler.environment.job(request.environ)}" if inside else job.cluster
    return Plan(
        run_id=spec.run_id,
        name=name_of(job),
        cluster=cluster,
        kind=scheduler.name,
        run_dir=spec.run_dir,
        workdir=str(draft.workdir),
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        backend=layout.backend,
        stop_timeout=job.launch.stop_timeout,
        files=tuple(files),
        commands=(NodeCommand(0, cluster, (*words, str(request.run_dir / supervisor.script))),),
        secrets=draft.secrets,
        reasons=tuple(_reasons(draft, added, settings, known)),
        notes=tuple(_notes(scheduler, draft, added)),
        group_readable=job.runs.group_readable,
        min_nodes=spec.min_nodes,
        ranks_unknown=draft.ranks_unknown,
    )


def _draft(scheduler: Scheduler, request: Request) -> Draft:
    environ = request.environ
    inside = bool(scheduler.environment.job(environ)) and contract.RUN_DIR not in environ
    job = request.job if inside else _with_log_paths(request)
    nodes = _allocated_nodes(scheduler, job, environ) if inside else _requested_nodes(scheduler, job)
    gpus = _usable_gpus(scheduler, job, environ, inside=inside)
    job = job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": nodes})})
    _refuse(job, gpus, scheduler.title)
    workdir, (python, python_reason) = workdir_of(job, request.folder), python_of(job, environ)
    entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
    on_nodes = gpus or UsableGpus(1, "scheduler.directives asks for them")
    layout = lay_out(job, Machine(job.resources.cpus_per_node or 1, on_nodes.count, on_nodes.why))
    return Draft(request, job, inside, gpus, workdir, python, python_reason, entry, layout, environment.secrets(job))


def _requested_nodes(scheduler: Scheduler, job: Job) -> tuple[int, int]:
    """Return how many nodes a job asks for, at least and at most."""
    (least, most), (count, _) = job.resources.nodes, scheduler.own(job)
    if count is not None and "nodes" in job.resources.model_fields_set and count != most:
        raise JobError(
            f"{most} nodes are requested by resources.nodes, and {count} by scheduler.directives",
            why=f"scheduler.directives: {', '.join(job.scheduler.directives)}",
            fix="leave one of them out",
        )
    most = count or most
    return most if scheduler.is_exact else least, most


def _allocated_nodes(scheduler: Scheduler, job: Job, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return how many nodes a job gets inside an allocation, at least and at most."""
    there, variables = scheduler.nodes_there(environ), scheduler.environment
    least, most = job.resources.nodes if "nodes" in job.resources.model_fields_set else (there, there)
    needed = most if scheduler.is_exact else least
    if needed > there or (scheduler.is_exact and needed < there):
        leave = f"env -u {variables.allocation or variables.job_id} allranks ..."
        another = f"{scheduler.allocate.format(needed)}, or {leave} for a job of its own"
        raise PreflightError(
            f"{format_count(needed, 'node')} were requested, and this allocation has {there}",
            why=f"{variables.job_id} is {variables.job(environ)}: the command was typed inside an allocation",
            fix=f"--nodes {there}, or {another}",
        )
    return needed, min(most, there)


def _usable_gpus(scheduler: Scheduler, job: Job, environ: Mapping[str, str], *, inside: bool) -> UsableGpus | None:
    """Return the GPUs of each node that ranks can use; None if only the nodes know."""
    if (count := job.resources.gpus_per_node) is not None:
        return UsableGpus(count, f"gpus_per_node is {count}")
    if not inside:
        _, own = scheduler.own(job)
        return (
            own
            if own is None
            else UsableGpus(own, "scheduler.directives asks for them" if own else "none are requested")
        )
    if scheduler.gpus_there:
        return scheduler.gpus_there(environ)
    here = this_machine(environ)
    return UsableGpus(here.gpus, f"on this first node of the allocation, {here.gpus_from}")


def _with_log_paths(request: Request) -> Job:
    """Return the job with the scheduler's own logs as absolute paths: where it is submitted does not matter then."""
    requested = request.job.scheduler
    paths = {key: str(request.folder / path) for key in ("output", "error") if (path := getattr(requested, key))}
    for key, path in paths.items():
        folder = Path(path).parent
        if not (request.standalone or "%" in str(folder) or folder.is_dir()):
            raise JobError(
                f"scheduler.{key}: there is no directory {folder}",
                why="nothing could be written there",
                fix=f"mkdir -p {shlex.quote(str(folder))}",
            )
    return request.job.model_copy(update={"scheduler": requested.model_copy(update=paths)})


def _refuse(job: Job, gpus: UsableGpus | None, scheduler: str) -> None:
    """Refuse what no scheduler can do."""
    launch = job.launch
    if launch.launcher == "legacy":
        why = f"torch.distributed.launch was replaced by torchrun, and cannot get its nodes from {scheduler}"
        raise JobError(f"launcher legacy does not exist on cluster {job.cluster}", why=why, fix="--launcher torchrun")
    if not launch.agent and not launch.is_direct:
        why = f"the nodes and their places are known to the agents alone, which {scheduler} starts"
        raise JobError(f"launch.agent cannot be false on cluster {job.cluster}", why=why, fix="--launcher direct")
    if launch.nproc_per_node == "cpu" and not job.resources.cpus_per_node:
        why = f"how many CPUs {scheduler} gives is not known yet"
        raise JobError("one rank per CPU was requested", why=why, fix="--cpus-per-node 8")
    if launch.is_direct and launch.nproc_per_node in ("auto", "gpu") and gpus is None:
        why = "scheduler.directives asks for GPUs, but does not report how many there are on each node"
        raise JobError("launcher direct must know the number of ranks on each node", why=why, fix="--nproc-per-node 4")


def _supervisor(scheduler: Scheduler, draft: Draft, added: Additions) -> BatchSpec:
    job, inside = draft.job, draft.inside
    is_array = bool(job.scheduler.array) and not inside
    return BatchSpec(
        module=scheduler.module,
        script=_INSIDE_SCRIPT if inside else scheduler.script,
        start_with=job.scheduler.start_with,
        options=(*added.start, *job.launch.launcher_args),
        is_direct=job.launch.is_direct,
        is_array=is_array,
        is_inside=inside,
        master_addr=job.launch.master_addr,
        max_attempts=job.retry.max_attempts if job.retry.requeue and not inside else None,
        time=job.resources.time,
        warn_before=0 if scheduler.warns_itself else warning_seconds(job),
        removes_secrets=bool(draft.secrets) and not (is_array or inside),
        retry_on=job.retry.on,
    )


def _script(
    scheduler: Scheduler, draft: Draft, added: Additions, spec: NodeSpec, alone: tuple[str, Mapping[str, object]] | None
) -> str:
    requested, submit = draft.job.scheduler, scheduler.submit
    by_hand = f"bash {_INSIDE_SCRIPT}" if draft.inside else f"{submit} {scheduler.script}"
    each = "a rank for each GPU" if draft.ranks_unknown else format_count(spec.nproc_per_node, "rank")
    size = f"{format_count(spec.nnodes, 'node')} x {each}"
    out = shlex.quote(requested.output) if added.log and requested.output else added.log
    check = f': "${{{scheduler.environment.job_id}:?is not set: {submit} this script}}"'
    file = "" if scheduler.passes_environment else shlex.quote(f"{spec.run_dir}/{contract.SECRETS_FILE}")
    return batch_script(
        title=f"allranks {allranks.__version__}: run {spec.run_id}, {size}; to start it by hand: {by_hand}",
        directives=written(added.directives, scheduler.prefix),
        run_dir=spec.run_dir,
        pythons=[sys.executable, *(word for word in draft.python[:1] if word.startswith("/"))],
        workdir=str(draft.workdir),
        setup=draft.job.environment.setup,
        log=[] if draft.inside else mark_log(out, requested.error, spec.file_mode, check),
        secrets=required(draft.secrets, file, f"{submit} -v {','.join(draft.secrets)}"),
        alone=alone,
    )


def _node_script(
    scheduler: Scheduler, draft: Draft, added: Additions, spec: NodeSpec, settings: Sequence[Reason]
) -> str:
    chosen = environment_of(draft.job, draft.request.folder)
    words, becomes = [CODE, SPEC], "its agent, which starts the ranks and watches them"
    if draft.job.launch.is_direct:
        start = {"script": [*draft.python, spec.target], "module": [*draft.python, "-m", spec.target]}
        command = [*start.get(spec.kind, [spec.target]), *spec.args]
        words, becomes = [CODE, "--rank", *map(shlex.quote, command)], "a rank"
    return node_script(
        title=f"Started by the supervisor of run {spec.run_id}: sets a node up and becomes {becomes}.",
        traps=[_FAILS.format(host=scheduler.host), "trap '' USR1  # The warning is for ranks that listen to it."],
        workdir=str(draft.workdir),
        environment=chosen.model_copy(update={"setup": ()}),  # It runs in the script that is submitted.
        settings=settings,
        backend=draft.layout.backend,
        place=added.node,
        becomes=become(chosen.container, draft.python, *words),
    )


def _reasons(draft: Draft, added: Additions, settings: Sequence[Reason], known: Mapping[str, str]) -> Iterator[Reason]:
    """Yield each decision, and why it was made; ``known`` is the environment that the script gets."""
    job, launch, entry = draft.job, draft.job.launch, draft.entry
    port = str(launch.master_port) if launch.master_port else "a port from the job's id"
    why = "as asked" if launch.master_addr or launch.master_port else "free there, and no other job's"
    yield Reason(entry.kind, entry.target, entry.why)
    yield draft.python_reason
    yield from draft.layout.reasons
    yield from (directive.reason for directive in added.directives)
    yield Reason("master", f"{launch.master_addr or 'the first node'}, {port}", why)
    yield from environment.decided_on_nodes(job, known)
    yield from settings
    yield from environment.kept(job, None, known)
    for key in ("output", "error") if added.log else ():
        if path := getattr(job.scheduler, key):
            yield Reason(f"scheduler.{key}", path, "what the script prints")


def _notes(scheduler: Scheduler, draft: Draft, added: Additions) -> Iterator[str]:
    """Yield what the job asks for and does not get, and what is not as one may think."""
    job, resources, requested = draft.job, draft.job.resources, draft.job.scheduler.model_dump(exclude_defaults=True)
    if draft.inside:
        used = [f"scheduler.{name}" for name in requested]
        used += [f"resources.{name}" for name in ("time", "memory", "cpus_per_node") if getattr(resources, name)]
        if used:
            yield f"inside an allocation, which has settled it: {', '.join(used)} not used"
        if "requeue" in job.retry.model_fields_set and job.retry.requeue:
            yield "retry.requeue: nothing is requeued inside an allocation"
        if draft.gpus and draft.gpus.note:
            yield draft.gpus.note
    elif scheduler.is_exact and draft.request.job.resources.nodes[0] < resources.nodes[1]:
        yield f"resources.nodes: {scheduler.title} always gives the same number of nodes: {resources.nodes[1]}"
    if resources.spares:
        instead = "" if scheduler.is_exact else "; --nodes MIN:MAX continues with fewer"
        yield f"resources.spares: nodes are kept ready over SSH only{instead}"
    if job.launch.is_direct and job.launch.max_restarts:
        yield "launch.max_restarts: the ranks are started once; launcher torchrun starts them again"
    for directive in added.directives:
        if directive.why == "name" and directive.value != name_of(job):
            yield f"{scheduler.title} knows the job as {directive.value}: other names it may not take"
    yield from added.notes
    if resources.hosts or resources.hostfile:
        chooses = f"{scheduler.title} chooses the nodes"
        yield f"resources.hosts is not used: {chooses}; scheduler.include names some of them"
    yield from only_over_ssh(job)
    if foreign := sorted(job.scheduler.of_some & requested.keys() - {*scheduler.own_keys}):
        named = ", ".join(f"scheduler.{key}" for key in foreign)
        yield f"{named}: {scheduler.title} has no such thing, not used"
    if draft.ranks_unknown:
        yield "the ranks are counted on the nodes: one for each GPU that scheduler.directives gets"
