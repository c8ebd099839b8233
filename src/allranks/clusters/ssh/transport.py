"""How commands get to machines: through the user's own ssh and its configuration, to many at the same time.

Connections are kept for a while, so that the next command to a machine needs no exchange of keys. The user's own
settings for that come first, also those that forbid it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
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
#: What ssh prints, and what its user can do.
_FIXES = {
    "Host key verification failed": "ssh {typed} once by hand, and check the key that it shows before you accept it",
    "Permission denied": "ssh-copy-id {typed}, or IdentityFile in ~/.ssh/config: it must work without a password",
    "Could not resolve hostname": "check the name, or add a HostName for it to ~/.ssh/config",
    "No route to host": "see whether {host} is up, and the network between the two",
    "Connection refused": "start sshd on {host}, or give the port at which it listens",
    "not responding": "see whether {host} has lost its power, or its network",
    BROKE: "see whether {host} has lost its power, or its network",
    "timed out": "see whether {host} is up, and whether a firewall closes the port of its sshd",
}
#: The user's own settings for it, in a file and in what ``ssh -G`` prints; and where ``ssh -v`` names its files.
_OWN = re.compile(r"^\s*Control(Path|Master)\b", re.IGNORECASE | re.MULTILINE)
_PRINTED = re.compile(r"^controlpath ", re.MULTILINE)
_READ = re.compile(r"Reading configuration data (.+?)\r?$", re.MULTILINE)
#: What neither ssh nor its expansion of ControlPath reads as something else.
_PLAIN = re.compile(r"/[\w./+@-]*", re.ASCII)
#: A socket's path has so many bytes at most on all systems (man 7 unix), its zero included.
_SOCKET_BYTES = 104
#: What ssh puts instead of %C, and adds while it makes the socket.
_NAME_BYTES = 40 + 17
#: A directory that is there on all systems, where the path of the one for temporary files is too long.
_SHORT = "/tmp"


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
        fix = "correct that line of ~/.ssh/config"
        raise LaunchError(f"ssh cannot read its configuration for {host.name}", why=answer.last_words, fix=fix)
    found = [line.split(maxsplit=1)[1] for line in answer.out.splitlines() if line.startswith("hostname ")]
    return found[0] if found else host.name


def kept_options(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that make ssh use a kept connection, and keep a new one; empty where that is impossible."""
    places = [Path(place, f"allranks-ssh-{os.getuid()}") for place in (tempfile.gettempdir(), _SHORT)]
    if own := environ.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(own, "allranks-ssh"))
    folder = next(filter(_is_usable, places), None)
    if folder is None or _has_own(frozenset(environ.items())):
        return ()
    return ("-oControlMaster=auto", f"-oControlPath={folder}/%C", "-oControlPersist=60")


def _is_usable(folder: Path) -> bool:
    """Make the directory if it is not there; return whether it is ours alone, and a socket can be made in it."""
    if not _PLAIN.fullmatch(str(folder)) or len(str(folder)) + 1 + _NAME_BYTES >= _SOCKET_BYTES:
        return False
    probe = folder / f"{os.getpid()}.probe"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return False
        with socket.socket(socket.AF_UNIX) as one:  # Where it cannot be made, as on a full disk, ssh would exit.
            one.bind(str(probe))
        probe.unlink()
    except OSError:
        return False
    return True


@lru_cache(maxsize=8)
def _has_own(environ: frozenset[tuple[str, str]]) -> bool:
    """Return whether the user has settings for kept connections, for any host; True if ssh cannot tell.

    Cached: following a run calls this twice a second. ssh reads the same files for any host.
    """
    answer = run_one(["ssh", "-v", "-G", "localhost"], dict(environ), seconds=10.0)
    if answer.code or _PRINTED.search(answer.out):
        return True
    try:
        return any(_OWN.search(Path(file).read_text(errors="replace")) for file in _READ.findall(answer.err))
    except OSError:
        return True


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
    kept = kept_options(environ)
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
            run_one(["ssh", "-O", "stop", *words[1:-1]], environ, seconds=10.0)
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
        """Run ``end.sh`` with ``what`` (a signal, 0, ``END`` or ``HELD``) for each agent: signal, end or find it.

        ``nodes`` have the agents' hosts, process ids and start times; ``folder`` is that of the run, on the machines.
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
