"""Commands that other commands start: behind ``srun``, in the string of ``bash -c``, in what ``ssh`` takes along."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from allranks.lint.directives import options_of
from allranks.lint.expand import Value, piece_of
from allranks.lint.model import LAUNCHERS, REMOTE, Assignment, Command, Context, Part, Word
from allranks.lint.parse import Walker
from allranks.lint.syntax import SYNTAX, WRAPPERS, read_call

SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
#: Programs that join their words and have a shell on the other machine read the result.
JOINED = frozenset({"ssh", "pdsh", "clush", "rsh", "dsh"})
#: Of those that start commands elsewhere: they take the variables of the shell along.
_TAKE_VARIABLES = frozenset({"srun", "mpirun", "mpiexec"})
#: Programs with options of their own before a command: it begins at the first word that is one of STARTERS.
_LOOSE = frozenset(
    {
        *(
            "singularity",
            "singularity_wrapper",
            "apptainer",
            "apptainer_wrapper",
            "docker",
            "podman",
            "shifter",
            "sarus",
            "enroot",
            "chroot",
        ),
        *("conda", "mamba", "micromamba", "poetry", "uv", "pipenv", "pixi"),
        *("nsys", "ncu", "py-spy", "strace", "runuser", "su", "dplace", "xvfb-run"),
    }
)
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?|ipython3?")
#: Modules that start ranks, and how they are called here.
MODULES = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "torch.distributed.elastic.run": "torch.distributed.run",
    "torchelastic.distributed.launch": "torch.distributed.run",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
STARTERS = LAUNCHERS | SHELLS | REMOTE | {"env", "nohup", "composer", "fabric", "lightning"}
_WHICH = re.compile(r"[$`]\(?(?:which|command -v)\s+([\w.]+)\)?`?")


def is_python(name: str) -> bool:
    """Return whether a program's name is that of a Python."""
    return bool(_PYTHON.fullmatch(name))


def unwrap(walker: Walker, command: Command) -> None:
    """Put the commands that a command starts into the model."""
    command = _resolved(walker, command)
    name = command.name
    if name == "set" and command.context.level == 0:
        walker.script.switch_on(command.values)
    if name in SHELLS:
        _shell(walker, command)
    elif name in JOINED:
        rest = read_call(command).rest if name in SYNTAX else command.args
        if name in ("ssh", "rsh", "dsh"):
            rest = rest[1:]
        is_shell = bool(rest) and all(word.prefix.startswith("-") for word in rest[1:]) and _name(rest[0]) in SHELLS
        _nested(walker, command, (_heredoc(command) if is_shell or not rest else []) or rest)
    elif name in ("source", ".") and command.args:
        walker.include(command.args[0], command.at, command.context, is_sourced=True)
    elif name in ("cd", "pushd", "popd"):
        walker.move(command.args[-1] if command.args else None)
    elif name == "shift" or (name == "set" and "--" in command.values):
        known = walker.values.get("@")
        walker.forget_arguments()
        if known and name == "shift" and not command.args:
            walker.values |= arguments_of([word for word in known if isinstance(word, Word)][1:])
    elif name.endswith((".sh", ".bash")):
        _script(walker, command, command.words)
    elif name in ("eval", "trap"):
        _nested(walker, command, command.args[:1] if name == "trap" else command.args)
    elif is_python(name):
        _python(walker, command)
    elif name in _LOOSE:
        _loose(walker, command)
    elif name in REMOTE or name in WRAPPERS:
        rest = read_call(command).rest
        # There may be options that are not known here: srun $OPTIONS torchrun ….
        if (rest and rest[0].parts[0].value is not None) or not _loose(walker, command):
            _inner(walker, command, rest)
    elif name in ("sbatch", "qsub"):
        _submission(walker, command)
    elif not name and command.args and not _loose(walker, command):
        _python(walker, command)  # $PYTHON -m torch.distributed.run …
    elif _starter(command) in _TAKE_VARIABLES and name not in LAUNCHERS and name and "/" in command.words[0].prefix:
        _loose(walker, command)  # A program of the user: mpiexec ./set_gpu python train.py


def _resolved(walker: Walker, command: Command) -> Command:
    """Return the command with the program's name where that is ``$(which …)``; the model gets it so too."""
    if not command.words or len(command.words[0].parts) != 1 or command.words[0].parts[0].kind != "command":
        return command
    match = _WHICH.fullmatch(command.words[0].parts[0].text)
    if not match:
        return command
    known = replace(command, words=(_word(match[1], command.words[0]), *command.args))
    walker.script.commands[-1] = known
    return known


def _name(word: Word) -> str:
    return word.prefix.rpartition("/")[2]


def _word(text: str, like: Word) -> Word:
    return Word((Part("text", text, text, "", like.parts[0].level if like.parts else 0, like.at),), like.at, like.end)


def _shell(walker: Walker, command: Command) -> None:
    for position, word in enumerate(command.args):
        value = word.prefix
        if value.startswith("-") and not value.startswith("--"):
            if value.endswith("c"):
                _nested(walker, command, command.args[position + 1 : position + 2])
                return
        elif not value.startswith("-"):
            _script(walker, command, command.args[position:])
            return
    _nested(walker, command, _heredoc(command))


def _starter(command: Command) -> str:
    """Return the name of the program that starts a command; empty if it is the shell."""
    return command.context.via[-1].name if command.context.via else ""


def _script(walker: Walker, command: Command, words: Sequence[Word]) -> None:
    """Walk over a script that a command runs, with its arguments."""
    before, inner = walker.values, _within(command)
    is_elsewhere = any(each.name in REMOTE and each.name not in _TAKE_VARIABLES for each in inner.via)
    kept = {name: before[name] for name in ("PWD",) if name in before}
    walker.values = {**kept, **({} if is_elsewhere else _exported(walker, command)), **arguments_of(words[1:])}
    is_here = walker.include(words[0], command.at, inner, is_sourced=False)
    walker.values = before
    if not is_here and _starter(command) in _TAKE_VARIABLES:
        _loose(walker, command, words[1:])  # mpiexec ./set_gpu.sh python train.py


def _submission(walker: Walker, command: Command) -> None:
    """Walk over the command that ``sbatch --wrap`` submits, or note the script that a command submits."""
    call = read_call(command)
    if wrapped := call.get("--wrap"):
        _nested(walker, command, [wrapped.value])
    elif call.rest and not call.get("-l"):  # Resources of PBS and Grid Engine may be others than in the script.
        is_all = command.name == "sbatch" and (call.value("--export") or "ALL") == "ALL"
        values = {**(_exported(walker, command) if is_all else {}), **arguments_of(call.rest[1:])}
        walker.submit(call.rest[0], command.at, options_of(call) if command.name == "sbatch" else [], values)


def _exported(walker: Walker, command: Command) -> dict[str, Value]:
    """Return the variables that a command gets: those exported, and ``NAME=value`` before it."""
    exported: dict[str, Value] = {name: walker.values[name] for name in walker.script.exported if name in walker.values}
    return exported | _set_for(command)


def arguments_of(words: Sequence[Word]) -> dict[str, Value]:
    """Return ``$1`` and so on, ``$@`` and ``$*`` of a script or a function."""
    given: dict[str, Value] = {str(number): word.parts for number, word in enumerate(words, 1)}
    return {**given, "@": tuple(words), "*": tuple(words)}


def _set_for(command: Command) -> dict[str, Value]:
    """Return the variables that are set for a command alone: ``NAME=value`` before it."""
    return {each.name: each.parts for each in command.sets}


def _within(command: Command) -> Context:
    """Return what stands around the commands that another shell reads."""
    context = replace(command.context, pipe=(), chain="", is_conditional=False, is_condition=False)
    return replace(context, via=(*context.via, command), level=context.level + 1)


def _heredoc(command: Command) -> list[Word]:
    return [word for operator, word in command.redirects if operator == "<<"]


def _nested(walker: Walker, command: Command, words: Sequence[Word]) -> None:
    """Walk over a text that another shell reads."""
    if not words:
        return
    before = dict(walker.values)
    known = walker.known
    if command.name in REMOTE and command.name not in _TAKE_VARIABLES:
        walker.values, walker.known = {}, {}
    elif command.name not in ("eval", "trap"):
        walker.forget_arguments()
        walker.values |= _set_for(command)
    walker.walk(piece_of(words), _within(command))
    walker.known = known
    if command.name != "eval":
        walker.values = before


def _inner(walker: Walker, command: Command, rest: Sequence[Word]) -> None:
    """Add the command that a command takes as its last arguments."""
    words = list(rest)
    sets: list[Assignment] = []
    if command.name in ("timeout", "taskset") and words and not words[0].prefix[:1].isalpha():
        del words[0]
    while words and command.name == "env" and "=" in words[0].prefix:
        name, value = words[0].prefix.partition("=")[0], words[0].after("=")
        sets.append(Assignment(name, value.parts if value else (), words[0].at, True, command.order, is_prefix=True))
        del words[0]
    if words:
        walker.add(replace(
            command, words=tuple(words), sets=(*command.sets, *sets) if sets else command.sets, at=words[0].at,
            context=replace(command.context, via=(*command.context.via, command)),
        ))  # fmt: skip


def _loose(walker: Walker, command: Command, words: Sequence[Word] | None = None) -> bool:
    """Add the command that begins at the first of the words that is a program which starts ranks."""
    words = command.args if words is None else words
    for position, word in enumerate(words):
        name = (word.value or "").rpartition("/")[2]
        if name in STARTERS or is_python(name):
            _inner(walker, command, words[position:])
            return True
    return False


def _python(walker: Walker, command: Command) -> None:
    args = command.args
    for position, word in enumerate(args):
        value = word.value or ""
        if value == "-m" and position + 1 < len(args):
            module = MODULES.get(args[position + 1].value or "")
            if module:
                _inner(walker, command, (_word(module, args[position + 1]), *args[position + 2 :]))
            return
        if value.rpartition("/")[2] in ("torchrun", "accelerate", "deepspeed"):
            _inner(walker, command, args[position:])
            return
        if not value.startswith("-"):
            return
