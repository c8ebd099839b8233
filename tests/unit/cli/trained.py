"""Runs with metrics, as a training leaves them, without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allranks.runs import agents
from allranks.runs.record import load


def train(allranks: Any, name: str, *options: str, losses: dict[int, float], pace: float) -> Path:
    """Run a script that logs nothing, with a name and options, and write what ``ctx.metrics.log`` would have."""
    assert allranks("run", "train.py", "--name", name, *options).rc == 0
    folder: Path = allranks.runs()[-1]
    record = json.loads((folder / "record.json").read_text())
    start = agents.began(load(folder))
    record["status"]["ended"] = start + 36.0 * pace
    (folder / "record.json").write_text(json.dumps(record))
    agent = folder / "attempts" / "000" / "node-000" / "agent.jsonl"
    events = [json.loads(line) for line in agent.read_text().splitlines()]
    events = [event | {"time": start + 36.0 * pace} if event["kind"] == "ended" else event for event in events]
    agent.write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [
        {"step": step, "time": start + step * pace, "loss": loss, "samples_per_second": 100 / pace}
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
