"""A rank that ends before, during or after ``allranks.init()``: the others do not wait for it."""

from __future__ import annotations

import time

import pytest

#: Far less than any of the times that ranks wait for each other.
SOON = 10.0


@pytest.fixture
def end(allranks, watch):
    """Give a function that runs a script on three ranks to its bad end; it gives the result."""

    def run(text):
        allranks.script(text)
        began = time.monotonic()
        done = allranks("run", "train.py", "--nproc-per-node", "3", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        took = time.monotonic() - began
        assert took < SOON, f"{took:.1f} s\n{done.stderr}"
        watch.nothing_left(5)
        return done

    return run


def first_failure(watch):
    """Return rank and code of the first rank that ended badly, as the agent tells it."""
    event = next(event for event in watch.events("rank-exited") if event["code"])
    return event["rank"], event["code"]


BEFORE = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)  # The others are waiting by then.
    {end}
import allranks
with allranks.init():
    pass
"""
ENDS = [
    ("sys.exit(7)", 7, 7),
    ("os._exit(9)", 9, 9),
    ("raise ValueError('too early')", 1, 1),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, 137),
    ("os.kill(os.getpid(), signal.SIGSEGV)", -11, 139),
]


@pytest.mark.parametrize(("how", "told", "code"), ENDS, ids=[how for how, _, _ in ENDS])
def test_before_init(end, watch, how, told, code):
    done = end(BEFORE.format(end=how))
    assert done.rc == code, done.stderr
    assert first_failure(watch) == (1, told)
    if code == 1:
        assert "[1] [rank1]: ValueError: too early\n" in done.stderr or "[1] ValueError: too early\n" in done.stderr


#: Rank 1 ends where ``place`` is called in init(): the others wait in the store, or for its connection.
INSIDE = """
import os, time
import allranks
from allranks.runtime import rendezvous
from torch import distributed

def end(*args, **kwargs):
    time.sleep(0.5)
    print("rank 1 ends", flush=True)
    os._exit(5)

if os.environ["RANK"] == "1":
    {place} = end
with allranks.init():
    print("never", flush=True)
"""
PLACES = ("rendezvous.open_store", "rendezvous.meet", "rendezvous._read_verdict", "distributed.init_process_group")


@pytest.mark.parametrize("place", PLACES)
def test_inside_init(end, watch, place):
    done = end(INSIDE.format(place=place))
    assert done.rc == 5, done.stderr
    assert "rank 1 ends" in done.stdout
    assert "never" not in done.stdout
    assert first_failure(watch) == (1, 5)


def test_an_error_inside_init(end, watch):
    done = end("""
import os, allranks
with allranks.init(device="cuda" if os.environ["RANK"] == "1" else "cpu"):
    print("never", flush=True)
""")
    assert done.rc == 1
    assert "DeviceError: rank 1 (local rank 1) on " in done.stderr
    assert "fix: " in done.stderr
    assert "never" not in done.stdout
    assert first_failure(watch) == (1, 1)


AFTER = """
import os, signal, sys, time, torch, allranks
{enter}
if ctx.rank == 1:
    time.sleep(0.5)  # The others are in the collective by then.
    {end}
ctx.sum(1)
print("never", flush=True)
"""


@pytest.mark.parametrize(("how", "told", "code"), ENDS, ids=[how for how, _, _ in ENDS])
def test_after_init_with_the_others_in_a_collective(end, watch, how, told, code):
    done = end(AFTER.format(enter="ctx = allranks.init()", end=how))
    assert done.rc == code, done.stderr
    assert first_failure(watch) == (1, told)
    assert "never" not in done.stdout


#: Rank 1 fails with the others in a collective; or in it itself, with rank 2 somewhere else for a long time.
WAITING = ["ctx.sum(1)", "ctx.sum(1) if ctx.rank == 0 else time.sleep(60)"]


@pytest.mark.parametrize("others", WAITING, ids=["others wait", "in flight"])
@pytest.mark.parametrize(("how", "code"), [("raise ValueError('the first error')", 1), ("sys.exit(6)", 6)])
def test_an_exception_in_the_with_block(end, watch, how, code, others):
    start = "torch.distributed.all_reduce(torch.ones(1, dtype=torch.float64), async_op=True)"
    done = end(f"""
import sys, time, torch, allranks
with allranks.init() as ctx:
    if ctx.rank == 1:
        time.sleep(0.5)
        work = {start if "sleep" in others else None}
        {how}
    {others}
    print("never", flush=True)
""")
    assert done.rc == code, done.stderr
    assert first_failure(watch) == (1, code)
    assert "never" not in done.stdout
    assert ('train.py", line 7, in <module>' in done.stderr and "ValueError: the first error\n" in done.stderr) == (
        code == 1
    )


def test_a_rank_that_leaves_early_with_success_does_not_hold_the_others(end, watch):
    """It has ended well, but the others' collective can never end; gloo tells them so."""
    done = end(AFTER.format(enter="ctx = allranks.init()", end="os._exit(0)"))
    assert done.rc == 1
    assert first_failure(watch)[0] in (0, 2)
    assert "never" not in done.stdout


def test_a_restarted_generation_meets_again_after_an_end_inside_init(allranks, watch):
    """What the generation before left in the store is not found by the next one."""
    text = INSIDE.replace(
        'os.environ["RANK"] == "1"', 'os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10"'
    )
    allranks.script(text.format(place="distributed.init_process_group").replace('"never"', '"met"'))
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1", CUDA_VISIBLE_DEVICES="")
    assert done.rc == 0, done.stderr
    assert "rank 1 ends" in done.stdout
    assert "met" in done.stdout
    watch.nothing_left(5)
