"""``allranks compare``: times, speeds, metrics and settings of runs beside each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trained import train

from allranks.errors import RunFolderError
from allranks.runs.metrics import MetricLine, read_metrics, speeds, values_until


@pytest.fixture
def two(allranks: Any) -> tuple[str, str]:
    """Give the ids of two runs: the second takes twice the time for a step, and has made half of them."""
    allranks.script("")
    fast = train(allranks, "fast", "--", "--lr", "0.1", losses={10: 2.0, 20: 1.0, 30: 0.5}, pace=1.0)
    slow = train(allranks, "slow", "--", "--lr=0.2", "--warm", losses={5: 1.5, 15: 0.75}, pace=2.0)
    return fast.name, slow.name


def test_results_and_settings_stand_beside_each_other(allranks: Any, two: tuple[str, str]) -> None:
    done = allranks("compare", *two)
    assert (done.rc, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert header.split() == [*two]
    columns = [header.index(name) for name in two]
    assert [
        (line[: columns[0]].strip(), line[columns[0] : columns[1]].strip(), line[columns[1] :]) for line in lines
    ] == [
        ("state", "SUCCEEDED", "SUCCEEDED"),
        ("attempts", "1", "1"),
        ("ranks", "1 rank on 1 node", "1 rank on 1 node"),
        ("took", "36.0 s", "1 min 12 s (2.00x)"),
        ("time of all ranks", "36.0 s", "1 min 12 s (2.00x)"),
        ("steps", "30", "15"),
        ("samples/s", "100", "50 (0.50x)"),
        ("", "", ""),
        ("loss at step 15", "2", "0.75"),
        ("loss after 30.0 s", "0.5", "0.75"),
        ("", "", ""),
        ("--lr", "0.1", "0.2"),
        ("--warm", "-", "yes"),
    ]


def test_metrics_stand_at_a_step_that_all_have_recorded(allranks: Any) -> None:
    allranks.script("")
    runs = [train(allranks, "long", losses={10: 2.0, 20: 1.0, 30: 0.5, 40: 0.4}, pace=1.0)]
    runs += [train(allranks, "short", losses={10: 2.0, 20: 1.0, 30: 0.5, 32: 0.1}, pace=1.0)]
    first, second = json.loads(allranks("compare", *(run.name for run in runs), "--json").stdout)["runs"]
    assert (first["at_step"], second["at_step"]) == ({"loss": 0.5}, {"loss": 0.5})


def test_the_same_as_json(allranks: Any, two: tuple[str, str]) -> None:
    found = json.loads(allranks("compare", *two, "--json").stdout)
    assert (found["step"], round(found["seconds"], 3)) == (15, 30.0)
    assert found["settings"] == {"--lr": ["0.1", "0.2"], "--warm": ["-", "yes"]}
    first, second = found["runs"]
    assert [run["id"] for run in found["runs"]] == [*two]
    assert (first["at_step"], second["at_step"]) == ({"loss": 2.0}, {"loss": 0.75})
    assert (first["speeds"], second["speeds"]) == ({"samples_per_second": 100.0}, {"samples_per_second": 50.0})


def test_runs_without_metrics_and_with_the_same_settings(allranks: Any) -> None:
    allranks.script("")
    for _ in range(2):
        assert allranks("run", "train.py").rc == 0
    names = [run.name for run in allranks.runs()]
    done = allranks("compare", *names)
    assert done.rc == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        "state", "attempts", "ranks", "took", "time", "steps",
    ]  # fmt: skip
    assert done.stderr.splitlines() == [
        *(f"allranks: note: {name} has no metrics: its script does not call ctx.metrics.log" for name in names),
        "allranks: note: the job files and flags of these runs are the same",
    ]
    assert allranks("compare", names[0], names[0]).stderr == (
        f"error: {names[0]} is given twice\n  fix: name two different runs; allranks ps lists them\n"
    )


def test_metrics_that_are_cut_off_or_not_finite_are_left_out(tmp_path: Path) -> None:
    lines = ['{"step": 1, "time": 5.0, "loss": null, "norm": NaN, "x_per_second": 4}']
    lines += ["[]", '{"step": 2, "time": 6.0, "loss": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "ti']))
    found = read_metrics(tmp_path)
    assert found == [MetricLine(1, 5.0, {"x_per_second": 4.0}), MetricLine(2, 6.0, {"loss": 0.5})]
    assert (speeds(found), values_until(found, time=5.5), values_until(found)) == (
        {"x_per_second": 4.0},
        {},
        {"loss": 0.5},
    )
    assert read_metrics(tmp_path / "none") == []


def test_ranks_cost_nothing_between_attempts_and_an_attempt_of_unknown_end_is_not_guessed(
    allranks: Any, two: tuple[str, str]
) -> None:
    first = allranks.runs()[0]
    again = shutil.copytree(first / "attempts" / "000", first / "attempts" / "001")
    agent = again / "node-000" / "agent.jsonl"
    events = [json.loads(line) for line in agent.read_text().splitlines()]
    # An hour in the queue.
    later = [event | {name: event[name] + 3600.0 for name in ("time", "began") if name in event} for event in events]
    agent.write_text("".join(json.dumps(event) + "\n" for event in later))
    found = json.loads(allranks("compare", *two, "--json").stdout)["runs"]
    assert [(run["attempts"], round(run["rank_hours"], 6)) for run in found] == [(2, 0.02), (1, 0.02)]
    agent.write_text(json.dumps(later[0]) + "\n")
    assert json.loads(allranks("compare", *two, "--json").stdout)["runs"][0]["rank_hours"] is None


def test_metrics_that_cannot_be_read_are_no_missing_ones(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFolderError, match="cannot read"):
        read_metrics(tmp_path)
