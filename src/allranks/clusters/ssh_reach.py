"""How commands get to the machines of a run: over SSH to each. Another kind may have another way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from allranks.clusters.base import Looked
from allranks.clusters.commands import Answer
from allranks.clusters.ssh_script import END
from allranks.clusters.ssh_shell import fix_for, run_all, ssh_command
from allranks.job.hosts import parse_hosts
from allranks.plan import batch

if TYPE_CHECKING:
    from allranks.clusters.base import Look
    from allranks.plan.plan import NodeCommand


class Reach:
    """The way to the machines of a run: an ssh to each, all at the same time."""

    def begin(
        self,
        nodes: Sequence[NodeCommand],
        environ: Mapping[str, str],
        *,
        run_dir: str,
        secrets: str,
        is_over: Callable[[], bool],
        hear: Callable[[int, Answer], None],
    ) -> list[Answer]:
        """Begin nodes by their commands, however long their set-ups take; return the answers in the same order.

        Args:
            nodes: the nodes.
            environ: of what goes there, not of the commands.
            run_dir: absolute folder of the run here.
            secrets: lines of shell that set them.
            is_over: tells whether nobody waits for the nodes any more.
            hear: may be told each answer when it comes, with its node's place among all; by any thread.
        """
        commands = [node.command for node in nodes]
        return run_all(commands, environ, sent=secrets, seconds=None, is_over=is_over, hear=hear)

    def ask(self, nodes: Sequence[Mapping[str, Any]], folder: str, what: str, seconds: float) -> list[Answer]:
        """Have agents told something, or ended, or looked for; return the answers in the same order.

        Args:
            nodes: host, process id and start time of each agent, from the run's handle.
            folder: of the run, on the machines.
            what: see ``ssh_script.ending``.
            seconds: after which a machine counts as unreached.
        """
        return run_all(telling(nodes, folder, what), os.environ, seconds=seconds)

    def look(self, hosts: Sequence[str], look: Look, environ: Mapping[str, str]) -> list[Answer]:
        """Look at machines; return the answers in the same order."""
        words = [("bash", "-c", look.script, "bash", str(number)) for number in range(len(hosts))]
        commands = [ssh_command(parse_hosts([host])[0], each) for host, each in zip(hosts, words, strict=True)]
        return run_all(commands, environ, sent=look.program, seconds=look.seconds)

    def leave(self, host: str, path: str, text: str, mode: int, environ: Mapping[str, str]) -> None:
        """Leave a file on a machine, whole or not at all."""
        words = ("bash", "-c", f'{batch.umask(mode)} && cat >"$1.new" && mv "$1.new" "$1"', "bash", path)
        run_all([ssh_command(parse_hosts([host])[0], words)], environ, sent=text)


def looked_at(host: str, answer: Answer) -> Looked:
    """Return what became of a look at a machine, with what can be done where it was not reached."""
    return Looked(host, answer, fix_for(parse_hosts([host])[0], answer.err) if answer.unreached else "")


def telling(nodes: Iterable[Mapping[str, Any]], folder: str, what: str) -> list[tuple[str, ...]]:
    """Return the commands of ssh that tell agents something, or end them; see :meth:`Reach.ask`."""
    hosts = [(node, parse_hosts([node["host"]])[0]) for node in nodes]
    words = ("bash", f"{folder}/{END}", what)
    return [ssh_command(host, (*words, str(node["pid"]), str(node["started"]))) for node, host in hosts]
