"""Exit codes that are lost, background work that is not waited for, signals and requeueing that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.model import REMOTE, Command, Loop, Part
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, SBATCH, TORCHRUN, Found, fatal, hint, likely
from allranks.lint.syntax import read_call

_SCONTROL = "slurm.schedmd.com/scontrol.html, requeue"
#: Programs with which a script goes on beside what it has started in the background; the name may be unknown.
_GOES_ON = ("tail", "sleep", "srun", "while", "python", "python3", "torchrun", "trap", "")
#: Names of shell scripts that start a training.
_OF_TRAINING = re.compile(r"(?:torchrun|train|tun(?:e|ing)|launch|dist)\w*\.sh$", re.IGNORECASE)
#: Programs that run until they are killed, with the words after them that make them so.
_SERVERS = re.compile(
    r"tensorboard|jupyter|jupyter-(?:lab|notebook)|mlflow (?:ui|server)|redis-server|visdom|gpustat .*-(?:i|-watch)"
    r"|code-server|vllm serve"
    r"|ray start .*--block|tail .*-[fF]|watch|nvtop|nvidia-smi (?:.*(?:-lm?s?\b|--loop)|[dp]mon|daemon)"
    r"|python\S* -m (?:http\.server|visdom|vllm\.entrypoints|sglang\.launch_server|tensorboard)"
)


@likely(
    "AR701 exit-code-of-the-pipe",
    "the exit code is that of {reader}: a training that failed counts as done",
    fix="set -o pipefail at the top",
    source=f"{BASH}, Pipelines",
)
def _tee(view: View) -> Iterator[Found]:
    script = view.script
    if "pipefail" in script.shell_options or "PIPESTATUS" in script.used:
        return
    levels = {command.context.level for command in script.named("set") if "pipefail" in command.values}
    scripts = [each for each in script.named("bash", "sh") if _OF_TRAINING.search(each.first)]
    for command in [*(launch.command for launch in view.launches), *scripts]:
        context, root = command.context, command.root
        reader = (context.pipe or root.context.pipe or ("",))[-1]
        is_reader = reader in ("tee", "ts", "sed", "grep", "cat", "awk")
        if is_reader and context.level not in levels and _is_code_read(view, command):
            yield Found(root.at, {"reader": reader})


def _is_code_read(view: View, command: Command) -> bool:
    """Return whether the exit code of a pipeline counts for anything: else ``pipefail`` would change nothing."""
    context, root = command.context, command.root
    is_inner = bool(context.function or (context.level and root.name != "eval"))
    if is_inner or "errexit" in view.script.shell_options or "?" in view.script.used:
        return True
    after = [each for each in view.top_commands if each.order > root.order]
    return bool(root.context.chain) or len(after) <= len(root.context.pipe)


def _roots(view: View) -> list[Command]:
    """Return the commands of the script's shell that start ranks, each once."""
    return list({launch.command.root.at: launch.command.root for launch in view.launches}.values())


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
    # A step of which only its script is known, which is not here.
    steps = [] if view.launches else [command for command in view.top_commands[-1:] if command.name == "srun"]
    for root in [*_roots(view), *steps]:
        if not root.context.is_background or root.context.function:
            continue
        later = [command for command in view.top_commands if command.order > root.order]
        is_awaited = any(wait.order > root.order for wait in _waits(view))
        if not is_awaited and not any(command.name in _GOES_ON for command in later):
            yield Found(root.at)


@hint(
    "AR703 wait-hides-failures",
    "wait without a process id exits with 0, however the processes ended",
    fix="wait for each: for pid in $pids; do wait $pid || failed=1; done; exit $failed",
    source=f"{BASH}, wait",
)
def _wait_hides(view: View) -> Iterator[Found]:
    last = view.top_commands[-1:]
    for wait in _waits(view):
        is_after = any(root.context.is_background and root.order < wait.order for root in _roots(view))
        if is_after and not wait.args and last == [wait]:
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
    roots = [root for root in _roots(view) if not root.context.is_background and not root.context.function]
    if not roots or roots[-1].context.chain:
        return
    later = [command for command in view.top_commands if command.order > roots[-1].order]
    counted = [command.name for command in later if not command.context.is_condition]
    if counted and all(name in ("echo", "date", "printf", "deactivate") for name in counted):
        yield Found(roots[-1].at, {"last": later[-1].name})


@hint(
    "AR705 failure-ignored",
    "|| true has a training that failed count as done",
    fix="leave it out",
    source=f"{BASH}, Lists",
)
def _ignored(view: View) -> Iterator[Found]:
    for root in _roots(view):
        later = (command for command in view.script.commands if command.order > root.order and command.at > root.end)
        after = next(later, None)
        if root.context.chain == "||" and after is not None and after.name in ("true", ":"):
            yield Found(root.at)


def _signals(view: View) -> Iterator[tuple[str, bool, int]]:
    """Yield the signals that Slurm is asked to send: name, whether to the batch shell alone, and where."""
    for directive in view.script.options("signal") if view.script.kind == "slurm" else ():
        if match := re.fullmatch(r"(?:([BR]+):)?(?:SIG)?(\w+)(?:@\d+)?", directive.value):
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


@fatal(
    "AR706 trap-runs-too-late",
    "bash runs the trap of {signal} after the command in the foreground: after the training, or never",
    fix="start it with &, then wait",
    source=f"{BASH}, SIGNALS; {SBATCH} --signal",
)
def _trap_waits(view: View) -> Iterator[Found]:
    roots = [root for root in _roots(view) if not root.context.function]
    if not roots or any(root.context.is_background for root in roots):
        return
    for signal, to_batch, _ in _signals(view):
        if to_batch and signal in _traps(view):
            yield Found(roots[-1].at, {"signal": signal})


@fatal(
    "AR707 signal-kills-the-script",
    "{signal} goes to the batch shell, which has no trap for it, and dies",
    fix="trap 'handler' {signal}, and the training in the background with wait; or --signal without B:",
    source=f"{SBATCH} --signal",
)
def _no_trap(view: View) -> Iterator[Found]:
    # A program that the shell becomes, or another script, may handle signals itself.
    becomes = any(command.context.level == 0 for command in view.script.named("exec"))
    if becomes or view.runs_more:
        return
    for signal, to_batch, at in _signals(view):
        if to_batch and signal not in _traps(view):
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
    agents = [launch for launch in view.started_by("srun") if launch.is_torch]
    if not agents or any(launch.call.get("--signals-to-handle") for launch in agents):
        return
    for signal, to_batch, at in _signals(view):
        if not to_batch and signal.startswith("USR"):
            yield Found(at, {"signal": signal})


@likely(
    "AR719 signal-reaches-nothing",
    "--signal without B: sends {signal} to the steps of srun only, and this script starts none: nothing gets it",
    fix="start the training with srun; or --signal=B:{signal}@SECONDS with a trap, and the training in the background",
    source=f"{SBATCH} --signal",
)
def _no_step(view: View) -> Iterator[Found]:
    # Files that are not here may start steps; mpirun does on other nodes.
    starts_steps = any(view.script.named(*REMOTE, "sbatch")) or any(launch.starter for launch in view.launches)
    if not view.launches or starts_steps or view.runs_more:
        return
    for signal, to_batch, at in _signals(view):
        if not to_batch:
            yield Found(at, {"signal": signal})


@fatal(
    "AR710 exec-drops-the-trap",
    "exec replaces the shell: its trap never runs",
    fix="leave exec out",
    source=f"{BASH}, exec",
)
def _exec_after_trap(view: View) -> Iterator[Found]:
    # A trap of ERR, DEBUG or RETURN is for what the shell does before; others may be resets, or set to be ignored.
    late = [command for name, command in _traps(view).items() if name not in ("ERR", "DEBUG", "RETURN")]
    own = [command for command in late if command.args[0].value not in ("", "-", ":", None)]
    for command in view.script.named("exec"):
        context = command.context
        is_own = not (context.level or context.via or context.is_background or context.chain or context.is_conditional)
        if is_own and command.first[:1].isalpha() and own and own[0].order < command.order:
            yield Found(command.at)


def _requeues(view: View) -> list[Command]:
    return [command for command in view.script.named("scontrol") if command.first == "requeue"]


@hint(
    "AR711 log-lost-by-requeue",
    "a requeued job starts its log again, where the site does not append: the cause is lost",
    fix="#SBATCH --open-mode=append",
    source=f"{SBATCH} --open-mode",
)
def _log_overwritten(view: View) -> Iterator[Found]:
    script = view.script
    requeues = [*(directive.at for directive in script.options("requeue")), *(each.at for each in _requeues(view))]
    if script.kind == "slurm" and requeues and script.option("open-mode") != "append":
        yield Found(requeues[0])


@likely(
    "AR712 requeue-of-an-array",
    "of one task of an array this may requeue all of them",
    fix="scontrol requeue ${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}",
    source=_SCONTROL,
)
def _requeue_of_array(view: View) -> Iterator[Found]:
    for command in _requeues(view) if view.script.options("array") else ():
        for target in command.args[1:2]:
            if target.names("SLURM_JOB_ID", "SLURM_JOBID") and not target.names("SLURM_ARRAY_TASK_ID"):
                yield Found(command.at)


@fatal(
    "AR713 requeue-forbidden",
    "--no-requeue forbids what scontrol requeue asks for below",
    fix="--requeue",
    source=f"{SBATCH} --no-requeue",
)
def _requeue_forbidden(view: View) -> Iterator[Found]:
    for directive in view.script.options("no-requeue") if _requeues(view) else ():
        yield Found(directive.at)


@hint(
    "AR714 ranks-outlive-a-failure",
    "when a task fails, those of other nodes go on waiting for it",
    fix="srun --kill-on-bad-exit=1",
    source="slurm.schedmd.com/srun.html --kill-on-bad-exit",
)
def _others_hang(view: View) -> Iterator[Found]:
    if not view.has_many_nodes or view.script.sets("SLURM_KILL_BAD_EXIT"):
        return
    for launch in view.started_by("srun"):
        if launch.starter and launch.is_python and not read_call(launch.starter).get("--kill-on-bad-exit", "--wait"):
            yield Found(launch.starter.at)
            return


@likely(
    "AR715 job-that-sleeps",
    "sleep {value} keeps the nodes after the work is done, or failed",
    fix="leave it out; salloc or qsub -I for interactive work",
    source=SBATCH,
)
def _sleeps(view: View) -> Iterator[Found]:
    last = view.top_commands[-1].order if view.top_commands else 0
    has_server = any(_SERVERS.match(f"{command.name} {command.text}") for command in view.script.commands)
    for command in view.script.named("sleep") if view.script.kind != "plain" and not has_server else ():
        value = command.args[0].value if command.args else None
        is_waiting = not command.context.is_background and not command.context.via
        is_last = command.order == last and bool(view.launches) and re.fullmatch(r"[3-9]\d\d|\d{4,5}|\d+h", value or "")
        if is_waiting and (is_last or re.fullmatch(r"inf(?:inity)?|\d{6,}|\d+d", value or "")):
            yield Found(command.at, {"value": value})


@hint(
    "AR716 restarts-without-c10d",
    "with static rendezvous a node does not learn that another one restarts its ranks",
    fix="--rdzv-backend c10d",
    source="torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py of torch 2.13",
)
def _restarts_alone(view: View) -> Iterator[Found]:
    for launch, given in view.torchrun_given("--max-restarts"):
        if given.value.number and launch.is_static and launch.has_many_nodes:
            yield Found(given.at)


@likely(
    "AR717 killed-without-warning",
    "SIGKILL ends the launcher alone: its ranks go on, and hold the GPUs",
    fix="timeout -s TERM -k 60 …",
    source="timeout(1), signal(7)",
)
def _kill_nine(view: View) -> Iterator[Found]:
    if not any(launch.command.started_by("timeout") for launch in view.launches):
        return
    for command, call in view.calls("timeout"):
        if _name(call.value("-s", "--signal") or "") in ("KILL", "9"):
            yield Found(command.at)


def _goes_on(view: View, command: Command) -> bool:
    """Return whether the script goes on beside a command, or beside the function that it is in."""
    calls = view.script.named(command.context.function) if command.context.function else ()
    return any(each.root.context.is_background for each in (command, *calls))


def _endless(view: View) -> Iterator[tuple[Command, str]]:
    """Yield what runs in the background until it is killed: a server, or a loop, by its first command."""
    inside: dict[Loop, list[Command]] = {}
    for command in view.script.commands:
        for loop in command.context.loops:
            inside.setdefault(loop, []).append(command)
    true = {command.at for command in view.script.named("true", ":") if command.context.is_condition}
    for loop, commands in inside.items():
        is_left = any(command.name in ("break", "exit", "return") for command in commands)
        background = commands[0].context.background
        if loop.at + len("while ") in true and not is_left and (background is None or background <= loop.at):
            yield commands[0], "the loop"
    for command in view.script.commands:
        if not command.started_by("timeout") and _SERVERS.match(f"{command.name} {command.text}"):
            yield command, command.name


@likely(
    "AR718 waits-for-a-server",
    "wait without a process id waits for {server} too, which never ends: the job stays until its time limit",
    fix="wait for the training alone, pid=$! after it and wait $pid; or kill {server} before",
    source=f"{BASH}, wait",
)
def _waits_for_server(view: View) -> Iterator[Found]:
    servers = [(command, name) for command, name in _endless(view) if _goes_on(view, command)]
    alone = {id(command) for command, _ in servers}
    if view.script.kind == "plain" or all(id(launch.command) in alone for launch in view.launches):
        return
    called = {command.name for command in view.script.commands if not command.context.via} | {""}
    ends = [
        each
        for each in view.script.named("kill", "pkill", "killall", "ray")
        if each.name != "ray" or each.first == "stop"
    ]
    ends = [each for each in ends if each.context.function in called and not each.started_by("trap")]
    for wait in view.top_commands:
        before = [name for server, name in servers if server.order < wait.order]
        if wait.name == "wait" and not wait.args and before and not any(end.order < wait.order for end in ends):
            yield Found(wait.at, {"server": before[0]})
            return


@likely(
    "AR720 interrupt-is-ignored",
    "a script starts what is in its background with SIGINT ignored, and python leaves it so: it does not stop",
    fix="kill -TERM, or kill -USR1, with a handler in the training script",
    source=f"{BASH}, SIGNALS; docs.python.org/3/library/signal.html",
)
def _ignored_interrupt(view: View) -> Iterator[Found]:
    if any("-m" in command.values or "monitor" in command.values for command in view.script.named("set")):
        return
    trainings = [
        launch.command for launch in view.launches if launch.is_python and launch.command.root is launch.command
    ]
    pids = {each.name: each.order for each in view.script.assignments if each.parts and _is_last_pid(each.parts)}
    for command in view.script.named("kill"):
        if not re.match(r"-(?:s |n )?(?:SIG)?(?:INT|2)\b", command.text):
            continue
        for part in command.variables:
            last = [each for each in view.top_commands if each.order < pids.get(part.text, 0)][-1:]
            if last and last[0].context.is_background and last[0] in trainings:
                yield Found(command.at)


def _is_last_pid(parts: tuple[Part, ...]) -> bool:
    return [(part.kind, part.text) for part in parts] == [("variable", "!")]
