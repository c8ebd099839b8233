"""Where metrics go to: JSON lines, TensorBoard, Weights & Biases and MLflow for real where they are installed."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import threading
from pathlib import Path

import pytest

import allranks
from allranks import RankError
from allranks.runtime.trackers import Background, JsonLines, RunInfo, SystemMetrics, open_trackers
from packages import needs


class Memory:
    """A tracker that remembers; it fails at one step, and can wait."""

    def __init__(self, fails_at=None):
        self.calls = []
        self.fails_at = fails_at
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, step, values):
        assert self.may_go_on.wait(60)
        if step == self.fails_at:
            raise ConnectionError("the network is gone\nand more")
        self.calls.append((step, values))

    def config(self, values):
        self.calls.append(("config", values))

    def resume(self, step):
        self.calls.append(("resume", step))

    def close(self):
        self.calls.append("close")


def test_calls_come_in_order_and_nobody_waits_for_them(tmp_path):
    memory = Memory()
    memory.may_go_on.clear()
    group = open_trackers([memory], RunInfo("x", folder=tmp_path))
    group.config({"lr": 0.1})
    group.write(1, {"loss": 2.0}, 5.0)
    group.resume(1)
    group.write(2, {"loss": 1.0}, 6.0)
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "time": 5.0, "loss": 2.0}\n{"step": 2, "time": 6.0, "loss": 1.0}\n'
    )
    memory.may_go_on.set()
    group.close()
    group.close()
    assert memory.calls == [("config", {"lr": 0.1}), (1, {"loss": 2.0}), ("resume", 1), (2, {"loss": 1.0}), "close"]


def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path, capsys):
    bad, good = Memory(fails_at=2), Memory()
    group = open_trackers([bad, good], RunInfo("x", folder=tmp_path))
    for step in range(1, 5):
        group.write(step, {"loss": 0.0}, 0.0)
    group.close()
    assert [call[0] for call in bad.calls] == [1]
    assert [call[0] for call in good.calls[:-1]] == [1, 2, 3, 4]
    assert capsys.readouterr().err == (
        "allranks: warning: tracker Memory failed and gets no more metrics, the training continues: "
        "ConnectionError: the network is gone\n"
    )


def test_a_tracker_that_hangs_does_not_hold_up_the_end(capsys):
    memory = Memory()
    memory.may_go_on.clear()
    tracker = Background(memory, seconds=0.05)
    tracker.call("write", 1, {})
    tracker.close()
    memory.may_go_on.set()
    assert "warning: tracker Memory did not end within 0.05 s" in capsys.readouterr().err


def test_methods_that_a_tracker_lacks_are_not_called():
    steps = []

    class Short:
        def write(self, step, values):
            steps.append(step)

        def close(self):
            steps.append("close")

    tracker = Background(Short())
    tracker.call("config", {"lr": 1})
    tracker.call("resume", 4)
    tracker.call("write", 5, {})
    tracker.close()
    assert steps == [5, "close"]


@pytest.mark.parametrize(
    ("tracker", "what"),
    [
        ("tensorbord", "there is no tracker 'tensorbord'"),
        (5, "a int is not a tracker"),
        (Path("x"), "is not a tracker"),
    ],
)
def test_what_is_no_tracker_is_an_error(tracker, what, tmp_path):
    with pytest.raises(RankError, match=what):
        open_trackers([tracker], RunInfo("x", folder=tmp_path))


def test_a_text_instead_of_a_sequence_is_an_error():
    with pytest.raises(RankError, match="trackers='wandb' is a string"):
        allranks.init(trackers="wandb")


def test_a_tracker_is_closed_with_the_context_although_nothing_was_recorded(run_ranks):
    script = """
import allranks
class Own:
    def write(self, step, values): pass
    def close(self): print("closed")
with allranks.init(trackers=[Own()]) as ctx:
    ctx.metrics
print("after")
"""
    assert run_ranks(script, 1) == [(0, "closed\nafter\n", "")]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_ends_all_ranks(run_ranks, package):
    script = f"""
import sys
from importlib import util
real = util.find_spec
util.find_spec = lambda name, *more: None if name == {package!r} else real(name, *more)
import allranks
allranks.init(trackers=[{package!r}], timeout=100)
"""
    (first, _, err), (second, _, told) = run_ranks(script)
    assert (first, second) == (1, 1)
    line = f'trackers="{package}" needs the package {package}, which is not installed'
    assert f"RankError: {line}" in err
    assert f"fix: pip install {package}" in err
    assert f"RankError: rank 0: {line}" in told


def test_a_file_of_an_earlier_start_is_moved_aside(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    for number in range(3):
        lines = JsonLines(path)
        lines.write(number, {}, 1.0)
        lines.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert [json.loads(file.read_text())["step"] for file in files] == [0, 1, 2]
    assert capsys.readouterr().err.count("was there from an earlier start") == 2


def test_resume_keeps_whole_lines_up_to_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n[]\n{"step": 5}\n{"step": 2')
    path.chmod(0o640)
    lines = JsonLines(path)
    lines.resume(3)
    lines.write(4, {"loss": math.inf}, 1.0)
    lines.close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n{"step": 4, "time": 1.0, "loss": null}\n'
    assert path.stat().st_mode & 0o777 == 0o640


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_file_is_written_once_a_second_at_most(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    written = []
    for step, when in enumerate([10.0, 10.5, 10.999, 11.0, 11.9, 11.1, 9.0]):
        lines.write(step, {"loss": 1.0}, when)
        written.append(len(steps_of(path)))
    assert written == [1, 1, 1, 4, 4, 4, 7]  # at the end the clock was set back
    lines.write(7, {}, 9.5)
    lines.flush()
    assert steps_of(path) == [*range(8)]
    lines.write(8, {}, 9.6)
    lines.close()
    assert steps_of(path) == [*range(9)]


def test_what_waits_is_written_before_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(5):
        lines.write(step, {}, 1.0)
    lines.resume(2)
    assert steps_of(path) == [0, 1, 2]
    lines.close()
    assert steps_of(path) == [0, 1, 2]


def test_a_script_that_closes_nothing_loses_nothing(run_ranks, tmp_path):
    script = """
from pathlib import Path
from allranks.runtime.trackers import JsonLines
lines = JsonLines(Path("FILE"))
for step in range(3):
    lines.write(step, {}, 1.0)
raise ValueError
"""
    path = tmp_path / "metrics.jsonl"
    ((code, _, _),) = run_ranks(script.replace("FILE", str(path)), world_size=1)
    assert code == 1
    assert steps_of(path) == [0, 1, 2]


def test_a_tracker_that_changes_a_record_has_a_copy_of_it(tmp_path):
    class Greedy(Memory):
        def write(self, step, values):
            super().write(step, values.popitem())

    tracker = Greedy()
    group = open_trackers([tracker], RunInfo("x", folder=tmp_path))
    for step in range(2):
        group.write(step, {"loss": 1.0}, 5.0)
    group._others[0].close()
    group.close()
    assert tracker.calls == [(0, ("loss", 1.0)), (1, ("loss", 1.0)), "close"]
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"step": 1, "time": 5.0, "loss": 1.0}


def test_a_folder_that_comes_later_gets_all_lines(tmp_path, capsys):
    path = tmp_path / "folder" / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write(1, {}, 0.0)
    lines.write(2, {}, 0.0)
    path.parent.mkdir()
    lines.write(3, {}, 0.0)
    lines.close()
    assert steps_of(path) == [1, 2, 3]
    err = capsys.readouterr().err
    assert err.count("cannot write") == 1
    assert "No such file or directory; the training continues" in err


def test_a_full_disk_stops_nobody():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    lines = JsonLines(Path("/dev/full"))
    lines._continues = True
    for step in range(3):
        lines.write(step, {"loss": 1.0}, 1.0)
    lines.close()


def test_a_run_gives_name_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ALLRANKS_RUN_ID", "mnist-big-1120-0931-2")
    monkeypatch.setenv("ALLRANKS_RUN_DIR", str(tmp_path))
    assert RunInfo.here() == RunInfo("mnist-big", "mnist-big-1120-0931-2", tmp_path)
    monkeypatch.delenv("ALLRANKS_RUN_ID")
    monkeypatch.delenv("ALLRANKS_RUN_DIR")
    monkeypatch.setattr("sys.argv", ["some/train.py"])
    assert RunInfo.here() == RunInfo("train")


SCRIPT = """
import allranks
with allranks.init(trackers=[NAME], log_every=2) as ctx:
    ctx.metrics.config({"lr": 0.1, "layers": [1, 2]})
    for number in range(1, 6):
        ctx.metrics.start_step()
        ctx.progress.step += 1
        ctx.metrics.log(loss=float(number))
"""


#: Records three steps; the sample of the node, beside the file in which steps are counted, is a new one at two of them.
SAMPLED = """\
import json, os, pathlib, threading
import allranks

steps = pathlib.Path(os.environ["ALLRANKS_STEP_FILE"])
os.environ["ALLRANKS_STEP_FILE"] = str(pathlib.Path("sample", steps.name))
pathlib.Path("sample").mkdir(exist_ok=True)
gpus = [{"busy": 97, "memory": 32, "total": 80}]
with allranks.init(trackers=["tensorboard"]) as ctx:
    for step, when in ((1, 1.0), (2, 1.0), (3, 3.0)):
        if ctx.is_main:
            sample = {"time": when, "cpus": 2.0, "cpus_total": 8, "memory": 4, "memory_total": 8, "gpus": gpus}
            pathlib.Path("sample", "usage.json").write_text(json.dumps(sample))
            ctx.progress.step = step
            ctx.metrics.record(loss=1.0)
            written = threading.Event()  # The thread that writes reads the sample.
            ctx._tracker_group._others[0]._hand_over(written.set)
            written.wait()
"""


def run(run_ranks, folder, name, **variables):
    run_id = "mnist-1120-0931"
    script = SCRIPT.replace("NAME", repr(name))
    results = run_ranks(script, ALLRANKS_RUN_DIR=str(folder), ALLRANKS_RUN_ID=run_id, HOME=str(folder), **variables)
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[1][2] == ""
    return results


@needs("tensorboard")
def test_tensorboard(run_ranks, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(run_ranks, tmp_path, "tensorboard")
    (folder,) = [path for path in tmp_path.iterdir() if path.name == "tensorboard"]
    events = EventAccumulator(str(folder)).Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [(2, 1.5), (4, 3.5), (5, 5.0)]
    assert b'"lr": 0.1' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@needs("tensorboard")
def test_tensorboard_gets_what_the_node_uses_once_a_sample(allranks):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    allranks.script(SAMPLED)
    assert allranks("run", "train.py", "--nproc-per-node", "2").rc == 0
    (folder,) = allranks.folder.glob("runs/latest/tensorboard")
    events = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3]
    for name, value in (("cpu", 25.0), ("memory", 50.0), ("gpu0", 97.0), ("gpu0_memory", 40.0)):
        assert [(point.step, point.value) for point in events.Scalars(f"system/{name}")] == [(1, value), (3, value)]
    assert "system" not in (folder.parent / "metrics.jsonl").read_text()


def test_without_a_sample_there_are_no_system_metrics(tmp_path, monkeypatch):
    monkeypatch.delenv("ALLRANKS_STEP_FILE", raising=False)
    assert SystemMetrics().read() == {}
    monkeypatch.setenv("ALLRANKS_STEP_FILE", str(tmp_path / "rank-0.step"))
    system = SystemMetrics()
    assert system.read() == {}
    (tmp_path / "usage.json").write_text('{"time": 1.0, "cpus"')
    assert system.read() == {}
    (tmp_path / "usage.json").write_text('{"time": 1.0, "cpus": 1, "memory": 2}')
    assert system.read() == {}, "of an agent of an earlier version"


def records_of(data):
    """Read a file of wandb's: a header of 7 bytes, then blocks of 32 KiB with CRC (4), length (2), type (1), record."""
    from wandb.proto import wandb_internal_pb2

    at = 7
    while at + 7 <= min(len(data), 1 << 15):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        assert kind == 1, "a record that goes over the end of a block"
        yield wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length


@needs("wandb")
def test_wandb_offline(run_ranks, tmp_path):
    run(run_ranks, tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-mnist-1120-0931.wandb")
    points, config = [], {}
    for record in records_of(path.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points.append((items["step"], items["loss"]))
        for item in [*record.config.update, *record.run.config.update]:
            config[item.key or item.nested_key[0]] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "run":
            assert record.run.project == "mnist"
    assert points == [(2, 1.5), (4, 3.5), (5, 5.0)]
    assert config["lr"] == 0.1


@needs("wandb")
def test_wandb_without_a_login_is_an_error_before_the_training(run_ranks, tmp_path):
    variables = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    results = run_ranks(SCRIPT.replace("NAME", "'wandb'"), **variables, ALLRANKS_RUN_DIR=str(tmp_path))
    assert [code for code, _, _ in results] == [1, 1]
    assert "RankError: rank 0: wandb cannot start" in results[1][2]
    assert "WANDB_MODE=offline" in results[0][2]


@needs("mlflow")
def test_mlflow_in_the_folder_of_the_run_and_continued(run_ranks, tmp_path):
    for _ in range(2):
        run(run_ranks, tmp_path, "mlflow", MLFLOW_TRACKING_URI="")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        points = database.execute("select step, value, run_uuid from metrics where key = 'loss' order by rowid")
        rows = points.fetchall()
        statuses = database.execute("select status from runs").fetchall()
        parameters = dict(database.execute("select key, value from params").fetchall())
    assert [row[:2] for row in rows] == [(2, 1.5), (4, 3.5), (5, 5.0)] * 2
    assert len({row[2] for row in rows}) == 1
    assert statuses == [("FINISHED",)]
    assert parameters == {"lr": "0.1", "layers": "[1, 2]"}
