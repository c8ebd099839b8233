"""Connections of which is not known yet whether an agent of the run is at the other end."""

from __future__ import annotations

import time
from collections.abc import Iterator

from allranks.agent.channel import Channel
from allranks.agent.messages import Message
from allranks.agent.telling import complain

#: How long such a connection may say nothing: an agent proves itself as soon as the hub has greeted it.
_PATIENCE_SECONDS = 30.0
#: There are no more of them than this: the oldest is closed for the newest. An agent dials again.
_MOST = 1024


class Strangers:
    """Connections that have proven nothing yet. None of them can end the run: they are closed, counted and noted."""

    def __init__(self) -> None:
        self._since: dict[Channel, float] = {}  # in the order in which they came
        self._refused = 0

    @property
    def channels(self) -> list[Channel]:
        """All of them."""
        return [*self._since]

    def add(self, channel: Channel) -> None:
        """Take in another one."""
        if len(self._since) >= _MOST:
            self._refuse(next(iter(self._since)), "it has not said who it is")
        self._since[channel] = time.monotonic()

    def proven(self) -> Iterator[tuple[Channel, list[Message]]]:
        """Yield those that have proven to be agents of this run, with what they have said; close what is none."""
        now = time.monotonic()
        for channel, since in [*self._since.items()]:
            messages = channel.receive()
            if messages:
                del self._since[channel]
                yield channel, messages
            elif channel.lost:
                self._refuse(channel, channel.lost)
            elif now - since > _PATIENCE_SECONDS:
                self._refuse(channel, f"it has not said who it is within {_PATIENCE_SECONDS:g} s")

    def close(self) -> None:
        """Close all, and say how many were refused."""
        for channel in self._since:
            channel.close()
        if self._refused > 1:
            complain(f"note: {self._refused} connections that did not know the run's key were closed")

    def _refuse(self, channel: Channel, why: str) -> None:
        """Close a connection; only what has said something counts: scripts and monitors look whether a port is open."""
        del self._since[channel]
        self._refused += channel.has_heard
        if channel.has_heard and self._refused == 1:
            complain(f"note: closed a connection from {channel.there or 'this node'}: {why}; others are only counted")
        channel.close()
