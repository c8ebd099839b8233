"""The statements of a script around its training: what becomes a key of the job, a set-up line, or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from allranks.convert.draft import MOVED, Draft, home, path_of, short
from allranks.convert.launchers import RANK_VARIABLES, functions_of, known_commands, take_variable
from allranks.lint.launches import Launch
from allranks.lint.model import REMOTE, Assignment, Command

#: Commands that only print, wait or handle signals, and ``export``, whose variables are taken one by one.
_QUIET_NAMES: Final = """
    : [ awk basename break cat clear continue cut date declare df dirname echo exit export false free grep head
    hostname id kill killall local ls lscpu mapfile nvcc nvidia-smi pkill printenv printf pwd read readarray
    readonly return rocm-smi sacct scontrol sed seq set shift shopt sinfo sleep sort squeue tail tee test time tr
    trap true typeset uname uniq uptime wait wc which whoami
"""
_QUIET: Final = frozenset(_QUIET_NAMES.split())
#: Commands of a set-up that need no environment that is activated.
_PLAIN: Final = {
    *("cd", "chmod", "cp", "curl", "git", "ln", "mkdir", "mv", "rm", "rsync", "tar", "touch", "unzip", "wget"),
}
#: Commands that change the shell that runs them.
_OF_SHELL: Final = {"source", ".", "ulimit", "umask", "unset", "module", "ml"}
_NONE: Final = "a job needs none of it"
_ACTIVATES: Final = {"conda", "mamba", "micromamba", "source", "."}
#: Codes of settings that are dropped: they are gone, wrong, or the scheduler's.
_DROPPED: Final = {"AR501", "AR503", "AR504", "AR505", "AR507", "AR511", "AR512", "AR513", "AR514", "AR516", "AR517"}


class Statements:
    """Takes over the statements of a script, in their order.

    Args:
        draft: what is filled in.
        group: the commands that start the training.
        codes: lint's findings by line.
    """

    def __init__(self, draft: Draft, group: Sequence[Launch], codes: dict[int, set[str]]) -> None:
        self.draft = draft
        self.script = draft.view.script
        self.codes = codes
        self.group = [launch.command for launch in group]
        self.orders = {each.order for command in self.group for each in (*command.context.via, command)}
        text = self.script.text
        #: The files through which the training starts, by the offset of the command that reads each.
        self.files = {file.at: (file, command) for command in self.group for file in text.files_of(command.at)}
        self.orders |= {each.order for each in self.script.commands if each.at in self.files}
        self.functions = functions_of(self.script, self.group)
        inside: dict[str, set[str]] = {}
        for each in self.script.commands:
            inside.setdefault(each.context.function, set()).add(each.name)
        self.quiet = _QUIET | self.functions | {name for name, names in inside.items() if name and names <= _QUIET}
        ends = [(each.command.at, each.program.at if each.program else each.command.end) for each in group]
        for (at, end), command in zip([*ends], self.group, strict=True):
            is_same = text.file_of(command.root.at) is text.file_of(at)
            ends.append((command.root.at, end if is_same else command.root.end))
        #: Variables that the launchers' own options read: addresses, ports, node ranks.
        self.of_launchers = {use.name for use in self.script.uses if any(at <= use.at < end for at, end in ends)}
        self.of_program = " ".join(word.shown for command in self.group for word in command.words)
        self.activating: list[tuple[str, int]] = []
        self.is_activated = False
        self.taken: list[tuple[int, int]] = []

    def take(self) -> None:
        """Take over all statements of the script."""
        self._take(self.script.statements, is_inner=False)
        kept = {given.line for lines in self.draft.setup.values() for given in lines}
        for start, end in self.taken:
            source = self.draft.source(start, end)
            name = re.match(r"(\w+)\+?=", source)
            if name and name[1] not in self.script.exported and self.draft.line(start) not in kept:
                self.draft.left_out(start, f"{short(source, 60)}: its value stands where it is used")

    def _take(self, spans: list[tuple[int, int]], *, is_inner: bool) -> None:
        """Take over statements of one file; ``is_inner`` is whether it runs on each node."""
        spans = self.script.unfolded(spans)
        training = [any(each.order in self.orders for each in self._inside(*span)) for span in spans]
        calls = [any(each.name in self.functions for each in self._inside(*span)) for span in spans]
        last = max((at for at in range(len(spans)) if training[at] or calls[at]), default=0)
        for at, (start, end) in enumerate(spans):
            if training[at]:
                self._around(start, end)
                self._of_files(start, end)
            elif calls[at]:
                self._conditions([each for each in self._inside(start, end) if each.name in self.functions])
            elif at > last:
                if any(map(self._acts, self._inside(start, end))):
                    self._stands("after", start, end)
            else:
                self._one(start, end, is_inner=is_inner)
            if not training[at]:
                self.taken.append((start, end))

    def _of_files(self, start: int, end: int) -> None:
        """Take over the statements of a file that a statement reads, and through which the training starts."""
        for at, (file, command) in self.files.items():
            if start <= at < end:
                is_remote = any(each.name in REMOTE and each.at <= at for each in command.context.via)
                self._take(file.statements, is_inner=is_remote)

    def _inside(self, start: int, end: int) -> list[Command]:
        """Return the commands of a statement, without those whose output or exit code is asked for."""
        return [each for each in self.script.commands if start <= each.at < end and not each.context.is_substitution]

    def _acts(self, command: Command) -> bool:
        """Return whether a command does something that a job may need."""
        is_quiet = command.name in self.quiet or (command.name == "env" and not command.args)
        return bool(command.name) and (not is_quiet or self._writes(command))

    def _writes(self, command: Command) -> bool:
        """Return whether a command that would only print writes a file from a here-document, or one of the training."""
        redirects = (*command.redirects, *command.context.redirects)
        names = [word.shown for operator, word in redirects if operator in (">", ">>", ">|")]
        if command.name == "tee":
            names += [word.shown for word in command.args if not word.shown.startswith("-")]
        is_long = any(operator == "<<" for operator, _ in redirects)
        return any(is_long or name in self.of_program for name in names if name and not name.startswith("/dev/"))

    def _stands(self, where: str, start: int, end: int) -> None:
        self.draft.not_taken(start, f"{short(self.draft.source(start, end), 80)}: it stands {where} the training")

    def _around(self, start: int, end: int) -> None:
        """Take over what stands in one statement with the training: in its loop, function, or remote shell."""
        for command in self._inside(start, end):
            if command.order in self.orders or command.context.is_condition:
                continue
            is_before = command.order < max(self.orders)
            if is_before and self._is_of_another_branch(command):
                if self._acts(command):
                    self._stands("in another branch than", command.at, command.end)
                continue
            is_near = any(self._is_near(command, each) for each in self.group)
            is_remote = command.context.level > 0
            if is_before and is_near and not self._is_written(command):
                self._in_a_variable(command)
            elif is_before and is_near and (is_remote or not self.draft.is_remote):
                self._one(command.at, command.end, is_inner=is_remote)
            elif is_before and self._only_reaches(command):
                self.draft.left_out(command.at, f"{short(self.draft.source(command.at, command.end), 60)}: {_NONE}")
            elif self._acts(command) and (not command.context.via or not is_before):
                self._stands("beside", command.at, command.end)
        self._conditions([each for each in self.group if start <= each.at < end])

    def _is_of_another_branch(self, command: Command) -> bool:
        """Return whether a command is run only where no training of the group is."""
        own = dict(command.context.branches)
        return all(any(own.get(at, branch) != branch for at, branch in each.context.branches) for each in self.group)

    def _is_written(self, command: Command) -> bool:
        """Return whether a command stands where it is run, not in a variable that is run."""
        word = command.words[0] if command.words else None
        return word is None or not any(
            each.at == command.at and each.order != command.order and each.context.via == command.context.via
            for each in self.script.commands
        )

    def _in_a_variable(self, command: Command) -> None:
        """Take over what a shell runs before the training in a text that a variable holds."""
        if command.name == "cd" and len(command.args) == 1:
            self._change_directory(command)
        elif self._acts(command):
            what = f"{short(' '.join(word.shown for word in command.words), 80)}: it stands beside the training"
            self.draft.not_taken(command.at, what)

    def _is_near(self, command: Command, launch: Command) -> bool:
        """Return whether the shell that runs a command also starts the training, by ``nohup`` or the like too."""
        via = command.context.via
        return command.context.level == launch.context.level and launch.context.via[: len(via)] == via

    def _only_reaches(self, command: Command) -> bool:
        """Return whether a command has other machines do what a job needs none of, and is done there."""
        there = [each for each in self.script.commands if command in each.context.via]
        return command.name in REMOTE and bool(there) and not any(map(self._acts, there))

    def _conditions(self, commands: Sequence[Command]) -> None:
        """Name a condition or a loop around the training."""
        for command in commands[:1]:
            if command.context.is_conditional:
                what = "the training is started under a condition; here it always is"
                self.draft.not_taken(command.at, what)
            for loop in command.context.loops if not self.draft.is_remote else ():
                what = f"the loop over {loop.variable or 'its input'}: a job is one training; start one for each value"
                self.draft.not_taken(loop.at, what)

    def _one(self, start: int, end: int, *, is_inner: bool = False) -> None:
        """Take over one statement; ``is_inner`` is whether a remote shell runs it, on each node."""
        draft, source, commands = self.draft, self.draft.source(start, end), self._inside(start, end)
        names = {each.name for each in commands if self._acts(each)}
        simple = commands[0] if len(commands) == 1 else None
        if re.match(r"(?:function\s+)?[\w-]+\s*(?:\(\s*\))?\s*\{", source):
            return  # A function: it is kept with the line that calls it.
        if "eval" in source and re.search(r"conda|mamba", source):
            draft.left_out(start, f"{source}: allranks sets conda up")
        elif simple and simple.name in ("module", "ml"):
            self._module(simple, source)
        elif simple and simple.name in _ACTIVATES and self._activate(simple, source):
            self.activating.append((source, start))
        elif simple and simple.name in ("cd", "pushd") and len(simple.args) == 1:
            self._change_directory(simple)
        elif not names:
            self._variables(start, end, commands, is_inner)
        elif simple and simple.name == "mkdir" and self._is_log_directory(simple):
            draft.left_out(start, f"{source}: the log is in the run's directory")
        elif names <= _OF_SHELL:
            self._keep(start, end, is_inner)
        elif any(each.context.background == start for each in commands if each.name in names) and not self._waits(end):
            draft.not_taken(start, f"{short(source, 80)}: it runs beside the training: start it by hand")
        elif draft.is_remote:
            self._with_what_it_reads("node_setup", start, end)
        else:  # It runs once, before the nodes start, in the environment that it needs.
            for line, at in self.activating if names - _PLAIN - _QUIET else ():
                draft.add_line("setup", line, at)
            self._with_what_it_reads("setup", start, end)

    def _waits(self, at: int) -> bool:
        """Return whether the script waits for what runs in the background, between a place and its training."""
        first = min(each.root.at for each in self.group)
        return any(at <= each.at < first for each in self.script.named("wait"))

    # --- environments -------------------------------------------------------------------------------------------

    def _module(self, command: Command, source: str) -> None:
        draft, words = self.draft, [word.shown for word in command.args]
        if command.name == "ml" and words[:1] and words[0] not in ("load", "purge", "use", "unload", "list"):
            words.insert(0, "load")
        if words[:1] in ([], ["list"], ["avail"]):
            draft.left_out(command.at, f"{source}: it prints only")
            return
        self.activating.append((source, command.at))
        if words[0] in ("load", "add") and all(word.value for word in command.args) and not self.is_activated:
            modules = [*(draft.get("environment.modules") or []), *words[1:]]
            draft.put("environment.modules", modules, command.at, source)
        else:
            is_late = draft.is_remote or self.is_activated
            draft.add_line("node_setup" if is_late else "setup", source, command.at)

    def _activate(self, command: Command, source: str) -> bool:
        """Take over the activation of an environment; return whether it is one."""
        draft, words = self.draft, command.args
        first = home(words[0].shown) if words else ""
        sources = command.name in ("source", ".")
        if first == "deactivate" or (sources and first.endswith((".bashrc", ".bash_profile", ".profile"))):
            why = "in a job it often returns at once; environment.setup can have it"
            draft.left_out(command.at, f"{source}: {why}" if sources else source)
        elif sources and first.endswith(("conda.sh", "mamba.sh")):
            draft.add_line("node_setup" if draft.is_remote else "setup", source, command.at)
        elif first == "activate" or (sources and first.endswith("/bin/activate")):
            is_conda = not first.endswith("/bin/activate") or first.endswith("conda3/bin/activate")
            name = path_of(words[1]) if len(words) > 1 else "base"
            self.is_activated = True
            if is_conda and name is not None and not (draft.is_remote and draft.setup.get("node_setup")):
                draft.put("environment.conda", name, command.at, source)
            elif not is_conda and path_of(words[0]):
                venv = self._below_workdir(first.removesuffix("/bin/activate"))
                draft.put("environment.venv", venv, command.at, source)
            else:
                draft.add_line("node_setup", source, command.at)
        else:
            return False
        return True

    def _below_workdir(self, path: str) -> str:
        before = self.draft.get("workdir")
        return f"{before}/{path}" if before and not path.startswith(("/", "~")) else path

    def _change_directory(self, command: Command) -> None:
        draft, word = self.draft, command.args[0]
        text, path = f"{command.name} {word.shown}", path_of(word)
        if path == "." and any(part.kind == "command" for part in word.parts):
            text = draft.source(command.at, command.end)
        if word.names("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "SGE_O_WORKDIR", "PWD") and word.parts[0].value is None:
            rest = "".join("\0" if part.value is None else part.value for part in word.parts[1:])
            path = None if "\0" in rest else os.path.normpath(f".{rest}")
        elif draft.kind == "local" and re.match(r"\$(0|BASH_SOURCE)", word.shown):
            path = os.path.normpath(f"{PurePath(draft.path).parent}{''.join(part.text for part in word.parts[1:])}")
        elif draft.kind == "pbs" and path and not path.startswith(("/", "~", ".")):
            first = next(self.script.named("cd", "pushd"), None)
            path = f"~/{path}" if command is first else path  # PBS starts a script there.
        if path and not path.startswith("~"):
            path = os.path.normpath(path)
        if path == ".":
            draft.left_out(command.at, f"{text}: the ranks start where the job file is, or in workdir")
        elif path:
            draft.put("workdir", self._below_workdir(path), command.at, text)
        else:
            draft.not_taken(command.at, f"{text}: workdir expands no variables")

    # --- variables and lines ------------------------------------------------------------------------------------

    def _variables(self, start: int, end: int, commands: Sequence[Command], is_inner: bool) -> None:
        """Take over the variables that a statement exports, if it does nothing else that a job needs."""
        draft, source = self.draft, self.draft.source(start, end)
        exported = [each for each in self.script.assignments if start <= each.at < end and self._is_exported(each)]
        has_loop = not is_inner and any(each.context.loops for each in commands)
        is_compound = source.startswith(("if ", "for ", "while ")) or has_loop
        if is_compound and any(each.name not in RANK_VARIABLES for each in exported):
            self._keep(start, end, is_inner)
        elif not exported and any(each.name != "export" for each in commands):
            draft.left_out(start, f"{short(source, 60)}: {_NONE}")
        for each in exported if not is_compound else ():
            if faults := self.codes.get(draft.line(each.at), set()) & _DROPPED:
                draft.changed(each.at, f"{short(source, 60)} is left out: {', '.join(sorted(faults))}")
            elif each.name in self.of_launchers and each.value is None:
                draft.left_out(each.at, f"{short(source, 60)}: it was for the launcher")
            elif take_variable(draft, each, "setup"):
                self._keep(start, end, is_inner)

    def _is_exported(self, given: Assignment) -> bool:
        return (given.is_exported or given.name in self.script.exported) and not given.is_prefix

    def _keep(self, start: int, end: int, is_inner: bool) -> None:
        """Keep a statement as a set-up line, on each node where it depends on what is activated there."""
        source, is_remote = self.draft.source(start, end), self.draft.is_remote
        on_nodes = (is_inner or self.is_activated or "ulimit" in source) and not re.search(r"\$\(|`", source)
        self._with_what_it_reads("node_setup" if on_nodes or is_remote else "setup", start, end)

    def _with_what_it_reads(self, where: str, start: int, end: int) -> None:
        """Keep a statement, after those that set its variables or define its functions."""
        names, needed = self._names_in(start, end), [(start, end)]
        for first, last in reversed(self.taken):
            sets = {each.name for each in self.script.assignments if first <= each.at < last and not each.is_prefix}
            name = re.match(r"(?:function\s+)?([\w-]+)\s*(?:\(\s*\))?\s*\{", self.draft.source(first, last))
            if ({name[1]} if name else sets) & names:
                names |= self._names_in(first, last)
                needed.append((first, last))
        if any(self.draft.is_moved(first, self.draft.source(first, last)) for first, last in needed):
            self.draft.not_taken(start, f"{short(self.draft.source(start, end), 60)}: {MOVED}")
            return
        arguments = sorted({each for first, last in needed for each in self._arguments_in(first, last)})
        if arguments and any(map(self._acts, self._inside(start, end))):
            what = f"it reads {', '.join(f'${each}' for each in arguments)} of the script: give the value behind --"
            self.draft.not_taken(start, f"{short(self.draft.source(start, end), 60)}: {what}")
            return
        for read in arguments:
            what = f"a line of environment.{where} reads it, an argument of the script: write its value there"
            self.draft.not_taken(start, f"${read}: {what}")
        for first, last in reversed(needed):
            line = self._values_of(first, last) or self.draft.source(first, last)
            if (name := re.match(r"(\w+)=", line)) and name[1] in self.script.exported:
                line = f"export {line}"  # It is exported further down.
            self.draft.add_line(where, self._that_may_fail(line, first), first)

    def _that_may_fail(self, line: str, at: int) -> str:
        """Return a line so that it fails no more than in the script, which went on: one of the set-up ends the job."""
        if line.startswith("mkdir ") and not line.startswith("mkdir -"):
            line, added = f"mkdir -p{line[5:]}", "-p"
        elif re.fullmatch(r"ulimit [^|&;]+", line) and "errexit" not in self.script.shell_options:
            line, added = f"{line} || true", "|| true"
        else:
            return line
        self.draft.changed(at, f"{short(line, 60)}: with {added}, since a line of the set-up that fails ends the job")
        return line

    def _arguments_in(self, start: int, end: int) -> set[str]:
        """Return the arguments of the script that a statement reads, without those that a function in it gets."""
        if re.match(r"(?:function\s+)?[\w-]+\s*(?:\(\s*\))?\s*\{", self.draft.source(start, end)):
            return set()
        used = {each.name for each in self.script.uses if start <= each.at < end and not each.has_default}
        given = {str(number + 1) for number in range(len(self.draft.arguments))}
        return {name for name in used - given if re.fullmatch(r"[1-9]\d*|[@*]", name)}

    def _values_of(self, start: int, end: int) -> str:
        """Return an assignment that prints the script's directory with what that is: a set-up line has none."""
        source = self.draft.source(start, end)
        found = re.match(r"(?:export\s+)?(?=\w+=)", source)
        given = next((each for each in self.script.assignments if found and each.at == start + found.end()), None)
        written = given and known_commands(self.draft, given)
        return f"{found[0]}{written}" if found and written else ""

    def _names_in(self, start: int, end: int) -> set[str]:
        """Return the variables that a statement reads, and the commands that it calls."""
        names = {each.name for each in self.script.uses if start <= each.at < end}
        return names | {each.name for each in self._inside(start, end)}

    def _is_log_directory(self, command: Command) -> bool:
        """Return whether ``mkdir`` makes the directories of the scheduler's log alone."""
        logs = {os.path.dirname(each.value) for each in self.script.options("output", "error", "-o", "-e")}  # noqa: PTH120
        paths = {word.shown.rstrip("/") for word in command.args if not word.shown.startswith("-")}
        return bool(paths) and paths <= {log.removeprefix("./") for log in logs} | logs
