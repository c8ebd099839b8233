"""Chooses directory, interpreter and environment variables of the ranks where the job leaves them open."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.errors import JobError
from allranks.job.units import format_count
from allranks.job.variables import secret_names
from allranks.plan.layout import Layout
from allranks.plan.plan import Reason

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job

_DEBUG = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
#: Variables that an agent decides on its node unless they are set, and the rule.
_DECIDED_ON_NODES = {
    "GLOO_SOCKET_IFNAME": "the interface that carries the route to the first node",
    "NCCL_SOCKET_IFNAME": "likewise; not set where an InfiniBand or RoCE port is active: NCCL finds it",
    "OMP_NUM_THREADS": "the CPUs that the node gives, shared by its ranks",
}


def workdir_of(job: Job, folder: Path) -> Path:
    """Return the ranks' absolute working directory, relative to ``folder``; raise a JobError if it does not exist."""
    workdir = Path(os.path.normpath(folder / job.workdir))
    if not workdir.is_dir():
        fix = f"mkdir -p {shlex.quote(str(workdir))}, or workdir (--workdir) with a directory that is there"
        error = JobError(f"there is no working directory {workdir}", fix=fix)
        error.key = "workdir"
        raise error
    return workdir


def python_of(job: Job, environ: Mapping[str, str], *, elsewhere: bool = False) -> tuple[tuple[str, ...], Reason]:
    """Return the command line of the ranks' interpreter and the reason: the job's, its environment's, or this one.

    If this interpreter has no torch, as with an isolated tool installation, it is that of the active environment.
    ``elsewhere``: the ranks run where this interpreter does not exist.
    """
    command, why = _choose_python(job, environ, elsewhere)
    return command, Reason("python", shlex.join(command), why)


def _choose_python(job: Job, environ: Mapping[str, str], elsewhere: bool) -> tuple[tuple[str, ...], str]:
    chosen = job.environment
    if chosen.python:
        return chosen.python, "environment.python"
    if chosen.conda or chosen.venv:
        return ("python",), f"that of environment.{'venv' if chosen.venv else 'conda'}"
    if elsewhere:
        return ("python3",), "the first on PATH there: sync copies no interpreter"
    own, active = "the Python of allranks", environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX")
    if not active or chosen.container or Path(active).resolve() == Path(sys.prefix).resolve():
        return (sys.executable,), own
    python = str(Path(active, "bin/python"))
    if not Path(python).exists():
        return (sys.executable,), f"{own}; the active environment {active} has no bin/python"
    if importlib.util.find_spec("torch"):
        return (sys.executable,), f"{own}, which has torch; for the active environment {active}: --python {python}"
    if not _works(python):
        why = f"{own}; that of the active environment {active} does not run, or is older than Python 3.10"
        return (sys.executable,), why
    return (python,), f"that of the active environment: {own}, {sys.executable}, has no torch"


@cache
def _works(python: str) -> bool:
    """Return whether an interpreter works and can run agents."""
    program = "import sys; sys.exit(sys.version_info < (3, 10))"
    try:
        return not subprocess.run([python, "-c", program], capture_output=True, timeout=10).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def environment_of(job: Job, folder: Path) -> Environment:
    """Return the job's environment with an absolute path to its virtual environment."""
    venv = job.environment.venv
    return job.environment.model_copy(update={"venv": str(folder / venv)}) if venv else job.environment


def missing_here(job: Job, folder: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return notes on a venv, conda environment or interpreter of the job that is missing on this machine.

    None if there are set-up lines, modules or a container, which may provide them.
    """
    chosen = environment_of(job, folder)
    if chosen.setup or chosen.modules or chosen.node_setup or chosen.container:
        return ()
    notes = []
    if chosen.venv and not Path(chosen.venv, "bin/activate").is_file():
        notes.append(f"environment.venv: there is no virtual environment {chosen.venv} here")
    if chosen.conda and (missing := _missing_conda(chosen.conda, environ)):
        notes.append(f"environment.conda: there is no {missing}")
    if chosen.python and not (chosen.conda or chosen.venv):
        program = chosen.python[0]  # A relative path starts from the ranks' working directory.
        if not shutil.which(str(folder / job.workdir / program) if os.sep in program else program):
            notes.append(f"environment.python: there is no {program} here")
    return tuple(notes)


def _missing_conda(name: str, environ: Mapping[str, str]) -> str | None:
    """Return what is missing for a conda environment; None if nothing is."""
    conda = shutil.which(environ.get("CONDA_EXE") or "conda", path=environ.get("PATH"))
    if not conda:
        return "conda here, neither CONDA_EXE nor on PATH"
    root, home = Path(conda).resolve().parents[1], Path(environ.get("HOME", "/"))
    folders = [*map(Path, filter(None, environ.get("CONDA_ENVS_PATH", "").split(os.pathsep))), root / "envs"]
    places = [Path(name)] if os.sep in name else [each / name for each in (*folders, home / ".conda/envs")]
    with contextlib.suppress(OSError):  # conda's list of the user's environments.
        lines = (home / ".conda/environments.txt").read_text(errors="replace").splitlines()
        places += [Path(line) for line in lines if Path(line).name == name]
    if name == "base" or any(place.is_dir() for place in places):
        return None
    return f"conda environment {name} in {', '.join(map(str, places))}"


def unused_scheduler(job: Job, *but: str) -> tuple[str, ...]:
    """Return notes on scheduler options of a job on a cluster without a scheduler, ``but`` for those that are used."""
    requested = job.scheduler.model_dump(exclude_defaults=True)
    used = ", ".join(f"scheduler.{name}" for name in requested if name not in but)
    notes = [f"there is no scheduler here: {used} not used"] if used else []
    if job.notify.mail:
        notes.append("there is no scheduler here that sends mail: notify.mail not used; notify.command can send it")
    return tuple(notes)


def only_over_ssh(job: Job) -> tuple[str, ...]:
    """Return notes on options of a job that only SSH clusters support."""
    requested = {"launch.attach": job.launch.attach, "sync": job.sync.method != "none"}
    return tuple(f"{name} is for runs over SSH, and not used here" for name in requested if requested[name])


def settings(job: Job, layout: Layout | None, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that allranks sets, with reasons; variables set by the job or the user stay unchanged.

    ``layout`` is None for a job whose nodes decide the variables that depend on it.
    """
    given = job.environment.variables
    decided = [reason for reason in _decide(job, layout) if reason.subject not in given]
    hidden = secrets(job)
    requested = [Reason(name, value, "environment.variables") for name, value in given.items() if name not in hidden]
    return (*(reason for reason in decided if reason.subject not in environ), *requested)


def kept(job: Job, layout: Layout | None, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that allranks would set if the calling environment did not."""
    ours = [reason.subject for reason in _decide(job, layout)]
    ours += [name for name in _DECIDED_ON_NODES if layout is None and name not in ours]
    return tuple(Reason(name, environ[name], "set in your environment") for name in ours if name in environ)


def secrets(job: Job) -> tuple[str, ...]:
    """Return the names of the job's variables whose values are never written to disk."""
    webhook = (contract.NOTIFY_WEBHOOK,) if job.notify.webhook else ()
    return (*secret_names(job.environment.variables), *webhook)


def secret_values(job: Job) -> dict[str, str]:
    """Return the values of :func:`secrets`."""
    known = {**job.environment.variables, contract.NOTIFY_WEBHOOK: job.notify.webhook or ""}
    return {name: known[name] for name in secrets(job)}


def decided_on_nodes(job: Job, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that each node decides itself, with the rule."""
    taken = {*environ, *job.environment.variables, *(reason.subject for reason in _decide(job, None))}
    rules = _DECIDED_ON_NODES.items()
    return tuple(Reason(name, "decided on each node", why) for name, why in rules if name not in taken)


def _decide(job: Job, layout: Layout | None) -> Iterator[Reason]:
    if layout:
        cpus, ranks = layout.cpus, layout.nproc_per_node
        why = f"{format_count(cpus, 'CPU')} for {format_count(ranks, 'rank')}"
        yield Reason("OMP_NUM_THREADS", str(max(1, cpus // ranks)), why)
    if job.launch.interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield Reason(name, job.launch.interface, "launch.interface")
    elif layout and job.launch.master_addr is None:
        yield Reason("GLOO_SOCKET_IFNAME", "lo", "all ranks are on this machine")
    if job.resources.gpus_per_node == 0:
        yield Reason("CUDA_VISIBLE_DEVICES", "", "gpus_per_node is 0")
    if job.debug:
        for name, value in _DEBUG.items():
            yield Reason(name, value, "debug is on", is_debug=True)
