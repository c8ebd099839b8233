"""The launcher's side of a scheduler that runs each job at once, on this machine: its commands are in bin/."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from allranks.clusters.base import Feasibility
from allranks.clusters.batch.cluster import BatchCluster
from allranks.clusters.batch.scheduler import Additions, JobInfo, Scheduler, UsableGpus
from allranks.plan.directives import Directive
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.batch.plan import Draft
    from allranks.job.spec import Job


def additions(draft: Draft) -> Additions:
    resources = draft.job.resources
    time = [Directive("seconds", str(resources.time), "resources.time")] if resources.time else []
    return Additions(directives=[Directive("hosts", str(resources.nodes[1]), "resources.nodes"), *time])


def query_job(job_id: str) -> JobInfo | None:
    word, code, started = LAB.output(("labstat", job_id), os.environ).split()
    if word == "gone":
        return None
    ended = State.FAILED if int(code) else State.SUCCEEDED
    state = {"running": State.RUNNING, "deleted": State.CANCELLED}.get(word, ended)
    return JobInfo(job_id, state, word, exit_code=int(code), started=float(started))


def shell(job: Job, nproc: int, words: Sequence[str], environ: Mapping[str, str], terminal: bool) -> tuple[str, ...]:
    return ("labrun", "localhost", *(words or ("bash",)))


LAB = Scheduler(
    name="lab",
    title="Lab",
    module="lab_queue_job",
    passes_environment=True,
    patience="as long as they need to leave",
    script="script.lab",
    prefix="#LAB",
    allocate="labrun localhost bash",
    own=lambda job: (None, 0),
    nodes_there=lambda environ: len(environ["LAB_HOSTS"].split()),
    gpus_there=lambda environ: UsableGpus(0, "there are none"),
    additions=additions,
    shell=shell,
    place="this machine",
    submit="labsub",
    submitted=re.compile(r"^lab job (\d+)$", re.MULTILINE),
    list_jobs="ls $LAB_HOME",
    retry="try again",
    cancel=lambda job_id: ("labdel", job_id),
    gone="no such job",
    show=lambda job_id: ("labstat", job_id),
    query_job=query_job,
    feasibility=lambda plan, environ: Feasibility("this machine"),
)
LabCluster = partial(BatchCluster, LAB)
