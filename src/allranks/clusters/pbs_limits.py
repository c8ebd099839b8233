"""What PBS would do with a job that is not submitted: refuse it, let it wait for ever, or take it.

PBS has nothing to try that with, so its queues and nodes are compared with what the script asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from allranks.clusters import pbs_jobs
from allranks.clusters.limits import Asked, NodeInfo, counted, missing, number, reading
from allranks.clusters.outlook import Objection, Outlook
from allranks.job.units import format_duration, parse_duration, parse_memory

if TYPE_CHECKING:
    from allranks.plan.plan import Plan

#: The commands that show all queues, all nodes, and the server, in the one format that every PBS has.
QUEUES, NODES, SERVER = ("qstat", "-Q", "-f"), ("pbsnodes", "-a"), ("qstat", "-B", "-f")
_QUEUE = re.compile(r"^#PBS\s+-q\s*(\S+)", re.MULTILINE)
_NODES = re.compile(r"^#PBS\s+-l\s*(?:\S*,)?(?:select|nodes)=([^\s,]+)", re.MULTILINE)
_PLACE = re.compile(r"^#PBS\s+-l\s*(?:\S*,)?place=([^\s,]+)", re.MULTILINE)
_WALLTIME = re.compile(r"^#PBS\s+-l\s*(?:\S*,)?walltime=([^\s,]+)", re.MULTILINE)
_AWAY = ("down", "offline", "unknown", "stale", "unresolvable", "maintenance", "provisioning", "sleep")
_OTHER = "choose another scheduler.partition; qstat -Q lists the queues"


def outlook(plan: Plan, environ: Mapping[str, str]) -> Outlook:
    """Find out what PBS would do with a plan's script.

    Args:
        plan: a plan that is submitted.
        environ: the environment that it is submitted in.

    Raises:
        LaunchError: PBS cannot be reached.
    """
    script = plan.files[0].text
    asked = read_asked(script)
    queues = parse(pbs_jobs.ask(QUEUES, environ))
    name = next(iter(asked[0].partitions), "") or default_queue(pbs_jobs.ask(SERVER, environ))
    queue = queues.get(name.partition("@")[0])
    if queue is None and asked[0].partitions and "@" not in name:
        return Outlook(f"queue {name}", [Objection(f"PBS has no queue {name}", _OTHER)])
    against = [*limits(asked, name, queue or {})]
    # A queue may hand jobs on to a server with other nodes.
    if not against and (queue or {}).get("queue_type", "").startswith("E"):
        against = lacking(asked, parse_nodes(pbs_jobs.ask(NODES, environ)), may_share=may_share(script))
    return Outlook(f"queue {name}" if name else "the default queue", against)


def lacking(asked: Sequence[Asked], nodes: Sequence[NodeInfo], *, may_share: bool) -> list[Objection]:
    """Return why nodes are not those that a job needs.

    Args:
        asked: what it asks for.
        nodes: all nodes.
        may_share: whether several of what it asks for may lie on one node, which is then enough.
    """
    parts = [replace(part, nodes=1) for part in asked] if may_share else asked
    found = (each for part in parts for each in missing(part, "this PBS", nodes, "pbsnodes -l"))
    return [*dict.fromkeys(found)]


def may_share(script: str) -> bool:
    """Tell whether chunks of a script may lie on one node together."""
    return "scatter" not in next(iter(_PLACE.findall(script)), "scatter")


def read_asked(script: str) -> tuple[Asked, ...]:
    """Read what a script asks for, of each kind of nodes; of two lines for the same resource PBS takes the first."""
    queue, time = _QUEUE.findall(script), _WALLTIME.search(script)
    each = Asked(partitions=tuple(queue[-1:]), time=_time(time[1]) if time else 0)
    counts: dict[Asked, int] = {}
    for text in next(iter(_NODES.findall(script)), "1").split("+"):
        kind = _chunk(each, text)
        counts[kind] = counts.get(kind, 0) + (number(text.split(":")[0]) or 1)  # One that begins with a host is one.
    return tuple(replace(kind, nodes=count) for kind, count in counts.items())


def _chunk(each: Asked, text: str) -> Asked:
    """Return what each node of a chunk must have."""
    has = dict(re.findall(r"(\w+)=([^:]+)", text))
    return replace(
        each,
        cpus=number(has.get("ncpus") or has.get("ppn", "")),
        memory=_memory(has.get("mem", "")),
        gpus=number(has.get("ngpus") or has.get("gpus", "")),
    )


def parse(text: str) -> dict[str, dict[str, str]]:
    """Read what :data:`QUEUES`, :data:`NODES` or :data:`SERVER` says: the attributes of each, by its name."""
    found: dict[str, dict[str, str]] = {}
    for line in text.replace("\n\t", "").splitlines():
        if head := re.match(r"(?:\w+: )?(\S+)$", line):
            found[head[1]] = {}
        elif found and (attribute := re.match(r"\s+(\S+) = (.*)$", line)):
            [*found.values()][-1][attribute[1]] = attribute[2].strip()
    return found


def default_queue(text: str) -> str:
    """Return the default queue, from the answer to :data:`SERVER`; empty where there is none."""
    return next((server["default_queue"] for server in parse(text).values() if "default_queue" in server), "")


def parse_nodes(text: str) -> tuple[NodeInfo, ...]:
    """Read what :data:`NODES` says; what PBS makes several virtual nodes of is one."""
    hosts: dict[str, NodeInfo] = {}
    for name, node in parse(text).items():
        host, state = node.get("resources_available.host", name), node.get("state", "")
        before = hosts.get(host, NodeInfo(host, state, is_away=True, cpus=0, memory=0, gpus=0))
        hosts[host] = NodeInfo(
            host,
            state,
            before.is_away and any(word in state for word in _AWAY),
            before.cpus + number(node.get("resources_available.ncpus") or node.get("np", "")),
            before.memory + _memory(node.get("resources_available.mem", "")),
            before.gpus + number(node.get("resources_available.ngpus") or node.get("gpus", "")),
            node.get("comment", node.get("note", "")),
        )
    return tuple(hosts.values())


def limits(asked: Sequence[Asked], name: str, queue: Mapping[str, str]) -> Iterator[Objection]:
    """Yield what a queue has against a job.

    Args:
        asked: what the job asks for, of each kind of nodes.
        name: of the queue.
        queue: its attributes.
    """
    if queue.get("enabled") == "False":
        yield Objection(f"queue {name} takes no jobs", _OTHER)
    if queue.get("started") == "False":
        yield Objection(f"queue {name} starts no jobs now", f"wait, or {_OTHER}", is_final=False)
    for limit, amount, key, reads, words in _amounts(asked):
        most, least = (reads(queue.get(f"resources_{word}.{limit}", "")) for word in ("max", "min"))
        told = f"{words(amount)} are asked for, and queue {name} gives a job at"
        if amount and most and amount > most:
            yield Objection(f"{told} most {words(most)}", f"lower {key}, or {_OTHER}")
        if amount and amount < least:
            yield Objection(f"{told} least {words(least)}", f"raise {key}, or {_OTHER}")


_Amount = tuple[str, int, str, Callable[[str], int], Callable[[int], str]]


def _amounts(asked: Sequence[Asked]) -> Iterator[_Amount]:
    """Yield what a queue may limit: its name, the amount for all nodes, the key for it, and how it is read and told."""
    nodes = sum(part.nodes for part in asked)
    cpus, gpus = sum(part.nodes * part.cpus for part in asked), sum(part.nodes * part.gpus for part in asked)
    yield "walltime", asked[0].time, "resources.time", _time, format_duration
    yield "nodect", nodes, "resources.nodes", number, counted("node")
    yield "ncpus", cpus, "resources.cpus_per_node or resources.nodes", number, counted("CPU")
    yield "ngpus", gpus, "resources.gpus_per_node or resources.nodes", number, counted("GPU")


def _time(text: str) -> int:
    """Return the seconds in a time: a bare number is seconds, here."""
    return number(text) or reading(parse_duration, text)


def _memory(text: str) -> int:
    return reading(parse_memory, text)
