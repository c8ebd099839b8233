"""`retry.on: [hardware]` on Slurm: a node at fault is left out of the next attempt, and a script at fault gets none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

from allranks import contract

#: Where the first attempt runs, a GPU is said to have failed.
FAILS = """\
import os, pathlib
first = pathlib.Path("first")
if not first.exists():
    first.write_text(os.environ["SLURMD_NODENAME"])
print("on", os.environ["SLURMD_NODENAME"], flush=True)
if first.read_text() == os.environ["SLURMD_NODENAME"]:
    {end}
"""
JOB = """\
script: train.py
cluster: lab
notify:
  on: start, failure, requeue, end
  command: cat >>got; echo >>got
  webhook: http://127.0.0.1:9/tell-nobody
retry: {on: [node, preemption, hardware]}
"""


def notified(lab: Any) -> list[tuple[str, int, str]]:
    """Return the event, attempt and text of each notification that the command got."""
    events = [json.loads(line) for line in (lab.folder / "got").read_text().splitlines()]
    return [(each["event"], each["attempt"], each["text"]) for each in events]


def test_a_node_at_fault_is_left_out(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(FAILS.format(end='raise RuntimeError("CUDA error: uncorrectable ECC error encountered")'))
    lab.job(JOB)
    done = lab("run", "job.yaml")
    assert done.rc == 0, done.stderr
    run = lab.run()
    decision = json.loads((run / contract.attempt_dir(0) / contract.AGAIN).read_text())
    first = (lab.folder / "first").read_text()
    assert decision["why"] == f"a GPU has damaged memory (uncorrectable ECC error) on {first}"
    assert (decision["without"], decision["how"]) == (first, "dependent")
    assert slurm.job(int(decision["job"]))["ExcNodeList"] == first
    assert (run / contract.node_dir(1, 0) / "rank-0.out").read_text() != f"on {first}\n"
    got = notified(lab)
    assert [each[:2] for each in got] == [("start", 1), ("requeue", 1), ("start", 2), ("end", 2)]
    assert got[1][2] == f"{run.name}: another attempt follows attempt 1: {decision['why']}"


@pytest.mark.parametrize(
    ("job", "end"),
    [
        (JOB, "{}['weights']"),
        (JOB.partition("retry")[0], 'raise RuntimeError("CUDA error: uncorrectable ECC error encountered")'),
    ],
    ids=["a typo", "not requested"],
)
def test_no_other_attempt_follows(lab: Any, job: str, end: str) -> None:
    lab.script(FAILS.replace("{end}", end))
    lab.job(job)
    assert lab("run", "job.yaml").rc == 1
    run = lab.run()
    decision = json.loads((run / contract.attempt_dir(0) / contract.AGAIN).read_text())
    assert (decision["again"], decision["why"]) == (False, "it exited with code 1, and is not retried")
    assert not (run / contract.attempt_dir(1)).exists()
    (start, _, _), (failure, _, text) = notified(lab)
    first, cause, line, fix = text.splitlines()
    assert (start, failure) == ("start", "failure")
    assert (first.startswith(f"{run.name} failed after "), bool(cause), fix.startswith("fix: ")) == (True, True, True)
    assert line in ("KeyError: 'weights'", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    (log,) = (path.read_text() for path in run.glob("slurm-*.out"))
    refused = "the webhook at 127.0.0.1 cannot be reached: Connection refused"
    assert f"allranks: notification of the failure failed: {refused}\n" in log
    assert not [path for path in run.rglob("*") if path.is_file() and b"tell-nobody" in path.read_bytes()]
