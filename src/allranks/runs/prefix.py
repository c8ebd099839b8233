"""The ``[3]`` before each line: by rank, by ``node:rank`` where nodes are several, folded as ``[0,2-3]``.

Where nobody can tell the ranks of a node apart it is ``[node 1]``.
"""

from __future__ import annotations

from collections.abc import Iterable

from allranks import contract
from allranks.runs.pending import Source

#: Codes of colours that can be read on light and on dark terminals; ranks take turns.
_COLOURS = (36, 33, 35, 32, 34, 31)
_REMEMBERED = 4096


def ranges(ranks: Iterable[int]) -> str:
    """Write ranks as ``0,2-3,7``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


class Prefixes:
    """Makes the prefix of a line from those who wrote it.

    Args:
        colour: whether each rank's prefix has a colour of its own.
    """

    def __init__(self, colour: bool = False) -> None:
        self._colour = colour
        self._several_nodes = False
        self._made: dict[tuple[Source, ...], bytes] = {}

    def set_several_nodes(self, several: bool) -> None:
        """Say whether the attempt has several nodes; a single rank is then named with its node."""
        if several != self._several_nodes:
            self._several_nodes = several
            self._made.clear()

    def __call__(self, sources: tuple[Source, ...]) -> bytes:
        """Return the prefix, with the space after it."""
        made = self._made.get(sources)
        if made is None:
            if len(self._made) >= _REMEMBERED:
                self._made.clear()
            made = self._made[sources] = self._make(sources)
        return made

    def _make(self, sources: tuple[Source, ...]) -> bytes:
        rank, node = sources[0]
        names = f"{node}:{rank}" if self._several_nodes and len(sources) == 1 else ranges(s.rank for s in sources)
        if rank == contract.ALL_OF_A_NODE:
            rank, names = node, f"node {ranges(s.node for s in sources)}"
        if self._colour:
            return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{names}]\x1b[0m ".encode()
        return f"[{names}] ".encode()
