"""The parts of a script that a batch scheduler starts, whichever scheduler it is.

Each function returns the lines of one block; :func:`joined` puts blocks together. In them ``$job`` is the job's id,
``$attempt`` the folder of the attempt, and ``$ALLRANKS_RUN_DIR`` that of the run: each task of a job array has its own.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from allranks import contract
from allranks.plan.script import comment, enter, indented, prepared, users_lines

if TYPE_CHECKING:
    from allranks.job.spec import Environment
    from allranks.plan.plan import Reason

#: Words of shell for what is in the run's folder.
CODE = f'"${contract.RUN_DIR}/{contract.CODE}"'
_PYTHON_PATH = f'"${contract.RUN_DIR}/{contract.CODE}${{PYTHONPATH:+:$PYTHONPATH}}"'
SPEC_FILE = "node.json"
SPEC = f'"${contract.RUN_DIR}/{SPEC_FILE}"'

_NEW_KEY = "od -An -N32 -tx1 /dev/urandom | tr -d ' '"
_AT_EXIT = "trap 'finish \"$?\"' EXIT"
_ON_ERROR = """trap 'echo "allranks: {where}$BASH_COMMAND failed with exit code $?{line}" >&2' ERR"""


def joined(blocks: Iterable[Sequence[str]]) -> str:
    """Put blocks together to a script, with an empty line between two of them."""
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def strict() -> list[str]:
    """Return the block that ends the script where a line of it fails, and says which."""
    return [
        "set -e",
        _ON_ERROR.format(where="", line=" (line $LINENO)"),
        comment("until there are ranks that could save, a warning is for nobody, and the end is one"),
        "trap : USR1",
        "trap 'exit 143' TERM",
    ]


def own_folder(run_dir: str, spec: str, mode: int, script: str) -> list[str]:
    """Return the block that makes the run's folder, for a script that is all there is of the run so far."""
    package = contract.installation()
    sources = shlex.join([str(package), str(package / "agent" / "__main__.py")])
    return [
        comment("the run's folder, with this script, the agents' code and their orders"),
        f"run={shlex.quote(run_dir)}",
        f'({umask(mode)} && mkdir -p "$run")',
        f'if [ ! -d "$run/{contract.CODE}" ]; then',
        '  new=$(mktemp -d "$run/new-XXXXXX")',
        f'  cp -Rp {sources} "$new"',
        f'  mv -T "$new" "$run/{contract.CODE}" 2>/dev/null || rm -rf "$new"  # another task was quicker',
        "fi",
        'new="$run/new-$HOSTNAME-$$"  # others may read what is there',
        f'({umask(mode)} && cp "$0" "$new" && mv "$new" "$run/{script}"',
        f'  cat >"$new" && mv "$new" "$run/{SPEC_FILE}") <<\'END\'',
        *spec.splitlines(),
        "END",
        comment("the key that its agents prove to each other; the first one counts"),
        f'(umask 077 && set -o noclobber && {_NEW_KEY} >"$run/{contract.KEY_FILE}") 2>/dev/null || true',
    ]


def attempt(run_dir: str, job_id: str, mode: int, script: str, array_task: str | None) -> list[str]:
    """Return the block that takes the first attempt that no job has taken.

    Args:
        run_dir: absolute folder of the run.
        job_id: a word of shell that gives the job's id.
        mode: permission bits of folders.
        script: name of this script in the run's folder.
        array_task: a word of shell for the number of this task of a job array, for a job that is one.
    """
    run = shlex.quote(run_dir)
    head = [f"job={job_id}", f"export {contract.RUN_DIR}={run} {contract.ATTEMPT}=0"]
    if array_task:
        shared = " ".join(f"../{name}" for name in (contract.CODE, contract.KEY_FILE, SPEC_FILE, script))
        links = f'ln -sfn {shared} "${contract.RUN_DIR}"'
        head = [
            comment("each task of the array has a folder of its own, like that of a run"),
            f"job={job_id}",
            f"export {contract.RUN_DIR}={run}/{contract.TASK}{array_task} {contract.ATTEMPT}=0",
            f'({umask(mode)} && mkdir -p "${contract.RUN_DIR}" && {links})',
        ]
    return [
        *head,
        comment("the attempt is the first one that no job has taken: its folder has no file with a job's id yet"),
        "until",
        *indented(_take(umask(mode))),
        "do",
        f'  [ -s "$attempt/{contract.JOB}" ] || {{ echo "allranks: cannot write into $attempt" >&2; exit 1; }}',
        f"  {contract.ATTEMPT}=$(({contract.ATTEMPT} + 1))",
        "done",
    ]


def _take(umask: str) -> list[str]:
    create = f'mkdir -p "$attempt" && set -o noclobber && echo "$job" >"$attempt/{contract.JOB}"'
    return [
        f'printf -v attempt \'%s/{contract.ATTEMPTS_DIR}/%03d\' "${contract.RUN_DIR}" "${contract.ATTEMPT}"',
        f"({umask} && {create}) 2>/dev/null",
    ]


def umask(mode: int) -> str:
    """Return the command after which folders are created with these permission bits."""
    return f"umask {0o777 & ~mode:03o}"


def ending(python: str, max_attempts: int | None, last: Sequence[str] = ()) -> list[str]:
    """Return the block that says how the attempt ended, and what else is done then.

    Args:
        python: the interpreter of the one who plans.
        max_attempts: with it the run goes on in another attempt, if there is reason to.
        last: lines that come after that.
    """
    write = f'>"$attempt/{contract.EXIT}"'
    if max_attempts is None and not last:
        return [comment("whatever ends this script, its exit code is told"), f"trap 'echo \"$?\" {write}' EXIT"]
    if max_attempts is None:
        told = comment("whatever ends this script, its exit code is told")
        return [told, "finish() {", f'  echo "$1" {write}', *indented(last), "}", _AT_EXIT]
    again = f'"$python" {CODE} --again "${contract.RUN_DIR}" "${contract.ATTEMPT}" "$1" {max_attempts}'
    first = f'[ "${contract.ATTEMPT}" -eq 0 ]'
    return [
        comment("whatever ends this script, its exit code is told, and it is decided whether the run goes on"),
        f"python=$(command -v {shlex.quote(python)} python3 | head -n 1)",
        f"again() {{ {again}; }}",
        "finish() {",
        f'  echo "$1" {write}',
        '  again "$1" || true',
        *indented(last),
        "}",
        _AT_EXIT,
        comment("a job that was put back into the queue often enough, or makes no progress, is given up"),
        f"{first} || again begin || [ $? -ne {contract.GIVEN_UP} ] || exit 1",
    ]


def once(workdir: str, environment: Environment) -> list[str]:
    """Return the block of what is set up once, before the nodes are started."""
    if not environment.setup:
        return []
    return [comment("environment.setup"), enter(workdir), *users_lines(environment.setup)]


def on_nodes(
    name: str,
    why: str,
    *,
    host: str,
    workdir: str,
    environment: Environment,
    settings: Sequence[Reason],
    backend: str,
    mode: int,
    node: str | None,
    last: Sequence[str],
) -> list[str]:
    """Return the block that defines what runs on the nodes: a function, which travels in the environment.

    Args:
        name: of the function.
        why: what it is for.
        host: a word of shell for the node's name.
        workdir: absolute working directory of the ranks.
        environment: modules, conda, venv and setup lines of the job; what runs once is left out.
        settings: variables with the reason for each.
        backend: the process-group backend.
        mode: permission bits of folders.
        node: a word of shell for the node's number; None where it is in the environment already.
        last: the lines that end in an ``exec``; they have ``$folder``, the node's in the attempt.
    """
    place = f'"${contract.RUN_DIR}" "${contract.ATTEMPT}" "${contract.NODE_RANK}"'
    each = environment.model_copy(update={"setup": ()})
    body = [
        f"export -fn {name}",
        "set -e",
        _ON_ERROR.format(where=f"{host}: ", line=""),
        comment("the warning is for those who listen to it: nobody else is to die of it"),
        "trap '' USR1",
        *prepared(workdir, each, settings, ((contract.BACKEND, backend),), _PYTHON_PATH),
        comment("the node's number, and its folder in the attempt" if node else "the node's folder in the attempt"),
        *([f"export {contract.NODE_RANK}={node}"] if node else []),
        f"printf -v folder '%s/{contract.ATTEMPTS_DIR}/%03d/node-%03d' {place}",
        f'({umask(mode)} && mkdir -p "$folder")',
        *last,
    ]
    return [comment(why), f"{name}() {{", *indented(body), "}", f"export -f {name}"]
