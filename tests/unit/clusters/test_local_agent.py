"""Processes are told apart for good, and ended by what they were started with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.clusters import local_agent
from allranks.system import processes
from waiting import PATIENCE


@pytest.fixture
def start():
    started = []

    def begin(code="import time; time.sleep(300)", **env):
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True)\n" + code],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_process_is_alive_until_it_ends_even_as_a_zombie(start):
    child = start()
    handle = local_agent.identify(child.pid)
    assert local_agent.is_alive(handle)
    child.kill()
    assert local_agent.await_end(handle, PATIENCE)  # Nobody has waited for it yet: it is a zombie.
    assert not local_agent.is_alive(handle)


def test_another_process_of_the_same_id_is_another(start):
    child = start()
    handle = local_agent.identify(child.pid)
    assert not local_agent.is_alive(handle._replace(started=handle.started - 1))
    assert not local_agent.is_alive(handle._replace(extra={"boot": "of another day"}))
    local_agent.send(handle._replace(started=handle.started - 1), signal.SIGKILL)
    assert child.poll() is None
    assert not local_agent.is_alive(handle._replace(pid=None))


def test_waiting_for_an_end_is_bounded(start):
    child, began = start(), time.monotonic()
    assert not local_agent.await_end(local_agent.identify(child.pid), 0.1)
    assert time.monotonic() - began >= 0.1
    assert child.poll() is None


def test_marked_processes_are_ended_and_no_others(start):
    mine, deaf = (
        start(MARK="a/b"),
        start("import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(300)", MARK="a/b"),
    )
    others = [start(MARK="a/b2"), start(MARK="xa/b"), start(XMARK="a/b")]
    assert deaf.stdout.readline() == b"\n"  # It is deaf now.
    assert processes.marked("MARK", "a/b")
    assert local_agent.end_marked("MARK", "a/b", 0.5)
    assert (mine.wait(PATIENCE), deaf.wait(PATIENCE)) == (-15, -9)
    assert [other.poll() for other in others] == [None] * 3
    assert not processes.marked("MARK", "a/b")


def test_who_ends_marked_processes_spares_itself_and_its_parents():
    ours = next(line for line in Path("/proc/self/environ").read_text().split("\0") if "=" in line)
    name, _, value = ours.partition("=")
    assert os.getpid() not in processes.marked(name, value)
    assert os.getppid() not in processes.marked(name, value)
