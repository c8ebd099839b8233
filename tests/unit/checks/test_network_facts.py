"""Nodes are processes here, which meet over real sockets: each runs the program that is sent to a node."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from allranks.checks.collect import network, peers
from allranks.checks.collect.gather import ProbeRequest, read_reports
from allranks.checks.collect.network import opened, port
from allranks.checks.probe import _BOOTSTRAP, program
from waiting import PATIENCE, wait_for

WORD = "0123456789abcdef"
Start = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    with closing(socket.create_server(("", 0))) as taken:
        number: int = taken.getsockname()[1]
    return number


def order(*wanted: str, nodes: int = 2, word: str = WORD, **more: Any) -> ProbeRequest:
    return ProbeRequest(
        wanted, **{"nnodes": nodes, "word": word, "master_addr": "127.0.0.2", "master_port": free_port(), **more}
    )


@pytest.fixture
def start() -> Iterator[Start]:
    """Give what starts a node; lines before the program's may change what it stands on."""
    with ExitStack() as stack:

        def start(asked: ProbeRequest, node: int, before: str = "") -> subprocess.Popen[str]:
            code = before + _BOOTSTRAP
            command = [sys.executable, "-c", code, str(node)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            for stream in (process.stdin, process.stdout):
                stack.callback(stream.close)
            process.stdin.write(program(asked))
            process.stdin.close()
            return process

        yield start


def told(process: subprocess.Popen[str], node: int) -> dict[str, Any]:
    """Wait for what a node tells; return its facts."""
    found = read_reports(process.stdout.read())[node]
    assert found["errors"] == {}
    facts: dict[str, Any] = found["facts"]
    return facts


@pytest.mark.parametrize("address", ["127.0.0.2", "::1", "localhost"])
def test_nodes_meet_wherever_they_are_told_to(start: Start, address: str) -> None:
    asked = order("port", "reach", nodes=3, master_addr=address)
    nodes = [start(asked, node) for node in (2, 1, 0)]
    first, second, third = (told(nodes[2 - node], node) for node in range(3))
    assert first["port"] == {"port": asked.master_port, "error": None, "holder": None}
    assert (first["reach"]["error"], first["reach"]["came"]) == (None, [1, 2])
    for other in (second, third):
        assert (other["port"], other["reach"]["error"]) == (None, None)
        assert other["reach"]["address"] == socket.getaddrinfo(address, None)[0][4][0]
        assert abs(other["reach"]["clock"]["ahead"]) <= other["reach"]["clock"]["within"] + 0.001


def test_a_node_that_begins_first_waits_for_the_first_one(start: Start) -> None:
    asked = order("reach")
    late = start(asked, 1)
    with pytest.raises(subprocess.TimeoutExpired):
        late.wait(0.5)
    first = start(asked, 0)
    assert told(late, 1)["reach"]["error"] is None
    assert told(first, 0)["reach"]["came"] == [1]


def test_a_clock_that_is_behind(start: Start) -> None:
    asked = order("reach")
    behind = start(asked, 1, "import time\nright = time.time\ntime.time = lambda: right() - 100\n")
    told(start(asked, 0), 0)
    clock = told(behind, 1)["reach"]["clock"]
    assert abs(clock["ahead"] - 100) <= clock["within"] + 0.001


def test_each_connects_to_each(start: Start) -> None:
    asked = order("reach", "mesh", nodes=4)
    nodes = [start(asked, node) for node in range(4)]
    assert [told(process, node)["mesh"] for node, process in enumerate(nodes)] == [{"tried": 3, "unreached": {}}] * 4


def test_a_door_that_does_not_open(start: Start) -> None:
    """Node 2 tells of a port that nobody listens at: the others cannot connect to it, and it can to them."""
    asked = order("reach", "mesh", nodes=3)
    closed = "import socket\nlisten = socket.socket.listen\nsocket.socket.listen = lambda *_: None\n"
    nodes = [start(asked, 0), start(asked, 1), start(asked, 2, closed)]
    facts = [told(process, node)["mesh"] for node, process in enumerate(nodes)]
    why = {"2": "connection refused"}
    assert facts == [{"tried": 2, "unreached": why}, {"tried": 2, "unreached": why}, {"tried": 2, "unreached": {}}]


def test_who_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE", 0.2)
    found = network.reach(order("reach", word="a word of its own"))
    assert found is not None
    assert (found["error"], found["came"]) == (None, [])


def test_a_port_that_nobody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PATIENCE", 0.2)
    found = network.reach(order("reach", node=1, word="refused and told"))
    assert found is not None
    assert found["error"] == {"kind": "refused", "text": "connection refused"}
    assert found["ended"] - found["began"] > 0.1


def test_a_name_that_means_nothing() -> None:
    found = network.reach(order("reach", node=1, word="names mean things", master_addr="no.such.host.invalid"))
    assert found is not None
    assert found["error"]["kind"] == "name"
    assert found["error"]["text"].startswith("cannot resolve the name: ")


@pytest.mark.parametrize(
    ("says", "kind", "text"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "stranger", "another program listens there: it says 'SSH-2.0-OpenSSH_9.2'"),
        (None, "stranger", "another program listens there: it sends nothing for 0.2 s"),
        (b"", "closed", "the listener there closes the connection without an answer"),
    ],
)
def test_a_stranger_at_the_port(says: bytes | None, kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if says is None:
        monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(network, "PATIENCE", 0.2)
    held: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        if says is None:
            held.append(connection)
            return
        with connection, suppress(OSError):  # Who has heard enough may have ended it.
            connection.sendall(says)
            connection.recv(100)

    with closing(socket.create_server(("", 0))) as stranger:
        network.serve(stranger, answer)
        found = network.reach(order("reach", node=1, word=f"stranger {says!r}", master_port=stranger.getsockname()[1]))
        network.stop(stranger)
    for connection in held:
        connection.close()
    assert found is not None
    assert found["error"] == {"kind": kind, "text": text}


def test_who_repeats_what_it_hears_proves_nothing() -> None:
    def repeat(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(connection.recv(100))
            connection.recv(100)

    with closing(socket.create_server(("", 0))) as echo:
        network.serve(echo, repeat)
        found = network.reach(order("reach", node=1, word="half of a word", master_port=echo.getsockname()[1]))
        network.stop(echo)
    assert found is not None
    assert found["error"]["kind"] == "stranger"


def test_the_first_node_takes_no_stranger_for_another_node(start: Start) -> None:
    asked = order("reach")
    first = start(asked, 0)

    def dial() -> socket.socket | None:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((asked.master_addr, asked.master_port))
        return None

    with wait_for("the first node to listen", dial) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\n")
        assert stranger.recv(100) == b""
    told(start(asked, 1), 1)
    assert told(first, 0)["reach"]["came"] == [1]


def test_who_holds_the_port() -> None:
    code = "import socket\nheld = socket.create_server(('', 0))\nprint(held.getsockname()[1], flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin and process.stdout
        number = int(process.stdout.readline())
        found = port(order("port", word="taken by another", master_port=number))
        process.communicate("\n")
    assert found is not None
    assert (found["port"], found["error"], found["holder"]["pid"]) == (number, "Address already in use", process.pid)
    assert found["holder"]["command"].startswith(f"{sys.executable} -c import socket")


def test_facts_ask_once_and_whoever_asks_in_the_meantime_waits() -> None:
    """The port is looked at, and used, at the same time."""
    asked, found = order("port", "reach", word="asked by several"), []
    threads = [threading.Thread(target=lambda: found.append(port(asked))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network.stop(opened(asked)[0])
    assert found == [{"port": asked.master_port, "error": None, "holder": None}] * 8


def test_a_node_that_comes_at_the_last_moment_is_waited_for() -> None:
    """Else the others are gone when it tries to connect to them."""
    here = network._Meeting(order("mesh", nodes=4), mesh_port=1)
    here.came[1] = ("gpu02", 1)
    first = threading.Thread(target=here._finish, args=(0,))
    first.start()
    wait_for("the first node to have tried all", lambda: 0 in here._done)
    here.came[2] = ("gpu03", 1)
    second = threading.Thread(target=here._finish, args=(1,))
    second.start()
    first.join(0.5)
    assert first.is_alive()
    here._finish(2)
    for thread in (first, second):
        thread.join(PATIENCE)
        assert not thread.is_alive()
