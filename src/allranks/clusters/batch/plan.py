"""The plan for a cluster with a scheduler: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
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
from allranks.plan.script import (
    CODE,
    HERE,
    SPEC,
    become,
    comment,
    enter,
    fill,
    name_failures,
    node_script,
    required,
    umask,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: The script's name where it is started, not submitted.
_INSIDE_SCRIPT = "script.sh"
#: Ends node.sh and the configurations in a script that is all there is of its run.
_END = "END_OF_NODE_SCRIPT"
#: In node.sh.
_NO_WARNING = "trap '' USR1  # The warning is for ranks that listen to it."


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
    name = _INSIDE_SCRIPT if inside else scheduler.script
    supervisor = _supervisor(scheduler, draft, added, name)
    node_script = _node_script(scheduler, draft, added, spec, settings)
    rest = f'{node_script}{{"node": {json.dumps(asdict(spec))}, "supervisor": {json.dumps(asdict(supervisor))}}}'
    files = [PlanFile(name, _script(scheduler, draft, added, spec, rest), spec.file_mode | 0o100 * inside)]
    if not alone:
        files += [
            PlanFile(contract.NODE_ORDERS, spec.to_json(), spec.file_mode),
            PlanFile(contract.NODE_SCRIPT, node_script, spec.file_mode),
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
        commands=(NodeCommand(0, cluster, (*words, str(request.run_dir / name))),),
        secrets=draft.secrets,
        reasons=tuple(_reasons(draft, added, settings, known)),
        notes=tuple(_notes(scheduler, draft, added)),
        group_readable=job.runs.group_readable,
        min_nodes=spec.min_nodes,
        ranks_unknown=draft.ranks_unknown,
    )


def _draft(scheduler: Scheduler, request: Request) -> Draft:
    inside = bool(scheduler.environment.job(request.environ)) and contract.RUN_DIR not in request.environ
    job = request.job if inside else _with_log_paths(request)
    nodes, gpus = (_allocated if inside else _requested)(scheduler, job, request.environ)
    job = job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": nodes})})
    _refuse(job, gpus, scheduler.title)
    workdir, (python, python_reason) = workdir_of(job, request.folder), python_of(job, request.environ)
    entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
    on_nodes = gpus or UsableGpus(1, "scheduler.directives asks for them")
    layout = lay_out(job, Machine(job.resources.cpus_per_node or 1, on_nodes.count, on_nodes.why))
    return Draft(request, job, inside, gpus, workdir, python, python_reason, entry, layout, environment.secrets(job))


def _requested(scheduler: Scheduler, job: Job, environ: Mapping[str, str]) -> tuple[tuple[int, int], UsableGpus | None]:
    """Return the nodes that a job asks for, at least and at most, and their GPUs; None if only the nodes know."""
    resources, (count, gpus) = job.resources, scheduler.own(job)
    least, most = resources.nodes
    if count is not None and "nodes" in resources.model_fields_set and count != most:
        raise JobError(
            f"{most} nodes are requested by resources.nodes, and {count} by scheduler.directives",
            why=f"scheduler.directives: {', '.join(job.scheduler.directives)}",
            fix="leave one of them out",
        )
    most = count or most
    nodes = (most if scheduler.is_exact else least, most)
    if resources.gpus_per_node is not None:
        return nodes, UsableGpus(resources.gpus_per_node, f"gpus_per_node is {resources.gpus_per_node}")
    why = "scheduler.directives asks for them" if gpus else "none are requested"
    return nodes, None if gpus is None else UsableGpus(gpus, why)


def _allocated(scheduler: Scheduler, job: Job, environ: Mapping[str, str]) -> tuple[tuple[int, int], UsableGpus]:
    """Return the nodes that a job gets inside an allocation, at least and at most, and their GPUs."""
    resources, there, variables = job.resources, scheduler.nodes_there(environ), scheduler.environment
    least, most = resources.nodes if "nodes" in resources.model_fields_set else (there, there)
    needed = most if scheduler.is_exact else least
    if needed > there or (scheduler.is_exact and needed < there):
        leave = f"env -u {variables.allocation or variables.job_id} allranks ..."
        another = f"{scheduler.allocate.format(needed)}, or {leave} for a job of its own"
        raise PreflightError(
            f"{format_count(needed, 'node')} were requested, and this allocation has {there}",
            why=f"{variables.job_id} is {variables.job(environ)}: the command was typed inside an allocation",
            fix=f"--nodes {there}, or {another}",
        )
    nodes = (needed, min(most, there))
    if resources.gpus_per_node is not None:
        return nodes, UsableGpus(resources.gpus_per_node, f"gpus_per_node is {resources.gpus_per_node}")
    if scheduler.gpus_there:
        return nodes, scheduler.gpus_there(environ)
    here = this_machine(environ)
    return nodes, UsableGpus(here.gpus, f"on this first node of the allocation, {here.gpus_from}")


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


def _supervisor(scheduler: Scheduler, draft: Draft, added: Additions, script: str) -> BatchSpec:
    job, inside = draft.job, draft.inside
    is_array = bool(job.scheduler.array) and not inside
    return BatchSpec(
        module=scheduler.module,
        script=script,
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


def _script(scheduler: Scheduler, draft: Draft, added: Additions, spec: NodeSpec, rest: str) -> str:
    """Write the script that is submitted; ``rest`` is what it writes the run's files from if it is all there is.

    It runs the job's set-up lines once; what is for each node is in node.sh.
    """
    name = _INSIDE_SCRIPT if draft.inside else scheduler.script
    by_hand = f"{'bash' if draft.inside else scheduler.submit} {name}"
    each = "a rank for each GPU" if draft.ranks_unknown else format_count(spec.nproc_per_node, "rank")
    title = f"run {spec.run_id}, {format_count(spec.nnodes, 'node')} x {each}; to start it by hand: {by_hand}"
    setup: list[str] = []
    if lines := draft.job.environment.setup:
        setup = ["trap 'builtin exit 143' TERM", "trap 'supervise \"$?\"' EXIT"]
        setup += [enter(str(draft.workdir)), comment("environment.setup"), *lines]
    supervisor, alone = f'{CODE} --supervise "$1"', list[str]()
    if draft.request.standalone:
        installed = shlex.quote(str(contract.installation() / "agent" / "__main__.py"))
        supervisor = f'{installed} --supervise-alone "$0" "$1" <<\'{_END}\''
        alone = [*rest.splitlines(), _END]
    python = draft.python[0]
    pythons = [sys.executable, python] if python.startswith("/") else [sys.executable]
    words = {
        "title": comment(f"allranks {allranks.__version__}: {title}").removeprefix("# "),
        "run_dir": shlex.quote(spec.run_dir),
        "pythons": shlex.join(dict.fromkeys(pythons)),
        "supervisor": supervisor,
    }
    once = draft.job.environment.model_copy(update={"node_setup": ()})
    blocks = {
        "traps": name_failures(once, copy=name),
        "directives": [*written(added.directives, scheduler.prefix)],
        "secrets": _secret_lines(scheduler, draft, spec.run_dir),
        "log": _log_lines(scheduler, draft, added.log, spec.file_mode),
        "setup": setup,
        "alone": alone,
    }
    return fill(HERE / "batch.sh", words, blocks)


def _log_lines(scheduler: Scheduler, draft: Draft, late: str, mode: int) -> list[str]:
    """Write the lines that mark the attempt's start in the log and, if the scheduler writes that late, open it."""
    if draft.inside:
        return []
    requested, mark = draft.job.scheduler, f"echo '{contract.ATTEMPT_STARTS}' || :"  # A full disk need not end the job.
    mark += f"; {mark.replace(' ||', ' >&2 ||')}" if requested.error else ""
    if not late:
        return [mark]
    out = shlex.quote(requested.output) if requested.output else late
    err = f">>{shlex.quote(requested.error)}" if requested.error else ""
    return [
        f': "${{{scheduler.environment.job_id}:?is not set: {scheduler.submit} this script}}"',
        f'(umask {umask(mode)} && mkdir -p "${contract.RUN_DIR}" && : {" ".join(filter(None, (f">>{out}", err)))})',
        f"exec >>{out} 2{err or '>&1'}; {mark}",
    ]


def _secret_lines(scheduler: Scheduler, draft: Draft, run_dir: str) -> list[str]:
    """Write the lines that find the job's secrets, or end the script."""
    if not draft.secrets or scheduler.passes_environment:
        return required(draft.secrets)
    file = shlex.quote(f"{run_dir}/{contract.SECRETS_FILE}")
    why = comment("secrets: they come in a file that only you can read, and that goes when the run has ended")
    fix = f"submit this script with it: {scheduler.submit} -v {','.join(draft.secrets)}"
    return [why, f"[ ! -r {file} ] || . {file}", *required(draft.secrets, fix)[1:]]


def _node_script(
    scheduler: Scheduler, draft: Draft, added: Additions, spec: NodeSpec, settings: Sequence[Reason]
) -> str:
    chosen = environment_of(draft.job, draft.request.folder)
    chosen = chosen.model_copy(update={"setup": ()})  # It runs in the script that is submitted.
    words, becomes = [CODE, SPEC], "its agent, which starts the ranks and watches them"
    if draft.job.launch.is_direct:
        start = {"script": [*draft.python, spec.target], "module": [*draft.python, "-m", spec.target]}
        command = [*start.get(spec.kind, [spec.target]), *spec.args]
        words, becomes = [CODE, "--rank", *map(shlex.quote, command)], "a rank"
    return node_script(
        title=f"Started by the supervisor of run {spec.run_id}: sets a node up and becomes {becomes}.",
        traps=[*name_failures(chosen, host=scheduler.host), _NO_WARNING],
        workdir=str(draft.workdir),
        environment=chosen,
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
