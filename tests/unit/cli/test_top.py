"""allranks top: what a run uses of its nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

from allranks.system import cgroups
from waiting import PATIENCE, wait_for

BUSY = """\
import time
held = bytearray(64 << 20)
while True:
    pass
"""


#: Of two ranks.
HELD = 2 * (64 << 20)


def _usage(allranks):
    """Return what is used once both ranks hold their memory and are busy."""
    found = json.loads(allranks("top", "--json").stdout)
    return found[0] if found and found[0]["cpus"] and found[0]["memory"] > HELD else None


def test_what_the_ranks_of_a_run_use(allranks):
    allranks.script(BUSY)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    wait_for("the run", (allranks.folder / "runs" / "latest").exists)
    usage = wait_for("its usage", lambda: _usage(allranks))
    assert process.poll() is None
    assert (usage["node"], usage["host"], usage["gpus"]) == (0, socket.gethostname(), [])
    assert usage["cpus_total"] == cgroups.usable_cpus()
    assert usage["memory_total"] > usage["memory"]
    assert usage["disk_read"] >= 0
    assert 0 < usage["cpus"] <= min(2, os.cpu_count()) + 0.1
    header, row = allranks("top").stdout.splitlines()
    assert header.split() == ["NODE", "CPUS", "MEMORY", "GPU", "BUSY", "GPU", "MEMORY", "CLOCK", "TEMP", "SEEN"]
    assert row.split()[:2] == ["0", socket.gethostname()]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)


def test_a_run_that_nothing_has_been_seen_of(allranks, failed_run):
    for file in failed_run.glob("attempts/*/*/usage.json"):
        file.unlink()
    done = allranks("top", cwd=failed_run.parent.parent)
    said = f"{failed_run.name}: it ended before its first sample\n"
    assert (done.rc, done.stdout) == (0, said)
    assert re.fullmatch(rf"{failed_run.name} has already ended: FAILED, \d+ (s|min) ago\n", done.stderr)
    assert json.loads(allranks("top", "--json", cwd=failed_run.parent.parent).stdout) == []


def test_each_gpu_of_a_node_has_a_row(allranks, failed_run: Path):
    run = allranks.folder / "runs" / failed_run.name
    shutil.copytree(failed_run, run)
    clocks = {"temperature": 88, "clock": 1110, "max_clock": 1980, "slowed_by": ["thermal"]}
    gpus = [{"number": 0, "busy": 97, "memory": 2e9, "total": 80e9, **clocks}, {"busy": 0, "memory": 0, "total": 80e9}]
    usage = {"host": "gpu1", "time": time.time(), "cpus": 3.25, "memory": 5e9, "gpus": gpus}
    (run / "attempts/000/node-000/usage.json").write_text(json.dumps(usage))
    _, first, second = allranks("top").stdout.splitlines()
    assert re.fullmatch(
        r"0 gpu1 +3\.2 +5 GB +0 +97 % +2 GB of 80 GB +1\.11 GHz \(thermal\) +88 °C +\d+\.\d s ago", first
    )
    assert re.fullmatch(r" +1 +0 % +0 B of 80 GB +- +-", second)
    (shown,) = json.loads(allranks("top", "--json").stdout)
    of_an_earlier_version = {"number": 1, "temperature": None, "clock": None, "max_clock": None, "slowed_by": []}
    assert (shown["node"], shown["gpus"]) == (0, [gpus[0], gpus[1] | of_an_earlier_version])
