"""The plan of a job on machines that are reached over SSH."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.clusters.ssh.sync import WORKDIR, Copy
from allranks.clusters.ssh.transport import END, START, real_name, ssh_command
from allranks.errors import JobError
from allranks.job.hosts import Host, excluded_in_vain, hosts_of, taking_part
from allranks.job.units import format_count
from allranks.plan import environment, torch_launcher
from allranks.plan.entry import find_entry, name_of
from allranks.plan.environment import environment_of, python_of, unused_scheduler, workdir_of
from allranks.plan.layout import Machine, agent_config, lay_out, notify_files, notify_reasons, random_port, this_machine
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.script import CODE, SPEC, become, fill, name_failures, node_script, umask

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.job.spec import Job

#: Nothing of the calling environment travels over SSH: what the ranks need stands in the job.
_NO_ENVIRONMENT: dict[str, str] = {}
#: A word of shell for the directory that a script lies in.
_BESIDE = '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"'
#: What an agent takes at most to end, beyond the time that its ranks have to exit; for how long ``HELD`` bears silence.
_SECONDS_TO_END, _SECONDS_OF_SILENCE = 20, contract.full_wait(30)


def _refuse(job: Job) -> None:
    if job.launch.is_direct:
        why = "there is no scheduler that could start ranks"
        raise JobError("launcher direct does not exist over SSH", why=why, fix="--launcher torchrun")
    if job.launch.launcher_args and not torch_launcher.is_used(job):
        raise JobError("launch.launcher_args: over SSH the agent takes none", fix="leave them out")
    if job.environment.setup and job.sync.method != "none":
        raise JobError(
            "environment.setup: there is no place where lines could run once for machines that share nothing",
            fix="environment.node_setup, which runs on each node",
        )


def _machine(job: Job, hosts: tuple[Host, ...], request: Request) -> Machine:
    """Return what each of the machines has, as far as it is known: from the job, from slots, else as this machine."""
    here = this_machine(request.environ)
    cpus = job.resources.cpus_per_node or here.cpus
    if (requested := job.resources.gpus_per_node) is not None:
        return Machine(cpus, requested, f"gpus_per_node is {requested}")
    if slots := {host.slots for host in hosts if host.slots}:
        return Machine(cpus, max(slots), "slots in the file of hosts")
    return Machine(cpus, here.gpus, f"the machines are taken to be like this one: {here.gpus_from}")


class SshPlanning:
    """What the plan for a request is made from, and the plan; see :meth:`SshCluster.plan`."""

    def __init__(self, request: Request) -> None:
        job, run_dir = request.job, request.run_dir
        _refuse(job)
        self._request, self._job = request, job
        self._hosts = hosts_of(job, request.folder)
        self._workdir = workdir_of(job, request.folder)
        self._copy = Copy(job.sync, self._workdir, run_dir) if job.sync.method == "rsync" else None
        self._python, self._python_reason = python_of(job, request.environ, elsewhere=self._copy is not None)
        self._entry = find_entry(job, self._workdir, same_python=self._python[0] == sys.executable)
        self._layout = lay_out(job, _machine(job, self._hosts, request))
        self._environment = environment_of(job, request.folder)
        if self._copy:
            self._entry = self._copy.entry(self._entry, job)
            self._environment = self._copy.environment(self._environment)
            self._size = self._copy.measure(job.sync)
        self._settings = environment.settings(job, None, _NO_ENVIRONMENT)
        self._port = job.launch.master_port or random_port()
        self._master = job.launch.master_addr or real_name(self._hosts[0], request.environ)
        # How many ranks a file of hosts gives each node, 0 where it gives none; and how many each has.
        counted = job.launch.nproc_per_node in ("auto", "gpu")
        self._slots = [host.slots if counted and host.slots else 0 for host in self._hosts]
        self._ranks = [slots or self._layout.nproc_per_node for slots in self._slots]
        self._is_plain = torch_launcher.is_used(job)
        if self._is_plain:
            torch_launcher.refuse(job, len(self._hosts), self._ranks)
        made_from = (job, run_dir, self._entry, self._layout, self._python)
        self._spec = agent_config(*made_from, nodes=taking_part(job, self._hosts), spares=job.resources.spares)

    def plan(self) -> Plan:
        """Make the plan."""
        job, spec, copy, run_dir = self._job, self._spec, self._copy, self._request.run_dir
        names = [str(host) for host in self._hosts]
        # All copies of the working directory come first, then all of the run: what fails does so before there is any.
        stages = zip(*(copy.commands(host) for host in self._hosts), strict=True) if copy else ()
        setup = ssh_command(self._hosts[0], ("bash", f"{run_dir}/setup.sh"))
        start = ("bash", f"{copy.run if copy else run_dir}/{START}")
        commands = [
            ssh_command(host, (*start, str(node), str(self._ranks[node]), "0")) for node, host in enumerate(self._hosts)
        ]
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
            files=tuple(self._files()),
            commands=tuple(map(NodeCommand, range(len(names)), names, commands, self._slots)),
            secrets=environment.secrets(job),
            reasons=tuple(self._reasons()),
            notes=tuple(self._notes()),
            group_readable=job.runs.group_readable,
            min_nodes=0 if spec.min_nodes == spec.places else spec.min_nodes,
            master_addr=self._master,
            master_port=self._port,
            ranks=sum(self._ranks[: spec.places]),
            spares=spec.spares,
            copies=tuple(tuple(map(NodeCommand, range(len(names)), names, stage)) for stage in stages),
            once=NodeCommand(0, names[0], setup) if job.environment.setup else None,
            copied_to=copy.folder if copy else "",
            is_attached=job.launch.attach,
        )

    def _files(self) -> Iterator[PlanFile]:
        spec, mode, job, here = self._spec, self._spec.file_mode, self._job, Path(__file__)
        made_by = f"allranks {allranks.__version__}: run {spec.run_id}"
        words = {
            "title": made_by,
            "run": _BESIDE if self._copy else shlex.quote(spec.run_dir),
            "umask": umask(mode),
            "workdir": shlex.quote(str(self._workdir)),
            "nodes": str(spec.nnodes),
            "master_addr": shlex.quote(self._master),
            "master_port": str(self._port),
            "silence": str(_SECONDS_OF_SILENCE),
            "tenths": str(round((spec.stop_timeout + _SECONDS_TO_END) * 10)),
        }
        setup = {"setup": self._environment.setup, "traps": name_failures(self._environment)}
        for name in ("setup.sh", START, END) if job.environment.setup else (START, END):
            yield PlanFile(name, fill(here.with_name(name), words, setup), mode)
        yield PlanFile("node.sh", self._node_script(made_by), mode)
        if not self._is_plain:
            yield PlanFile(contract.NODE_SPEC, spec.to_json(), mode)
        yield from notify_files(job, mode)

    def _node_script(self, made_by: str) -> str:
        job, python = self._job, self._python
        if self._is_plain:
            becomes = torch_launcher.start_lines(job, python, self._entry, mode=self._spec.file_mode)
        else:
            becomes = become(job.environment.container, python, CODE, SPEC)
        return node_script(
            title=f"{made_by}: what runs on each of {format_count(len(self._hosts), 'node')}",
            workdir=WORKDIR if self._copy else str(self._workdir),
            environment=self._environment.model_copy(update={"setup": ()}),  # It has been run, once for all.
            settings=self._settings,
            backend=self._layout.backend,
            secrets=environment.secrets(job),
            becomes=becomes,
        )

    def _reasons(self) -> Iterator[Reason]:
        launch = self._job.launch
        yield Reason(self._entry.kind, self._entry.target, self._entry.why)
        yield self._python_reason
        yield from self._layout.reasons
        why = "as asked" if launch.master_addr else "the first node"
        port_why = "as asked" if launch.master_port else "at random"
        yield Reason("master", f"{self._master}, port {self._port}", f"{why}; the port {port_why}")
        if self._copy:
            yield Reason("copy", self._copy.shown, f"sync is rsync: {self._size} of {self._workdir}")
        if spares := self._job.resources.spares:
            why = "it waits, with all set up, to take the place of a node that is lost"
            yield Reason("spares", ", ".join(map(str, self._hosts[-spares:])), why)
        yield from notify_reasons(self._job)
        yield from environment.decided_on_nodes(self._job, _NO_ENVIRONMENT)
        yield from self._settings

    def _notes(self) -> Iterator[str]:
        """Report what the job asks for and does not get: nothing is left out in silence."""
        resources, retry = self._job.resources, self._job.retry
        requested = {
            "resources.time is not enforced over SSH": resources.time,
            "resources.memory is not enforced over SSH": resources.memory,
            "resources.gpu_type has no effect over SSH": resources.gpu_type,
            "retry has no effect over SSH": retry != type(retry)(),
        }
        yield from (note for note, is_requested in requested.items() if is_requested)
        yield from unused_scheduler(self._job, "exclude")
        if absent := excluded_in_vain(self._job, self._request.folder):
            yield f"scheduler.exclude: {', '.join(absent)} not among the hosts that are listed"
        if self._copy:
            yield f"each machine gets a copy of {self._workdir}, {self._size}, in {self._copy.shown}"
        if self._is_plain:
            yield from torch_launcher.notes(self._job)
