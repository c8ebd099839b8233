"""The orders of an agent on a node of its own, for tests that change some of them."""

from __future__ import annotations

from allranks.record.spec import NodeSpec

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
