"""Reports of the ranks of ``allranks test``: lines of JSON on stdout, among other output."""

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
    """A rank's first report: its place and device; ``gpu`` is None if it computes on the CPU."""

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
    """A collective operation whose result was checked.

    Attributes:
        name: name of the operation, with the dtype if it is tested with several.
        wrong: the error in the result; empty if it is correct.
        seconds: median time of one operation; None if it was skipped.
        why_not: why it was skipped; empty if it was run.
    """

    name: str
    wrong: str = ""
    seconds: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Bandwidth(SelfTestReport):
    """An all-reduce of ``size`` bytes: its ``seconds`` on the slowest rank, and the error in its result, if any."""

    size: int
    seconds: float
    wrong: str = ""


@dataclass(frozen=True)
class TrainingMessage(SelfTestReport):
    """A communication pattern of a training step with ``size`` bytes, and its ``seconds`` on this rank.

    Attributes:
        name: ``all_gather`` or ``reduce_scatter``, with ``size`` bytes over all ranks; or ``shared memory``: gradients
           averaged by :class:`allranks.runtime.model.allreduce.SharedMessage`.
    """

    name: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Link(SelfTestReport):
    """A transfer of ``size`` bytes from this rank to ``target``, and the least ``seconds`` until its receipt."""

    target: int
    size: int
    seconds: float


@dataclass(frozen=True)
class TrainingResult(SelfTestReport):
    """Result of a training on all ranks.

    Attributes:
        strategy: strategy of data parallelism.
        losses: loss of each step, over the batch of all ranks.
        alone: the same, as computed by this rank without the others.
        weights: hash of the bits of the final weights.
        steps_per_second: training steps per second.
    """

    strategy: str
    losses: tuple[float, ...]
    alone: tuple[float, ...]
    weights: str
    steps_per_second: float


@dataclass(frozen=True)
class GpuResult(SelfTestReport):
    """Result of :func:`allranks.selftest.computing.measure_products` on a rank's GPU."""

    found: dict[str, Any]


@dataclass(frozen=True)
class SearchResult(SelfTestReport):
    """Result of the search for a faulty node or link; nodes are given by their rank in the search.

    Attributes:
        is_bad: whether anything was slow or failed.
        culprits: faulty nodes and links, each with ``nodes`` (one, or the two ends of a link), the ``seconds`` for
           ``size`` bytes (None: the transfer failed) and the ``error``.
        more: number of further slow or failing nodes that were paired with too few others to be sure.
        seconds: time of all nodes together; None if they failed, or nothing was measured.
        usual: time of the fastest group; None likewise.
        size: bytes sent; 0 if nothing was measured.
        least: least bytes per second of good nodes; 0 if unknown.
        backend: backend of the transfers; with nccl from the first GPU of each node.
        error: the error of all nodes together.
        rounds: number of rounds of measurements.
        silent: nodes that did not connect, or stopped answering.
        hosts: hostname of each node; empty for one that did not connect.
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
        if mark and name in _KINDS and line.endswith("}\n"):  # A dead rank's last line may be incomplete.
            values = json.loads(text)
            for key, value in values.items():
                values[key] = tuple(value) if isinstance(value, list) else value
            report = _KINDS[name](**values)
            if isinstance(report, RankInfo):
                found.clear()  # The rank was restarted.
            found.append(report)
    return found
