"""Orders of a batch job, for tests of what its supervisor does."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.agent import pbs_job
from allranks.record.spec import BatchSpec
from node_orders import NODE

ORDERS = BatchSpec(
    module="allranks.agent.pbs_job",
    script="script.pbs",
    start_with=None,
    options=(),
    is_direct=False,
    is_array=False,
    is_inside=False,
    master_addr=None,
    max_attempts=10,
    time=None,
    warn_before=0,
    removes_secrets=False,
)


def pbs(environ: Mapping[str, str]) -> pbs_job.Job:
    """Return the job of PBS that a process with this environment is part of."""
    return pbs_job.Job(ORDERS, NODE, environ)
