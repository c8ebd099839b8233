"""The command that starts a training, with all that it stands in, as values of a job file."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from allranks.contract import is_secret
from allranks.convert.computed import lines_of_values
from allranks.convert.draft import MOVED, Draft, home, path_of, short, shown
from allranks.convert.hosts import take_hosts
from allranks.convert.recorder.common import LAUNCHERS
from allranks.convert.recorder.torch_launchers import config_in
from allranks.convert.recorder.wrappers import CONDAS, CONTAINERS, RUNNERS
from allranks.lint.directives import number
from allranks.lint.launches import Launch
from allranks.lint.model import MPI, Assignment, Command, Part, Script, Word
from allranks.lint.sourced_files import file_beside, printed_by
from allranks.lint.syntax import read_call
from allranks.lint.unwrap import SHELLS, is_python

#: Variables of launchers and schedulers that say who a rank is, and what allranks sets in their place.
RANK_VARIABLES: Final = {
    **dict.fromkeys(("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK"), "RANK"),
    **dict.fromkeys(("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK"), "LOCAL_RANK"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"), "WORLD_SIZE"),
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "GROUP_WORLD_SIZE"), "GROUP_WORLD_SIZE"),
    **dict.fromkeys(("SLURM_NODEID", "GROUP_RANK"), "GROUP_RANK"),
    **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), ""),
}
#: Variables that people set for the command line of a launcher, and those that pdsh reads.
_OF_LAUNCHERS = {
    *("NODE_RANK", "NNODES", "NPROC_PER_NODE", "GPUS_PER_NODE", "NUM_NODES"),
    *("PDSH_RCMD_TYPE", "PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND", "FANOUT"),
}
#: Codes of counts that cannot be meant: there is one rank for each GPU then.
_WRONG_COUNTS = {"AR102", "AR106", "AR107", "AR108", "AR114", "AR117", "AR815"}
_NEEDLESS = {"time", "nohup", "exec", "command", "setsid", "stdbuf", "unbuffer", "env", "eval"}
#: Options of launchers that allranks has no use for: it finds addresses and ports, and numbers nodes.
_RENDEZVOUS = re.compile(
    r"--(nnodes|nproc-per-node|rdzv-.*|node-rank|master-addr|master-port|local-addr|standalone|module|no-python|max-restarts"
    r"|monitor-interval|start-method|role|log-dir|redirects|tee|use-env|num-processes|num-machines|machine-rank|main-process-.*"
    r"|multi-gpu|same-network|num-cpu-threads-per-process|num-gpus|num-nodes|hostfile|no-ssh.*|no-local-rank|force-multi"
    r"|mixed-precision|dynamo-backend|launcher)"
)
#: Lines of the file of ``accelerate config`` that need nothing: what allranks finds, and what is off.
_CONFIG = re.compile(
    r"(compute_environment|main_process_.*|main_training_function|machine_rank|num_machines|num_processes|rdzv_backend"
    r"|same_network): .*|distributed_type: (MULTI_.*|NO)|gpu_ids: all|\w+: ((?i:no|false)|\{\}|\[\]|null)"
)
#: Options of srun that change nothing for a step of one agent on each node.
_SRUN = re.compile(
    r"--(nodes|n?tasks.*|gres|gpus.*|gpu-bind|cpus-per-task|kill-on-bad-exit|label|unbuffered|output|error|export|jobid"
    r"|exclusive|overlap|wait|job-name|mem.*|time|partition|account|nodelist|verbose|qos|pty|exact)"
)


def main_launch(launches: Sequence[Launch]) -> tuple[list[Launch], list[Launch]]:
    """Return the commands that together start the training, and those that start others."""
    known = [each for each in launches if each.is_python or each.program is not None]
    always = [each for each in known if not each.command.context.is_conditional] or known
    ranked = [each for each in known if not each.is_python] or [each for each in known if each.starter] or always[-1:]
    if not ranked:
        return [], []
    same = [each for each in ranked if _typed(each) == _typed(ranked[0])]
    return same, [each for each in ranked if each not in same]


def functions_of(script: Script, commands: Iterable[Command]) -> set[str]:
    """Return the functions of a script through which commands are started."""
    found = {command.context.function for command in commands} - {""}
    while more := {call.context.function for call in script.named(*found)} - {"", *found}:
        found |= more
    return found


def _typed(launch: Launch) -> list[str]:
    return [word.shown for word in (launch.command.args if launch.is_python else launch.call.rest)]


def _config_of(draft: Draft, launch: Launch) -> dict[str, str]:
    """Return the top level of the file of ``accelerate launch --config_file``, as text; empty if it is not here."""
    given = launch.call.get("--config-file") if launch.name == "accelerate" else None
    found = file_beside(draft.path, given.value, from_here=True) if given else None
    return config_in(found[1].decode("utf-8", "replace")) if found else {}


def take_launch(draft: Draft, group: Sequence[Launch], codes: set[str]) -> None:
    """Take over what the commands start, where, and how often; ``codes`` are lint's findings about them."""
    launch = group[0]
    draft.launcher = "" if launch.is_python else launch.name
    _take_wrappers(draft, launch)
    take_hosts(draft, group)
    config = _config_of(draft, launch)
    _take_counts(draft, launch, codes, config)
    _take_options(draft, launch, config)
    _take_program(draft, launch)
    root = launch.command.root
    if root.context.pipe[:1] == ("tee",) or any(">" in operator for operator, _ in root.redirects):
        draft.left_out(root.at, "where the output went: allranks logs, or allranks run job.yaml > FILE")
    sets: tuple[Assignment, ...] = ()
    for command in (*launch.command.context.via, launch.command):
        for each in command.sets if command.sets != sets else ():
            take_variable(draft, each, "node_setup")
        sets = command.sets


def _take_wrappers(draft: Draft, launch: Launch) -> None:
    """Take over what stands around the launcher: containers, conda run, srun, ssh."""
    chain = (*launch.command.context.via, launch.command)
    for outer, inner in itertools.pairwise(chain):
        words, name = outer.words[: len(outer.words) - len(inner.words)], outer.name
        if name in CONTAINERS:
            draft.put("environment.container", [home(word.shown) for word in words], outer.at, shown(words))
            if any(word.value is None and "$" in home(word.shown) for word in words):
                draft.not_taken(outer.at, f"{short(shown(words), 60)}: environment.container expands no variables")
        elif name in CONDAS:
            values = [word.value or "" for word in words]
            at = next((i + 1 for i, value in enumerate(values) if value in ("-n", "-p", "--name", "--prefix")), None)
            if at is not None and at < len(values) and values[at]:
                draft.put("environment.conda", values[at], outer.at, shown(words))
            else:
                draft.not_taken(
                    outer.at, f"{short(shown(words), 60)}: write the environment's name into environment.conda"
                )
        elif name in RUNNERS:
            draft.put("environment.python", [*(word.shown for word in words), "python"], outer.at, shown(words))
        elif name == "srun":
            _take_srun(draft, launch)
        elif name in MPI:
            draft.left_out(outer.at, f"{shown(words)}: allranks starts the nodes")
            _take_exports(draft, outer)
        elif is_python(name) or name in _NEEDLESS or (_is_shell(name) and outer.words[len(words) :] != inner.words):
            if name == "nohup":
                draft.left_out(outer.at, "nohup: allranks run --detach")
        elif name not in ("ssh", "pdsh", "clush", "rsh", "pbsdsh", "pbs_tmrsh", "blaunch"):
            draft.not_taken(outer.at, f"{short(shown(words), 60)}: it stood before the launcher")


def _is_shell(name: str) -> bool:
    return name in SHELLS or name.endswith((".sh", ".bash"))


def _take_exports(draft: Draft, starter: Command) -> None:
    """Take over the variables that ``mpirun -x NAME=VALUE`` sets."""
    for given in read_call(starter).given:
        name, equals, value = given.value.shown.partition("=")
        if given.name == "-x" and equals and given.value.value is not None and name not in RANK_VARIABLES:
            draft.put(f"environment.variables.{name}", value, given.at, f"{given.typed} {name}={value}")


def _take_srun(draft: Draft, launch: Launch) -> None:
    starter = launch.command.started_by("srun")
    assert starter is not None
    kept: list[str] = []
    for given in read_call(starter).given:
        value = f"={given.value.shown}" if given.value.parts else ""
        if _SRUN.fullmatch(given.name):
            continue
        if given.value.value is None:
            draft.not_taken(starter.at, f"srun {given.name}{value}: launch.launcher_args expands no variables")
        else:
            kept.append(f"{given.name}{value}")
    if kept:
        draft.put("launch.launcher_args", kept, starter.at, f"srun {' '.join(kept)}")
    draft.left_out(starter.at, "srun, and how often it starts the command: one agent starts on each node")


def _take_counts(draft: Draft, launch: Launch, codes: set[str], config: dict[str, str]) -> None:
    """Set nodes, and ranks on each node."""
    at, call = launch.command.at, launch.call
    machines, processes = (
        call.number(f"--{key}") if call.get(f"--{key}") else number(config.get(key.replace("-", "_"), ""))
        for key in ("num-machines", "num-processes")
    )
    option = call.get("--nnodes", "--num-machines", "--num-nodes")
    if option and "resources.nodes" not in draft.values and not draft.get("resources.hosts"):
        value, typed = option.value.value, f"{option.name}={option.value.shown}"
        if value and re.fullmatch(r"\d+(:\d+)?", value):
            if value != "1" and not (":" in value and draft.view.resources.nodes == 1):
                draft.put("resources.nodes", int(value) if value.isdecimal() else value, at, typed)
        elif not draft.get("resources.hostfile"):
            draft.not_taken(at, f"{typed}: the number of nodes is not in the script: --nodes N")
    elif not option and (machines or 1) > 1 and "resources.nodes" not in draft.values:
        draft.put("resources.nodes", machines, at, f"num_machines: {machines} of --config_file")
    gpus = draft.get("resources.gpus_per_node")
    ranks: int | str | None = launch.nproc
    if config and processes and (machines or not option):  # Lint does not read the file.
        ranks = processes // (machines or 1) or None
    why = f"{launch.name} starts {ranks} rank{'s' * (ranks != 1)} on each node"
    if launch.is_python:
        is_here = launch.starter_name in MPI and draft.kind == "local"
        ranks = launch.tasks if is_here else launch.tasks_per_node if launch.starter else 1
        why = f"{launch.starter_name or 'python'}, {ranks or '?'} on each node"
        if launch.starter is None and (gpus or 0) > 1:
            draft.not_taken(at, f"one process had {gpus} GPUs: if it starts ranks by itself, remove nproc_per_node")
        if ranks is None and not draft.get("launch.nproc_per_node"):
            draft.not_taken(at, f"{launch.starter_name}: the number of ranks is not known here; one rank for each GPU")
        nodes = draft.get("resources.nodes")
        is_srun = launch.starter_name == "srun" and isinstance(nodes, int)
        if is_srun and ranks and launch.tasks and launch.tasks < ranks * nodes:
            ranks = launch.tasks // nodes or 1
            why = f"{launch.starter_name}, {launch.tasks} on {nodes} nodes"
            if launch.tasks % nodes:
                draft.not_taken(at, f"{why}: the number of ranks is not known here")
    elif launch.is_torch and (given := call.get("--nproc-per-node")):
        why = f"{given.typed}={given.value.shown}"
        ranks = given.value.value if given.value.value in ("gpu", "cpu", "auto") else ranks
    if ranks is None and (processes or call.get("--nproc-per-node", "--num-processes", "--num-gpus")):
        draft.not_taken(at, f"{why.replace('None', 'an unknown number of')}: not known here; one rank for each GPU")
    elif ranks in ("gpu", "auto") or (gpus and isinstance(ranks, int) and (ranks == gpus or codes & _WRONG_COUNTS)):
        draft.left_out(at, f"{why}: one rank for each GPU is the default")
    elif ranks is not None:
        draft.put("launch.nproc_per_node", ranks, at, why)


def _take_options(draft: Draft, launch: Launch, config: dict[str, str]) -> None:
    """Take over the launcher's other options, or name them."""
    call, at = launch.call, launch.command.at
    for key, value in config.items():
        if _CONFIG.fullmatch(f"{key}: {value}"):
            continue
        if name := {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "gpu_ids": "CUDA_VISIBLE_DEVICES"}.get(key):
            draft.put(f"environment.variables.{name}", value, at, f"{key}: {value} of --config_file")
        else:
            draft.not_taken(at, f"{key}: {value}".strip() + " of --config_file: give it to Accelerator() in the script")
    left = [given for given in call.given if _RENDEZVOUS.fullmatch(given.name)]
    kept = {"--nproc-per-node", "--max-restarts", "--module", "--no-python", "--mixed-precision", "--hostfile"}
    if typed_names := list(dict.fromkeys(given.typed for given in left if given.name not in kept)):
        draft.left_out(at, f"{launch.name} {' '.join(typed_names)}: allranks numbers nodes, and finds address and port")
    for given in call.given:
        typed = given.typed + (f" {given.value.shown}" if given.value.parts else "")
        if given.name == "--max-restarts" and call.number("--max-restarts"):
            draft.put("launch.max_restarts", call.number("--max-restarts"), at, typed)
        elif given.name == "--mixed-precision" and given.value.value:
            draft.put("environment.variables.ACCELERATE_MIXED_PRECISION", given.value.value, at, typed)
        elif given.name == "--config-file" and launch.name == "accelerate":
            if not config:
                what = "it is not below the script's directory or this one, and was not read: its settings are lost"
                draft.not_taken(at, f"accelerate {typed}: {what}")
        elif given not in left:
            draft.not_taken(at, f"{launch.name} {typed}: set it in the training script")
    needed = {"--node-rank", "--master-addr"}
    names = {"--machine-rank": "--node-rank", "--main-process-ip": "--master-addr"}  # Those of accelerate launch.
    names |= {"--main-process-port": "--master-port"} | {name: name for name in (*needed, "--master-port")}
    of_node = {names[given.name]: given.value.value or "" for given in left if given.name in names}
    rank = call.get("--node-rank", "--machine-rank")
    if rank and (not of_node["--node-rank"] or any(part.has_default for part in rank.value.variables)):
        of_node["--node-rank"] = "N"  # An argument of the script, or a variable of the machine.
    if draft.kind == "local" and launch.has_many_nodes and all(of_node.values()) and needed <= of_node.keys():
        draft.node = shlex.join(itertools.chain(*of_node.items()))
        if rank and of_node["--node-rank"] == "N":
            draft.node_rank = next((part.text for part in rank.value.variables), "")
            shown_rank = "".join(part.text if part.kind == "text" else f"${part.text}" for part in rank.value.parts)
            draft.changed(at, f"{rank.typed}={shown_rank} is N of allranks node … --node-rank N on each machine")
    adds = launch.name == "deepspeed" and not call.get("--no-local-rank")
    adds = adds or (launch.name == "torch.distributed.launch" and not call.get("--use-env"))
    if adds:
        draft.not_taken(at, f"{launch.name} adds --local_rank=N to the arguments: read LOCAL_RANK in the script")


def _take_program(draft: Draft, launch: Launch) -> None:
    """Set script, module or binary, its arguments, and the interpreter if it is named by its path."""
    command, call = launch.command, launch.call
    words = list(command.args if launch.is_python else call.rest)
    kind, options = "script", []
    if call.get("--no-python"):
        kind = "binary"
    elif call.get("--module", "-m"):
        kind = "module"
    while launch.is_python and words and words[0].shown.startswith("-"):
        option = words.pop(0)
        if option.value == "-m":
            kind = "module"
            break
        options += [option.shown, *([words.pop(0).shown] if option.value in ("-W", "-X") and words else [])]
    options = [option for option in options if option != "-u"]
    chain = (*command.context.via, command)
    starters = [each for each in chain if is_python(each.name) or each.name in LAUNCHERS]
    python = path_of(starters[-1].words[0]) if starters else None
    if python and starters[-1].name in LAUNCHERS:  # Beside Python, but for those of pip install --user.
        python = None if "/.local/bin/" in python else re.sub(r"[^/]+$", "python", python)
    typed = starters[-1].words[0].shown if starters and python is None else ""
    if "/" in typed and "/.local/bin/" not in typed and "environment.python" not in draft.values:
        draft.not_taken(starters[-1].at, f"{typed}: environment.python expands no variables")
    is_versioned = bool(python and re.fullmatch(r"python\d\.\d+", python))
    if python and ("/" in python or is_versioned) and "environment.python" not in draft.values:
        draft.put("environment.python", [python, *options], starters[-1].at, starters[-1].words[0].shown)
    elif options:
        draft.put("environment.python", ["python", *options], command.at, shown(command.words[: len(options) + 1]))
    if not words:
        return
    interpreter = shlex.join([python, *options]).replace("'~'", "~") if python and "/" in python else "python"
    program = {"script": f"{interpreter} ", "module": f"{interpreter} -m ", "binary": ""}[kind]
    context = command.context
    is_plain = not (context.level or context.function or context.loops or draft.is_remote)
    lines = None
    if is_plain and any(_is_computed(draft, part) for word in words for part in word.parts):
        lines = lines_of_values(draft, words, frozenset(RANK_VARIABLES))
    if lines is not None:
        typed = " ".join(draft.source(*span) for span in dict.fromkeys((word.at, word.end) for word in words))
        draft.put("binary", "bash", words[0].at, "it computes values of its arguments")
        draft.put("args", ["-c", "\n".join([*lines, f"exec {program}{typed}"])], words[0].at, "")
        return
    args: list[_Argument] = []
    for word in words:
        if not _is_rest(draft, word, command.context.function):
            args.append(_Argument(draft, word, is_program=not args))
    if any(each.is_read for each in args):
        draft.put("binary", "bash", words[0].at, "it reads variables of the job's environment")
        draft.put("args", ["-c", f"exec {program}{' '.join(each.quoted for each in args)}"], words[0].at, "")
        return
    if not args:
        return
    draft.put(kind, home(args[0].text), words[0].at, "")
    if args[1:]:
        draft.put("args", [each.text for each in args[1:]], words[1].at, "")


def _is_computed(draft: Draft, part: Part) -> bool:
    """Return whether a part of a word has a value that the script computes, and that is not known here."""
    if part.value is not None or part.text in ("@", "*"):
        return False
    return part.kind != "variable" or (part.text not in RANK_VARIABLES and draft.is_set_here(part.text))


def _is_rest(draft: Draft, word: Word, function: str) -> bool:
    """Return whether a word is the script's own arguments, or those of a function, which are not known."""
    names = {part.text for part in word.parts}
    if len(word.parts) == 1 and names & {"@", "*"}:
        owner = f"{function}'s" if function else "the script's own"
        draft.not_taken(word.at, f"{word.shown}: {owner} arguments: add them to args")
        draft.incomplete = draft.incomplete or bool(function)
        return True
    return False


class _Argument:
    """A word of the training's command line, as text and for a shell.

    Attributes:
        text: its value, with the names of what is not known.
        quoted: how a shell reads it.
        is_read: it has a variable that the job's environment has, or a ``~`` that only a shell expands; the job file
            expands that of the program.
    """

    def __init__(self, draft: Draft, word: Word, *, is_program: bool = False) -> None:
        self.is_read = False
        self.text = word.shown
        self.quoted = ""
        parts = [*word.parts]
        if draft.is_home(parts):
            self.is_read, self.quoted = not is_program, '"${HOME}"'
            parts[0] = replace(parts[0], value=(parts[0].value or "")[1:])
        for part in parts:
            part = _working_directory(draft, part) or part
            rank = RANK_VARIABLES.get(part.text) if part.kind == "variable" else None
            if part.value is not None and rank is None:
                self.quoted += shlex.quote(part.value) if part.value else ""
                continue
            is_local = draft.is_remote and part.level == 0  # The shell here expanded it.
            if part.kind != "variable" or (rank is None and (is_local or draft.is_set_here(part.text))):
                what = f"{part.shown}: its value is not in the script; write it into args"
                draft.not_taken(word.at, what)
                draft.incomplete = True
                self.quoted += shlex.quote(part.shown)
                continue
            self.is_read = True
            if not rank and part.has_default and _with_default(draft, part) == f"${{{part.text}}}":
                draft.not_taken(word.at, f"${part.text}: its default is not known here; write its value into args")
                draft.incomplete = True
            if rank and rank != part.text:
                draft.changed(word.at, f"${part.text} in the arguments is ${rank}, which allranks sets for each rank")
            source = f"${{{rank}}}" if rank else _with_default(draft, part)
            self.quoted += f'"{source}"' if part.quote or rank else source
        self.quoted = self.quoted or shlex.quote(self.text)


def _working_directory(draft: Draft, part: Part) -> Part | None:
    """Return ``$(pwd)`` as the variable that has it, where the script does not leave it in between."""
    if part.kind != "command" or printed_by(part) != "pwd":
        return None
    stands_here = draft.source(part.at, part.at + len(part.text)) == part.text
    return replace(part, kind="variable", text="PWD") if stands_here or not any(draft.view.script.named("cd")) else None


def _with_default(draft: Draft, part: Part) -> str:
    """Return how a variable is expanded, with its default."""
    if part.has_default:
        text = draft.view.script.text.data.decode("utf-8", "replace")
        if found := re.search(rf"\$\{{{re.escape(part.text)}(:?[-=?+][^{{}}\"'`$]*)\}}", text):
            return f"${{{part.text}{found[1]}}}"
    return f"${{{part.text}}}"


def take_variable(draft: Draft, given: Assignment, where: str) -> bool:
    """Take over a variable that is exported; return whether it needs a line of shell instead."""
    name, word = given.name, Word(given.parts or (), given.at, given.at)
    typed = f"{name}={word.shown}"
    if name in RANK_VARIABLES or name in _OF_LAUNCHERS:
        draft.left_out(given.at, f"{typed}: allranks sets what the ranks need of it")
        return False
    if is_secret(name) and word.value:
        draft.put(f"environment.variables.{name}", "<secret>", given.at, "set it where you type allranks run")
        draft.changed(given.at, f"the value of {name} is not taken over: it comes from where you type allranks run")
        return False
    is_text = word.value is not None and given.items is None and given.parts is not None
    if is_text and not draft.is_home(word.parts):
        draft.put(f"environment.variables.{name}", word.value, given.at, typed)
        return False
    if given.is_prefix and draft.is_moved(given.at, line := _shell(draft, given)):
        draft.not_taken(given.at, f"{line}: {MOVED}")
        return False
    own = {each.name for each in draft.view.script.assignments if not each.is_prefix} - draft.view.script.exported
    if given.is_prefix and any(part.value is None and part.text in own for part in word.variables):
        draft.not_taken(given.at, f"{typed}: its value is not in the script; write it into environment.variables")
        draft.incomplete = True
        return False
    if given.is_prefix:
        draft.add_line("node_setup" if draft.is_remote else where, f"export {line}", given.at)
        return False
    return True


def known_commands(draft: Draft, given: Assignment) -> str:
    """Write an assignment with what its commands print, and the arguments of the script; empty if it has none."""
    parts, end = given.parts or (), given.at + len(given.name) + 12
    commands = [part.value for part in parts if part.kind == "command"]
    reads = draft.arguments and re.search(r"\$\{?\d", draft.source(given.at, end))
    if not (commands or reads) or None in commands:
        return ""
    written = (
        shlex.quote(p.value) if p.value is not None else f'"{_with_default(draft, p)}"' for p in parts if p.shown
    )
    return f"{given.name}={''.join(written)}"


def _shell(draft: Draft, given: Assignment) -> str:
    data = draft.view.script.text.data
    found = re.compile(rb"(?:\"[^\"]*\"|'[^']*'|`[^`]*`|\$\([^()]*\)|[^\s\"'`])+").match(data, given.at)
    return known_commands(draft, given) or (found[0].decode("utf-8", "replace") if found else given.name)
