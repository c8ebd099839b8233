"""Finds faulty nodes and links among nodes that are slow or fail together.

The algorithm is pure: a function measures groups of nodes. A group is bad (slow or failing) if it contains a faulty
node, or both ends of a faulty link. Groups of one round share no node and are measured at the same time.

First the nodes are measured in pairs, with other partners in each round, until good nodes (in at least one good pair)
are told apart from nodes that are bad in all their pairs. A bad link between good nodes is then found by binary search
for each end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd

Group = tuple[int, ...]
#: Seconds that a group took; for good nodes independent of the group's size. None: it failed.
Result = float | None
Measure = Callable[[Sequence[Group]], Sequence[Result]]
#: A group is slow if it takes more than this times as long as the fastest one.
SLOW = 3.0
#: A node is faulty if its pairs with this many good nodes are bad; with fewer good nodes all of them, but at least the
#: second number: a single bad pair may be the link.
PARTNERS, _FEWEST = 3, 2
#: Most rounds of pairs: enough for all pairs of 16 nodes.
MOST_PAIRINGS = 15
#: Most links to find.
MOST_LINKS = 8


@dataclass(frozen=True)
class Culprit:
    """A faulty node or link."""

    #: One node that is bad with all its partners; or two that are bad with each other and good with others. If there
    #: are only two nodes, these two.
    nodes: Group
    seconds: Result  # Time of the pair, or of the node with a partner; None: it failed.


@dataclass(frozen=True)
class IsolationResult:
    """Result of a search."""

    is_bad: bool  # Whether any group is bad.
    culprits: tuple[Culprit, ...]  # Faulty nodes and links.
    more: int  # Number of further bad nodes that had too few partners to be sure.
    seconds: Result  # Time of all nodes together; None: they failed.
    usual: Result  # Time of the fastest group; None: all failed.
    rounds: int  # Number of rounds of measurements.


def find(nodes: Sequence[int], measure: Measure, *, limit: Result = None) -> IsolationResult:
    """Find the faulty nodes and links among nodes that were slow or failed together.

    ``limit`` is the most seconds that good nodes take, if known. It is needed if all nodes are equally slow, or if
    there are only two, because then there is nothing to compare with.
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
                if self._is_decided():  # A faster group may turn earlier ones into slow ones.
                    return self._outcome(links)
        return self._outcome(self._confirm())

    def _confirm(self) -> list[Group]:
        """Measure bad groups once more, and find links."""
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
            self._measure([self.nodes])  # All together may have been slow only once.
        is_bad = bool(culprits or more) or self._is_bad(self.nodes) or self._is_beyond_limit(self.nodes)
        return IsolationResult(is_bad, tuple(culprits), more, self.results[self.nodes], self.usual, self.rounds)

    def _is_link(self, pair: Group) -> bool:
        """Return True if a pair is bad whose nodes are good with others, or are the only two."""
        if pair == self.nodes:
            return self._is_bad(pair) or self._is_beyond_limit(pair)
        return self._is_bad(pair) and self._well().issuperset(pair)

    def _well(self) -> set[int]:
        """Return the good nodes, which are in at least one good group."""
        return {node for group in self.results if not self._is_bad(group) for node in group}

    def _failing(self) -> dict[int, list[Group]]:
        """Return the nodes that are bad in all groups, each with its pairs with good nodes.

        Empty if there is no good node to compare with.
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
        """Return True if more pairs would not change the result for any node; more bad nodes need more pairs.

        If all pairs are equally good, all nodes may be slow, unless ``limit`` is known.
        """
        failing = self._failing()
        if failing:
            return min(map(len, failing.values())) >= PARTNERS + len(failing) - 1
        is_any_fast = self.limit is not None and not all(map(self._is_beyond_limit, self.results))
        return bool(self._well()) and (is_any_fast or any(map(self._is_bad, self.results)))

    def _links(self) -> list[Group]:
        """Find bad pairs of nodes that are good with others."""
        found: list[Group] = []
        while True:
            found += [pair for pair in self.results if len(pair) == 2 and self._is_link(pair) and pair not in found]
            rest = tuple(sorted(self._well() - _without(found)))
            if len(found) >= MOST_LINKS or len(rest) < 2 or not self._judge([rest])[0]:
                return found
            self._judge(pairings(rest)[-1])  # If two racks cannot reach each other, this finds many links at once.
            if not any(self._is_link(pair) for pair in self.results if {*pair} <= {*rest} and len(pair) == 2):
                pair = self._search_link(rest)
                if not self._judge([pair])[0]:
                    return found

    def _search_link(self, nodes: Group) -> Group:
        """Return the first and last node of the smallest bad part of a group, by binary search."""

        def is_bad(start: int, end: int) -> bool:
            return self._judge([nodes[start:end]])[0]

        end = 2 + bisect_left(range(2, len(nodes)), True, key=lambda end: is_bad(0, end))
        start = bisect_left(range(1, end - 1), True, key=lambda start: not is_bad(start, end))
        return nodes[start], nodes[end - 1]

    def _judge(self, groups: list[Group]) -> list[bool]:
        """Measure groups once, slow ones twice; return which are bad."""
        self._measure([group for group in groups if not self.looks[group]])
        self._measure([group for group in groups if self.looks[group] == 1 and self._is_slow(group)])
        return [*map(self._is_bad, groups)]

    def _measure_again(self, groups: Iterable[Group]) -> None:
        """Measure slow groups once more before any is reported, because a busy machine is slow for a while."""
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
        """Return True if a group is slow and all nodes together did not fail: slowness does not explain a failure."""
        result = self.results[group]
        if result is None or self.usual is None or self.results[self.nodes] is None:
            return False
        return result > SLOW * self.usual

    def _is_beyond_limit(self, group: Group) -> bool:
        """Return True if a group that did not fail exceeds ``limit``, even if the others are not much faster."""
        result = self.results[group]
        return result is not None and self.limit is not None and result > self.limit

    def _best(self, groups: Iterable[Group]) -> Result:
        return _least(*(self.results[group] for group in groups))


def _without(links: Iterable[Group]) -> set[int]:
    """Return nodes that cover all links, chosen greedily: the node with the most links, the last one of equals."""
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
    """Return all pairs of nodes, in rounds in which each has one partner; with an odd number one node has none.

    This is the circle method: all but the first node rotate, and each is paired with the opposite one. The first round
    pairs neighbours, in case racks cannot reach each other; later rounds pair distant nodes.
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
