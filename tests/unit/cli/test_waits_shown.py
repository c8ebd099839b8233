"""What the command says while nothing of a rank can be shown: a line for each event, and a spinner on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agents_by_hand import free_port
from allranks import contract
from allranks.cli.live import Live, News
from allranks.cli.render import Below
from allranks.logs.merge import MergedLogs
from allranks.runs.agents import Happened
from allranks.runs.record import load
from waiting import PATIENCE

FAILS_TWICE = """\
import os, sys
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if restart == "0" and rank == "1":
    raise KeyError("weights")
if restart == "1" and rank == "0":
    sys.exit(5)
if restart == "2":
    print("out of", rank)
"""
OPTIONS = ("--nproc-per-node", "2", "--max-restarts", "3", "--restart-delay", "2")


def said_of_restarts(name: str) -> list[str]:
    return [
        f"allranks: {name}: rank 1 failed: KeyError: 'weights' (train.py:4); restarting, 1 of 3",
        f"allranks: {name}: rank 0 exited with code 5; restarting in 2 s, 2 of 3",
    ]


def test_each_restart_is_told_once_with_its_cause_on_stderr(allranks: Any) -> None:
    allranks.script(FAILS_TWICE)
    done = allranks("run", "train.py", *OPTIONS)
    assert (done.rc, sorted(done.stdout.splitlines())) == (0, ["[0] out of 0", "[1] out of 1"])
    lines = [line for line in done.stderr.splitlines() if line.startswith("allranks: ")]
    assert lines[1:-1] == said_of_restarts(allranks.run().name)


def test_a_run_that_starts_at_once_says_no_more_than_that_it_starts_and_ends(allranks: Any) -> None:
    allranks.script("print('out')")
    done = allranks("run", "train.py", "--nproc-per-node", "1")
    name = allranks.run().name
    first, last = done.stderr.splitlines()
    assert first.startswith(f"allranks: {name}: 1 rank on this machine, backend ")
    assert last.startswith(f"allranks: {name} succeeded in ")


def test_on_a_terminal_a_spinner_shows_the_wait_and_nothing_of_it_stays(allranks: Any) -> None:
    allranks.script(FAILS_TWICE)
    shown = at_terminal(allranks, "run", "train.py", "--no-check", *OPTIONS)
    assert re.search(r"[-\\|/] starting ranks \(0 s\)", shown)
    assert re.search(r"[-\\|/] restarting in 2 s, 2 of 3 \(\d+ s\)", shown)
    screen = left_on_screen(shown).splitlines()
    name = allranks.run().name
    ours = [line for line in screen if line.startswith("allranks: ")]
    assert ours[1:-1] == said_of_restarts(name)
    others = [line for line in screen if line not in ours]
    traceback = [
        "[1] Traceback (most recent call last):",
        f'[1]   File "{allranks.folder}/train.py", line 4, in <module>',
        '[1]     raise KeyError("weights")',
        "[1] KeyError: 'weights'",
    ]
    assert (others[:4], sorted(others[4:])) == (traceback, ["[0] out of 0", "[1] out of 1"])


def at_terminal(allranks: Any, *words: str) -> str:
    """Run a command in a terminal, and return all that it wrote there."""
    ours, theirs = pty.openpty()
    env = {**allranks.env, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "allranks", *words]
    process = subprocess.Popen(command, cwd=allranks.folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:  # Linux reports a terminal that nobody holds any more so.
        os.close(ours)
    assert process.wait(PATIENCE) == 0
    return shown.decode()


def left_on_screen(shown: str) -> str:
    """Return what a wide terminal shows at last, of one that knows what :class:`render.Below` writes."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[AJK]|\r|\n|[^\x1b\r\n]+", re.sub(r"\x1b\[[\d;]*m", "", shown)):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.endswith("A"):
            row -= int(part[2:-1])
        elif part.startswith("\x1b"):
            lines[row] = lines[row][:column]
            if part.endswith("J"):
                del lines[row + 1 :]
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return "\n".join(lines)


@pytest.mark.parametrize("plain", [False, True])
def test_a_bar_of_a_rank_wins_over_the_spinner_and_plain_draws_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: bool
) -> None:
    drawn: list[bytes] = []
    monkeypatch.setattr("allranks.cli.live._to_terminal", drawn.append)
    monkeypatch.setattr("allranks.cli.render.is_lively", lambda stream: True)
    monkeypatch.setattr("allranks.cli.render.BELOW", Below())
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    live, bar = Live(plain=plain), [b"[0] 10%", None, None]
    live.status = lambda columns, most: ["step 1"]
    monkeypatch.setattr("allranks.cli.live._is_foreground", lambda: True)
    merged = MergedLogs(tmp_path, sys.stdout.buffer.write, sys.stderr.buffer.write)
    monkeypatch.setattr(merged, "transient", lambda: bar.pop(0))
    for awaited in ("restarting", "restarting", ""):
        live.draw(merged, awaited)
    shown = [
        b"\x1b[K\n[0] 10%\x1b[K\nstep 1\x1b[K\x1b[J\x1b[2A\r",
        b"\r\x1b[K\n- restarting (0 s)\x1b[K\nstep 1\x1b[K\x1b[J\x1b[2A\r",
        b"\r\x1b[K\nstep 1\x1b[K\x1b[J\x1b[1A\r",
    ]
    assert drawn == ([] if plain else shown)


class Waiting:
    """A run that waits, as long as the test says."""

    awaited = "starting ranks"

    def news(self) -> list[str]:
        return []


def test_a_long_wait_is_told_once_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failed_run: Path
) -> None:
    now, waiting = [100.0], Waiting()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    news = News(waiting, load(failed_run), Live())  # type: ignore[arg-type]

    def told(seconds: float) -> str:
        now[0] += seconds
        news.report()
        return capfd.readouterr().err

    line = f"allranks: {failed_run.name}: still starting ranks\n"
    assert [told(seconds) for seconds in (0, 29.9, 0.1, 100)] == ["", "", line, ""]
    waiting.awaited = ""
    assert told(1) == ""
    waiting.awaited = "starting ranks"
    assert [told(seconds) for seconds in (1, 30)] == ["", line]


def test_nodes_that_have_not_come_are_named(allranks: Any) -> None:
    """It takes more than 10 s: agents wait for five before they say so, first for node 0 and then for the last."""
    allranks.script("print('out')")
    port = str(free_port())

    def type_(node: int) -> subprocess.Popen[bytes]:
        (folder := allranks.folder / str(node)).mkdir()
        (folder / "train.py").write_text("print('out')")
        place = ("--nnodes", "3", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port)
        process: subprocess.Popen[bytes] = allranks.popen("node", "train.py", *place, cwd=folder)
        return process

    def wait_for_line(process: subprocess.Popen[bytes]) -> str:
        """Return the second line of what a command says."""
        assert process.stderr is not None
        process.stderr.readline()
        return process.stderr.readline().decode().partition(": ")[2].partition(": ")[2]

    nodes = {1: type_(1)}
    assert wait_for_line(nodes[1]) == f"waiting for node 0 at 127.0.0.1:{port}\n"
    nodes[0] = type_(0)
    assert wait_for_line(nodes[0]) == "waiting for node 2: 2 of 3 here\n"
    nodes[2] = type_(2)
    said = {node: process.communicate(timeout=PATIENCE) for node, process in nodes.items()}
    assert [nodes[node].returncode for node in range(3)] == [0, 0, 0], said
    # A start that takes longer than half a minute is told besides.
    first, second = (
        [line for line in said[node][1].decode().splitlines() if ": still " not in line] for node in (0, 1)
    )
    (last,) = first
    assert " succeeded in " in last
    waited, succeeded = second
    assert waited.endswith(": waiting for node 2: 2 of 3 here")
    assert " succeeded in " in succeeded


def happened(node: Path, *events: dict[str, Any]) -> Happened:
    """Return a reader of events of an agent that are written now."""
    node.mkdir(parents=True)
    tell(node, *events)
    return Happened(node)


def tell(node: Path, *events: dict[str, Any]) -> None:
    with (node / contract.AGENT_EVENTS).open("a") as stream:
        stream.writelines(json.dumps({"time": time.time(), "host": "gpu1", **event}) + "\n" for event in events)


def test_a_node_that_is_lost_and_those_that_go_on_are_told_once(tmp_path: Path) -> None:
    lost = {"kind": "node-lost", "node": 2, "host": "gpu3", "why": "the connection broke", "goes_on": True}
    again = {"kind": "restart", "restart": 1, "delay": 0.0, "because_of_rank": None, "max_restarts": 0}
    reader = happened(tmp_path / "attempts/000/node-000", {"kind": "ranks-started", "world_size": 6, "nodes": 3}, lost)
    assert (reader.news(), reader.awaited) == (["node 2 (gpu3) was lost: the connection broke"], "")
    tell(tmp_path / "attempts/000/node-000", again)
    assert (reader.news(), reader.awaited) == ([], "restarting")
    tell(tmp_path / "attempts/000/node-000", {"kind": "ranks-started", "world_size": 4, "nodes": 2})
    assert (reader.news(), reader.awaited) == (["restarted with 4 ranks on 2 nodes"], "")
    assert reader.news() == []


def test_nodes_that_come_one_by_one_are_one_line(tmp_path: Path) -> None:
    node = tmp_path / "attempts/000/node-000"
    reader = happened(node, {"kind": "missing", "nodes": [1, 2, 3, 5, 6], "of": 8})
    assert reader.news() == ["waiting for nodes 1, 2, 3, 5, …: 3 of 8 here"]
    tell(node, {"kind": "missing", "nodes": [5], "of": 8})
    assert (reader.news(), reader.awaited) == ([], "waiting for node 5: 7 of 8 here")
    tell(node, {"kind": "missing", "nodes": [], "of": 8})
    assert (reader.news(), reader.awaited) == ([], "starting ranks")


def test_nothing_is_awaited_where_a_scheduler_has_started_the_ranks(tmp_path: Path) -> None:
    reader = happened(tmp_path / "node-000")
    assert reader.awaited == "starting ranks"
    (tmp_path / "node-000" / contract.LOG_INDEX).touch()
    assert reader.awaited == ""
    (tmp_path / "node-000" / contract.HEARTBEAT).touch()
    assert reader.awaited == "starting ranks"
