"""How commands get to machines: through the user's own ssh and its configuration, to many at the same time."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.ssh import multiplexing
from allranks.errors import LaunchError
from allranks.job.hosts import Host, parse_hosts
from allranks.plan.script import exports
from allranks.system.commands import BROKE, Answer, run_one

if TYPE_CHECKING:
    from allranks.clusters.base import Probe
    from allranks.plan.plan import NodeCommand, Plan
    from allranks.runs.status import Handle

#: Whether to stop waiting for commands; and what is called with a command's place among all and its answer.
IsOver = Callable[[], bool]
Hear = Callable[[int, Answer], None]
#: The scripts of a run's directory that start and end a node's agent; what the latter does if its stdin ends.
START, END, HELD = "start.sh", "end.sh", "HELD"
#: How often ssh probes a silent machine; after three probes in vain it gives the connection up.
_ALIVE_SECONDS = contract.full_wait(5)
#: No questions, and nothing but the command: no terminal, no X11, no agent.
_OPTIONS = ("-T", "-x", "-a", "-oBatchMode=yes", "-oConnectTimeout=10", f"-oServerAliveInterval={_ALIVE_SECONDS}")
#: As many at a time; each costs a machine some 60 ms of CPU for its keys (OpenSSH 9.2).
_AT_ONCE = 64
#: What a machine may take beyond the ranks' own time to end a run, and to answer.
_END_SECONDS = 60.0
#: What ssh may take to stop the use of a connection.
_STOP_SECONDS = 10.0
#: What ssh prints, and what its user can do.
_FIXES = {
    "Host key verification failed": "ssh {typed} once by hand, and check the key that it shows before you accept it",
    "Permission denied": "ssh-copy-id {typed}, or IdentityFile in ~/.ssh/config: it must work without a password",
    "Could not resolve hostname": "check the name, or add a HostName for it to ~/.ssh/config",
    "No route to host": "is {host} up, and is the network between the two?",
    "Connection refused": "is sshd running on {host}, and at that port?",
    "not responding": "has {host} lost its power, or its network?",
    BROKE: "has {host} lost its power, or its network?",
    "timed out": "is {host} up, and does no firewall close the port of its sshd?",
}


def ssh_command(host: Host | str, words: Sequence[str]) -> tuple[str, ...]:
    """Build the command that runs ``words`` on a host, quoted once for the shell there."""
    host = parse_hosts([host])[0] if isinstance(host, str) else host
    return ("ssh", *ssh_options(host), host.name, shlex.join(words))


def ssh_options(host: Host) -> tuple[str, ...]:
    """Return the options of ssh for a host, its user and port among them."""
    user = ("-l", host.user) if host.user else ()
    port = ("-p", str(host.port)) if host.port else ()
    return (*_OPTIONS, *user, *port)


def real_name(host: Host, environ: Mapping[str, str]) -> str:
    """Return the name or address that ssh's configuration has for a host: other machines do not know its aliases."""
    answer = run_one(["ssh", "-G", *ssh_options(host), host.name], environ, seconds=60.0)
    if answer.code:
        raise LaunchError(f"ssh cannot read its configuration for {host.name}", why=answer.last_words)
    found = [line.split(maxsplit=1)[1] for line in answer.out.splitlines() if line.startswith("hostname ")]
    return found[0] if found else host.name


def run_all(
    commands: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    *,
    sent: str = "",
    seconds: float | None = 60.0,
    is_over: IsOver = lambda: False,
    hear: Hear = lambda place, answer: None,
) -> list[Answer]:
    """Run commands at the same time, and return their answers in the same order.

    Connections are kept for the next commands to the same hosts, unless the user's configuration has its own way.

    Args:
        commands: those of :func:`ssh_command`, or rsync with such an ssh behind ``-e``.
        environ: of ssh, not of the commands.
        sent: stdin of each.
        seconds: after which one counts as unreached; None: never, as long as its connection lives.
        is_over: returns whether to stop waiting: all commands that still run count as unreached then.
        hear: called by any thread with a command's place and its answer, as soon as it comes.
    """
    if not commands:
        return []
    kept = multiplexing.options(environ)
    given_up = threading.Event()

    def run(place: int, command: Sequence[str]) -> Answer:
        words = [*command]
        if words[0] == "ssh":
            words[1:1] = kept
        elif kept:
            words[words.index("-e") + 1] += f" {shlex.join(kept)}"
        answer = run_one(words, environ, sent=sent, seconds=seconds, is_over=lambda: given_up.is_set() or is_over())
        if kept and answer.is_late and words[0] == "ssh":
            # Its machine may be gone, and ssh not know it yet.
            run_one(["ssh", "-O", "stop", *words[1:-1]], environ, seconds=_STOP_SECONDS)
        hear(place, answer)
        return answer

    with ThreadPoolExecutor(min(_AT_ONCE, len(commands))) as pool:
        try:
            return list(pool.map(run, range(len(commands)), commands))
        except BaseException:  # Ctrl-C: the pool would wait for them.
            given_up.set()
            raise


def fix_for(host: str, said: str) -> str:
    """Return the fix for what ssh printed."""
    (parsed,) = parse_hosts([host])
    typed = f"{f'-p {parsed.port} ' if parsed.port else ''}{f'{parsed.user}@' if parsed.user else ''}{parsed.name}"
    fixes = (fix.format(host=parsed.name, typed=typed) for words, fix in _FIXES.items() if words in said)
    return next(fixes, f"see what ssh {typed} says")


def folder_on_nodes(copied_to: str, run_dir: Path) -> str:
    """Return where a run's directory is on its machines: with the copies that are there, else at the same path."""
    return f"{copied_to}/runs/{run_dir.name}" if copied_to else str(run_dir)


def end_commands(nodes: Iterable[Mapping[str, Any]], folder: str, what: str) -> list[tuple[str, ...]]:
    """Return the commands that run ``end.sh`` with ``what`` for agents; see :meth:`Ssh.query`."""
    words = ("bash", f"{folder}/{END}", what)
    return [ssh_command(node["host"], (*words, str(node["pid"]), str(node["started"]))) for node in nodes]


class Ssh:
    """The way to the machines of a run: an ssh to each, all at the same time; answers are in the order of the machines.

    Another kind may have another way.
    """

    def begin(
        self, plan: Plan, nodes: Sequence[NodeCommand], environ: Mapping[str, str], is_over: IsOver, hear: Hear
    ) -> list[Answer]:
        """Start nodes of a plan, however long their set-ups take; ``environ`` has the values of the plan's secrets."""
        commands, secrets = [node.command for node in nodes], exports(plan.secrets, environ)
        return run_all(commands, environ, sent=secrets, seconds=None, is_over=is_over, hear=hear)

    def query(self, nodes: Sequence[Mapping[str, Any]], folder: str, what: str, seconds: float) -> list[Answer]:
        """Run ``end.sh`` with ``what`` for each agent: signal, end or find it.

        Args:
            nodes: host, process id and start time of each agent, from the run's handle.
            folder: of the run, on the machines.
            what: a signal, 0, ``END`` or ``HELD``.
            seconds: after which a machine counts as unreached.
        """
        return run_all(end_commands(nodes, folder, what), os.environ, seconds=seconds)

    def send(self, handle: Handle, run_dir: Path, what: str, patience: float = 0.0) -> dict[str, str]:
        """Send a signal or ``END`` to every agent of a run; return unreachable hosts with ssh's error."""
        nodes = handle.extra.get("nodes", ())
        folder = folder_on_nodes(handle.extra.get("copied_to", ""), run_dir)
        answers = self.query(nodes, folder, what, patience + _END_SECONDS)
        pairs = zip(nodes, answers, strict=True)
        return {node["host"]: answer.last_words for node, answer in pairs if answer.unreached}

    def probe(self, hosts: Sequence[str], probe: Probe, environ: Mapping[str, str]) -> list[Answer]:
        """Probe machines."""
        words = ("bash", "-c", probe.script, "bash")
        commands = [ssh_command(host, (*words, str(number))) for number, host in enumerate(hosts)]
        return run_all(commands, environ, sent=probe.program, seconds=probe.seconds)

    def leave(self, host: str, path: str, text: str, mode: int, environ: Mapping[str, str]) -> None:
        """Write a file on a machine, complete or not at all."""
        script = f'umask {0o777 & ~mode:03o} && cat >"$1.new" && mv "$1.new" "$1"'
        run_all([ssh_command(host, ("bash", "-c", script, "bash", path))], environ, sent=text)
