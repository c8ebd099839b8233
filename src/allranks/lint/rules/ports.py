"""The ports at which ranks and agents meet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from allranks.lint.launches import Launch
from allranks.lint.model import Command, Context, Word
from allranks.lint.reading import View
from allranks.lint.rules.base import TORCHRUN, Found, fatal, hint, likely

_STORE = "torch/distributed/elastic/rendezvous of torch 2.13"
_PORTS = ("--master-port", "--main-process-port")
#: Variables that are options of torchrun.
_PET = ("PET_MASTER_PORT", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_STANDALONE", "PET_NNODES")
_NAME = re.compile(r"[A-Za-z_]\w*")
_JOB_ID = re.compile(r"(?:SLURM_JOB_?ID|SLURM_ARRAY_JOB_ID|PBS_JOBID|JOB_ID)\b")


def _port_words(view: View) -> Iterator[tuple[Word, Launch]]:
    for launch in view.launches:
        if given := launch.call.get(*_PORTS):
            yield given.value, launch
        endpoint = launch.call.get("--rdzv-endpoint")
        port = endpoint.value.after(":") if endpoint else None
        if port is not None and "/" not in port.shown:
            yield port, launch


@fatal(
    "AR310 impossible-port",
    "there is no port {port}: the highest is 65535",
    fix="a port from 10000 to 32767",
    source="RFC 9293",
)
def _impossible_port(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        if word.number is not None and word.number > 65535:
            yield Found(word.at, {"port": word.number})


@fatal(
    "AR311 privileged-port",
    "port {port} is for root only",
    fix="a port from 10000 to 32767",
    source="ip(7), ip_unprivileged_port_start",
)
def _privileged_port(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        if word.number is not None and 0 < word.number < 1024:
            yield Found(word.at, {"port": word.number})


@likely(
    "AR312 port-grows-with-job-id",
    "{port} grows with the job's number, and passes 65535 one day, or is too small",
    fix="$((10000 + SLURM_JOB_ID % 20000))",
    source="RFC 9293: ports have 16 bits",
)
def _port_from_id(view: View) -> Iterator[Found]:
    if not view.launches or not _JOB_ID.search(view.script.text.data.decode("latin-1")):
        return
    seen: set[str] = set()
    for assignment in view.script.assignments:
        word = Word(assignment.parts or (), assignment.at, assignment.at)
        if assignment.name.upper().endswith("PORT") and _grows(word):
            seen.add(word.shown)
            yield Found(word.at, {"port": word.shown})
    options = ((before.prefix, word) for command in view.script.commands for before, word in pairwise(command.args))
    of_servers = [word for option, word in options if re.fullmatch(r"--?[\w-]*port", option)]
    for word in [*(word for word, _ in _port_words(view)), *of_servers]:
        if _grows(word) and word.shown not in seen:
            yield Found(word.at, {"port": word.shown})


def _grows(word: Word) -> bool:
    """Return whether a word is a job's number, or one with something added."""
    sums = (part for part in word.parts if part.kind == "variable" or not re.search("[%:]", part.text))
    return any(part.kind in ("arithmetic", "variable") and _JOB_ID.search(part.text) for part in sums)


@hint(
    "AR314 random-port",
    "$RANDOM is from 0 to 32767: the port can be one of root's, or in use",
    fix="$((10000 + SLURM_JOB_ID % 20000)), or --standalone on one node",
    source="bash(1), RANDOM",
)
def _bare_random(view: View) -> Iterator[Found]:
    for word, _ in _port_words(view):
        if [(part.kind, part.text) for part in word.parts] == [("variable", "RANDOM")]:
            yield Found(word.at)


def _unchanging(view: View, word: Word) -> str | None:
    """Return a word's text if it becomes the same wherever the script expands it; None if it may not."""
    changing = {assignment.name for assignment in view.script.assignments} | {"RANDOM", "SRANDOM"}
    for part in word.parts:
        is_argument = part.kind == "variable" and not part.text.isidentifier()
        if part.value is None and (part.kind == "command" or is_argument or changing & set(_NAME.findall(part.text))):
            return None
    return word.shown


def _meeting(view: View, launch: Launch) -> tuple[str, str, int] | None:
    """Return the port that a launcher of one node listens at, its rendezvous id, and where the port is given.

    The port is empty where torchrun takes its default; None stands for no port, a free one, or one not known.
    """
    call = launch.call
    if launch.has_many_nodes or call.get("--standalone", "--node-rank"):
        return None
    is_c10d = call.value("--rdzv-backend") == "c10d"
    given, endpoint, ids = call.get(*_PORTS), call.get("--rdzv-endpoint"), call.get("--rdzv-id")
    word = endpoint.value.after(":") if endpoint else given.value if given and not is_c10d else None
    if word is None and (endpoint or not launch.is_torch or view.script.sets(*_PET) or launch.nnodes != 1):
        return None
    if not is_c10d and not launch.is_static and launch.is_torch:
        return None
    port = _unchanging(view, word) if word else "29400" if is_c10d else ""
    run = _unchanging(view, ids.value) if is_c10d and ids else ""
    return None if port in (None, "0") or run is None else (port or "", run, word.at if word else launch.command.at)


def _is_here(launch: Launch) -> bool:
    """Return whether a launcher runs on this machine, and in its network."""
    return launch.starter is None and launch.command.started_by("docker", "podman") is None


@dataclass(frozen=True)
class _Start:
    """A time at which a launcher is surely started."""

    order: int
    #: Where what it is in goes on in the background, of each function's call and of its own; those that are alike run
    #: one after the other.
    place: tuple[int | None, ...]
    is_repeated: bool  # Whether a loop starts it again before it has ended.

    @property
    def goes_on(self) -> bool:
        """Whether the shell starts what follows before it has ended."""
        return any(at is not None for at in self.place)


def _starts(view: View, command: Command, depth: int = 3) -> Iterator[_Start]:
    """Yield when a command is started: one in a function, each time that this is called."""
    context = command.context
    if context.is_conditional or _is_awaited(view, context.function):
        return
    own = _Start(command.order, (context.background,), _is_repeated(view, context, context.background))
    named = view.script.named(context.function) if context.function else ()
    calls = [call for call in named if not call.context.via and call.context.function != context.function]
    if not calls:
        yield own
    for call in calls if depth else ():
        place = call.at if own.goes_on and call.context.background is None else call.context.background
        is_repeated = own.is_repeated or _is_repeated(view, call.context, place)
        for start in _starts(view, call, depth - 1):
            yield _Start(start.order, (place, *start.place[:-1], *own.place), is_repeated or start.is_repeated)


def _is_awaited(view: View, function: str) -> bool:
    """Return whether a function waits for what it has started."""
    return bool(function) and any(wait.context.function == function for wait in view.script.named("wait"))


def _is_repeated(view: View, context: Context, place: int | None) -> bool:
    """Return whether a loop starts what stands at a place in the background again before it has ended."""
    for loop in context.loops if place is not None else ():
        is_once = loop.kind == "for" and len(loop.words) == 1 and re.fullmatch(r"[\w./-]+", loop.words[0].value or "")
        waits = (wait.context for wait in view.script.named("wait"))
        is_awaited = any(loop in each.loops and not each.is_conditional for each in waits)
        if place is not None and loop.at < place and not is_once and not is_awaited:
            return True
    return False


def _collisions(view: View) -> Iterator[tuple[str, str, int]]:
    """Yield who meets at one port side by side, the port as `_meeting` has it, and where it is given."""
    running: list[tuple[tuple[str, str], _Start]] = []
    found = ((start, launch) for launch in filter(_is_here, view.launches) for start in _starts(view, launch.command))
    for start, launch in sorted(found, key=lambda each: each[0].order):
        meeting = _meeting(view, launch)
        if meeting is None:
            continue
        port, run, at = meeting
        waits = [wait.order for wait in view.script.named("wait") if wait.order < start.order]
        running = [each for each in running if each[1].order > max(waits, default=0)]
        others = [other for key, other in running if key == (port, run)]
        if start.is_repeated:
            yield "the launchers of a loop", port, at
        elif any(each.place != start.place for each in others):
            yield "two launchers", port, at
        if start.goes_on:
            running.append(((port, run), start))


@fatal(
    "AR315 same-port-twice",
    "{who} run side by side with port {port}: the second one fails with EADDRINUSE, or joins the first",
    fix="--standalone, which takes a free port",
    source=f"{TORCHRUN} --standalone",
)
def _same_port(view: View) -> Iterator[Found]:
    for who, port, at in _collisions(view):
        if port:
            yield Found(at, {"who": who, "port": port})


@likely(
    "AR326 default-port-twice",
    "{who} run side by side without a port: each takes 29500, and the second one fails with EADDRINUSE",
    fix="--standalone, which takes a free port",
    source="torch/distributed/run.py, --master-port; pytorch#175699",
    versions="releases of torch before pytorch#175699 (2026); 2.13 takes a free port",
)
def _default_port(view: View) -> Iterator[Found]:
    for who, port, at in _collisions(view):
        if not port:
            yield Found(at, {"who": who})


@hint(
    "AR322 fixed-port",
    "port {port} is in use as soon as a second job starts on the node",
    fix="$((10000 + SLURM_JOB_ID % 20000)), or --standalone on one node",
    source=_STORE,
)
def _fixed_port(view: View) -> Iterator[Found]:
    if view.script.kind == "plain" or view.script.options("exclusive"):
        return
    for word, launch in _port_words(view):
        if word.is_literal and word.number and word.number >= 1024 and launch.is_torch:
            yield Found(word.at, {"port": word.number})
            return
