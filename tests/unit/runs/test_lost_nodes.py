"""How a run ends whose nodes did not all end with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from allranks import contract
from allranks.clusters.ssh import SshCluster
from allranks.record.events import EventWriter, read_events
from allranks.runs import agents
from allranks.runs.status import Handle, State


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    return tmp_path / contract.attempt_dir(0)


def tell(attempt: Path, node: int, *events: tuple[str, dict[str, object]]) -> None:
    """Have a node's agent tell of events after its start."""
    folder = attempt / f"node-{node:03}"
    folder.mkdir(parents=True)
    writer = EventWriter(folder / contract.AGENT_EVENTS)
    writer.write(contract.AGENT_STARTED, pid=1, began=1.0)
    for kind, fields in events:
        writer.write(kind, **fields)


def ended(state: str, code: int) -> tuple[str, dict[str, object]]:
    return contract.ENDED, {"state": state, "exit_code": code, "reason": None, "because_of_rank": None, "lost": ()}


LOST = (contract.NODE_LOST, {"node": 1, "host": "gpu2", "why": "gone", "goes_on": True})


def status(attempt: Path, nodes: int) -> State:
    known = [{"node": node, "host": f"gpu{node}.invalid", "pid": 1, "started": 1} for node in range(nodes)]
    handle = Handle(host="here", extra={"nodes": known, "began": 2.0})
    return SshCluster().read_status(attempt.parents[1], handle)[0].state


@pytest.mark.parametrize("own", [(), (ended("FAILED", 1),)])
def test_a_node_that_the_others_went_on_without_does_not_count(attempt: Path, own: tuple[()]) -> None:
    """Whether it tells nothing more or, cut off, that it has lost the others."""
    tell(attempt, 0, LOST, ended("SUCCEEDED", 0))
    tell(attempt, 1, *own)
    tell(attempt, 2, LOST, ended("SUCCEEDED", 0))
    assert status(attempt, 3) is State.SUCCEEDED


def test_a_node_that_never_began_is_not_waited_for(attempt: Path) -> None:
    tell(attempt, 0, ended("SUCCEEDED", 0))
    tell(attempt, 1, ended("SUCCEEDED", 0))
    (attempt / "node-002").mkdir()
    assert status(attempt, 2) is State.SUCCEEDED


def test_the_end_of_a_lost_node_ends_nothing(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is any machine asked about its agent: that would fail here, where there is no ssh."""
    monkeypatch.setenv("PATH", str(attempt))
    tell(attempt, 0, LOST, (contract.RANKS_STARTED, {"restart": 1}))
    tell(attempt, 1, ended("FAILED", 1))
    (attempt / "node-000" / contract.HEARTBEAT).write_text(f"{4e9}\n")  # Alive.
    assert status(attempt, 2) is State.RUNNING


def test_a_run_of_which_only_a_lost_node_tells(attempt: Path) -> None:
    tell(attempt, 1, LOST, ended("FAILED", 1))
    assert agents.end_of(agents.reported_by_each(attempt)).state is State.FAILED


def test_what_each_node_has_told(attempt: Path) -> None:
    by_loss = ended("FAILED", 1)
    by_loss[1]["lost"] = (1,)
    tell(attempt, 0, LOST, by_loss)
    tell(attempt, 2)
    told = agents.reported_by_each(attempt)
    found = {folder.name: (each.status.state, {*each.lost}, each.ended_by_loss) for folder, each in told.items()}
    assert found == {"node-000": (State.FAILED, {1}, True), "node-002": (State.PENDING, set(), False)}
    assert agents.lost_folders(told) == {attempt / "node-001"}
    assert agents.has_one_failed(told)


def test_each_look_reads_what_a_node_told_once(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared filesystem each look costs."""
    tell(attempt, 0, LOST, (contract.RANKS_STARTED, {"restart": 1}))
    tell(attempt, 1, ended("FAILED", 1))
    (attempt / "node-000" / contract.HEARTBEAT).write_text(f"{4e9}\n")  # Alive.
    read: list[str] = []
    monkeypatch.setattr(agents, "read_events", lambda path: read.append(path.parent.name) or read_events(path))
    assert status(attempt, 2) is State.RUNNING
    assert read == ["node-000", "node-001"]


def test_of_a_run_whose_directory_was_removed_there_is_no_news(tmp_path: Path) -> None:
    (tmp_path / contract.attempt_dir(0)).mkdir(parents=True)
    (tmp_path / contract.attempt_dir(1)).mkdir()
    happened = agents.HappenedInJobs(tmp_path)
    shutil.rmtree(tmp_path / "attempts")
    assert happened.news() == []
