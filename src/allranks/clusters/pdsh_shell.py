"""One pdsh for all machines of a run, and what it says of each: no failure is lost."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.commands import Answer, run_one
from allranks.clusters.pdsh_script import CODE, PDSH, finding
from allranks.clusters.ssh_reach import Reach
from allranks.clusters.ssh_script import END
from allranks.job.hosts import parse_hosts
from allranks.runs.files import write_whole

if TYPE_CHECKING:
    from allranks.clusters.base import Look
    from allranks.plan.plan import NodeCommand

#: A line of a machine, and what pdsh itself says of one.
_LINE = re.compile(r"([^\s:]+): ?(.*)")
_OF_PDSH = re.compile(r"pdsh@[^:]*: ([^\s:]+): (.*)")
_EXIT_CODE = re.compile(r"exit(?:ed with exit)? code (\d+)")
#: What a look has in the folder that machines see, as long as it takes.
_LOOKS, _LOOK, _PROGRAM = "look", "look.sh", "look.json"
#: The exit code of ssh itself; those of other ways to reach a machine tell none.
_OF_SSH = 255


def pdsh_command(
    folder: str, script: str, words: Mapping[str, Sequence[str]], common: Sequence[str]
) -> tuple[str, ...]:
    """Build the command that runs a script of the run's folder on all machines.

    How pdsh reaches them is the site's: its own default, and what PDSH_RCMD_TYPE and the like say.

    Args:
        folder: the run's folder, which all machines see.
        script: file name of the script there.
        words: its first arguments for each machine, by ``user@host`` or host, without commas.
        common: its further arguments, the same for all.
    """
    table = [f"{_name(host)}={','.join(own)}" for host, own in words.items()]
    fixed = shlex.join([f"{folder}/{PDSH}"]).replace("%", "%%")
    rest = shlex.join([script, *table, *common]).replace("%", "%%")
    return ("pdsh", "-S", "-f", str(len(words)), "-w", ",".join(words), f"bash {fixed} %h {rest}")


def run_pdsh(
    command: Sequence[str],
    hosts: Sequence[str],
    environ: Mapping[str, str],
    *,
    seconds: float | None,
    is_over: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Run a command of :func:`pdsh_command`; return the answers of its hosts, in their order.

    Raises:
        LaunchError: there is no pdsh.
    """
    done = run_one(command, environ, seconds=seconds, is_over=is_over)
    if done.is_late:
        return [done for _ in hosts]
    out, _ = _by_host(done.out)
    err, told = _by_host(done.err)
    return [_answer(done, out[name], err[name], told[name]) for name in map(_name, hosts)]


class OverPdsh(Reach):
    """One pdsh for all machines, which see the run's folder itself."""

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
        """Begin all nodes. Secrets are in a file that only the user can read, as long as it takes.

        Nothing is heard of a node before all have answered.
        """
        file, hosts = Path(run_dir, contract.SECRETS_FILE), [node.host for node in nodes]
        try:
            if secrets:
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
                    stream.write(secrets)
            return run_pdsh(nodes[0].command, hosts, environ, seconds=None, is_over=is_over)
        finally:
            file.unlink(missing_ok=True)

    def ask(self, nodes: Sequence[Mapping[str, Any]], folder: str, what: str, seconds: float) -> list[Answer]:
        """Have agents told something, or ended, or looked for."""
        if not nodes:
            return []
        words = {node["host"]: (what, str(node["pid"]), str(node["started"])) for node in nodes}
        return run_pdsh(pdsh_command(folder, END, words, ()), [*words], os.environ, seconds=seconds)

    def look(self, hosts: Sequence[str], look: Look, environ: Mapping[str, str]) -> list[Answer]:
        """Look at machines, by files in the folder that they see: pdsh passes no stdin on."""
        folder = look.folder / _LOOKS
        folder.mkdir()
        try:
            write_whole(folder / PDSH, finding("allranks: look at each machine", str(folder)))
            write_whole(folder / _LOOK, f'exec <"$(dirname -- "$0")/{_PROGRAM}"\n{look.script}')
            write_whole(folder / _PROGRAM, look.program)
            words = {host: (str(number),) for number, host in enumerate(hosts)}
            return run_pdsh(pdsh_command(str(folder), _LOOK, words, ()), hosts, environ, seconds=look.seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def leave(self, host: str, path: str, text: str, mode: int, environ: Mapping[str, str]) -> None:
        """Leave a file in the run's folder."""
        write_whole(Path(path), text, mode)


def _name(host: str) -> str:
    """Return the name that pdsh has for a machine: without the user."""
    return parse_hosts([host])[0].name


def _by_host(text: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lines of each machine, and those that pdsh says of it."""
    lines, told = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for line in text.splitlines():
        if match := _OF_PDSH.fullmatch(line):
            told[match[1]].append(match[2])
        elif match := _LINE.fullmatch(line):
            lines[match[1]].append(match[2])
    return lines, told


def _answer(done: Answer, out: list[str], err: list[str], told: list[str]) -> Answer:
    """Return a machine's answer: its script's own exit code, else the one that pdsh tells, else none is known."""
    codes = [int(line.removeprefix(CODE)) for line in out if line.startswith(CODE)]
    if codes:
        return Answer(codes[-1], "\n".join(out), "\n".join(err))
    found = [int(match[1]) for line in told if (match := _EXIT_CODE.search(line))]
    code = found[-1] if found and found[-1] else _OF_SSH
    said = "\n".join(err or told) or done.err
    return Answer(code, "\n".join(out), said, unreached=code == _OF_SSH)
