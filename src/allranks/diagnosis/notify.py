"""``python <run>/code --notify ATTEMPT``: sends the event on stdin, by all ways that the run's job asks for.

What cannot be sent is a line on stdout, for the agent or supervisor that has started this. No line holds the URL of a
webhook, which is a secret: only its host.

A child sends: the end of a run does not wait for a dead server, and a slow one still gets its event.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from allranks import contract
from allranks.diagnosis.__main__ import diagnose
from allranks.record.events import read_events

#: How long each way may take, and how long the verdict, which reads the logs of all ranks.
_SECONDS, _VERDICT_SECONDS = 10.0, 30.0
#: How long a run waits for that, unless what goes on after it would be killed: a scheduler ends all of a job at once.
_PATIENCE = 3.0
#: A command that is killed has ended within so many seconds more, also on a busy machine.
_END_SECONDS = 5.0
_LONGEST = 500
_Found = TypeVar("_Found")


def main(argv: Sequence[str]) -> NoReturn:
    """Send the event on stdin about the attempt in the directory ``argv[0]``, and print what could not be sent."""
    attempt = Path(argv[0])
    run = attempt.parents[1]
    settings = json.loads((run / contract.NOTIFY_FILE).read_text(encoding="utf-8"))
    event = completed(json.load(sys.stdin), attempt)
    reads, writes = os.pipe()
    sender = os.fork()
    if not sender:
        os.dup2(writes, 1)  # It can write there when nothing reads any more: it has the other end too.
        _send(event, settings)
    os.close(writes)
    deadline = time.monotonic() + _PATIENCE
    is_job = (run / contract.BATCH_SPEC).exists()
    while select.select([reads], [], [], None if is_job else max(0.0, deadline - time.monotonic()))[0]:
        if not (problems := os.read(reads, 65536)):
            os._exit(os.waitstatus_to_exitcode(os.waitpid(sender, 0)[1]))
        os.write(1, problems)
    print(f"not confirmed within {_PATIENCE:g} s; allranks tries for {_SECONDS - _PATIENCE:g} s more", flush=True)
    os._exit(0)


def _send(event: Mapping[str, Any], settings: Mapping[str, Any]) -> NoReturn:
    """Send an event by all ways, and print what could not be sent."""
    url = os.environ.get(contract.NOTIFY_WEBHOOK) if settings["webhook"] else None
    if settings["webhook"] and not url:
        print(f"{contract.NOTIFY_WEBHOOK} is not set where the run was started", flush=True)
    elif url and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname):
        url = None
        print(f"{contract.NOTIFY_WEBHOOK} is no URL that starts with http:// or https://", flush=True)
    for problem in deliver(event, settings["command"], url, _SECONDS):
        print(problem, flush=True)
    os._exit(0)  # A thread may still wait for a dead server.


def completed(event: Mapping[str, Any], attempt: Path) -> dict[str, Any]:
    """Return an event with its verdict, if it is a failure, and with a text for people."""
    verdict = None
    if event["event"] == "failure" and event["state"] == "FAILED":  # The others explain themselves.
        verdict = _started(lambda: diagnose(attempt))(_VERDICT_SECONDS)
    reason = event.get("reason") or _reason(attempt, event["event"])
    facts = None
    if verdict:
        place = f" ({verdict.place})" if verdict.place else ""
        fix = verdict.fix_for("allranks resume RUN").replace("RUN", event["run"])
        line = verdict.evidence[0].text.strip() if verdict.evidence else ""
        facts = {"cause": f"{verdict.cause}{place}", "evidence": line, "sure": verdict.sure, "fix": fix}
    found = {**event, "reason": reason, "verdict": facts}
    return {**found, "text": text_of(found)}


def _reason(attempt: Path, event: str) -> str | None:
    """Return why an attempt ended, as its agent has recorded it."""
    events = [] if event == "start" else [*read_events(attempt / "node-000" / contract.AGENT_EVENTS)]
    ends = [each.fields.get("reason") for each in events if each.kind == contract.ENDED]
    return ends[-1] if ends else None


def text_of(event: Mapping[str, Any]) -> str:
    """Return what an event says to people; of a failure, also the cause, the line that shows it, and the fix."""
    run, state, reason = event["run"], event["state"], event.get("reason")
    why = f": {reason}" if reason else ""
    took = timedelta(seconds=round(event["seconds"]))
    match event["event"]:
        case "start":
            return f"{run} started: attempt {event['attempt']}, first node {event['host']}"
        case "requeue" if "restart" in event:
            return f"{run}: all ranks restart (restart {event['restart']}){why}"
        case "requeue":
            return f"{run}: another attempt follows attempt {event['attempt']}{why}"
        case "failure":
            head = f"{run} failed after {took}{why}"
            verdict = event["verdict"] or {}
            fix = verdict.get("fix") and f"fix: {verdict['fix']}"
            lines = dict.fromkeys([verdict.get("cause"), verdict.get("evidence"), fix])
            return "\n".join([head, *(" ".join(line.split())[:_LONGEST] for line in lines if line)])
    word = {"SUCCEEDED": "succeeded", "CANCELLED": "was cancelled", "PREEMPTED": "stopped"}
    why = {"SUCCEEDED": "", "PREEMPTED": ", and can be resumed"}.get(state, why)
    return f"{run} {word.get(state, f'ended ({state})')} after {took}{why}"


def deliver(event: Mapping[str, Any], command: Sequence[str], url: str | None, seconds: float) -> Iterator[str]:
    """Send an event by all ways at the same time; yield what fails, or takes longer than so many seconds."""
    data = json.dumps(event).encode()
    ran = _started(lambda: _run(command, event, data, seconds)) if command else None
    posted = _started(lambda: _post(url, data, seconds)) if url else None
    if ran and (problem := ran(seconds + _END_SECONDS)) != "":
        yield f"the command {_shown(command)} {problem or 'could not be run'}"
    if posted and url and (problem := posted(seconds)) != "":
        yield f"the webhook at {urlsplit(url).hostname} {problem or f'did not answer within {seconds:g} s'}"


def _shown(command: Sequence[str]) -> str:
    is_line = len(command) == 3 and [*command[:2]] == ["/bin/sh", "-c"]
    return " ".join((command[2] if is_line else shlex.join(command)).split())[:60]


def _run(command: Sequence[str], event: Mapping[str, Any], data: bytes, seconds: float) -> str:
    """Run a command with an event on stdin and in variables; return what went wrong."""
    variables = {
        # A NUL, or half a character, cannot be in a variable.
        f"ALLRANKS_NOTIFY_{name.upper()}": str(event[name]).replace("\0", "").encode(errors="replace").decode()
        for name in ("event", "run", "state", "text")
    }
    environ = {name: value for name, value in os.environ.items() if name != contract.NOTIFY_WEBHOOK}
    try:
        process = subprocess.Popen(
            command, env={**environ, **variables}, stdin=subprocess.PIPE, stdout=2, start_new_session=True
        )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    try:
        process.communicate(data, timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"took longer than {seconds:g} s, and was killed"
    return f"exited with code {process.returncode}" if process.returncode else ""


def _post(url: str, data: bytes, seconds: float) -> str:
    """Post JSON to a URL; return what went wrong, without any part of the URL."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Follow none: another server need not know what is sent."""

    try:
        request = Request(url, data, {"Content-Type": "application/json", "User-Agent": "allranks"})
        build_opener(NoRedirect).open(request, timeout=seconds).close()
    except HTTPError as error:
        error.close()
        return f"answered with status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # Of a connection that could not be made.
        said = type(error).__name__  # Its text may hold the URL.
        if isinstance(error, OSError):
            said = getattr(cause, "strerror", None) or str(cause)
        return f"cannot be reached: {said}"
    return ""


def _started(action: Callable[[], _Found]) -> Callable[[float], _Found | None]:
    """Start an action in a thread; return what waits for it, and returns None if it raises or takes longer."""
    found: list[_Found] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()

    def wait(seconds: float) -> _Found | None:
        thread.join(seconds)
        return found[0] if found else None

    return wait
