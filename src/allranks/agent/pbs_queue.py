"""PBS's queue, as a job that runs in it sees it: qrerun(1B) and qsub(1B)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from allranks import contract
from allranks.agent.queues import ask

#: What comes of a qrerun that is ended together with the job it puts back, or that does not want to wait for that.
_IS_UNDER_WAY = re.compile(r"exit code -\d+$|Job rerun request still in progress")


class PbsQueue:
    """The job that this process is part of.

    Args:
        environ: of the batch script.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._folder = environ.get("PBS_O_WORKDIR")
        self._task = environ.get("PBS_ARRAY_INDEX") or environ.get("PBS_ARRAYID", "")
        self.job = environ["PBS_JOBID"]

    def ending(self) -> str | None:
        """Tell whether PBS has begun to end the job before its time: somebody has deleted it, or PBS needs its nodes.

        In the second case PBS itself puts it back into the queue. A job that has lost a node it ends for good.
        """
        run, number = self._environ.get(contract.RUN_DIR, ""), int(self._environ.get(contract.ATTEMPT, "0"))
        attempt = Path(run) / contract.attempt_dir(number)
        if not (attempt / contract.TERMINATED).exists() or self._is_over():
            return None
        has_lost_a_node = any(attempt.glob(f"node-*/{contract.CUT_OFF}"))
        return None if has_lost_a_node and not self._is_deleted() else "PBS is ending the job already"

    def preempted(self) -> bool:
        """Tell whether the job has to be put back because it makes room: never, for PBS does that by itself."""
        return False

    def requeue(self, *, lost: bool) -> str | None:
        """Put the job back into the queue; return what kept it from that: most sites let operators do it alone.

        A job that has lost a node other than its first ends only when that is back, whoever wants it to end.
        """
        if lost:
            return "PBS ends a job that has lost a node only when that is back"
        refused = ask(["qrerun", self.job], self._environ, self._folder)[1]
        return None if refused and _IS_UNDER_WAY.search(refused) else refused

    def waits(self, *, lost: bool) -> bool:
        """Tell whether a job that follows waits for the end of this one.

        Where nodes were lost it waits for nothing, see :meth:`requeue`. Nor does a task of an array: no job can wait
        for one, and all that the next has to wait for has ended before this is asked.
        """
        return not (lost or self._task)

    def submit(self, run: Path, *, lost: bool) -> tuple[str, str | None]:
        """Submit the run's script; return the new id, and what kept it from that."""
        options = ["-W", f"depend=afterany:{self.job}"] if self.waits(lost=lost) else []
        if self._task:
            # Of one task no array can be, but of every second one from it to the next; of Torque's one can.
            one = ["-J", f"{self._task}-{int(self._task) + 1}:2"]
            options += ["-t", self._task] if "PBS_ARRAYID" in self._environ else one
        if queue := self._environ.get("PBS_O_QUEUE"):
            options += ["-q", queue]
        if account := self._environ.get("PBS_ACCOUNT"):
            options += ["-A", account]
        answer, problem = ask(["qsub", *options, str(run / contract.PBS_SCRIPT)], self._environ, self._folder)
        lines = answer.split()
        # The id by which the next knows itself: of an array, that of its task.
        return lines[-1].replace("[]", f"[{self._task}]") if lines else "", problem

    def _is_deleted(self) -> bool:
        """Tell whether somebody has deleted the job; it counts as deleted where PBS does not answer."""
        answer, problem = ask(["qstat", "-f", self.job], self._environ, self._folder)
        return problem is not None or " and terminated by " in answer.replace("\n\t", "")

    def _is_over(self) -> bool:
        """Tell whether the time limit is reached."""
        end = self._environ.get(contract.END_TIME, "")
        return end.isdecimal() and time.time() >= int(end)
