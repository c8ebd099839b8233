"""A disk that fills up costs what could not be written to it, not the run and not its exit code."""

from __future__ import annotations

import signal

import pytest

from waiting import wait_for

FILL = """\
import os, sys
with open(os.environ["DISK"] + "/fill", "wb", buffering=0) as file:
    for size in (4096, 1):
        try:
            while True:
                file.write(b"x" * size)
        except OSError:
            pass
print("full", file=open("full", "w"))
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "state"),
    [("sys.exit(0)", 0, "SUCCEEDED"), ("os._exit(9)", 9, "FAILED"), ("os.kill(os.getpid(), 9)", 137, "FAILED")],
)
def test_the_exit_code_is_not_lost(allranks, small_disk, end, code, state):
    allranks.script(FILL.format(end=end))
    done = allranks("run", "train.py", "--runs-folder", small_disk, DISK=str(small_disk))
    assert (allranks.folder / "full").exists()
    assert done.rc == code, done.stderr


def test_the_run_can_still_be_ended(allranks, small_disk, finish):
    allranks.script(FILL.format(end="import time; time.sleep(300)"))
    process = allranks.popen("run", "train.py", "--runs-folder", small_disk, DISK=str(small_disk))
    wait_for("a full disk", (allranks.folder / "full").exists)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
