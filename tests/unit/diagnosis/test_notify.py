"""Notifications: what is sent, by which way, and what is said of one that cannot be sent."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis.notify import completed, deliver, text_of
from allranks.record.notify import Notifier
from waiting import PATIENCE, wait_for

EVENT = {"event": "end", "run": "train-1", "state": "SUCCEEDED", "seconds": 61.4, "attempt": 1, "host": "n1"}


@dataclass
class Hook:
    """A webhook of this machine, which answers with one status.

    Attributes:
        url: its address; the path holds what must stand nowhere.
        got: the events that it was sent, in this order.
        may_answer: is set unless it keeps its clients waiting.
    """

    url: str
    got: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[str]:
        return [each["event"] for each in self.got]


@contextmanager
def hook(status: int = 200) -> Iterator[Hook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.paths.append(self.path)
            found.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            assert found.may_answer.wait(PATIENCE)
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Hook(f"http://127.0.0.1:{server.server_port}/services/tell-nobody")
    found.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        found.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_command_gets_the_event_on_stdin_and_in_variables(tmp_path):
    program = (
        "import json, os, sys; json.dump([json.load(sys.stdin), {name: value for name, value in os.environ.items()"
        f" if name.startswith('ALLRANKS_NOTIFY')}}], open({str(tmp_path / 'got')!r}, 'w'))"
    )
    event = {**EVENT, "text": "a\nb"}
    assert [*deliver(event, [sys.executable, "-c", program], None, PATIENCE)] == []
    got, variables = json.loads((tmp_path / "got").read_text())
    assert got == event
    assert variables == {
        "ALLRANKS_NOTIFY_EVENT": "end",
        "ALLRANKS_NOTIFY_RUN": "train-1",
        "ALLRANKS_NOTIFY_STATE": "SUCCEEDED",
        "ALLRANKS_NOTIFY_TEXT": "a\nb",
    }


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/bin/sh", "-c", "exit 3"], "the command exit 3 exited with code 3"),
        (["no-such-program", "x"], "the command no-such-program x cannot be run: No such file or directory"),
    ],
)
def test_a_command_that_fails_is_named(command, problem):
    assert [*deliver({**EVENT, "text": ""}, command, None, PATIENCE)] == [problem]


def test_a_command_that_hangs_is_killed():
    problem = "the command sleep 600 took longer than 0.2 s, and was killed"
    assert [*deliver({**EVENT, "text": ""}, ["sleep", "600"], None, 0.2)] == [problem]


@pytest.mark.parametrize("status", [302, 307, 404, 500])
def test_a_webhook_that_refuses_is_named_without_its_secret_and_no_redirect_is_followed(status):
    with hook(status) as there:
        problems = [*deliver({**EVENT, "text": ""}, [], there.url, PATIENCE)]
    assert problems == [f"the webhook at 127.0.0.1 answered with status {status}"]
    assert there.paths == ["/services/tell-nobody"]


def test_a_webhook_that_is_not_there_or_does_not_answer():
    with hook() as there:
        there.may_answer.clear()
        silent = [*deliver({**EVENT, "text": ""}, [], there.url, 0.3)]
    (problem,) = silent
    assert problem in (
        "the webhook at 127.0.0.1 did not answer within 0.3 s",
        "the webhook at 127.0.0.1 cannot be reached: timed out",
    )
    gone = [*deliver({**EVENT, "text": ""}, [], there.url, PATIENCE)]
    assert gone == ["the webhook at 127.0.0.1 cannot be reached: Connection refused"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "train-1 succeeded after 0:01:01"),
        ({"event": "start"}, "train-1 started: attempt 1, first node n1"),
        ({"state": "CANCELLED", "reason": "got SIGINT"}, "train-1 was cancelled after 0:01:01: got SIGINT"),
        ({"state": "PREEMPTED"}, "train-1 stopped after 0:01:01, and can be resumed"),
        ({"event": "requeue", "reason": "n2 was lost"}, "train-1: another attempt follows attempt 1: n2 was lost"),
        ({"event": "requeue", "restart": 2}, "train-1: all ranks restart (restart 2)"),
        (
            {
                "event": "failure",
                "reason": "rank 0 failed",
                "verdict": {"cause": "no file", "evidence": "OSError: a", "fix": "make it\nnow"},
            },
            "train-1 failed after 0:01:01: rank 0 failed\nno file\nOSError: a\nfix: make it now",
        ),
        ({"event": "failure", "verdict": None}, "train-1 failed after 0:01:01"),
    ],
)
def test_the_text_for_people(changes, text):
    assert text_of({**EVENT, **changes}) == text


def test_an_end_has_the_reason_that_the_agent_has_recorded(tmp_path):
    node = tmp_path / "node-000"
    node.mkdir()
    end = {"time": 1.0, "host": "n1", "kind": "ended", "state": "CANCELLED", "reason": "got SIGTERM"}
    (node / "agent.jsonl").write_text(json.dumps(end) + "\n")
    found = completed({**EVENT, "state": "CANCELLED"}, tmp_path)
    assert (found["reason"], found["verdict"]) == ("got SIGTERM", None)


def _job(allranks: Any, script: str, more: str = "") -> Path:
    allranks.script(script)
    return allranks.job(f"script: train.py\nlaunch: {{nproc_per_node: 1, max_restarts: 1}}\nnotify:\n{more}")


FAILS = 'open("no-such-file")\n'


def test_a_run_that_succeeds_notifies_of_its_start_and_end_once_by_both_ways(allranks, tmp_path):
    _job(allranks, "print('hi')\n", "  on: start, failure, requeue, end\n  command: cat >> got; echo >> got\n")
    with hook() as there:
        assert allranks("run", ALLRANKS_NOTIFY_WEBHOOK=there.url).rc == 0
    assert there.events == ["start", "end"]
    run = allranks.run()
    end = there.got[1]
    assert (end["run"], end["state"], end["exit_code"], end["attempt"]) == (run.name, "SUCCEEDED", 0, 1)
    assert end["text"].startswith(f"{run.name} succeeded after ")
    assert [json.loads(line)["event"] for line in (allranks.folder / "got").read_text().splitlines()] == [
        "start",
        "end",
    ]


def test_the_fix_of_an_exception_names_the_line_of_the_script(allranks):
    _job(allranks, "raise KeyError('weights')\n", "  command: cat > got\n")
    assert allranks("run").rc == 1
    text = json.loads((allranks.folder / "got").read_text())["text"]
    fix = f"fix: correct train.py:1, then: allranks resume {allranks.run().name}"
    assert text.splitlines()[1:] == ["the script raised KeyError (train.py:1)", "KeyError: 'weights'", fix]


def test_a_failure_has_the_verdict_a_restart_comes_before_it_and_no_file_holds_the_url(allranks):
    with hook(500) as there:
        _job(allranks, FAILS, f"  webhook: {there.url}\n")
        result = allranks("run")
        plan = allranks("plan", "-v")
        sources = allranks("plan", "--sources")
    assert result.rc == 1
    assert there.events == ["requeue", "failure"]
    run = allranks.run().name
    assert there.got[0]["text"] == f"{run}: all ranks restart (restart 1): rank 0 failed"
    first, cause, line, fix = there.got[1]["text"].splitlines()
    assert first.startswith(f"{run} failed after ")
    assert first.endswith(": rank 0 exited with code 1")
    assert cause == "a file is not there (train.py:1)"
    assert line.startswith("FileNotFoundError: [Errno 2] No such file or directory: ")
    assert fix.startswith("fix: correct the path")
    for event in there.events:
        why = "the webhook at 127.0.0.1 answered with status 500"
        assert f"allranks: {run}: note: notification of the {event} failed: {why}\n" in result.stderr
    written = [path.read_bytes() for path in allranks.run().rglob("*") if path.is_file()]
    said = [result.out, result.err, plan.out, sources.out]
    assert not [text for text in (*written, *said) if b"tell-nobody" in text]


def test_only_the_events_that_are_wanted_and_a_failure_is_an_end(allranks):
    _job(allranks, FAILS, "  on: [end]\n")
    with hook() as there:
        assert allranks("run", ALLRANKS_NOTIFY_WEBHOOK=there.url).rc == 1
    assert there.events == ["failure"]


def test_a_resumed_run_notifies_again_if_the_url_is_there(allranks):
    with hook() as there:
        _job(allranks, FAILS, f"  webhook: {there.url}\n  on: [failure]\n")
        assert allranks("run").rc == 1
        assert allranks("resume", ALLRANKS_NOTIFY_WEBHOOK=there.url).rc == 1
        without = allranks("resume")
    assert [event["attempt"] for event in there.got] == [1, 2]
    assert without.rc == 1
    assert "ALLRANKS_NOTIFY_WEBHOOK is not set where the run was started" in without.stderr


def test_the_command_notifies_of_a_run_whose_agent_cannot(allranks):
    _job(
        allranks,
        "import os, signal\nfor pid in (os.getppid(), int(open(f'/proc/{os.getppid()}/stat').read().split()[3])):\n"
        "    os.kill(pid, signal.SIGKILL)\n",
        "",
    )
    allranks.job(allranks.folder.joinpath("job.yaml").read_text().replace("notify:\n", "notify: {on: [end]}\n"))
    with hook() as there:
        assert allranks("run", ALLRANKS_NOTIFY_WEBHOOK=there.url).rc != 0
    assert there.events == ["failure"]
    assert there.got[0]["state"] == "FAILED"


def test_a_run_ends_before_what_does_not_answer_which_still_gets_its_event(allranks):
    _job(allranks, "print('hi')\n", "  command: cat over >/dev/null; cat >got\n")
    os.mkfifo(allranks.folder / "over")
    with hook() as there:
        there.may_answer.clear()
        result = allranks("run", ALLRANKS_NOTIFY_WEBHOOK=there.url)
        os.close(os.open(allranks.folder / "over", os.O_WRONLY | os.O_NONBLOCK))  # An error: the command was killed.
        (event,) = wait_for("the webhook", lambda: there.got)
        got = allranks.folder / "got"
        wait_for("the command", lambda: got.exists() and got.read_text().endswith("}"))
    assert result.rc == 0
    why = "not confirmed within 3 s; allranks tries for 7 s more"
    assert f"allranks: {allranks.run().name}: note: notification of the end failed: {why}\n" in result.stderr
    assert json.loads(got.read_text()) == event


def test_the_command_has_the_users_umask(allranks):
    _job(allranks, "print('hi')\n", "  command: umask >mask\n")
    before = os.umask(0o027)
    try:
        assert allranks("run").rc == 0
    finally:
        os.umask(before)
    assert (allranks.folder / "mask").read_text() == "0027\n"


def test_a_url_that_is_none_is_not_shown():
    problem = "the webhook at None cannot be reached: ValueError"
    assert [*deliver({**EVENT, "text": ""}, [], "hooks.example/services/tell-nobody", PATIENCE)] == [problem]


def test_a_text_that_cannot_be_in_a_variable(tmp_path):
    event = {**EVENT, "text": "half a character: \ud800, and \0"}
    command = ["/bin/sh", "-c", f'printf %s "$ALLRANKS_NOTIFY_TEXT" >{tmp_path}/got']
    assert [*deliver(event, command, None, PATIENCE)] == []
    assert (tmp_path / "got").read_text() == "half a character: ?, and "


def test_what_was_sent_long_ago_is_not_reported_as_failed(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__main__.py").write_text("")
    (tmp_path / "notify.json").write_text('{"on": ["start", "requeue"]}')
    notifier = Notifier(tmp_path, 0)
    notifier.send("start", state="RUNNING")
    ((event, _, process),) = notifier._sending
    process.wait()
    notifier._sending = [(event, 0.0, process)]
    notifier.send("requeue", state="RUNNING", restart=1)
    assert [event for event, _, _ in notifier._sending] == ["requeue"]
    assert notifier.finish() == []
