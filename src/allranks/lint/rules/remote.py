"""SSH and pdsh: what runs here instead of there, what does not travel, and what is not heard of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import Command
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, Edit, Found, fatal, hint, is_expanded_too_early, likely
from allranks.lint.syntax import read_call

_SSH, _PDSH = "ssh(1) of OpenSSH 9", "pdsh(1)"
_SET_UP = ("cd", "source", ".", "export", "conda", "module")
_ACTIVATES = re.compile(r"activate|conda\.sh|conda shell|module load|ml load|/etc/profile|\.bashrc|\.bash_profile")


def _remote(view: View, *names: str) -> Iterator[Launch]:
    return (launch for launch in view.launches if launch.starter is not None and launch.starter.name in names)


@fatal(
    "AR601 second-half-runs-here",
    "ssh takes {there} along; {here} runs on this machine",
    fix="quote the whole remote command: ssh host 'cd /path && torchrun …'",
    source=f"{BASH}, Lists",
)
def _split_here(view: View) -> Iterator[Found]:
    commands = [command for command in view.script.commands if not command.context.is_substitution]
    for command in commands:
        call = read_call(command) if command.name == "ssh" else None
        first = call.rest[1].value if call and len(call.rest) > 1 else None
        if first not in _SET_UP or call is None or call.rest[1].parts[0].quote or len(call.rest) > 4:
            continue
        after = next(
            (other for other in commands if other.order > command.order and other.context.via == command.context.via),
            None,
        )
        line = view.script.text.place(command.end).line
        if after is not None and view.script.text.place(after.at).line == line and after.name != "wait":
            yield Found(after.at, {"here": after.words[0].shown if after.words else "", "there": first})


@likely(
    "AR602 name-of-this-machine",
    "{part} is expanded here: each host gets this machine's",
    fix="single quotes around the remote command",
    source=f"{BASH}, Quoting",
)
def _local_name(view: View) -> Iterator[Found]:
    for launch in _remote(view, "ssh", "pdsh", "clush"):
        for word in launch.command.args:
            for part in word.parts:
                is_name = (part.kind == "command" and re.match(r"[$`]\(?(?:hostname|nvidia-smi)\b", part.text)) or (
                    part.kind == "variable" and part.text == "HOSTNAME"
                )
                option = word.prefix.partition("=")[0]
                if (
                    is_name
                    and is_expanded_too_early(part, launch.command)
                    and "addr" not in option
                    and "endpoint" not in option
                ):
                    before = _before(launch.command, word.at)
                    if "addr" not in before and "endpoint" not in before and "ip" not in before:
                        yield Found(part.at, {"part": part.shown})


def _before(command: Command, at: int) -> str:
    """Return the word before a word."""
    earlier = [word.shown for word in command.words if word.at < at]
    return earlier[-1] if earlier else ""


@likely(
    "AR603 environment-stays-here",
    "what is activated here does not hold there: a remote command gets no login shell, no conda, no modules, another "
    "PATH",
    fix="activate in the remote command: {starter} … 'source /path/venv/bin/activate && torchrun …'",
    source=f"{_SSH}: a command gets no login shell",
)
def _no_environment(view: View) -> Iterator[Found]:
    script = view.script
    here = any(
        command.context.level == 0 and not command.context.via and _activates(command) for command in script.commands
    )
    if not here:
        return
    for launch in _remote(view, "ssh", "pdsh", "clush"):
        starter = launch.starter
        assert starter is not None
        there = [command for command in script.commands if starter in command.context.via]
        if not any(
            _activates(command) or (command.name == "bash" and "-l" in " ".join(command.values[:1]))
            for command in there
        ) and all(
            "/" not in command.words[0].shown and command.words[0].value is not None
            for command in (launch.command,)
            if command.words
        ):
            yield Found(launch.command.at, {"starter": starter.name})
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
    script = view.script
    launches = list(_remote(view, "ssh", "pdsh", "clush"))
    if not launches or len(launches) != len(view.launches):
        return
    for assignment in script.assignments:
        name = assignment.name
        if (
            assignment.level
            or assignment.is_prefix
            or name not in script.exported
            or not re.match(r"(?:NCCL|GLOO|TORCH|MASTER|OMP|CUDA|HF|WANDB)_", name)
        ):
            continue
        sent = any(use.name == name for use in script.uses) or any(
            other.name == name and other.level for other in script.assignments
        )
        if not sent and not _sends_environment(script.text.data, name):
            yield Found(assignment.at, {"name": name})


def _sends_environment(data: bytes, name: str) -> bool:
    return b"SendEnv" in data or data.count(name.encode()) > 1


@fatal(
    "AR605 loop-input-is-eaten",
    "{program} reads the rest of the list from the loop's input: only the first host is reached",
    fix="{program} {option}",
    source=f"{_SSH} -n",
)
def _eats_input(view: View) -> Iterator[Found]:
    for command in view.script.named("ssh", "srun"):
        loops = [loop for loop in command.context.loops if loop.kind == "while" and loop.reads_input]
        if not loops or command.context.via or command.context.is_substitution or command.has_input:
            continue
        call = read_call(command)
        if call is None or call.get("-n", "--input"):
            continue
        edits = (Edit(command.words[0].end, command.words[0].end, b" -n"),) if command.name == "ssh" else ()
        yield Found(
            command.at, {"program": command.name, "option": "-n" if command.name == "ssh" else "--input=none"}, edits
        )


@fatal(
    "AR606 one-after-the-other",
    "the loop waits for the first host's launcher, which waits for the other hosts",
    fix="& after the command, and wait after the loop",
    source=BASH,
)
def _one_after_the_other(view: View) -> Iterator[Found]:
    for launch in _remote(view, "ssh"):
        starter = launch.starter
        assert starter is not None
        loops = starter.context.loops
        many = (launch.nnodes or 0) > 1 or (
            launch.call is not None and launch.is_torch and launch.nnodes is None and launch.call.get("--node-rank")
        )
        is_apart = starter.context.is_background or launch.command.context.is_background
        call = read_call(starter)
        if loops and many and not is_apart and call and not call.get("-f") and not starter.context.function:
            yield Found(starter.at)


@likely(
    "AR607 terminal-in-background",
    "ssh -t in the background stops as soon as it touches the terminal",
    fix="leave -t out",
    source=f"{_SSH} -t",
)
def _terminal(view: View) -> Iterator[Found]:
    for command in view.script.named("ssh"):
        call = read_call(command)
        given = call.get("-t") if call else None
        if given and command.context.is_background:
            yield Found(given.word.at)


@hint(
    "AR608 ssh-may-ask",
    "where a key is missing ssh asks for a password, and the loop waits",
    fix="ssh -o BatchMode=yes -o ConnectTimeout=10",
    source="ssh_config(5) BatchMode",
)
def _no_batch_mode(view: View) -> Iterator[Found]:
    for launch in _remote(view, "ssh"):
        starter = launch.starter
        assert starter is not None
        if starter.context.loops and "BatchMode" not in " ".join(starter.values):
            yield Found(starter.at)
            return


@likely(
    "AR609 remote-exit-code-is-lost",
    "{program} exits with 0 when the remote command fails",
    fix="{program} -S",
    source=f"{_PDSH} -S",
)
def _exit_code(view: View) -> Iterator[Found]:
    for launch in _remote(view, "pdsh", "clush"):
        call = read_call(launch.starter) if launch.starter else None
        if call and launch.starter and not call.get("-S"):
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
    for launch in _remote(view, "ssh"):
        call = read_call(launch.starter) if launch.starter else None
        given = call.get("-X", "-Y", "-A") if call else None
        if given:
            yield Found(given.word.at, {"option": given.name})


@likely(
    "AR612 ssh-holds-on",
    "ssh does not return: the command in the background keeps the connection's output open",
    fix="nohup … > log 2>&1 < /dev/null &",
    source=f"{_SSH} -n, -f",
)
def _holds_on(view: View) -> Iterator[Found]:
    for launch in _remote(view, "ssh"):
        command, starter = launch.command, launch.starter
        is_inside = starter is not None and command.context.is_background and not starter.context.is_background
        root = next((outer for outer in (*command.context.via, command) if outer.context.is_background), command)
        if is_inside and not any(
            operator.startswith((">", "&>")) for operator, _ in (*command.redirects, *root.redirects)
        ):
            yield Found(command.at)


@likely(
    "AR613 ends-with-the-connection",
    "the remote command may get SIGHUP when the connection closes",
    fix="setsid nohup … > log 2>&1 < /dev/null &",
    source="nohup(1)",
)
def _dies_with_terminal(view: View) -> Iterator[Found]:
    if view.script.kind != "plain":
        return
    for launch in _remote(view, "ssh"):
        command, starter = launch.command, launch.starter
        if starter is None or not command.context.is_background or starter.context.is_background:
            continue
        if command.started_by("nohup", "setsid") is None:
            yield Found(command.at)
