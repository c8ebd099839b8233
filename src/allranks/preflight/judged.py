"""What the ranks of a trial have told, judged: what is wrong, on which ranks, and how fast it went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from allranks import contract
from allranks.job.units import format_count
from allranks.preflight.checks.gpu_compute import judge
from allranks.preflight.model import Grade
from allranks.preflight.trials import Trial
from allranks.runs.cause import cause_of
from allranks.runs.trial import Bandwidth, Begun, Collective, Computed, Done, Link, Told, Training, Who

#: How far the loss of all ranks together may be from that of one process: sums of other parts are rounded otherwise, in
#: float64.
TOLERANCE = 1e-9

#: Where ranks ended well; and how many groups of ranks that ended elsewhere are named.
_AT_THE_END, _GROUPS = "at the end", 3


@dataclass(frozen=True)
class Part:
    """A part of a trial.

    Attributes:
        kind: ranks, collective, bandwidth, link, training or gpus.
        name: what was tried.
        wrong: what is wrong, and on which ranks; empty: nothing.
        why_not: why it was not tried; empty: it was.
        figures: what was measured, in seconds, bytes, and bytes per second.
    """

    kind: str
    name: str
    wrong: str = ""
    why_not: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {"kind": self.kind, "name": self.name, "wrong": self.wrong, "why_not": self.why_not, **self.figures}


def judged(trial: Trial) -> list[Part]:
    """Return all parts of a trial of which at least one rank has told; that of the ranks, if it ended well."""
    if not (trial.told or trial.has_succeeded):
        return []
    parts = (_collectives, _bandwidths, _links, _trainings, _computed)
    return [_ranks(trial), *chain.from_iterable(part(trial) for part in parts)]


def _ranks(trial: Trial) -> Part:
    """Judge whether the ranks that there must be have found each other."""
    told = trial.of(Who)
    size, found = trial.world_size or len(told), [who.rank for who in told]
    sizes = {who.world_size for who in told}
    wrong = ""
    if not told:
        wrong = "none has told anything: does this machine see what they write?"
    elif sizes != {size}:
        wrong = f"there must be {format_count(size, 'rank')}, and they see {' or '.join(map(str, sorted(sizes)))}"
    elif trial.has_succeeded and found != list(range(size)):  # Where one failed, that is what there is to say.
        wrong = f"ranks 0 to {size - 1} must be there once each, and these told: {', '.join(map(str, found))}"
    return Part("ranks", "ranks", wrong, figures={"ranks": len(told), "hosts": len(set(trial.hosts.values()))})


def _collectives(trial: Trial) -> Iterator[Part]:
    for name, told in _grouped(trial.of(Collective), lambda one: one.name):
        times = [one.seconds for one in told if one.seconds is not None]
        why_not = next((one.why_not for one in told if one.why_not), "")
        figures = {"seconds": max(times)} if times else {}
        yield Part("collective", name, on_ranks(trial, {one.rank: one.wrong for one in told}), why_not, figures)


def _bandwidths(trial: Trial) -> Iterator[Part]:
    """Judge by size; busbw is the speed of the slowest link that would take so long, whatever the number of ranks.

    See doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests.
    """
    count = len(trial.of(Who))
    for size, told in _grouped(trial.of(Bandwidth), lambda one: one.size):
        seconds = max(one.seconds for one in told)
        alone = size / seconds
        figures = {"bytes": size, "seconds": seconds, "algbw": alone, "busbw": alone * 2 * (count - 1) / count}
        wrong = on_ranks(trial, {one.rank: one.wrong for one in told})
        yield Part("bandwidth", f"all_reduce of {_binary(size)}", wrong, figures=figures)


def _binary(size: int) -> str:
    """Write a power of two in bytes: 64 KiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _links(trial: Trial) -> Iterator[Part]:
    for one in trial.of(Link):
        ends = (trial.name(one.rank), trial.name(one.target))
        figures = {
            "ranks": [one.rank, one.target],
            "hosts": [trial.hosts.get(rank, f"rank {rank}") for rank in (one.rank, one.target)],
            "bytes": one.size,
            "bandwidth": one.size / one.seconds,
        }
        yield Part("link", " to ".join(ends), figures=figures)


def _trainings(trial: Trial) -> Iterator[Part]:
    for strategy, told in _grouped(trial.of(Training), lambda one: one.strategy):
        first = told[0]
        figures = {
            "steps": len(first.losses),
            "losses": list(first.losses),
            "steps_per_second": min(one.steps_per_second for one in told),
        }
        wrong = on_ranks(trial, {one.rank: _wrong_training(one) for one in told}) or _unlike(trial, told)
        yield Part("training", f"training ({strategy})", wrong, figures=figures)


def _computed(trial: Trial) -> Iterator[Part]:
    measured: dict[str, list[Any]] = {}
    for one in trial.of(Computed):
        measured.setdefault(trial.hosts[one.rank], []).append(one.found)
    for found in judge(measured):
        wrong = found.what if found.grade is Grade.FAIL else ""
        yield Part("gpus", f"GPUs of {found.host}", wrong, figures={"what": found.what})


def _wrong_training(told: Training) -> str:
    for step, (together, alone) in enumerate(zip(told.losses, told.alone, strict=True)):
        if not math.isclose(together, alone, rel_tol=TOLERANCE):
            return f"the loss of step {step} must be {alone:.7g}, as in one process, and is {together:.7g}"
    if not told.losses[-1] < told.losses[0]:
        return f"the loss must fall, and goes from {told.losses[0]:.4g} to {told.losses[-1]:.4g}"
    return ""


def _unlike(trial: Trial, told: Sequence[Training]) -> str:
    """Say which ranks have other weights than most."""
    hashes = [one.weights for one in told]
    usual = max(hashes, key=hashes.count)
    words = "the weights are not those of the other ranks"
    return on_ranks(trial, {one.rank: "" if one.weights == usual else words for one in told})


def why_failed(trial: Trial) -> str:
    """Say how a trial ended that did not succeed, with the last words of the rank that is to blame."""
    status, folder = trial.run.record.status, trial.run.attempt_folder
    reason = status.reason or status.state.value
    logs = folder.glob(f"*/{contract.rank_log(status.rank, 'err')}") if status.rank is not None else ()
    words = next(filter(None, map(cause_of, logs)), None)
    return f"{reason}: {words}" if words else reason


def where(trial: Trial) -> str:
    """Say what ranks were doing when they ended, those first of which there are few; empty: all came to the end."""
    places: dict[str, list[int]] = {}
    for rank in range(max([trial.world_size, *(who.rank + 1 for who in trial.of(Who))])):
        places.setdefault(_place([one for one in trial.told if one.rank == rank]), []).append(rank)
    if list(places) == [_AT_THE_END]:
        return ""
    groups = sorted(places.items(), key=lambda group: len(group[1]))
    return "; ".join(f"{_named(trial, ranks)} {place}" for place, ranks in groups[:_GROUPS])


def _place(told: Sequence[Told]) -> str:
    if not told:
        return "not there yet"
    if isinstance(told[-1], Done):
        return _AT_THE_END
    begun = [one.name for one in told if isinstance(one, Begun)]
    return f"in {begun[-1]}" if begun else "at the start"


def _named(trial: Trial, ranks: Sequence[int]) -> str:
    return trial.name(ranks[0]) if len(ranks) == 1 else format_count(len(ranks), "rank")


def on_ranks(trial: Trial, wrong: Mapping[int, str]) -> str:
    """Write what is wrong, with the ranks that it is wrong on; empty: on none.

    Args:
        trial: the trial.
        wrong: what is wrong by rank, empty where nothing is; ranks after the first that say something else are counted.
    """
    bad = {rank: words for rank, words in wrong.items() if words}
    if not bad:
        return ""
    first, words = next(iter(bad.items()))
    if len(bad) == len(wrong) > 1:
        return f"on all ranks; on {trial.name(first)}: {words}"
    more = f" and {format_count(len(bad) - 1, 'other')}" if len(bad) > 1 else ""
    return f"on {trial.name(first)}{more}: {words}"


def _grouped(told: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Put what the ranks told of the same together, in the order in which they told it."""
    groups: dict[Any, list[Any]] = {}
    for one in told:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())
