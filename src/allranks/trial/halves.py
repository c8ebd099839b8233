"""Which nodes work with which: all pairs, round after round; and half by half, to find the pairs that do badly."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from math import gcd

Group = tuple[int, ...]
#: A part of a search: yields groups to measure, is sent which of them do badly, and returns pairs that do.
Part = Generator[list[Group], list[bool], list[Group]]


def pairings(nodes: Sequence[int]) -> list[list[Group]]:
    """Return all pairs of nodes, in rounds in which each has one partner; one is left over where they are odd.

    All but the first one move on around a circle, and each works with the one opposite: at first with a neighbour, for
    it may be that racks do not reach each other; then with others far from that one.
    """
    places: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    circle = [*places[::2], *reversed(places[1::2])]
    found = []
    for _ in circle[1:]:
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([_sorted(one, other) for one, other in opposite if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    count = len(found)
    far = next(step for step in range(max(1, 2 * count // 5), 0, -1) if gcd(step, count) == 1)
    return [found[turn * far % count] for turn in range(count)]


def within(nodes: Group) -> Part:
    """Look for pairs in a group that does badly, of which no two share a node."""
    if len(nodes) == 2:
        return [nodes]
    first, second = _halves(nodes)
    groups = [half for half in (first, second) if len(half) > 1]
    bad = _bad_of(groups, (yield groups))
    if bad:
        return (yield from _together([within(half) for half in bad]))
    return (yield from _across(first, second))


def _across(first: Group, second: Group) -> Part:
    """Look for pairs between two groups that do badly together, and each does well by itself."""
    if len(first) == len(second) == 1:
        return [_sorted(*first, *second)]
    more, fewer = _halves(first)
    many, few = _halves(second)
    for pairing in ([(more, few), (fewer, many)], [(more, many), (fewer, few)]):
        sides = {_sorted(*one, *other): (one, other) for one, other in pairing if one and other}
        groups = [*sides]
        bad = _bad_of(groups, (yield groups)) if groups else []
        if bad:
            return (yield from _together([_across(*sides[group]) for group in bad]))
    return []


def _together(parts: Iterable[Part]) -> Part:
    """Go on with several parts at the same time; no two of them share a node."""
    found: list[Group] = []
    waiting: list[tuple[Part, list[Group]]] = []

    def go_on(part: Part, told: list[bool] | None) -> None:
        try:
            waiting.append((part, next(part) if told is None else part.send(told)))
        except StopIteration as end:
            found.extend(end.value)

    for part in parts:
        go_on(part, None)
    while waiting:
        now, waiting = waiting, []
        told = iter((yield [group for _, groups in now for group in groups]))
        for part, groups in now:
            go_on(part, [next(told) for _ in groups])
    return found


def _halves(nodes: Group) -> tuple[Group, Group]:
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]


def _bad_of(groups: Iterable[Group], are_bad: Iterable[bool]) -> list[Group]:
    return [group for group, is_bad in zip(groups, are_bad, strict=True) if is_bad]


def _sorted(*nodes: int) -> Group:
    return tuple(sorted(nodes))
