"""A batch job as its own supervisor and ranks see it: what the module of its scheduler defines, and what all share."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from allranks import contract
from allranks.errors import LaunchError
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system import schedulers

_COMMAND_SECONDS = 60.0
#: The id of a job, in a last line that is complete.
_JOB_ID = re.compile(r"^\d[\w.;\[\]-]*\n\Z", re.MULTILINE)


@dataclass(frozen=True)
class RankPlace:
    """A rank's place, where the scheduler starts each rank."""

    rank: int
    local_rank: int
    node: int
    world_size: int
    ranks: Sequence[int]  # The global ranks of this node.


class BatchJob:
    """The job that this process is part of. The scheduler's module has a subclass, ``Job``.

    A scheduler that starts one command on one host defines :meth:`hosts`, :meth:`command`, :meth:`requeue` and
    :meth:`submit`. One that starts all tasks itself defines :meth:`run` and :meth:`place` instead of ``command``.
    """

    id: str
    array_task: str | None = None  # The number of its task if it is of an array.
    number: int  # One that no other job has at the time.
    #: The variable with the directory in which the job was submitted.
    submit_dir: ClassVar[str] = ""
    #: Whether a job can be submitted that does not use a certain host.
    can_exclude: ClassVar[bool] = False

    def __init__(self, orders: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        self.orders, self.node, self.environ = orders, node, environ
        self.variables = schedulers.load(orders.module)

    def hosts(self) -> Sequence[str]:
        """Return the job's hosts by their nodes' numbers; raise a LaunchError if they are not those that it needs."""
        raise NotImplementedError

    def distinct(self, hosts: Sequence[str], fix: str) -> list[str]:
        """Return each host once; if they are not as many as the job needs, raise a LaunchError that names the fix."""
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
        """Return when the time limit is reached, in seconds since 1970; None if that is not known."""
        if reported := self.variables.get(self.environ, self.variables.end_time):
            return int(reported)
        started, limit = self.start_and_limit()
        if limit is None and not self.orders.is_inside:
            limit = self.orders.time
        return None if limit is None else int(started or time.time()) + limit

    def start_and_limit(self) -> tuple[float | None, int | None]:
        """Return when the job started and its time limit, both in seconds, as far as the scheduler reports them."""
        return None, None

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        """Start the tasks on all nodes, which are ``hosts``, wait for them, and return the job's exit code."""
        from allranks.agent.tasks import Tasks  # Not for those who only read variables.

        return Tasks(self.orders, self.node, attempt, hosts, self.command).run()

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs words on a host."""
        raise NotImplementedError

    def place(self) -> RankPlace:
        """Return the place of the rank that this process is to become; each node has the same number of ranks."""
        node, local_rank = int(self.environ[contract.NODE_RANK]), int(self.environ["LOCAL_RANK"])
        nproc = self.node.nproc_per_node
        ranks = range(node * nproc, (node + 1) * nproc)
        world_size = int(self.environ[contract.NODE_COUNT]) * nproc
        return RankPlace(ranks[local_rank], local_rank, node, world_size, ranks)

    def preempted(self) -> bool:
        """Return whether the scheduler ends this job for another one, and leaves it to the run to requeue it."""
        return False

    def ending(self) -> str | None:
        """Return the message that the scheduler is ending this job before its time limit; None if it is not."""
        if (self.attempt_dir / contract.TERMINATED).exists() and not self.is_over():
            return f"{self.variables.name} is ending the job already"
        return None

    def requeue(self, *, lost: bool) -> str | None:
        """Put this job, which may have lost nodes, back into the queue; return what kept it from that.

        It may kill this process.
        """
        raise NotImplementedError

    def waits(self, *, lost: bool) -> bool:
        """Return whether a job that :meth:`submit` submits waits for the end of this one.

        If nodes were lost it does not: PBS and Grid Engine end such a job only when they are back. Nor does a task of
        an array: no job can wait for one, and all that the next has to wait for has ended before this is called.
        """
        return not (lost or self.array_task)

    def submit(self, run: Path, *, lost: bool, without: str | None = None) -> tuple[str, str | None]:
        """Submit the run's script; return the new id, and what kept it from that.

        ``without`` is a host that it must not use, where it :attr:`can_exclude` one.
        """
        raise NotImplementedError

    @property
    def attempt_dir(self) -> Path:
        """The directory of the attempt that this job is."""
        return Path(self.environ[contract.RUN_DIR], contract.attempt_dir(int(self.environ[contract.ATTEMPT])))

    def is_over(self) -> bool:
        """Return whether the time limit is reached."""
        end = self.environ.get(contract.END_TIME, "")
        return end.isdecimal() and time.time() >= int(end)

    def query(self, *command: str) -> tuple[str, str | None]:
        """Run a command of the scheduler as from outside of the job; return its stdout, and what went wrong."""
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
            # A site's own may submit a job, print its id, and hang.
            return printed, None if _JOB_ID.search(printed) else f"{command[0]} cannot be run: {error}"
        except OSError as error:
            return "", f"{command[0]} cannot be run: {error}"
        if done.returncode == 0:
            return done.stdout, None
        last = done.stderr.strip().rpartition("\n")[2]
        return done.stdout, f"{command[0]}: {last or f'exit code {done.returncode}'}"


def this_job(orders: BatchSpec, node: NodeSpec) -> BatchJob:
    """Return the job that this process is part of."""
    job: BatchJob = import_module(orders.module).Job(orders, node, os.environ)
    return job
