"""``python -m allranks.diagnosis ATTEMPT``: the verdict on an attempt as JSON, for the supervisor of its job.

A process of its own, since a job's end must not depend on it; null if nothing tells of a failure.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from allranks import contract
from allranks.diagnosis.attempt import end_of, logs_in, of_attempt
from allranks.diagnosis.model import Diagnosis
from allranks.record.events import read_events


def diagnose(attempt: Path) -> Diagnosis | None:
    """Return the verdict on an attempt, with the host of the rank that failed first."""
    events = (event for path in attempt.glob(f"node-*/{contract.AGENT_EVENTS}") for event in read_events(path))
    ranks = (event.fields.get("because_of_rank") for event in events if event.kind == contract.ENDED)
    first = next((rank for rank in ranks if rank is not None), None)
    verdict = of_attempt(attempt, logs_in(attempt), first)
    if verdict is None:
        return None
    host, when = end_of(attempt, first if verdict.rank is None else verdict.rank)
    return replace(verdict, host=host, when=when)


if __name__ == "__main__":
    found = diagnose(Path(sys.argv[1]))
    print(json.dumps(found and asdict(found)))
