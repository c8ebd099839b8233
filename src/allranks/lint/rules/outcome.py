"""Exit codes that are lost, background work that is not waited for, signals and requeueing that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import Command
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, SBATCH, TORCHRUN, Found, fatal, hint, likely, top_commands
from allranks.lint.syntax import read_call

_SCONTROL = "slurm.schedmd.com/scontrol.html, requeue"


@likely(
    "AR701 exit-code-of-the-pipe",
    "the exit code is that of {reader}: a training that failed counts as done",
    fix="set -o pipefail at the top",
    source=f"{BASH}, Pipelines",
)
def _tee(view: View) -> Iterator[Found]:
    script = view.script
    if "pipefail" in script.shell_options or any(use.name == "PIPESTATUS" for use in script.uses):
        return
    levels = {command.context.level for command in script.named("set") if "pipefail" in command.values}
    for launch in view.launches:
        root = launch.command.root
        inner = launch.command.context.level in levels
        pipe = launch.command.context.pipe or root.context.pipe
        if pipe and not inner and pipe[-1] in ("tee", "ts", "sed", "grep", "cat", "awk"):
            yield Found(root.at, {"reader": pipe[-1]})


def _roots(view: View) -> list[Command]:
    """Return the commands of the script's shell that start ranks, each once."""
    found: dict[int, Command] = {}
    for launch in view.launches:
        found.setdefault(launch.command.root.at, launch.command.root)
    return list(found.values())


def _waits(view: View) -> list[Command]:
    return [command for command in view.script.commands if command.name in ("wait", "fg") and not command.context.via]


@fatal(
    "AR702 background-not-awaited",
    "the script ends while the training runs in the background: the scheduler then ends the job, and kills it",
    fix="wait at the end, or leave & out",
    source=f"{SBATCH}, description",
)
def _not_awaited(view: View) -> Iterator[Found]:
    if view.script.kind == "plain":
        return
    waits = _waits(view)
    for root in _roots(view):
        if not root.context.is_background or root.context.function or any(wait.order > root.order for wait in waits):
            continue
        after = [command for command in top_commands(view) if command.order > root.order]
        if not any(
            command.name in ("tail", "sleep", "srun", "while", "python", "python3", "torchrun", "trap")
            or not command.name
            for command in after
        ):
            yield Found(root.at)


@hint(
    "AR703 wait-hides-failures",
    "wait without a process id exits with 0, however the processes ended",
    fix="wait for each: for pid in $pids; do wait $pid || failed=1; done; exit $failed",
    source=f"{BASH}, wait",
)
def _wait_hides(view: View) -> Iterator[Found]:
    background = [root for root in _roots(view) if root.context.is_background]
    for wait in _waits(view):
        last = top_commands(view)[-1:] == [wait]
        if background and not wait.args and last and any(root.order < wait.order for root in background):
            yield Found(wait.at)


@hint(
    "AR704 exit-code-hidden",
    "the job's exit code is that of {last}, the last command: a training that failed counts as done",
    fix="set -e at the top, or exit with the training's code",
    source=f"{BASH}, EXIT STATUS",
)
def _hidden_code(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind == "plain" or "errexit" in script.shell_options or any(script.named("exit")):
        return
    top = top_commands(view)
    roots = [root for root in _roots(view) if not root.context.is_background and not root.context.function]
    if not roots or not top:
        return
    last, final = roots[-1], top[-1]
    tail = [command for command in top if command.order > last.order and not command.context.is_condition]
    if (
        tail
        and final.order > last.order
        and all(command.name in ("echo", "date", "printf", "deactivate") for command in tail)
        and not last.context.chain
    ):
        yield Found(last.at, {"last": final.name})


@hint(
    "AR705 failure-ignored",
    "|| true has a training that failed count as done",
    fix="leave it out",
    source=f"{BASH}, Lists",
)
def _ignored(view: View) -> Iterator[Found]:
    for launch in view.launches:
        root = launch.command.root
        if root.context.chain != "||":
            continue
        after = next(
            (command for command in view.script.commands if command.order > root.order and command.at > root.end), None
        )
        if after is not None and after.name in ("true", ":"):
            yield Found(root.at)


def _signals(view: View) -> Iterator[tuple[str, bool, int]]:
    """Yield the signals that Slurm is asked to send: name, whether to the batch shell alone, and where."""
    if view.script.kind != "slurm":
        return
    for directive in view.script.options("signal"):
        match = re.fullmatch(r"(?:([BR]+):)?(?:SIG)?(\w+)(?:@\d+)?", directive.value)
        if match:
            yield _name(match[2]), "B" in (match[1] or ""), directive.at


def _name(text: str) -> str:
    numbers = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
    return numbers.get(text, text.upper().removeprefix("SIG"))


def _traps(view: View) -> dict[str, Command]:
    """Return the traps of the batch shell, by signal."""
    found = {}
    for command in view.script.named("trap"):
        if not command.context.via:
            for word in command.args[1:]:
                found[_name(word.shown)] = command
    return found


def _handles(view: View) -> bool:
    """Return whether the script hands over to a program that may handle signals itself."""
    return any(command.name == "exec" for command in view.script.commands if command.context.level == 0)


@fatal(
    "AR706 trap-runs-too-late",
    "bash runs the trap of {signal} after the command in the foreground: after the training, or never",
    fix="start it with &, then wait",
    source=f"{BASH}, SIGNALS; {SBATCH} --signal",
)
def _trap_waits(view: View) -> Iterator[Found]:
    traps = _traps(view)
    for signal, to_batch, _at in _signals(view):
        if not to_batch or signal not in traps:
            continue
        roots = [root for root in _roots(view) if not root.context.function]
        if roots and not any(root.context.is_background for root in roots):
            yield Found(roots[-1].at, {"signal": signal})


@fatal(
    "AR707 signal-kills-the-script",
    "{signal} goes to the batch shell, which has no trap for it, and dies",
    fix="trap 'handler' {signal}, and the training in the background with wait; or --signal without B:",
    source=f"{SBATCH} --signal",
)
def _no_trap(view: View) -> Iterator[Found]:
    traps = _traps(view)
    for signal, to_batch, at in _signals(view):
        if to_batch and signal not in traps and not _handles(view) and not any(view.script.named("source", ".")):
            yield Found(at, {"signal": signal})


@fatal(
    "AR708 trap-is-never-reached",
    "--signal without B: sends {signal} to the steps only: this trap never runs",
    fix="--signal=B:{signal}@SECONDS",
    source=f"{SBATCH} --signal",
)
def _trap_unheard(view: View) -> Iterator[Found]:
    traps = _traps(view)
    for signal, to_batch, _ in _signals(view):
        if not to_batch and signal in traps and signal.startswith("USR"):
            yield Found(traps[signal].at, {"signal": signal})


@likely(
    "AR709 torchrun-dies-of-the-signal",
    "torchrun does not forward {signal} to its ranks: it dies of it",
    fix="torchrun --signals-to-handle {signal},SIGTERM,SIGINT, or --signal=B:{signal}@… and a trap",
    source=f"{TORCHRUN} --signals-to-handle",
)
def _agent_dies(view: View) -> Iterator[Found]:
    for signal, to_batch, at in _signals(view):
        launches = [launch for launch in view.launches if launch.starter is not None and launch.starter.name == "srun"]
        torch = [launch for launch in launches if launch.is_torch and launch.call]
        if to_batch or not signal.startswith("USR") or not torch:
            continue
        if not any(launch.call and launch.call.get("--signals-to-handle") for launch in torch):
            yield Found(at, {"signal": signal})


@fatal(
    "AR710 exec-drops-the-trap",
    "exec replaces the shell: its trap never runs",
    fix="leave exec out",
    source=f"{BASH}, exec",
)
def _exec_after_trap(view: View) -> Iterator[Found]:
    traps = _traps(view)
    # A trap of ERR, DEBUG or RETURN is for what the shell does before; others may be resets, or set to be ignored.
    late = [command for name, command in traps.items() if name not in ("ERR", "DEBUG", "RETURN")]
    own = [command for command in late if command.args and command.args[0].value not in ("", "-", ":", None)]
    for command in view.script.named("exec"):
        context = command.context
        is_own = context.level == 0 and not context.via and not context.is_background and not context.chain
        starts = bool(command.args) and command.args[0].prefix[:1].isalpha() and not context.is_conditional
        if is_own and starts and own and own[0].order < command.order:
            yield Found(command.at)


def _requeues(view: View) -> list[Command]:
    return [command for command in view.script.named("scontrol") if command.values[:1] == ["requeue"]]


@hint(
    "AR711 log-lost-by-requeue",
    "a requeued job starts its log again, where the site does not append: the cause is lost",
    fix="#SBATCH --open-mode=append",
    source=f"{SBATCH} --open-mode",
)
def _log_overwritten(view: View) -> Iterator[Found]:
    script = view.script
    requeues = script.options("requeue")
    if script.kind != "slurm" or not (requeues or _requeues(view)) or script.option("open-mode") == "append":
        return
    at = requeues[0].at if requeues else _requeues(view)[0].at
    yield Found(at)


@likely(
    "AR712 requeue-of-an-array",
    "of one task of an array this may requeue all of them",
    fix="scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}",
    source=_SCONTROL,
)
def _requeue_of_array(view: View) -> Iterator[Found]:
    if not view.script.options("array"):
        return
    for command in _requeues(view):
        target = command.args[1] if len(command.args) > 1 else None
        if target and target.names("SLURM_JOB_ID", "SLURM_JOBID") and not target.names("SLURM_ARRAY_TASK_ID"):
            yield Found(command.at)


@fatal(
    "AR713 requeue-forbidden",
    "--no-requeue forbids what scontrol requeue asks for below",
    fix="--requeue",
    source=f"{SBATCH} --no-requeue",
)
def _requeue_forbidden(view: View) -> Iterator[Found]:
    for directive in view.script.options("no-requeue"):
        if _requeues(view):
            yield Found(directive.at)


@hint(
    "AR714 ranks-outlive-a-failure",
    "when a task fails, those of other nodes go on waiting for it",
    fix="srun --kill-on-bad-exit=1",
    source="slurm.schedmd.com/srun.html --kill-on-bad-exit",
)
def _others_hang(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes or 1
    for launch in view.launches:
        if launch.call is not None or launch.starter is None or launch.starter.name != "srun" or nodes < 2:
            continue
        call = read_call(launch.starter)
        if call and not call.get("--kill-on-bad-exit", "--wait") and not view.script.sets("SLURM_KILL_BAD_EXIT"):
            yield Found(launch.starter.at)
            return


@likely(
    "AR715 job-that-sleeps",
    "sleep {value} keeps the nodes after the work is done, or failed",
    fix="leave it out; salloc or qsub -I for interactive work",
    source=SBATCH,
)
def _endless(view: View) -> Iterator[Found]:
    if view.script.kind == "plain":
        return
    for command in view.script.named("sleep"):
        value = command.args[0].value if command.args else ""
        is_long = value in ("infinity", "inf") or bool(re.fullmatch(r"\d{6,}|\d+d", value or ""))
        if is_long and not command.context.is_background and not command.context.via:
            yield Found(command.at, {"value": value})


@hint(
    "AR716 restarts-without-c10d",
    "with static rendezvous a node does not learn that another one restarts its ranks",
    fix="--rdzv-backend c10d",
    source="torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py of torch 2.13",
)
def _restarts_alone(view: View) -> Iterator[Found]:
    for launch in _with_restarts(view):
        given = launch.call.get("--max-restarts") if launch.call else None
        if given and launch.is_static and launch.nnodes is not None and launch.nnodes > 1:
            yield Found(given.word.at)


def _with_restarts(view: View) -> list[Launch]:
    return [
        launch
        for launch in view.launches
        if launch.is_torch and (launch.call.number("--max-restarts") if launch.call else 0)
    ]


@likely(
    "AR717 killed-without-warning",
    "SIGKILL ends the launcher alone: its ranks go on, and hold the GPUs",
    fix="timeout -s TERM -k 60 …",
    source="timeout(1), signal(7)",
)
def _kill_nine(view: View) -> Iterator[Found]:
    for command in view.script.named("timeout"):
        call = read_call(command)
        signal = call.value("-s", "--signal") if call else None
        if (
            signal
            and _name(signal) in ("KILL", "9")
            and any(launch.command.started_by("timeout") for launch in view.launches)
        ):
            yield Found(command.at)
