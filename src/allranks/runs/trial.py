"""What the ranks of ``allranks test`` tell: lines of JSON, among whatever else they print."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MARK = "allranks-trial "


@dataclass(frozen=True)
class Told:
    """Something that a rank tells."""

    rank: int


@dataclass(frozen=True)
class Who(Told):
    """Who a rank is, and what it computes with: the first that it tells.

    ``gpu`` is the name of its GPU; None: it computes on the CPU.
    """

    world_size: int
    host: str
    node_rank: int
    local_rank: int
    device: str
    gpu: str | None
    torch: str
    backend: str


@dataclass(frozen=True)
class Begun(Told):
    """The rank begins something: an operation, or a part that many belong to."""

    name: str


@dataclass(frozen=True)
class Collective(Told):
    """A collective operation whose result was compared with the right one.

    Attributes:
        name: of the operation, with the type of its numbers where there is more than one.
        wrong: what is wrong about the result; empty: nothing.
        seconds: one took, the median of some; None where it was not done.
        why_not: why it was not done; empty: it was.
    """

    name: str
    wrong: str = ""
    seconds: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Bandwidth(Told):
    """An all-reduce of ``size`` bytes: ``seconds`` that one took on the slowest rank, and what is wrong about it."""

    size: int
    seconds: float
    wrong: str = ""


@dataclass(frozen=True)
class Link(Told):
    """``size`` bytes that this rank has sent to ``target``, and the least ``seconds`` until it knew that they came."""

    target: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Training(Told):
    """A model that all ranks have trained.

    Attributes:
        strategy: how it was made data parallel.
        losses: of each step, over the batch of all ranks.
        alone: the same, as this rank computed them by itself.
        weights: what the weights came to in the end, as a hash of their bits.
        steps_per_second: steps in a second, all ranks together making one.
    """

    strategy: str
    losses: tuple[float, ...]
    alone: tuple[float, ...]
    weights: str
    steps_per_second: float


@dataclass(frozen=True)
class Computed(Told):
    """What the GPU of a rank has computed, and how fast."""

    found: dict[str, Any]


@dataclass(frozen=True)
class Searched(Told):
    """What the search for a node or a link at fault has found; nodes are counted as they are ranks there.

    Attributes:
        is_bad: whether anything was slow or failed.
        culprits: what could be pinned down, each with ``nodes`` (one, or the two ends of a link), the ``seconds`` that
            ``size`` bytes took (None: they did not get through) and the ``error``.
        more: how many further nodes do badly, and were tried with too few others to say that they are at fault.
        seconds: what all nodes together took; None: they failed, or nothing was measured.
        usual: what the fastest took; None: likewise.
        size: bytes; 0: nothing was measured.
        least: bytes a second that good nodes send at least; 0: nobody knows.
        backend: by which they were sent; with nccl from the first GPU of each node.
        error: what all together failed with.
        rounds: how many rounds of measurements it took.
        silent: nodes that did not come, or said nothing any more.
        hosts: what each node calls itself; empty for one that did not come.
    """

    is_bad: bool = False
    culprits: tuple[dict[str, Any], ...] = ()
    more: int = 0
    seconds: float | None = None
    usual: float | None = None
    size: int = 0
    least: float = 0.0
    backend: str = ""
    error: str = ""
    rounds: int = 0
    silent: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done(Told):
    """The rank came to the end."""


_KINDS: dict[str, type[Told]] = {
    kind.__name__: kind for kind in (Who, Begun, Collective, Bandwidth, Link, Training, Computed, Searched, Done)
}


def tell(told: Told) -> None:
    """Tell something: a line on stdout."""
    sys.stdout.write(f"{_MARK}{type(told).__name__} {json.dumps(asdict(told))}\n")
    sys.stdout.flush()


def read(attempt: Path) -> list[Told]:
    """Return what all ranks of an attempt have told, rank after rank, each in its order.

    Args:
        attempt: the attempt's folder, with the logs of the ranks in folders of their nodes.
    """
    found = [told for log in attempt.glob("node-*/*.out") for told in _told_in(log)]
    return sorted(found, key=lambda told: told.rank)


def _told_in(log: Path) -> list[Told]:
    found: list[Told] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        _, mark, rest = line.partition(_MARK)
        name, _, text = rest.partition(" ")
        if mark and name in _KINDS and line.endswith("}\n"):  # The last line of a rank that died may be cut.
            told = _made(_KINDS[name], json.loads(text))
            found = [told] if isinstance(told, Who) else [*found, told]  # It may have been started anew.
    return found


def _made(kind: type[Told], raw: dict[str, Any]) -> Told:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
    return kind(**values)
