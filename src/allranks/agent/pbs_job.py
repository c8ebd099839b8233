"""PBS on nodes: pbs_tmrsh(8B), pbsdsh(1B), qrerun(1B) and qsub(1B)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from allranks import contract
from allranks.agent.batch_job import BatchJob
from allranks.errors import RankEnvironmentError
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system.rank_environment import Variables
from allranks.system.schedulers import SchedulerEnvironment

#: Programs that start a task on a node of the job, in order of preference. ``{line}`` is the node's first line in
#: PBS_NODEFILE, counted from 0. ssh passes one word to a shell on the node.
STARTERS = {
    "pbs_tmrsh": ("{host}",),
    "pbsdsh": ("-n", "{line}", "--"),
    "mpiexec": ("-n", "1", "-host", "{host}"),
    "ssh": ("-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "{host}"),
}
#: The error of a qrerun that was killed with the job that it requeues, or that did not wait for the requeue.
_IS_UNDER_WAY = re.compile(r"exit code -\d+$|Job rerun request still in progress")

_NODEFILE = ("PBS_NODEFILE",)
_LINE = ("PBS_VNODENUM",)


class Environment(SchedulerEnvironment):
    """PBS_NODENUM, which is the host's number, and the hosts in PBS_NODEFILE.

    A host has one line in the file per task. Torque also gives the line number, in PBS_VNODENUM. PBS starts a task of
    pbsdsh with almost no environment: the job must pass PBS_NODEFILE on, and the file must be readable on each node.
    Source: "Environment variables" in the reference guides of PBS Pro and Torque.
    """

    name = "PBS"
    rank = ("PBS_NODENUM",)
    world_size = _NODEFILE
    local_rank = _LINE
    local_world_size = _NODEFILE
    node_rank = ("PBS_NODENUM",)
    job_id = "PBS_JOBID"
    of_a_job = ("PBS_",)
    kept = ("PBS_CONF_FILE", "PBS_SERVER", "PBS_DEFAULT", "PBS_EXEC", "PBS_HOME", "PBS_DPREFIX")
    of_a_task = ("PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM", "PBS_MOMPORT", "PBS_JOBCOOKIE")
    cpus = ("NCPUS", "PBS_NUM_PPN")

    def present(self, env: Variables) -> bool:
        """Return whether this is a task of pbsdsh, not the shell of the job.

        That shell is task 1 on node 0, and always has PBS_ENVIRONMENT.
        """
        if self.get(env, self.rank) is None:
            return False
        first = self.number(env, self.rank) == 0 and self.get(env, ("PBS_TASKNUM",)) in (None, "1")
        return not (first and self.get(env, ("PBS_ENVIRONMENT",)))

    def find_world_size(self, env: Variables) -> int | None:
        """Count the lines of the node file."""
        return len(self._lines(env))

    def find_rank(self, env: Variables) -> int | None:
        """Count the lines of the hosts before this one, plus our local rank."""
        lines, host = self._lines(env), self._host(env)
        hosts = list(dict.fromkeys(lines))
        before = hosts[: hosts.index(host)]
        return sum(line in before for line in lines) + self.find_local_rank(env)

    def find_local_world_size(self, env: Variables) -> int | None:
        """Count the lines of this host."""
        return self._lines(env).count(self._host(env))

    def find_master_host(self, env: Variables) -> str:
        """Take the first host of the file."""
        return self._lines(env)[0]

    def _lines(self, env: Variables) -> list[str]:
        path = self.get(env, _NODEFILE)
        if path is None:
            raise self.half_set(env, self.rank, _NODEFILE)
        try:
            lines = Path(path).read_text().split()
        except OSError as error:
            raise RankEnvironmentError(
                f"cannot read PBS_NODEFILE={path}", why=error.strerror, fix=self.advice(env, [], [])
            ) from error
        if not lines:
            raise RankEnvironmentError(f"PBS_NODEFILE={path} is empty", fix=self.advice(env, [], []))
        return lines

    def _host(self, env: Variables) -> str:
        # Distinct, in order: the position is the node's number.
        hosts, node = list(dict.fromkeys(self._lines(env))), self.number(env, self.rank) or 0
        if node >= len(hosts):
            raise RankEnvironmentError(
                f"PBS_NODENUM={node} is not among the {len(hosts)} hosts of PBS_NODEFILE",
                why="the variables of two PBS jobs are mixed",
                fix="hand PBS_NODEFILE of this job to the tasks",
            )
        return hosts[node]

    def find_local_rank(self, env: Variables) -> int:
        """Return 0 for the only task of a host; of several, derive the local rank from Torque's line number."""
        lines, host = self._lines(env), self._host(env)
        line = self.number(env, _LINE)
        if lines.count(host) == 1:
            return 0
        if line is None or line >= len(lines) or lines[line] != host:
            raise RankEnvironmentError(
                f"PBS does not report which of the {lines.count(host)} tasks on {host} this one is",
                why="PBS_VNODENUM is not set, or does not name a line of that host in PBS_NODEFILE",
                fix="ask for mpiprocs=1 and start each node with allranks run or torchrun; or use mpiexec",
            )
        return lines[:line].count(host)

    def advice(self, env: Variables, there: list[str], missing: list[str]) -> str:
        """Return how to give the tasks the node file."""
        return (
            "copy $PBS_NODEFILE to a directory that all nodes share, and start the tasks with "
            "pbsdsh -- env PBS_NODEFILE=/that/copy python train.py"
        )


class Job(BatchJob):
    """A job of PBS."""

    submit_dir = "PBS_O_WORKDIR"

    def __init__(self, spec: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        super().__init__(spec, node, environ)
        self.array_task = environ.get("PBS_ARRAY_INDEX") or environ.get("PBS_ARRAYID")
        self.id = environ["PBS_JOBID"]
        self.number = int(re.sub(r"\D.*", "", self.id) or 0) + int(self.array_task or 0)

    def hosts(self) -> Sequence[str]:
        """Return the hosts in PBS's order; the node file may name one several times."""
        return self.distinct(self._lines(), "ask for -l place=scatter" if self.node.nnodes > 1 else "ask for one node")

    def start_and_limit(self) -> tuple[float | None, int | None]:
        """Read both from qstat."""
        answer, _ = self.query("qstat", "-f", self.id)
        lines = (line.strip().partition(" = ") for line in answer.replace("\n\t", "").splitlines())
        fields = {name: value for name, _, value in lines}
        started = limit = None
        with suppress(ValueError):  # No limit, or another format of this site's PBS.
            hours, minutes, seconds = map(int, fields.get("Resource_List.walltime", "").split(":"))
            limit = 3600 * hours + 60 * minutes + seconds
        with suppress(ValueError):
            text = fields.get("stime") or fields.get("start_time") or ""
            started = datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()
        return started, limit

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        """Start a task for each node or rank, and wait for all."""
        if os.environ.get("OMP_NUM_THREADS") == os.environ.get("NCPUS"):
            os.environ.pop("OMP_NUM_THREADS", None)  # PBS sets it for one rank with all CPUs of the node.
        return super().run(attempt, hosts)

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs words on a host."""
        starter = self.spec.start_with or next((name for name in STARTERS if shutil.which(name)), "ssh")
        line = str(self._lines().index(host))
        place = [part.format(host=host, line=line) for part in STARTERS[starter]]
        return [starter, *self.spec.options, *place, *([shlex.join(words)] if starter == "ssh" else words)]

    def ending(self) -> str | None:
        """Return a message if the job was deleted, or if PBS requeues it itself after losing a node; else None.

        A job that PBS ends because a node is lost is not requeued by PBS. If PBS does not answer, it counts as deleted.
        """
        ending = super().ending()
        if ending and any(self.attempt_dir.glob(f"node-*/{contract.CUT_OFF}")):
            answer, problem = self.query("qstat", "-f", self.id)
            return ending if problem or " and terminated by " in answer.replace("\n\t", "") else None
        return ending

    def requeue(self, *, lost: bool) -> str | None:
        """Put the job back into the queue; return the error, or None. Most sites let only operators do that.

        A job that has lost a node other than its first ends only when that node is back, even if the job is deleted.
        """
        if lost:
            return "PBS ends a job that has lost a node only when that is back"
        refused = self.query("qrerun", self.id)[1]
        return None if refused and _IS_UNDER_WAY.search(refused) else refused

    def submit(self, run: Path, *, lost: bool, without: str | None = None) -> tuple[str, str | None]:
        """Submit the run's script as a new job; return its id, and the error or None."""
        options = ["-W", f"depend=afterany:{self.id}"] if self.waits(lost=lost) else []
        if task := self.array_task:
            # OpenPBS rejects an array of one task. A range of two with step 2 is one task, on Torque too.
            one = ["-J", f"{task}-{int(task) + 1}:2"]
            options += ["-t", task] if "PBS_ARRAYID" in self.environ else one
        for option, name in (("-q", "PBS_O_QUEUE"), ("-A", "PBS_ACCOUNT")):
            if value := self.environ.get(name):
                options += [option, value]
        answer, problem = self.query("qsub", *options, str(run / self.spec.script))
        lines = answer.split()
        # The id that the next job sees: in an array that of its task.
        return lines[-1].replace("[]", f"[{self.array_task}]") if lines else "", problem

    def _lines(self) -> list[str]:
        return Path(self.environ["PBS_NODEFILE"]).read_text().split()
