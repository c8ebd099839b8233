"""From the bytes of a file to the scripts in it, as the rules see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.lint.directives import Resources, known_variables, read_directives, resources_of
from allranks.lint.expand import Piece, Run, piece_of
from allranks.lint.launches import Launch, launches_of
from allranks.lint.model import Command, Context, Place, Script, Submitted, Text, Word
from allranks.lint.parse import Walker
from allranks.lint.syntax import Call, Given, read_call
from allranks.lint.unwrap import unwrap

#: Branches of a file, and outcomes of each, for which it is read again.
_BRANCHES, _OUTCOMES = 2, 3
_DIRECTIVE = re.compile(rb"^#(?:SBATCH|PBS)\s", re.MULTILINE)
#: Files and commands that set up a shell: they set no variables of a job and no traps, and start no step.
_SETS_UP = re.compile(r"/activate$|^activate$|conda|mamba|/etc/|\.bashrc$|\.bash_profile$|\.profile$|lmod|/modules/")


@dataclass
class View:
    """A script with what follows from it."""

    script: Script

    @cached_property
    def resources(self) -> Resources:
        """What its directives request."""
        return resources_of(self.script)

    @cached_property
    def launches(self) -> list[Launch]:
        """The commands in it that start ranks."""
        return launches_of(self.script, self.resources)

    @property
    def has_many_nodes(self) -> bool:
        """Whether its directives request more than one node."""
        return (self.resources.nodes or 0) > 1

    @property
    def runs_more(self) -> bool:
        """Whether its shell runs lines that are not here, but for those that set up an environment or a profile."""
        commands = self.script.named("source", ".", "eval")
        return any(not _SETS_UP.search(word.shown) for command in commands for word in command.args[:1])

    @property
    def torchrun(self) -> Iterator[Launch]:
        """The launches by torchrun under one of its names."""
        return (launch for launch in self.launches if launch.is_torch)

    @property
    def torchrun_alone(self) -> bool:
        """Whether it starts ranks by torchrun, and by nothing else."""
        return bool(self.launches) and all(launch.is_torch for launch in self.launches)

    def torchrun_given(self, *names: str) -> Iterator[tuple[Launch, Given]]:
        """Yield the launches by torchrun that are given one of these options, with that."""
        return ((launch, given) for launch in self.torchrun if (given := launch.call.get(*names)))

    def started_by(self, *starters: str) -> list[Launch]:
        """Return the launches that one of these programs takes to other machines."""
        return [launch for launch in self.launches if launch.starter_name in starters]

    def calls(self, *programs: str) -> Iterator[tuple[Command, Call]]:
        """Yield the commands with one of these names, with their options."""
        return ((command, read_call(command)) for command in self.script.named(*programs))

    @cached_property
    def top_commands(self) -> list[Command]:
        """The commands of the script's own shell, outside functions and substitutions."""
        contexts = ((command, command.context) for command in self.script.commands)
        return [command for command, each in contexts if not (each.via or each.function or each.is_substitution)]

    def is_printed(self, offset: int) -> bool:
        """Return whether an offset lies in what the script prints."""
        return any(command.at <= offset < command.end for command in self.script.named("echo", "printf"))

    def place(self, offset: int) -> Place:
        """Return the line and column of an offset."""
        return self.script.text.place(offset)


def read_scripts(path: str, data: bytes, run: Run | None = None, taken: dict[int, int] | None = None) -> list[View]:
    """Return the script in a file, those that it writes or submits as here-documents, and files that it submits.

    Args:
        path: the file.
        data: its content.
        run: how it is run, if it is to be read so.
        taken: the outcome of branches, by where they start, that is taken to have happened.
    """
    text = Text(data, path)
    main = _read(path, text, Piece(data), run=run, taken=taken)
    found = [main]
    for command in main.script.commands:
        for operator, word in command.redirects:
            is_job = command.name in ("sbatch", "qsub")
            if operator == "<<" and (is_job or (command.name in ("cat", "tee", "") and _is_script(word))):
                found.append(_read(path, text, piece_of([word])))
    for view in found:
        submitted = ((text.file_of(each.start).path, each) for each in view.script.submitted)
        found += [_read(name, text, Piece(each.data, start=each.start), each) for name, each in submitted]
    return found


def read_branches(path: str, data: bytes) -> Iterator[View]:
    """Yield the scripts in a file, and again for each outcome of the branches that set what a launcher gets."""
    views = read_scripts(path, data)
    yield from views
    for at, outcomes in [*views[0].script.branches.items()][:_BRANCHES]:
        read = [read_scripts(path, data, taken={at: outcome}) for outcome in outcomes[:_OUTCOMES]]
        # Where another outcome is for many nodes, one for a single node belongs to a job of one node.
        has_many = any(not _is_for_one_node(found) for found in read)
        for found in read:
            yield from () if has_many and _is_for_one_node(found) else found


def _is_for_one_node(views: Sequence[View]) -> bool:
    """Return whether all launchers of a script, if it has any, are told of one node."""
    return all(launch.nnodes == 1 for launch in views[0].launches if not launch.is_python)


def _is_script(word: Word) -> bool:
    start = word.parts[0].text if word.parts else ""
    return start.startswith("#!") or bool(_DIRECTIVE.search(start.encode("utf-8", "surrogateescape")))


def _read(
    path: str,
    text: Text,
    piece: Piece,
    submitted: Submitted | None = None,
    run: Run | None = None,
    taken: dict[int, int] | None = None,
) -> View:
    first = piece.data.split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")
    script = Script(path, text, "plain", first if first.startswith("#!") else "")
    script.switch_on(script.shebang.split()[1:])
    directives = read_directives(piece)
    given = submitted.directives if submitted else []
    names = {directive.name for directive in given}
    script.directives = [each for each in directives if each.is_read and each.name not in names] + given
    _set_kind(script)
    view = View(script)
    walker = Walker(script, known_variables(script, view.resources), unwrap)
    walker.run = run
    walker.taken = taken or {}
    walker.values = submitted.values if submitted else {}
    walker.walk(piece, Context())
    # Lines of here-documents may look like directives; those after the first command are comments of the script itself.
    lines = {text.place(at).line for at, _ in script.comments}
    late = [directive for directive in directives if not directive.is_read]
    script.directives += [directive for directive in late if text.place(directive.at).line in lines]
    if script.kind == "plain":
        _set_kind(script)
    real = [command.at for command in script.commands if command.context.level == 0]
    script.first_command = min(real) if real else None
    return view


def _set_kind(script: Script) -> None:
    """Set the scheduler whose directives the script has."""
    families = {directive.family for directive in script.directives}
    script.kind = next((family for family in ("slurm", "pbs", "grid_engine") if family in families), "plain")
