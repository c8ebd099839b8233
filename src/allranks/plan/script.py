"""The scripts of a run: short, readable, and every word from outside quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract

if TYPE_CHECKING:
    from allranks.job.spec import Environment
    from allranks.plan.plan import Reason

#: Where the templates are.
HERE = Path(__file__).parent
#: Words of shell for the node-side code in the run's directory, and for the configuration of its agents.
CODE = f'"${contract.RUN_DIR}/{contract.CODE}"'
SPEC = f'"${contract.RUN_DIR}/{contract.NODE_ORDERS}"'
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


def comment(text: str) -> str:
    """Write ``text`` as a comment of one line, whatever it holds."""
    return "# " + text.translate(_ESCAPES)


def export(name: str, value: str) -> str:
    """Write a line that sets and exports a variable."""
    return f"export {name}={shlex.quote(value)}"


def exports(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """Write lines that set and export variables with the values that they have in an environment, if they have any."""
    return "".join(f"{export(name, environ[name])}\n" for name in names if name in environ)


def enter(folder: str) -> str:
    """Write a line that changes into a directory."""
    return f"cd -- {shlex.quote(folder)}"


def umask(mode: int) -> str:
    """Return the umask for directories of files with these permission bits."""
    return f"{0o777 & ~(mode | 0o100 | (mode & 0o040) >> 2):03o}"


def fill(template: Path, words: Mapping[str, str], blocks: Mapping[str, Sequence[str]] | None = None) -> str:
    """Fill a template: ``@name@`` is a word of shell, and a line ``#: name`` stands for the lines of that block."""
    lines: list[str] = []
    for line in template.read_text(encoding="utf-8").splitlines():
        if line.startswith("#: "):
            lines += (blocks or {})[line[3:]]
        elif not line.startswith("# shellcheck "):
            lines.append(re.sub(r"@(\w+)@", lambda found: words[found[1]], line))
    return "\n".join(lines) + "\n"


def node_script(
    *,
    title: str,
    workdir: str,
    environment: Environment,
    settings: Sequence[Reason],
    backend: str,
    becomes: Sequence[str],
    traps: Sequence[str] | None = None,
    place: Sequence[str] = (),
    secrets: Sequence[str] = (),
) -> str:
    """Write the script that sets a node up, and exits where a line of that fails.

    Args:
        title: one line on what this is.
        settings: variables with the reason for each.
        becomes: lines that start the node's agent or its ranks; see :func:`become`.
        traps: lines that handle failures and signals of the set-up; None: those of :func:`name_failures`.
        place: lines that set what the node knows of its place in the run.
        secrets: names of variables that must come with the environment.
    """
    words = {"title": comment(title).removeprefix("# "), "backend": shlex.quote(backend)}
    blocks = {
        "traps": name_failures(environment) if traps is None else traps,
        "set_up": set_up(workdir, environment, settings),
        "place": place,
        "secrets": required(secrets),
        "becomes": becomes,
    }
    return fill(HERE / "node.sh", words, blocks)


def become(container: Sequence[str], python: Sequence[str], *words: str) -> list[str]:
    """Write the line with which a node's script becomes Python; ``words`` of shell say what that runs."""
    return [" ".join(["exec", shlex.join([*container, *python]), *words])]


def set_up(workdir: str, environment: Environment, settings: Sequence[Reason]) -> list[str]:
    """Write the lines that set up what the ranks' program may need, each with the key of the job that asks for it."""
    lines = [enter(workdir), ""]
    lines += _block("environment.setup", environment.setup)
    if environment.modules:
        load = [*_or_exit(_MODULE_IS_THERE, _NO_MODULE), "module load " + shlex.join(environment.modules)]
        # `module` is a function that only login shells are sure to have; what defines it is not written for `set -e`.
        lines += _block("environment.modules", [*fill(HERE / "modules.sh", {}).splitlines(), *load])
    if environment.conda:
        check = _or_exit(_CONDA_IS_THERE, _NO_CONDA)
        lines += _block("environment.conda", [*check, *conda_lines(environment.conda)])
    if venv := environment.venv:
        check = _or_exit(f"[ -r {shlex.quote(_activate(venv))} ]", _NO_VENV.format(venv=venv))
        lines += _block("environment.venv", [*check, *venv_lines(venv)])
    lines += _block("environment.node_setup", environment.node_setup)
    return lines + [f"{export(given.subject, given.value)}  {comment(given.why)}" for given in settings]


def _block(why: str, lines: Sequence[str]) -> list[str]:
    return [comment(why), *lines, ""] if lines else []


def name_failures(environment: Environment | None, *, host: str = "", copy: str = "") -> list[str]:
    """Write the lines by which a line of a set-up that fails is named, also one that exits: that runs no trap.

    In a subshell it is the line of that which fails, if it does. ``exit 0`` has set nothing up either.

    Args:
        environment: the job's, with the user's lines; None: an exit is not named.
        host: a word of shell for the node's name, where many nodes write into one log.
        copy: the script's name in the run's directory, where it runs under another.
    """
    copied = f'/#"$0"/{copy}' if copy else ""
    words = {"file": f"${{BASH_SOURCE[0]{copied}}}", "caller": f"${{BASH_SOURCE[1]{copied}}}"}
    words["on"] = f", on {host}" if host else ""
    lines = fill(HERE / "failures.sh", words)  # The ranks' own logs do not exist yet.
    if environment and any(map(_MAY_EXIT.search, (*environment.setup, *environment.node_setup))):
        lines += fill(HERE / "exits.sh", words)
    return lines.splitlines()


#: Lines of the user's that may exit, by themselves or in a file that they read.
_MAY_EXIT = re.compile(r"\b(?:exit|source)\b|(?:^|[\s;&|({])\. ", re.MULTILINE)
_MODULE_IS_THERE = "type module >/dev/null 2>&1"
_NO_MODULE = (
    'environment.modules: there is no command "module" here, and no file that defines it in $LMOD_PKG/init, '
    "$MODULESHOME/init or /etc/profile.d; environment.setup can define it"
)
_CONDA_IS_THERE = 'command -v "${CONDA_EXE:-conda}" >/dev/null'
_NO_CONDA = (
    'environment.conda: there is no conda here: neither $CONDA_EXE nor a command "conda" on PATH; '
    "environment.modules or .setup can bring it"
)
_NO_VENV = "environment.venv: there is no virtual environment at {venv}; make it there, or correct environment.venv"


def _or_exit(test: str, text: str) -> list[str]:
    """Write lines that end the script with a message where a test fails: what is not there; what to do."""
    return [f"{test} || {{", f"  echo {shlex.quote(f'allranks: {text}')} >&2", "  builtin exit 1", "}"]


def conda_lines(name: str | None) -> list[str]:
    """Write the lines that activate a conda environment, if one is requested."""
    if not name:
        return []
    return ['eval "$("${CONDA_EXE:-conda}" shell.bash hook)"', f"conda activate {shlex.quote(name)}"]


def venv_lines(path: str | None) -> list[str]:
    """Write the line that activates a virtual environment, if one is requested."""
    return [f". {shlex.quote(_activate(path))}"] if path else []


def _activate(venv: str) -> str:
    return venv.rstrip("/") + "/bin/activate"


def required(secrets: Sequence[str], file: str = "", submit: str = "") -> list[str]:
    """Write lines that end the script where a secret is not set, with what to do about it.

    Secrets come with the environment or, if it is given, from a ``file``, a word of shell; the command ``submit`` is
    for a person who submits the script by hand.
    """
    if not secrets:
        return []
    lines = [comment("secrets: they come with the environment, their values are written nowhere")]
    fix = "set it before you start this script by hand"
    if file:
        why = comment("secrets: they come in a file that only you can read, and that goes when the run has ended")
        lines, fix = [why, f"[ ! -r {file} ] || . {file}"], f"submit this script with it: {submit}"
    return [*lines, *(f': "${{{name}?{fix}}}"' for name in secrets if name != contract.NOTIFY_WEBHOOK)]
