"""The commands of a script that start ranks: with which launcher, on how many nodes, how many on each."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.lint.directives import Resources, number
from allranks.lint.model import Command, Script, Word
from allranks.lint.parse import REMOTE
from allranks.lint.syntax import Call, read_call, read_options, syntax_of
from allranks.lint.unwrap import LAUNCHERS, is_python

TORCH = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
#: Launches of a file that are looked at; people write a few.
_MOST = 200
MPI = frozenset({"mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "orterun"})


@dataclass(frozen=True)
class Launch:
    """A command that starts ranks.

    Attributes:
        command: the launcher.
        call: its options; None of a Python that starts no launcher.
        nnodes: the number of nodes that it is given; None if not known.
        nproc: the ranks of each node that it is given; None if not known.
        starter: the nearest command that takes it to other machines: srun, mpirun, ssh, …; None if there is none.
        tasks: how often the starter starts it; None if not known.
        tasks_per_node: how often on each node; None if not known.
    """

    command: Command
    call: Call | None
    nnodes: int | None
    nproc: int | None
    starter: Command | None
    tasks: int | None
    tasks_per_node: int | None

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.command.name

    @property
    def is_torch(self) -> bool:
        """Whether it is torchrun under one of its names."""
        return self.name in TORCH

    @property
    def program(self) -> Word | None:
        """The script that the ranks run; None if it is not known."""
        if self.call is not None:
            rest = self.call.rest
            return rest[0] if rest else None
        return script_of(self.command)

    @property
    def is_static(self) -> bool:
        """Whether torchrun meets by node rank and master address."""
        call = self.call
        if call is None or not self.is_torch or call.get("--standalone"):
            return False
        backend = call.get("--rdzv-backend")
        return backend is None or call.value("--rdzv-backend") == "static"


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
        if len(found) == _MOST:
            break
        if command.name in LAUNCHERS:
            launch = _of_launcher(command, script, resources)
            if launch:
                found.append(launch)
        elif is_python(command.name) and id(command) not in starters and _is_rank(command):
            starter, tasks, per_node = _started(command, script, resources)
            found.append(Launch(command, None, None, None, starter, tasks, per_node))
    return found


def _is_rank(command: Command) -> bool:
    """Return whether a Python is one of the ranks itself: it has a script or module, and its exit code is not asked."""
    if command.context.is_substitution or command.context.is_condition:
        return False
    return script_of(command) is not None or any(word.value == "-m" for word in command.args)


def _of_launcher(command: Command, script: Script, resources: Resources) -> Launch | None:
    syntax = syntax_of(command.name)
    assert syntax is not None
    words = command.args
    if command.name == "accelerate":
        if not words or words[0].value != "launch":
            if command.started_by("python", "python3") is None:
                return None
        else:
            words = words[1:]
    call = read_options(words, syntax)
    nnodes, nproc = _counts(command.name, call)
    starter, tasks, per_node = _started(command, script, resources)
    return Launch(command, call, nnodes, nproc, starter, tasks, per_node)


def _counts(name: str, call: Call) -> tuple[int | None, int | None]:
    """Return nodes, and ranks per node, as a launcher is told."""
    if name in TORCH:
        given = call.get("--nnodes")
        nnodes = 1 if given is None else number((call.value("--nnodes") or "").replace(":", "-"))
        nproc = 1 if call.get("--nproc-per-node") is None else call.number("--nproc-per-node")
        return nnodes, nproc
    if name == "accelerate":
        machines = 1 if call.get("--num-machines") is None else call.number("--num-machines")
        ranks = call.number("--num-processes")
        if call.get("--config-file"):
            return (machines if call.get("--num-machines") else None), ranks // machines if ranks and machines else None
        return machines, ranks // machines if ranks and machines else None
    return (call.number("--num-nodes"), call.number("--num-gpus"))


def _started(command: Command, script: Script, resources: Resources) -> tuple[Command | None, int | None, int | None]:
    """Return what takes a command to other machines, how often it starts it, and how often on each node."""
    starter = next((outer for outer in reversed(command.context.via) if outer.name in REMOTE), None)
    if starter is None:
        return None, 1, 1
    call = read_call(starter)
    if starter.name == "srun" and call:
        return starter, *_srun_tasks(call, script, resources)
    if starter.name in MPI and call:
        tasks = call.number("-n")
        per_node = call.number("--npernode")
        if (
            per_node is None
            and tasks
            and resources.nodes
            and tasks % resources.nodes == 0
            and call.get("--map-by") is None
        ):
            per_node = tasks // resources.nodes
        return starter, tasks, per_node
    return starter, None, 1


def _srun_tasks(call: Call, script: Script, resources: Resources) -> tuple[int | None, int | None]:
    asked = {name: call.get(name) for name in ("--nodes", "--ntasks", "--ntasks-per-node")}
    nodes = number(call.value("--nodes")) if asked["--nodes"] else resources.nodes
    tasks, per_node = call.number("--ntasks"), call.number("--ntasks-per-node")
    if (asked["--ntasks"] and tasks is None) or (asked["--ntasks-per-node"] and per_node is None):
        return tasks, per_node
    if asked["--ntasks"]:
        if per_node is None and nodes and tasks and tasks % nodes == 0:
            per_node = tasks // nodes
        return tasks, per_node
    if per_node is not None:
        return nodes * per_node if nodes else None, per_node
    if script.kind != "slurm":
        return (nodes, 1) if asked["--nodes"] else (None, None)
    if asked["--nodes"] and nodes != resources.nodes:
        return None, resources.tasks_per_node
    per_node = resources.tasks_per_node
    if per_node is None and resources.tasks is None:
        per_node = 1
    return (nodes * per_node if nodes and per_node else resources.tasks), per_node
