"""What PBS would do with a job that is not submitted: refuse it, let it wait for ever, or take it.

PBS has nothing to try that with, so its queues and nodes are compared with what the script asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
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
    asked = read_asked(plan.files[0].text)
    queues = parse(pbs_jobs.ask(QUEUES, environ))
    name = next(iter(asked.partitions), "") or default_queue(pbs_jobs.ask(SERVER, environ))
    queue = queues.get(name.partition("@")[0])
    if queue is None and asked.partitions and "@" not in name:
        return Outlook(f"queue {name}", [Objection(f"PBS has no queue {name}", _OTHER)])
    against = [*limits(asked, name, queue or {})]
    # A queue may hand jobs on to a server with other nodes.
    if not against and (queue or {}).get("queue_type", "").startswith("E"):
        against = missing(asked, "this PBS", parse_nodes(pbs_jobs.ask(NODES, environ)), "pbsnodes -l")
    return Outlook(f"queue {name}" if name else "the default queue", against)


def read_asked(script: str) -> Asked:
    """Read what a script asks for; of two lines for the same resource PBS takes the first."""
    queue, time = _QUEUE.findall(script), _WALLTIME.search(script)
    chunks = [_chunk(text) for found in _NODES.findall(script)[:1] for text in found.split("+")]
    return Asked(
        partitions=tuple(queue[-1:]),
        nodes=sum(count for count, _ in chunks) or 1,
        time=_time(time[1]) if time else 0,
        cpus=max((number(each.get("ncpus") or each.get("ppn", "")) for _, each in chunks), default=0),
        memory=max((_memory(each.get("mem", "")) for _, each in chunks), default=0),
        gpus=max((number(each.get("ngpus") or each.get("gpus", "")) for _, each in chunks), default=0),
    )


def _chunk(text: str) -> tuple[int, dict[str, str]]:
    """Take a chunk apart: how many of it, and what each has. One that begins with a host is one."""
    first, *_ = text.split(":")
    return number(first) or 1, dict(re.findall(r"(\w+)=([^:]+)", text))


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


def limits(asked: Asked, name: str, queue: Mapping[str, str]) -> Iterator[Objection]:
    """Yield what a queue has against a job.

    Args:
        asked: what the job asks for.
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


def _amounts(asked: Asked) -> Iterator[_Amount]:
    """Yield what a queue may limit: its name, the amount for all nodes, the key for it, and how it is read and told."""
    cpus, gpus = asked.nodes * asked.cpus, asked.nodes * asked.gpus
    yield "walltime", asked.time, "resources.time", _time, format_duration
    yield "nodect", asked.nodes, "resources.nodes", number, counted("node")
    yield "ncpus", cpus, "resources.cpus_per_node or resources.nodes", number, counted("CPU")
    yield "ngpus", gpus, "resources.gpus_per_node or resources.nodes", number, counted("GPU")


def _time(text: str) -> int:
    """Return the seconds in a time: a bare number is seconds, here."""
    return number(text) or reading(parse_duration, text)


def _memory(text: str) -> int:
    return reading(parse_memory, text)
