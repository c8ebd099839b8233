"""The self-test of all ranks: collectives, how fast data goes between them, a short training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from allranks.checks.model import Finding, Grade, Node, Seen, failed, passed, skipped, warned
from allranks.checks.registry import on_the_whole
from allranks.checks.topics.network import gigabits
from allranks.job.units import format_count, format_size

if TYPE_CHECKING:
    from allranks.checks.selftest import PartResult

#: Below this part of what the slowest link can do, or of what the fastest one does, data goes slowly. Other work on a
#: node, and few CPUs, cost a factor of two or three.
_OF_SPEED, _OF_OTHERS = 0.1, 0.25
#: One process does not bring more than this through TCP, in bytes per second, however fast the link is.
_ONE_PROCESS = 1.25e9
_BYTES_PER_MEGABIT = 125_000
_FIX = "see whether the check culprit names a node or a link; NCCL_DEBUG=INFO says which way data goes"

#: Registers a check of the self-test. Its facts say how fast nodes can exchange data.
_on_the_trial = partial(on_the_whole, facts=("host", "interface", "infiniband"), is_full=True, needs_trial=True)


def _parts(seen: Seen, *kinds: str) -> list[PartResult]:
    from allranks.checks.selftest import judged  # Not before each run, which has no self-test.

    return [part for part in judged(seen.trial) if part.kind in kinds] if seen.trial else []


@_on_the_trial("all-reduce", why="training needs collectives that complete, with correct results")
def all_reduce(seen: Seen) -> Iterator[Finding]:
    """Check that all ranks came to the end, and all collectives were right."""
    from allranks.checks.selftest import where, why_failed

    parts = _parts(seen, "ranks", "collective")
    done = [part for part in parts if part.kind == "collective" and not part.why_not]
    wrong = [part for part in parts if part.wrong]
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


@_on_the_trial("bandwidth", why="ranks wait for each other's gradients in each step")
def bandwidth(seen: Seen) -> Iterator[Finding]:
    """Check how fast all ranks together add up many bytes."""
    found = _parts(seen, "bandwidth")
    wrong = [part for part in found if part.wrong]
    if wrong:
        yield failed(f"{wrong[0].name} is wrong {wrong[0].wrong}", fix=_FIX)
        return
    if not found:
        yield skipped(_why_unmeasured(seen))
        return
    best = max(part.figures["busbw"] for part in found)
    what = f"{format_size(best)}/s bus bandwidth at best, up to {found[-1].name}"
    yield warned(f"{what}{_beside(seen)}", fix=_FIX) if best < _expected(seen) else passed(what)


@_on_the_trial("neighbours", why="one slow link, or one that loses packets, slows all ranks")
def neighbours(seen: Seen) -> Iterator[Finding]:
    """Check how fast bytes go from each node to the next, and back."""
    found = _parts(seen, "link")
    if not found:
        yield skipped(_why_unmeasured(seen))
        return
    least = _least(seen, found)
    slow = [part for part in found if _rate(part) < least]
    if not slow:
        yield passed(f"{_range(found)} in {format_count(len(found), 'direction')}")
        return
    others = [_rate(part) for part in found if part not in slow]
    beside = f", others at {format_size(median(others))}/s" if others else _beside(seen)
    # By the host at an end of all slow links, if there is one, else by both of their hosts.
    common = set.intersection(*({*part.figures["hosts"]} for part in slow))
    groups: dict[tuple[str, ...], list[PartResult]] = {}
    for part in slow:
        hosts = tuple(sorted(common if len(common) == 1 else part.figures["hosts"]))
        groups.setdefault(hosts, []).append(part)
    for hosts, parts in groups.items():
        slowest = min(parts, key=_rate)
        more = f" and in {format_count(len(parts) - 1, 'other way')}" if len(parts) > 1 else ""
        fix = f"check the network of {' and '.join(hosts)}: ethtool, ip -s link, tc qdisc"
        what = f"{slowest.name}{more} at {_range(parts)}{beside}"
        yield warned(what, fix=fix, exclude=hosts[0] if len(hosts) == 1 else "")  # Of two, either may be at fault.


@_on_the_trial("training", why="distributed training must give the same model as a single process")
def training(seen: Seen) -> Iterator[Finding]:
    """Check a small model that all ranks have trained."""
    found = _parts(seen, "training")
    if not found:
        yield skipped(seen.why_no_trial or "no rank got as far as training")
    for part in found:
        steps, rate = part.figures["steps"], part.figures["steps_per_second"]
        if part.wrong:
            yield failed(f"{part.name} is wrong {part.wrong}", fix=_FIX)
        else:
            yield passed(f"{part.name}: {steps} steps as in one process, {rate:.0f} steps/s")


@_on_the_trial("culprit", why="one bad node or link slows or stops all others; the job can run without it")
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


def _why_unmeasured(seen: Seen) -> str:
    if [part.figures["ranks"] for part in _parts(seen, "ranks")] == [1]:
        return "a single rank has no peer"
    return seen.why_no_trial or "no rank got as far as measuring it"


def _speed(seen: Seen) -> float:
    """Return what the slowest interface between nodes can do, in bytes per second; 0 if unknown."""
    if len(seen.nodes) < 2:
        return 0.0
    speeds = []
    for node in seen.nodes:
        card = node.facts.get("interface")
        speed = card["all"].get(card["route"], {}).get("speed") if card else None
        speeds.append(_of_infiniband(node, seen.plan.backend) or _BYTES_PER_MEGABIT * float(speed or 0))
    return min(filter(None, speeds), default=0.0)


def _of_infiniband(node: Node, backend: str) -> float:
    """Return what the fastest port of InfiniBand of a node can do, which NCCL uses."""
    ports = node.facts.get("infiniband") or () if backend == "nccl" else ()
    rates = [gigabits(port) for port in ports if (port["state"], port["layer"]) == ("ACTIVE", "InfiniBand")]
    return _BYTES_PER_MEGABIT * 1000 * max(rates, default=0.0)


def _expected(seen: Seen) -> float:
    """Return the least that may be expected between nodes, in bytes per second; 0 if unknown."""
    by_infiniband = all(_of_infiniband(node, seen.plan.backend) for node in seen.nodes)
    return _OF_SPEED * (_speed(seen) if by_infiniband else min(_speed(seen), _ONE_PROCESS))


def _beside(seen: Seen) -> str:
    speed = _speed(seen)
    return f", and the slowest interface can do {format_size(speed)}/s" if speed else ""


def _least(seen: Seen, found: Sequence[PartResult]) -> float:
    """Return below how many bytes per second a link is slow.

    It is compared with the fastest pair of nodes, by the slower of its two ways: the middle of all would be slow itself
    where one of three nodes is. GPUs of one node are linked in different ways.
    """
    if len(seen.nodes) < 2:
        return 0.0
    ways: dict[frozenset[int], list[float]] = {}
    for part in found:
        ways.setdefault(frozenset(part.figures["ranks"]), []).append(_rate(part))
    return max(_expected(seen), _OF_OTHERS * max(map(min, ways.values())))


def _rate(part: PartResult) -> float:
    rate: float = part.figures["bandwidth"]
    return rate


def _range(parts: Sequence[PartResult]) -> str:
    """Write the speeds of links: from the slowest to the fastest."""
    least, most = (f"{format_size(find(map(_rate, parts)))}/s" for find in (min, max))
    return least if least == most else f"{least} to {most}"
