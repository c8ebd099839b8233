"""The process group that a context holds, and how it is left."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from allranks.runtime.peer import ALL_LEFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

#: Rank 0 serves the store and leaves last, but it does not wait longer than this for the others.
LAST_LEAVE = timedelta(seconds=60)


@dataclass(frozen=True)
class Membership:
    """The process group's means: its store, whether this rank serves it, and whether we started the group.

    ``on_close`` is called once, when the context has been closed.
    """

    store: Store | None
    serves: bool
    ours: bool
    on_close: Callable[[], None] = field(default=lambda: None)


def abort(backend: str) -> None:
    """Give the process group up without waiting."""
    from torch import distributed

    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
    if "nccl" in backend and abort is not None:
        abort()
    else:
        group = distributed.group.WORLD
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def leave_last(store: Store, serves: bool, world_size: int) -> None:
    """Let the rank that serves the store be the last one: the others may still use it."""
    from torch import distributed

    # A store that is gone went with a rank that failed; that rank's own error is the one to see.
    with suppress(distributed.DistError):
        if store.add("left", 1) == world_size:
            store.set(ALL_LEFT, "1")
        elif serves:
            store.wait([ALL_LEFT], LAST_LEAVE)
