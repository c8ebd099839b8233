"""Finds the node or the link at fault among nodes that are slow or fail together, by halving.

Pure: how a group of nodes does is told by a function. A group does badly if it holds a node at fault, or both ends of
a link at fault. Groups of one round share no node and are measured at the same time, so that the number of rounds grows
with the logarithm of the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Group = tuple[int, ...]
#: Seconds that a group took for work that takes good nodes as long in a group of any size; None: it failed.
Result = float | None
Measure = Callable[[Sequence[Group]], Sequence[Result]]
#: A part of the search: yields groups to measure, is sent which of them do badly, and returns pairs that do.
_Part = Generator[list[Group], list[bool], list[Group]]

#: A group is slow if it takes more than this times what the fastest one took.
SLOW = 3.0
#: Of so many pairs that do badly it is found out whether a node or the link is at fault.
_TOLD_APART = 4


@dataclass(frozen=True)
class Culprit:
    """What is at fault.

    Attributes:
        nodes: one node, which does badly with each other one that it was tried with; or two, which do so with each
            other alone.
        seconds: what they took, a node with another one; None: they failed.
    """

    nodes: Group
    seconds: Result


@dataclass(frozen=True)
class Fault:
    """What is wrong.

    Attributes:
        culprits: what could be pinned down; empty: nothing, all do badly together.
        more: how many further pairs do badly, for which it was not found out whether a node or the link is at fault.
        seconds: what all nodes together took; None: they failed.
        usual: what the fastest of all groups took; None: all failed.
        rounds: how many rounds of measurements it took.
    """

    culprits: tuple[Culprit, ...]
    more: int
    seconds: Result
    usual: Result
    rounds: int


def find(nodes: Sequence[int], measure: Measure, *, usual: Result = None) -> Fault | None:
    """Find what is at fault among nodes that were slow or failed together.

    Args:
        nodes: two nodes or more.
        measure: has groups of two nodes or more work at the same time, and tells how each did.
        usual: seconds that good nodes take, where that is known: two nodes alone cannot be compared with others.

    Returns:
        The fault; None if nothing was wrong this time.
    """
    return _Search(tuple(nodes), measure, usual).run()


@dataclass
class _Search:
    nodes: Group
    measure: Measure
    known: Result
    rounds: int = 0
    results: dict[Group, Result] = field(default_factory=dict)

    def run(self) -> Fault | None:
        self._judged([self.nodes])
        pairs = self._drive(self._suspects())
        if not pairs and self._is_bad(self.nodes):
            self._measure([self.nodes])  # It was only once, perhaps.
        if not pairs and not self._is_bad(self.nodes):
            return None
        culprits = [culprit for pair in pairs[:_TOLD_APART] for culprit in self._told_apart(pair, pairs)]
        more = len(pairs[_TOLD_APART:])
        if not (culprits or more or self._is_bad(self.nodes)):
            return None
        return Fault(tuple(culprits), more, self.results[self.nodes], self._usual(), self.rounds)

    def _suspects(self) -> _Part:
        if len(self.nodes) == 2:
            return _bad_of([self.nodes], [self._is_bad(self.nodes)])
        if len(self.nodes) > 3:
            return (yield from _within(self.nodes))
        pairs = [*combinations(self.nodes, 2)]
        for pair in pairs:
            yield [pair]
        for pair in filter(self._is_bad, pairs):  # What came first had nothing to be compared with.
            yield [pair]
        return self._of_three([pair for pair in pairs if self._is_bad(pair)])

    @staticmethod
    def _of_three(bad: list[Group]) -> list[Group]:
        """Return one pair, which a further measurement tells apart; none where all three do badly."""
        return bad[:1] if len(bad) < 3 else []

    def _told_apart(self, pair: Group, pairs: Iterable[Group]) -> list[Culprit]:
        """Try each node of a pair with one that does well, to find out whether it or the link between them is bad."""
        well = [node for node in self.nodes if not any(node in other for other in pairs)]
        if not well:
            return self._confirmed({pair: pair})
        probes = [_sorted(node, other) for node, other in zip(pair, (well[0], well[-1]), strict=True)]
        new = [probe for probe in probes if probe not in self.results]
        for groups in [new] if len(well) > 1 else [[probe] for probe in new]:
            self._judged(groups)
        of_nodes = {probe: (node,) for node, probe in zip(pair, probes, strict=True) if self._is_bad(probe)}
        return self._confirmed(of_nodes or {pair: pair})

    def _confirmed(self, of_groups: Mapping[Group, Group]) -> list[Culprit]:
        """Measure slow groups once more before their nodes are named: a busy machine is slow for a while."""
        for group in of_groups:
            if self.results[group] is not None:
                self._measure([group])
        return [Culprit(nodes, self.results[group]) for group, nodes in of_groups.items() if self._is_bad(group)]

    def _drive(self, part: _Part) -> list[Group]:
        try:
            groups = next(part)
            while True:
                groups = part.send(self._judged(groups))
        except StopIteration as end:
            found: list[Group] = end.value
            return found

    def _judged(self, groups: list[Group]) -> list[bool]:
        """Measure groups, slow ones twice; tell which do badly."""
        self._measure(groups)
        self._measure([group for group in groups if self.results[group] is not None and self._is_bad(group)])
        return [*map(self._is_bad, groups)]

    def _measure(self, groups: Sequence[Group]) -> None:
        if not groups:
            return
        self.rounds += 1
        for group, result in zip(groups, self.measure(groups), strict=True):
            results = [each for each in (result, self.results.get(group)) if each is not None]
            self.results[group] = min(results, default=None)

    def _is_bad(self, group: Group) -> bool:
        """Compare a group with the fastest so far: groups get smaller, so that it is hardly ever a smaller one."""
        result, usual = self.results[group], self._usual()
        return result is None or (usual is not None and result > SLOW * usual)

    def _usual(self) -> Result:
        known = [took for took in (self.known, *self.results.values()) if took is not None]
        return min(known, default=None)


def _within(nodes: Group) -> _Part:
    """Look for pairs in a group that does badly."""
    if len(nodes) == 2:
        return [nodes]
    first, second = _halves(nodes)
    groups = [half for half in (first, second) if len(half) > 1]
    bad = _bad_of(groups, (yield groups))
    if bad:
        return (yield from _together([_within(half) for half in bad]))
    return (yield from _across(first, second))


def _across(first: Group, second: Group) -> _Part:
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


def _together(parts: Iterable[_Part]) -> _Part:
    """Go on with several parts at the same time; no two of them share a node."""
    found: list[Group] = []
    waiting: list[tuple[_Part, list[Group]]] = []

    def go_on(part: _Part, told: list[bool] | None) -> None:
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
