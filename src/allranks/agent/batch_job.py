"""The batch job that this process is part of: what each scheduler's module defines, and what all of them share."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import ClassVar, NamedTuple

from allranks import contract
from allranks.errors import LaunchError
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system import schedulers

_COMMAND_SECONDS = 60.0
#: A job id on a complete last line of output.
_JOB_ID = re.compile(r"^\d[\w.;\[\]-]*\n\Z", re.MULTILINE)


class RankPlace(NamedTuple):
    """A rank's place, where the scheduler starts each rank."""

    rank: int
    local_rank: int
    node: int
    world_size: int
    ranks: Sequence[int]  # Global ranks of this node.


class BatchJob:
    """The job that this process is part of. The scheduler's module has a subclass, ``Job``.

    A scheduler that starts one command on one host defines :meth:`hosts`, :meth:`command`, :meth:`requeue` and
    :meth:`submit`. One that starts all tasks itself defines :meth:`run` and :meth:`place` instead of ``command``.
    """

    id: str
    array_task: str | None = None  # Number of the array task; None if the job is not part of an array.
    number: int  # Unique among the jobs that exist at the same time.
    #: Variable that holds the directory from which the job was submitted.
    submit_dir: ClassVar[str] = ""
    #: Whether :meth:`submit` can exclude a host.
    can_exclude: ClassVar[bool] = False

    def __init__(self, spec: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        self.spec, self.node, self.environ = spec, node, environ
        self.variables = schedulers.load(spec.module)

    def hosts(self) -> Sequence[str]:
        """Return the job's hosts in the order of node numbers; raise a LaunchError if there are too few or too many."""
        raise NotImplementedError

    def distinct(self, hosts: Sequence[str], fix: str) -> list[str]:
        """Return each host once; raise a LaunchError with this fix if there are not as many as the job needs."""
        found, wanted = list(dict.fromkeys(hosts)), self.node.nnodes
        if len(found) != wanted:
            needed = f"{wanted} different ones" if wanted > 1 else "one"
            raise LaunchError(
                f"{self.variables.name} gave the hosts {' '.join(found)}, and the job needs {needed}: {fix}"
            )
        return found

    def node_count(self, hosts: Sequence[str]) -> int:
        """Return how many nodes take part."""
        return len(hosts)

    def end_time(self) -> int | None:
        """Return when the time limit is reached, in seconds since 1970; None if unknown."""
        if reported := self.variables.get(self.environ, self.variables.end_time):
            return int(reported)
        started, limit = self.start_and_limit()
        if limit is None and not self.spec.is_inside:
            limit = self.spec.time
        return None if limit is None else int(started or time.time()) + limit

    def start_and_limit(self) -> tuple[float | None, int | None]:
        """Return the start time (seconds since 1970) and the time limit (seconds), each None if not reported."""
        return None, None

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        """Start the tasks on all ``hosts``, wait for them, and return the job's exit code."""
        from allranks.agent.tasks import Tasks  # A process that only reads variables does not need it.

        return Tasks(self.spec, self.node, attempt, hosts, self.command).run()

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs words on a host."""
        raise NotImplementedError

    def place(self) -> RankPlace:
        """Return the place of the rank that this process becomes; each node has the same number of ranks."""
        node, local_rank = int(self.environ[contract.NODE_RANK]), int(self.environ["LOCAL_RANK"])
        nproc = self.node.nproc_per_node
        ranks = range(node * nproc, (node + 1) * nproc)
        world_size = int(self.environ[contract.NODE_COUNT]) * nproc
        return RankPlace(ranks[local_rank], local_rank, node, world_size, ranks)

    def preempted(self) -> bool:
        """Return whether the scheduler is preempting this job and does not requeue it itself."""
        return False

    def ending(self) -> str | None:
        """Return a message if the scheduler is ending this job before its time limit, else None."""
        if (self.attempt_dir / contract.TERMINATED).exists() and not self.is_over():
            return f"{self.variables.name} is ending the job already"
        return None

    def requeue(self, *, lost: bool) -> str | None:
        """Put this job back into the queue; return the error, or None. The scheduler may kill this process meanwhile.

        ``lost``: whether the job has lost nodes.
        """
        raise NotImplementedError

    def waits(self, *, lost: bool) -> bool:
        """Return whether a job from :meth:`submit` depends on the end of this one.

        It does not if nodes were lost: PBS and Grid Engine end such a job only when the nodes are back. Nor does it in
        an array: no job can depend on a single task, and the task's ranks have exited before this is called.
        """
        return not (lost or self.array_task)

    def submit(self, run: Path, *, lost: bool, without: str | None = None) -> tuple[str, str | None]:
        """Submit the run's script as a new job; return its id, and the error or None.

        ``without`` is a host to exclude; only where :attr:`can_exclude` is true.
        """
        raise NotImplementedError

    @property
    def attempt_dir(self) -> Path:
        """Directory of this job's attempt."""
        return Path(self.environ[contract.RUN_DIR], contract.attempt_dir(int(self.environ[contract.ATTEMPT])))

    def is_over(self) -> bool:
        """Return whether the time limit is reached."""
        end = self.environ.get(contract.END_TIME, "")
        return end.isdecimal() and time.time() >= int(end)

    def query(self, *command: str) -> tuple[str, str | None]:
        """Run a scheduler command with an environment as outside of jobs; return its stdout, and the error or None."""
        folder = self.environ.get(self.submit_dir, "")
        try:
            done = subprocess.run(
                command,
                env=self.variables.outside_of_jobs(self.environ),
                cwd=folder if folder and Path(folder).is_dir() else None,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode(errors="replace")
            # A site's wrapper may submit the job, print its id, and hang.
            return printed, None if _JOB_ID.search(printed) else f"{command[0]} cannot be run: {error}"
        except OSError as error:
            return "", f"{command[0]} cannot be run: {error}"
        if done.returncode == 0:
            return done.stdout, None
        last = done.stderr.strip().rpartition("\n")[2]
        return done.stdout, f"{command[0]}: {last or f'exit code {done.returncode}'}"


def this_job(spec: BatchSpec, node: NodeSpec) -> BatchJob:
    """Return the job that this process is part of."""
    job: BatchJob = import_module(spec.module).Job(spec, node, os.environ)
    return job
