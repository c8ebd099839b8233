"""A forked rank is a process like one of its own: descriptors, signals, streams, random numbers."""

from __future__ import annotations

import json
import signal

import pytest

STATE = """\
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
fds = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd not in "12"
       if os.path.exists(f"/proc/self/fd/{fd}")}
mask = os.umask(0)
print(json.dumps({
    "fds": fds, "umask": mask, "cwd": os.getcwd(),
    "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")},
    "handlers": [str(signal.getsignal(n)) for n in range(1, 32)],
    "wakeup": signal.set_wakeup_fd(-1), "threads": status["Threads"].strip(), "nice": os.nice(0),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "inheritable": [os.get_inheritable(n) for n in range(3)],
    "env": sorted(name for name in os.environ if name not in ("PYTHONUNBUFFERED", "PYTHONBREAKPOINT")),
}))
"""


def test_descriptors_signals_and_limits_are_those_of_a_plain_interpreter(rank, mode):
    path = rank.script(STATE)
    expected, got = (json.loads(done.out) for done in (rank.python(path), rank(path, **mode)))
    # But for the signal that requests stacks, and the file to which they are written.
    stacks = [fd for fd, file in got["fds"].items() if file.endswith("/rank-0.stacks")]
    caught = sum(1 << (signal.SIGRTMAX - 2) for fd in stacks if got["fds"].pop(fd))
    got["signals"]["SigCgt"] = f"{int(got['signals']['SigCgt'], 16) - caught:016x}"
    assert len(stacks) == (not mode.get("plain", False))
    assert got == expected
    assert got["fds"]["0"] == "/dev/null"


def test_a_program_gets_no_signal_ignored_that_python_ignores(rank):
    path = rank.script("#!/bin/sh\nyes | head -1\ngrep SigIgn /proc/self/status\n", "job.sh")
    (rank.folder / "job.sh").chmod(0o755)
    got = rank(path, kind="binary", plain=True)
    word, ignored = got.out.splitlines()
    by_python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert (got.code, word, int(ignored.split()[1], 16) & by_python, got.err) == (0, "y", 0, "")


@pytest.mark.parametrize(("name", "code"), [("gone", 127), ("data.txt", 126)])
def test_a_program_that_cannot_be_started_gives_the_shells_code(rank, name, code):
    rank.script("text", "data.txt")
    got = rank(str(rank.folder / name), kind="binary", plain=True)
    assert got.code == code
    assert got.err.startswith(f"allranks: cannot start {rank.folder / name}: ")


def test_lines_of_a_killed_rank_are_there(rank, mode):
    path = rank.script("import os\nprint('one')\nprint('two')\nos.kill(os.getpid(), 9)\n")
    got = rank(path, **mode)
    assert (got.code, got.out) == (-9, "one\ntwo\n")


def test_unbuffered_output_needs_no_newline(rank, mode):
    rank.env["PYTHONUNBUFFERED"] = "1"
    path = rank.script("import os\nprint('half', end='')\nos.kill(os.getpid(), 9)\n")
    assert rank(path, **mode).out == "half"


RANDOM = """\
import random, tempfile, uuid, os, hashlib, secrets
import numpy
print(random.random(), numpy.random.rand(), numpy.random.default_rng().random(), uuid.uuid4(), secrets.token_hex(),
      os.urandom(8).hex(), next(tempfile._get_candidate_names()), sep="\\n")
"""


def test_unseeded_random_numbers_differ_between_ranks(rank):
    path = rank.script(RANDOM)
    ended, _ = rank.many(3, path, preload=["random", "numpy.random", "uuid", "tempfile"])
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 3
    columns = list(zip(*(one.out.splitlines() for one in ended), strict=True))
    assert [len(set(column)) for column in columns] == [3] * 7


def test_seeded_random_numbers_are_those_of_a_plain_interpreter(rank):
    path = rank.script("import random\nrandom.seed(1)\nprint(random.random(), random.gauss(0, 1))\n")
    assert rank(path, preload=["random"]).out == rank.python(path).out


PROCESSES = """\
import multiprocessing as mp, os, sys

class Unknown:
    def __init__(self, value):
        self.value = value

def square(unknown):
    return unknown.value ** 2, __name__, os.environ["RANK"]

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        with mp.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, [Unknown(2), Unknown(3)]))
    queue = mp.get_context("spawn").Queue()
    queue.put(1)
    print(queue.get(), mp.current_process().name, mp.parent_process())
"""


def test_multiprocessing_works_from_a_script(rank, mode):
    path = rank.script(PROCESSES)
    expected, got = rank.python(path), rank(path, **mode)
    assert (got.code, got.out, got.err) == (expected.code, expected.out, expected.err)
    assert expected.out.splitlines()[0] == "spawn [(4, '__mp_main__', '0'), (9, '__mp_main__', '0')]"


def test_a_rank_leads_a_session_of_its_own(rank, mode):
    path = rank.script("import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))")
    assert rank(path, **mode).out == "True\n"
