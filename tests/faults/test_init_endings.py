"""A rank that ends before, during or after ``allranks.init()``: the others do not wait for it."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_that_wait_for_rank_0_leave_when_it_is_killed(allranks, watch, restarts):
    """They only note SIGTERM, and the agent, which serves their store, lives on."""
    allranks.script("""
import os, signal, torch, allranks
with allranks.init() as ctx:
    checkpoints = ctx.checkpoints("checkpoints", model=torch.nn.Linear(1, 1))
    ctx.barrier()  # All listen.
    ctx.on_main(lambda: os.kill(os.getpid(), signal.SIGKILL if ctx.restart == 0 else 0))
    ctx.print("done")
""")
    flags = ("--nproc-per-node", "3", "--backend", "gloo", "--max-restarts", str(restarts))
    done = allranks("run", "train.py", *flags, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert (done.rc, "done" in done.stdout) == ((0, True) if restarts else (137, False)), done.stderr
    ended = [(event["rank"], event["code"]) for event in watch.events("rank-exited")]
    codes = dict(ended[:3])
    assert codes[0] == -signal.SIGKILL
    # The agent's SIGTERM may come when they have failed and listen no more.
    assert {codes[1], codes[2]} <= {1, -signal.SIGTERM}
    for rank in (1, 2):
        if codes[rank] == 1:
            text = (watch.node / f"rank-{rank}.err").read_text()
            assert "waited for it in ctx.on_main(<lambda>)\n" in text
            assert "  why: its process is gone\n" in text


#: Rank 1 waits for a file with its data, before or after ``init``; rank 0 is there already.
LOADING = """
import os, pathlib, sys, time, torch
from torch import nn
def load():
    print("loading", flush=True)
    while os.environ["RANK"] == "1" and not pathlib.Path("data").exists():
        time.sleep(0.01)
{before}
import allranks
with allranks.init() as ctx:
    {after}
    model = ctx.prepare(nn.Linear(1, 1))
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    while not checkpoints.step():
        pass
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_warning_to_a_rank_that_still_loads_makes_all_save_and_leave(allranks, watch, finish, when):
    allranks.script(LOADING.format(**{"before": "", "after": "", when: "load()"}))
    flags = ("--nproc-per-node", "2", "--backend", "gloo")
    process = allranks.popen("run", "train.py", *flags, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    watch.line(1, "loading")
    os.kill(watch.agent(), signal.SIGUSR1)
    watch.event("warned")
    (allranks.folder / "data").touch()
    code, _, err = finish(process)
    assert code == 75, err
    assert [event["code"] for event in watch.events("rank-exited")] == [75, 75]
    assert "; saved checkpoints/step-0" in (watch.node / "rank-0.err").read_text()


OWN_HANDLERS = """
import os, pathlib, signal, time
def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR2, lambda *_: pathlib.Path("heard").touch())
print("ready", flush=True)
wait("heard")
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGUSR2, lambda *_: pathlib.Path("late").touch())
wait("late")
"""


def test_a_warning_reaches_each_rank_as_soon_as_it_listens(allranks, watch, finish):
    """Rank 1 would die of what rank 0 has a handler for; it listens only when rank 0 has heard."""
    allranks.script(OWN_HANDLERS)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    for rank in range(2):
        watch.line(rank, "ready")
    os.kill(watch.agent(), signal.SIGUSR2)
    code, _, err = finish(process)
    assert code == 0, err
    assert len(watch.events("warned")) == 1


def test_a_script_that_never_listens_does_not_die_of_a_warning(allranks, watch, finish):
    allranks.script("import pathlib, time\nprint('ready', flush=True)\nwhile not pathlib.Path('go').exists(): pass\n")
    process = allranks.popen("run", "train.py")
    watch.line(0, "ready")
    for number in (1, 2):  # With the second the agent is done with the first.
        os.kill(watch.agent(), signal.SIGUSR1)
        watch.event("warned", number)
    (allranks.folder / "go").touch()
    code, _, err = finish(process)
    assert code == 0, err


#: The last rank dies while it writes its part of a sharded model; the others have written theirs and wait for it.
SAVING = """
import os, signal, torch, allranks
from allranks.runtime.checkpoint.files import Files
with allranks.init() as ctx:
    if ctx.rank == ctx.world_size - 1:
        Files.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = ctx.prepare(torch.nn.Linear(6, 6), strategy="fsdp")
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    checkpoints.save()
    checkpoints.wait()
"""


def test_ranks_that_wait_for_a_save_leave_when_a_writer_is_killed(allranks, watch):
    allranks.script(SAVING)
    flags = ("--nproc-per-node", "3", "--backend", "gloo")
    done = allranks("run", "train.py", *flags, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 137, done.stderr
    ended = [(event["rank"], event["code"]) for event in watch.events("rank-exited")]
    assert [code for rank, code in ended if rank == 2] == [-signal.SIGKILL]
    assert -signal.SIGKILL not in [code for rank, code in ended if rank < 2]


def test_ranks_that_close_leave_when_another_one_is_killed(allranks, watch):
    allranks.script("""
import os, signal, torch, allranks
with allranks.init() as ctx:
    checkpoints = ctx.checkpoints("checkpoints", model=torch.nn.Linear(1, 1))
    ctx.barrier()  # All listen.
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
""")
    flags = ("--nproc-per-node", "2", "--backend", "gloo")
    done = allranks("run", "train.py", *flags, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 137, done.stderr
    ended = {event["rank"]: event["code"] for event in watch.events("rank-exited")}
    assert ended[1] == -9
    assert ended[0] != -signal.SIGKILL
