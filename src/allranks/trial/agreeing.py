"""What ranks agree on without a collective operation: those are on trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.runtime.context import Context


def is_any(ctx: Context, name: str, mine: bool) -> bool:
    """Tell whether something is so on any rank; all ranks call it, and get the same answer.

    Args:
        ctx: this rank.
        name: what is asked, once for each name.
        mine: whether it is so here.
    """
    store = ctx._store
    assert store is not None  # The process group is ours.
    key = f"trial/{name}"
    if mine:
        store.add(f"{key}/yes", 1)
    if store.add(f"{key}/asked", 1) == ctx.world_size:
        store.set(f"{key}/said", "yes" if store.add(f"{key}/yes", 0) else "no")
    return bool(store.get(f"{key}/said") == b"yes")
