"""Slurm on nodes: srun(1), scontrol(1) and sbatch(1)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.agent.batch_job import BatchJob, RankPlace
from allranks.errors import LaunchError, RankEnvironmentError
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system.hostlist import expand
from allranks.system.rank_environment import Variables
from allranks.system.schedulers import SchedulerEnvironment

#: Where the job was submitted to, which the script need not say.
_PLACE = {"--account": "SLURM_JOB_ACCOUNT", "--partition": "SLURM_JOB_PARTITION", "--qos": "SLURM_JOB_QOS"}
#: States of a job that was cancelled or is being cancelled.
_ENDING = ("CANCELLED", "COMPLETING")

#: Step ids from here up are no steps of srun (slurm.h): 0xfffffffb is the batch script, 0xfffffffa the shell of salloc.
RESERVED_STEPS = 0xFFFFFFF0
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


class Environment(SchedulerEnvironment):
    """SLURM_PROCID and its companions: "OUTPUT ENVIRONMENT VARIABLES" in srun(1) and sbatch(1)."""

    name = "Slurm"
    rank = ("SLURM_PROCID",)
    world_size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = ("SLURM_LOCALID",)
    local_world_size = _TASKS
    node_rank = ("SLURM_NODEID",)
    job_id = "SLURM_JOB_ID"
    #: Variables that Slurm's tools read as options.
    of_a_job = ("SLURM_", "SRUN_", "SBATCH_MEM_BIND", "SBATCH_CPU_BIND", "PMI_", "PMIX_")
    kept = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
    end_time = ("SLURM_JOB_END_TIME",)

    def present(self, env: Variables) -> bool:
        """Return whether this is a task of srun, not the shell of a batch script, of salloc or of ``srun --pty bash``.

        Those shells have SLURM_PROCID=0 and the allocation's SLURM_NTASKS too, but no other tasks were started. In the
        shell of ``srun --pty`` the task, SLURM_TASK_PID, is the shell; a script that srun itself started is the task.
        """
        step = self.number(env, _STEP)
        if step is None or step >= RESERVED_STEPS or self.get(env, self.rank) is None:
            return False
        return "SLURM_PTY_PORT" not in env or self.get(env, ("SLURM_TASK_PID",)) in (None, str(os.getpid()))

    def find_local_world_size(self, env: Variables) -> int | None:
        """Read this node's entry of SLURM_STEP_TASKS_PER_NODE: ``2(x3),1`` means 2, 2, 2 and 1 tasks."""
        counts, node = self.get(env, _TASKS), self.find_node_rank(env)
        if counts is None or node is None:
            return None
        tasks: list[int] = []
        for part in counts.split(","):
            match = re.fullmatch(r"\s*(\d{1,9})(?:\(x(\d{1,5})\))?\s*", part)
            if match is None:
                raise RankEnvironmentError(
                    f"SLURM_STEP_TASKS_PER_NODE={counts} is not written like 2(x3),1",
                    why=f"invalid number of tasks: {part!r}",
                    fix="do not set SLURM_STEP_TASKS_PER_NODE yourself",
                )
            tasks += [int(match[1])] * int(match[2] or 1)
        if node >= len(tasks):
            raise RankEnvironmentError(
                f"SLURM_NODEID={node} is not among the nodes of {self._set_name(env, _TASKS)}={counts}",
                why="the variables of two Slurm jobs or steps are mixed",
                fix="submit from a clean environment: sbatch --export=NONE, or unset SLURM_* before",
            )
        return tasks[node]

    def find_master_host(self, env: Variables) -> str:
        """Take the first host of the list: node 0, which has rank 0 under block and cyclic distribution."""
        text = self.get(env, _HOSTS)
        if text is None:
            return super().find_master_host(env)
        try:
            return next(expand(text))
        except ValueError as error:
            raise RankEnvironmentError(
                f"invalid list of hosts: {self._set_name(env, _HOSTS)}={text}",
                why=str(error),
                fix="set MASTER_ADDR to the host of rank 0, on all ranks",
            ) from error

    def job_key(self, env: Variables) -> str:
        """Return the ids of job and step."""
        return f"slurm.{self.get(env, ('SLURM_JOB_ID', 'SLURM_JOBID'))}.{self.get(env, _STEP)}"


class Job(BatchJob):
    """A job of Slurm."""

    submit_dir = "SLURM_SUBMIT_DIR"
    can_exclude = True

    def __init__(self, spec: BatchSpec, node: NodeSpec, environ: Mapping[str, str]) -> None:
        super().__init__(spec, node, environ)
        self.array_task = environ.get("SLURM_ARRAY_TASK_ID")
        array = environ.get("SLURM_ARRAY_JOB_ID")
        try:
            self.id = f"{array}_{self.array_task}" if array and self.array_task else environ["SLURM_JOB_ID"]
        except KeyError:
            raise LaunchError("SLURM_JOB_ID is not set: sbatch this script") from None
        self.number = int(environ["SLURM_JOB_ID"])

    def hosts(self) -> Sequence[str]:
        """Return the nodes of the job; only the first if scontrol is not installed."""
        named = self.query("scontrol", "show", "hostnames", self.environ.get("SLURM_JOB_NODELIST", ""))[0].split()
        if not named and not self.environ.get("SLURMD_NODENAME"):
            raise LaunchError("the nodes of this job are not known: SLURMD_NODENAME is not set, and no scontrol")
        return named or [self.environ["SLURMD_NODENAME"]]

    def node_count(self, hosts: Sequence[str]) -> int:
        """Return how many nodes take part: inside an existing allocation as many as the run requests."""
        return self.node.nnodes if self.spec.is_inside else int(self.environ["SLURM_JOB_NUM_NODES"])

    def run(self, attempt: Path, hosts: Sequence[str]) -> int:
        """Start all tasks with one srun, and wait for it."""
        run = Path(self.environ[contract.RUN_DIR])
        reported = run / contract.STEP
        reported.unlink(missing_ok=True)
        # A terminal's signal to the process group must not reach srun.
        command = [*self.step_command(), "bash", str(run / contract.NODE_SCRIPT)]
        step = subprocess.Popen(command, start_new_session=self.spec.is_inside)

        def pass_on(number: int, _: object) -> None:
            """Send a signal to the ranks only: srun kills them on most signals."""
            with suppress(OSError):
                command = ["scancel", f"--signal={signal.Signals(number).name[3:]}", reported.read_text().strip()]
                if subprocess.run(command, check=False).returncode == 0:
                    return
            if number != signal.SIGUSR1:
                step.terminate()

        if self.spec.is_inside:
            for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, pass_on)
        else:
            # USR1 comes to this process alone; TERM comes to the ranks too, and srun would kill them for it.
            signal.signal(signal.SIGUSR1, lambda *_: step.send_signal(signal.SIGUSR1))
            signal.signal(signal.SIGTERM, lambda *_: None)
        code = step.wait()
        return 128 - code if code < 0 else code

    def place(self) -> RankPlace:
        """Return the place of a task that is a rank."""
        names = ("PROCID", "LOCALID", "NODEID", "STEP_NUM_TASKS")
        rank, local_rank, node, world_size = (int(self.environ[f"SLURM_{name}"]) for name in names)
        ranks = [int(rank) for rank in self.environ["SLURM_GTIDS"].split(",")]
        return RankPlace(rank, local_rank, node, world_size, ranks)

    def preempted(self) -> bool:
        """Return whether the job is being preempted."""
        return self._shown("PreemptTime") not in ("", "None", "Unknown")

    def ending(self) -> str | None:
        """Return a message if the job was cancelled; None if not, or if Slurm does not answer."""
        state = self._shown("JobState")
        return f"Slurm is ending the job already: it is {state}" if state in _ENDING else None

    def requeue(self, *, lost: bool) -> str | None:
        """Put the job back into the queue; return the error, or None."""
        problem = self.query("scontrol", "requeue", self.id)[1]
        # Slurm kills all processes of a job that it requeues: scontrol too, maybe before its answer.
        return None if problem and self._shown("JobState") == "COMPLETING" else problem

    def waits(self, *, lost: bool) -> bool:
        """Return True: a Slurm job can depend on one that has lost nodes, and on an array task."""
        return True

    def submit(self, run: Path, *, lost: bool, without: str | None = None) -> tuple[str, str | None]:
        """Submit the run's script as a job that depends on this one; return its id, and the error or None.

        Nodes that this job excludes stay excluded: an earlier attempt may have found them faulty.
        """
        array = (f"--array={self.array_task}",) if self.array_task else ()
        place = [f"{option}={value}" for option, name in _PLACE.items() if (value := self.environ.get(name))]
        excluded = [name for name in (self._shown("ExcNodeList"), without) if name not in (None, "", "(null)")]
        place += [f"--exclude={','.join(map(str, excluded))}"] if excluded else []
        options = ("--parsable", f"--dependency=afterany:{self.number}", *place, *array)
        answer, problem = self.query("sbatch", *options, str(run / self.spec.script))
        return answer.strip().partition(";")[0], problem

    def step_command(self) -> list[str]:
        """Return the srun command that starts all tasks, without the command of a task."""
        spec, node = self.spec, self.node
        count = int(self.environ[contract.NODE_COUNT])
        is_elastic = not spec.is_direct and node.min_nodes < node.nnodes
        tasks = [f"--ntasks={count}", "--ntasks-per-node=1"]
        if spec.is_direct:
            nproc = node.nproc_per_node
            # The user's directives may give a total number of tasks instead.
            is_own = not spec.is_inside and "SLURM_NTASKS_PER_NODE" not in self.environ
            own = self.environ.get("SLURM_NTASKS") if is_own else None
            tasks = [f"--ntasks={own}"] if own else [f"--ntasks={count * nproc}", f"--ntasks-per-node={nproc}"]
            tasks.append("--distribution=block")
        cpus = self.environ.get("SLURM_CPUS_PER_TASK") if not spec.is_inside else None
        return [
            "srun",
            f"--nodes={count}",
            *tasks,
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *(["--overlap"] if spec.is_inside else []),
            *(["--no-kill"] if is_elastic else []),
            f"--kill-on-bad-exit={0 if is_elastic else 1}",  # 1 would end the other nodes when one dies.
            "--wait=0",
            "--export=ALL",
            *spec.options,
        ]

    def _shown(self, field: str) -> str:
        """Return a field of ``scontrol show job``; empty if Slurm does not answer."""
        answer, _ = self.query("scontrol", "show", "job", self.id)
        found = re.search(rf"\b{field}=(\S+)", answer)
        return found[1] if found else ""
