"""The plan for a cluster with a scheduler: a batch script, how it is submitted, and why each line of it is there."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters.batch.scheduler import Scheduler, UsableGpus
from allranks.errors import JobError, PreflightError
from allranks.job.units import format_count
from allranks.plan import environment, layout, torch_launcher
from allranks.plan.directives import warning_seconds, with_log_paths, written
from allranks.plan.entry import find_entry, name_of
from allranks.plan.environment import environment_of, only_over_ssh, python_of, workdir_of
from allranks.plan.layout import Machine, agent_config, lay_out, this_machine
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.script import CODE, HERE, SPEC, become, enter, fill, name_failures, node_script, required, umask
from allranks.record.spec import BatchSpec

if TYPE_CHECKING:
    from allranks.clusters.base import Request

#: Ends node.sh and the configurations in a script that is all there is of its run.
_END = "END_OF_NODE_SCRIPT"
#: In node.sh. srun was seen to lose what a task had written just before it failed, and offers nothing to wait for.
_TRAPS = "trap '' USR1; trap '(($? == 0)) || sleep 0.5' EXIT  # The warning is for ranks. Let a last line be read."


class Draft:
    """What the plan for a request is made from, inside an allocation on its nodes, and the plan.

    Raises:
        JobError: the job asks for what cannot be had there, or its script is not there.
        PreflightError: ranks, GPUs and backend do not fit each other, or the allocation does not fit the job.
        LaunchError: the scheduler's commands are those of another one.
    """

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.scheduler, self.request, environ = scheduler, request, request.environ
        #: Whether this is inside an allocation.
        self.inside = bool(scheduler.environment.job(environ)) and contract.RUN_DIR not in environ
        job = request.job if self.inside else with_log_paths(request.job, request.folder, may_lack=request.standalone)
        nodes = self._allocated_nodes() if self.inside else self._requested_nodes()
        #: GPUs of each node that ranks can use; None if only the nodes know.
        self.gpus = self._usable_gpus()
        by_gpu = job.launch.nproc_per_node in ("auto", "gpu")
        #: Whether a node has a rank for each of its GPUs, and whether only the nodes know how many those are.
        self.has_rank_per_gpu = by_gpu and (self.gpus is None or self.gpus.count > 0)
        self._ranks_unknown = by_gpu and self.gpus is None
        #: The job with what the allocation, or the user's own directives, have settled.
        self.job = job = job.model_copy(update={"resources": job.resources.model_copy(update={"nodes": nodes})})
        self._refuse()
        self._name = "script.sh" if self.inside else scheduler.script
        self.workdir, (self.python, python_reason) = workdir_of(job, request.folder), python_of(job, environ)
        entry = find_entry(job, self.workdir, same_python=self.python[0] == sys.executable)
        on_nodes = self.gpus or UsableGpus(1, "scheduler.directives asks for them")
        self.layout = lay_out(job, Machine(job.resources.cpus_per_node or 1, on_nodes.count, on_nodes.why))
        #: The configuration of the nodes' agents.
        self.spec = agent_config(job, request.run_dir, entry, self.layout, self.python, nodes=nodes)
        self.secrets = environment.secrets(job)
        self._known = environ if scheduler.passes_environment or self.inside else {}  # To the script.
        self._settings = environment.settings(job, None, self._known)
        self._program = (Reason(entry.kind, entry.target, entry.why), python_reason)
        self._added = scheduler.additions(self)

    def plan(self) -> Plan:
        """Make the plan."""
        scheduler, job, spec, inside = self.scheduler, self.job, self.spec, self.inside
        name, supervisor, node = self._name, self._supervisor(), self._node_script()
        notify = {"notify": config} if (config := layout.notify_config(job)) else {}
        specs = {"node": spec._asdict(), "supervisor": supervisor._asdict(), **notify}
        alone = (node, specs) if self.request.standalone else None
        files = [PlanFile(name, self._script(alone), spec.file_mode | 0o100 * inside)]
        if not alone:
            files += [
                PlanFile(contract.NODE_SPEC, spec.to_json(), spec.file_mode),
                PlanFile(contract.NODE_SCRIPT, node, spec.file_mode),
                PlanFile(contract.BATCH_SPEC, supervisor.to_json(), spec.file_mode),
                *layout.notify_files(job, spec.file_mode),
            ]
        words = ["bash"] if inside else [scheduler.submit, *self._added.options]
        if self.secrets and alone and not (scheduler.passes_environment or inside):
            words += ["-v", ",".join(self.secrets)]
        cluster = f"allocation {scheduler.environment.job(self.request.environ)}" if inside else job.cluster
        return Plan(
            run_id=spec.run_id,
            name=name_of(job),
            cluster=cluster,
            kind=scheduler.name,
            run_dir=spec.run_dir,
            workdir=str(self.workdir),
            nnodes=spec.nnodes,
            nproc_per_node=spec.nproc_per_node,
            backend=self.layout.backend,
            stop_timeout=job.launch.stop_timeout,
            files=tuple(files),
            commands=(NodeCommand(0, cluster, (*words, f"{spec.run_dir}/{name}")),),
            secrets=self.secrets,
            reasons=tuple(self._reasons()),
            notes=tuple(self._notes()),
            group_readable=job.runs.group_readable,
            min_nodes=spec.min_nodes,
            ranks_unknown=self._ranks_unknown,
        )

    def _requested_nodes(self) -> tuple[int, int]:
        """Return how many nodes a job asks for, at least and at most."""
        job, (count, _) = self.request.job, self.scheduler.own(self.request.job)
        least, most = job.resources.nodes
        if count is not None and "nodes" in job.resources.model_fields_set and count != most:
            raise JobError(
                f"{most} nodes are requested by resources.nodes, and {count} by scheduler.directives",
                why=f"scheduler.directives: {', '.join(job.scheduler.directives)}",
                fix="leave one of them out",
            )
        most = count or most
        return most if self.scheduler.is_exact else least, most

    def _allocated_nodes(self) -> tuple[int, int]:
        """Return how many nodes a job gets inside an allocation, at least and at most."""
        scheduler, environ, resources = self.scheduler, self.request.environ, self.request.job.resources
        there, variables = scheduler.nodes_there(environ), scheduler.environment
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
        return needed, min(most, there)

    def _usable_gpus(self) -> UsableGpus | None:
        job, environ = self.request.job, self.request.environ
        if (count := job.resources.gpus_per_node) is not None:
            return UsableGpus(count, f"gpus_per_node is {count}")
        if not self.inside:
            _, own = self.scheduler.own(job)
            why = "scheduler.directives asks for them" if own else "none are requested"
            return None if own is None else UsableGpus(own, why)
        if self.scheduler.gpus_there:
            return self.scheduler.gpus_there(environ)
        here = this_machine(environ)
        return UsableGpus(here.gpus, f"on this first node of the allocation, {here.gpus_from}")

    def _refuse(self) -> None:
        """Refuse what no scheduler can do."""
        job, scheduler = self.job, self.scheduler.title
        torch_launcher.refuse_scheduler(job, scheduler)
        if job.launch.nproc_per_node == "cpu" and not job.resources.cpus_per_node:
            why = f"how many CPUs {scheduler} gives is not known yet"
            raise JobError("one rank per CPU was requested", why=why, fix="--cpus-per-node 8")
        if job.launch.is_direct and self._ranks_unknown:
            why = "scheduler.directives asks for GPUs, but does not report how many there are on each node"
            what = "launcher direct must know the number of ranks on each node"
            raise JobError(what, why=why, fix="--nproc-per-node 4")

    def _supervisor(self) -> BatchSpec:
        """Return the configuration of the job's supervisor, or of what is started inside an allocation."""
        job, scheduler = self.job, self.scheduler
        is_array, requeues = bool(job.scheduler.array) and not self.inside, job.retry.requeue and not self.inside
        return BatchSpec(
            module=scheduler.module,
            script=self._name,
            start_with=job.scheduler.start_with,
            options=(*self._added.start, *job.launch.launcher_args),
            is_direct=job.launch.is_direct,
            is_array=is_array,
            is_inside=self.inside,
            master_addr=job.launch.master_addr,
            max_attempts=job.retry.max_attempts if requeues else None,
            time=job.resources.time,
            warn_before=0 if scheduler.warns_itself else warning_seconds(job),
            removes_secrets=bool(self.secrets) and not (is_array or self.inside),
            retry_on=job.retry.on,
        )

    def _script(self, alone: tuple[str, Mapping[str, object]] | None) -> str:
        """Write the script that the scheduler gets: it becomes the job's supervisor, which starts node.sh on each node.

        A script that stands ``alone`` is all there is of its run: it writes these, node.sh and the configurations.
        """
        spec, submit, chosen = self.spec, self.scheduler.submit, self.job.environment
        typed = f"{'bash' if self.inside else submit} {self._name}"
        by_hand = f"submit it with {submit}" if alone else f"to start it by hand: {typed}"
        each = "a rank for each GPU" if self._ranks_unknown else format_count(spec.nproc_per_node, "rank")
        size = f"{format_count(spec.nnodes, 'node')} x {each}"
        pythons = [sys.executable, *(word for word in self.python[:1] if word.startswith("/"))]
        setup = list[str]()
        if chosen.setup:
            setup = ["trap 'builtin exit 143' TERM", "trap 'supervise \"$?\"' EXIT"]
            setup += [enter(str(self.workdir)), "# environment.setup", *chosen.setup]
        supervisor, files = f'{CODE} --supervise "$1"', list[str]()
        if alone:
            installed = shlex.quote(str(contract.installation() / "agent" / "__main__.py"))
            supervisor = f'{installed} --supervise-alone "$0" "$1" <<\'{_END}\''
            files = [*f"{alone[0]}{json.dumps(alone[1])}".splitlines(), _END]
        words = {
            "title": f"allranks {allranks.__version__}: run {spec.run_id}, {size}; {by_hand}",
            "run_dir": shlex.quote(spec.run_dir),
            "pythons": shlex.join(dict.fromkeys(pythons)),
            "supervisor": supervisor,
        }
        once = chosen.model_copy(update={"node_setup": ()})
        secrets = "" if self.scheduler.passes_environment else shlex.quote(f"{spec.run_dir}/{contract.SECRETS_FILE}")
        blocks = {
            # A user chooses the name of a script that stands alone.
            "traps": name_failures(once, copy="the batch script" if alone else self._name),
            "directives": [*written(self._added.directives, self.scheduler.prefix)],
            "secrets": required(self.secrets, secrets, f"{submit} -v {','.join(self.secrets)}"),
            "log": [] if self.inside else self._log_lines(),
            "setup": setup,
            "alone": files,
        }
        return fill(HERE / "batch.sh", words, blocks)

    def _log_lines(self) -> list[str]:
        """Write the lines that mark an attempt's start in the script's log, and in that of its errors if it has one.

        If the scheduler itself would write that log late, the lines open it.
        """
        requested, variable = self.job.scheduler, self.scheduler.environment.job_id
        mark = f"echo '{contract.ATTEMPT_STARTS}' || :"  # A full disk need not end the job.
        err = f">>{shlex.quote(requested.error)}" if requested.error else ""
        if err:
            mark += f"; {mark.replace(' ||', ' >&2 ||')}"
        if not self._added.log:
            return [mark]
        out = shlex.quote(requested.output) if requested.output else self._added.log
        made = f">>{out} {err}".rstrip()
        return [
            f': "${{{variable}:?is not set: {self.scheduler.submit} this script}}"',
            f'(umask {umask(self.spec.file_mode)} && mkdir -p "${contract.RUN_DIR}" && : {made})',
            f"exec >>{out} 2{err or '>&1'}; {mark}",
        ]

    def _node_script(self) -> str:
        chosen = environment_of(self.job, self.request.folder)
        chosen = chosen.model_copy(update={"setup": ()})  # It runs in the script that is submitted.
        words, becomes = [CODE, SPEC], "its agent, which starts the ranks and watches them"
        if self.job.launch.is_direct:
            words, becomes = [CODE, "--rank", shlex.join(self.spec.command(self.python))], "a rank"
        return node_script(
            title=f"Started by the supervisor of run {self.spec.run_id}: sets a node up and becomes {becomes}.",
            traps=[*name_failures(chosen, host=self.scheduler.host), _TRAPS],
            workdir=str(self.workdir),
            environment=chosen,
            settings=self._settings,
            backend=self.layout.backend,
            place=self._added.node,
            becomes=["trap - EXIT; " + line for line in become(chosen.container, self.python, *words)],
        )

    def _reasons(self) -> Iterator[Reason]:
        """Yield each decision, and why it was made."""
        job, launch = self.job, self.job.launch
        port = str(launch.master_port) if launch.master_port else "a port from the job's id"
        why = "as asked" if launch.master_addr or launch.master_port else "free there, and no other job's"
        yield from (*self._program, *self.layout.reasons)
        yield from (directive.reason for directive in self._added.directives)
        yield Reason("master", f"{launch.master_addr or 'the first node'}, {port}", why)
        yield from layout.notify_reasons(job)
        yield from environment.decided_on_nodes(job, self._known)
        yield from self._settings
        yield from environment.kept(job, None, self._known)
        for key in ("output", "error") if self._added.log else ():
            if path := getattr(job.scheduler, key):
                yield Reason(f"scheduler.{key}", path, "what the script prints")

    def _notes(self) -> Iterator[str]:
        """Yield what the job asks for and does not get, and what is not as one may think."""
        scheduler, title, job = self.scheduler, self.scheduler.title, self.job
        resources, requested = job.resources, job.scheduler.model_dump(exclude_defaults=True)
        if self.inside:
            used = [*(f"scheduler.{name}" for name in requested), *(["notify.mail"] if job.notify.mail else [])]
            used += [f"resources.{name}" for name in ("time", "memory", "cpus_per_node") if getattr(resources, name)]
            if used:
                yield f"inside an allocation, which has settled it: {', '.join(used)} not used"
            if "requeue" in job.retry.model_fields_set and job.retry.requeue:
                yield "retry.requeue: nothing is requeued inside an allocation"
            if self.gpus and self.gpus.note:
                yield self.gpus.note
        elif scheduler.is_exact and self.request.job.resources.nodes[0] < resources.nodes[1]:
            yield f"resources.nodes: {title} always gives the same number of nodes: {resources.nodes[1]}"
        if not self.inside and resources.memory and resources.memory < 1 << 30:  # A unit was probably forgotten.
            yield f"resources.memory: {resources.memory >> 20} MiB on a node; a number without a unit is in megabytes"
        if resources.spares:
            instead = "" if scheduler.is_exact else "; --nodes MIN:MAX continues with fewer"
            yield f"resources.spares: nodes are kept ready over SSH only{instead}"
        if job.launch.is_direct and job.launch.max_restarts:
            yield "launch.max_restarts: the ranks are started once; launcher torchrun starts them again"
        for directive in self._added.directives:
            if directive.why == "name" and directive.value != name_of(job):
                yield f"{title} knows the job as {directive.value}: other names it may not take"
        yield from self._added.notes
        if resources.hosts or resources.hostfile:
            yield f"resources.hosts is not used: {title} chooses the nodes; scheduler.include names some of them"
        yield from only_over_ssh(job)
        if foreign := sorted(job.scheduler.of_some & requested.keys() - {*scheduler.own_keys}):
            named = ", ".join(f"scheduler.{key}" for key in foreign)
            yield f"{named}: {title} has no such thing, not used{'; a queue is --queue' * ('qos' in foreign)}"
        if self._ranks_unknown:
            yield "the ranks are counted on the nodes: one for each GPU that scheduler.directives gets"
