"""Facts of this machine, as a node finds them."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.checks.collect import machine, script
from allranks.checks.collect.gather import FACTS, ProbeRequest, gather, read_reports, report_lines
from waiting import PATIENCE


@pytest.mark.parametrize("name", [name for name in FACTS if name != "site"])  # It runs a program of the order.
def test_each_fact_can_be_told(name: str) -> None:
    found = gather(ProbeRequest((name,)))
    assert found["errors"] == {}
    assert json.loads(json.dumps(found["facts"])) == found["facts"]


def test_what_does_not_answer_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # To open it waits until somebody writes.
    found = gather(ProbeRequest(("files", "shm"), files=(str(pipe),), seconds=0.2))
    assert found["errors"] == {"files": "no answer within 0.2 s"}
    assert list(found["facts"]) == ["shm"]


def test_a_fact_that_cannot_be_found_out_tells_why() -> None:
    assert gather(ProbeRequest(("nosuch",))) == {"facts": {}, "errors": {"nosuch": "KeyError: 'nosuch'"}}


def test_torch_is_looked_at_without_an_import() -> None:
    code = (
        "from allranks.checks.collect import script; import json, sys;"
        "print(json.dumps(script.torch(None))); assert 'torch' not in sys.modules"
    )
    told = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    import torch

    assert (told["version"], told["cuda"]) == (str(torch.__version__), torch.version.cuda)


def test_one_node_waits_for_no_resolver() -> None:
    assert gather(ProbeRequest(("names",))) == {"facts": {"names": None}, "errors": {}}
    assert gather(ProbeRequest(("names",), nnodes=2))["facts"]["names"]["own"]["name"] == socket.gethostname()


def test_limits_are_those_of_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert machine.limits(ProbeRequest(()))["nofile"] == [soft, hard]


#: Programs that start another one: as it is, without the right to lock memory, and as root of a container.
_NO_LOCKS = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "--")
_OWN_USERS = ("unshare", "--map-root-user", "--")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has the right to lock memory, and can give it away")
@pytest.mark.parametrize(("through", "told"), [((), "True"), (_NO_LOCKS, "False"), (_OWN_USERS, "False")])
def test_whom_the_limit_of_locked_memory_binds(through: tuple[str, ...], told: str) -> None:
    code = "from allranks.checks.collect import machine; print(machine.limits(None)['locks_any'])"
    done = subprocess.run([*through, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == told


def test_a_folder_is_looked_at_where_it_will_be(tmp_path: Path) -> None:
    found = machine.disks(ProbeRequest((), folders={"runs": str(tmp_path / "not" / "yet")}))
    assert (found["runs"]["there"], found["runs"]["error"]) == (str(tmp_path), None)
    assert found["temporary"]["error"] is None


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    target = str(tmp_path / "train.py")
    assert script.script(ProbeRequest((), kind="script", target=target)) == {"error": f"there is no {target}"}
    assert script.script(ProbeRequest((), kind="module", target="nosuch.x")) == {"error": "there is no module nosuch.x"}
    found = script.script(ProbeRequest((), kind="binary", target="nosuch"))
    assert found == {"error": "nosuch is not a program here or on PATH"}


def test_a_module_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack_q").mkdir()
    (tmp_path / "pack_q" / "__init__.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "pack_q" / "__main__.py").write_text("import nosuch_z\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = script.script(ProbeRequest((), kind="module", target="pack_q"))
    assert [each["name"] for each in found["missing"]] == ["nosuch_z"]


def _until_it_sleeps(pid: int) -> None:
    """Wait for a shell to become what it was to start: its variables change with its words."""
    while Path(f"/proc/{pid}/cmdline").read_bytes() != b"sleep\x00300\x00":
        pass


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[int]:
    """Give a process of a run that its parent has left."""
    command = ["bash", "-c", "sleep 300 >/dev/null 2>&1 </dev/null & echo $!"]
    env = {**os.environ, "ALLRANKS_RUN_DIR": str(tmp_path / "runs/old-1")}
    done = subprocess.run(command, env=env, capture_output=True, check=True, text=True)
    pid = int(done.stdout)
    _until_it_sleeps(pid)
    yield pid
    os.kill(pid, 9)


#: What is lost in a container, by an id of torchrun's.
_LOOK = (
    "from allranks.checks.collect import gather, machine;"
    "print(*[each['command'] for each in machine.leftovers(gather.ProbeRequest(())) if each['run'] == 'lost-1'])"
)
#: A launcher with a rank, and a shell that has taken a rank in: each the first process of its container.
_LAUNCHER = f"""
import os, subprocess, sys
subprocess.Popen(["sleep", "300"], env={{**os.environ, "TORCHELASTIC_RUN_ID": "lost-1"}})
subprocess.run([sys.executable, "-c", {_LOOK!r}])
"""
_SHELL = """
rank=$(TORCHELASTIC_RUN_ID=lost-1 sh -c 'sleep 300 >/dev/null 2>&1 & echo $!')
until [ "$(tr '\\0' ' ' </proc/$rank/cmdline)" = 'sleep 300 ' ]; do :; done
"$@"; exit
"""
_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child", "--")


@pytest.mark.skipif(
    subprocess.run([*_CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="this user may make no namespaces here",
)
@pytest.mark.parametrize(
    ("first", "lost"),
    [((sys.executable, "-c", _LAUNCHER), ""), (("sh", "-c", _SHELL, "sh", sys.executable, "-c", _LOOK), "sleep 300")],
)
def test_what_the_first_process_of_a_container_has_started_is_not_left(first: tuple[str, ...], lost: str) -> None:
    done = subprocess.run([*_CONTAINER, *first], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == lost


def test_what_a_user_s_systemd_has_taken_in_is_found() -> None:
    taking = (
        "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0);"  # PR_SET_CHILD_SUBREAPER
        "lost = 'ALLRANKS_RUN_DIR=/runs/old-1 sleep 300 >/dev/null 2>&1 </dev/null & echo $!';"
        "print(subprocess.check_output(['sh', '-c', lost], text=True), flush=True); input()"
    )
    systemd = subprocess.Popen(
        ["systemd", "-c", taking, "--user"],
        executable=sys.executable,
        env={**os.environ, "PYTHONHOME": sys.base_prefix},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert systemd.stdout is not None
    pid = int(systemd.stdout.readline())
    _until_it_sleeps(pid)
    try:
        assert [each["run"] for each in machine.leftovers(ProbeRequest(())) if each["pid"] == pid] == ["/runs/old-1"]
    finally:
        os.kill(pid, 9)
        systemd.communicate("\n")


def _left(folder: Path) -> list[tuple[int, str, str]]:
    left = machine.leftovers(ProbeRequest(()))
    return [(each["pid"], each["run"], each["command"]) for each in left if each["run"].startswith(str(folder))]


def test_a_process_that_was_left_is_found(orphan: int, tmp_path: Path) -> None:
    assert _left(tmp_path) == [(orphan, f"{tmp_path}/runs/old-1", "sleep 300")]


def test_what_has_a_heartbeat_is_not_left(orphan: int, tmp_path: Path) -> None:
    heartbeat = tmp_path / "runs/old-1/attempts/000/node-000/heartbeat"
    heartbeat.parent.mkdir(parents=True)
    heartbeat.touch()
    assert _left(tmp_path) == []
    os.utime(heartbeat, (1, time.time() - 100))
    assert [pid for pid, *_ in _left(tmp_path)] == [orphan]


def test_what_is_watched_is_not_left(orphan: int, tmp_path: Path) -> None:
    code = tmp_path / "runs/old-1/code"
    agent = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", str(code)],
        env={**os.environ, "ALLRANKS_RUN_DIR": str(code.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    agent.stdout.readline()  # Before it runs, its words may not be told yet.
    try:
        assert _left(tmp_path) == []
    finally:
        agent.communicate(b"\n")


def test_what_has_its_agent_is_not_left_however_old_its_heartbeat(orphan: int, tmp_path: Path) -> None:
    """A detached agent is itself left to init, and its heartbeat may be late: a slow file server, another clock."""
    node = tmp_path / "runs/old-1/attempts/000/node-000"
    node.mkdir(parents=True)
    (node / "heartbeat").touch()
    os.utime(node / "heartbeat", (1, time.time() - 100))
    (node / "agent.jsonl").write_text('{"time": 1, "kind": "agent-started", "pid": 1}\n{"ti')
    assert [pid for pid, *_ in _left(tmp_path)] == [orphan]
    (node / "agent.jsonl").write_text(f'{{"time": 1, "kind": "agent-started", "pid": {orphan}}}\n')
    assert _left(tmp_path) == []


def test_what_belongs_to_a_run_with_a_living_launcher_is_not_left(orphan: int, tmp_path: Path) -> None:
    """Of another launcher, say: a helper that a rank has left in the background goes with the ranks beside it."""
    env = {**os.environ, "ALLRANKS_RUN_DIR": str(tmp_path / "runs/old-1")}
    rank = subprocess.Popen(["sleep", "300"], env=env)
    _until_it_sleeps(rank.pid)
    assert _left(tmp_path) == []
    rank.kill()
    rank.wait()
    assert [pid for pid, *_ in _left(tmp_path)] == [orphan]


def test_what_is_in_the_group_of_another_job_is_not_left(
    orphan: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {orphan: "/job_7", "self": "/job_8"}
    monkeypatch.setattr(machine, "_job_of", lambda pid: groups.get(pid, ""))
    assert _left(tmp_path) == []
    groups["self"] = "/job_7"
    assert [pid for pid, *_ in _left(tmp_path)] == [orphan]


def test_what_nodes_tell_comes_whole_through_other_output() -> None:
    found = {"facts": {"long": "x" * 5000, "odd": "a | b\nc é"}, "errors": {}}
    lines = [*report_lines(3, found)]
    assert len(lines) > 5
    assert all(len(line) < 700 for line in lines)
    mixed = "\n".join(["motd", *(f"2: {line}" for line in reversed(lines)), *report_lines(1, {"facts": {}}), "bye"])
    assert read_reports(mixed) == {3: found, 1: {"facts": {}}}


def test_what_was_cut_is_left_out() -> None:
    lines = [*report_lines(0, {"facts": {"long": "x" * 2000}})]
    assert read_reports("\n".join(lines[:-1])) == {}
    assert read_reports("\n".join([*lines[:-1], lines[-1][:-2]])) == {}
