"""The node's side: it needs the standard library, and of allranks what a run carries for its nodes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.agent.batch_job import BatchJob
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system.schedulers import SchedulerEnvironment


class Environment(SchedulerEnvironment):
    name = "Lab"
    rank = ("LAB_TASK",)
    world_size = ("LAB_TASKS",)
    local_rank = ("LAB_TASK",)
    local_world_size = ("LAB_TASKS",)
    job_id = "LAB_JOB"
    of_a_job = ("LAB_",)
    kept = ("LAB_HOME",)
    of_a_task = ("LAB_HOST",)
    cpus = ("LAB_CPUS",)
    end_time = ("LAB_END",)


class Job(BatchJob):
    def __init__(self, spec: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        super().__init__(spec, node, environ)
        self.id = environ["LAB_JOB"]
        # Ids are unique in one $LAB_HOME only, and others may run jobs on this machine.
        self.number = zlib.crc32(f"{environ['LAB_HOME']}/{self.id}".encode())

    def hosts(self) -> Sequence[str]:
        return self.environ["LAB_HOSTS"].split()

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        print(__file__, flush=True)
        return super().run(attempt, hosts)

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        return ["labrun", host, *words]

    def requeue(self, *, lost: bool) -> str | None:
        return self.query("labrerun", self.id)[1]

    def submit(self, run: Path, *, lost: bool) -> tuple[str, str | None]:
        return "", "a job of Lab submits no other"
