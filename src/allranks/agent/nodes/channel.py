"""Messages between the agents of two nodes: JSON, one per line, over a non-blocking connection.

A message is valid if it has exactly the fields of its kind, each of the right form.

Each side sends a nonce first. The run's key and both nonces give one key per direction of the connection. Each line
starts with an HMAC-SHA256 (RFC 2104) of its number and text under that key. Without the run's key no message can be
sent, and none replayed from another connection, direction or position. Messages are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from allranks import contract

#: A node that does not answer for this long is lost. Kernels exchange TCP keep-alives every second, however busy the
#: agents are. The end of a process, or an orderly shutdown, is seen at once. At least 2 s: one answer may be late.
_SILENCE_SECONDS = max(2, contract.full_wait(5))
#: The same where the job needs all its nodes: a network outage may pass.
_PATIENT_SECONDS = contract.full_wait(30)
#: Longest line in bytes, once a peer has authenticated and before.
_LONGEST, _LONGEST_AT_FIRST = 1 << 20, 1 << 12
#: Each side sends this protocol version first, then its nonce.
_PROTOCOL = b"allranks 1 "
_GREETING = re.compile(_PROTOCOL + rb"([0-9a-f]{32})")
_NOT_AN_AGENT = "it did not send a message of an agent"
_OTHER_KEY = "it does not know the run's key"

Message = dict[str, Any]
_LARGEST = 1 << 63
#: Forms of fields. "form?" may also be None; "form*" is a list.
_FORMS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: type(value) is str,
    "flag": lambda value: type(value) is bool,
    "time": lambda value: type(value) is float and math.isfinite(value),
    "number": lambda value: type(value) is int and abs(value) < _LARGEST,
    "count": lambda value: type(value) is int and 0 <= value < _LARGEST,
    "signal": lambda value: type(value) is int and value in signal.valid_signals(),
    # A node of a generation: its number, host and count of ranks.
    "node": lambda value: (
        type(value) is list and len(value) == 3 and all(map(_fits, value, ("count", "text", "count")))
    ),
}
_FORMS |= {
    # Reports of ranks that do not advance: see :mod:`allranks.agent.hangs`.
    "frame": lambda value: (
        type(value) is list and len(value) == 3 and all(map(_fits, value, ("text", "number", "text")))
    ),
    "collective": lambda value: _has(value, {"name": "text", "number": "count", "bytes": "count", "group": "text"}),
    "group": lambda value: _has(
        value, {"ranks": "count*", "frames": "frame*", "stack": "text", "state": "text", "collective": "collective?"}
    ),
    "quiet": lambda value: _has(value, {"since": "time", "moving": "flag", "groups": "group*", "left": "count*"}),
}
_OF_ALL = {"kind": "text", "sent": "time"}
_KINDS = {
    # --- sent by the agent of a node ---
    "hello": {"attempt": "count", "node": "count", "host": "text", "ranks": "count", "torch": "text?"},
    "ready": {},
    "failed": {"rank": "count", "code": "number", "at": "time"},
    "quiet": {"quiet": "quiet?"},
    "over": {"cut": "flag", "continue": "flag"},
    "leaving": {"why": "text"},
    # --- sent by both ---
    "stop": {"signal": "signal", "by": "text"},
    # --- sent by the coordinator ---
    "welcome": {"host": "text"},
    "refused": {"why": "text"},
    "generation": {"number": "count", "address": "text", "port": "count", "nodes": "node*"},
    "end-ranks": {},
    "missing": {"nodes": "count*"},
    contract.HANG: {"since": "time", "quiet": "time", "groups": "group*", "left": "count*", "action": "text"},
    contract.HANG_OVER: {"since": "time"},
    "again": {"restart": "count", "rank": "count?", "counted": "flag"},
    "lost": {"node": "count", "host": "text", "why": "text", "goes_on": "flag"},
    "outcome": {"state": "text", "exit_code": "count", "reason": "text?", "rank": "count?", "lost": "text*"},
}


def parsed(line: bytes) -> Message | None:
    """Return the message of a line; None if a field is missing, unknown or of another form."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or type(message.get("kind")) is not str or message["kind"] not in _KINDS:
        return None
    forms = _OF_ALL | _KINDS[message["kind"]]
    return message if _has(message, forms) else None


def _has(value: Any, forms: Mapping[str, str]) -> bool:
    """Return whether a value has exactly these fields, each of its form."""
    if type(value) is not dict or value.keys() != forms.keys():
        return False
    return all(_fits(value[name], form) for name, form in forms.items())


def _fits(value: Any, form: str) -> bool:
    if form.endswith("?"):
        return value is None or _fits(value, form[:-1])
    if form.endswith("*"):
        return type(value) is list and all(_fits(each, form[:-1]) for each in value)
    return _FORMS[form](value)


class Channel:
    """One end of a connection between two agents; a ``patient`` one waits longer for a silent peer."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_coordinator: bool, patient: bool) -> None:
        self.lost: str | None = None  # Why the connection was lost; None while it works.
        self.has_heard = False  # Whether the peer has sent anything.
        self.is_authenticated = False  # Whether the peer has proven that it knows the run's key.
        self._connection = connection
        self._key = key
        self._is_coordinator = is_coordinator
        self._nonce = secrets.token_hex(16).encode()
        self._signers: tuple[_Signer, _Signer] | None = None  # for received and sent lines; set by the greeting
        self._waiting: list[bytes] = []
        self._unread = b""
        self._unsent = _PROTOCOL + self._nonce + b"\n"
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:  # Have the kernel detect a dead peer (man 7 tcp).
            silence = _PATIENT_SECONDS if patient else _SILENCE_SECONDS
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence * 1000)
        self.flush()

    @property
    def here(self) -> str:
        """Our address as the peer knows it; empty for a connection within this machine."""
        return _host(self._connection.getsockname())

    @property
    def there(self) -> str:
        """The peer's address; empty if unknown."""
        try:
            return _host(self._connection.getpeername())
        except OSError:
            return ""

    @property
    def is_greeted(self) -> bool:
        """Whether the peer has sent the greeting of an agent, of this run or another one."""
        return self._signers is not None

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self._connection.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; :meth:`flush` sends what the connection does not take now."""
        self._waiting.append(json.dumps({"kind": kind, "sent": time.time(), **fields}).encode())
        self.flush()

    def flush(self) -> None:
        """Send the queued messages once the peer has greeted."""
        if self._signers:
            self._unsent += b"".join(map(self._signers[1].signed, self._waiting))
            self._waiting.clear()
        try:
            while self._unsent and not self.lost:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # The peer's last messages can still be read; then reading gives the reason.

    def receive(self) -> list[Message]:
        """Return the messages received so far."""
        self._read()
        messages: list[Message] = []
        *lines, self._unread = self._unread.split(b"\n")
        try:
            for line in lines:
                if self._signers is None:
                    self._greet(line)
                else:
                    messages.append(self._opened(line, self._signers[0]))
        except _InvalidLineError as error:
            self.lost = str(error)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.lost = self.lost or "closed"
        self._connection.close()

    def _read(self) -> None:
        try:
            while not self.lost:
                data = self._connection.recv(65536)
                self._unread += data
                self.has_heard = self.has_heard or bool(data)
                if not data:
                    self.lost = "its agent is gone"
                elif len(self._unread) > (_LONGEST if self.is_authenticated else _LONGEST_AT_FIRST):
                    self.lost = _NOT_AN_AGENT
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.lost = "its agent is gone"
        except OSError as error:
            self.lost = f"the connection broke: {os.strerror(error.errno or 0)}"

    def _greet(self, line: bytes) -> None:
        """Derive the keys of this connection from both nonces."""
        greeting = _GREETING.fullmatch(line)
        if greeting is None:
            raise _InvalidLineError(_NOT_AN_AGENT)
        nonces = (self._nonce, greeting[1]) if self._is_coordinator else (greeting[1], self._nonce)
        hub, node = (_Signer(self._key, b" ".join((side, *nonces))) for side in (b"hub", b"node"))
        self._signers = (node, hub) if self._is_coordinator else (hub, node)
        self.flush()

    def _opened(self, line: bytes, signer: _Signer) -> Message:
        """Authenticate and parse a line; raise an _InvalidLineError if that fails."""
        text = signer.opened(line)
        if text is None:
            raise _InvalidLineError(_NOT_AN_AGENT if self.is_authenticated else _OTHER_KEY)
        self.is_authenticated = True
        message = parsed(text)
        if message is None:
            raise _InvalidLineError(_NOT_AN_AGENT)
        return message


class _InvalidLineError(Exception):
    """A line that no agent of this run has sent at this position; the text says why."""


class _Signer:
    """Signs, or verifies, the lines of one direction of a connection, each once and in order."""

    def __init__(self, key: bytes, name: bytes) -> None:
        self._key = hmac.digest(key, name, "sha256")
        self._number = 0

    def signed(self, text: bytes) -> bytes:
        """Return a text as a signed line."""
        return self._next(text) + b" " + text + b"\n"

    def opened(self, line: bytes) -> bytes | None:
        """Return the text of a line; None if the signature is not valid at this position."""
        signature, _, text = line.partition(b" ")
        return text if hmac.compare_digest(signature, self._next(text)) else None

    def _next(self, text: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, b"%d %b" % (self._number, text), "sha256").hex().encode()


def _host(name: object) -> str:
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""
