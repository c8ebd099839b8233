"""No rank ends while a thread of gloo's may still ask for the interpreter's lock."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.processes import let_gloo_rest


class Worker:
    """A thread that has gloo's name, works for a while and then waits for more, as gloo's do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.done = False
        self._named = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self._named.wait()

    def _work(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        self._named.set()
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            time.sleep(0.002)
        self.done = True
        self._end.wait()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def two_workers() -> Iterator[tuple[Worker, Worker]]:
    """Give one that is idle and one that works for 0.3 s."""
    workers = (Worker(0), Worker(0.3))
    yield workers
    for worker in workers:
        worker.stop()


def test_it_waits_until_all_are_idle(two_workers: tuple[Worker, Worker]) -> None:
    let_gloo_rest()
    assert [worker.done for worker in two_workers] == [True, True]


def test_it_does_not_wait_for_ever(two_workers: tuple[Worker, Worker]) -> None:
    let_gloo_rest(limit=0.05)
    assert [worker.done for worker in two_workers] == [True, False]


LOOK = "import atexit, allranks.processes as processes\nprocesses._gloo_threads = lambda: print('looked') or {}\n"


def test_a_rank_is_asked_to_after_all_that_its_script_does(allranks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{LOOK}atexit.register(print, 'of the script')\nprint('the end')\n")
    done = allranks("run", script, "--nproc-per-node", "1")
    assert done.stdout.splitlines() == ["[0] the end", "[0] of the script", "[0] looked"]


def test_without_our_agent_init_asks_for_it_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{LOOK}import allranks\nallranks.init().close()\nallranks.init().close()\nprint('the end')\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["the end", "looked"]
