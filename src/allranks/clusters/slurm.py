"""Slurm: a run is a job that sbatch submits, or is started inside an allocation of salloc."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters import asking, slurm_errors, slurm_jobs, slurm_log, slurm_said
from allranks.clusters.base import Request, Said
from allranks.clusters.queued import QueuedCluster
from allranks.clusters.slurm_jobs import JobInfo

if TYPE_CHECKING:
    from allranks.clusters.outlook import Outlook
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Status


class SlurmCluster(QueuedCluster):
    """The kind ``slurm``."""

    name, scheduler, without = "slurm", "Slurm", "leave it out: --exclude {}"
    submit, allocate = slurm_jobs.SUBMIT, "salloc"
    job_variable = "SLURM_JOB_ID"
    patience = "the site's KillWait to leave (30 s, unless changed)"

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed: see :func:`~allranks.clusters.slurm_plan.make_plan`."""
        from allranks.clusters.slurm_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command of a shell: see :func:`~allranks.clusters.slurm_shell.shell_command`."""
        from allranks.clusters.slurm_shell import shell_command

        return shell_command(job, words, environ, terminal=terminal)

    def submitted(self, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> str:
        """Submit a plan's script with sbatch, and return the job's id."""
        return asking.submit(plan, environ, slurm_errors.SLURM, slurm_jobs.parse_submitted, interrupted)

    def foreseen(self, plan: Plan, environ: Mapping[str, str]) -> Outlook:
        """Ask what would become of a plan's script: see :func:`~allranks.clusters.slurm_limits.outlook`."""
        from allranks.clusters.slurm_limits import outlook

        return outlook(plan, environ)

    def look_up(self, job_id: str) -> JobInfo | None:
        """Ask Slurm what has become of a job."""
        return slurm_jobs.look_up(job_id)

    def delete(self, job_id: str) -> None:
        """Cancel a job with scancel."""
        slurm_jobs.ask(slurm_jobs.cancel_command(job_id), os.environ)

    def show(self, job_id: str) -> str:
        """Return the command of scontrol that shows a job."""
        return f"scontrol show job {job_id}"

    def blame(self, status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
        """Tell what failed first, from what srun says in the job's log."""
        return slurm_log.blame(status, folder, attempt, job_id)

    def said(self, run: Run) -> Said:
        """Find what the job's log says that may tell why it ended."""
        log = slurm_said.log_of(run)
        return Said(log, slurm_said.causes(log) if log else ())
