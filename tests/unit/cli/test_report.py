"""``allranks report``: one HTML file on how runs went."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trained import train

from allranks.record.steptime import HEAD, Window
from allranks.view.report import thinned

CHROMIUM = shutil.which("chromium")


class _Page(HTMLParser):
    """Collects what a page would load, and the data that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.data = ""
        self._is_data = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self._is_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._is_data else ""


def _read(page: str) -> tuple[list[str], dict[str, Any]]:
    parsed = _Page()
    parsed.feed(page)
    return parsed.loads, json.loads(parsed.data)


def _json(allranks: Any, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(allranks("report", *names, "--json").stdout)
    return found


def test_the_file_holds_all_that_it_shows_and_loads_nothing(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", "--", "--name", "</script><b>&", losses={10: 2.0, 20: 1.0}, pace=1.0)
    done = allranks("report")
    assert (done.rc, done.stdout, done.stderr) == (0, "", f"allranks: report on {folder.name}: report.html\n")
    loads, data = _read((allranks.folder / "report.html").read_text())
    assert loads == []
    assert data == _json(allranks)
    (run,) = data["runs"]
    assert (run["state"], run["steps"], run["speeds"]) == ("SUCCEEDED", 20, {"samples_per_second": 100.0})
    assert ["--name", "'</script><b>&'"] in data["settings"]
    loss, speed = data["curves"]
    assert (loss["name"], speed["name"]) == ("loss", "samples_per_second")
    assert loss["series"] == [{"run": 0, "steps": [10, 20], "seconds": [10.0, 20.0], "values": [2.0, 1.0]}]
    assert allranks("report").rc == 0, "a report of before is replaced"


def test_phases_news_and_the_verdict_of_a_run_that_restarted_and_failed(allranks: Any) -> None:
    allranks.script("import os\nraise ValueError(os.environ['TORCHELASTIC_RESTART_COUNT'])\n")
    assert allranks("run", "train.py", "--max-restarts", "1").rc == 1
    (run,) = _json(allranks)["runs"]
    (attempt,) = run["attempts"]
    phases = attempt["phases"]
    assert [phase["kind"] for phase in phases] == ["waiting", "starting", "running", "restarting", "running"]
    assert [phase["start"] for phase in phases] == [run["created"], *(phase["end"] for phase in phases[:-1])]
    assert phases[-1]["end"] == run["ended"]
    assert sum(run["spent"].values()) == pytest.approx(run["ended"] - run["created"])
    assert [text for _, text in attempt["news"]] == ["rank 0 failed: ValueError: 0 (train.py:2); restarting, 1 of 1"]
    assert (attempt["state"], run["reason"]) == ("FAILED", "ValueError: 1 (train.py:2)")
    assert (run["verdict"]["id"], run["verdict"]["place"]) == ("script-exception", "train.py:2")


def test_attempts_that_waited_and_one_that_left_no_end(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    first, second = folder / "attempts" / "000" / "node-000", folder / "attempts" / "001" / "node-000"
    shutil.copytree(first, second)
    ranks = {"restart": 0, "world_size": 1, "nodes": 1}
    started = json.loads((first / "agent.jsonl").read_text().splitlines()[0])["began"]
    _lines(first, ("agent-started", started, {"began": started}), ("ranks-started", started + 5, ranks))
    (first / "heartbeat").write_text(str(started + 100))
    later = started + 4000
    _lines(
        second,
        ("agent-started", later + 1, {"began": later}),
        ("ranks-started", later + 10, ranks),
        ("ended", later + 4010, {"state": "SUCCEEDED"}),
    )
    record = json.loads((folder / "record.json").read_text())
    record["status"]["ended"] = later + 4010
    record["created"] = started
    record["handle"]["job_id"] = "7"
    (folder / "record.json").write_text(json.dumps(record))
    (run,) = _json(allranks)["runs"]
    spans = [
        [(phase["kind"], round(phase["start"] - started), round(phase["end"] - started)) for phase in each["phases"]]
        for each in run["attempts"]
    ]
    assert spans == [
        [("starting", 0, 5), ("running", 5, 100)],
        [("waiting", 100, 4000), ("starting", 4000, 4010), ("running", 4010, 8010)],
    ]
    waited, unsaved = run["advice"]
    assert waited.startswith("It waited 1 h 5 min of 2 h 13 min in the queue: ")
    assert unsaved.startswith("No checkpoint was saved in 1 h 8 min: ")


def _lines(node: Path, *events: tuple[str, float, dict[str, Any]]) -> None:
    lines = [{"time": when, "host": "here", "kind": kind, **fields} for kind, when, fields in events]
    (node / "agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_beside_each_other_scaling_and_a_slow_end(allranks: Any) -> None:
    allranks.script("")
    one = train(allranks, "one", "--", "--lr", "0.1", losses=dict.fromkeys(range(1, 5), 1.0), pace=1.0)
    two = train(allranks, "two", "--nproc-per-node", "2", losses=dict.fromkeys(range(1, 41), 1.0), pace=0.625)
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    for line in lines[30:]:
        line["samples_per_second"] = 80.0
    (two / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = _json(allranks, two.name, one.name)
    rows = [
        (row["run"], row["ranks"], row["speed"], row["speedup"], row["efficiency"]) for row in data["scaling"]["rows"]
    ]
    assert (data["scaling"]["name"], rows) == ("samples_per_second", [(1, 1, 100.0, 1.0, 1.0), (0, 2, 160.0, 1.6, 0.8)])
    assert data["settings"] == [["launch.nproc_per_node", "2", "auto"], ["--lr", "-", "0.1"]]
    assert data["runs"][1]["advice"] == []
    (slower,) = data["runs"][0]["advice"]
    assert slower.startswith("The last quarter was slower: 80 samples/s after 160 samples/s. ")
    assert _json(allranks, one.name)["scaling"] is None


def test_metrics_without_speeds_and_tasks_of_an_array(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    lines = [{"step": step, "time": step, "mAP": 0.5} for step in range(20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for task in range(2):
        shutil.copytree(folder / "attempts", folder / f"task-{task}" / "attempts")
    (run,) = _json(allranks)["runs"]
    assert (run["speeds"], run["advice"], [each["name"] for each in run["attempts"]]) == ({}, [], ["task 0", "task 1"])
    assert run["took"] == run["ended"] - run["created"]


def test_mistakes(allranks: Any) -> None:
    allranks.script("")
    assert allranks("report").rc == 2  # There is no run.
    assert allranks("run", "train.py").rc == 0
    name = allranks.runs()[0].name
    assert "is given twice" in allranks("report", name, name).stderr
    before = (allranks.folder / "train.py").read_text()
    done = allranks("report", "-o", "train.py")
    assert (done.rc, (allranks.folder / "train.py").read_text()) == (2, before)
    assert "error: train.py is left as it is\n  why: it was not written by allranks report\n" in done.stderr
    refused = allranks("report", "-o", "missing/r.html").message
    assert (refused["error"], refused["fix"]) == ("cannot write missing/r.html", "another path, that you may write to")
    assert allranks("report", "-o", "-").stdout.startswith("<!doctype html>\n")


def _record(folder: Path, ranks: int, *, slow: int = -1, data: float = 0.25, per_node: int = 8) -> None:
    """Write where the time of 40 windows of 2 steps went: 1 s of compute a step, or 2 s of the slow rank."""
    for rank in range(ranks):
        compute = 2.0 if rank == slow else 1.0
        spent = (2 * data, 2 * compute, 5.0 - 2 * (data + compute), 0.0, 0.0, 0.5)
        windows = [Window(1.7e9 + 5.5 * at, 2 * at, 2, 0, spent) for at in range(40)]
        node = folder / "attempts" / "000" / f"node-{rank // per_node:03}"
        node.mkdir(exist_ok=True)
        (node / f"rank-{rank}.times").write_bytes(HEAD + b"".join(map(Window.to_bytes, windows)))


def test_where_the_time_of_steps_went(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    assert _json(allranks)["runs"][0]["step_times"] is None
    _record(folder, 4, slow=2)
    (run,) = _json(allranks)["runs"]
    times, (slow,) = run["step_times"], run["advice"]
    assert times["phases"] == ["data", "compute", "exchange", "optimizer", "checkpoint", "other"]
    assert times["bars"][1:3] == [
        {"name": "rank 1", "spent": [0.25, 1.0, 1.25, 0.0, 0.0, 0.25]},
        {"name": "rank 2", "spent": [0.25, 2.0, 0.25, 0.0, 0.0, 0.25]},
    ]
    heat = times["heat"]
    assert (heat["start"], heat["end"], heat["rows"]) == (1.7e9, 1.7e9 + 220, [f"rank {rank}" for rank in range(4)])
    assert heat["own"] == [[2.5 if rank == 2 else 1.5] * 40 for rank in range(4)]
    assert (heat["step"], heat["data"]) == ([[2.75] * 40] * 4, [[0.25] * 40] * 4)
    assert "ank 2" in slow
    assert " computes 2.0 times slower for 80 steps: 2 s of each step of 2.75 s, the others 1 s. " in slow


def test_the_clocks_of_a_slow_gpu_are_told_of_its_rank(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    cool = {"number": 1, "busy": 97, "memory": 32, "total": 80, "clock": 1755, "max_clock": 1980, "slowed_by": []}
    hot = cool | {"number": 0, "clock": 1110, "slowed_by": ["thermal"], "temperature": 91}
    usage = {"host": "gpu03", "time": 1.7e9, "cpus": 2.5, "memory": 64, "gpus": [hot, cool]}
    (folder / "attempts" / "000" / "node-000" / "usage.json").write_text(json.dumps(usage))
    (run,) = _json(allranks)["runs"]
    clocks = "1.11 GHz (thermal), the others at 1.75 GHz"
    (alone,) = run["advice"]
    assert alone.startswith(f"The GPU of rank 0 on gpu03 runs at {clocks}. nvidia-smi -q -d PERFORMANCE ")
    assert run["usage"][0]["gpus"] == [hot, cool | {"temperature": None}]
    _record(folder, 4, slow=0)
    (slow,) = _json(allranks)["runs"][0]["advice"]
    assert slow.startswith(
        f"Rank 0 on gpu03 computes 2.0 times slower for 80 steps: its GPU runs at {clocks}; 2 s of each step of "
    )


def test_step_times_of_many_ranks_are_summed_up(allranks: Any) -> None:
    allranks.script("")
    _record(train(allranks, "a", losses={}, pace=1.0), 100, slow=99, data=0.75)
    times = _json(allranks)["runs"][0]["step_times"]
    assert [bar["name"] for bar in times["bars"]] == ["median of 100", *(f"rank {at}" for at in range(31)), "rank 99"]
    assert (times["heat"]["rows"][0], times["heat"]["rows"][-1]) == ("ranks 0-1", "ranks 98-99")
    assert {row[0] for row in times["heat"]["own"][:-1]} == {2.0}
    assert times["heat"]["own"][-1] == [3.0] * 40


def test_what_was_lost_in_seconds_of_running(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    assert _json(allranks)["runs"][0]["lost"] == {}
    _record(folder, 4, slow=2)
    (run,) = _json(allranks)["runs"]
    running = run["spent"]["running"]
    # Of a step of 2.75 s each rank waits for data 0.25 s; three wait for the slow one 1.25 s, which waits 0.25 s.
    assert run["lost"] == {
        "repeated steps": 0.0,
        "waiting for data": pytest.approx(running * 0.25 / 2.75),
        "waiting for other ranks": pytest.approx(running * 1.0 / 2.75),
        "part of it for stragglers": pytest.approx(min(80.0, running)),
    }


def test_steps_that_a_restart_repeats_are_lost(allranks: Any) -> None:
    allranks.script("")
    folder = train(allranks, "a", losses={}, pace=1.0)
    _record(folder, 1)
    times = folder / "attempts" / "000" / "node-000" / "rank-0.times"
    again = [Window(1.8e9 + 10 * at, 70 + 4 * at, 4, 1, (0.0, 8.0, 0.0, 0.0, 0.0, 0.0)) for at in range(5)]
    second_training = Window(1.9e9, 0, 4, 1, (0.0, 8.0, 0.0, 0.0, 0.0, 0.0))
    times.write_bytes(times.read_bytes() + b"".join(map(Window.to_bytes, [*again, second_training])))
    (run,) = _json(allranks)["runs"]
    assert run["lost"]["repeated steps"] == 20.0, "80 steps were made, and 70 to 79 again, each for 2 s"


def test_what_limits_the_scaling(allranks: Any) -> None:
    allranks.script("")
    one = train(allranks, "one", losses=dict.fromkeys(range(1, 5), 1.0), pace=1.0)
    two = train(allranks, "two", "--nproc-per-node", "2", losses=dict.fromkeys(range(1, 5), 1.0), pace=0.625)
    _record(one, 1)
    _record(two, 2, data=0.75)
    rows = _json(allranks, one.name, two.name)["scaling"]["rows"]
    # Of 1 s of a rank for 100 samples 0.09 s went to data, and of 1.25 s 0.34 s.
    assert [row["limit"] for row in rows] == [None, ["data", pytest.approx(1.25 * 0.75 / 2.75 - 0.25 / 2.75, abs=1e-3)]]


def test_all_ranks_wait_for_data(allranks: Any) -> None:
    allranks.script("")
    _record(train(allranks, "a", losses={}, pace=1.0), 2, data=0.75)
    (slow,) = _json(allranks)["runs"][0]["advice"]
    assert slow.startswith("All ranks wait for data: 750 ms of each step of 2.75 s. ")


@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_extremes(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    if len(values) <= most:
        assert kept == [*range(len(values))]
    else:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
        shown = [values[at] for at in kept]
        assert (min(shown), max(shown)) == (min(values), max(values))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_it(allranks: Any, tmp_path: Path) -> None:
    allranks.script("raise ValueError('<b>bold</b>')")
    assert allranks("run", "train.py", "--name", "bad").rc == 1
    failed = allranks.runs()[-1].name
    allranks.script("")
    folder = train(allranks, "good", losses={10: 2.0, 20: 1.0}, pace=1.0)
    _record(folder, 2, slow=1)
    good = folder.name
    assert allranks("report", good, failed).rc == 0
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'browser'}",
        "--dump-dom",
    ]
    page = (allranks.folder / "report.html").as_uri()
    done = subprocess.run([str(CHROMIUM), *options, page], capture_output=True, text=True, check=True)
    body = done.stdout[done.stdout.index("<main>") : done.stdout.index("</main>")]
    titles = re.findall("<h2>(.*?)</h2>", body)
    assert titles == [
        f"What to do better: {good}",
        f"Why {failed} failed",
        f"Timeline of {good}",
        f"Timeline of {failed}",
        f"Where a step's time went: {good}",
        f"Ranks over time: {good}",
        "Curves",
        *(f"Nodes over time: {name}" for name in (good, failed) if f"Nodes over time: {name}" in body),
        *(f"Nodes of {name}, last sample" for name in (good, failed) if f"Nodes of {name}" in body),
    ]
    assert "ValueError: &lt;b&gt;bold&lt;/b&gt;" in body
    assert (body.count("<figure>"), body.count('class="curve"')) == (3, 2)
    assert "rank 1: forward and backward 2.0 s, 73 %" in body
