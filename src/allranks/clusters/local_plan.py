"""The plan for this machine: what runs, with how many ranks, and the script that starts it."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import allranks
from allranks import contract
from allranks.errors import JobError, PreflightError
from allranks.plan import environment, torch_launcher
from allranks.plan.entry import find_entry, name_of
from allranks.plan.environment import environment_of, python_of, workdir_of
from allranks.plan.layout import agent_config, lay_out, notify_files, notify_reasons, random_port, this_machine
from allranks.plan.plan import NodeCommand, Plan, PlanFile, Reason
from allranks.plan.script import CODE, become, export, node_script

if TYPE_CHECKING:
    from allranks.clusters.base import Request

#: The port of torchrun: nodes that are started by hand must all be given the same one.
_PORT = 29500


def _refuse(request: Request) -> None:
    job = request.job
    least, _ = job.resources.nodes
    if sys.platform != "linux":
        why = "the agent stands on pidfd, prctl and /proc"
        fix = "run this on a Linux machine; allranks plan, lint and why work here"
        raise PreflightError(f"jobs run on Linux, and this is {sys.platform}", why=why, fix=fix)
    if least > 1 and request.node_rank is None:
        raise JobError(
            f"{least} nodes were requested, and cluster local is this one machine",
            fix="--nodes gpu1,gpu2 names hosts to use over SSH; --on NAME uses a cluster of clusters.yaml",
        )
    if torch_launcher.is_used(job):
        torch_launcher.refuse(job, least if request.node_rank is not None else 1)
    elif job.launch.launcher_args:
        raise JobError("launch.launcher_args: on cluster local the agent takes none", fix="leave them out")


class LocalPlanning:
    """What the plan for a request is made from, and the plan; see :meth:`LocalCluster.plan`."""

    def __init__(self, request: Request) -> None:
        _refuse(request)
        job, node = request.job, request.node_rank
        if node is not None:
            port = job.launch.master_port or _PORT
            job = job.model_copy(update={"launch": job.launch.model_copy(update={"master_port": port})})
        self._request, self._job = request, job
        self._workdir = workdir_of(job, request.folder)
        self._python, self._python_reason = python_of(job, request.environ)
        self._entry = find_entry(job, self._workdir, same_python=self._python[0] == sys.executable)
        self._layout = layout = lay_out(job, this_machine(request.environ))
        nodes = 1 if node is None else job.resources.nodes[1]
        self._is_alone = nodes == 1
        self._is_plain = torch_launcher.is_used(job)
        made_from = (job, request.run_dir, self._entry, layout, self._python)
        self._spec = agent_config(*made_from, nodes=(nodes, nodes), node=node or 0)
        # Each of several nodes decides itself on what depends on it.
        self._settings = environment.settings(job, layout if self._is_alone else None, request.environ)

    def plan(self) -> Plan:
        """Make the plan."""
        job, spec, is_by_hand = self._job, self._spec, self._request.node_rank is not None
        stem = f"node-{spec.node:03}"
        files = [PlanFile(f"{stem}.sh", self._script(stem), spec.file_mode | 0o100)]
        if not self._is_plain:
            files.append(PlanFile(f"{stem}.json", spec.to_json(), spec.file_mode))
        files += notify_files(job, spec.file_mode)
        return Plan(
            run_id=spec.run_id,
            name=name_of(job),
            cluster="local" if is_by_hand else job.cluster,
            kind="local",
            run_dir=spec.run_dir,
            workdir=str(self._workdir),
            nnodes=spec.nnodes,
            nproc_per_node=spec.nproc_per_node,
            backend=self._layout.backend,
            stop_timeout=spec.stop_timeout,
            files=tuple(files),
            commands=(NodeCommand(spec.node, socket.gethostname(), ("bash", f"{spec.run_dir}/{stem}.sh")),),
            secrets=environment.secrets(job),
            reasons=tuple(self._reasons()),
            notes=tuple(self._notes()),
            group_readable=job.runs.group_readable,
            master_addr=spec.master_addr if spec.nnodes > 1 else "",
            master_port=spec.master_port or 0 if spec.nnodes > 1 else 0,
            stdin=None if self._is_plain or is_by_hand else self._stdin(),
        )

    def _stdin(self) -> int | None:
        """Return the rank that reads the stdin of the command: the one that is requested, or the only one."""
        requested, ranks = self._job.launch.stdin, self._layout.nproc_per_node
        if requested is not None and requested >= ranks:
            why = f"the ranks are 0 to {ranks - 1}" if ranks > 1 else "there is only rank 0"
            raise JobError(f"launch.stdin: there is no rank {requested}", why=why, fix="--stdin 0")
        return 0 if ranks == 1 else requested

    def _script(self, stem: str) -> str:
        job, spec = self._job, self._spec
        decided = " ".join(each.subject for each in self._settings if each.subject not in job.environment.variables)
        why = "a run that a rank starts inherits none of these"
        if self._is_plain:
            place = torch_launcher.own_place(spec, spec.master_port or random_port())
            becomes = torch_launcher.start_lines(
                job,
                self._python,
                self._entry,
                mode=spec.file_mode,
                is_alone=self._is_alone,
                finds_port=spec.master_port is None,
            )
        else:
            place = [export(contract.RUN_DIR, spec.run_dir)]
            becomes = become(job.environment.container, self._python, CODE, shlex.quote(f"{spec.run_dir}/{stem}.json"))
        return node_script(
            title=f"allranks {allranks.__version__}: node {spec.node} of run {spec.run_id}; "
            f"to start it by hand: bash {stem}.sh",
            workdir=str(self._workdir),
            environment=environment_of(job, self._request.folder),
            settings=[*self._settings, Reason(contract.DECIDED, decided, why)],
            backend=self._layout.backend,
            place=place,
            secrets=environment.secrets(job),
            becomes=becomes,
        )

    def _reasons(self) -> Iterator[Reason]:
        job, spec, environ = self._job, self._spec, self._request.environ
        port = f"port {spec.master_port}" if spec.master_port else "a free port"
        why = "as asked" if job.launch.master_addr or spec.master_port else "all ranks are on this machine"
        yield Reason(self._entry.kind, self._entry.target, self._entry.why)
        yield self._python_reason
        yield from self._layout.reasons
        yield Reason("master", f"{spec.master_addr}, {port}", why)
        yield from notify_reasons(job)
        yield from self._settings
        if not self._is_alone:
            yield from environment.decided_on_nodes(job, environ)
        yield from environment.kept(job, self._layout if self._is_alone else None, environ)

    def _notes(self) -> Iterator[str]:
        """Report what the job asks for and this machine does not do: nothing is left out in silence."""
        job, is_by_hand = self._job, self._request.node_rank is not None
        resources, retry = job.resources, job.retry
        requested = {
            "resources.nodes: this machine is the one node there is": resources.nodes[1] > 1 and not is_by_hand,
            "resources.hosts: the job runs on this machine": resources.hosts or resources.hostfile,
            "resources.spares: nodes are kept ready over SSH only": resources.spares,
            f"cluster {job.cluster} is not used: each node is started by hand": job.cluster != "local" and is_by_hand,
            "resources.gpu_type has no effect on this machine": resources.gpu_type,
            "resources.time is not enforced on this machine": resources.time,
            "resources.memory is not enforced on this machine": resources.memory,
            "retry has no effect without a scheduler": retry != type(retry)(),
            "launch.launcher: no scheduler starts ranks here, the agent does": job.launch.is_direct,
        }
        yield from (note for note, is_requested in requested.items() if is_requested)
        yield from environment.missing_here(job, self._request.folder, self._request.environ)
        yield from environment.unused_scheduler(job)
        yield from environment.only_over_ssh(job)
        if self._is_plain:
            yield from torch_launcher.notes(job)
