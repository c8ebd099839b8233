"""The orders of an agent on a node of its own, and of a batch job, for tests that change some of them."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.agent import pbs_job
from allranks.record.spec import BatchSpec, NodeSpec

NODE = NodeSpec(
    run_id="run",
    run_dir="/runs/run",
    attempt=0,
    node=0,
    nnodes=1,
    nproc_per_node=1,
    kind="script",
    target="/nowhere/train.py",
    args=(),
    python_options=(),
    warm=True,
    max_restarts=0,
    restart_delay=0.0,
    stop_timeout=5.0,
    master_addr="127.0.0.1",
    master_port=None,
    file_mode=0o600,
)
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
