"""Slurm's srun, as in ``srun python train.py``.

Source: "OUTPUT ENVIRONMENT VARIABLES" in srun(1) and sbatch(1), and slurm.h for the reserved step ids.
"""

from __future__ import annotations

import os
import re

from allranks.errors import RankEnvironmentError
from allranks.hostlist import expand
from allranks.runtime.environment.base import EnvironmentKind, Variables

#: Step ids from here up are no steps of srun: 0xfffffffb is the batch script, 0xfffffffa the shell of salloc.
RESERVED_STEPS = 0xFFFFFFF0
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")


class Slurm(EnvironmentKind):
    """SLURM_PROCID and its companions."""

    name = "Slurm"
    rank = ("SLURM_PROCID",)
    world_size = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = ("SLURM_LOCALID",)
    local_world_size = _TASKS
    node_rank = ("SLURM_NODEID",)

    def present(self, env: Variables) -> bool:
        """Tell a task of srun from the shell of a batch script, of salloc and of ``srun --pty bash``.

        Those shells have SLURM_PROCID=0 and the allocation's SLURM_NTASKS too, but nobody started the others.
        """
        step = self.number(env, _STEP)
        if step is None or step >= RESERVED_STEPS or self.get(env, self.rank) is None:
            return False
        return not self._in_terminal_shell(env)

    def find_local_world_size(self, env: Variables) -> int | None:
        """Look this node up in SLURM_STEP_TASKS_PER_NODE, written like ``2(x3),1``."""
        counts, node = self.get(env, _TASKS), self.find_node_rank(env)
        if counts is None or node is None:
            return None
        tasks = _tasks_per_node(counts)
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
                f"{self._set_name(env, _HOSTS)}={text} is no list of hosts",
                why=str(error),
                fix="set MASTER_ADDR to the host of rank 0, on all ranks",
            ) from error

    def job_key(self, env: Variables) -> str:
        """Give job and step, as Slurm writes them."""
        return f"slurm.{self.get(env, ('SLURM_JOB_ID', 'SLURM_JOBID'))}.{self.get(env, _STEP)}"

    def _in_terminal_shell(self, env: Variables) -> bool:
        """Tell whether somebody typed the command in the shell of ``srun --pty``.

        There the task is the shell, SLURM_TASK_PID; a script that srun itself started is the task.
        """
        task = self.get(env, ("SLURM_TASK_PID",))
        return "SLURM_PTY_PORT" in env and task is not None and task != str(os.getpid())


def _tasks_per_node(text: str) -> list[int]:
    """Expand ``2(x3),1`` to the tasks of each node: 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\(x(\d{1,5})\))?\s*", part)
        if match is None:
            raise RankEnvironmentError(
                f"SLURM_STEP_TASKS_PER_NODE={text} is not written like 2(x3),1",
                why=f"{part!r} is no number of tasks",
                fix="do not set SLURM_STEP_TASKS_PER_NODE yourself",
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
