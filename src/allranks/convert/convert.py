"""From a launch script to the draft of a job file."""

from __future__ import annotations

import re
from pathlib import PurePath

from allranks.convert.directives import take_directives
from allranks.convert.draft import Draft
from allranks.convert.launchers import main_launch, take_launch
from allranks.convert.statements import Statements
from allranks.errors import UsageError
from allranks.lint.engine import Finding, lint, why_not_read
from allranks.lint.launches import Launch
from allranks.lint.model import Directive
from allranks.lint.reading import View, read_scripts
from allranks.lint.syntax import read_call

#: Families of rules whose faults a job file does not have: processes, rendezvous, directives, remote shells, outcomes.
_GONE = ("AR1", "AR3", "AR4", "AR6", "AR7", "AR80", "AR81", "AR211", "AR213", "AR214", "AR216")


def drafts_of(path: str, data: bytes) -> list[Draft]:
    """Return a draft for each script in a file that starts a training: itself, and those that it writes and submits.

    Raises:
        UsageError: the file cannot be read as a script, or starts no training.
    """
    if reason := why_not_read(data):
        raise UsageError(f"cannot convert {path}", why=f"it is {reason}", fix="allranks convert train.sbatch")
    data = data.replace(b"\r\n", b"\n")
    views = read_scripts(path, data)
    if views[0].script.broken:
        line = views[0].place(views[0].script.broken[0]).line
        raise UsageError(
            f"cannot convert {path}",
            why=f"{path}:{line}: the shell cannot parse this",
            fix=f"bash -n {path} shows more",
        )
    findings = lint(path, data)
    found = [draft for view in views if (draft := _draft(path, view, findings))]
    if not found:
        names = [word.shown for each in views[0].script.named("sbatch", "qsub") for word in each.args[-1:]]
        why = (
            f"it submits {', '.join(names)}" if names else "no torchrun, accelerate, deepspeed, srun python or the like"
        )
        raise UsageError(
            f"{path} starts no training",
            why=why,
            fix=f"allranks convert {names[0]}" if names else "name the script that starts the ranks",
        )
    return found


def _draft(path: str, view: View, findings: list[Finding]) -> Draft | None:
    _adopt_step(view)
    script = view.script
    group, others = main_launch([*view.launches, *_lightning(view)])
    if not group:
        return None
    draft = Draft(view, path, "local" if script.kind == "plain" else script.kind)
    codes: dict[int, set[str]] = {}
    for finding in findings:
        codes.setdefault(finding.place.line, set()).add(finding.rule.code)
    take_directives(draft)
    lines = {draft.line(at) for launch in group for at in (launch.command.at, launch.command.root.at)}
    take_launch(draft, group, {code for line in lines for code in codes.get(line, ())})
    for launch in others:
        shown = " ".join(word.shown for word in launch.command.words)
        draft.note("not taken over", launch.command.at, f"another training: {shown}")
    Statements(draft, group, codes).take()
    _finish(draft, findings)
    return draft


def _adopt_step(view: View) -> None:
    """Take the options of an ``srun`` outside of a job for directives: it makes a job of its own."""
    script = view.script
    starter = next((each for each in script.named("srun")), None)
    call = read_call(starter) if starter and script.kind == "plain" else None
    if call is None or not call.get("--partition", "--account", "--gres", "--gpus-per-node", "--gpus", "--time"):
        return
    script.kind = "slurm"
    for given in call.given:
        value = given.value.value if given.value else ""
        if value is not None and given.name != "--pty":
            script.directives.append(
                Directive("slurm", given.name[2:], value, given.word.at, given.word.at, is_read=True)
            )


def _lightning(view: View) -> list[Launch]:
    """Return the calls of ``fabric run`` and ``lightning run model``, as if each were Python with the script."""
    found = []
    for command in view.script.named("fabric", "lightning"):
        at = next((i for i, word in enumerate(command.words) if word.shown.endswith(".py")), None)
        if at is not None and not command.context.is_substitution:
            options = [word.shown for word in command.words[:at]]
            devices = next((re.sub(r"\D", "", b or a) for a, b in zip(options, [*options[1:], ""], strict=True)
                            if a.startswith("--devices")), "")  # fmt: skip
            word = command.words[at]
            python = type(command)(
                (word, *command.words[at:]), command.sets, command.at, command.end, command.order, command.context
            )
            found.append(Launch(python, None, None, None, command, None, int(devices) if devices else None))
    return found


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
    if "name" not in draft.values and draft.kind not in ("local", "ssh", "pdsh"):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(draft.path).stem).strip("-._")[:64]
        draft.put("name", name or "job", -1, "the script's name")
    kept = {given.line for lines in draft.setup.values() for given in lines}
    for finding in findings:
        if finding.rule.severity == "hint":
            continue
        at, code = _offset(draft, finding), finding.rule.code
        if code.startswith(_GONE) and finding.place.line not in kept:
            draft.note("changed", at, f"{code}: {finding.what}")
        elif not any(code in note.what for note in draft.notes):
            draft.note("not taken over", at, f"{code} is still there: {finding.what}; {finding.fix}")


def _offset(draft: Draft, finding: Finding) -> int:
    lines = draft.view.script.text.data.split(b"\n")[: finding.place.line - 1]
    return sum(len(line) + 1 for line in lines)
