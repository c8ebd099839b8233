"""Machines that one pdsh reaches, in the way that is set up at a site: all else is as over SSH."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allranks
from allranks import contract
from allranks.clusters.ssh import SshCluster
from allranks.clusters.ssh.transport import END, START, Hear, IsOver, Ssh
from allranks.errors import JobError
from allranks.job.hosts import hosts_of, parse_hosts
from allranks.plan.script import exports, fill
from allranks.record.files import write_atomically
from allranks.system.commands import Answer, run_one

if TYPE_CHECKING:
    from allranks.clusters.base import Probe, Request
    from allranks.plan.plan import NodeCommand, Plan

#: The script that pdsh runs on all machines; it finds out which one it is on, and runs another one there.
PDSH = "pdsh.sh"
#: The last line of a script, before its exit code.
_CODE = "allranks: exit code "
#: A line of a machine, and what pdsh itself says of one.
_LINE = re.compile(r"([^\s:]+): ?(.*)")
_OF_PDSH = re.compile(r"pdsh@[^:]*: ([^\s:]+): (.*)")
_EXIT_CODE = re.compile(r"exit(?:ed with exit)? code (\d+)")
#: The exit code of ssh itself; those of other ways to reach a machine tell none.
_OF_SSH = 255
_KIND_SSH = "kind: ssh in the entry of clusters.yaml"


class Pdsh(Ssh):
    """One pdsh for all machines, which see the run's directory itself."""

    def begin(
        self, plan: Plan, nodes: Sequence[NodeCommand], environ: Mapping[str, str], is_over: IsOver, hear: Hear
    ) -> list[Answer]:
        """Start all nodes; meanwhile secrets are in a file that only the user can read, since pdsh passes no stdin."""
        file = Path(plan.run_dir, contract.SECRETS_FILE)
        try:
            if plan.secrets:
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
                    stream.write(exports(plan.secrets, environ))
            return _run(nodes[0].command, [node.host for node in nodes], environ, is_over=is_over)
        finally:
            file.unlink(missing_ok=True)

    def query(self, nodes: Sequence[Mapping[str, Any]], folder: str, what: str, seconds: float) -> list[Answer]:
        """Run ``end.sh`` with ``what`` for each agent."""
        words = {node["host"]: (what, str(node["pid"]), str(node["started"])) for node in nodes}
        return _run(pdsh_command(folder, END, words, ()), [*words], os.environ, seconds=seconds) if words else []

    def probe(self, hosts: Sequence[str], probe: Probe, environ: Mapping[str, str]) -> list[Answer]:
        """Probe machines by files in a directory that they see: pdsh passes no stdin on."""
        folder = probe.folder / "look"
        folder.mkdir()
        try:
            write_atomically(folder / PDSH, script("allranks: probe each machine", str(folder)))
            write_atomically(folder / "look.sh", f'exec <"$(dirname -- "$0")/look.json"\n{probe.script}')
            write_atomically(folder / "look.json", probe.program)
            words = {host: (str(number),) for number, host in enumerate(hosts)}
            return _run(pdsh_command(str(folder), "look.sh", words, ()), hosts, environ, seconds=probe.seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self, host: str, path: str, text: str, mode: int, environ: Mapping[str, str]) -> None:
        """Write a file in the run's directory, which all machines see."""
        write_atomically(Path(path), text, mode)


class PdshCluster(SshCluster):
    """The kind ``pdsh``."""

    name, ssh = "pdsh", Pdsh()

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on the machines: as over SSH, but all nodes are started by one pdsh."""
        from allranks.plan.plan import PlanFile  # Reading a run's status needs none of it.

        _refuse(request)
        plan = super().plan(request)
        file = PlanFile(
            PDSH, script(f"allranks {allranks.__version__}: run {plan.run_id}", plan.run_dir), plan.files[0].mode
        )
        # The node's own words, its number of ranks last, and the attempt, which is the same for all.
        words = {node.host: shlex.split(node.command[-1])[2:] for node in plan.commands}
        attempt = words[plan.commands[0].host][-1:]
        command = pdsh_command(plan.run_dir, START, {host: own[:-1] for host, own in words.items()}, attempt)
        notes = [note.replace("over SSH", "over pdsh") for note in plan.notes]
        if plan.secrets:
            until = f"until all nodes have started, secrets are in {contract.SECRETS_FILE} of the run's directory"
            notes.append(f"pdsh passes no stdin: {until}")
        commands = tuple(replace(node, command=command) for node in plan.commands)
        return replace(plan, kind="pdsh", files=(file, *plan.files), commands=commands, notes=tuple(notes))


def _refuse(request: Request) -> None:
    job = request.job
    if job.sync.method != "none":
        raise JobError("sync: over pdsh nothing is copied to the machines", fix=_KIND_SSH)
    if job.environment.setup:
        raise JobError("environment.setup: pdsh runs all on every machine", fix="environment.node_setup does so too")
    if job.launch.attach:
        raise JobError("launch.attach: pdsh does not report a connection that breaks", fix=_KIND_SSH)
    for host in hosts_of(job, request.folder):
        if host.port or ":" in host.name:
            what = f"port {host.port}" if host.port else "address of IPv6"
            raise JobError(f"{host}: pdsh takes no {what}", fix=f"{_KIND_SSH}, or a name for the host")


def script(title: str, folder: str) -> str:
    """Return the script that pdsh runs on all machines, for a directory that they see."""
    return fill(Path(__file__).with_name(PDSH), {"title": title, "run": shlex.quote(folder)})


def pdsh_command(
    folder: str, script: str, words: Mapping[str, Sequence[str]], common: Sequence[str]
) -> tuple[str, ...]:
    """Build the command that runs a script of the run's directory on all machines.

    Its first arguments are the ``words`` for each, by ``user@host`` or host, without commas; the ``common`` ones last.
    How pdsh reaches machines is the site's: its own default, and what PDSH_RCMD_TYPE and the like say.
    """
    # pdsh names a machine without the user.
    table = [f"{parse_hosts([host])[0].name}={','.join(own)}" for host, own in words.items()]
    fixed = shlex.join([f"{folder}/{PDSH}"]).replace("%", "%%")
    rest = shlex.join([script, *table, *common]).replace("%", "%%")
    return ("pdsh", "-S", "-f", str(len(words)), "-w", ",".join(words), f"bash {fixed} %h {rest}")


def _run(
    command: Sequence[str],
    hosts: Sequence[str],
    environ: Mapping[str, str],
    *,
    seconds: float | None = None,
    is_over: IsOver = lambda: False,
) -> list[Answer]:
    """Run a command of :func:`pdsh_command`; return the answers of its hosts, in their order.

    An answer has the exit code of the machine's script, or else the one that pdsh reports.
    """
    done = run_one(command, environ, seconds=seconds, is_over=is_over)
    if done.is_late:
        return [done for _ in hosts]
    (outs, _), (errs, remarks) = _by_host(done.out), _by_host(done.err)
    answers = []
    for host in hosts:
        name = parse_hosts([host])[0].name
        out, err, said = outs[name], errs[name], remarks[name]
        if codes := [int(line.removeprefix(_CODE)) for line in out if line.startswith(_CODE)]:
            answers.append(Answer(codes[-1], "\n".join(out), "\n".join(err)))
            continue
        found = [int(match[1]) for line in said if (match := _EXIT_CODE.search(line))]
        code = found[-1] if found and found[-1] else _OF_SSH
        text = "\n".join(err or said) or done.err
        answers.append(Answer(code, "\n".join(out), text, unreached=code == _OF_SSH))
    return answers


def _by_host(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lines of each machine, and pdsh's own about it."""
    lines, remarks = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for line in text.splitlines():
        if match := _OF_PDSH.fullmatch(line):
            remarks[match[1]].append(match[2])
        elif match := _LINE.fullmatch(line):
            lines[match[1]].append(match[2])
    return lines, remarks
