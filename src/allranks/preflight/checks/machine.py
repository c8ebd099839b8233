"""What each node has: CPUs, memory, room, limits."""

from __future__ import annotations

from typing import Any

from allranks.job.units import format_size
from allranks.preflight.model import Finding, Node, Seen, passed, warned
from allranks.preflight.registry import on_each_node

#: A batch of 64 images of 224 x 224 x 3 as float32 takes 39 MB, and workers hold two each.
_SHM_LOW = 64 << 20


@on_each_node(
    "shm",
    why="data loader workers hand their batches over in /dev/shm, and die of SIGBUS when it is full",
    fact="shm",
)
def shm(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at the room for shared memory."""
    if fact is None:
        return warned("there is no /dev/shm", fix="mount a tmpfs there, or use data loaders without workers")
    what = f"{format_size(fact['free'])} of {format_size(fact['all'])} free"
    if fact["free"] < _SHM_LOW:
        fix = "make it larger (mount -o remount,size=8G /dev/shm; docker run --shm-size), or free it: ls -l /dev/shm"
        return warned(what, fix=fix)
    return passed(what)
