"""However a run ends, nothing of it is left, and the record says what happened."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from allranks.system.processes import catches, marked
from waiting import PATIENCE, is_alive, wait_for

SLEEPER = """\
import os, time
print("up", os.getpid(), flush=True)
time.sleep(300)
"""
#: Leaves a child in its own group, and another in a session of its own; neither cares for signals.
FAMILY = """\
import os, signal, sys, time
def leave(name, setsid):
    if os.fork():
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if setsid:
        os.setsid()
    rank = os.environ["RANK"]
    with open(f"{name}-{rank}.tmp", "w") as file:
        print(os.getpid(), file=file)
    os.rename(f"{name}-{rank}.tmp", f"{name}-{rank}")
    time.sleep(300)
    os._exit(0)
leave("group", False)
leave("session", True)
print("up", os.getpid(), flush=True)
time.sleep(300)
"""
#: Ranks that are forked from a process that has torch; the others are not.
WARM_FAMILY = f"import torch\n{FAMILY}"
STUBBORN = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n" + SLEEPER
#: Says that it has heard SIGINT, and stays.
HEARS = "import signal\nsignal.signal(2, lambda *_: print('heard', flush=True))\n" + SLEEPER


def _start(allranks, watch, text, *options):
    allranks.script(text)
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2", *options)
    for rank in (0, 1):
        watch.line(rank, "up")
    if "leave(" in text:
        for name in ("group-0", "group-1", "session-0", "session-1"):
            watch.pid_file(name)
    return process


@pytest.mark.parametrize("text", [SLEEPER, FAMILY, WARM_FAMILY], ids=["sleeper", "family", "warm"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_command_ends_the_run(allranks, watch, finish, name, text):
    """Those called warm take more than 10 s on a slow machine: the agent imports torch."""
    number = getattr(signal, name)
    process = _start(allranks, watch, text)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert f"allranks: {name}: the ranks have 30 s to save and exit; " in err
    watch.nothing_left()
    status = watch.status()
    assert (status["state"], status["reason"], status["exit_code"]) == ("CANCELLED", f"got {name}", 128 + number)
    assert [event["code"] for event in watch.events("rank-exited")] == [-number] * 2
    (asked,) = watch.events("stop-requested")
    assert (asked["signal"], asked["by"]) == (name, f"got {name}")


def test_ctrl_c_is_a_keyboard_interrupt_in_the_script(allranks, watch, finish):
    text = (
        "import os, time\ntry:\n    print('up', os.getpid(), flush=True)\n    time.sleep(300)\n"
        "except KeyboardInterrupt:\n    print('saved')\n"
    )
    process = _start(allranks, watch, text)
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert "saved" in out
    assert [event["code"] for event in watch.events("rank-exited")] == [0, 0]
    assert watch.status()["state"] == "CANCELLED"


def test_the_second_ctrl_c_kills(allranks, watch, finish):
    process = _start(allranks, watch, HEARS, "--stop-timeout", "600")
    process.send_signal(signal.SIGINT)
    for rank in (0, 1):
        watch.line(rank, "heard")
    time.sleep(0.5)  # A second one at once would count as the same.
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130  # It waits for none of these 600 s.
    assert [event["code"] for event in watch.events("rank-exited")] == [-9, -9]
    watch.nothing_left()


def test_ranks_that_ignore_sigterm_are_killed_after_the_stop_timeout(allranks, watch, finish):
    process = _start(allranks, watch, STUBBORN, "--stop-timeout", "1")
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    exits = watch.events("rank-exited")
    assert [event["code"] for event in exits] == [-9, -9]
    assert all(0.9 < event["ended"] - asked < 30 for event in exits)  # 30 s is what they have by default.
    watch.nothing_left()


@pytest.mark.parametrize("text", [SLEEPER, FAMILY, WARM_FAMILY], ids=["sleeper", "family", "warm"])
def test_a_killed_launcher_ends_the_run(allranks, watch, text):
    process = _start(allranks, watch, text)
    process.kill()
    process.wait()
    watch.nothing_left()
    assert watch.event("stop-requested")["by"] == "the launcher is gone"
    assert [event["code"] for event in watch.events("rank-exited")] == [-15, -15]
    status = watch.status()
    assert (status["state"], status["reason"], status["exit_code"]) == ("CANCELLED", "the launcher is gone", 143)


@pytest.mark.parametrize(
    "text", [SLEEPER, FAMILY, WARM_FAMILY, STUBBORN], ids=["sleeper", "family", "warm", "stubborn"]
)
def test_a_killed_agent_ends_the_run(allranks, watch, finish, text):
    process = _start(allranks, watch, text, "--stop-timeout", "1")
    os.kill(watch.agent(), signal.SIGKILL)
    code, _, err = finish(process)
    watch.nothing_left()
    status = watch.status()
    why = "the agent died unexpectedly: it was killed, or the machine went down"
    assert (code, status["state"], status["reason"]) == (1, "FAILED", why)
    assert why in err


@pytest.mark.parametrize(
    "text", [SLEEPER, FAMILY, WARM_FAMILY, STUBBORN], ids=["sleeper", "family", "warm", "stubborn"]
)
def test_a_killed_fork_server_ends_the_run(allranks, watch, finish, text):
    process = _start(allranks, watch, text, "--stop-timeout", "1")
    os.kill(watch.fork_server(), signal.SIGKILL)
    code, _, _ = finish(process)
    watch.nothing_left()
    status = watch.status()
    why = "the process that starts ranks has ended; its ranks were killed with it"
    assert (code, status["state"], status["reason"]) == (1, "FAILED", why)


@pytest.mark.parametrize(
    "text", [SLEEPER, FAMILY, WARM_FAMILY, STUBBORN], ids=["sleeper", "family", "warm", "stubborn"]
)
def test_launcher_and_agent_killed_at_once(allranks, watch, text):
    process = _start(allranks, watch, text, "--stop-timeout", "1")
    agent = watch.agent()
    process.kill()
    os.kill(agent, signal.SIGKILL)
    process.wait()
    watch.nothing_left()
    status = watch.status()
    assert (status["state"], status["native"]) == ("FAILED", "agent gone")


def test_cancel_ends_what_a_killed_agent_and_fork_server_have_left(allranks, watch):
    process = _start(allranks, watch, FAMILY, "--stop-timeout", "1")
    victims = [process.pid, watch.agent(), watch.fork_server()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert allranks("cancel").rc == 0
    watch.nothing_left()
    assert watch.status()["state"] == "FAILED"


class Start:
    """A run that is being started, and how far that has come."""

    def __init__(self, allranks, *options):
        self.allranks, self.before = allranks, {*allranks.runs()}
        self.process = allranks.popen("run", "train.py", "--nproc-per-node", "2", *options, fresh=True)

    def folder(self):
        return next(iter({*self.allranks.runs()} - self.before), None)

    def launcher_listens(self):
        return catches(self.process.pid, signal.SIGTERM)

    def agent(self):
        return self.record().get("handle", {}).get("pid")

    def torch_comes(self):
        """Return whether the agent has started to import torch: its largest library is in its memory."""
        with suppress(FileNotFoundError):
            return "libtorch" in Path(f"/proc/{self.agent()}/maps").read_text()

    def agent_started(self):
        return "agent-started" in self.events()

    def ranks_started(self):
        return "ranks-started" in self.events()

    def nothing_left(self):
        return not marked("ALLRANKS_RUN_DIR", str(self.folder()))

    def record(self):
        path = self.folder() and self.folder() / "record.json"
        return json.loads(path.read_text()) if path and path.exists() else {}

    def events(self):
        path = self.folder() and self.folder() / "attempts/000/node-000/agent.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path and path.exists() else []
        return {event["kind"]: event for event in map(json.loads, (line for line in lines if line.endswith("\n")))}


#: What a moment comes after, and by how many seconds.
MOMENTS = [
    *(("folder", 0), ("launcher_listens", 0), ("launcher_listens", 0.1), ("agent", 0), ("agent", 0.2)),
    *(("torch_comes", 0), ("torch_comes", 0.3), ("agent_started", 0), ("ranks_started", 0)),
]


@pytest.mark.parametrize(
    ("warm", "text"),
    [("--warm", SLEEPER), ("--warm", f"import torch\n{SLEEPER}"), ("--no-warm", f"import torch\n{SLEEPER}")],
    ids=["no torch", "warm", "plain"],
)
def test_signals_at_every_moment_of_the_start_end_the_run(allranks, finish, warm, text):
    """From the launcher's own first steps over the import of torch to the first ranks.

    It takes more than 10 s, since each moment is one of another run.
    """
    allranks.script(text)
    for event, later in MOMENTS:
        if event == "torch_comes" and "torch" not in text:
            continue
        start = Start(allranks, warm)
        wait_for(event, getattr(start, event))
        time.sleep(later)
        # It may not have come far enough to answer.
        codes = {143} if start.launcher_listens() else {143, -signal.SIGTERM}
        start.process.send_signal(signal.SIGTERM)
        code, _, err = finish(start.process)
        assert code in codes, (event, later, err)
        ranks = start.events().get("ranks-started", {"ranks": []})["ranks"]
        assert not [rank for rank in ranks if is_alive(rank["pid"])], (event, later, err)
        wait_for(f"nothing left: {err}", start.nothing_left)
        if code == 143:
            status = start.record()["status"]
            assert (status["state"], status["reason"]) == ("CANCELLED", "got SIGTERM"), (event, later)


#: Stops an agent's Python where it starts to import a module, and tells so; ``site`` it has imported nearly, then.
STOPS = """\
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOPS_AT"] and "node-000.json" in sys.orig_argv[-1]:
            open("stopped", "w").close()
            time.sleep(300)
sys.meta_path.insert(0, Finder())
Finder().find_spec("site")
"""


@pytest.mark.parametrize("module", ["site", "runpy", "allranks.agent.main", "allranks.agent.stop", "torch"])
def test_ctrl_c_while_the_agents_python_starts_cancels_the_run(allranks, watch, finish, module):
    allranks.script("import torch")
    allranks.script(STOPS, "sitecustomize.py")
    process = allranks.popen("run", "train.py", PYTHONPATH=str(allranks.folder), STOPS_AT=module)
    wait_for(f"an agent that imports {module}", (allranks.folder / "stopped").exists)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    watch.nothing_left()
    status = watch.status()
    assert (code, status["state"], status["reason"]) == (130, "CANCELLED", "got SIGINT"), err


def test_a_signal_during_the_nodes_setup_ends_what_it_runs(allranks, watch, finish):
    allranks.script(SLEEPER)
    allranks.job("script: train.py\nenvironment:\n  node_setup: |\n    echo $$ > shell\n    sleep 301\n")
    process = allranks.popen("run", "job.yaml")
    watch.pid_file("shell")
    process.send_signal(signal.SIGINT)
    code, _, _ = finish(process)
    watch.nothing_left()
    status = watch.status()
    assert (code, status["state"], status["reason"]) == (130, "CANCELLED", "got SIGINT")


def test_a_setup_that_fails_fails_the_run_and_says_which_line(allranks, watch):
    allranks.script("print('never')")
    allranks.job("script: train.py\nenvironment:\n  node_setup: |\n    false\n")
    done = allranks("run", "job.yaml")
    assert done.rc == 1
    assert f"error: {watch.run.name} FAILED: line 1 of environment.node_setup failed: false\n" in done.stderr
    assert "  why: " not in done.stderr
    assert watch.status()["state"] == "FAILED"


def test_what_a_setup_said_before_it_failed_is_its_cause(allranks, watch):
    allranks.script("print('never')")
    allranks.job("script: train.py\nenvironment:\n  setup:\n    - echo no scratch here >&2\n    - '[ -d nowhere ]'\n")
    assert allranks("run", "job.yaml").rc == 1
    assert watch.status()["cause"] == "no scratch here"
    found = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    assert (found["cause"], found["sure"]) == ("line 2 of environment.setup failed: [ -d nowhere ]", "unknown")
    assert [line["text"] for line in found["evidence"]] == ["no scratch here"]


@pytest.mark.parametrize(
    ("line", "code", "what"),
    [
        ("'[ -d nowhere ] || exit 4'", 4, "line 2 of environment.setup failed: exit 4"),
        ("'printf \"true\\nexit 5\" >env.sh; . ./env.sh'", 5, "line 2 of env.sh failed: exit 5"),
        ("exit 0", 1, "line 2 of environment.setup failed: exit 0"),
        ("(exit 0); (exit 7)", 7, "line 2 of environment.setup failed: ( exit 7 )"),
        ("bash -c 'kill $$'", 143, "line 2 of environment.setup failed: bash -c 'kill $$'"),
    ],
)
def test_a_setup_that_ends_gives_its_own_exit_code(allranks, watch, line: str, code: int, what: str):
    allranks.script("print('never')")
    allranks.job(f"script: train.py\nenvironment:\n  setup:\n    - echo fine\n    - {line}\n")
    done = allranks("run")
    assert (done.rc, done.stdout) == (code, "")
    assert f"error: {watch.run.name} FAILED: {what}\n" in done.stderr
    assert "\n  fix: correct that line, and run the job again\n" in done.stderr
    status = watch.status()
    assert (status["state"], status["exit_code"], status["reason"]) == ("FAILED", code, what)


def test_a_detached_setup_that_ends_gives_its_own_exit_code(allranks, watch):
    allranks.script("print('never')")
    allranks.job("script: train.py\nenvironment:\n  setup: exit 4\n")
    assert allranks("run", "--detach").rc == 0
    wait_for("the end", lambda: json.loads(allranks("status", "--json").stdout)["status"]["state"] == "FAILED")
    assert allranks.record()["status"]["exit_code"] == 4


def test_a_script_of_ones_own_that_saves_when_warned_is_to_be_continued(allranks, watch, finish):
    """Without ctx.checkpoints: exit code 75 means that only where it was asked."""
    allranks.script(
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(300)\n"
    )
    process = allranks.popen("run", "train.py")
    watch.line(0, "ready")
    os.kill(watch.agent(), signal.SIGUSR1)
    code, _, err = finish(process)
    assert (code, watch.status()["state"]) == (75, "PREEMPTED"), err


def test_conda_that_is_not_here(allranks, watch):
    allranks.script("print('never')")
    done = allranks("run", "train.py", "--conda", "nope", CONDA_EXE=None)
    what = 'environment.conda: there is no conda here: neither $CONDA_EXE nor a command "conda" on PATH'
    assert done.rc == 1
    assert f"error: {watch.run.name} FAILED: {what}\n  fix: environment.modules or .setup can bring it\n" in done.stderr


def test_a_reader_that_leaves_does_not_hurt_the_run(allranks, watch):
    allranks.script("for n in range(20000):\n    print('line', n)\nopen('done', 'w')\n")
    process = allranks.popen("run", "train.py", "--nproc-per-node", "2")
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    err = process.stderr.read().decode()
    assert process.wait(PATIENCE) == 0
    assert "the reader of stdout is gone; the run continues" in err
    assert (allranks.folder / "done").exists()
    assert (watch.node / "rank-1.out").read_text().count("\n") == 20000
    assert watch.status()["state"] == "SUCCEEDED"
