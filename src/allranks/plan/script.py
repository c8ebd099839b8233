"""The script that starts one node's agent: readable, and every word from outside quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from allranks.plan.plan import Reason

if TYPE_CHECKING:
    from allranks.job.spec import Environment


def agent_script(head: Sequence[str], container: Sequence[str], command: Sequence[str]) -> str:
    """Write the script that sets a node up and becomes its agent.

    Args:
        head: what :func:`node_setup` returned.
        container: command that the agent's is put behind.
        command: the agent's command, in words of shell.
    """
    why = comment("the agent takes the place of this shell: it starts the ranks and watches them")
    return "\n".join([*head, "", why, " ".join(["exec", *map(shlex.quote, container), *command])]) + "\n"


def node_setup(
    *,
    title: str,
    workdir: str,
    environment: Environment,
    settings: Sequence[Reason],
    variables: Sequence[tuple[str, str]],
    secrets: Sequence[str],
    code: str,
) -> list[str]:
    """Write the head of a script that sets a node up, and ends where a line of that fails.

    Args:
        title: one line on what this is.
        workdir: absolute working directory of the ranks.
        environment: modules, conda, venv, setup lines and container of the job.
        settings: variables with the reason for each.
        variables: further variables, of ours.
        secrets: names of variables that must come with the environment.
        code: a word of shell for the run's copy of the node-side code, which the ranks can import.
    """
    lines = ["#!/usr/bin/env bash", comment(title), *STRICT, ""]
    python_path = code + '"${PYTHONPATH:+:$PYTHONPATH}"'
    lines += prepared(workdir, environment, settings, variables, python_path)
    if secrets:
        lines += ["", *required(secrets)]
    return lines


def prepared(
    workdir: str,
    environment: Environment,
    settings: Sequence[Reason],
    variables: Sequence[tuple[str, str]],
    python_path: str,
) -> list[str]:
    """Write the lines that set a node up.

    Args:
        workdir: absolute working directory of the ranks.
        environment: modules, conda, venv and setup lines of the job.
        settings: variables with the reason for each.
        variables: further variables, of ours.
        python_path: a word of shell for PYTHONPATH, in which ``import allranks`` of the ranks finds the run's code.
    """
    lines = [
        *set_up(workdir, environment, settings),
        comment("the backend that allranks.init() takes"),
        *(export(name, value) for name, value in variables),
    ]
    why = comment("`import allranks` in the ranks finds the run's own copy")
    return [*lines, why, f"export PYTHONPATH={python_path}"]


def set_up(workdir: str, environment: Environment, settings: Sequence[Reason]) -> list[str]:
    """Write the lines that set up what the ranks' program may need; see :func:`prepared`."""
    lines = [comment("the ranks' working directory"), enter(workdir), "", *_setup(environment)]
    for setting in settings:
        lines += [comment(setting.why), export(setting.subject, setting.value)]
    return lines


# A step that fails must say which one it was: the ranks' own logs do not exist yet.
STRICT = (
    "set -e",
    """trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR""",
)


def comment(text: str) -> str:
    """Write ``text`` as a comment of one line, whatever it holds."""
    return "# " + text.translate(_ESCAPES)


_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)}


def export(name: str, value: str) -> str:
    """Write a line that sets and exports a variable."""
    return f"export {name}={shlex.quote(value)}"


def exports(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """Write lines that set and export variables with the values that they have in an environment."""
    return "".join(f"{export(name, environ[name])}\n" for name in names)


def enter(folder: str) -> str:
    """Write a line that changes into a folder."""
    return f"cd -- {shlex.quote(folder)}"


def indented(lines: Iterable[str]) -> list[str]:
    """Indent lines by two; what follows a line break inside one is quoted text, and stays as it is."""
    return ["  " + line if line else "" for line in lines]


def users_lines(lines: Sequence[str]) -> list[str]:
    """Return a user's shell lines, as one where indenting them would change them: they go on in one another."""
    return list(lines) if all(map(_is_whole, lines)) else ["\n".join(lines)]


def _is_whole(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:  # A quotation mark is open.
        return False
    return "<<" not in line


def _setup(environment: Environment) -> list[str]:
    lines: list[str] = []
    lines += _block("environment.setup", users_lines(environment.setup))
    lines += _block("environment.modules", _modules(environment.modules))
    lines += _block("environment.conda", [*_NO_CONDA, *conda_lines(environment.conda)] if environment.conda else ())
    lines += _block("environment.venv", venv_lines(environment.venv))
    lines += _block("environment.node_setup", users_lines(environment.node_setup))
    return lines


def naming_exits(environment: Environment) -> Environment:
    """Return an environment whose set-up lines name an ``exit`` among them, which no ERR trap hears of."""
    named = {}
    for key in ("setup", "node_setup"):
        lines = getattr(environment, key)
        if any(re.search(r"\bexit\b", line) for line in lines):
            said = f'allranks: environment.{key}: \\"$BASH_COMMAND\\" ended the set-up with exit code $?'
            named[key] = (f"""trap 'echo "{said}" >&2' EXIT""", *lines, "trap - EXIT")
    return environment.model_copy(update=named)


def _block(why: str, lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return [comment(why), *found, ""] if found else []


def _modules(modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    return [*_DEFINE_MODULE, "module load " + shlex.join(modules)]


# `module` is a shell function that only login shells are sure to have. Files that define it are not written for
# `set -e`, hence the `|| true`.
_DEFINE_MODULE = (
    'for file in ${LMOD_PKG:+"$LMOD_PKG/init/bash"} ${MODULESHOME:+"$MODULESHOME/init/bash"} \\',
    "    /etc/profile.d/modules.sh /etc/profile.d/lmod.sh; do",
    "  type module >/dev/null 2>&1 && break",
    '  [ ! -r "$file" ] || . "$file" || true',
    "done",
    "if ! type module >/dev/null 2>&1; then",
    '  echo \'allranks: environment.modules: there is no command "module" here, and no file that defines it in'
    " $LMOD_PKG/init, $MODULESHOME/init or /etc/profile.d; environment.setup can define it' >&2",
    "  exit 1",
    "fi",
)


_NO_CONDA = (
    'if ! command -v "${CONDA_EXE:-conda}" >/dev/null; then',
    '  echo \'allranks: environment.conda: there is no conda here: neither $CONDA_EXE nor a command "conda" on PATH;'
    " environment.modules or .setup can bring it' >&2",
    "  exit 127",
    "fi",
)


def conda_lines(name: str | None) -> list[str]:
    """Write the lines that activate a conda environment, if one is asked for."""
    if not name:
        return []
    return ['eval "$("${CONDA_EXE:-conda}" shell.bash hook)"', f"conda activate {shlex.quote(name)}"]


def venv_lines(path: str | None) -> list[str]:
    """Write the line that activates a virtual environment, if one is asked for."""
    return [f". {shlex.quote(path.rstrip('/') + '/bin/activate')}"] if path else []


def required(secrets: Sequence[str], by_hand: str = "set it before you start this script by hand") -> list[str]:
    """Write lines that end the script where a secret is not set, with what somebody has to do about it."""
    check = [f': "${{{name}?{by_hand}}}"' for name in secrets]
    return [comment("secrets: they come with the environment, their values are written nowhere"), *check]
