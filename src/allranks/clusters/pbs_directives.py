"""What qsub is asked for: from each key of a job to the directive for it, for OpenPBS and PBS Pro, and for Torque.

Sources: qsub(1B) and pbs_resources(7B) of OpenPBS, and Torque's "Requesting resources". Of two requests for the same
resource (-l) PBS takes the first, of two other directives the last: there those that the user has written stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from allranks.errors import JobError
from allranks.hostlist import expand
from allranks.job.units import format_count
from allranks.plan.directives import Directive, lines_of
from allranks.plan.entry import name_of

if TYPE_CHECKING:
    from allranks.clusters.pbs_jobs import Flavour
    from allranks.job.spec import Job

#: Why a directive is there that the user has written, word for word.
OWN = "scheduler.directives"
#: The longest name of a job that all versions take.
_LONGEST_NAME = 15
#: A user's own request for nodes: OpenPBS' chunks, and Torque's nodes.
_NODES = re.compile(r"-l\s*(?:\S*,)?(?:select|nodes)=(?P<value>[^\s,]+)")
_PLACE = re.compile(r"-l\s*(?:\S*,)?(?:place|nodes)=")
_CHUNK = re.compile(r"(?:(?P<count>\d+):)?(?P<rest>.*)")
_GPUS = re.compile(r"(?:^|:)n?gpus=(\d+)(?:$|:)")
_SECONDS_OF_AN_HOUR = 3600


def own_nodes(job: Job) -> str | None:
    """Return what the user's own directives ask for in place of ours: the value of select, or of nodes."""
    found = next(filter(None, map(_NODES.match, _lines(job))), None)
    return found["value"] if found else None


def own_gpus(job: Job) -> int | None:
    """Return the GPUs of a node that the user's own directives ask for: 0 for none, None if nodes differ."""
    counts = {int(found[1]) if (found := _GPUS.search(chunk)) else 0 for _, chunk in _chunks(own_nodes(job) or "")}
    return counts.pop() if len(counts) == 1 else None


def own_count(job: Job) -> int | None:
    """Return how many chunks, or nodes of Torque, the user's own directives ask for; None if they do not."""
    value = own_nodes(job)
    return sum(count for count, _ in _chunks(value)) if value else None


def directives(job: Job, nproc_per_node: int, output: str | None, flavour: Flavour) -> tuple[Directive, ...]:
    """Return the directives of a job.

    Args:
        job: the job.
        nproc_per_node: ranks on each node.
        output: what PBS itself has to say goes there, at the end; None: as PBS names it, where the job is submitted.
        flavour: which PBS it is.

    Raises:
        JobError: the job asks for what this PBS cannot do.
    """
    _refuse(job, flavour)
    nodes = _torque_nodes if flavour == "torque" else _select
    own = [Directive(line, None, OWN) for line in _lines(job)]
    return (
        *(line for line in own if line.option.startswith("-l")),
        Directive("-N", short_name(name_of(job)), "name"),
        Directive("-S", "/bin/bash", "the shell of this script, whatever yours is"),
        *(() if own_nodes(job) else nodes(job, nproc_per_node)),
        *(_place(job) if flavour == "openpbs" else ()),
        *_time(job),
        *_scheduler(job, flavour),
        *_logs(output),
        _retry(job),
        *(line for line in own if not line.option.startswith("-l")),
    )


def short_name(name: str) -> str:
    """Return a name that every PBS takes: it begins with a letter, and has at most 15 characters."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)
    return (plain if plain[0].isalpha() else f"j{plain}")[:_LONGEST_NAME]


def walltime(seconds: float) -> str:
    """Return a time as PBS writes it: hours, which may be many, minutes and seconds."""
    hours, rest = divmod(int(seconds), _SECONDS_OF_AN_HOUR)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}"


def _lines(job: Job) -> list[str]:
    return lines_of(job.scheduler.directives, "#PBS")


def _chunks(value: str) -> list[tuple[int, str]]:
    """Take a request for chunks apart: how many there are of each, and what it is."""
    found = [_CHUNK.fullmatch(chunk) for chunk in value.split("+")]
    return [
        (int(part["count"]), part["rest"]) if part["count"] else _bare(part["rest"])
        for part in found
        if part is not None
    ]


def _bare(chunk: str) -> tuple[int, str]:
    return (int(chunk), "") if chunk.isdecimal() else (1, chunk)


def _refuse(job: Job, flavour: Flavour) -> None:
    asked = job.scheduler
    if asked.exclude:
        raise JobError(
            "scheduler.exclude: PBS cannot leave hosts out",
            why="it has no option for that",
            fix="name those to use in scheduler.include, or a feature that they have in scheduler.constraint",
        )
    if asked.qos and flavour == "openpbs":
        raise JobError(
            "scheduler.qos: OpenPBS and PBS Pro have no quality of service", fix="choose another scheduler.partition"
        )
    if asked.project and flavour == "torque":
        raise JobError("scheduler.project: Torque has no projects", fix="scheduler.account (-A) names who is charged")
    if asked.reservation and asked.partition and flavour == "openpbs":
        raise JobError(
            "scheduler.reservation and scheduler.partition exclude each other",
            why="a reservation of OpenPBS is a queue",
            fix="leave out scheduler.partition",
        )


def _named(job: Job) -> list[str]:
    """Return the hosts that must be among the nodes.

    Raises:
        JobError: they are not written as hosts are, or there are more of them than nodes.
    """
    try:
        hosts = list(expand(",".join(job.scheduler.include))) if job.scheduler.include else []
    except ValueError as error:
        raise JobError(f"scheduler.include: {error}", fix="write them like gpu[01-03,07]") from error
    if len(hosts) > _count(job):
        raise JobError(
            f"scheduler.include names {format_count(len(hosts), 'host')}, for {format_count(_count(job), 'node')}",
            why="all of them would have to be among the nodes",
            fix=f"--nodes {len(hosts)}, or fewer hosts",
        )
    return hosts


def _count(job: Job) -> int:
    """Return the number of nodes: PBS gives exactly so many."""
    return job.resources.nodes[1]


def _select(job: Job, nproc: int) -> Iterator[Directive]:
    count = _count(job)
    chunk = ":".join(_chunk(job, nproc))
    named = [f"1:{chunk}:host={host}" for host in _named(job)]
    others = [f"{count - len(named)}:{chunk}"] if count > len(named) else []
    yield Directive("-l select", "+".join([*named, *others]), "resources, for each node", "one chunk on each node")


def _place(job: Job) -> Iterator[Directive]:
    """Yield where the chunks go, also those of a user's own: nobody can do with two of them on one node."""
    if not any(_PLACE.match(line) for line in _lines(job)):
        place = Directive("-l place", "scatter", "a node for each chunk", "else chunks may lie on one node together")
        alone = replace(place, value="scatter:excl", why="a node for each chunk, scheduler.exclusive")
        yield alone if job.scheduler.exclusive else place


def _chunk(job: Job, nproc: int) -> Iterator[str]:
    """Yield what a chunk has; mpiprocs says how often the node stands in the file of nodes."""
    resources, is_direct = job.resources, job.launch.launcher == "direct"
    cpus = resources.cpus_per_node or (nproc if is_direct else None)
    if cpus:
        yield f"ncpus={cpus}"
    if resources.gpus_per_node:
        yield f"ngpus={resources.gpus_per_node}"
    if resources.memory:
        yield f"mem={_memory(resources.memory)}"
    yield "mpiprocs=1"
    if job.scheduler.constraint:
        yield job.scheduler.constraint


def _torque_nodes(job: Job, nproc: int) -> Iterator[Directive]:
    asked, resources, count = job.scheduler, job.resources, _count(job)
    ppn = resources.cpus_per_node or (nproc if job.launch.launcher == "direct" else 1)
    each = [f"ppn={ppn}", *([f"gpus={resources.gpus_per_node}"] if resources.gpus_per_node else [])]
    each += [asked.constraint] if asked.constraint else []
    named = [":".join([host, *each]) for host in _named(job)]
    others = [":".join([str(count - len(named)), *each])] if count > len(named) else []
    yield Directive("-l nodes", "+".join([*named, *others]), "resources, for each node")
    if resources.memory:
        total = resources.memory * count
        yield Directive("-l mem", _memory(total), "resources.memory", "of all nodes together, as Torque counts")
    if asked.exclusive:
        yield Directive("-l naccesspolicy", "singlejob", "scheduler.exclusive")


def _memory(size: int) -> str:
    """Return a size in the largest unit that it is a whole number of, as PBS writes them."""
    for unit, factor in (("gb", 1 << 30), ("mb", 1 << 20)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size >> 10}kb"


def _time(job: Job) -> Iterator[Directive]:
    if job.resources.time:
        yield Directive("-l walltime", walltime(job.resources.time), "resources.time")


def _scheduler(job: Job, flavour: Flavour) -> Iterator[Directive]:
    asked, is_torque = job.scheduler, flavour == "torque"
    if asked.partition:
        yield Directive("-q", asked.partition, "scheduler.partition")
    if asked.reservation:
        option, value = ("-l advres", asked.reservation) if is_torque else ("-q", asked.reservation)
        yield Directive(option, value, "scheduler.reservation")
    if asked.account:
        yield Directive("-A", asked.account, "scheduler.account")
    if asked.project:
        yield Directive("-P", asked.project, "scheduler.project")
    if asked.qos:
        yield Directive("-l qos", asked.qos, "scheduler.qos")
    for line in asked.resources:
        name, has_value, value = line.partition("=")
        yield Directive(f"-l {name}", value if has_value else None, "scheduler.resources")
    if asked.array:
        yield Directive("-t" if is_torque else "-J", asked.array, "scheduler.array")
    if asked.mail:
        yield Directive("-M", asked.mail, "scheduler.mail")
        yield Directive("-m", "ae", "scheduler.mail")


def _logs(output: str | None) -> Iterator[Directive]:
    yield Directive("-j", "oe", "one log")
    if output:
        yield Directive("-o", output, "in the run's folder", "what PBS itself says; it comes when the job has ended")


def _retry(job: Job) -> Directive:
    if job.retry.requeue:
        return Directive("-r", "y", "retry.requeue", "back into the queue when a node fails, and when it is preempted")
    return Directive("-r", "n", "retry.requeue is false", "when a node fails, the job ends")
