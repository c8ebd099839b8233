"""A connection between two agents: what the kernel is told of it, and that both sides prove the run's key."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.agent.hangs import merged
from allranks.agent.nodes.channel import Channel, parsed

#: The probes that may be in vain, and the milliseconds that something sent may wait for an answer.
OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
KEY, OTHER = bytes(32), bytes(range(32))
READY = {"kind": "ready", "sent": 1.0}
SOCKETS = ExitStack()
NO_MESSAGE, NO_KEY = "it did not send a message of an agent", "it does not know the run's key"


@pytest.mark.parametrize(("patient", "options"), [(True, [1, 1, 30, 30_000]), (False, [1, 1, 5, 5_000])])
def test_a_machine_is_asked_each_second_and_given_up_after_the_real_wait(patient: bool, options: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        channel = Channel(ours, KEY, is_coordinator=True, patient=patient)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in OPTIONS] == options
        channel.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close all sockets of a test."""
    with SOCKETS:
        yield


def connection() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    return SOCKETS.enter_context(ours), SOCKETS.enter_context(theirs)


def pair(key: bytes = KEY, other: bytes = KEY) -> tuple[Channel, Channel]:
    """Return the ends of a coordinator and of a node, which have greeted each other."""
    ours, theirs = connection()
    coordinator = Channel(ours, key, is_coordinator=True, patient=True)
    node = Channel(theirs, other, is_coordinator=False, patient=True)
    assert (coordinator.receive(), node.receive()) == ([], [])
    return coordinator, node


def tapped() -> tuple[Channel, socket.socket, list[bytes]]:
    """Return the coordinator's end, the other end as who is in between has it, and the lines that a node sends."""
    ours, theirs = connection()
    coordinator = Channel(ours, KEY, is_coordinator=True, patient=True)
    near, far = connection()
    node = Channel(near, KEY, is_coordinator=False, patient=True)
    far.sendall(theirs.recv(4096))
    node.receive()
    for signal in (1, 2):
        node.send("stop", signal=signal, by="us")
    lines = far.recv(4096).splitlines(keepends=True)
    theirs.sendall(lines.pop(0))
    return coordinator, theirs, lines


def test_both_sides_hear_each_other_in_order() -> None:
    coordinator, node = pair()
    for number in (1, 2, 15):
        node.send("stop", signal=number, by="us")
        coordinator.send("refused", why=str(number))
    assert [message["signal"] for message in coordinator.receive()] == [1, 2, 15]
    assert [message["why"] for message in node.receive()] == ["1", "2", "15"]
    for end in (coordinator, node):
        assert (end.is_authenticated, end.lost) == (True, None)


def test_nothing_is_said_before_the_other_side_has_greeted() -> None:
    ours, theirs = connection()
    channel = Channel(ours, KEY, is_coordinator=False, patient=True)
    channel.send("leaving", why="secret")
    assert re.fullmatch(rb"allranks 1 [0-9a-f]{32}\n", theirs.recv(4096))
    channel.close()


def test_another_key_is_noticed_on_both_sides() -> None:
    coordinator, node = pair(KEY, OTHER)
    node.send("ready")
    coordinator.send("end-ranks")
    assert (coordinator.receive(), coordinator.lost, coordinator.is_authenticated) == ([], NO_KEY, False)
    assert (node.receive(), node.lost, node.is_authenticated) == ([], NO_KEY, False)


def test_a_line_counts_once_and_in_its_place() -> None:
    for order, heard in (([0, 1], [1, 2]), ([1, 0], []), ([0, 0], [1]), ([1], [])):
        coordinator, between, lines = tapped()
        between.sendall(b"".join(lines[number] for number in order))
        assert [message["signal"] for message in coordinator.receive()] == heard
        assert coordinator.lost == (None if heard == [1, 2] else NO_MESSAGE if heard else NO_KEY)


def test_an_altered_line_ends_the_connection() -> None:
    coordinator, between, lines = tapped()
    between.sendall(lines[0].replace(b'"signal": 1', b'"signal": 9'))
    assert (coordinator.receive(), coordinator.lost) == ([], NO_KEY)


def test_lines_of_another_connection_or_direction_are_none_of_this_one() -> None:
    _, _, lines = tapped()
    coordinator, node = pair()
    coordinator.send("refused", why="")
    said = node._connection.recv(4096)
    node._connection.sendall(said)  # What the coordinator has said, sent back to it.
    assert (coordinator.receive(), coordinator.lost) == ([], NO_KEY)
    coordinator, node = pair()
    node._connection.sendall(lines[0])
    assert (coordinator.receive(), coordinator.lost) == ([], NO_KEY)


@pytest.mark.parametrize("first", [b"x" * 4097, b"x\n", b"allranks 1 " + b"0" * 31 + b"\n", b"allranks 2 " + b"0" * 32])
def test_what_does_not_greet_is_no_agent(first: bytes) -> None:
    ours, theirs = connection()
    channel = Channel(ours, KEY, is_coordinator=True, patient=True)
    theirs.sendall(first + b"\n")
    assert (channel.receive(), channel.lost) == ([], NO_MESSAGE)


def test_who_has_proven_nothing_is_read_no_further_than_a_few_lines() -> None:
    coordinator, node = pair()
    node._connection.setblocking(True)
    node._connection.sendall(b"x" * 4097)
    assert (coordinator.receive(), coordinator.lost) == ([], NO_MESSAGE)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "unknown"}, {"kind": ["ready"]}, {"kind": None}, {"sent": 1}, {"sent": None}, {"sent": float("nan")},
        {"sent": float("inf")}, {"more": 1},
    ],
)  # fmt: skip
def test_a_message_with_another_field_or_type_is_none(change: dict[str, object]) -> None:
    assert parsed(json.dumps(READY).encode()) == READY
    assert parsed(json.dumps({**READY, **change}).encode()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"node": -5}, {"node": True}, {"node": 1.0}, {"node": "1"}, {"node": 1 << 63}, {"ranks": -1}, {"host": 1},
        {"torch": 2}, {"attempt": None},
    ],
)  # fmt: skip
def test_who_says_hello_says_each_field_as_it_is(change: dict[str, object]) -> None:
    hello = {"kind": "hello", "sent": 1.0, "attempt": 0, "node": 1, "host": "a", "ranks": 2, "torch": None}
    assert parsed(json.dumps(hello).encode()) == hello
    assert parsed(json.dumps({**hello, **change}).encode()) is None
    for field in hello:
        assert parsed(json.dumps({name: value for name, value in hello.items() if name != field}).encode()) is None


@given(
    st.binary() | st.recursive(st.none(), lambda inner: st.lists(inner)).map(lambda value: json.dumps(value).encode())
)
def test_no_line_is_a_message_by_chance(line: bytes) -> None:
    assert parsed(line) is None


@pytest.mark.parametrize("line", [b"[" * 100_000, b"9" * 100_000, b'{"kind": "ready", "sent": 1' + b"0" * 400 + b".0}"])
def test_a_line_made_to_cost_time_is_none(line: bytes) -> None:
    assert parsed(line) is None


def test_reports_of_ranks_that_do_not_advance():
    collective = {"name": "all_reduce", "number": 12, "bytes": 1 << 20, "group": "0"}
    group = {"ranks": [0], "frames": [["/me/train.py", 88, "main"]], "stack": "shown", "state": "", "collective": None}
    quiet = {"since": 1.0, "moving": False, "groups": [group], "left": []}
    message = {"kind": "quiet", "sent": 2.0, "quiet": quiet}
    assert parsed(json.dumps(message).encode()) == message
    assert parsed(json.dumps({**message, "quiet": None}).encode()) == {**message, "quiet": None}
    waits = {**message, "quiet": {**quiet, "groups": [{**group, "collective": collective}]}}
    assert parsed(json.dumps(waits).encode()) == waits
    for wrong in (
        {**group, "frames": [["/me/train.py", "88", "main"]]},
        {**group, "collective": {**collective, "number": "12"}},
        {**group, "more": 1},
        "group",
    ):
        assert parsed(json.dumps({**message, "quiet": {**quiet, "groups": [wrong]}}).encode()) is None


def test_ranks_that_all_stand_elsewhere_fit_into_a_message():
    deep = [["/" + "x" * 200, number, "f" * 60] for number in range(40)]
    groups = [
        {
            "ranks": [rank],
            "frames": [["/t.py", rank, "f"], *deep],
            "stack": "shown",
            "state": "",
            "collective": {"name": "reduce_scatter_tensor", "number": rank, "bytes": 1 << 30, "group": "0"},
        }
        for rank in range(4096)
    ]
    found = merged(groups)
    assert len(found) == 33
    assert sorted(rank for group in found for rank in group["ranks"]) == [*range(4096)]
    assert len(json.dumps(found)) < 1 << 20
