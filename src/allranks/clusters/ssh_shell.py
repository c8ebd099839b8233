"""Commands on other machines, through the user's own ssh and its configuration, on many at the same time."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from allranks.errors import LaunchError
from allranks.job.hosts import Host

#: Nobody is there to answer a question, and nothing but the command is wanted.
_OPTIONS = ("-T", "-x", "-a", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15")
#: As many at a time; each costs a machine some 60 ms of CPU for its keys (OpenSSH 9.2).
_AT_ONCE = 64
#: The exit code of ssh itself, where it could not run the command.
_OF_SSH = 255
#: What ssh says, and what its user can do.
_FIXES = {
    "Host key verification failed": "ssh {typed} once by hand, and look at the key that it shows before you accept it",
    "Permission denied": "ssh-copy-id {typed}, or IdentityFile in ~/.ssh/config: it must work without a password",
    "Could not resolve hostname": "look at the name, or give it a HostName in ~/.ssh/config",
    "No route to host": "is {host} up, and is the network between the two?",
    "Connection refused": "is sshd running on {host}, and at that port?",
    "timed out": "is {host} up, and does no firewall close the port of its sshd?",
}


@dataclass(frozen=True)
class Answer:
    """How a command on another machine ended.

    Attributes:
        code: its exit code.
        out: its stdout.
        err: its stderr, or what ssh said.
        unreached: whether ssh could not run it at all, or nobody knows how it ended.
        is_late: whether it had begun, perhaps, and has not ended in time.
    """

    code: int
    out: str
    err: str
    unreached: bool = False
    is_late: bool = False

    @property
    def last_words(self) -> str:
        """The last line of stderr, where ssh and most programs say what is wrong."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


def ssh_command(host: Host, words: Sequence[str]) -> tuple[str, ...]:
    """Build the command that runs ``words`` on a host, quoted once for the shell there."""
    user = ("-l", host.user) if host.user else ()
    port = ("-p", str(host.port)) if host.port else ()
    return ("ssh", *_OPTIONS, *user, *port, host.name, shlex.join(words))


def real_name(host: Host, environ: Mapping[str, str]) -> str:
    """Return the name or address that ssh's configuration has for a host: other machines do not know its aliases.

    Raises:
        LaunchError: there is no ssh, or it cannot read its configuration.
    """
    (answer,) = run_all([("ssh", "-G", host.name)], environ)
    if answer.code:
        raise LaunchError(f"ssh cannot read its configuration for {host.name}", why=answer.last_words)
    found = [line.split(maxsplit=1)[1] for line in answer.out.splitlines() if line.startswith("hostname ")]
    return found[0] if found else host.name


def run_all(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str], *, sent: str = "", seconds: float = 60.0
) -> list[Answer]:
    """Run commands of :func:`ssh_command` at the same time, and return their answers in the same order.

    Args:
        commands: the commands.
        environ: of ssh, not of the commands.
        sent: what each gets by stdin.
        seconds: after which one counts as unreached.

    Raises:
        LaunchError: there is no ssh.
    """

    def run(command: Sequence[str]) -> Answer:
        try:
            done = subprocess.run(
                command,
                input=sent,
                env=environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
                start_new_session=True,  # Ctrl-C at the terminal is ours to pass on.
            )
        except subprocess.TimeoutExpired:
            return Answer(_OF_SSH, "", f"no answer within {seconds:g} s", unreached=True, is_late=True)
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}", why=error.strerror, fix="install OpenSSH's client") from error
        return Answer(done.returncode, done.stdout, done.stderr, unreached=done.returncode == _OF_SSH)

    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(commands)))) as pool:
        return list(pool.map(run, commands))


def fix_for(host: Host, said: str) -> str:
    """Return what can be done about what ssh said."""
    options = f"-p {host.port} " if host.port else ""
    typed = f"{options}{host.user}@{host.name}" if host.user else f"{options}{host.name}"
    fixes = (fix.format(host=host.name, typed=typed) for words, fix in _FIXES.items() if words in said)
    return next(fixes, f"see what ssh {typed} says")
