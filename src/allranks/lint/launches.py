"""The commands of a script that start ranks: with which launcher, on how many nodes, how many on each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from allranks.lint.directives import Resources, number
from allranks.lint.model import LAUNCHERS, MPI, REMOTE, Command, Script, Word
from allranks.lint.syntax import NO_CALL, SYNTAX, Call, read_call, read_options
from allranks.lint.unwrap import is_python

TORCH = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_NEXT_IS_OPTION = re.compile(rb"[^\n]*\n[ \t]*--?[A-Za-z]")
#: Launches of a file that are looked at; people write a few.
_MOST = 200


@dataclass(frozen=True)
class Launch:
    """A command that starts ranks."""

    command: Command  # The launcher, or Python itself.
    call: Call  # The options of the launcher.
    nnodes: int | None  # The number of nodes that it is given; None if not known.
    nproc: int | None  # The ranks of each node that it is given; None if not known.
    #: The nearest command that takes it to other machines, such as srun or ssh, or one that is not known and may do so;
    #: None if there is none.
    starter: Command | None
    tasks: int | None  # How often the starter starts it; None if not known.
    tasks_per_node: int | None  # How often on each node; None if not known.
    is_open: bool  # Whether it may have more options than are known: in a variable, or on the next line.
    is_cut: bool  # Whether the next line is more of it, which the shell takes for another command.

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.command.name

    @property
    def is_torch(self) -> bool:
        """Whether it is torchrun under one of its names."""
        return self.name in TORCH

    @property
    def is_python(self) -> bool:
        """Whether no launcher starts it: Python is the rank."""
        return self.name not in LAUNCHERS

    @property
    def has_many_nodes(self) -> bool:
        """Whether it is given more than one node."""
        return self.nnodes is not None and self.nnodes > 1

    @property
    def starter_name(self) -> str:
        """The starter's name; empty if there is none."""
        return self.starter.name if self.starter else ""

    @property
    def program(self) -> Word | None:
        """The script that the ranks run; None if it is not known."""
        if self.is_python:
            return script_of(self.command)
        return self.call.rest[0] if self.call.rest else None

    @property
    def is_static(self) -> bool:
        """Whether torchrun meets by node rank and master address."""
        if not self.is_torch or self.call.get("--standalone") or self.is_open:
            return False
        return self.call.get("--rdzv-backend") is None or self.call.value("--rdzv-backend") == "static"


def script_of(command: Command) -> Word | None:
    """Return the script of ``python … train.py``; None if there is none."""
    skip = False
    for word in command.args:
        value = word.shown
        if skip:
            skip = False
        elif value in ("-m", "-c", "-"):
            return None
        elif value in ("-W", "-X"):
            skip = True
        elif not value.startswith("-"):
            return word
    return None


def launches_of(script: Script, resources: Resources) -> list[Launch]:
    """Return the commands that start ranks, in their order."""
    found: list[Launch] = []
    starters = {id(command.context.via[-1]) for command in script.commands if command.context.via}
    for command in script.commands:
        if command.name in LAUNCHERS:
            call = _call(command)
        else:
            is_rank = is_python(command.name) and id(command) not in starters and _is_rank(command)
            call = NO_CALL if is_rank else None
        if call is not None and len(found) < _MOST:
            nnodes, nproc = _counts(command.name, call)
            is_cut = bool(_NEXT_IS_OPTION.match(script.text.data, command.end))
            is_open = command.name in LAUNCHERS and (is_cut or _may_hold_options(call, command.context.level))
            if is_open and not call.get("--nnodes", "--num-machines"):
                nnodes = None
            if is_open and not call.get("--nproc-per-node", "--num-processes"):
                nproc = None
            starter, tasks, per_node = _started(command, script, resources)
            found.append(Launch(command, call, nnodes, nproc, starter, tasks, per_node, is_open, is_cut))
    return found


def _may_hold_options(call: Call, level: int) -> bool:
    first = call.rest[0].first if call.rest else None
    if first is None or first.value is not None:
        return False
    if first.quote and first.level == level and "@" not in first.text:
        return False  # It stays one word.
    return any(word.shown.endswith(".py") or word.value in ("-m", "--module") for word in call.rest[1:])


def _is_rank(command: Command) -> bool:
    """Return whether a Python is one of the ranks itself: it has a script or module, and its exit code is not asked."""
    if command.context.is_substitution or command.context.is_condition:
        return False
    return script_of(command) is not None or any(word.value == "-m" for word in command.args)


def _call(command: Command) -> Call | None:
    """Return the options of a launcher; None if it is another command of Accelerate."""
    if command.name != "accelerate":
        return read_call(command)
    if command.args and command.args[0].value == "launch":
        return read_options(command.args[1:], SYNTAX["accelerate"])
    return read_call(command) if command.started_by("python", "python3") else None


def _counts(name: str, call: Call) -> tuple[int | None, int | None]:
    """Return nodes, and ranks per node, as a launcher is told."""
    if name in TORCH:
        given = call.get("--nnodes")
        nnodes = number((given.value.value or "").replace(":", "-")) if given else 1
        return nnodes, call.number("--nproc-per-node") if call.get("--nproc-per-node") else 1
    if name == "accelerate":
        # A configuration file may give the number of machines, over which all ranks are spread.
        is_in_file = call.get("--config-file") and not call.get("--num-machines")
        machines = None if is_in_file else call.number("--num-machines") if call.get("--num-machines") else 1
        ranks = call.number("--num-processes")
        return machines, ranks // machines if ranks and machines else None
    return call.number("--num-nodes"), call.number("--num-gpus")


def _started(command: Command, script: Script, resources: Resources) -> tuple[Command | None, int | None, int | None]:
    """Return what takes a command to other machines, how often it starts it, and how often on each node."""
    starter = command.started_by(*REMOTE)
    if starter is None:
        unknown = next((outer for outer in command.context.via if not outer.name), None)
        return (unknown, None, None) if unknown else (None, 1, 1)
    call = read_call(starter)
    if call.rest[1:] and len(call.rest[0].parts) == 1 and next(call.rest[0].variables, None) and not call.rest[0].value:
        return starter, None, None  # It may have options.
    if starter.name == "srun":
        return starter, *_srun_tasks(call, script, resources)
    if starter.name not in MPI:
        return starter, None, 1
    tasks, per_node = call.number("-n"), call.number("--npernode")
    nodes = resources.nodes if per_node is None and not call.get("--map-by") else None
    if tasks and nodes and tasks % nodes == 0:
        per_node = tasks // nodes
    return starter, tasks, per_node


def _srun_tasks(call: Call, script: Script, resources: Resources) -> tuple[int | None, int | None]:
    nodes = number(call.value("--nodes")) if call.get("--nodes") else resources.nodes
    tasks, per_node = call.number("--ntasks"), call.number("--ntasks-per-node")
    if (call.get("--ntasks") and tasks is None) or (call.get("--ntasks-per-node") and per_node is None):
        return tasks, per_node
    if tasks is not None:
        if per_node is None and nodes and tasks and tasks % nodes == 0:
            per_node = tasks // nodes
        return tasks, per_node
    if per_node is not None:
        return nodes * per_node if nodes else None, per_node
    if script.kind != "slurm":
        return (nodes, 1) if call.get("--nodes") else (None, None)
    if call.get("--nodes") and nodes != resources.nodes:
        return None, resources.tasks_per_node
    per_node = resources.tasks_per_node
    if per_node is None and resources.tasks is None:
        per_node = 1
    return (nodes * per_node if nodes and per_node else resources.tasks), per_node
