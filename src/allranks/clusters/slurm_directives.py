"""What sbatch is asked for: from each key of a job to the directive for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from allranks.job.units import format_duration, format_memory
from allranks.plan.directives import Directive, lines_of, warning_seconds
from allranks.plan.entry import name_of

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: Why a directive is there that the user has written, word for word.
OWN = "scheduler.directives"
#: Directives of a user's own by which GPUs, or tasks, are asked for.
_GPUS = re.compile(r"--gpus|-G|--gres[ =]\S*gpu|--tres-per\S*gpu")
_TASKS = re.compile(r"--ntasks(?!-)|-n")
_GPUS_PER_NODE = re.compile(r"(?:--gpus-per-node|--gres)[ =](?:gpu:)?(?:[A-Za-z]\w*:)?(\d+)")


def own_gpus(job: Job) -> int | None:
    """Return the GPUs of a node that the user's own directives ask for: 0 for none, None if they do not tell."""
    if not (asking := [line for line in _lines(job) if _GPUS.match(line)]):
        return 0
    told = [int(match[1]) for line in asking if (match := _GPUS_PER_NODE.match(line))]
    return told[0] if told else None


def own_tasks(job: Job) -> bool:
    """Tell whether the user's own directives ask for a number of tasks on all nodes together."""
    return any(map(_TASKS.match, _lines(job)))


def directives(job: Job, nproc_per_node: int, output: str | None) -> tuple[Directive, ...]:
    """Return the directives of a job, those that the user has written last: there the last one counts.

    Args:
        job: the job.
        nproc_per_node: ranks on each node.
        output: Slurm's own log unless the job names one; None: as Slurm names it, where the job is submitted.
    """
    own = [Directive(line, None, OWN) for line in _lines(job)]
    return (
        Directive("--job-name", name_of(job), "name"),
        *_resources(job, nproc_per_node),
        *_scheduler(job),
        *_logs(job, output),
        *_retry(job),
        *own,
    )


def _lines(job: Job) -> list[str]:
    return lines_of(job.scheduler.directives, "#SBATCH")


def _resources(job: Job, nproc: int) -> Iterator[Directive]:
    resources, is_direct = job.resources, job.launch.launcher == "direct"
    least, most = resources.nodes
    yield Directive("--nodes", str(most) if least == most else f"{least}-{most}", "resources.nodes")
    if least < most and not is_direct:
        yield Directive("--no-kill", None, "resources.nodes", "go on when a node dies: at least the first must live")
    if is_direct:
        if not own_tasks(job):
            yield Directive("--ntasks-per-node", str(nproc), "launcher direct: a task is a rank")
    elif least == most:  # With a number of tasks Slurm would never give more than the least nodes.
        note = "one task on each node: the agent, which starts the node's ranks"
        yield Directive("--ntasks-per-node", "1", "launcher torchrun: a task is an agent", note)
    if resources.gpus_per_node and own_gpus(job) == 0:
        yield _gpus(job, resources.gpus_per_node)
    if resources.cpus_per_node:
        cpus = max(1, resources.cpus_per_node // nproc) if is_direct else resources.cpus_per_node
        yield Directive("--cpus-per-task", str(cpus), "resources.cpus_per_node")
    if resources.memory:
        yield Directive("--mem", format_memory(resources.memory), "resources.memory")
    if resources.time:
        yield Directive("--time", format_duration(resources.time), "resources.time")


def _gpus(job: Job, count: int) -> Directive:
    kind = f"{job.resources.gpu_type}:" if job.resources.gpu_type else ""
    if job.scheduler.gpu_request == "gres":
        return Directive("--gres", f"gpu:{kind}{count}", "resources.gpus_per_node, scheduler.gpu_request")
    return Directive("--gpus-per-node", f"{kind}{count}", "resources.gpus_per_node")


def _scheduler(job: Job) -> Iterator[Directive]:
    asked = job.scheduler
    for key in ("partition", "account", "qos", "constraint", "reservation", "array"):
        if value := getattr(asked, key):
            yield Directive(f"--{key}", value, f"scheduler.{key}")
    if asked.include:
        yield Directive("--nodelist", ",".join(asked.include), "scheduler.include")
    if asked.exclude:
        yield Directive("--exclude", ",".join(asked.exclude), "scheduler.exclude")
    if asked.exclusive:
        yield Directive("--exclusive", None, "scheduler.exclusive")
    if asked.mail:
        yield Directive("--mail-user", asked.mail, "scheduler.mail")
        yield Directive("--mail-type", "END,FAIL", "scheduler.mail")


def _logs(job: Job, output: str | None) -> Iterator[Directive]:
    asked = job.scheduler
    if path := asked.output or output:
        note = "what Slurm and this script say; each rank has a log of its own"
        yield Directive("--output", path, "scheduler.output" if asked.output else "in the run's folder", note)
    if asked.error:
        yield Directive("--error", asked.error, "scheduler.error")
    yield Directive("--open-mode", "append", "a job that is started again goes on with the same log")


def _retry(job: Job) -> Iterator[Directive]:
    if job.retry.requeue:
        note = "back into the queue when a node fails, and when the job is preempted"
        yield Directive("--requeue", None, "retry.requeue", note)
    else:
        yield Directive("--no-requeue", None, "retry.requeue is false", "when a node fails, the job ends")
    if seconds := warning_seconds(job):
        note = f"{seconds} s before the limit this script gets USR1 and hands it on to the ranks, which save and leave"
        short = seconds < job.retry.warn_before
        why = (
            f"half of resources.time; retry.warn_before is {job.retry.warn_before:g}" if short else "retry.warn_before"
        )
        yield Directive("--signal", f"B:USR1@{seconds}", why, note)
