"""A process that has told its name is missed when it is gone, by those who can see it."""

from __future__ import annotations

import json
import subprocess
import sys

from allranks.runtime import peers

TELL = "from allranks.runtime import peers; print(peers.own_name(), flush=True); input()"


def test_a_process_is_gone_once_it_has_ended_also_before_it_is_buried() -> None:
    child = subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline()
    alive = peers.is_gone(name)
    child.kill()
    while not peers.is_gone(name):
        assert child.returncode is None  # Nobody has waited for it: a zombie is gone.
    child.communicate()
    assert (alive, peers.is_gone(name)) == (False, True)


def test_a_later_process_of_the_same_id_is_another_one() -> None:
    machine, pid, started = json.loads(peers.own_name())
    assert not peers.is_gone(json.dumps([machine, pid, started]))
    assert peers.is_gone(json.dumps([machine, pid, started - 1]))


def test_of_another_machine_nothing_is_known() -> None:
    _, pid, started = json.loads(peers.own_name())
    assert not peers.is_gone(json.dumps([["another boot", "pid:[1]"], pid, started - 1]))
    assert not peers.is_gone(json.dumps([[], pid, None]))
