"""Grid Engine on nodes: qrsh(1), qsub(1), qstat(1) and sge_pe(5)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks.agent.batch_job import BatchJob
from allranks.errors import LaunchError
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system.schedulers import SchedulerEnvironment

#: Exit codes by which a job script requests a requeue, and a hold in the error state.
_REQUEUE, _HOLD = 99, 100
#: Keeps the warning before SIGKILL from killing the starter of an agent or a rank; works in any login shell.
_STARTS = "exec /bin/bash -c {} bash {}"
_IGNORING = "trap '' USR2; exec \"$@\""


class Environment(SchedulerEnvironment):
    """The variables of qsub(1). No variable gives a qrsh task its number."""

    name = "Grid Engine"
    rank = world_size = ()
    job_id, allocation = "JOB_ID", "SGE_JOB_SPOOL_DIR"
    of_a_job = ("SGE_JOB_", "SGE_TASK_", "SGE_STD", "PE_HOSTFILE")
    cpus = ("NCPUS",)
    starts_tasks_alone = True


class Job(BatchJob):
    """A job of Grid Engine."""

    submit_dir = "SGE_O_WORKDIR"

    def __init__(self, spec: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        super().__init__(spec, node, environ)
        if "JOB_ID" not in environ:
            raise LaunchError("JOB_ID is not set: qsub this script")
        task = environ.get("SGE_TASK_ID", "")
        self.array_task = task if task.isdecimal() else None
        self.id = f"{environ['JOB_ID']}.{task}" if self.array_task else environ["JOB_ID"]
        self.number = int(environ["JOB_ID"]) + int(self.array_task or 0)
        if not shutil.which("qrsh"):  # A job's PATH may differ from that of a login.
            os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{environ.get('SGE_BINARY_PATH', '')}"

    def hosts(self) -> Sequence[str]:
        """Return the hosts in Grid Engine's order, this one first."""
        return self.distinct(
            [*self._slots()],
            "choose a parallel environment that gives a fixed number of slots on each host (allocation_rule, see "
            "qconf -sp), and ask for as many with resources.cpus_per_node",
        )

    def start_and_limit(self) -> tuple[float | None, int | None]:
        """Read both from qstat."""
        answer, _ = self.query("qstat", "-j", self.environ["JOB_ID"], "-xml")
        task = rf"<JAT_task_number>{self.array_task or 1}</JAT_task_number>.*?<JAT_start_time>(\d+)<"
        started = re.search(task, answer, re.DOTALL)
        limit = re.search(r"<CE_name>h_rt</CE_name>.*?<CE_doubleval>(\d+)", answer, re.DOTALL)
        return int(started[1]) if started else None, int(limit[1]) if limit else None

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        """Start a task for each node or rank, and wait for all."""
        if (slots := min(self._slots().values())) > 1:
            os.environ.setdefault("NCPUS", str(slots))  # One slot may stand for a whole node.
        # With qsub -notify, SIGUSR2 comes some time before SIGKILL.
        signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        code = super().run(attempt, hosts)
        return 1 if code in (_REQUEUE, _HOLD) else code

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs words on a host.

        On this host it is not qrsh, which Grid Engine rejects if the script has the only slot. qrsh gives its shell a
        terminal; a nested shell that read stdin would end the task with a hang-up at the end of its input.
        """
        if host == next(iter(self._slots())):
            return [*words]
        qrsh, ssh = ("qrsh", "-inherit", "-nostdin"), ("ssh", "-oBatchMode=yes", "-oConnectTimeout=30")
        starter = ssh if self.spec.start_with == "ssh" else qrsh
        line = _STARTS.format(shlex.quote(_IGNORING), shlex.join(words))  # One word for the user's login shell.
        return [*starter, *self.spec.options, host, line]

    def requeue(self, *, lost: bool) -> str | None:
        """Put the job back into the queue by the exit code of this process; return the error if that is impossible."""
        if lost:
            return "Grid Engine ends a job that has lost a node only when that is back"
        if self.is_over():
            return "Grid Engine is ending the job already"
        if len(self._slots()) > 1:
            return "Grid Engine does not take the further nodes of a job again that it has requeued"
        raise SystemExit(_REQUEUE)

    def submit(self, run: Path, *, lost: bool, without: str | None = None) -> tuple[str, str | None]:
        """Submit the run's script as a new job; return its id, and the error or None."""
        options = ["-hold_jid", self.environ["JOB_ID"]] if self.waits(lost=lost) else []
        options += ["-t", self.array_task] if self.array_task else []
        answer, problem = self.query("qsub", "-terse", *options, str(run / self.spec.script))
        if problem and not (lost or self.is_over()):
            raise SystemExit(_REQUEUE)  # Many sites let no job submit jobs: requeue without the exclusion.
        job = answer.strip().rpartition("\n")[2].partition(".")[0]
        return f"{job}.{self.array_task}" if job and self.array_task else job, problem

    def _slots(self) -> dict[str, int]:
        """Return the slots of each host; PE_HOSTFILE has a line for each of its queues."""
        file, found = self.environ.get("PE_HOSTFILE"), dict[str, int]()
        for line in Path(file).read_text().splitlines() if file else [f"{self.environ['HOSTNAME']} 1"]:
            host, slots, *_ = line.split()
            found[host] = found.get(host, 0) + int(slots)
        return found
