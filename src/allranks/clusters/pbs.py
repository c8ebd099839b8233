"""PBS: a run is a job that qsub submits, or is started inside an allocation of qsub -I."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import asking, pbs_errors, pbs_jobs, pbs_log
from allranks.clusters.base import Request, Said
from allranks.clusters.pbs_jobs import JobInfo
from allranks.clusters.queued import QueuedCluster
from allranks.plan.script import exports
from allranks.runs.files import write_whole

if TYPE_CHECKING:
    from allranks.clusters.outlook import Outlook
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Status


class PbsCluster(QueuedCluster):
    """The kind ``pbs``: OpenPBS, PBS Pro and Torque."""

    name, scheduler, without = "pbs", "PBS", "have PBS leave it out: pbsnodes -o {}"
    submit, allocate = pbs_jobs.SUBMIT, "qsub -I"
    job_variable = "PBS_JOBID"
    patience = "the site's kill_delay to leave (10 s, unless changed)"

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed: see :func:`~allranks.clusters.pbs_plan.make_plan`."""
        from allranks.clusters.pbs_plan import make_plan  # Not for those who only read what became of a run.

        return make_plan(request)

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command of a shell: see :func:`~allranks.clusters.pbs_shell.shell_command`."""
        from allranks.clusters.pbs_shell import shell_command

        return shell_command(job, words, environ)

    def submitted(self, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> str:
        """Submit a plan's script with qsub, and return the job's id."""
        if plan.secrets:
            # Not with qsub -v: every user may read that in qstat's answer, and some values it alters or refuses.
            write_whole(Path(plan.run_dir, contract.SECRETS_FILE), exports(plan.secrets, environ), 0o600)
        return asking.submit(plan, environ, pbs_errors.PBS, pbs_jobs.parse_submitted, interrupted)

    def foreseen(self, plan: Plan, environ: Mapping[str, str]) -> Outlook:
        """Ask what would become of a plan's script: see :func:`~allranks.clusters.pbs_limits.outlook`."""
        from allranks.clusters.pbs_limits import outlook

        return outlook(plan, environ)

    def look_up(self, job_id: str) -> JobInfo | None:
        """Ask PBS what has become of a job."""
        return pbs_jobs.look_up(job_id)

    def delete(self, job_id: str) -> None:
        """Cancel a job with qdel; one that has ended meanwhile is none to cancel."""
        pbs_jobs.delete(job_id, os.environ)

    def over(self, folder: Path) -> None:
        """Remove the secrets of a run that has ended: its script does that too, unless PBS has killed it."""
        left = folder.glob(f"{contract.ATTEMPTS_DIR}/*/{contract.TASK_ENVIRONMENT}*")
        with contextlib.suppress(OSError):
            for file in (folder / contract.SECRETS_FILE, *left):
                file.unlink(missing_ok=True)

    def show(self, job_id: str) -> str:
        """Return the command of qstat that shows a job."""
        flavour = pbs_jobs.flavour(os.environ) or "openpbs"
        return shlex.join(pbs_jobs.show_command(job_id, flavour=flavour))

    def blame(self, status: Status, folder: Path, attempt: Path, job_id: str) -> Status:
        """Tell which rank failed first, from what the tasks of the job have left."""
        return pbs_log.blame(status, folder, attempt)

    def said(self, run: Run) -> Said:
        """Find what the logs of the job say that may tell why it ended."""
        return pbs_log.said(run)
