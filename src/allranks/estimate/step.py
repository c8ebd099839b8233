"""Runs one optimizer step of one rank of a job on this machine, and returns its measurements."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.checks.waiting import end_if_requested, noted
from allranks.clusters.registry import load_kind
from allranks.errors import JobError, LaunchError
from allranks.job.spec import Launch as LaunchSection
from allranks.job.spec import Notify, Resources, Retry, Scheduler, Sync
from allranks.job.variables import redacted
from allranks.job.yaml import dump_yaml
from allranks.launch import submit as launching
from allranks.launch.refresh import settled
from allranks.plan.entry import find_entry
from allranks.plan.environment import workdir_of
from allranks.record.estimate import MeasuredStep, read_step
from allranks.runs.blame import rank_log
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind
    from allranks.launch.submit import Launch
    from allranks.runs.record import Run

_POLL_SECONDS = 0.02
_STEP_FILE = "step.json"
_USES_US = re.compile(rb"^\s*(?:import|from)\s[^#\n]*\ballranks\b", re.MULTILINE)
#: Bytes of the rank's stderr to show when it fails.
_SHOWN_BYTES = 20_000
_OR_NUMBERS = "give numbers instead: --parameters 1.3B --activations 8GB"


class StepError(LaunchError):
    """The rank made no step; ``output`` is its stderr."""

    def __init__(self, what: str, *, why: str | None, fix: str, output: str = "", exit_code: int = 1) -> None:
        super().__init__(what, why=why, fix=fix)
        self.output = output
        self.exit_code = exit_code


def measure(launch: Launch, ranks: int, seconds: float) -> MeasuredStep:
    """Run the job's script as one of ``ranks`` ranks, on the CPU of this machine, up to its first optimizer step.

    It uses a temporary run directory. Signals end it, and then this command.

    Raises:
        JobError: the script does not use ``allranks.init()``.
        StepError: it failed, exited early, or made no step within ``seconds``.
    """
    name = _refuse_others(launch)
    with tempfile.TemporaryDirectory(prefix="allranks-estimate-") as made, noted() as signals:
        file, kind = Path(made, _STEP_FILE), load_kind("local")
        run, has_ended = _run(_alone(launch, Path(made), f"{ranks}:{file}"), kind, seconds, signals)
        found = read_step(file) if file.exists() else None
        if found is None:
            raise _error(run, name, None if has_ended else seconds, has_begun=file.exists())
        return found


def _refuse_others(launch: Launch) -> str:
    """Raise for a script without ``allranks.init()``, which would train to its end; return its name."""
    job, workdir = launch.job, workdir_of(launch.job, launch.folder)
    name = job.script or job.module or job.binary or ""
    entry = find_entry(job, workdir, same_python=False)
    script = Path(entry.target)
    if entry.kind == "module":
        script = workdir / f"{name.replace('.', '/')}.py"
        script = script if script.is_file() else script.with_suffix("") / "__main__.py"
    # Modules in its directory count too.
    files = [] if entry.kind == "binary" else [script, *script.parent.glob("*.py")]
    if not any(_USES_US.search(each.read_bytes()) for each in files if each.is_file()):
        raise JobError(
            f"{name} does not use allranks.init()", why="only such a script ends after one step", fix=_OR_NUMBERS
        )
    return name


def _alone(launch: Launch, folder: Path, order: str) -> Launch:
    """Return a launch of one rank on this machine, with the job's program, arguments and environment."""
    job = launch.job
    variables = {**job.environment.variables, contract.ESTIMATE: order}
    job = job.model_copy(
        update={
            "cluster": "local",
            "resources": Resources(gpus_per_node=0),
            "launch": LaunchSection(nproc_per_node=1, backend="gloo", warm=job.launch.warm, stop_timeout=1),
            "environment": job.environment.model_copy(update={"variables": variables}),
            "scheduler": Scheduler(),
            "retry": Retry(),
            "sync": Sync(),
            "notify": Notify(),
        }
    )
    return launch._replace(job=job, job_text=dump_yaml(redacted(job)), runs_folder=folder / "runs")


def _run(launch: Launch, kind: ClusterKind, seconds: float, signals: Sequence[int]) -> tuple[Run, bool]:
    """Run it to its end, or for at most ``seconds``; return the run, and whether it ended by itself."""
    run, plan = launching.prepare(launch, kind)
    plan = replace(plan, stdin=None)
    until = time.monotonic() + seconds
    run, started = launching.start(
        run,
        plan,
        kind,
        launch.environ_for(plan),
        detach=False,
        watched=False,
        interrupted=lambda: next(iter(signals), 0),
    )
    try:
        while not (has_ended := started.wait(_POLL_SECONDS)) and time.monotonic() < until:
            end_if_requested(signals, lambda _: None, run.record.id)
    except BaseException:  # Also for a signal: no process may be left.
        kind.cancel(run)
        raise
    if not kind.status(run).state.is_final:
        kind.cancel(run)
    return settled(run, kind), has_ended


def _error(run: Run, name: str, seconds: float | None, *, has_begun: bool) -> StepError:
    """Return the error for a missing step; ``seconds`` is the time limit if that was reached, else None."""
    status = run.record.status
    log = rank_log(run.attempt_folder, 0)
    output = log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace") if log and log.is_file() else ""
    if seconds is not None:
        why = "allranks.init() was called" if has_begun else "allranks.init() was not called"
        fix = f"--timeout {2 * seconds:g}, arguments with which it is quicker, or numbers: --parameters 1.3B"
        return StepError(f"{name} made no optimizer step within {seconds:g} s", why=why, fix=fix, output=output)
    if status.state is State.SUCCEEDED:
        why = "it ended without one" if has_begun else "it ended without a call of allranks.init()"
        return StepError(f"{name} made no optimizer step", why=why, fix=_OR_NUMBERS)
    return StepError(
        f"{name} failed before its first optimizer step",
        why=status.cause or status.reason,
        fix=f"correct it as for allranks run; or {_OR_NUMBERS}",
        output=output,
        exit_code=status.exit_code or 1,
    )
