"""What qsub of OpenPBS, PBS Pro and Torque is asked for.

Sources: qsub(1B) and pbs_resources(7B) of OpenPBS, and Torque's "Requesting resources". Of two requests for the same
resource (-l) PBS takes the first, of two other directives the last: there those that the user has written stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks.errors import JobError
from allranks.job.units import format_count, format_duration, format_memory
from allranks.plan.directives import Directive, given, lines_of, mail_letters, plain_name
from allranks.plan.entry import name_of
from allranks.system.hostlist import expand

if TYPE_CHECKING:
    from allranks.clusters.pbs_words import Flavour
    from allranks.job.spec import Job

#: The longest name of a job that all versions take.
LONGEST_NAME = 15
#: A user's own request for nodes: OpenPBS' chunks, and Torque's nodes.
_OWN_NODES = re.compile(r"-l\s*(?:\S*,)?(?:select|nodes)=(?P<value>[^\s,]+)")
_OWN_PLACE = re.compile(r"-l\s*(?:\S*,)?(?:place|nodes)=")
_GPUS = re.compile(r"(?:^|:)n?gpus=(\d+)(?:$|:)")


def own_nodes(job: Job) -> str | None:
    """Return what the user's own directives ask for instead of ours: the value of select, or of nodes."""
    return next((found["value"] for line in lines_of(job, "#PBS") if (found := _OWN_NODES.match(line))), None)


def own(job: Job) -> tuple[int | None, int | None]:
    """Return how many chunks, or nodes of Torque, the user's own directives ask for, and the GPUs of each.

    None if they do not ask for nodes, and if nodes differ in their GPUs.
    """
    value = own_nodes(job)
    chunks = (value or "").split("+")
    counts = [re.match(r"(\d*)(?::|$)", chunk) for chunk in chunks]  # One with a host first is one.
    count = sum(int(found[1] or 1) if found else 1 for found in counts)
    gpus = {int(found[1]) if (found := _GPUS.search(chunk)) else 0 for chunk in chunks}
    return count if value else None, gpus.pop() if len(gpus) == 1 else None


def directives(job: Job, nproc: int, output: str | None, flavour: Flavour) -> Iterator[Directive]:
    """Yield the directives of a job with ``nproc`` ranks on each node.

    What PBS itself says goes to ``output`` when the job has ended; None: as PBS names it, where the job is submitted.

    Raises:
        JobError: the job asks for what this PBS cannot do.
    """
    requested, resources, is_torque = job.scheduler, job.resources, flavour == "torque"
    _refuse(job, flavour)
    named, again = [line.partition("=") for line in requested.resources], job.retry.by_scheduler
    users = [Directive(line, None, "scheduler.directives") for line in lines_of(job, "#PBS")]
    yield from (line for line in users if line.option.startswith("-l"))
    yield Directive("-N", plain_name(name_of(job), LONGEST_NAME), "name")
    yield Directive("-S", "/bin/bash", "the shell of this script, whatever yours is")
    if not own_nodes(job):
        yield from _nodes(job, nproc, is_torque)
    if not (is_torque or any(map(_OWN_PLACE.match, lines_of(job, "#PBS")))):
        excl, why = (":excl", ", scheduler.exclusive") if requested.exclusive else ("", "")
        note = "else chunks may lie on one node together"
        yield Directive("-l place", f"scatter{excl}", f"a node for each chunk{why}", note)
    yield from given(
        ("-l walltime", resources.time and format_duration(resources.time), "resources.time"),
        ("-q", requested.partition, "scheduler.partition"),
        ("-l advres" if is_torque else "-q", requested.reservation, "scheduler.reservation"),
        ("-A", requested.account, "scheduler.account"),
        ("-P", requested.project, "scheduler.project"),
        ("-l qos", requested.qos, "scheduler.qos"),
        *((f"-l {name}", value or True, "scheduler.resources") for name, _, value in named),
        ("-t" if is_torque else "-J", requested.array, "scheduler.array"),
        ("-M", job.notify.mail, "notify.mail"),
        ("-m", job.notify.mail and mail_letters(job), "notify.on"),
        ("-j", "oe", "one log"),
        ("-o", output, "in the run's directory", "what PBS itself says; it comes when the job has ended"),
        ("-r", again and "y", "retry.requeue", "back into the queue when a node fails, and when it is preempted"),
        ("-r", not again and "n", "retry.requeue is false", "when a node fails, the job ends"),
    )
    yield from (line for line in users if not line.option.startswith("-l"))


def _refuse(job: Job, flavour: Flavour) -> None:
    requested = job.scheduler
    if requested.exclude:
        fix = "name those to use in scheduler.include, or a feature that they have in scheduler.constraint"
        raise JobError("scheduler.exclude: PBS cannot leave hosts out", why="it has no option for that", fix=fix)
    if requested.qos and flavour == "openpbs":
        fix = "a queue is scheduler.partition (--queue)"
        raise JobError("scheduler.qos: OpenPBS and PBS Pro have no quality of service", fix=fix)
    if requested.project and flavour == "torque":
        raise JobError("scheduler.project: Torque has no projects", fix="scheduler.account (-A) names who is charged")
    if requested.reservation and requested.partition and flavour == "openpbs":
        both, why = "scheduler.reservation and scheduler.partition", "a reservation of OpenPBS is a queue"
        raise JobError(f"{both} exclude each other", why=why, fix="leave out scheduler.partition")


def _nodes(job: Job, nproc: int, is_torque: bool) -> Iterator[Directive]:
    """Yield what asks for nodes: chunks that are alike, but for hosts that must be among them."""
    requested, resources, count = job.scheduler, job.resources, job.resources.nodes[1]
    cpus = resources.cpus_per_node or (nproc if job.launch.is_direct else int(is_torque))
    has = [f"{'ppn' if is_torque else 'ncpus'}={cpus}"] if cpus else []
    if resources.gpus_per_node:
        has.append(f"{'gpus' if is_torque else 'ngpus'}={resources.gpus_per_node}")
    if not is_torque:
        has += [f"mem={format_memory(resources.memory).lower()}b"] if resources.memory else []
        has.append("mpiprocs=1")  # How often the node stands in the file of nodes.
    each = ":".join([*has, requested.constraint] if requested.constraint else has)
    try:
        hosts = list(expand(",".join(requested.include))) if requested.include else []
    except ValueError as error:
        raise JobError(f"scheduler.include: {error}", fix="write them like gpu[01-03,07]") from error
    if len(hosts) > count:
        raise JobError(
            f"scheduler.include names {format_count(len(hosts), 'host')}, for {format_count(count, 'node')}",
            why="all of them would have to be among the nodes",
            fix=f"--nodes {len(hosts)}, or fewer hosts",
        )
    # OpenPBS knows hosts by their short names.
    chunks = [f"{host}:{each}" if is_torque else f"1:{each}:host={host.partition('.')[0]}" for host in hosts]
    value = "+".join([*chunks, f"{count - len(hosts)}:{each}"] if count > len(hosts) else chunks)
    if not is_torque:
        yield Directive("-l select", value, "resources, for each node", "one chunk on each node")
        return
    yield Directive("-l nodes", value, "resources, for each node")
    if resources.memory:
        total = f"{format_memory(resources.memory * count).lower()}b"
        yield Directive("-l mem", total, "resources.memory", "of all nodes together, as Torque counts")
    if requested.exclusive:
        yield Directive("-l naccesspolicy", "singlejob", "scheduler.exclusive")
