"""No connection to the coordinator's port can end a run, whatever is sent; nor can an agent that sends nonsense."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meetings import Agent, Meeting, orders

from allranks.agent.nodes import coordinator as coordinator_module

NUMBERS = st.integers(-3, 4) | st.integers()
ANY_JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FLAGS = st.booleans()
SENT = {"sent": st.floats(allow_nan=False, allow_infinity=False)}
#: What an agent may say, with any values of the right types.
OURS = st.one_of(
    st.fixed_dictionaries({"kind": st.just("ready"), **SENT}),
    st.fixed_dictionaries({"kind": st.just("failed"), **SENT, "rank": NUMBERS, "code": NUMBERS, "at": SENT["sent"]}),
    st.fixed_dictionaries({"kind": st.just("over"), **SENT, "cut": FLAGS, "continue": FLAGS}),
    st.fixed_dictionaries({"kind": st.just("leaving"), **SENT, "why": st.text()}),
    st.fixed_dictionaries({"kind": st.just("stop"), **SENT, "signal": NUMBERS, "by": st.text()}),
    st.fixed_dictionaries(
        {
            "kind": st.just("hello"),
            **SENT,
            "attempt": st.integers(1, 3),
            "node": st.integers(-1, 4),
            "host": st.text(),
            "ranks": NUMBERS,
            "torch": st.none() | st.text(),
        }
    ),
)
UNUSUAL = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def told(monkeypatch):
    """Give what the agent's log is told."""
    lines = []
    monkeypatch.setattr(coordinator_module, "complain", lines.append)
    return lines


@UNUSUAL
@given(st.lists(st.binary(max_size=5000) | ANY_JSON.map(lambda value: json.dumps(value).encode()), max_size=6))
def test_whatever_a_stranger_says_the_run_ends_well(said):
    meeting = Meeting(orders(2))
    first, second = meeting.ready(0, 1)
    with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
        for line in said:
            meeting.coordinator.tick()
            with suppress(OSError):
                stranger.sendall(line + b"\n")
        assert len(first.hear("generation")["nodes"]) == 2
        for agent in (first, second):
            agent.say("over", cut=False, **{"continue": False})
        assert first.hear("outcome")["state"] == "SUCCEEDED"
    meeting.close()


@UNUSUAL
@given(st.lists(st.tuples(st.integers(0, 2), OURS | ANY_JSON), max_size=12), FLAGS)
def test_whatever_agents_say_in_any_order_the_hub_goes_on(said, joined):
    """They know the key: each line is signed for its place. Nothing that they say may raise in node 0's agent."""
    meeting = Meeting(orders(3, min_nodes=1, max_restarts=2))
    agents = meeting.ready(0, 1) if joined else [Agent(meeting), Agent(meeting)]
    agents.append(Agent(meeting))
    for number, message in said:
        agents[number].channel._waiting.append(json.dumps(message).encode())
        agents[number].channel.flush()
        meeting.coordinator.tick()
    meeting.coordinator.tick()
    meeting.close()


def test_strangers_are_closed_and_noted_once_and_counted(told):
    meeting = Meeting(orders(2))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.sendall(b'{"kind":"hello","sent":1.0}\n')
            greeting = b""
            stranger.settimeout(0.01)
            while True:
                meeting.coordinator.tick()
                with suppress(TimeoutError):
                    if not (more := stranger.recv(100)):
                        break
                    greeting += more
            assert len(greeting) == len(b"allranks 1 \n") + 32  # It is told nothing else.
    meeting.close()
    assert told == [
        "note: closed a connection from 127.0.0.1: it did not send a message of an agent; others are only counted",
        "note: 3 connections that did not know the run's key were closed",
    ]


def test_who_only_looks_whether_the_port_is_open_is_no_stranger(told):
    meeting = Meeting(orders(2))
    socket.create_connection(("127.0.0.1", meeting.port)).close()
    (first,) = meeting.ready(0)
    first.hear("welcome")
    meeting.close()
    assert told == []


def test_an_agent_with_another_key_is_not_let_in(told):
    meeting = Meeting(orders(2))
    other = Agent(meeting, key=bytes(32))
    other.say("hello", attempt=2, node=1, host="b", ranks=1, torch=None)
    other.wait("the end", lambda: other.channel.lost)
    assert (other.heard, other.channel.lost) == ([], "its agent is gone")
    meeting.close()
    assert told == ["note: closed a connection from 127.0.0.1: it does not know the run's key; others are only counted"]


def test_a_stranger_who_says_nothing_does_not_keep_its_place(told, monkeypatch):
    meeting = Meeting(orders(2))
    silent = Agent(meeting)
    monkeypatch.setattr(coordinator_module, "_PROOF_SECONDS", 0.0)
    silent.wait("the end", lambda: silent.channel.lost)
    meeting.close()
    assert told == [
        "note: closed a connection from 127.0.0.1: it did not identify itself within 0 s; others are only counted"
    ]


def test_of_too_many_strangers_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(coordinator_module, "_MOST_UNAUTHENTICATED", 2)
    meeting = Meeting(orders(2))
    strangers = [Agent(meeting) for _ in range(3)]
    strangers[0].wait("the end", lambda: strangers[0].channel.lost)
    assert [one.channel.lost for one in strangers[1:]] == [None, None]
    (first,) = meeting.ready(0)
    first.hear("welcome")
    meeting.close()
