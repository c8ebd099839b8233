"""Who is done with writing, counted in the store: others wait for that without a collective operation's timeout."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from allranks.runtime.poll import poll

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.control import Control
    from allranks.runtime.peer import Peers


class Tally:
    """Counts the ranks that are done, round by round; all ranks begin the same rounds.

    Where the store or a rank is gone, nobody is waited for: the collective operation that follows tells of it.

    Args:
        control: of the context.
        store: what the ranks share; None counts nothing.
        peers: know when another rank is gone.
    """

    def __init__(self, control: Control, store: Store | None, peers: Peers) -> None:
        self._peers = peers
        self._store = store
        self._name = control.broadcast(secrets.token_hex(8)) if store is not None else ""
        self._round = 0
        self._expected = 0

    def begin(self, expected: int) -> None:
        """Begin a round, in which so many ranks are to say that they are done."""
        self._round += 1
        self._expected = expected

    def ticket(self) -> Callable[[], None]:
        """Give what says, from any thread, that this rank is done with the round that is on now."""
        return partial(self._add, self._key())

    def done(self) -> None:
        """Say that this rank is done."""
        self._add(self._key())

    def wait(self) -> None:
        """Wait until all that are expected are done, however long it takes."""
        store, key = self._store, self._key()
        if store is not None:
            with suppress(RuntimeError):
                poll(lambda: self._complete(store, key))

    def _complete(self, store: Store, key: str) -> bool | None:
        """Tell whether there is nobody to wait for any more."""
        return store.add(key, 0) >= self._expected or self._peers.are_missing() or None

    def _add(self, key: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.add(key, 1)

    def _key(self) -> str:
        return f"checkpoint/{self._name}/{self._round}"
