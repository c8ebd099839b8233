"""Finds and checks the program that the ranks run, and rejects early what cannot work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from allranks.errors import JobError
from allranks.job.problems import closest, quoted
from allranks.job.values import as_name
from allranks.plan.directives import DIRECTIVE

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job

#: Suffixes of files that are not scripts, whether they compile or not, and what to do with them.
_NEVER_SCRIPTS = {
    ".ipynb": ("a notebook", "make a script of it: jupyter nbconvert --to script {0}"),
    ".json": (
        "JSON, and a job file ends with .yaml",
        "cp {0} job.yaml, since JSON is valid YAML; a script ends with .py",
    ),
    ".toml": ("TOML, and a job file is YAML", "allranks init writes a job.yaml to start from; a script ends with .py"),
}
_ELSEWHERE = "write the script's path, or cd to its directory"
_MOST_SHOWN = 5
_ELF = b"\x7fELF"
#: Bytes to read from a file to find out what it is.
_START = 64 * 1024
#: A line of a shell script that starts ranks.
_LAUNCHER = re.compile(
    rb"^[ \t]*(?:(?:exec|time|nohup|\w+=\S*)[ \t]+)*(?:(?:\S*/)?python[\d.]*[ \t]+(?:-u[ \t]+)?-m[ \t]+)?"
    rb"(torchrun|torch\.distributed\.(?:run|launch)|srun|mpirun|mpiexec|accelerate(?:\.commands\.|[ \t]+)launch"
    rb"|deepspeed)(?=[ \t\\])",
    re.MULTILINE,
)
#: Encoding declaration in one of the first two lines of a source (PEP 263).
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)


class Program(NamedTuple):
    """The program of the ranks: its kind, and its absolute path or a name to look up on the node."""

    kind: Literal["script", "module", "binary"]
    target: str
    why: str = "what the ranks run"


def name_of(job: Job) -> str:
    """Return the job's name: as given, else derived from its program, suitable as a directory name."""
    if job.name:
        return job.name
    target = job.module.rpartition(".")[2] if job.module else Path(job.script or job.binary or "").stem
    return as_name(target) or "job"


def find_entry(job: Job, workdir: Path, *, same_python: bool) -> Program:
    """Find the job's program; ``same_python``: the ranks use this interpreter, so the syntax can be checked.

    Raises:
        JobError: the program does not exist, or is not Python.
    """
    try:
        return _find_entry(job, workdir, same_python)
    except JobError as error:
        error.key = "module" if job.module else "binary" if job.binary else "script"
        raise


def _find_entry(job: Job, workdir: Path, same_python: bool) -> Program:
    if name := job.module:
        if any(map(str.isspace, name)):
            raise _not_a_module(name)
        if name.endswith(".py") or os.sep in name:
            meant = name.removesuffix(".py").strip(f".{os.sep}").replace(os.sep, ".")
            raise JobError(
                f"{name} is a file, and -m takes the name of a module",
                fix=f"write -m {shlex.quote(meant)}, or allranks run {shlex.quote(name)}",
            )
        return Program("module", name)
    if job.binary:
        return _find_binary(job.binary, workdir, job.environment)
    assert job.script is not None
    path = Path(os.path.normpath(workdir / job.script))
    python, _, rest = job.script.partition(" ")
    has_python = python in ("python", "python3") and bool(rest.strip())
    script, _, args = (rest.strip() if has_python else job.script).partition(" ")
    if (has_python or args.strip()) and not path.exists():
        reasons = [f"{python} is what runs it"] * has_python
        fix = f"leave {python} out: {rest.strip()}"
        if args := args.strip() if (workdir / script).is_file() else "":
            reasons.append("the arguments of a script go into args")
            fix = f"in the job file 'script: {script}' and 'args: {args}', or allranks run {script} -- {args}"
        if reasons:
            raise JobError(f"there is no script {job.script}", why="; ".join(reasons), fix=fix)
    _check_script(path, job.script, same_python)
    return Program("script", str(path))


def _not_a_module(words: str) -> JobError:
    name, _, args = words.strip().partition(" ")
    why, fix = "a name has no spaces", "write module: package.train, or -m package.train"
    if name.endswith(".py") or args.startswith("-"):
        why, fix = "arguments follow --", f"allranks run {'' if name.endswith('.py') else '-m '}{name} -- {args}"
    return JobError(f"invalid module name: {quoted(words)}", why=why, fix=fix)


def _find_binary(name: str, workdir: Path, environment: Environment) -> Program:
    local = workdir / name
    found = shutil.which(str(local)) if os.sep in name else shutil.which(name) or shutil.which(str(local))
    if found:
        return Program("binary", str(Path(found).absolute()))
    if os.sep not in name and not local.is_file():
        keys = ("setup", "modules", "conda", "venv", "node_setup", "container")
        givers = [f"environment.{key}" for key in keys if getattr(environment, key)]
        if "PATH" in environment.variables:
            givers.append("environment.variables.PATH")
        if givers:
            return Program("binary", name, f"what the ranks run; not on PATH here: {' or '.join(givers)} must bring it")
    if not local.is_file():
        fix = "write its path, or the name of one that `which` finds"
        raise JobError(f"cannot run {name}", why="there is no such program here or on PATH", fix=fix)
    if local.suffix == ".py":
        raise JobError(f"cannot run {name} as a program", why="it is a script", fix=f"allranks run {shlex.quote(name)}")
    raise JobError(f"cannot run {name}", why="it is not executable", fix=f"chmod +x {shlex.quote(name)}")


def _check_script(path: Path, name: str, same_python: bool) -> None:
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            files = [*path.glob("job.y*ml")] or [*path.glob("*.py")]
            fix = "name the script itself"
            if len(files) == 1:
                fix = f"allranks run {shlex.quote(os.path.join(name, files[0].name))}"  # noqa: PTH118 - text
            raise JobError(f"{name} is a directory without a __main__.py", fix=fix)
        return
    if not path.is_file():
        raise _missing(path, name)
    if path.suffix in _NEVER_SCRIPTS:
        why, fix = _NEVER_SCRIPTS[path.suffix]
        raise JobError(f"{name} is not a script", why=f"it is {why}", fix=fix.format(shlex.quote(name)))
    try:
        with path.open("rb") as stream:
            start = stream.read(_START)
    except OSError as error:
        raise JobError(f"cannot read {name}", why=error.strerror, fix=f"ls -l {shlex.quote(name)}") from error
    if path.suffix in (".pyz", ".pyc", ".zip"):
        return
    shebang = start.split(b"\n", 1)[0] if start.startswith(b"#!") else b""
    is_shell = b"python" not in shebang if shebang else path.suffix != ".py"
    if is_shell and (reason := _starts_ranks(start)):
        file = shlex.quote(name)
        fix = f"allranks convert {file} makes a job file of it, allranks lint {file} finds its faults"
        raise JobError(f"{name} is not a Python script", why=reason, fix=fix)
    if start.startswith(_ELF) or (shebang and b"python" not in shebang):
        as_binary = name if os.sep in name else f"./{name}"
        raise JobError(
            f"{name} is not a Python script",
            why="it is a program of its own",
            fix=f"allranks run --binary {shlex.quote(as_binary)}",
        )
    if same_python:
        _check_syntax(path, name)


def _starts_ranks(script: bytes) -> str | None:
    """Return why a shell script must not run in each rank: it is for a scheduler, or starts ranks; None if it may."""
    if directive := DIRECTIVE.search(script):
        return f"it is a batch script ({directive[0].decode()})"
    launcher = _LAUNCHER.search(script)
    return f"it starts {' '.join(launcher[1].decode().split())}" if launcher else None


def _missing(path: Path, name: str) -> JobError:
    if os.path.lexists(path):
        what = f"{name} is not a script"
        if not path.is_symlink():
            return JobError(what, why="it is neither a file nor a directory", fix="name a file, such as train.py")
        why = f"it is a link to {path.readlink()}, which does not exist"
        return JobError(what, why=why, fix="correct the link, or name the script itself")
    if not path.parent.is_dir():
        fix = "write the path itself: variables are not replaced here, but ~ is" if "$" in name else _ELSEWHERE
        return JobError(f"there is no script {name}", why=f"there is no directory {path.parent}", fix=fix)
    names = {
        other.stem: other.name for kind in ("*.y*ml", "*.py") for other in path.parent.glob(kind) if other.is_file()
    }
    near = closest(path.stem, names)
    fix = f"did you mean {names[near]}?" if near else _ELSEWHERE
    scripts = sorted(other for other in names.values() if other.endswith(".py"))
    if scripts and not near:
        more = f" and {len(scripts) - _MOST_SHOWN} more" if len(scripts) > _MOST_SHOWN else ""
        fix = f"scripts there: {', '.join(scripts[:_MOST_SHOWN])}{more}"
    return JobError(f"there is no script {name}", why=f"looked for {path}", fix=fix)


def _check_syntax(path: Path, name: str) -> None:
    """Compile a script, as its ranks will, to find syntax errors."""
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    fix = "correct it" if path.suffix == ".py" else "if it is not a Python script: --binary"
    source = path.read_bytes()
    if b"\0" in source:
        raise JobError(f"{name} is not a Python script", why="it holds NUL bytes", fix=fix)
    _check_encoding(source, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The ranks print them.
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise JobError(f"{name}{line} is not valid {version}", why=error.msg, fix=fix) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise JobError(f"{name} is not valid {version}", why=str(error) or type(error).__name__, fix=fix) from error


def _check_encoding(source: bytes, name: str) -> None:
    named = _CODING.search(b"\n".join(source.split(b"\n", 2)[:2]))
    encoding = named[1].decode() if named else "utf-8"
    try:
        source.decode(encoding)
    except LookupError as error:
        fix = "write coding: utf-8 in its first line, or no coding"
        raise JobError(f"{name} cannot be read as Python", why=f"there is no encoding {encoding}", fix=fix) from error
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        why = f"byte 0x{source[error.start]:02x} is not {encoding}"
        raise JobError(f"{name}:{line} cannot be read as Python", why=why, fix="save it as UTF-8") from error
