"""The process that starts ranks: many at once, none that it may not start, and nothing left behind."""

from __future__ import annotations

import os
import signal

from allranks import contract
from waiting import is_alive

CHILD_IN_GROUP = """\
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("child", "w").write(str(os.getpid()))
    time.sleep(300)
while not (os.path.exists("child") and open("child").read()):
    time.sleep(.01)
os._exit({code})
"""
CHILD_IN_SESSION = CHILD_IN_GROUP.replace("    signal.signal", "    os.setsid()\n    signal.signal")


def _child(rank) -> int:
    return int((rank.folder / "child").read_text())


def test_sixty_four_ranks_start_and_end(rank):
    path = rank.script("import os, sys\nprint(os.environ['RANK'])\nsys.exit(int(os.environ['RANK']) % 7)\n")
    ended, _ = rank.many(64, path, "x" * 4000)
    assert [one.code for one in ended] == [number % 7 for number in range(64)]
    assert [one.out for one in ended] == [f"{number}\n" for number in range(64)]


def test_ranks_that_all_end_at_once_are_all_told_of(rank):
    path = rank.script(
        "import os, time\nopen('here-' + os.environ['RANK'], 'w').close()\n"
        "while not all(os.path.exists(f'here-{rank}') for rank in range(16)): time.sleep(.01)\n"
    )
    ended, _ = rank.many(16, path)
    assert [one.code for one in ended] == [0] * 16


def test_a_signal_right_after_the_start_reaches_every_rank(rank):
    path = rank.script("import time\ntime.sleep(300)\n")
    ended, _ = rank.many(8, path, signal="SIGTERM")
    assert [one.code for one in ended] == [-signal.SIGTERM] * 8


def test_where_no_more_can_be_started_the_reason_is_told(rank):
    path = rank.script("pass")
    _, told = rank.many(1, path, open_files=8)
    assert told["error"] == ["cannot start local rank 0", "Too many open files"]


def test_a_log_that_cannot_be_opened_ends_the_rank(rank):
    path = rank.script("pass")
    (rank.folder / "rank-0.out").mkdir()
    (rank.folder / "rank-1.err").mkdir()
    _, told = rank.many(2, path)
    assert told["codes"] == {"0": 1, "1": 1}
    assert "allranks: cannot open a rank's log: [Errno 21] Is a directory" in told["stderr"]


def test_what_a_rank_left_in_its_group_is_ended_even_if_it_ignores_sigterm(rank):
    ended, told = rank.many(1, rank.script(CHILD_IN_GROUP.format(code=0)))
    assert ended[0].code == 0
    assert not is_alive(_child(rank))
    assert told["quit"] > 0.4  # It was asked first, and had a tenth of 5 s.


def test_what_a_failed_rank_left_in_its_group_is_killed_at_once(rank):
    rank.env[contract.WAITS] = "1"
    ended, told = rank.many(1, rank.script(CHILD_IN_GROUP.format(code=3)), clean=False)
    assert ended[0].code == 3
    assert not is_alive(_child(rank))
    assert told["quit"] < 5  # It was not asked first, which would take 5 s.


def test_what_ranks_left_in_other_sessions_is_ended_unless_all_ended_well(rank):
    path = rank.script(CHILD_IN_SESSION.format(code=0))
    rank.many(1, path, clean=True)
    left = _child(rank)
    assert is_alive(left)  # A service that the script started on purpose.
    os.kill(left, signal.SIGKILL)
    (rank.folder / "child").unlink()
    rank.many(1, path, clean=False)
    assert not is_alive(_child(rank))


def test_what_ranks_left_is_ended_although_the_agent_died_before_it_read_of_their_end(rank):
    """The kernel then reports a reset of the socket, not its end."""
    waits = CHILD_IN_SESSION.replace("os._exit", "while not os.path.exists('go'): time.sleep(.01)\nos._exit")
    _, told = rank.many(1, rank.script(waits.format(code=0)), abandoned=True)
    assert told["stderr"] == ""
    assert not is_alive(_child(rank))


def test_an_end_with_nothing_left_takes_no_time(rank):
    rank.env[contract.WAITS] = "1"
    _, told = rank.many(4, rank.script("pass"))
    assert told["quit"] < 5


def test_the_ranks_die_with_a_fork_server_that_is_killed(rank):
    path = rank.script(
        "import os, time\nprint('here', flush=True)\nif os.environ['RANK'] == '1':\n"
        "    while not (os.path.exists('rank-0.out') and os.path.getsize('rank-0.out')): time.sleep(.01)\n"
        "    os.kill(os.getppid(), 9)\ntime.sleep(300)\n"
    )
    try:
        rank.many(2, path)
    except AssertionError as error:
        assert "ForkServerGoneError" in str(error)
    else:
        raise AssertionError("the harness did not notice")
