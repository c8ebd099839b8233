"""Slurm's queue, as a job that runs in it sees it: scontrol(1) and sbatch(1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from allranks import contract
from allranks.agent.queues import ask

#: What the job was submitted to: it need not stand in the script.
_PLACE = {"--account": "SLURM_JOB_ACCOUNT", "--partition": "SLURM_JOB_PARTITION", "--qos": "SLURM_JOB_QOS"}
#: A job in one of these was cancelled, or is being ended for it.
_ENDING = ("CANCELLED", "COMPLETING")


class SlurmQueue:
    """The job that this process is part of.

    Args:
        environ: of the batch script.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._task = environ.get("SLURM_ARRAY_TASK_ID")
        array = environ.get("SLURM_ARRAY_JOB_ID")
        self._folder = environ.get("SLURM_SUBMIT_DIR")
        self.job = f"{array}_{self._task}" if array and self._task else environ["SLURM_JOB_ID"]

    def ending(self) -> str | None:
        """Tell whether somebody has cancelled the job; if Slurm does not say, nobody has."""
        state = self._shown("JobState")
        return f"Slurm is ending the job already: it is {state}" if state in _ENDING else None

    def preempted(self) -> bool:
        """Tell whether the job was told to make room for another one."""
        return self._shown("PreemptTime") not in ("", "None", "Unknown")

    def requeue(self, *, lost: bool) -> str | None:
        """Put the job back into the queue; return what kept it from that."""
        return self._ask("scontrol", "requeue", self.job)[1]

    def waits(self, *, lost: bool) -> bool:
        """Tell whether a job that follows waits for the end of this one: always."""
        return True

    def submit(self, run: Path, *, lost: bool) -> tuple[str, str | None]:
        """Submit the run's script, to wait for the end of this job; return the new id, and what kept it from that."""
        own = self._environ["SLURM_JOB_ID"]
        array = (f"--array={self._task}",) if self._task else ()
        place = [f"{option}={value}" for option, name in _PLACE.items() if (value := self._environ.get(name))]
        options = ("--parsable", f"--dependency=afterany:{own}", *place, *array)
        answer, problem = self._ask("sbatch", *options, str(run / contract.SBATCH_SCRIPT))
        return answer.strip().partition(";")[0], problem

    def _shown(self, field: str) -> str:
        """Return what Slurm shows of the job; nothing if it does not."""
        answer, _ = self._ask("scontrol", "show", "job", self.job)
        found = re.search(rf"\b{field}=(\S+)", answer)
        return found[1] if found else ""

    def _ask(self, *command: str) -> tuple[str, str | None]:
        return ask(command, self._environ, self._folder)
