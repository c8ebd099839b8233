"""Why a script started no rank in the sandbox: the arguments, variables and files that it lacks there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from allranks.convert.draft import Draft, short
from allranks.convert.own_arguments import missing_arguments
from allranks.convert.recorder.common import NO_FILE
from allranks.job.problems import listed
from allranks.job.variables import SHELL_NAMES

#: Variables of schedulers, of allranks and of the sandbox.
OF_SCHEDULERS = re.compile(
    r"(SLURM|SRUN|SBATCH|PBS|OMPI|PMI|PMIX|SGE|ALLRANKS|_ALLRANKS|_RECORDER|BASH_FUNC)_?.*|PE_HOSTFILE"
)
#: Those that a shell sets or most terminals have, and those of ranks, which only a launcher sets.
_NOT_MISSING = {
    *SHELL_NAMES,
    *("BASH", "BASH_ARGV", "BASH_REMATCH", "BASH_SOURCE", "BASH_VERSION", "COLUMNS", "DISPLAY", "HOST", "HOSTNAME"),
    *("HOSTTYPE", "IFS", "LINES", "MACHTYPE", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "PIPESTATUS", "PS1"),
    *("PS4", "PWD", "REPLY", "SHELL", "SHLVL", "TERM", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "JOB_ID", "NHOSTS", "NSLOTS"),
}
_OF_MPI = ("OMPI_", "PMI_", "PMIX_")
_NO_FILE = re.compile(rf"^.*?: {NO_FILE} (.+)$", re.MULTILINE)
_SYNTAX = re.compile(r": (line \d+: syntax error.*)")


def missing_variables(draft: Draft, base: Mapping[str, str]) -> list[str]:
    """Return the variables that a script reads without a default, and that neither it nor its environment sets."""
    script = draft.view.script
    set_here = {each.variable for command in script.commands for each in command.context.loops}
    set_here |= {word for each in script.named("read", "mapfile", "readarray", "getopts") for word in each.values}
    set_here |= {*base, *_NOT_MISSING}
    found: dict[str, None] = {}
    chosen: set[str] = set()  # The script looks whether they are set.
    for use in sorted(script.uses, key=lambda use: use.at):
        name = use.name.partition("[")[0]
        if use.has_default and not re.match(rb"\$\{\w+:?\?", script.text.data[use.at :]):
            chosen.add(name)
        is_set = script.sets(name) or name in set_here or name.startswith(_OF_MPI)
        if re.fullmatch(r"[A-Za-z_]\w*", name) and not is_set:
            found[name] = None
    found = {name: None for name in found if name not in chosen}
    return sorted(found, key=lambda name: bool(OF_SCHEDULERS.fullmatch(name)))


def why_none(
    draft: Draft, base: Mapping[str, str], said: str, lacking: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return why a script started no rank, and what to do about it; empty if nothing says so.

    Args:
        draft: what the script was read as.
        base: the variables that it started with.
        said: what it printed last.
        lacking: scripts that it runs, and that are not here.
        records: of all that it started.
    """
    path, last = shlex.quote(draft.path), last_line(said)
    if file := next((each for each in _NO_FILE.findall(said) if not PurePath(each).name.startswith("-")), None):
        return f"the script needs the file {file}, which is not here", f"put it there, and convert {path} again"
    if found := _SYNTAX.search(said):
        return f"bash cannot read the script: {found[1]}", f"bash -n {path} shows more"
    if missing := unmet_arguments(draft):
        return f"the script starts no rank without its arguments {listed(missing, 'and')}", ""
    unread = (note.what for note in draft.notes if note.kind == "not taken over" and "was not read" in note.what)
    if config := next((what.partition(":")[0] for what in unread), None):
        return f"the script needs the file of {config}, which is not here", f"put it there, and convert {path} again"
    if lacking:
        return f"the script runs {lacking[0]}, which is not here", f"put it there, and convert {path} again"
    programs = {program.value for launch in draft.view.launches if (program := launch.program) and program.value}
    if starter := next((each["path"] for each in records if programs & {*each["args"]}), None):
        return f"the sandbox does not play {starter}, which starts the training", ""
    started = next((each["path"] for each in reversed(records) if each["kind"] != "binary"), None)
    if started and any("under a condition" in note.what for note in draft.notes):
        return f"here the script starts {started}, and not the training, which is under a condition", ""
    cause = "the script ended before its training" + (f": its last output is {short(last, 120)}" if last else "")
    names = missing_variables(draft, base)
    unbound = re.findall(r": line \d+: (\w+): unbound variable$", last)
    names = unbound or [name for name in names if re.search(rf"\b{name}\b", last)] or names
    if not names:
        return cause, ""
    shown, more = listed(names[:4], "and"), f", and {len(names) - 4} others" if names[4:] else ""
    verb = "is" if len(names) == 1 else "are"
    typed = " ".join(f"{name}=VALUE" for name in names[:4] if not OF_SCHEDULERS.fullmatch(name))
    return (
        f"{cause}; it reads {shown}{more}, which {verb} set neither in it nor here",
        typed and f"{typed} allranks convert {path} --verify",
    )


def why_differs(draft: Draft, base: Mapping[str, str]) -> str:
    """Return what a script was run without, so that it may have started something else; empty if it lacked nothing."""
    if missing := unmet_arguments(draft):
        return f"the script was run without its arguments {listed(missing, 'and')}"
    names = [name for name in missing_variables(draft, base) if OF_SCHEDULERS.fullmatch(name)]
    if names and draft.kind not in ("slurm", "pbs", "grid_engine"):
        return f"the script reads {listed(names[:4], 'and')}, which only jobs of a scheduler have, and is none"
    return ""


def why_no_job(said: str) -> str:
    """Return why a job started no rank, though its script did; empty if nothing says so."""
    found = re.match(r"allranks: (.+) failed with exit code (\d+) \(", last_line(said))
    if not found:
        return ""
    return f"a line of the set-up fails in the sandbox, and the script went on: {found[1]} (exit code {found[2]})"


def last_line(text: str) -> str:
    """Return the last line that a script printed; of what ``set -x`` shows none, if there is another."""
    lines = text.split("\n")
    return next((line for line in reversed(lines) if not line.startswith("+ ")), lines[-1])


def unmet_arguments(draft: Draft) -> list[str]:
    """Return the arguments that a script is run without, though it reads them; not the rank of its node."""
    missing = missing_arguments(draft.view.script, draft.arguments)
    return [] if f"${draft.node_rank}" in missing else missing
