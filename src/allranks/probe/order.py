"""What a node is asked to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Order:
    """What a node is asked to look at, as JSON on its way there.

    Attributes:
        wanted: names of the facts, those of :data:`allranks.probe.gather.FACTS`.
        nnodes: how many nodes the job has.
        nproc_per_node: how many ranks each has.
        kind: what the ranks run: script, module or binary; empty: nothing that could be looked at.
        target: its absolute path, or its name.
        folders: absolute folders by what they are for.
        files: absolute paths of files that the job names in its arguments.
        variables: names of variables that this site needs.
        executables: checks of this site by name, each a program's bytes in base64.
        shared: a file that all nodes must see, and the word that stands in it; empty where they share none.
        word: that word; it also tells the processes that look from all others that may answer at a port.
        master_addr: where the nodes meet; empty where there is one node.
        master_port: likewise; 0: none is known.
        seconds: after which a fact that has not been found out is given up.
        node: which node this is.
    """

    wanted: tuple[str, ...]
    nnodes: int = 1
    nproc_per_node: int = 1
    kind: str = ""
    target: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    executables: Mapping[str, str] = field(default_factory=dict)
    shared: str = ""
    word: str = ""
    master_addr: str = ""
    master_port: int = 0
    seconds: float = 10.0
    node: int = 0

    def to_json(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Order:
        """Read what :meth:`to_json` wrote, once decoded."""
        known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        return cls(**known)
