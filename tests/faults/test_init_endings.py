"""A rank that ends before, during or after ``allranks.init()``: the others do not wait for it."""

from __future__ import annotations

import os
import signal

import pytest

from waiting import PATIENCE

#: A module beside the script: by files, ranks tell others that they are about to wait.
HERE = """
import os, pathlib, time
RANK, SIZE, RESTART = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
def tell():
    pathlib.Path(f"here-{RESTART}-{RANK}").touch()
def telling(function):
    def told(*args, **kwargs):
        tell()
        return function(*args, **kwargs)
    return told
def wait_for_others():
    while not all(pathlib.Path(f"here-{RESTART}-{rank}").exists() for rank in {*range(SIZE)} - {RANK}):
        time.sleep(0.01)
"""


@pytest.fixture
def end(allranks, watch):
    """Give a function that runs a script on three ranks to its end, and gives the result.

    All times that ranks wait for each other, and that the agent waits for them, are 600 s: far more than this waits.
    With restarts each generation may end in another way, all of them for one import of torch.
    """

    def run(text, restarts=0):
        allranks.script(text)
        allranks.script(HERE, "here.py")
        flags = ("--nproc-per-node", "3", "--stop-timeout", "600", "--max-restarts", str(restarts))
        device = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = allranks("run", "train.py", *flags, "--restart-delay", "0", timeout=PATIENCE, **device)
        watch.nothing_left()
        return done

    return run


def first_failures(watch):
    """Return rank and code of the first rank of each generation that ended badly, as the agent tells it."""
    failures = []
    for event in watch.events():
        if event["kind"] == "ranks-started":
            failures.append(None)
        elif event["kind"] == "rank-exited" and event["code"] and failures[-1] is None:
            failures[-1] = (event["rank"], event["code"])
    return failures


ENDS = {
    "sys.exit(7)": 7,
    "os._exit(9)": 9,
    "raise ValueError('too early')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
    "os.kill(os.getpid(), signal.SIGSEGV)": -11,
}
BEFORE = f"""
import os, signal, sys, here
if here.RANK == 1:
    here.wait_for_others()
    exec({[*ENDS]}[here.RESTART])
import allranks
from allranks.runtime import rendezvous
rendezvous.meet = here.telling(rendezvous.meet)
with allranks.init():
    print("never", flush=True)
"""


def test_before_init(end, watch):
    done = end(BEFORE, restarts=len(ENDS) - 1)
    assert done.rc == 128 + signal.SIGSEGV, done.stderr
    assert first_failures(watch) == [(1, code) for code in ENDS.values()]
    assert "never" not in done.stdout
    assert "[1] [rank1]: ValueError: too early\n" in done.stderr or "[1] ValueError: too early\n" in done.stderr


#: Where rank 1 ends, called in init(), and where the others wait by then: in the store, or for its connection.
PLACES = {
    "rendezvous.open_store": "rendezvous.meet",
    "rendezvous.meet": "rendezvous.meet",
    "rendezvous._read_verdict": "distributed.init_process_group",
    "distributed.init_process_group": "distributed.init_process_group",
}
INSIDE = f"""
import os, here
import allranks
from allranks.runtime import rendezvous
from torch import distributed

def end(*args, **kwargs):
    here.wait_for_others()
    print("rank 1 ends", flush=True)
    os._exit(5)

if here.RESTART < {len(PLACES)}:
    place, waits = {[*PLACES.items()]}[here.RESTART]
    exec(f"{{place}} = end" if here.RANK == 1 else f"{{waits}} = here.telling({{waits}})")
with allranks.init():
    print("met", here.RESTART, flush=True)
"""


def test_inside_init(end, watch):
    """The generation after them meets: what those before it have left in the store is not found."""
    done = end(INSIDE, restarts=len(PLACES))
    assert done.rc == 0, done.stderr
    assert first_failures(watch) == [(1, 5)] * len(PLACES) + [None]
    said = [(watch.node / f"rank-{rank}.out").read_text() for rank in range(3)]
    met = f"met {len(PLACES)}\n"
    assert said == [met, "rank 1 ends\n" * len(PLACES) + met, met]


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
    assert first_failures(watch) == [(1, 1)]


AFTER = """
import os, signal, sys, torch, allranks, here
ctx = allranks.init()
if ctx.rank == 1:
    here.wait_for_others()
    {end}
here.tell()
ctx.sum(1)
print("never", flush=True)
"""


def test_after_init_with_the_others_in_a_collective(end, watch):
    done = end(AFTER.format(end=f"exec({[*ENDS]}[here.RESTART])"), restarts=len(ENDS) - 1)
    assert done.rc == 128 + signal.SIGSEGV, done.stderr
    assert first_failures(watch) == [(1, code) for code in ENDS.values()]
    assert "never" not in done.stdout


#: Rank 1 fails with the others in a collective; or in it itself, with rank 2 somewhere else for ever.
IN_THE_BLOCK = """
import os, sys, time, torch, allranks, here
in_flight, exits = here.RESTART // 2, here.RESTART % 2
with allranks.init() as ctx:
    if ctx.rank == 1:
        here.wait_for_others()
        if in_flight:
            work = torch.distributed.all_reduce(torch.ones(1, dtype=torch.float64), async_op=True)
        if exits:
            sys.exit(6)
        raise ValueError('the first error')
    here.tell()
    if ctx.rank == 2 and in_flight:
        time.sleep(600)
    ctx.sum(1)
    print("never", flush=True)
"""


def test_an_exception_in_the_with_block(end, watch):
    done = end(IN_THE_BLOCK, restarts=3)
    assert done.rc == 6, done.stderr
    assert first_failures(watch) == [(1, 1), (1, 6)] * 2
    assert "never" not in done.stdout
    said = (watch.node / "rank-1.err").read_text()
    assert said.count('train.py", line 11, in <module>') == said.count("ValueError: the first error\n") == 2


def test_a_rank_that_leaves_early_with_success_does_not_hold_the_others(end, watch):
    """It has ended well, but the others' collective can never end; gloo tells them so."""
    done = end(AFTER.format(end="os._exit(0)"))
    assert done.rc == 1
    ((rank, _),) = first_failures(watch)
    assert rank in (0, 2)
    assert "never" not in done.stdout


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
from allranks.runtime.checkpoint.directory import CheckpointDirectory
with allranks.init() as ctx:
    if ctx.rank == ctx.world_size - 1:
        CheckpointDirectory.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    model = ctx.prepare(torch.nn.Linear(6, 6), strategy="fsdp")
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    checkpoints.save()
    checkpoints.wait()
"""


def test_ranks_that_wait_for_a_save_leave_when_a_writer_is_killed(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent imports torch, and each of three ranks what FSDP needs."""
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
