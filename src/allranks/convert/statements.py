"""The statements of a script around its training: what becomes a key of the job, a set-up line, or nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from allranks.convert.draft import REMOTE_KINDS, Draft, home, path_of, short
from allranks.convert.launchers import RANK_VARIABLES, take_variable
from allranks.lint.launches import Launch
from allranks.lint.model import Assignment, Command

#: Commands that only print or wait, or whose work allranks does.
_PRINTS: Final = {
    *(
        "echo",
        "printf",
        "date",
        "hostname",
        "nvidia-smi",
        "rocm-smi",
        "printenv",
        "pwd",
        "whoami",
        "sleep",
        "wait",
        "exit",
    ),
    *(
        "true",
        ":",
        "uptime",
        "lscpu",
        "free",
        "df",
        "squeue",
        "sinfo",
        "sstat",
        "sacct",
        "which",
        "lsb_release",
        "uname",
    ),
    *(
        "module list",
        "cat",
        "id",
        "ls",
        "nvcc",
        "head",
        "tail",
        "grep",
        "sort",
        "uniq",
        "awk",
        "sed",
        "wc",
        "tr",
        "cut",
    ),
    *("set", "shopt", "trap", "kill", "scontrol", "pkill", "killall", "test", "[", "time", "return", "read", "mapfile"),
    *(
        "readarray",
        "break",
        "continue",
        "shift",
        "local",
        "clear",
        "sync",
        "seq",
        "deactivate",
        "tee",
        "basename",
        "dirname",
    ),
}
#: Commands of a set-up that need nothing that is activated.
_PLAIN: Final = {
    "mkdir",
    "cp",
    "mv",
    "rm",
    "ln",
    "tar",
    "unzip",
    "rsync",
    "touch",
    "chmod",
    "wget",
    "curl",
    "git",
    "cd",
}
#: Codes of settings that are dropped: they are gone, wrong, or the scheduler's.
_DROPPED: Final = {"AR501", "AR503", "AR504", "AR505", "AR507", "AR511", "AR512", "AR513", "AR514", "AR516", "AR517"}
_CONDA = re.compile(r"conda\S*\s+(shell\.\w+\s+hook|activate|deactivate|shell hook)|micromamba shell hook")
_ACTIVATE = re.compile(r"(.*)/bin/activate$")


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
        self.orders = {each.order for launch in group for each in (*launch.command.context.via, launch.command)}
        self.functions = {launch.command.context.function for launch in group} - {""}
        self.activated: list[tuple[str, int]] = []
        self.is_activated = False
        starts = [(each.command.root.at, each.program.at if each.program else each.command.end) for each in group]
        #: Variables that the launchers' own options read: addresses, ports, node ranks.
        self.of_launchers = {use.name for use in self.script.uses if any(at <= use.at < end for at, end in starts)}

    def take(self) -> None:
        """Take over all statements of the script."""
        spans = self.script.statements
        last = max((at for at, span in enumerate(spans) if self._starts_training(*span)), default=len(spans))
        for position, (start, end) in enumerate(spans):
            commands = [each for each in self.script.commands if start <= each.at < end]
            assignments = [each for each in self.script.assignments if start <= each.at < end]
            if self._starts_training(start, end):
                self._around(commands, assignments)
            elif position > last:
                self._after(start, end, commands)
            else:
                self._one(start, end, commands, assignments)
        kept = {given.value for lines in self.draft.setup.values() for given in lines}
        for start, end in spans:
            source = self.draft.source(start, end)
            is_local = re.match(r"\w+=", source) and source.partition("=")[0] not in self.script.exported
            if is_local and source not in kept and not self._starts_training(start, end):
                self.draft.note("left out", start, f"{short(source, 60)}: its value stands where it is used")

    def _starts_training(self, start: int, end: int) -> bool:
        inside = [each for each in self.script.commands if start <= each.at < end]
        return any(each.order in self.orders and not each.context.is_substitution for each in inside)

    def _after(self, start: int, end: int, commands: list[Command]) -> None:
        if any(self._acts(each) for each in commands):
            self.draft.note(
                "not taken over", start, f"{short(self.draft.source(start, end), 80)}: it stands after the training"
            )

    def _acts(self, command: Command) -> bool:
        """Return whether a command does something that a job may need."""
        quiet = command.context.is_substitution or command.name in self.functions
        return (
            not quiet
            and bool(command.name)
            and command.name not in _PRINTS | {"export", "declare", "typeset", "readonly"}
        )

    def _around(self, commands: list[Command], assignments: list[Assignment]) -> None:
        """Take over what stands in one statement with the training: in its loop, function, or remote shell."""
        first = min(self.orders)
        for command in commands:
            if command.order in self.orders or command.context.is_substitution or command.context.is_condition:
                continue
            training = [each for each in self.script.commands if each.order in self.orders]
            if command.order < max(self.orders) and any(command.context.via == each.context.via for each in training):
                inner = [each for each in assignments if command.at <= each.at < command.end and not each.is_prefix]
                self._one(command.at, command.end, [command], inner, is_inner=command.context.level > 0)
            elif command.order > first and self._acts(command) and not command.context.via:
                text = short(self.draft.source(command.at, command.end), 80)
                self.draft.note("not taken over", command.at, f"{text}: it stands beside the training")
        training_context = next(each.context for each in commands if each.order in self.orders)
        if training_context.is_conditional:
            self.draft.note(
                "not taken over", commands[0].at, "the training is started under a condition; here it always is"
            )
        for loop in training_context.loops:
            remote = any(each.name in ("ssh", "rsh") for each in commands if each.order in self.orders)
            if not remote:
                what = f"the loop over {loop.variable or 'its input'}: a job is one training; start one for each value"
                self.draft.note("not taken over", loop.at, what)

    def _one(
        self, start: int, end: int, commands: list[Command], assignments: list[Assignment], *, is_inner: bool = False
    ) -> None:
        """Take over one statement."""
        draft, source = self.draft, self.draft.source(start, end)
        outer = [each for each in commands if not each.context.is_substitution]
        simple = outer[0] if len(outer) == 1 else None
        if _CONDA.search(source) and "eval" in source:
            draft.note("left out", start, f"{source}: allranks sets conda up")
        elif any(each.context.function for each in commands) and not is_inner and source.rstrip().endswith("}"):
            pass  # A function: it is kept where it is called, with the line that does.
        elif simple is not None and simple.name in ("module", "ml"):
            self._module(simple, source)
        elif (
            simple is not None
            and simple.name in ("conda", "mamba", "micromamba", "source", ".")
            and self._activate(simple, source)
        ):
            pass
        elif simple is not None and simple.name in ("cd", "pushd") and len(simple.args) == 1:
            self._change_directory(simple)
        elif all(not self._acts(each) for each in commands):
            self._settings(start, end, commands, assignments, is_inner)
        else:
            names = {each.name for each in commands if self._acts(each)}
            if simple is not None and simple.name == "mkdir" and self._is_log_directory(simple):
                draft.note("left out", start, f"{source}: the log is in the run's directory")
            elif names & {"source", ".", "ulimit", "umask", "unset", "export"} and not names - {
                "source",
                ".",
                "ulimit",
                "umask",
                "unset",
            }:
                self._keep(start, end, is_inner)
            else:
                self._once(start, end, names)

    # --- environments -------------------------------------------------------------------------------------------

    def _module(self, command: Command, source: str) -> None:
        draft, words = self.draft, [word.shown for word in command.args]
        if command.name == "ml" and words and words[0] not in ("load", "purge", "use", "unload", "list"):
            words = ["load", *words]
        if not words or words[0] in ("list", "avail"):
            draft.note("left out", command.at, f"{source}: it prints only")
        elif words[0] in ("load", "add") and all(word.value for word in command.args) and not self.is_activated:
            before = draft.get("environment.modules") or []
            draft.put("environment.modules", [*before, *words[1:]], command.at, source)
        else:
            draft.add_line(
                "node_setup" if draft.kind in REMOTE_KINDS or self.is_activated else "setup", source, command.at
            )
        self.activated.append((source, command.at))

    def _activate(self, command: Command, source: str) -> bool:
        """Take over the activation of an environment; return whether it is one."""
        draft, words = self.draft, command.args
        self.activated.append((source, command.at))
        if command.name in ("source", ".") and words:
            first = home(words[0].shown)
            if words[0].value == "activate" or (first.endswith("/activate") and "conda" in first and len(words) > 1):
                pass  # source activate NAME, of old versions of conda.
            elif match := _ACTIVATE.match(first):
                if path_of(words[0]):
                    draft.put("environment.venv", match[1], command.at, source)
                else:
                    draft.add_line("node_setup", source, command.at)
                self.is_activated = True
                return True
            elif first.endswith(("conda.sh", "mamba.sh")):
                draft.add_line("node_setup" if draft.kind in REMOTE_KINDS else "setup", source, command.at)
                return True
            elif first.endswith((".bashrc", ".bash_profile", ".profile")):
                draft.note(
                    "left out",
                    command.at,
                    f"{source}: in a job it often returns at once; environment.setup can have it",
                )
                return True
            else:
                self.activated.pop()
                return False
        elif not words or words[0].value != "activate":
            return bool(words) and words[0].value == "deactivate"
        name = home(words[1].shown) if len(words) > 1 else "base"
        is_remote = draft.kind in REMOTE_KINDS and "node_setup" in draft.setup
        if is_remote or (len(words) > 1 and path_of(words[1]) is None):
            draft.add_line("node_setup", source, command.at)
        else:
            draft.put("environment.conda", name, command.at, source)
        self.is_activated = True
        return True

    def _change_directory(self, command: Command) -> None:
        draft, word = self.draft, command.args[0]
        text = f"{command.name} {word.shown}"
        if word.names("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR", "SGE_O_WORKDIR", "PWD") and len(word.parts) == 1:
            draft.note("left out", command.at, f"{text}: workdir is where the job file is")
        elif draft.kind == "local" and re.match(r"\$\(\s*dirname|\$\{(0|BASH_SOURCE\S*)%/\*\}", word.shown):
            below = "".join(part.text for part in word.parts[1:])
            folder = os.path.normpath(f"{PurePath(draft.path).parent}{below}")
            if folder != ".":
                draft.put("workdir", folder, command.at, text)
            else:
                draft.note("left out", command.at, f"{text}: workdir is where the job file is")
        elif path := path_of(word):
            is_below = draft.get("workdir") and not path.startswith(("/", "~"))
            draft.put("workdir", f"{draft.get('workdir')}/{path}" if is_below else path, command.at, text)
        else:
            draft.note("not taken over", command.at, f"{text}: workdir, which expands no variables")

    # --- variables and lines ------------------------------------------------------------------------------------

    def _settings(
        self, start: int, end: int, commands: list[Command], assignments: list[Assignment], is_inner: bool
    ) -> None:
        """Take over a statement that sets variables, or does nothing that a job needs."""
        draft, source = self.draft, self.draft.source(start, end)
        is_compound = any(each.context.is_conditional or each.context.loops for each in commands) or source.startswith(
            "if "
        )
        exported = [
            each for each in assignments
            if (each.is_exported or each.name in self.script.exported) and not each.is_prefix
        ]  # fmt: skip
        if is_compound and any(each.name not in RANK_VARIABLES for each in exported):
            self._keep(start, end, is_inner)
            return
        if (
            not exported
            and commands
            and any(each.name not in ("export", "declare") for each in commands if not each.context.is_substitution)
        ):
            draft.note("left out", start, f"{source}: a job needs none of it")
            return
        for each in exported:
            faults = self.codes.get(draft.line(each.at), set()) & _DROPPED
            if faults:
                draft.note("changed", each.at, f"{short(source, 60)} is left out: {', '.join(sorted(faults))}")
            elif each.name in self.of_launchers and each.value is None:
                draft.note("left out", each.at, f"{short(source, 60)}: it was for the launcher")
            elif take_variable(draft, each, "setup"):
                self._keep(start, end, is_inner)

    def _keep(self, start: int, end: int, is_inner: bool) -> None:
        """Keep a statement as a set-up line, on each node where it depends on what is activated there."""
        source = self.draft.source(start, end)
        everywhere = is_inner or self.draft.kind in REMOTE_KINDS or self.is_activated or "ulimit" in source
        where = (
            "node_setup"
            if (everywhere and not re.search(r"\$\(|`", source)) or self.draft.kind in REMOTE_KINDS
            else "setup"
        )
        self._with_what_it_reads(where, start, end)

    def _once(self, start: int, end: int, names: set[str]) -> None:
        """Keep commands that run once, before the nodes start, with the environment that they need."""
        if self.draft.kind in REMOTE_KINDS:
            self._with_what_it_reads("node_setup", start, end)
            return
        if names - _PLAIN:
            for source, at in self.activated:
                self.draft.add_line("setup", source, at)
        self._with_what_it_reads("setup", start, end)

    def _with_what_it_reads(self, where: str, start: int, end: int) -> None:
        """Keep a statement, after those that set its variables or define its functions."""
        names = {each.name for each in self.script.uses if start <= each.at < end}
        names |= {each.name for each in self.script.commands if start <= each.at < end and not each.context.via}
        for first, last in self.script.statements:
            if first >= start:
                break
            source = self.draft.source(first, last)
            sets = {each.name for each in self.script.assignments if first <= each.at < last and not each.is_prefix}
            defines = re.match(r"(?:function\s+)?([\w-]+)\s*(?:\(\))?\s*\{", source)
            if (sets & names and not source.startswith("export")) or (defines and defines[1] in names):
                self.draft.add_line(where, source, first)
        self.draft.add_line(where, self.draft.source(start, end), start)

    def _is_log_directory(self, command: Command) -> bool:
        """Return whether ``mkdir`` makes the directories of the scheduler's log alone."""
        logs = [each.value.rpartition("/")[0] for each in self.script.options("output", "error", "-o", "-e")]
        paths = [word.shown.rstrip("/") for word in command.args if not word.shown.startswith("-")]
        return bool(paths) and all(
            any(path.removeprefix("./") == log.removeprefix("./") for log in logs) for path in paths
        )
