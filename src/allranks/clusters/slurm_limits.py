"""What Slurm would do with a job that is not submitted: refuse it, let it wait for ever, or start it.

``sbatch --test-only`` tells whether nodes as asked for are there and up, and when. It says the same of nodes that are
down for a day as of those that do not exist, and nothing of a job that would wait for ever: one that asks for more time
than its partition gives, say. So partitions and nodes are asked for too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from allranks.clusters import asking, slurm_errors, slurm_jobs
from allranks.clusters.limits import Asked, NodeInfo, least, missing, number, reading
from allranks.clusters.outlook import Objection, Outlook, objection_of
from allranks.clusters.refusals import UNREACHABLE, with_values
from allranks.errors import LaunchError
from allranks.hostlist import expand
from allranks.job.units import format_count, format_duration, parse_duration, parse_memory

if TYPE_CHECKING:
    from allranks.plan.plan import Plan

_SECONDS = 90.0
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--[a-z-]+|-[A-Za-z])(?:[= ]\s*)?(.*)$", re.MULTILINE)
_SHORT = {
    "-N": "--nodes",
    "-p": "--partition",
    "-t": "--time",
    "-q": "--qos",
    "-x": "--exclude",
    "-c": "--cpus-per-task",
}
#: Variables that count for sbatch above what a script asks for.
_ABOVE = {"SBATCH_PARTITION": "--partition", "SBATCH_TIMELIMIT": "--time", "SBATCH_QOS": "--qos"}
_WOULD_START = re.compile(r"to start at (\S+) using .* on nodes (\S+)(?: in partition (\S+))?")
_NO_SUCH_NODES = "Requested node configuration is not available"
_GPUS = re.compile(r"(?:^|,)gpu:(?:[^:,()]+:)?(\d+)")
_NO_ACCOUNTING = "not running a supported accounting_storage plugin"
#: What a QOS may have, so that its jobs may go beyond that limit of a partition.
_LIFTS_TIME, _LIFTS_MOST, _LIFTS_LEAST = "PartitionTimeLimit", "PartitionMaxNodes", "PartitionMinNodes"
_LIFTS_ALL = frozenset((_LIFTS_TIME, _LIFTS_MOST, _LIFTS_LEAST))
#: Beginnings of the words for a node that takes no job now.
_AWAY = ("down", "drain", "fail", "error", "unknown", "inval", "maint", "reserved", "boot", "reboot", "no_respond")


@dataclass(frozen=True)
class Partition:
    """A partition. A limit of 0 is none; time is in seconds."""

    name: str
    state: str
    nodes: int
    max_nodes: int = 0
    min_nodes: int = 0
    max_time: int = 0
    is_default: bool = False


@dataclass(frozen=True)
class Qos:
    """A QOS, with its limit of time in seconds (0: none) and what it has, in Slurm's words."""

    name: str
    max_time: int
    flags: frozenset[str]


def outlook(plan: Plan, environ: Mapping[str, str]) -> Outlook:
    """Find out what Slurm would do with a plan's script.

    Args:
        plan: a plan that is submitted.
        environ: the environment that it is submitted in.

    Raises:
        LaunchError: Slurm cannot be reached.
    """
    script = plan.files[0].text
    asked = read_asked(script, environ)
    command = dry_command(plan.commands[0].command)
    in_utc = {**environ, **slurm_jobs.IN_UTC}
    done = asking.run(command, in_utc, slurm_errors.SLURM, cwd=plan.workdir, sent=script, seconds=_SECONDS)
    said = done.stdout + done.stderr
    if done.returncode:
        error = slurm_errors.SLURM.refusal(command, done.returncode, said)
        if error.what == UNREACHABLE.format("Slurm"):
            raise error
    partitions = chosen(parse_partitions(slurm_jobs.ask(PARTITIONS, in_utc)), asked)
    against = _against_it(asked, partitions, in_utc)
    where = f"partition {','.join(partition.name for partition in partitions)}"
    if not done.returncode:
        return Outlook(where, against, parse_start(said))
    refusal = objection_of(with_values(error, plan.reasons))
    if _NO_SUCH_NODES in said:  # They may be down only now.
        return Outlook(where, against or _missing(asked, partitions, in_utc) or [refusal])
    found = Outlook(where, against)
    return found if found.is_hopeless else replace(found, objections=[*against, refusal])


def _against_it(asked: Asked, partitions: Sequence[Partition], environ: Mapping[str, str]) -> list[Objection]:
    """Return what partitions and QOS have against a job; these are asked for only where that counts."""
    against = limits(asked, partitions)
    if not against and not asked.qos:
        return []
    known = _qos(environ)
    if against:
        return limits(asked, partitions, _LIFTS_ALL if known is None else lifted(asked, known))
    return qos_limit(asked, known or ())


def _missing(asked: Asked, partitions: Sequence[Partition], environ: Mapping[str, str]) -> list[Objection]:
    """Return why nodes are not there in any of the partitions whose limits the job keeps; nothing: nobody sees it."""
    places = [part.name for part in partitions if not any(_against(asked, part, frozenset()))]
    nodes = {name: parse_nodes(slurm_jobs.ask(nodes_command(name), environ)) for name in places}
    return least(missing(asked, f"partition {name}", nodes[name], "sinfo --list-reasons") for name in places)


def _qos(environ: Mapping[str, str]) -> tuple[Qos, ...] | None:
    """Return all QOS; none where there is no accounting, and so no QOS. None: nobody says."""
    try:
        return parse_qos(asking.ask(QOS, environ, slurm_errors.SLURM, seconds=20.0))
    except LaunchError as error:
        return () if _NO_ACCOUNTING in (error.why or "") else None


#: The command that shows all partitions.
PARTITIONS = ("scontrol", "show", "partition")

#: The command that shows all QOS.
QOS = ("sacctmgr", "--parsable2", "--noheader", "show", "qos", "format=Name,MaxWall,Flags")


def dry_command(command: Sequence[str]) -> tuple[str, ...]:
    """Build the command that asks what would become of a script, from the one that submits it: it reads the script."""
    return (command[0], "--test-only", *command[1:-1])


def nodes_command(partition: str) -> tuple[str, ...]:
    """Build the command that shows the nodes of a partition."""
    return ("sinfo", "--Node", "--noheader", f"--partition={partition}", "--format=%N|%T|%c|%m|%G|%E")


def read_asked(script: str, environ: Mapping[str, str]) -> Asked:
    """Read what a script asks for; of two lines for the same the last one counts, and above all the environment."""
    found = {_SHORT.get(name, name): value.strip().strip("'\"") for name, value in _DIRECTIVE.findall(script)}
    found |= {name: environ[variable] for variable, name in _ABOVE.items() if variable in environ}
    tasks = number(found.get("--ntasks-per-node", "")) or 1
    gpus = re.findall(r"\d+", found.get("--gpus-per-node") or found.get("--gres", ""))
    return Asked(
        partitions=tuple(filter(None, found.get("--partition", "").split(","))),
        nodes=number(found.get("--nodes", "").partition("-")[0]) or 1,
        time=_time(found.get("--time", "")),
        qos=found.get("--qos", ""),
        cpus=tasks * (number(found.get("--cpus-per-task", "")) or 1),
        memory=reading(parse_memory, found.get("--mem", "")),
        gpus=int(gpus[-1]) if gpus else 0,
        exclude=tuple(_hosts(found.get("--exclude", ""))),
    )


def parse_start(text: str) -> float | None:
    """Return when sbatch says that a job would start, in seconds since 1970, if it says so."""
    found = _WOULD_START.search(text)
    with suppress(ValueError):
        return datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp() if found else None
    return None


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Read the answer to :data:`PARTITIONS`."""
    parts = (dict(re.findall(r"(\w+)=(\S*)", part)) for part in re.split(r"^(?=PartitionName=)", text, flags=re.M))
    return tuple(
        Partition(
            part["PartitionName"],
            part.get("State", "UP"),
            number(part.get("TotalNodes", "")),
            number(part.get("MaxNodes", "")),
            number(part.get("MinNodes", "")),
            _time(part.get("MaxTime", "")),
            part.get("Default") == "YES",
        )
        for part in parts
        if "PartitionName" in part
    )


def parse_nodes(text: str) -> tuple[NodeInfo, ...]:
    """Read the answer to :func:`nodes_command`."""
    rows = (line.split("|", 5) for line in text.splitlines())
    return tuple(
        NodeInfo(
            name,
            state,
            state.endswith("*") or state.startswith(_AWAY),  # With a * it does not answer.
            number(cpus.rstrip("+")),
            number(memory.rstrip("+")) << 20,
            sum(map(int, _GPUS.findall(gres))),
            "" if reason == "none" else reason,
        )
        for name, state, cpus, memory, gres, reason in (row for row in rows if len(row) == 6)
    )


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Read the answer to :data:`QOS`."""
    rows = (line.split("|") for line in text.splitlines())
    return tuple(Qos(row[0], _time(row[1]), frozenset(row[2].split(","))) for row in rows if len(row) == 3)


def chosen(partitions: Iterable[Partition], asked: Asked) -> tuple[Partition, ...]:
    """Return the partitions that a job may come into: those that it names, else the default one."""
    named = asked.partitions
    return tuple(part for part in partitions if (part.name in named if named else part.is_default))


def lifted(asked: Asked, known: Iterable[Qos]) -> frozenset[str]:
    """Return what the QOS of a job has; where it names none, what any has, since each user may have another default."""
    named = asked.qos.split(",")
    return frozenset[str]().union(*(qos.flags for qos in known if not asked.qos or qos.name in named))


def limits(asked: Asked, partitions: Sequence[Partition], lifts: frozenset[str] = frozenset()) -> list[Objection]:
    """Return what keeps a job waiting in all of the partitions that it may come into.

    Args:
        asked: what it asks for.
        partitions: where it may come.
        lifts: what its QOS may have: a limit that this may lift is not final.
    """
    against = [[*_against(asked, partition, lifts)] for partition in partitions]
    return least(against) if all(against) else []


def _against(asked: Asked, partition: Partition, lifts: frozenset[str]) -> Iterator[Objection]:
    name, nodes = f"partition {partition.name}", format_count(asked.nodes, "node")
    if partition.state == "DOWN":
        fix = "choose another scheduler.partition, or wait"
        yield Objection(f"{name} is down: jobs wait until it is up", fix, is_final=False)
    if partition.max_time and asked.time > partition.max_time:
        most = format_duration(partition.max_time)
        yield Objection(
            f"{format_duration(asked.time)} are asked for, and {name} gives a job at most {most}",
            f"lower resources.time to {most}, or choose another scheduler.partition",
            is_final=_LIFTS_TIME not in lifts,
        )
    if partition.max_nodes and asked.nodes > partition.max_nodes:
        yield Objection(
            f"{nodes} are asked for, and {name} gives a job at most {partition.max_nodes}",
            f"lower resources.nodes to {partition.max_nodes}, or choose another scheduler.partition",
            is_final=_LIFTS_MOST not in lifts,
        )
    elif partition.nodes and asked.nodes > partition.nodes:
        yield Objection(
            f"{nodes} are asked for, and {name} has {partition.nodes}",
            f"lower resources.nodes to {partition.nodes}, or choose another scheduler.partition",
        )
    if asked.nodes < partition.min_nodes:
        yield Objection(
            f"{nodes} are asked for, and {name} gives a job at least {partition.min_nodes}",
            f"raise resources.nodes to {partition.min_nodes}, or choose another scheduler.partition",
            is_final=_LIFTS_LEAST not in lifts,
        )


def qos_limit(asked: Asked, known: Iterable[Qos]) -> list[Objection]:
    """Return what the QOS that a job names has against it."""
    most = next((qos.max_time for qos in known if qos.name == asked.qos), 0)
    if not most or asked.time <= most:
        return []
    limit = format_duration(most)
    what = f"{format_duration(asked.time)} are asked for, and QOS {asked.qos} gives a job at most {limit}"
    return [Objection(what, f"lower resources.time to {limit}, or choose another scheduler.qos")]


def _time(text: str) -> int:
    return reading(parse_duration, text)


def _hosts(text: str) -> Iterator[str]:
    with suppress(ValueError):
        yield from expand(text) if text else ()
