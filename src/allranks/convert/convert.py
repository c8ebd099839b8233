"""From a launch script to the draft of a job file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from allranks.contract import is_secret
from allranks.convert.csh import as_bash
from allranks.convert.directives import take_directives
from allranks.convert.draft import Draft
from allranks.convert.launchers import RANK_VARIABLES, functions_of, main_launch, take_launch
from allranks.convert.own_arguments import give_arguments
from allranks.convert.statements import Statements
from allranks.errors import UsageError
from allranks.lint.directives import options_of
from allranks.lint.engine import Finding, lint
from allranks.lint.expand import UNKNOWN, Run
from allranks.lint.files import not_for, other_kind, why_not_read
from allranks.lint.model import Command
from allranks.lint.reading import View, read_scripts
from allranks.lint.syntax import read_call
from allranks.lint.unwrap import arguments_of

#: Families of rules whose faults a job file does not have: processes, rendezvous, directives, remote shells, outcomes.
_GONE = ("AR1", "AR3", "AR4", "AR6", "AR7", "AR80", "AR81", "AR211", "AR213", "AR214", "AR216", "AR903", "AR904")

#: Functions that call each other, down to the training, whose arguments are followed.
_NESTED = 5


def drafts_of(path: str, data: bytes, arguments: Sequence[str] = ()) -> list[Draft]:
    """Return a draft for each script in a file that starts a training: itself, and those that it writes and submits.

    Args:
        path: the file.
        data: its content.
        arguments: what it is run with: ``$1`` and so on.

    Raises:
        UsageError: the file cannot be read as a launch script, or starts no training.
    """
    if kind := other_kind(path, data):
        raise not_for("convert", path, kind)
    if reason := why_not_read(data):
        raise UsageError(f"cannot convert {path}", why=f"it is {reason}", fix="allranks convert train.sbatch")
    script = data.replace(b"\r\n", b"\n")
    data = as_bash(path, script)
    views, run = _read(path, data, arguments)
    broken, findings = views[0].script.broken, lint(path, data)
    found = [draft for view in views if (draft := _draft(path, _as_job(view), findings, run, arguments))]
    if broken and (not found or max(broken) >= len(data.rstrip())):
        why = f"{path}:{views[0].place(broken[0]).line}: a quote, a bracket or a block that starts here has no end"
        raise UsageError(f"cannot convert {path}", why=why, fix=f"bash -n {path} shows more")
    if not found:
        names = [word.shown for _, call in views[0].calls("sbatch", "qsub") for word in call.rest[:1]]
        why = (
            f"it submits {', '.join(names)}" if names else "no torchrun, accelerate, deepspeed, srun python or the like"
        )
        runs = [each.words[0].shown for each in views[0].script.commands if each.name.endswith((".sh", ".bash"))]
        if runs and not names:
            why, names = f"it runs {', '.join(runs)}, and that starts none or is not here", runs
        fix = f"allranks convert {names[0]}" if names else "name the script that starts the ranks"
        unknown = (each for each in views[0].script.commands if each.words and each.words[0].value is None)
        if not names and (first := next(unknown, None)):
            place, name = views[0].place(first.at).line, first.words[0].shown
            why = f"{path}:{place}: {name} is set under a condition, or not in the script, and may be a launcher"
            fix = f"write the launcher in the place of {name}"
        raise UsageError(f"{path} starts no training", why=why, fix=fix)
    for draft in found if data != script else ():
        draft.changed(0, "this is csh: it is read, and with --verify run, as the bash that does the same")
    for at in broken:
        found[0].note("not taken over", at, "this could not be read: look at what became of it")
    return found


def _read(path: str, data: bytes, arguments: Sequence[str]) -> tuple[list[View], Run]:
    """Return the scripts in a file, as they run here, with the arguments of the first call of each function."""
    run = Run()
    for _ in range(_NESTED):
        views = [view for view in read_scripts(path, data, run) if view.script.path == path]
        give_arguments(views[0].script, arguments)
        found = {calls[0].name: arguments_of(calls[0].args) for view in views for calls in _calls(view)}
        if found == run.arguments:
            break
        run = Run(found)
    return views, run


def _calls(view: View) -> list[list[Command]]:
    """Return the calls of each function through which a training starts, if there are some."""
    names = sorted(functions_of(view.script, (launch.command for launch in view.launches)))
    return [calls for name in names if (calls := [*view.script.named(name)])]


def _draft(path: str, view: View, findings: list[Finding], run: Run, arguments: Sequence[str]) -> Draft | None:
    script = view.script
    group, others = main_launch(view.launches)
    if not group:
        return None
    draft = Draft(view, path, "local" if script.kind == "plain" else script.kind, arguments)
    codes: dict[int, set[str]] = {}
    for finding in findings:
        codes.setdefault(draft.line(finding.at), set()).add(finding.rule.code)
    take_directives(draft)
    lines = {draft.line(at) for launch in group for at in (launch.command.at, launch.command.root.at)}
    take_launch(draft, group, {code for line in lines for code in codes.get(line, ())})
    for launch in others:
        shown = " ".join(word.shown for word in launch.command.words)
        draft.not_taken(launch.command.at, f"another training: {shown}")
    for first, *more in _calls(view):
        for call in more:
            if [word.shown for word in call.args] != [word.shown for word in first.args]:
                draft.not_taken(call.at, f"another training: {' '.join(word.shown for word in call.words)}")
    for name, (at, value) in run.defaults.items():
        if name not in RANK_VARIABLES and not (name.isdecimal() and int(name) <= len(arguments)):
            what = f"${name}" if name.isdecimal() else name
            value = "<secret>" if is_secret(name) else value or "empty"
            draft.changed(at, f"{what} is {value}, its default: the job does not read it from your shell")
    Statements(draft, group, codes).take()
    _finish(draft, findings)
    return draft


def _as_job(view: View) -> View:
    """Return a script that calls ``srun`` outside of a job as one whose directives are the options of that."""
    script = view.script
    starter = next(script.named("srun"), None)
    call = read_call(starter)
    asks = call.get("--partition", "--account", "--gres", "--gpus-per-node", "--gpus", "--time")
    if script.kind != "plain" or not asks:
        return view
    script.kind = "slurm"
    script.directives += [option for option in options_of(call) if option.value != UNKNOWN and option.name != "pty"]
    return View(script)


def _finish(draft: Draft, findings: list[Finding]) -> None:
    """Set what follows from the rest, and say what became of lint's findings."""
    environment = {path.split(".")[1] for path in draft.values if path.startswith("environment.")}
    brings = [
        *(["modules"] if "modules" in environment else []),
        *(name for name in ("setup", "node_setup") if draft.setup.get(name)),
    ]
    lines = " ".join(given.value for name in ("setup", "node_setup") for given in draft.setup.get(name, ()))
    if not re.search(r"(^|\s)(source|\.|module)\s|PATH=", lines):
        brings = [name for name in brings if name == "modules"]
    if brings and not environment & {"conda", "venv", "python", "container"} and "binary" not in draft.values:
        draft.put("environment.python", ["python"], -1, f"the first on PATH after environment.{brings[-1]}")
    if draft.kind == "local" and draft.get("resources.nodes") not in (None, 1) and not draft.node:
        draft.not_taken(-1, "the machines are not in the script: resources.hosts, or start each with allranks node")
    if "name" not in draft.values and draft.kind not in ("local", "ssh", "pdsh"):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(draft.path).stem).strip("-._")[:64]
        draft.put("name", name or "job", -1, "the script's name")
    secrets = {given.line for given in draft.secrets.values()}
    kept = {given.line for lines in draft.setup.values() for given in lines}
    for finding in findings:
        if finding.rule.severity == "hint":
            continue
        at, code = finding.at, finding.rule.code
        is_gone = code.startswith(_GONE) and draft.line(at) not in kept
        if is_gone or (code == "AR901" and draft.line(at) in secrets):
            draft.changed(at, f"{code}: {finding.what}")
        elif not any(code in note.what for note in draft.notes):
            draft.not_taken(at, f"{code} is still there: {finding.what}; {finding.fix}")
