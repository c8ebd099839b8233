"""What a run's first node needs to send notifications, as a file of the run, and the plan's line for it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.plan.plan import PlanFile, Reason

if TYPE_CHECKING:
    from allranks.job.spec import Job


def notify_config(job: Job) -> dict[str, Any] | None:
    """Return of what, and how, the first node notifies; None if it does not. The webhook's URL comes as a variable."""
    wanted = job.notify
    if not (wanted.command or wanted.webhook) or not wanted.on:
        return None
    return {"on": [*wanted.on], "command": [*wanted.command], "webhook": wanted.webhook is not None}


def notify_files(job: Job, mode: int) -> tuple[PlanFile, ...]:
    """Return the file of :func:`notify_config`, with permission bits ``mode``, if there is one."""
    config = notify_config(job)
    return (PlanFile(contract.NOTIFY_FILE, json.dumps(config, indent=2) + "\n", mode),) if config else ()


def notify_reasons(job: Job) -> tuple[Reason, ...]:
    """Return the plan's line on who is notified; the URL of a webhook is a secret."""
    if not (config := notify_config(job)):
        return ()
    ways = [shlex.join(job.notify.command)] if job.notify.command else []
    ways += ["webhook"] if job.notify.webhook else []
    return (Reason("notify", " and ".join(ways), f"notify.on: {', '.join(config['on'])}"),)
