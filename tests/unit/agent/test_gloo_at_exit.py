"""No rank ends while a thread of gloo's may still ask for the interpreter's lock."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.system.processes import let_gloo_rest


class Worker:
    """A thread that has gloo's name, does so many small things, and then waits for more, as gloo's do."""

    def __init__(self, things: float) -> None:
        self.things = things
        self._ready = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self._ready.wait()

    def _work(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        self._ready.set()
        while self.things and not self._end.is_set():
            time.sleep(0.002)
            self.things -= 1
        self._end.wait()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    """Give threads that have so many things to do."""
    workers = [Worker(things) for things in request.param]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("workers", [(0, 100)], indirect=True)
def test_it_waits_until_all_are_idle(workers: list[Worker]) -> None:
    let_gloo_rest(limit=60)
    assert [worker.things for worker in workers] == [0, 0]


@pytest.mark.parametrize("workers", [(math.inf,)], indirect=True)
def test_it_does_not_wait_for_ever(workers: list[Worker]) -> None:
    let_gloo_rest(limit=0.05)
    assert workers[0].things == math.inf


LOOK = """\
import atexit, allranks.system.processes as processes
processes._gloo_threads = lambda: print('looked') or {}
"""


def test_a_rank_is_asked_to_after_all_that_its_script_does(allranks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{LOOK}atexit.register(print, 'of the script')\nprint('the end')\n")
    done = allranks("run", script, "--nproc-per-node", "1")
    assert done.stdout.splitlines() == ["[0] the end", "[0] of the script", "[0] looked"]


def test_without_our_agent_each_close_asks_for_it_and_the_exit_once(
    allranks_env: dict[str, str], run_python: Any
) -> None:
    script = f"{LOOK}import allranks\nallranks.init().close()\nallranks.init().close()\nprint('the end')\n"
    done = run_python(script, env={**allranks_env, "OMP_NUM_THREADS": "1"})
    assert (done.rc, done.stdout.splitlines()) == (0, ["looked", "looked", "the end", "looked"])


CLOSE = """\
import allranks
from torch import distributed
ctx = allranks.init(backend="gloo")
destroy = distributed.destroy_process_group
distributed.destroy_process_group = lambda: (print("destroyed"), destroy())
ctx.close()
print("the end")
"""


def test_a_context_waits_before_the_group_is_left_to_a_model_that_outlives_it(
    allranks_env: dict[str, str], run_python: Any
) -> None:
    """The model would end the group with the interpreter's lock held, which gloo's threads may wait for."""
    done = run_python(LOOK + CLOSE, env={**allranks_env, "OMP_NUM_THREADS": "1"})
    assert done.stdout.splitlines() == ["looked", "destroyed", "the end", "looked"]
