"""What watch, the lines below the log and the report show of records of all kinds: damaged, older, small and large."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks import contract
from allranks.clusters.registry import load_kind
from allranks.record.steptime import HEAD, Place, Window
from allranks.runs.comparison import read
from allranks.runs.record import load
from allranks.runs.status import State, Status
from allranks.view.feed import Feed, Figures
from allranks.view.report import to_data, to_page
from allranks.view.selection import Choice
from allranks.view.watch import below_log, run_screen

HOUR = 3600.0


@pytest.fixture
def run(failed_run: Path, tmp_path: Path) -> Path:
    """Give a copy of a failed run of two ranks, with metrics, a checkpoint, times of its steps and a node's sample."""
    folder = Path(shutil.copytree(failed_run, tmp_path / "runs" / failed_run.name))
    node = folder / "attempts" / "000" / "node-000"
    (folder / "metrics.jsonl").write_text(
        '{"step": 7, "time": 1.0, "loss": 0.5}\n{"step": 8, "time": 2.0, "loss": 1}\n'
    )
    (folder / "checkpoints.jsonl").write_text(
        '{"attempt": 0, "step": 8, "path": "/c", "leaving": false, "time": 5.0}\n'
    )
    for rank in range(2):
        _write_windows(node, rank, [_window(100.0 + at, at, 1) for at in range(3)])
    (node / "usage.json").write_text(json.dumps(_sample(0, 100.0)))
    return folder


def _window(start: float, first: int, steps: int, compute: float = 0.75, place: Place = Place()) -> Window:  # noqa: B008
    """Return a window of steps of a second each, of which a rank computes for so long."""
    return Window(start, first, steps, 0, (0.0, steps * compute, steps * (1 - compute), 0.0, 0.0, 0.0), place)


def _write_windows(node: Path, rank: int, windows: list[Window]) -> None:
    (node / f"rank-{rank}.times").write_bytes(HEAD + b"".join(map(Window.to_bytes, windows)))


def _sample(node: int, when: float, clock: int = 1755, *slowed_by: str) -> dict[str, Any]:
    gpu = {"busy": 97, "memory": 40e9, "total": 80e9, "temperature": 60, "max_clock": 1980}
    clocks = [(0, 1755, ()), (1, clock, slowed_by)]
    gpus = [{**gpu, "number": at, "clock": mhz, "slowed_by": [*why]} for at, mhz, why in clocks]
    used = {"cpus": 2.0, "memory": 5e9, "cpus_total": 8, "memory_total": 9e9, "advanced": when}
    return {"host": f"gpu{node:02d}", "time": when, **used, "gpus": gpus}


# --- damaged, and of another version ---


def _each_file(run: Path, change: Callable[[Path], object]) -> None:
    for path in [*run.rglob("*")]:
        if path.is_file() and path.name not in ("record.json", "code"):
            change(path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _of_another_version(path: Path) -> None:
    """Leave events what all versions record of them, and give other files a form that this version does not know."""
    if path.name == contract.AGENT_EVENTS:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{key: event[key] for key in ("time", "host", "kind")} for event in events]
        path.write_text("".join(json.dumps(event) + "\n" for event in kept))
    elif path.suffix == contract.TIMES_SUFFIX:
        path.write_bytes(b"steps 1\n" + path.read_bytes()[len(HEAD) :])
    elif path.name == contract.USAGE:
        gpus = [{"busy": 97, "memory": 40e9, "total": 80e9}]
        path.write_text(json.dumps({"host": "gpu00", "time": 100.0, "cpus": 2.0, "memory": 5e9, "gpus": gpus}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut in the middle": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0\n\0"),
    "null": lambda path: path.write_text("null\n"),
    "a list": lambda path: path.write_text("[1]\n"),
    "a number": lambda path: path.write_text("7\n"),
    "an empty object": lambda path: path.write_text("{}\n"),
    "of another version": _of_another_version,
}


@pytest.mark.parametrize("is_running", [False, True], ids=["ended", "running"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_left_is_shown_in_all_places(run: Path, damage: Callable[[Path], object], is_running: bool) -> None:
    if is_running:
        record = json.loads((run / "record.json").read_text())
        (run / "record.json").write_text(json.dumps({**record, "status": {"state": "RUNNING"}}))
    _each_file(run, damage)
    shot = Feed(load(run), load_kind("local")).read()
    screen = [line.plain for line in run_screen(shot, Choice(), 80, 24)]
    assert (len(screen), screen[0].startswith(run.name), shot.problem) == (24, True, "")
    assert len(below_log(Figures(load(run)).read(), 80, 3)) <= 3
    (shown,) = (data := to_data([read(load(run))]))["runs"]
    assert (shown["id"], shown["ranks"]) == (run.name, 2)
    assert run.name in to_page(data)


def test_older_samples_and_events_are_shown_without_what_they_lack(run: Path) -> None:
    _each_file(run, _of_another_version)
    data = to_data([read(load(run))])["runs"][0]
    assert (data["step_times"], data["steps"], data["last_checkpoint"]) == (None, 8, 8)
    assert [phase["kind"] for phase in data["attempts"][0]["phases"]] == ["waiting", "starting", "running"]
    shot = Feed(load(run), load_kind("local")).read()
    assert (shot.step, shot.saved) == (8, (8, 5.0))
    assert shot.nodes[0]["gpus"][0]["slowed_by"] == []


def test_a_job_file_that_cannot_be_read_is_one_of_the_settings(run: Path) -> None:
    (run / "job.yaml").write_text("name: [")
    assert to_data([read(load(run))])["settings"] == [("job.yaml", "cannot be read")]


# --- replayed: what agents and ranks write, minute by minute, and what is shown of it ---


class Training:
    """Writes the record of a training that makes a step a second, of ranks on nodes of two GPUs, by a clock of its own.

    Its times are seconds since 1970; it begins at 0 and has 10 epochs of 360 batches.
    """

    def __init__(self, run: Path, ranks: int) -> None:
        self.run, self.ranks, self.nodes, self.now, self.attempt = run, ranks, -(-ranks // 2), 0.0, -1
        for old in (run / "attempts", run / "metrics.jsonl", run / "checkpoints.jsonl"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        record = json.loads((run / "record.json").read_text())
        record |= {"world_size": ranks, "nnodes": self.nodes, "created": 0.0}
        (run / "record.json").write_text(json.dumps(record | {"status": {"state": "RUNNING"}}))
        self.slow: set[int] = set()
        self.clock: tuple[Any, ...] = (1755,)

    def start(self) -> None:
        """Start an attempt, which makes the steps that follow those so far."""
        self.attempt += 1
        self._windows: dict[int, list[Window]] = {rank: [] for rank in range(self.ranks)}
        for node in range(self.nodes):
            self.folder(node).mkdir(parents=True)
        self.tell(contract.AGENT_STARTED, pid=1, began=self.now)
        self.tell(contract.RANKS_STARTED, restart=0, world_size=self.ranks, nodes=self.nodes, ranks=[])

    def folder(self, node: int) -> Path:
        """Return the directory of a node in the newest attempt."""
        return self.run / contract.node_dir(self.attempt, node)

    def tell(self, kind: str, **fields: Any) -> None:
        """Record an event, by each node's agent; that of a start names the node's own ranks."""
        for node in range(self.nodes):
            if kind == contract.RANKS_STARTED:
                first = 2 * node
                ranks = range(first, min(first + 2, self.ranks))
                fields["ranks"] = [{"rank": rank, "local_rank": rank - first} for rank in ranks]
            with (self.folder(node) / contract.AGENT_EVENTS).open("a") as file:
                file.write(json.dumps({"time": self.now, "host": f"gpu{node:02d}", "kind": kind, **fields}) + "\n")

    def run_for(self, minutes: int) -> Iterator[int]:
        """Train, and yield the step after each minute."""
        for _ in range(minutes):
            for second in range(0, 60, 10):
                start, first = self.now + second, int(self.now) + second
                left = 360 - (first + 10) % 360
                place = Place(1 + (first + 10) // 360, 10, left, 360)
                for rank, windows in self._windows.items():
                    windows.append(_window(start, first, 10, 1.0 if rank in self.slow else 0.5, place))
            self.now += 60
            for rank, windows in self._windows.items():
                _write_windows(self.folder(rank // 2), rank, windows)
            for node in range(self.nodes):
                sample = _sample(node, self.now, *(self.clock if node == 1 else ()))
                (self.folder(node) / contract.USAGE).write_text(json.dumps(sample))
            with (self.run / "metrics.jsonl").open("a") as file:
                for step in range(int(self.now) - 59, int(self.now) + 1):
                    values = {"step": step, "time": float(step), "loss": 1 / step, "steps_per_second": 1.0}
                    file.write(json.dumps(values) + "\n")
            yield int(self.now)

    def end(self, **how: Any) -> None:
        """Record the end of the attempt."""
        self.tell(contract.ENDED, exit_code=0, because_of_rank=None, **how)


@pytest.fixture
def replay(run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Training, Feed]]:
    """Give a training of so many ranks, and what watch reads of it by the training's clock."""

    def begin(ranks: int) -> tuple[Training, Feed]:
        training = Training(run, ranks)
        clock = SimpleNamespace(time=lambda: training.now, monotonic=lambda: training.now)
        for module in ("feed", "timeline", "report"):
            monkeypatch.setattr(f"allranks.view.{module}.time", clock)
        monkeypatch.setattr("allranks.runs.hangs.time", SimpleNamespace(**vars(time) | vars(clock)))
        status = Status(State.RUNNING, "ranks running", started=0.0)
        kind: Any = SimpleNamespace(status=lambda run: status)
        return training, Feed(load(run), kind)

    return begin


def test_an_hour_of_a_training_is_followed_and_reported(run: Path, replay: Any) -> None:
    """Its steps, epochs and curves; a rank that is slow for ten minutes; a lost node, after which it is requeued.

    It takes 3 s alone and more beside others: 55 times watch reads all that there is of a run.
    """
    training, watched = replay(4)
    training.start()
    named = dict[int, str]()
    for step in training.run_for(20):
        shot = watched.read()
        assert (shot.step, shot.position.step, shot.delay) == (step, step, "")
        assert (shot.position.epoch, shot.position.percent) == (1 + step // 360, 100 * (step % 360) // 360)
        assert shot.position.seconds_left == pytest.approx(HOUR - step, rel=0.2)
        assert shot.metrics["loss"][0] == 1 / step
        assert 0 < len(shot.metrics["loss"][1]) <= 512
    training.slow = {3}
    for step in training.run_for(10):
        named[step // 60] = watched.read().delay
    slow = [minute for minute, text in named.items() if text.startswith("rank 3 on gpu01 computes 2.0 times slower ")]
    assert slow == [*range(24, 31)], "after 11 times two windows, which are of 10 s here"
    assert watched.read().own == {0: [0.5, 0.5], 1: [0.5, 1.0]}
    training.slow = set()
    assert [watched.read().delay for _ in training.run_for(10)][-7:] == [""] * 7
    training.tell(
        contract.NODE_LOST, node=1, host="gpu01", why="no heartbeat for 30 s", goes_on=False, time=training.now - 1
    )
    training.end(state="NODE_FAIL", reason="node 1 was lost")
    decision = {"again": True, "job": "8", "how": "requeue", "why": "node 1 was lost"}
    (run / contract.attempt_dir(0) / contract.AGAIN).write_text(json.dumps(decision))
    training.now += 300.0
    training.start()
    step, shot = [(step, watched.read()) for step in training.run_for(15)][-1]
    assert (shot.attempt, shot.step, shot.position.epochs) == (1, step, 10)
    texts = [text for when, text in shot.events if when <= HOUR]
    assert texts == [
        "attempt 1: 4 ranks started",
        "node 1 (gpu01) was lost: no heartbeat for 30 s",
        "attempt 1 ended: NODE_FAIL: node 1 was lost",
        "attempt 2: 4 ranks started",
    ]
    assert "another attempt follows: node 1 was lost" in [text for _, text in shot.events]
    training.end(state="SUCCEEDED", reason=None)
    record = load(run).record
    ended = record._replace(status=Status(State.SUCCEEDED, "ended", started=0.0, ended=HOUR, exit_code=0))
    (run / "record.json").write_text(json.dumps(ended.to_json()))
    shown = to_data([read(load(run))])["runs"][0]
    assert (shown["state"], shown["took"], shown["steps"]) == ("SUCCEEDED", HOUR, 3600)
    assert len(shown["attempts"]) == 2
    assert shown["spent"]["running"] == 3300.0
    assert (len(shown["step_times"]["bars"]), len(shown["step_times"]["heat"]["own"][0])) == (4, 90)


def test_a_run_of_one_rank_has_no_other_to_wait_for(run: Path, replay: Any) -> None:
    training, watched = replay(1)
    training.start()
    assert [watched.read().delay for _ in training.run_for(5)] == [""] * 5
    (shown,) = to_data([read(load(run))])["runs"]
    assert [bar["name"] for bar in shown["step_times"]["bars"]] == ["rank 0"]
    assert shown["advice"] == []


def test_of_1024_ranks_the_one_with_a_hot_gpu_is_named(run: Path, replay: Any) -> None:
    training, watched = replay(1024)
    training.start()
    training.clock = (1110, "thermal")
    assert [*training.run_for(1)] == [60]
    shot = watched.read()
    assert shot.delay == "the GPU of rank 3 on gpu01 runs at 1.11 GHz (thermal), the others at 1.75 GHz"
    lines = [line.plain for line in run_screen(replace(shot, time=training.now), Choice(pane="nodes"), 80, 24)]
    assert lines[3] == shot.delay
    assert lines[4].startswith("── 512 nodes: use of GPUs, a cell for each ─")
    shown = to_data([read(load(run))])["runs"][0]
    times = shown["step_times"]
    assert (len(times["bars"]), len(times["heat"]["rows"]), shown["ranks"]) == (33, 64, 1024)
    assert shown["advice"][0].startswith("The GPU of rank 3 on gpu01 runs at 1.11 GHz (thermal), ")
    assert all(math.isfinite(value) for row in times["heat"]["own"] for value in row)
