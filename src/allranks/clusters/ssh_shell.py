"""Commands on other machines, through the user's own ssh and its configuration, on many at the same time."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from allranks import contract
from allranks.clusters import ssh_kept
from allranks.clusters.commands import BROKE, Answer, run_one
from allranks.errors import LaunchError
from allranks.job.hosts import Host

#: How often ssh asks a silent machine whether it is there; when that was in vain three times, it is not.
_ALIVE_SECONDS = contract.whole_wait(5)
#: Nobody is there to answer a question, and nothing but the command is wanted.
_OPTIONS = (
    *("-T", "-x", "-a", "-oBatchMode=yes", "-oConnectTimeout=10"),
    f"-oServerAliveInterval={_ALIVE_SECONDS}",
)
#: As many at a time; each costs a machine some 60 ms of CPU for its keys (OpenSSH 9.2).
_AT_ONCE = 64
#: What ssh says, and what its user can do.
_FIXES = {
    "Host key verification failed": "ssh {typed} once by hand, and look at the key that it shows before you accept it",
    "Permission denied": "ssh-copy-id {typed}, or IdentityFile in ~/.ssh/config: it must work without a password",
    "Could not resolve hostname": "look at the name, or give it a HostName in ~/.ssh/config",
    "No route to host": "is {host} up, and is the network between the two?",
    "Connection refused": "is sshd running on {host}, and at that port?",
    "not responding": "has {host} lost its power, or its network?",
    BROKE: "has {host} lost its power, or its network?",
    "timed out": "is {host} up, and does no firewall close the port of its sshd?",
}


def ssh_command(host: Host, words: Sequence[str]) -> tuple[str, ...]:
    """Build the command that runs ``words`` on a host, quoted once for the shell there."""
    return ("ssh", *ssh_options(host), host.name, shlex.join(words))


def ssh_options(host: Host) -> tuple[str, ...]:
    """Return the options of ssh for a host, who one is there and its port among them."""
    user = ("-l", host.user) if host.user else ()
    port = ("-p", str(host.port)) if host.port else ()
    return (*_OPTIONS, *user, *port)


def real_name(host: Host, environ: Mapping[str, str]) -> str:
    """Return the name or address that ssh's configuration has for a host: other machines do not know its aliases.

    Raises:
        LaunchError: there is no ssh, or it cannot read its configuration.
    """
    ssh, *options = ssh_command(host, ())[:-1]
    answer = run_one([ssh, "-G", *options], environ, seconds=60.0)
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
    is_over: Callable[[], bool] = lambda: False,
    hear: Callable[[int, Answer], None] = lambda place, answer: None,
) -> list[Answer]:
    """Run commands at the same time, and return their answers in the same order.

    Connections are kept for the next commands to the same hosts, unless the user's configuration has its own way.

    Args:
        commands: those of :func:`ssh_command`, or rsync with such an ssh behind ``-e``.
        environ: of ssh, not of the commands.
        sent: what each gets by stdin.
        seconds: after which one counts as unreached; None: never, as long as its connection lives.
        is_over: tells whether nobody waits for them any more: all that have not ended count as unreached then.
        hear: is told each answer when it comes, with its command's place among all; by any thread.

    Raises:
        LaunchError: there is no ssh.
    """
    if not commands:
        return []
    kept = ssh_kept.keeping(environ)
    given_up = threading.Event()

    def nobody_waits() -> bool:
        return given_up.is_set() or is_over()

    def run(place: int, command: Sequence[str]) -> Answer:
        command = _with(command, kept)
        answer = run_one(command, environ, sent=sent, seconds=seconds, is_over=nobody_waits)
        if kept and answer.is_late and command[0] == "ssh":
            ssh_kept.forget(command[:-1], environ)
        hear(place, answer)
        return answer

    with ThreadPoolExecutor(min(_AT_ONCE, len(commands))) as pool:
        try:
            return list(pool.map(run, range(len(commands)), commands))
        except BaseException:  # Ctrl-C: the pool would wait for them.
            given_up.set()
            raise


def _with(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command with more options for its ssh."""
    if command[0] == "ssh":
        return ["ssh", *options, *command[1:]]
    words = [*command]
    place = words.index("-e") + 1
    words[place] = shlex.join([*shlex.split(words[place]), *options])
    return words


def fix_for(host: Host, said: str) -> str:
    """Return what can be done about what ssh said."""
    options = f"-p {host.port} " if host.port else ""
    typed = f"{options}{host.user}@{host.name}" if host.user else f"{options}{host.name}"
    fixes = (fix.format(host=host.name, typed=typed) for words, fix in _FIXES.items() if words in said)
    return next(fixes, f"see what ssh {typed} says")
