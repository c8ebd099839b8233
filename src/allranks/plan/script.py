"""Writes the scripts of a run: short and readable, with every external word quoted."""

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

#: Directory of the templates.
HERE = Path(__file__).parent
#: Shell words for the code in the run's directory, and for the configuration of its agents.
CODE = f'"${contract.RUN_DIR}/{contract.CODE}"'
SPEC = f'"${contract.RUN_DIR}/{contract.NODE_SPEC}"'
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


def comment(text: str) -> str:
    """Write any ``text`` as a comment of one line."""
    return "# " + text.translate(_ESCAPES)


def export(name: str, value: str) -> str:
    """Write a line that sets and exports a variable."""
    return f"export {name}={shlex.quote(value)}"


def exports(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """Write lines that set and export variables with their values in an environment; skip unset ones."""
    return "".join(f"{export(name, environ[name])}\n" for name in names if name in environ)


def enter(folder: str) -> str:
    """Write a line that changes into a directory."""
    return f"cd -- {shlex.quote(folder)}"


def umask(mode: int) -> str:
    """Return the umask for directories of files with these permission bits."""
    return f"{0o777 & ~(mode | 0o100 | (mode & 0o040) >> 2):03o}"


def fill(template: Path, words: Mapping[str, str], blocks: Mapping[str, Sequence[str]] | None = None) -> str:
    """Fill a template: ``@name@`` is replaced by a shell word, and a line ``#: name`` by the lines of that block."""
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
    """Write the script that sets up a node, and exits if a line of the set-up fails.

    Args:
        title: one line that describes the script.
        settings: variables with the reason for each.
        becomes: lines that start the node's agent or its ranks; see :func:`become`.
        traps: lines that handle failures and signals during the set-up; None: those of :func:`name_failures`.
        place: lines that set the node's place in the run.
        secrets: names of variables that the environment must have.
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
    """Write the line by which a node's script executes Python; ``words`` are the shell words of its arguments."""
    return [" ".join(["exec", shlex.join([*container, *python]), *words])]


def set_up(workdir: str, environment: Environment, settings: Sequence[Reason]) -> list[str]:
    """Write the lines of the set-up, each with the job's key that requests it."""
    lines = [enter(workdir), ""]
    lines += _block("environment.setup", environment.setup)
    if environment.modules:
        load = [*_or_exit(_MODULE_IS_THERE, _NO_MODULE), "module load " + shlex.join(environment.modules)]
        # Only login shells are sure to have the function `module`; the code that defines it may fail under `set -e`.
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
    """Write the traps that report which line of a set-up failed, including one that calls exit, which runs no ERR trap.

    In a subshell the subshell's failed line is reported. ``exit 0`` also counts as a failure.

    Args:
        environment: the job's environment, with the user's lines; None: an exit is not reported.
        host: shell word for the node's name, if many nodes write to one log.
        copy: the script's name in the run's directory, if it runs under another name.
    """
    copied = f'/#"$0"/{copy}' if copy else ""
    words = {"file": f"${{BASH_SOURCE[0]{copied}}}", "caller": f"${{BASH_SOURCE[1]{copied}}}"}
    words["on"] = f", on {host}" if host else ""
    lines = fill(HERE / "failures.sh", words)  # The ranks' own logs do not exist yet.
    if environment and any(map(_MAY_EXIT.search, (*environment.setup, *environment.node_setup))):
        lines += fill(HERE / "exits.sh", words)
    return lines.splitlines()


#: Lines of the user that may call exit, directly or in a sourced file.
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
    """Write lines that exit with a message if a test fails: what is missing; what to do."""
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
    """Write lines that exit if a secret is not set, with the fix.

    Secrets come from the environment or, if given, from a ``file`` (a shell word); the command ``submit`` is shown for
    submitting the script by hand.
    """
    if not secrets:
        return []
    lines = [comment("secrets: they come with the environment, their values are written nowhere")]
    fix = "set it before you start this script by hand"
    if file:
        why = comment("secrets: they come in a file that only you can read, and that goes when the run has ended")
        lines, fix = [why, f"[ ! -r {file} ] || . {file}"], f"submit this script with it: {submit}"
    return [*lines, *(f': "${{{name}?{fix}}}"' for name in secrets if name != contract.NOTIFY_WEBHOOK)]
