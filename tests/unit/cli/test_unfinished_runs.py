"""Runs that have not ended: cancel, top and stacks take them where none is named, and logs may have nothing yet."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allranks import contract
from allranks.cli import cancel, logs, render, runs
from allranks.clusters.local_agent import identify
from allranks.errors import UsageError
from allranks.record.files import write_json
from allranks.runs.record import Record, Run, load
from allranks.runs.status import State, Status

Adder = Callable[..., Run]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adder]:
    """Give a function that records a run, newer than those before it; going on, or with its last state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALLRANKS_RUNS_FOLDER", raising=False)
    agents: list[subprocess.Popen[bytes]] = []

    def add(name: str, state: State = State.PENDING, *, host: str = socket.gethostname()) -> Run:
        folder = tmp_path / "runs" / name
        (folder / contract.node_dir(0, 0)).mkdir(parents=True)
        sizes = {"world_size": 1, "nnodes": 1, "stop_timeout": 1.0, "file_mode": 0o600, "created": 0.0}
        run = Run(folder, Record(id=name, name=name, cluster="local", kind="local", host=host, **sizes))
        write_json(folder / contract.PLAN_FILE, {}, 0o600)
        os.utime(folder / contract.PLAN_FILE, (len(list(folder.parent.iterdir())),) * 2)
        if state.is_final or host != socket.gethostname():
            return run.with_status(Status(state))
        environ = {**os.environ, contract.RUN_DIR: str(folder)}
        agents.append(subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True))
        return run.with_handle(identify(agents[-1].pid), Status(state))

    yield add
    for agent in agents:
        agent.kill()
        agent.wait()


def test_the_newest_that_has_not_ended_is_taken(add: Adder) -> None:
    add("first", State.FAILED)
    going = add("second")
    newest = add("third", State.CANCELLED)
    assert runs.find_unfinished(None, None).record.id == "second"
    assert runs.find_unfinished(None, "fir").record.id == "first"
    going.with_status(Status(State.SUCCEEDED))
    assert runs.find_unfinished(None, None).record.id == newest.record.id


def test_cancel_takes_the_only_one_and_refuses_to_choose(add: Adder) -> None:
    add("far", host="a-machine-that-is-gone")  # Its status is unknown: it does not stand in the way.
    first = add("first")
    second = add("second")
    add("ended", State.FAILED)
    with pytest.raises(UsageError) as refused:
        cancel.command.main([], standalone_mode=False)
    said = ("2 runs have not ended: second, first", "allranks cancel second")
    assert (refused.value.what, refused.value.fix) == said
    assert [run.record.id for run in runs.unfinished(None)] == ["second", "first", "far"]  # Nothing was cancelled.
    second.with_status(Status(State.SUCCEEDED))
    assert cancel.command.main([], standalone_mode=False) == 0
    assert load(first.folder).record.status.state is State.CANCELLED
    assert [run.record.id for run in runs.unfinished(None)] == ["far"]


def test_logs_of_a_run_that_has_printed_nothing_yet(add: Adder, capfd: pytest.CaptureFixture[str]) -> None:
    log = add("quiet").node_folder(0) / contract.rank_log(0, "err")
    for text, said in (("", "allranks: note: quiet has printed nothing yet\n"), ("up\n", "[0] up\n")):
        log.write_text(text)
        assert logs.command.main([], standalone_mode=False) == 0
        render.flush()
        assert capfd.readouterr() == ("", said)
