"""Finds the nodes and links at fault among nodes that are slow or fail together.

Pure: a function measures groups of nodes. A group does badly if it holds a node at fault, or both ends of a link at
fault. Groups of one round share no node and are measured at the same time.

First the nodes work in pairs, with other partners in each round, until nodes that do well in a pair are known from
nodes that do badly in all of theirs. A bad link between nodes that do well is then found by binary search for each end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd

Group = tuple[int, ...]
#: Seconds that a group took for work that takes good nodes as long in a group of any size; None: it failed.
Result = float | None
Measure = Callable[[Sequence[Group]], Sequence[Result]]
#: A group is slow if it takes more than this times what the fastest one took.
SLOW = 3.0
#: A node is at fault if it does badly with so many nodes that do well with others; with all of these if they are fewer,
#: but not with only one: that may be the link.
PARTNERS, _FEWEST = 3, 2
#: So many rounds of pairs at most: all pairs of 16 nodes.
MOST_PAIRINGS = 15
#: Links that are searched for: a report names no more.
MOST_LINKS = 8


@dataclass(frozen=True)
class Culprit:
    """What is at fault."""

    #: One node, which does badly with each other one that it was tried with; or two, which do so with each other and
    #: well with others. Of two nodes in all, it is only known that they do badly.
    nodes: Group
    seconds: Result  # What they took, a node with another one; None: they failed.


@dataclass(frozen=True)
class IsolationResult:
    """What a search has found."""

    is_bad: bool  # Whether anything does badly.
    culprits: tuple[Culprit, ...]  # What could be pinned down.
    more: int  # How many further nodes do badly, and were tried with too few others to say that they are at fault.
    seconds: Result  # What all nodes together took; None: they failed.
    usual: Result  # What the fastest of all groups took; None: all failed.
    rounds: int  # How many rounds of measurements it took.


def find(nodes: Sequence[int], measure: Measure, *, limit: Result = None) -> IsolationResult:
    """Find what is at fault among nodes that were slow or failed together, by having groups work at the same time.

    ``limit`` is the seconds that good nodes never exceed, where that is known: nodes that are all as slow as each
    other, or two alone, cannot be compared.
    """
    return _Search(tuple(nodes), measure, limit).run()


@dataclass
class _Search:
    nodes: Group
    measure: Measure
    limit: Result
    rounds: int = 0
    usual: Result = None
    results: dict[Group, Result] = field(default_factory=dict)
    looks: Counter[Group] = field(default_factory=Counter)

    def run(self) -> IsolationResult:
        self._judge([self.nodes])
        for pairs in pairings(self.nodes)[:MOST_PAIRINGS]:
            self._judge(pairs)
            if self._is_decided():
                links = self._confirm()
                if self._is_decided():  # It may have found that all that was measured before is slow.
                    return self._outcome(links)
        return self._outcome(self._confirm())

    def _confirm(self) -> list[Group]:
        """Measure what is at fault once more, and find links."""
        self._measure_again(chain.from_iterable(pairs[:PARTNERS] for pairs in self._at_fault().values()))
        links = self._links()
        self._measure_again(links)
        return links

    def _outcome(self, links: Sequence[Group]) -> IsolationResult:
        at_fault = self._at_fault()
        more = len(self._failing()) - len(at_fault)
        culprits = [Culprit((node,), self._best(pairs)) for node, pairs in at_fault.items()]
        culprits += [Culprit(pair, self.results[pair]) for pair in links if self._is_link(pair)]
        if self._well() and self._is_bad(self.nodes) and not (culprits or more):
            self._measure([self.nodes])  # It may have been slow only once.
        is_bad = bool(culprits or more) or self._is_bad(self.nodes) or self._is_beyond_limit(self.nodes)
        return IsolationResult(is_bad, tuple(culprits), more, self.results[self.nodes], self.usual, self.rounds)

    def _is_link(self, pair: Group) -> bool:
        """Return True if a pair does badly whose nodes do well with others, or are the only two."""
        if pair == self.nodes:
            return self._is_bad(pair) or self._is_beyond_limit(pair)
        return self._is_bad(pair) and self._well().issuperset(pair)

    def _well(self) -> set[int]:
        """Return the nodes that do well in any group: none of them is at fault by itself."""
        return {node for group in self.results if not self._is_bad(group) for node in group}

    def _failing(self) -> dict[int, list[Group]]:
        """Return the nodes that do badly in all groups, each with its pairs with nodes that do well.

        Empty if no node does well: then no node can be compared.
        """
        well = self._well()
        if not well:
            return {}
        pairs = [pair for pair in self.results if len(pair) == 2 and len(well.intersection(pair)) == 1]
        return {node: [pair for pair in pairs if node in pair] for node in self.nodes if node not in well}

    def _at_fault(self) -> dict[int, list[Group]]:
        enough = max(_FEWEST, min(PARTNERS, len(self._well())))
        return {node: pairs for node, pairs in self._failing().items() if len(pairs) >= enough}

    def _is_decided(self) -> bool:
        """Return True if more pairs would say nothing new of any node; the more do badly, the more pairs it takes.

        If all do equally well, they may all be slow, unless ``limit`` is known.
        """
        failing = self._failing()
        if failing:
            return min(map(len, failing.values())) >= PARTNERS + len(failing) - 1
        is_any_fast = self.limit is not None and not all(map(self._is_beyond_limit, self.results))
        return bool(self._well()) and (is_any_fast or any(map(self._is_bad, self.results)))

    def _links(self) -> list[Group]:
        """Find pairs that do badly, of nodes that do well with others."""
        found: list[Group] = []
        while True:
            found += [pair for pair in self.results if len(pair) == 2 and self._is_link(pair) and pair not in found]
            rest = tuple(sorted(self._well() - _without(found)))
            if len(found) >= MOST_LINKS or len(rest) < 2 or not self._judge([rest])[0]:
                return found
            self._judge(pairings(rest)[-1])  # If racks do not reach each other, this finds many links at once.
            if not any(self._is_link(pair) for pair in self.results if {*pair} <= {*rest} and len(pair) == 2):
                pair = self._search_link(rest)
                if not self._judge([pair])[0]:
                    return found

    def _search_link(self, nodes: Group) -> Group:
        """Return the first and last node of the smallest part of a group that does badly, by binary search."""

        def is_bad(start: int, end: int) -> bool:
            return self._judge([nodes[start:end]])[0]

        end = 2 + bisect_left(range(2, len(nodes)), True, key=lambda end: is_bad(0, end))
        start = bisect_left(range(1, end - 1), True, key=lambda start: not is_bad(start, end))
        return nodes[start], nodes[end - 1]

    def _judge(self, groups: list[Group]) -> list[bool]:
        """Measure groups once, slow ones twice; return which do badly."""
        self._measure([group for group in groups if not self.looks[group]])
        self._measure([group for group in groups if self.looks[group] == 1 and self._is_slow(group)])
        return [*map(self._is_bad, groups)]

    def _measure_again(self, groups: Iterable[Group]) -> None:
        """Measure groups, but those that failed, once more before any is named: a busy machine is slow for a while."""
        waiting = [group for group in dict.fromkeys(groups) if self.results[group] is not None]
        while waiting:
            now: list[Group] = []
            for group in waiting:
                if not {*group}.intersection(chain.from_iterable(now)):
                    now.append(group)
            self._measure(now)
            waiting = [group for group in waiting if group not in now]

    def _measure(self, groups: Sequence[Group]) -> None:
        if not groups:
            return
        self.rounds += 1
        self.looks.update(groups)
        for group, result in zip(groups, self.measure(groups), strict=True):
            self.results[group] = _least(result, self.results.get(group))
            self.usual = _least(result, self.usual)

    def _is_bad(self, group: Group) -> bool:
        return self.results[group] is None or self._is_slow(group)

    def _is_slow(self, group: Group) -> bool:
        """Return True if a group took too long, where all together did not fail: slowness explains no failure."""
        result = self.results[group]
        if result is None or self.usual is None or self.results[self.nodes] is None:
            return False
        return result > SLOW * self.usual

    def _is_beyond_limit(self, group: Group) -> bool:
        """Return True if a group that did not fail is too slow, also if the others are little faster."""
        result = self.results[group]
        return result is not None and self.limit is not None and result > self.limit

    def _best(self, groups: Iterable[Group]) -> Result:
        return _least(*(self.results[group] for group in groups))


def _without(links: Iterable[Group]) -> set[int]:
    """Return nodes without which none of some links is left: those with most of them, and of these the last."""
    left, found = [*links], set[int]()
    while left:
        count = Counter(chain.from_iterable(left))
        node = max(count, key=lambda node: (count[node], node))
        found.add(node)
        left = [link for link in left if node not in link]
    return found


def _least(*results: Result) -> Result:
    return min((result for result in results if result is not None), default=None)


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
        found.append([tuple(sorted((a, b))) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    count = len(found)
    far = next(step for step in range(max(1, 2 * count // 5), 0, -1) if gcd(step, count) == 1)
    return [found[turn * far % count] for turn in range(count)]
