"""PBS's pbsdsh, which starts one task for each line of the node file.

Source: "Environment variables" in the reference guides of PBS Pro and Torque. PBS starts a task with almost
no environment: PBS_NODEFILE must be handed on, and readable on each node.
"""

from __future__ import annotations

from pathlib import Path

from allranks.errors import RankEnvironmentError
from allranks.runtime.environment.base import EnvironmentKind, Variables

_NODEFILE = ("PBS_NODEFILE",)
_LINE = ("PBS_VNODENUM",)


class Pbs(EnvironmentKind):
    """PBS_NODENUM, which is the host's number, and the hosts in PBS_NODEFILE.

    A host has as many lines in the file as it has tasks. Torque also tells the line, in PBS_VNODENUM.
    """

    name = "PBS"
    rank = ("PBS_NODENUM",)
    world_size = _NODEFILE
    local_rank = _LINE
    local_world_size = _NODEFILE
    node_rank = ("PBS_NODENUM",)

    def present(self, env: Variables) -> bool:
        """Tell a task of pbsdsh from the shell of the job.

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
        """Count the lines of the hosts before this one, and our place on this one."""
        lines, host = self._lines(env), self._host(env)
        before = set(_distinct(lines)[: _distinct(lines).index(host)])
        return sum(line in before for line in lines) + self._place(env)

    def find_local_rank(self, env: Variables) -> int | None:
        """Find our place among the lines of this host."""
        return self._place(env)

    def find_local_world_size(self, env: Variables) -> int | None:
        """Count the lines of this host."""
        return self._lines(env).count(self._host(env))

    def find_master_host(self, env: Variables) -> str:
        """Take the first host of the file."""
        return self._lines(env)[0]

    def job_key(self, env: Variables) -> str:
        """Give the job's id."""
        return f"pbs.{self.get(env, ('PBS_JOBID',))}"

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
        hosts, node = _distinct(self._lines(env)), self.number(env, self.rank) or 0
        if node >= len(hosts):
            raise RankEnvironmentError(
                f"PBS_NODENUM={node} is not among the {len(hosts)} hosts of PBS_NODEFILE",
                why="the variables of two PBS jobs are mixed",
                fix="hand PBS_NODEFILE of this job to the tasks",
            )
        return hosts[node]

    def _place(self, env: Variables) -> int:
        """Find our place among the tasks of this host, from Torque's line number if there are several."""
        lines, host = self._lines(env), self._host(env)
        line = self.number(env, _LINE)
        if lines.count(host) == 1:
            return 0
        if line is None or line >= len(lines) or lines[line] != host:
            raise RankEnvironmentError(
                f"PBS does not tell which of the {lines.count(host)} tasks on {host} this one is",
                why="PBS_VNODENUM is not set or is no line of that host in PBS_NODEFILE",
                fix="ask for mpiprocs=1 and start each node with allranks run or torchrun; or use mpiexec",
            )
        return lines[:line].count(host)

    def advice(self, env: Variables, there: list[str], missing: list[str]) -> str:
        """Say how the tasks get the node file."""
        return (
            "copy $PBS_NODEFILE to a folder that all nodes share, and start the tasks with "
            "pbsdsh -- env PBS_NODEFILE=/that/copy python train.py"
        )


def _distinct(lines: list[str]) -> list[str]:
    """Give the hosts once each, in the order first seen: the position is the node's number."""
    return list(dict.fromkeys(lines))
