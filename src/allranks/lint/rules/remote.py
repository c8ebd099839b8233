"""SSH and pdsh: what runs here instead of there, what does not travel, and what is not heard of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import Command, Word
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, Edit, Found, fatal, hint, is_host_name, likely
from allranks.lint.syntax import read_call
from allranks.lint.unwrap import SHELLS

_SSH, _PDSH = "ssh(1) of OpenSSH 9", "pdsh(1)"
_SET_UP = ("cd", "source", ".", "export", "conda", "module")
#: Programs whose command a shell on the other machine reads.
_SHELLS_THERE = ("ssh", "pdsh", "clush")
#: Variables that each login has.
_SET_EVERYWHERE = {"HOME", "PATH", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME"}
#: Files and commands that a shell reads for an environment of Python, and which set nothing else.
_ONLY_PYTHON = re.compile(r"bin/activate|conda\.sh|(?:conda|mamba)\S* shell")
_FOR_RANKS = re.compile(r"(?:NCCL|GLOO|TORCH|MASTER|OMP|CUDA|HF|WANDB)_")
_ACTIVATES = re.compile(r"activate|conda\.sh|conda shell|module load|ml load|/etc/profile|\.bashrc|\.bash_profile")


def _over_ssh(view: View) -> Iterator[tuple[Command, Launch]]:
    """Yield the launches over SSH, with their ssh."""
    return ((launch.starter, launch) for launch in view.started_by("ssh") if launch.starter)


@fatal(
    "AR601 second-half-runs-here",
    "ssh takes {there} along; {here} runs on this machine",
    fix="quote the whole remote command: ssh host 'cd /path && torchrun …'",
    source=f"{BASH}, Lists",
)
def _split_here(view: View) -> Iterator[Found]:
    commands = [command for command in view.script.commands if not command.context.is_substitution]
    for command, call in view.calls("ssh"):
        there = call.rest[1] if 1 < len(call.rest) <= 4 else None
        if there is None or command.context.is_substitution or there.value not in _SET_UP or there.parts[0].quote:
            continue
        siblings = [other for other in commands if other.context.via == command.context.via]
        after = next((other for other in siblings if other.order > command.order), None)
        is_on_line = after is not None and view.place(after.at).line == view.place(command.end).line
        if after is not None and is_on_line and after.name != "wait":
            yield Found(after.at, {"here": after.words[0].shown if after.words else "", "there": there.value})


@likely(
    "AR602 name-of-this-machine",
    "{part} is expanded here: each host gets this machine's",
    fix="single quotes around the remote command",
    source=f"{BASH}, Quoting",
)
def _local_name(view: View) -> Iterator[Found]:
    for launch in view.started_by(*_SHELLS_THERE):
        before = ""
        for word in launch.command.words:
            option = f"{before} {word.prefix.partition('=')[0]}"
            is_address = re.search("addr|endpoint", option) or "ip" in before
            for part in word.parts if not is_address else ():
                if is_host_name(part, "hostname|nvidia-smi") and launch.command.is_expanded_early(part):
                    yield Found(part.at, {"part": part.shown})
            before = word.shown


@likely(
    "AR603 environment-stays-here",
    "what is activated here does not hold there: a remote command gets no login shell, no conda, no modules, another "
    "PATH",
    fix="activate in the remote command: {starter} … 'source /path/venv/bin/activate && torchrun …'",
    source=f"{_SSH}: a command gets no login shell",
)
def _no_environment(view: View) -> Iterator[Found]:
    commands = view.script.commands
    here = (command for command in commands if command.context.level == 0 and not command.context.via)
    if not any(map(_activates, here)):
        return
    for launch in view.started_by(*_SHELLS_THERE):
        there = [command for command in commands if launch.starter in command.context.via]
        is_login = any(command.name == "bash" and "-l" in command.first for command in there)
        program = launch.command.words[0]
        is_path = program.value is None or "/" in program.shown
        if not is_login and not is_path and not any(map(_activates, there)):
            yield Found(launch.command.at, {"starter": launch.starter_name})
            return


def _activates(command: Command) -> bool:
    return bool(_ACTIVATES.search(" ".join(word.shown for word in command.words[:4])))


@likely(
    "AR604 exports-stay-here",
    "{name} is exported here, and does not travel to the ranks over SSH",
    fix='set it in the remote command: ssh host "{name}=… torchrun …"',
    source=f"{_SSH} SendEnv",
)
def _exports_stay(view: View) -> Iterator[Found]:
    script, data = view.script, view.script.text.data
    launches = view.started_by(*_SHELLS_THERE)
    if not launches or len(launches) != len(view.launches) or b"SendEnv" in data:
        return
    for assignment in script.assignments:
        name = assignment.name
        is_here = not assignment.level and not assignment.is_prefix and name in script.exported
        if is_here and _FOR_RANKS.match(name) and data.count(name.encode()) <= 1:
            yield Found(assignment.at, {"name": name})


@fatal(
    "AR605 loop-input-is-eaten",
    "{program} reads the rest of the list from the loop's input: only the first host is reached",
    fix="{program} {option}",
    source=f"{_SSH} -n",
)
def _eats_input(view: View) -> Iterator[Found]:
    for command, call in view.calls("ssh", "srun"):
        in_loop = any(loop.kind == "while" and loop.reads_input for loop in command.context.loops)
        if not in_loop or command.context.via or command.context.is_substitution or command.has_input:
            continue
        if not call.get("-n", "--input"):
            end = command.words[0].end
            option, edits = ("-n", (Edit(end, end, b" -n"),)) if command.name == "ssh" else ("--input=none", ())
            yield Found(command.at, {"program": command.name, "option": option}, edits)


@fatal(
    "AR606 one-after-the-other",
    "the loop waits for the first host's launcher, which waits for the other hosts",
    fix="& after the command, and wait after the loop",
    source=BASH,
)
def _one_after_the_other(view: View) -> Iterator[Found]:
    for command, launch in _over_ssh(view):
        context = command.context
        many = launch.has_many_nodes or (launch.is_torch and launch.nnodes is None and launch.call.get("--node-rank"))
        is_apart = context.is_background or launch.command.context.is_background or read_call(command).get("-f")
        if context.loops and many and not is_apart and not context.function:
            yield Found(command.at)


@likely(
    "AR607 terminal-in-background",
    "ssh -t in the background stops as soon as it touches the terminal",
    fix="leave -t out",
    source=f"{_SSH} -t",
)
def _terminal(view: View) -> Iterator[Found]:
    for command, call in view.calls("ssh"):
        given = call.get("-t")
        if given and command.context.is_background:
            yield Found(given.at)


@hint(
    "AR608 ssh-may-ask",
    "where a key is missing ssh asks for a password, and the loop waits",
    fix="ssh -o BatchMode=yes -o ConnectTimeout=10",
    source="ssh_config(5) BatchMode",
)
def _no_batch_mode(view: View) -> Iterator[Found]:
    for command, _ in _over_ssh(view):
        if command.context.loops and "BatchMode" not in command.text:
            yield Found(command.at)
            return


@likely(
    "AR609 remote-exit-code-is-lost",
    "{program} exits with 0 when the remote command fails",
    fix="{program} -S",
    source=f"{_PDSH} -S",
)
def _exit_code(view: View) -> Iterator[Found]:
    for launch in view.started_by("pdsh", "clush"):
        if launch.starter and not read_call(launch.starter).get("-S"):
            yield Found(launch.starter.at, {"program": launch.starter.name})


@hint(
    "AR610 host-keys-not-checked",
    "StrictHostKeyChecking=no trusts whatever answers",
    fix="StrictHostKeyChecking=accept-new",
    source="ssh_config(5) StrictHostKeyChecking",
)
def _host_keys(view: View) -> Iterator[Found]:
    for command in view.script.named("ssh", "scp", "pdsh"):
        for word in command.args:
            if "StrictHostKeyChecking=no" in word.shown:
                yield Found(word.at)
                return


@hint(
    "AR611 forwarding",
    "{option} forwards the display or the agent to each node, which a training has no use for",
    fix="leave {option} out",
    source=f"{_SSH} -X, -A",
)
def _forwarding(view: View) -> Iterator[Found]:
    for command, _ in _over_ssh(view):
        if given := read_call(command).get("-X", "-Y", "-A"):
            yield Found(given.at, {"option": given.name})


@likely(
    "AR612 ssh-holds-on",
    "ssh does not return: the command in the background keeps the connection's output open",
    fix="nohup … > log 2>&1 < /dev/null &",
    source=f"{_SSH} -n, -f",
)
def _holds_on(view: View) -> Iterator[Found]:
    for starter, launch in _over_ssh(view):
        command = launch.command
        if not command.context.is_background or starter.context.is_background:
            continue
        root = next(outer for outer in (*command.context.via, command) if outer.context.is_background)
        if not any(operator.startswith((">", "&>")) for operator, _ in (*command.redirects, *root.redirects)):
            yield Found(command.at)


@likely(
    "AR613 ends-with-the-connection",
    "the remote command may get SIGHUP when the connection closes",
    fix="setsid nohup … > log 2>&1 < /dev/null &",
    source="nohup(1)",
)
def _dies_with_terminal(view: View) -> Iterator[Found]:
    for starter, launch in _over_ssh(view) if view.script.kind == "plain" else ():
        command = launch.command
        is_inside = command.context.is_background and not starter.context.is_background
        if is_inside and command.started_by("nohup", "setsid") is None:
            yield Found(command.at)


@fatal(
    "AR614 set-here-read-there",
    "{name} is set in this shell: the one that {program} starts on each node has no value for it",
    fix="give it to the remote command as an argument, or set it there",
    source=f"{_SSH} SendEnv, pbsdsh(1B)",
)
def _read_there(view: View) -> Iterator[Found]:
    script = view.script
    here = {each.name for each in script.assignments if not each.level} - _SET_EVERYWHERE
    there = {each.name for each in script.assignments if each.level}
    read = {file.at for file in script.text.files[1:]}
    sourced = [command for command in script.named("source", ".", "eval") if command.at not in read]
    unread = [command.context.via for command in sourced if not _ONLY_PYTHON.search(command.text)]
    for launch in view.started_by(*_SHELLS_THERE, "pbsdsh", "pbs_tmrsh") if b"SendEnv" not in script.text.data else ():
        if any(outer is launch.starter for via in unread for outer in via):
            continue  # What such a file sets is not known.
        for part in launch.command.variables:
            is_empty = part.value is None and not part.has_default and part.text in here - there
            if is_empty and launch.command.is_expanded_there(part):
                yield Found(part.at, {"name": part.text, "program": launch.starter_name})


@likely(
    "AR615 set-there-expanded-here",
    "{program} sets {name}, and the shell here has put in its own value of ${name} before: none, or another",
    fix="\\${name}, or single quotes around the text",
    source=f"{BASH}, Quoting, Here Documents",
)
def _expanded_before(view: View) -> Iterator[Found]:
    script = view.script
    here = {each.name for each in script.assignments if not each.level}
    there = {each.name: each for each in reversed(script.assignments) if each.level and each.parts is not None}
    texts = [(word, command) for command in script.commands for word in _texts(command)] if there else []
    for use in script.uses:
        first = there.get(use.name)
        if first is None or use.name in here or use.name.endswith("PATH") or not first.at < use.at:
            continue
        is_after = re.search(rb"[\n;&]", script.text.data[first.at : use.at])
        for word, command in texts if is_after else ():
            is_early = use.level <= command.context.level < first.level
            if is_early and word.at <= first.at < use.at < word.end:
                yield Found(use.at, {"name": use.name, "program": command.name})
                break


def _texts(command: Command) -> list[Word]:
    """Return the texts of a command that another shell reads."""
    if command.name not in (*_SHELLS_THERE, *SHELLS):
        return []
    return [*command.args, *(word for operator, word in command.redirects if operator == "<<")]
