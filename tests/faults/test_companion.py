"""What keeps log index and heartbeat of a node where a scheduler starts the ranks itself, and no agent is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from allranks import contract
from allranks.record.files import copy_node_code
from allranks.record.logindex import LogIndexReader
from allranks.system.processes import marked, variable_of
from waiting import is_alive, wait_for

#: What a step's daemon does: the task of rank 0 starts the companion and becomes the rank, the other one is a rank.
STEP = """
task() {
    export RANK=$1
    [ "$1" = 4 ] && "$PYTHON" "$RUN/code" --companion 4 5 &
    exec "$PYTHON" -u "$RUN/rank.py" >"$NODE/rank-$1.out" 2>"$NODE/rank-$1.err"
}
task 4 & task 5 & wait
"""
RANK = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
print(f"rank {rank} begins")
while not pathlib.Path(os.environ["RUN"], f"end-{rank}").exists():
    time.sleep(0.02)
print(f"rank {rank} ends")
"""


class Step:
    """A step of two ranks on a node, and its companion."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.node = folder / contract.node_dir(1, 2)
        self.node.mkdir(parents=True)
        (folder / "rank.py").write_text(RANK)
        copy_node_code(folder / "code")
        place = {contract.RUN_DIR: str(folder), contract.ATTEMPT: "1", contract.NODE_RANK: "2"}
        paths = {"PYTHON": sys.executable, "RUN": str(folder), "NODE": str(self.node)}
        self.began = time.time()
        self.daemon = subprocess.Popen(
            ["bash", "-c", STEP], env={**env, **place, **paths}, stdout=subprocess.PIPE, start_new_session=True
        )
        self.companion = wait_for("the companion", self.find)
        wait_for("a heartbeat", lambda: (self.node / contract.HEARTBEAT).exists())
        wait_for("both in the index", lambda: self.noted() == {4: 14, 5: 14})

    def find(self) -> int | None:
        for pid in marked(contract.RUN_DIR, str(self.folder)):
            with suppress(OSError):
                if b"\0--companion\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        pids = [pid for pid in marked(contract.RUN_DIR, str(self.folder)) if variable_of(pid, "RANK") == str(number)]
        (pid,) = [pid for pid in pids if b"rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def noted(self) -> dict[int, int]:
        """Return the size of each rank's stdout by the index."""
        return {growth.rank: growth.end for growth in LogIndexReader(self.node, 2).read() if growth.kind == "o"}

    def size(self, rank: int) -> int:
        return (self.node / contract.rank_log(rank, "out")).stat().st_size

    def let_end(self, rank: int) -> None:
        (self.folder / f"end-{rank}").touch()


@pytest.fixture
def step(tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[Step]:
    """Give a step whose ranks have written a line each."""
    step = Step(tmp_path / "run", allranks_env)
    yield step
    with suppress(ProcessLookupError):
        os.killpg(step.daemon.pid, signal.SIGKILL)
    step.daemon.wait()
    assert step.daemon.stdout
    step.daemon.stdout.close()
    wait_for("nothing left", lambda: not marked(contract.RUN_DIR, str(step.folder)))


def test_it_notes_what_the_ranks_write_until_the_last_has_ended(step: Step) -> None:
    first_beat = float((step.node / contract.HEARTBEAT).read_text())
    assert step.began < first_beat < time.time()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(step.companion, number)
    first = step.rank(4)
    step.let_end(4)
    wait_for("the end of rank 4", lambda: not is_alive(first))
    wait_for("its last line in the index", lambda: step.noted().get(4) == step.size(4) == 26)
    assert is_alive(step.companion)
    step.let_end(5)
    assert step.daemon.stdout
    assert step.daemon.stdout.read() == b""  # Nobody holds the step's streams.
    wait_for("the end of the companion", lambda: not is_alive(step.companion))
    assert step.noted() == {4: 26, 5: 26}
    assert (step.node / contract.AGENT_LOG).read_text() == ""


def test_it_does_not_outlive_the_ranks_of_a_step_whose_daemon_is_gone(step: Step) -> None:
    first = step.rank(4)
    step.daemon.kill()
    step.daemon.wait()
    second = step.rank(5)
    step.let_end(4)
    wait_for("the end of rank 4", lambda: not is_alive(first))
    wait_for("the last line of rank 4", lambda: step.noted().get(4) == 26)
    assert is_alive(step.companion)
    step.let_end(5)
    wait_for("the end of the companion", lambda: not is_alive(step.companion))
    assert not is_alive(second)
