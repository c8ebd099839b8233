"""The plan of a job on machines that are reached over SSH."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters import ssh_script
from allranks.clusters.ssh_copy import WORKDIR, Copy, copy_for, entry_in, environment_in, refuse_if_large
from allranks.clusters.ssh_script import END, SETUP, START
from allranks.clusters.ssh_shell import real_name, ssh_command
from allranks.contract import NodeSpec
from allranks.errors import JobError
from allranks.job.hosts import Host, excluded_in_vain, hosts_of, taking_part
from allranks.job.units import format_count
from allranks.plan import batch, environment, plain_launcher
from allranks.plan.entry import Entry, find_entry, name_of
from allranks.plan.layout import Layout, lay_out
from allranks.plan.machine import Machine, this_machine
from allranks.plan.orders import orders, random_port
from allranks.plan.plain_script import plain_script
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.resolve import environment_of, python_of, python_reason, unused_scheduler, workdir_of
from allranks.plan.script import agent_script, node_setup

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.job.spec import Environment, Job

#: Nothing of the calling environment travels over SSH: what the ranks need stands in the job.
_NO_ENVIRONMENT: dict[str, str] = {}


def make_plan(request: Request) -> Plan:
    """Decide what will be executed on the machines of a job.

    Raises:
        JobError: the job asks for what cannot be had there, its script is not there, or its hosts cannot be read.
        PreflightError: ranks, GPUs and backend do not fit each other.
    """
    job = request.job
    _refuse(job)
    hosts = hosts_of(job, request.folder)
    workdir = workdir_of(job, request.folder)
    copy = copy_for(job.sync, workdir, request.run_dir) if job.sync.method == "rsync" else None
    python = python_of(job, request.environ, elsewhere=copy is not None)
    entry = find_entry(job, workdir, same_python=python[0] == sys.executable)
    layout = lay_out(job, _machine(job, hosts, request))
    return _Planning(request, hosts, workdir, copy, python, entry, layout).plan()


def with_attempt(plan: Plan, attempt: int) -> Plan:
    """Return a plan with another number of the attempt in the commands of its nodes."""

    def again(command: tuple[str, ...]) -> tuple[str, ...]:
        words, _, _ = command[-1].rpartition(" ")
        return (*command[:-1], f"{words} {attempt}")

    commands = tuple(replace(node, command=again(node.command)) for node in plan.commands)
    return replace(plan, attempt=attempt, commands=commands)


def _refuse(job: Job) -> None:
    launch = job.launch
    if launch.launcher == "direct":
        why = "there is no scheduler that could start ranks"
        raise JobError("launcher direct does not exist over SSH", why=why, fix="--launcher torchrun")
    if launch.launcher_args and not plain_launcher.is_used(job):
        raise JobError("launch.launcher_args: over SSH the agent takes none", fix="leave them out")
    if job.environment.setup and job.sync.method != "none":
        raise JobError(
            "environment.setup: there is no place where lines could run once for machines that share nothing",
            fix="environment.node_setup, which runs on each node",
        )


def _machine(job: Job, hosts: tuple[Host, ...], request: Request) -> Machine:
    """Say what each of the machines has, as far as it is told: by the job, by slots, else by this machine."""
    here = this_machine(request.environ)
    cpus = job.resources.cpus_per_node or here.cpus
    if (asked := job.resources.gpus_per_node) is not None:
        return Machine(cpus, asked, f"gpus_per_node is {asked}")
    if slots := {host.slots for host in hosts if host.slots}:
        return Machine(cpus, max(slots), "slots in the file of hosts")
    return Machine(cpus, here.gpus, f"the machines are taken to be like this one: {here.gpus_from}")


class _Planning:
    """What the plan for a request is made from, and the plan."""

    def __init__(
        self,
        request: Request,
        hosts: tuple[Host, ...],
        workdir: Path,
        copy: Copy | None,
        python: tuple[str, ...],
        entry: Entry,
        layout: Layout,
    ) -> None:
        self._request, self._job, self._hosts = request, request.job, hosts
        self._workdir, self._copy, self._python, self._layout = workdir, copy, python, layout
        self._entry = entry_in(copy, entry, self._job) if copy else entry
        if copy:
            refuse_if_large(copy.size, self._job.sync)
        self._settings = environment.settings(self._job, None, _NO_ENVIRONMENT)
        self._secrets = environment.secrets(self._job)
        self._run_dir = request.run_dir
        self._port = self._job.launch.master_port or random_port()
        self._master = self._job.launch.master_addr or real_name(hosts[0], request.environ)
        self._is_plain = plain_launcher.is_used(self._job)
        if self._is_plain:
            plain_launcher.refuse(self._job, len(hosts))
            plain_launcher.refuse_uneven(self._job, [*map(self._ranks_on, hosts)])

    def plan(self) -> Plan:
        """Make the plan."""
        job, spec = self._job, self._spec()
        return Plan(
            run_id=spec.run_id,
            name=name_of(job),
            cluster="ssh" if job.cluster == "local" else job.cluster,
            kind="ssh",
            run_dir=spec.run_dir,
            workdir=str(self._workdir),
            nnodes=spec.places,
            nproc_per_node=spec.nproc_per_node,
            backend=self._layout.backend,
            stop_timeout=spec.stop_timeout,
            files=tuple(self._files(spec)),
            commands=tuple(self._commands()),
            secrets=self._secrets,
            reasons=tuple(self._reasons()),
            notes=tuple(self._notes()),
            group_readable=job.runs.group_readable,
            min_nodes=0 if spec.min_nodes == spec.places else spec.min_nodes,
            master_addr=self._master,
            master_port=self._port,
            ranks=sum(map(self._ranks_on, self._hosts[: spec.places])),
            spares=spec.spares,
            copies=tuple(self._copies()),
            once=self._once(),
            copied_to=self._copy.folder if self._copy else "",
            is_attached=job.launch.attach,
        )

    def _spec(self) -> NodeSpec:
        nodes, spares = taking_part(self._job, self._hosts), self._job.resources.spares
        made_from = (self._job, self._run_dir, self._entry, self._layout, self._python)
        return orders(*made_from, nodes=nodes, spares=spares)

    def _files(self, spec: NodeSpec) -> Iterator[PlanFile]:
        made_by = f"allranks {allranks.__version__}: run {spec.run_id}"
        mode = spec.file_mode
        run = ssh_script.BESIDE if self._copy else shlex.quote(spec.run_dir)
        starting = ssh_script.starting(
            f"{made_by}; on each machine: bash {START} NODE RANKS ATTEMPT </dev/null",
            run,
            mode | 0o100 | (mode & 0o040) >> 2,
            spec.nnodes,
            self._master,
            self._port,
        )
        ending = ssh_script.ending(f"{made_by}: end it on a machine", run, spec.stop_timeout)
        if self._job.environment.setup:
            title = f"{made_by}: run once, on the first machine"
            chosen, folders = self._environment(), mode | 0o100 | (mode & 0o040) >> 2
            yield PlanFile(SETUP, ssh_script.setting_up(title, run, folders, str(self._workdir), chosen), mode)
        yield PlanFile(START, starting, mode)
        yield PlanFile(END, ending, mode)
        yield PlanFile(ssh_script.NODE_SCRIPT, self._node_script(made_by, mode), mode)
        if not self._is_plain:
            yield PlanFile(batch.SPEC_FILE, spec.to_json(), mode)

    def _node_script(self, made_by: str, mode: int) -> str:
        chosen, run_id = self._environment(), ((contract.RUN_ID, self._run_dir.name),)
        chosen = chosen.model_copy(update={"setup": ()})  # It has been run, once for all.
        head = node_setup(
            title=f"{made_by}: what runs on each of {format_count(len(self._hosts), 'node')}",
            workdir=WORKDIR if self._copy else str(self._workdir),
            environment=chosen,
            settings=self._settings,
            variables=((contract.BACKEND, self._layout.backend), *(run_id if self._is_plain else ())),
            secrets=self._secrets,
            code=batch.CODE,
        )
        if self._is_plain:
            parts = (self._job, chosen, self._python, self._entry)
            return plain_script(head, *parts, mode=mode)
        return agent_script(head, chosen.container, (*map(shlex.quote, self._python), batch.CODE, batch.SPEC))

    def _environment(self) -> Environment:
        environment = environment_of(self._job, self._request.folder)
        return environment_in(self._copy, environment) if self._copy else environment

    def _copies(self) -> Iterator[tuple[NodeCommand, ...]]:
        """Yield all copies of the working directory, then all of the run: what fails does so before there is any."""
        if self._copy:
            both = [self._copy.commands(host) for host in self._hosts]
            for stage in zip(*both, strict=True):
                yield tuple(NodeCommand(node, str(self._hosts[node]), command) for node, command in enumerate(stage))

    def _once(self) -> NodeCommand | None:
        if not self._job.environment.setup:
            return None
        first = self._hosts[0]
        return NodeCommand(0, str(first), ssh_command(first, ("bash", f"{self._run_dir}/{SETUP}")))

    def _commands(self) -> Iterator[NodeCommand]:
        run = self._copy.run if self._copy else str(self._run_dir)
        for node, host in enumerate(self._hosts):
            words = ("bash", f"{run}/{START}", str(node), str(self._ranks_on(host)), "0")
            yield NodeCommand(node, str(host), ssh_command(host, words), self._slots(host))

    def _ranks_on(self, host: Host) -> int:
        return self._slots(host) or self._layout.nproc_per_node

    def _slots(self, host: Host) -> int:
        counted = self._job.launch.nproc_per_node in ("auto", "gpu")
        return host.slots if counted and host.slots else 0

    def _reasons(self) -> Iterator[Reason]:
        launch = self._job.launch
        yield Reason(self._entry.kind, self._entry.target, self._entry.why)
        yield python_reason(self._job, self._request.environ, elsewhere=self._copy is not None)
        yield from self._layout.reasons
        why = "as asked" if launch.master_addr else "the first node"
        port_why = "as asked" if launch.master_port else "at random"
        yield Reason("master", f"{self._master}, port {self._port}", f"{why}; the port {port_why}")
        if self._copy:
            yield Reason("copy", self._copy.shown, f"sync is rsync: {self._copy.size} of {self._workdir}")
        if spares := self._job.resources.spares:
            why = "it waits, with all set up, to take the place of a node that is lost"
            yield Reason("spares", ", ".join(map(str, self._hosts[-spares:])), why)
        yield from environment.decided_on_nodes(self._job, _NO_ENVIRONMENT)
        yield from self._settings

    def _notes(self) -> Iterator[str]:
        """Say what the job asks for and does not get: nothing is left out in silence."""
        resources, retry = self._job.resources, self._job.retry
        if resources.time:
            yield "resources.time is not enforced over SSH"
        if resources.memory:
            yield "resources.memory is not enforced over SSH"
        if resources.gpu_type:
            yield "resources.gpu_type is not looked at over SSH"
        if retry != type(retry)():
            yield "retry: there is no queue over SSH to go back into"
        yield from unused_scheduler(self._job, "exclude")
        if absent := excluded_in_vain(self._job, self._request.folder):
            yield f"scheduler.exclude: {', '.join(absent)} not among the hosts that are listed"
        if self._copy:
            yield f"each machine gets a copy of {self._workdir}, {self._copy.size}, in {self._copy.shown}"
        if self._is_plain:
            yield from plain_launcher.notes(self._job)
