"""Slurm's queue, as a job that runs in it sees it: scontrol(1) and sbatch(1)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from allranks import contract

_SECONDS = 60.0
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
        submitted_in = environ.get("SLURM_SUBMIT_DIR")
        self._folder = submitted_in if submitted_in and Path(submitted_in).is_dir() else None
        self.is_requeued = environ.get("SLURM_RESTART_COUNT", "0") != "0"
        self.job = f"{array}_{self._task}" if array and self._task else environ["SLURM_JOB_ID"]

    def ending(self) -> str | None:
        """Tell whether somebody has cancelled the job; if Slurm does not say, nobody has."""
        state = self._shown("JobState")
        return f"Slurm is ending the job already: it is {state}" if state in _ENDING else None

    def preempted(self) -> bool:
        """Tell whether the job was told to make room for another one."""
        return self._shown("PreemptTime") not in ("", "None", "Unknown")

    def requeue(self) -> str | None:
        """Put the job back into the queue; return what kept it from that."""
        return self._ask("scontrol", "requeue", self.job)[1]

    def submit(self, run: Path) -> tuple[str, str | None]:
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
        """Run a command of Slurm's; return what it said, and what went wrong."""
        try:
            done = subprocess.run(
                command,
                env=contract.outside_of_jobs(self._environ),
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return "", f"{command[0]} cannot be run: {error}"
        if done.returncode:
            return done.stdout, f"{command[0]}: {_last_line(done.stderr) or f'exit code {done.returncode}'}"
        return done.stdout, None


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1] if lines else ""
