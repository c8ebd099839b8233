"""The verdict on a failed run, kept in its directory for those who report on the run later."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from allranks import contract
from allranks.diagnosis.model import Diagnosis
from allranks.errors import AllranksError, RunFolderError
from allranks.record.events import Event, read_saves
from allranks.record.files import write_json
from allranks.runs.status import NOT_STARTED, State

if TYPE_CHECKING:
    from allranks.runs.record import Run

#: The error of input() in a rank that has no stdin, and an interpreter of its own.
_NO_INPUT = "EOFError: EOF when reading a line"
_RESUME = "allranks resume RUN"


def has_failed(run: Run) -> bool:
    """Return whether a run has ended in a way that a verdict can explain: cancelled runs explain themselves."""
    state = run.record.status.state
    return state.is_final and state not in (State.SUCCEEDED, State.CANCELLED)


def verdict_on(run: Run) -> Diagnosis | None:
    """Return the verdict on the newest attempt of a failed run, as it was kept; None if nothing tells of a failure."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _kept(run)
    return judged(run)


def judged(run: Run) -> Diagnosis | None:
    """Return the verdict on the newest attempt of a run by the rules of today, and keep it.

    Raises:
        RunFolderError: a log cannot be read.
    """
    from allranks.diagnosis.sources import of_run  # A verdict that was kept is read without the rules.

    verdict = of_run(run)
    refused = _refusal(run)
    if refused and (verdict is None or verdict.sure == "unknown"):
        verdict = refused
    elif verdict:
        verdict = replace(verdict, fix=refused.fix if refused and refused.fix else _fix(verdict, run))
    _keep(run, verdict)
    return verdict


def keep_refusal(run: Run, error: AllranksError) -> None:
    """Keep the error for which a run was not started as the verdict on it."""
    _keep(run, Diagnosis("", error.in_a_line, "certain", fix=error.fix or ""))


def resumes_from(run: Run) -> str:
    """Return where another attempt of a run starts: at its newest checkpoint, or at the beginning."""
    if saved := [save for save in read_saves(run.folder) if save.path]:
        return f"from step {saved[-1].step}"
    is_by_hand = run.record.kind == "local" and run.record.nnodes > 1
    if is_by_hand and not (run.folder / contract.node_dir(0, 0)).is_dir():  # Rank 0 saves on another machine.
        return "on all nodes: from the newest checkpoint of node 0"
    return "no checkpoint: from the beginning, unless the script loads its own"


def reported_by_agent(run: Run) -> Event | None:
    """Return the error that an agent ended with; one of another node than the first only if no rank has failed."""
    from allranks.runs.agents import reported_error

    folders = [run.node_folder(0)]
    if run.record.status.rank is None:
        folders += sorted(run.attempt_folder.glob("node-*"))
    return next((found for folder in folders if (found := reported_error(folder))), None)


def _kept(run: Run) -> Diagnosis | None:
    kept = json.loads((run.folder / contract.DIAGNOSIS_FILE).read_text(encoding="utf-8"))
    if kept["attempt"] != run.attempt:
        raise ValueError(kept["attempt"])
    return Diagnosis.from_json(kept["diagnosis"]) if kept["diagnosis"] else None


def _refusal(run: Run) -> Diagnosis | None:
    """Return the error for which a run was not started, of which no log tells."""
    if run.record.status.native == NOT_STARTED:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return _kept(run)
    return None


def _keep(run: Run, verdict: Diagnosis | None) -> None:
    kept = {"attempt": run.attempt, "diagnosis": verdict and asdict(verdict)}
    with contextlib.suppress(RunFolderError):  # A user who may only read, or a full disk: it is found again.
        write_json(run.folder / contract.DIAGNOSIS_FILE, kept, run.record.file_mode)


def _fix(verdict: Diagnosis, run: Run) -> str:
    """Return what to do about the failure of this run, which is more than the rule knows; RUN stands for its name."""
    from allranks.clusters.registry import load_kind
    from allranks.logs.cause import own_fix, tail
    from allranks.runs.blame import rank_log

    record, status = run.record, run.record.status
    cause, is_local = status.cause or "", record.kind == "local"
    log = None if status.rank is None else rank_log(run.attempt_folder, status.rank)
    if log and verdict.rank in (None, status.rank) and (advice := own_fix(tail(log), cause)):
        return advice
    if reported := reported_by_agent(run):
        return reported.fields.get("fix") or verdict.fix
    if status.rank is None and (advice := load_kind(record.kind).log_excerpt(run).fix):
        return advice.format(run="RUN")
    if is_local and record.world_size > 1 and cause.startswith(_NO_INPUT):
        return f"allranks run --stdin {status.rank} gives this rank the terminal"
    # Nodes that were started by hand are started so again.
    fix = verdict.fix_for("start each node again" if is_local and record.nnodes > 1 else _RESUME)
    return fix.replace(_RESUME, f"{_RESUME} ({resumes_from(run)})")
