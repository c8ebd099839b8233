"""A stranger: another user of the machine, who says to each port in 40 ways what nobody there should believe.

Reads from stdin a JSON list of [address, port], and prints one line of JSON: what was answered, by port and kind. It
needs only Python's own library, and gives up the rights of root first.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - before there is no right to read it any more
import json
import os
import pickle
import random
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

NOBODY = 65534
MARK = "/tmp/a-stranger-was-here"
#: torch/csrc/distributed/c10d/TCPStoreBackend.hpp: the first byte of a query, and what a client says first.
VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GET_NUM_KEYS = range(8)
MAGIC = bytes([VALIDATE]) + struct.pack("=I", 0x3C85F7CE)


class Touch:
    """Marks, when it is unpickled, that it was."""

    def __reduce__(self):
        return (os.system, (f"touch {MARK}",))


def line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def greeting(nonce: bytes = b"0" * 32) -> bytes:
    return b"allranks 1 " + nonce + b"\n"


def signed(message: object) -> bytes:
    return b"0" * 64 + b" " + line(message)


HELLO = {"kind": "hello", "sent": 1.0, "attempt": 0, "node": 1, "host": "gpu02", "ranks": 1, "torch": None}
STOP = {"kind": "stop", "sent": 1.0, "signal": 15, "by": "me"}
EVIL = pickle.dumps(Touch())
#: Where the value of the first ctx.on_main() of the first generation is handed over.
ON_MAIN = b"/allranks/0/0/main/1"
NOISE = random.Random(0).randbytes(65536)
SAID: dict[str, list[bytes]] = {
    "nothing": [],
    "an empty line": [b"\n"],
    "many empty lines": [b"\n" * 65536],
    "zeros": [bytes(65536)],
    "noise": [NOISE],
    "a line without an end": [b"x" * (1 << 20)],
    "a greeting without an end": [b"allranks 1 " + b"0" * 8192],
    "HTTP": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "TLS": [bytes.fromhex("160301020001000001fc0303") + NOISE[:500]],
    "SSH": [b"SSH-2.0-OpenSSH_9.2\r\n"],
    "the hello of another version": [b'{"kind":"hello","sent":1.0}\n'],
    "a node below 0": [line({**HELLO, "node": -5}), line(STOP)],
    "a stop": [line(STOP)],
    "deep JSON": [b"[" * 100_000 + b"\n"],
    "a long number": [b'{"kind":"hello","sent":' + b"9" * 100_000 + b"}\n"],
    "a pickle": [EVIL + b"\n"],
    "a greeting": [greeting()],
    "two greetings": [greeting(), greeting()],
    "a greeting with a long nonce": [greeting(b"0" * 3000)],
    "a greeting in capitals": [greeting(b"F" * 32)],
    "a hello without a signature": [greeting(), line(HELLO)],
    "a hello with a signature of zeros": [greeting(), signed(HELLO), signed({"kind": "ready", "sent": 1.0})],
    "a stop with a signature of zeros": [greeting(), signed(STOP)],
    "a pickle with a signature of zeros": [greeting(), b"0" * 64 + b" " + EVIL],
    "a connection of gloo": [struct.pack("=Q", 0)],
    "a frame of gloo": [struct.pack("=QQQQ", 0, 1, 1 << 40, 0) + bytes(256)],
    "a store's client": [MAGIC],
    "another magic number": [bytes([VALIDATE]) + struct.pack("=I", 1)],
    "a query without a first word": [bytes([GET]) + text(ON_MAIN)],
    "an unknown query": [MAGIC, bytes([255]) + NOISE[:100]],
    "a key without an end": [MAGIC, bytes([SET]) + struct.pack("=Q", 1 << 62) + b"x"],
    "a value without an end": [MAGIC, bytes([SET]) + text(b"x") + struct.pack("=Q", 1 << 40) + b"x"],
    "a list without an end": [MAGIC, bytes([CHECK]) + struct.pack("=Q", 1 << 60)],
    "the number of keys": [MAGIC, bytes([GET_NUM_KEYS])],
    "the value of on_main": [MAGIC, bytes([GET]) + text(ON_MAIN)],
    "an error for on_main": [MAGIC, bytes([SET]) + text(ON_MAIN) + text(b"E" + EVIL)],
    "a value for on_main": [MAGIC, bytes([SET]) + text(ON_MAIN) + text(b"V" + EVIL)],
    "a signed value for on_main": [MAGIC, bytes([SET]) + text(ON_MAIN) + text(bytes(32) + b"V" + EVIL)],
}


def heard(connection: socket.socket, seconds: float) -> bytes:
    """Return what comes within so many seconds, or until the other side closes."""
    found, deadline = b"", time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not (more := connection.recv(65536)):
                break
            found += more
    except OSError:
        pass
    return found


def say(address: str, port: int, parts: list[bytes]) -> bytes:
    try:
        with socket.create_connection((address, port), 5) as connection:
            found = b""
            for part in parts or [b""]:
                connection.sendall(part)
                found += heard(connection, 0.3)
            return found
    except OSError as error:
        return f"{type(error).__name__}".encode()


def reset(address: str, port: int) -> bytes:
    """End the connection as a machine does that has forgotten it."""
    with socket.create_connection((address, port), 5) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return b""


def echo(address: str, port: int) -> bytes:
    """Say what the other side says."""
    with socket.create_connection((address, port), 5) as connection:
        found = heard(connection, 0.3)
        connection.sendall(found)
        return found + heard(connection, 0.3)


def crowd(address: str, port: int) -> bytes:
    """Come with many, who stay for a moment and say nothing."""
    connections = [socket.create_connection((address, port), 5) for _ in range(200)]
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    return b""


def main() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    targets = [(str(address), int(port)) for address, port in json.load(sys.stdin)]
    with ThreadPoolExecutor(32) as pool:
        told = {
            (port, kind): pool.submit(say, address, port, parts)
            for address, port in targets
            for kind, parts in SAID.items()
        }
        for kind, way in (("a reset", reset), ("an echo", echo), ("a crowd", crowd)):
            told |= {(port, kind): pool.submit(way, address, port) for address, port in targets}
    print(json.dumps([[port, kind, answer.result().decode("latin-1")] for (port, kind), answer in told.items()]))


if __name__ == "__main__":
    main()
