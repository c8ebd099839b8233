"""What ranks have done on the nodes: collectives, how fast data goes between them, a short training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from allranks.job.units import format_count, format_size
from allranks.preflight.checks.network import gigabits
from allranks.preflight.model import Finding, Grade, Node, Seen, failed, passed, skipped, warned
from allranks.preflight.registry import on_the_whole

if TYPE_CHECKING:
    from allranks.preflight.judged import Part

#: Below this part of what the slowest link can do, or of what the fastest one does, data goes slowly. Other work on a
#: node, and few CPUs, cost a factor of two or three.
_OF_SPEED, _OF_OTHERS = 0.1, 0.25
#: What ranks are compared with: whose they are, and how fast they can exchange data.
_FACTS = ("host", "interface", "infiniband")
#: One process does not bring more than this through TCP, in bytes per second, however fast the link is.
_ONE_PROCESS = 1.25e9
_BYTES_PER_MEGABIT = 125_000
_FIX = "see whether the check culprit names a node or a link; NCCL_DEBUG=INFO says which way data goes"


@on_the_whole(
    "all-reduce",
    why="what ranks exchange in training must be right, and must get through at all",
    facts=_FACTS,
    is_full=True,
    needs_trial=True,
)
def all_reduce(seen: Seen) -> Iterator[Finding]:
    """Look at whether all ranks came to the end, and all collectives were right."""
    from allranks.preflight.judged import where, why_failed  # Not before each run, which has no trial.

    parts = _parts(seen)
    done = [part for part in parts if part.kind == "collective" and not part.why_not]
    wrong = [part for part in parts if part.kind in ("ranks", "collective") and part.wrong]
    if not seen.trial:
        yield skipped(seen.why_no_trial)
    elif wrong:
        name = "" if wrong[0].kind == "ranks" else f"{wrong[0].name} is wrong "
        yield failed(f"{name}{wrong[0].wrong}", fix=_FIX)
    elif not seen.trial.has_succeeded:
        yield failed(f"{why_failed(seen.trial)}; it ended with {where(seen.trial)}", fix=_FIX)
    else:
        ranks = format_count(parts[0].figures["ranks"], "rank")
        yield passed(f"{len(done)} operations right on {ranks}, {done[0].name} in {done[0].figures['seconds']:.2g} s")


@on_the_whole(
    "bandwidth",
    why="ranks wait for each other's gradients in each step",
    facts=_FACTS,
    is_full=True,
    needs_trial=True,
)
def bandwidth(seen: Seen) -> Iterator[Finding]:
    """Look at how fast all ranks together add up many bytes."""
    found = [part for part in _parts(seen) if part.kind == "bandwidth"]
    wrong = [part for part in found if part.wrong]
    if wrong:
        yield failed(f"{wrong[0].name} is wrong {wrong[0].wrong}", fix=_FIX)
        return
    if not found:
        yield skipped(_why_unmeasured(seen))
        return
    best = max(part.figures["busbw"] for part in found)
    what = f"{format_size(best)}/s bus bandwidth at best, up to {found[-1].name}"
    yield _compared(seen, best, what)


@on_the_whole(
    "neighbours",
    why="one slow link, or one that loses packets, slows all ranks",
    facts=_FACTS,
    is_full=True,
    needs_trial=True,
)
def neighbours(seen: Seen) -> Iterator[Finding]:
    """Look at how fast bytes go from each node to the next, and back."""
    found = [part for part in _parts(seen) if part.kind == "link"]
    if not found:
        yield skipped(_why_unmeasured(seen))
        return
    least = _least(seen, found)
    slow = [part for part in found if _rate(part) < least]
    if not slow:
        yield passed(f"{_range(found)} in {format_count(len(found), 'direction')}")
        return
    others = [part.figures["bandwidth"] for part in found if part not in slow]
    beside = f", others at {format_size(median(others))}/s" if others else _beside(seen)
    for hosts, parts in _by_fault(slow).items():
        slowest = min(parts, key=_rate)
        more = f" and in {format_count(len(parts) - 1, 'other way')}" if len(parts) > 1 else ""
        fix = f"look at the network of {' and '.join(hosts)}: ethtool, ip -s link, tc qdisc"
        what = f"{slowest.name}{more} at {_range(parts)}{beside}"
        yield warned(what, fix=fix, exclude=hosts[0] if len(hosts) == 1 else "")  # Of two, either may be at fault.


@on_the_whole(
    "training",
    why="a model that all ranks train must become the one that one process trains",
    facts=_FACTS,
    is_full=True,
    needs_trial=True,
)
def training(seen: Seen) -> Iterator[Finding]:
    """Look at a small model that all ranks have trained."""
    found = [part for part in _parts(seen) if part.kind == "training"]
    if not found:
        yield skipped(seen.why_no_trial or "no ranks came so far as to train")
    for part in found:
        steps, rate = part.figures["steps"], part.figures["steps_per_second"]
        if part.wrong:
            yield failed(f"{part.name} is wrong {part.wrong}", fix=_FIX)
        else:
            yield passed(f"{part.name}: {steps} steps as in one process, {rate:.0f} steps/s")


@on_the_whole(
    "culprit",
    why="one bad node or link slows or stops all others, and the job runs without it",
    facts=_FACTS,
    is_full=True,
    needs_trial=True,
)
def culprit(seen: Seen) -> Iterator[Finding]:
    """Search for the node or the link at fault, if there is a reason to."""
    judging = (all_reduce, bandwidth, neighbours)
    is_bad = any(finding.grade in (Grade.WARN, Grade.FAIL) for judge in judging for finding in judge(seen))
    if seen.search is None or len(seen.nodes) < 2:
        yield skipped(seen.why_no_trial or "there is one node")
    elif is_bad:
        yield from seen.search(_expected(seen))
    else:
        yield skipped("there is nothing to search for: nothing between the nodes failed or was slow")


def _parts(seen: Seen) -> list[Part]:
    from allranks.preflight.judged import judged

    return judged(seen.trial) if seen.trial else []


def _why_unmeasured(seen: Seen) -> str:
    if seen.trial and [part.figures["ranks"] for part in _parts(seen) if part.kind == "ranks"] == [1]:
        return "one rank has nobody to exchange data with"
    return seen.why_no_trial or "no ranks came so far as to measure it"


def _speed(seen: Seen) -> float | None:
    """Return what the slowest interface between nodes can do, in bytes per second; None where nobody knows."""
    known = [speed for node in seen.nodes if (speed := _speed_of(node, seen.plan.backend))]
    return min(known) if known and len(seen.nodes) > 1 else None


def _speed_of(node: Node, backend: str) -> float:
    """Return what the interface of a node can do: with NCCL its fastest port of InfiniBand, if it has one."""
    if of_infiniband := _of_infiniband(node, backend):
        return of_infiniband
    card = node.facts.get("interface")
    speed = card["all"].get(card["route"], {}).get("speed") if card else None
    return _BYTES_PER_MEGABIT * float(speed or 0)


def _of_infiniband(node: Node, backend: str) -> float:
    ports = node.facts.get("infiniband") or () if backend == "nccl" else ()
    rates = [gigabits(port) for port in ports if (port["state"], port["layer"]) == ("ACTIVE", "InfiniBand")]
    return _BYTES_PER_MEGABIT * 1000 * max(rates, default=0.0)


def _expected(seen: Seen) -> float:
    """Return the least that may be expected between nodes, in bytes per second; 0: nobody knows."""
    speed = _speed(seen) or 0.0
    by_infiniband = all(_of_infiniband(node, seen.plan.backend) for node in seen.nodes)
    return _OF_SPEED * (speed if by_infiniband else min(speed, _ONE_PROCESS))


def _compared(seen: Seen, rate: float, what: str) -> Finding:
    if rate < _expected(seen):
        return warned(f"{what}{_beside(seen)}", fix=_FIX)
    return passed(what)


def _beside(seen: Seen) -> str:
    speed = _speed(seen)
    return f", and the slowest interface can do {format_size(speed)}/s" if speed else ""


def _least(seen: Seen, found: Sequence[Part]) -> float:
    """Return below how many bytes per second a link is slow.

    It is compared with the fastest pair of nodes, by the slower of its two ways: the middle of all would be slow itself
    where one of three nodes is. GPUs of one node are linked in different ways.
    """
    ways: dict[frozenset[int], list[float]] = {}
    for part in found:
        ways.setdefault(frozenset(part.figures["ranks"]), []).append(part.figures["bandwidth"])
    if len(seen.nodes) < 2:
        return 0.0
    return max(_expected(seen), _OF_OTHERS * max(map(min, ways.values())))


def _by_fault(slow: Sequence[Part]) -> dict[tuple[str, ...], list[Part]]:
    """Put slow links together by the host at an end of all of them, if there is one, else by both of their hosts."""
    common = set.intersection(*({*part.figures["hosts"]} for part in slow))
    groups: dict[tuple[str, ...], list[Part]] = {}
    for part in slow:
        hosts = tuple(sorted(common if len(common) == 1 else part.figures["hosts"]))
        groups.setdefault(hosts, []).append(part)
    return groups


def _rate(part: Part) -> float:
    rate: float = part.figures["bandwidth"]
    return rate


def _range(parts: Sequence[Part]) -> str:
    """Write the speeds of links: from the slowest to the fastest."""
    least, most = (f"{format_size(find(map(_rate, parts)))}/s" for find in (min, max))
    return least if least == most else f"{least} to {most}"
