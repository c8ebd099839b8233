"""Work that several facts of a node need, done once for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from allranks.probe.order import Order

T = TypeVar("T")


def once(function: Callable[[Order], T]) -> Callable[[Order], T]:
    """Have a function do its work once for an order; whoever asks in the meantime waits, and gets the same."""
    lock, done = threading.Lock(), dict[str, T]()

    def ask(order: Order) -> T:
        with lock:
            if order.word not in done:
                done[order.word] = function(order)
            return done[order.word]

    return ask
