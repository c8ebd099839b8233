"""What the ranks of ``allranks test`` report: lines of JSON on stdout, among other output."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MARK = "allranks-trial "


@dataclass(frozen=True)
class SelfTestReport:
    """A report of a rank."""

    rank: int


@dataclass(frozen=True)
class RankInfo(SelfTestReport):
    """A rank's place and device, its first report; ``gpu`` is None if it computes on the CPU."""

    world_size: int
    host: str
    node_rank: int
    local_rank: int
    device: str
    gpu: str | None
    torch: str
    backend: str


@dataclass(frozen=True)
class OperationStarted(SelfTestReport):
    """The rank starts an operation, or a part of the test."""

    name: str


@dataclass(frozen=True)
class Collective(SelfTestReport):
    """A collective operation whose result was compared with the right one.

    Attributes:
        name: of the operation, with the type of its numbers where there is more than one.
        wrong: what is wrong about the result; empty if it is right.
        seconds: median time of one; None if it was skipped.
        why_not: why it was skipped; empty if it was not.
    """

    name: str
    wrong: str = ""
    seconds: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Bandwidth(SelfTestReport):
    """An all-reduce of ``size`` bytes: ``seconds`` that one took on the slowest rank, and what is wrong about it."""

    size: int
    seconds: float
    wrong: str = ""


@dataclass(frozen=True)
class TrainingMessage(SelfTestReport):
    """What a step of a training does with ``size`` bytes, and the ``seconds`` that it took on this rank.

    Attributes:
        name: ``all_gather`` or ``reduce_scatter``, of so many bytes of all ranks together; or ``shared memory``:
            gradients averaged as :class:`allranks.runtime.model.allreduce.SharedMessage` does.
    """

    name: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Link(SelfTestReport):
    """``size`` bytes that this rank has sent to ``target``, and the least ``seconds`` until it knew that they came."""

    target: int
    size: int
    seconds: float


@dataclass(frozen=True)
class TrainingResult(SelfTestReport):
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
class GpuResult(SelfTestReport):
    """What :func:`allranks.selftest.gpu_compute.measure` returned on a rank's GPU."""

    found: dict[str, Any]


@dataclass(frozen=True)
class SearchResult(SelfTestReport):
    """What the search for a node or a link at fault has found; a node is its rank there.

    Attributes:
        is_bad: whether anything was slow or failed.
        culprits: what could be pinned down, each with ``nodes`` (one, or the two ends of a link), the ``seconds`` that
            ``size`` bytes took (None: they did not get through) and the ``error``.
        more: how many further nodes do badly, but were paired with too few others to say that they are at fault.
        seconds: what all nodes together took; None if they failed, or nothing was measured.
        usual: what the fastest took; None likewise.
        size: bytes; 0 if nothing was measured.
        least: bytes a second that good nodes send at least; 0 if unknown.
        backend: of the transfers; with nccl from the first GPU of each node.
        error: the error of all nodes together.
        rounds: how many rounds of measurements it took.
        silent: nodes that did not come, or did not answer any more.
        hosts: hostname of each node; empty for one that did not come.
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
class Done(SelfTestReport):
    """The rank has finished."""


_KINDS = {kind.__name__: kind for kind in SelfTestReport.__subclasses__()}


def send(report: SelfTestReport) -> None:
    """Write a report to stdout."""
    sys.stdout.write(f"{_MARK}{type(report).__name__} {json.dumps(asdict(report))}\n")
    sys.stdout.flush()


def read(attempt: Path) -> list[SelfTestReport]:
    """Return the reports of all ranks of an attempt, by rank, each in its order."""
    found = [report for log in attempt.glob("node-*/*.out") for report in _reports_in(log)]
    return sorted(found, key=lambda report: report.rank)


def _reports_in(log: Path) -> list[SelfTestReport]:
    found: list[SelfTestReport] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        _, mark, rest = line.partition(_MARK)
        name, _, text = rest.partition(" ")
        if mark and name in _KINDS and line.endswith("}\n"):  # The last line of a rank that died may be cut.
            values = json.loads(text)
            for key, value in values.items():
                values[key] = tuple(value) if isinstance(value, list) else value
            report = _KINDS[name](**values)
            if isinstance(report, RankInfo):
                found.clear()  # The rank was restarted.
            found.append(report)
    return found
