"""Secrets in scripts, and things that hurt others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from allranks.lint.model import Command, Word
from allranks.lint.reading import View
from allranks.lint.rules.base import Found, hint, likely

_SECRET = re.compile(r"(?:^|_)(?:API_?KEY|TOKEN|SECRET(?:_ACCESS)?(?:_KEY)?|PASSWORD|PASSWD|PAT)$")
#: Values that are not secrets: examples, switches, paths.
_EXAMPLE = re.compile(
    r"(?i)your|xxx|\*\*|<|>|\.\.\.|^/|^~|example|changeme|token$|key$|here|^(?:true|false|none|null|offline|dummy)$|[\[\]{}]"
)
_KNOWN = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}|glpat-[\w-]{20}"
)
_COMMON = re.compile(r"python|torchrun|train|accelerate|deepspeed|vllm|sglang|\.py\b|ray\b")


@likely(
    "AR901 secret-in-script",
    "{name} is in the script as text: everyone who can read the script has it",
    fix="read it from a file of mode 600, or from the environment",
    source="cwe.mitre.org/data/definitions/798.html",
)
def _secret(view: View) -> Iterator[Found]:
    for assignment in view.script.assignments:
        value = assignment.value or ""
        is_named = _SECRET.search(assignment.name.upper()) and len(value) >= 12 and not re.search(r"\s", value)
        if (is_named or _KNOWN.search(value)) and not _EXAMPLE.search(value):
            yield Found(assignment.at, {"name": assignment.name})


def _secret_words(command: Command) -> list[Word]:
    """Return the arguments of a command that may be secrets."""
    if command.name == "wandb" and command.first == "login":
        return [word for word in command.args[1:] if not word.shown.startswith("-")]
    pairs = itertools.pairwise(command.args)
    if command.name == "sshpass":
        attached = [word for word in command.args if re.match(r"-p.", word.prefix, re.DOTALL)]
        return attached + [after for word, after in pairs if word.value == "-p"]
    if command.name in ("huggingface-cli", "hf"):
        return [after for word, after in pairs if word.value == "--token"]
    values = ((word, word.value or "") for word in command.args)
    return [word for word, value in values if _KNOWN.fullmatch(value.partition("=")[2] or value)]


@likely(
    "AR902 secret-in-arguments",
    "a secret is an argument of {program}: all users of the machine see it in ps",
    fix="read it from a file of mode 600, or from the environment",
    source="cwe.mitre.org/data/definitions/214.html; proc(5)",
)
def _secret_argument(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        least = 3 if command.name == "sshpass" else 12
        for word in _secret_words(command) if not command.context.via else ():
            value = word.value or ""
            if len(value) >= least and not _EXAMPLE.search(value) and not any(word.variables):
                yield Found(word.at, {"program": command.name})


@likely(
    "AR903 kills-by-name",
    "{what} ends other jobs of this user on the node too",
    fix="keep the process id, and kill that: pid=$!",
    source="pkill(1)",
)
def _kills_by_name(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        text = command.text
        by_name = command.name in ("pkill", "killall") and (_COMMON.search(text) or re.search(r"-u\b", text))
        is_kill = command.name == "kill" or (command.name == "xargs" and "kill" in text)
        searches = is_kill and re.search(r"\bgrep\b", text) and _COMMON.search(text)
        if by_name:
            yield Found(command.at, {"what": f"{command.name} {text}"})
        elif searches or (_is_kill(command) and _pipeline_greps(view, command)):
            yield Found(command.at, {"what": "kill by a search for a name"})


def _is_kill(command: Command) -> bool:
    """Return whether a command kills the processes that it reads: ``xargs kill``, or ``awk '…kill…' | sh``."""
    if command.name == "awk":
        return "kill" in command.text and command.context.pipe[-1:] in (("sh",), ("bash",))
    return command.name == "xargs" and "kill" in command.values


def _pipeline_greps(view: View, command: Command) -> bool:
    line = view.script.text.line(view.place(command.at).line)
    greps = [other for other in view.script.named("grep", "pgrep") if command.name in other.context.pipe]
    return any(_COMMON.search(grep.text) for grep in greps) and command.name in line


@likely(
    "AR904 kills-all-on-the-gpu",
    "this kills every process that uses the GPUs, those of other users too",
    fix="keep the process id, and kill that: pid=$!",
    source="fuser(1)",
)
def _kills_all_on_gpu(view: View) -> Iterator[Found]:
    for command in view.script.named("fuser", "kill"):
        is_fuser = re.search(r"-\w*k", command.text) and "/dev/nvidia" in command.text
        if is_fuser if command.name == "fuser" else "nvidia-smi" in command.text:
            yield Found(command.at)
    lists = [command.at for command in view.script.named("nvidia-smi") if "xargs" in command.context.pipe]
    for command in view.script.named("xargs"):
        if "nvidia-smi" in command.text or ("kill" in command.values and any(at < command.at for at in lists)):
            yield Found(command.at)


def _install_commands(view: View) -> Iterator[Command]:
    for command in view.script.commands:
        is_installer = command.name in ("pip", "pip3", "conda", "mamba", "apt-get", "apt")
        installs = command.first == "install" if is_installer else command.values[:3] == ["-m", "pip", "install"]
        if installs and "-e" not in command.values:
            yield command


@hint(
    "AR905 installs-in-a-job",
    "{program} install in each job costs GPU time, and changes the environment of jobs that run",
    fix="install once, before the job",
    source="pip.pypa.io, conda.io",
)
def _installs(view: View) -> Iterator[Found]:
    for command in _install_commands(view) if view.script.kind != "plain" else ():
        if command.started_by("srun", "mpirun", "pdsh") is None:
            yield Found(command.at, {"program": command.name})
            return


@likely(
    "AR906 installs-on-each-task",
    "each task runs {program} install into the same environment at once",
    fix="install once, before the job",
    source="pip.pypa.io, conda.io",
)
def _installs_on_each(view: View) -> Iterator[Found]:
    alone = {launch.starter.at for launch in view.launches if launch.starter and launch.tasks == 1}
    for command in _install_commands(view):
        starter = command.started_by("srun", "mpirun", "mpiexec")
        if starter and starter.at not in alone:
            yield Found(command.at, {"program": command.name})
            return


@likely(
    "AR907 clears-shared-directory",
    "rm of {what} removes files of other jobs and users",
    fix="a directory of the job's own: mktemp -d",
    source="file-hierarchy(7)",
)
def _clears_shared(view: View) -> Iterator[Found]:
    for command in view.script.named("rm"):
        for word in command.args:
            if re.fullmatch(r"/(?:tmp|dev/shm|var/tmp|scratch)/?\*?", word.shown):
                yield Found(command.at, {"what": word.shown})


@likely(
    "AR908 removes-from-the-root",
    "where ${variable} is empty this removes everything from /",
    fix="${{{variable}:?}}",
    source="bash(1), Parameter Expansion",
)
def _removes_from_root(view: View) -> Iterator[Found]:
    for command in view.script.named("rm") if "nounset" not in view.script.shell_options else ():
        for word in command.args if re.search(r"-\w*r|--recursive", command.text) else ():
            first = word.first
            if first is None or first.kind != "variable" or first.value is not None or first.has_default:
                continue
            rest = "".join(part.text for part in word.parts[1:] if part.kind == "text")
            is_unset = first.text.isidentifier() and not view.script.sets(first.text)
            if is_unset and re.fullmatch(r"/\*?", rest):
                yield Found(word.at, {"variable": first.text})


@hint(
    "AR909 writable-for-all",
    "mode 777 lets every user of the machine change the files",
    fix="chmod g+rwX for the group",
    source="chmod(1)",
)
def _open_to_all(view: View) -> Iterator[Found]:
    for command in view.script.named("chmod"):
        if {"777", "0777", "a+rwx", "ugo+rwx"} & set(command.values):
            yield Found(command.at)


@hint(
    "AR910 asks-too-often",
    "{program} in a loop of a few seconds slows the scheduler down for all",
    fix="sleep 60, or a dependency: sbatch --dependency",
    source="slurm.schedmd.com/squeue.html, PERFORMANCE",
)
def _polls(view: View) -> Iterator[Found]:
    for command in view.script.named("squeue", "sacct", "qstat", "scontrol"):
        loops = command.context.loops
        if command.values[:2] == ["show", "hostnames"] or not loops or loops[-1].kind != "while":
            continue
        sleeps = [other for other in view.script.named("sleep") if other.context.loops[-1:] == loops[-1:]]
        waits = [other.args[0].number for other in sleeps if other.args]
        if not sleeps or any(wait is not None and wait < 10 for wait in waits):
            yield Found(command.at, {"program": command.name})


@hint(
    "AR911 code-changes-in-a-job",
    "{what} runs when the job starts: what it trains is not what was there when it was submitted",
    fix="submit from a directory of a fixed commit",
    source="git(1)",
)
def _changes_code(view: View) -> Iterator[Found]:
    for command in view.script.named("git") if view.script.kind != "plain" else ():
        if command.first in ("pull", "checkout", "reset"):
            yield Found(command.at, {"what": f"git {command.first}"})
            return


@likely(
    "AR912 submits-without-end",
    "{program} in a loop without a pause fills the queue",
    fix="an array: #SBATCH --array",
    source="slurm.schedmd.com/job_array.html",
)
def _many_jobs(view: View) -> Iterator[Found]:
    if view.script.kind != "plain" or any(view.script.named("sleep", "read")):
        return
    for command in view.script.named("sbatch", "qsub"):
        loops = command.context.loops
        if loops and loops[-1].kind == "while":
            yield Found(command.at, {"program": command.name})
