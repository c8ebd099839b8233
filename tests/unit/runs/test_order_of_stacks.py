"""Stacks that agents have taken are listed by rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks import contract
from allranks.record.events import EventWriter
from allranks.record.stacks import groups
from allranks.runs import stacks
from allranks.runs.record import Record, Run

#: More than ten: their files are sorted otherwise than they are.
RANKS = range(12)


def test_stacks_are_listed_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(
        tmp_path,
        Record(
            **dict.fromkeys(("id", "name", "cluster", "kind", "host"), "x"),
            world_size=len(RANKS),
            nnodes=1,
            stop_timeout=30.0,
            file_mode=0o600,
            created=0.0,
        ),
    )
    node = run.node_folder(0)
    node.mkdir(parents=True)
    started = [{"pid": 100 + rank, "rank": rank} for rank in RANKS]
    EventWriter(node / contract.AGENT_EVENTS).write(contract.RANKS_STARTED, ranks=started)
    pids = {str(100 + rank): {"stack": True, "recorder": False, "state": ""} for rank in RANKS}
    pids["103"]["state"] = "stopped"
    (node / contract.STACKS).write_text(json.dumps({"request": 1, "pids": pids}))

    def request(_: Path) -> int:
        for rank in {*RANKS} - {3}:
            (node / contract.rank_stacks(rank)).write_text("Stack (most recent call first):\n")
        return 1

    monkeypatch.setattr(stacks, "_request", request)
    found = stacks.ask(run, 60.0)
    assert [each.rank for each in found.ranks] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [ranks for ranks, _ in groups(found.ranks)] == [[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]]
    assert (found.late, found.states, found.without, found.silent) == ((3,), {3: "stopped"}, (), ())
