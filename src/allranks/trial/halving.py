"""Finds the nodes and links at fault among nodes that are slow or fail together.

Pure: how a group of nodes does is told by a function. A group does badly if it holds a node at fault, or both ends of
a link at fault. Groups of one round share no node and are measured at the same time.

At first the nodes work in pairs, with other partners in each round, until those that do well with somebody are told
from those that do badly with everybody. Links that are bad between nodes that do well are then found by halving, so
that the number of rounds grows with the logarithm of the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from allranks.trial.halves import Group, Part, pairings, within

#: Seconds that a group took for work that takes good nodes as long in a group of any size; None: it failed.
Result = float | None
Measure = Callable[[Sequence[Group]], Sequence[Result]]
#: A group is slow if it takes more than this times what the fastest one took.
SLOW = 3.0
#: A node is at fault if it does badly with so many others that do well with each other or somebody else; with all of
#: these, where they are fewer, but never by the word of one: that may be the link.
PARTNERS, _FEWEST = 3, 2
#: So many rounds of pairs at most: all pairs of 16 nodes.
MOST_PAIRINGS = 15


@dataclass(frozen=True)
class Culprit:
    """What is at fault.

    Attributes:
        nodes: one node, which does badly with each other one that it was tried with; or two, which do so with each
            other and well with others. Of two nodes in all, it is only known that they do badly.
        seconds: what they took, a node with another one; None: they failed.
    """

    nodes: Group
    seconds: Result


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    Attributes:
        is_bad: whether anything does badly.
        culprits: what could be pinned down.
        more: how many further nodes do badly, and were tried with too few others to say that they are at fault.
        seconds: what all nodes together took; None: they failed.
        usual: what the fastest of all groups took; None: all failed.
        rounds: how many rounds of measurements it took.
    """

    is_bad: bool
    culprits: tuple[Culprit, ...]
    more: int
    seconds: Result
    usual: Result
    rounds: int


def find(nodes: Sequence[int], measure: Measure, *, limit: Result = None) -> Outcome:
    """Find what is at fault among nodes that were slow or failed together.

    Args:
        nodes: two nodes or more.
        measure: has groups of two nodes or more work at the same time, and tells how each did.
        limit: seconds that good nodes never exceed, where that is known: nodes that are all as slow as each other, or
            two alone, cannot be compared.
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

    def run(self) -> Outcome:
        self._judged([self.nodes])
        for pairs in pairings(self.nodes)[:MOST_PAIRINGS]:
            self._judged(pairs)
            if self._is_told_apart():
                links = self._looked_closely()
                if self._is_told_apart():  # It may have found that all that was measured before is slow.
                    return self._outcome(links)
        return self._outcome(self._looked_closely())

    def _looked_closely(self) -> list[Group]:
        """Measure what is at fault once more, and find links."""
        self._look_again(chain.from_iterable(pairs[:PARTNERS] for pairs in self._at_fault().values()))
        links = self._links()
        self._look_again(links)
        return links

    def _outcome(self, links: Sequence[Group]) -> Outcome:
        at_fault = self._at_fault()
        more = len(self._failing()) - len(at_fault)
        culprits = [Culprit((node,), self._best(pairs)) for node, pairs in at_fault.items()]
        culprits += [Culprit(pair, self.results[pair]) for pair in links if self._is_link(pair)]
        if self._well() and self._is_bad(self.nodes) and not (culprits or more):
            self._measure([self.nodes])  # It was only once, perhaps.
        is_bad = bool(culprits or more) or self._is_bad(self.nodes) or self._is_beyond_limit(self.nodes)
        return Outcome(is_bad, tuple(culprits), more, self.results[self.nodes], self.usual, self.rounds)

    def _is_link(self, pair: Group) -> bool:
        """Tell whether a pair does badly, both of which do well with others, or are all that there is."""
        if pair == self.nodes:
            return self._is_bad(pair) or self._is_beyond_limit(pair)
        return self._is_bad(pair) and self._well().issuperset(pair)

    def _well(self) -> set[int]:
        """Return the nodes that do well with somebody: none of them is at fault by itself."""
        return {node for group in self.results if not self._is_bad(group) for node in group}

    def _failing(self) -> dict[int, list[Group]]:
        """Return the nodes that do well with nobody, each with the pairs in which it does badly with one that does.

        There are none where nobody does well: that says nothing of any of them.
        """
        well = self._well()
        pairs = [pair for pair in self.results if len(pair) == 2 and len(well.intersection(pair)) == 1]
        return {node: [pair for pair in pairs if node in pair] for node in self.nodes if well and node not in well}

    def _at_fault(self) -> dict[int, list[Group]]:
        enough = max(_FEWEST, min(PARTNERS, len(self._well())))
        return {node: pairs for node, pairs in self._failing().items() if len(pairs) >= enough}

    def _is_told_apart(self) -> bool:
        """Tell whether more pairs would say nothing new of any node: the more do badly, the less each one is believed.

        Where all do as well as each other, they may all be slow, unless it is known what good ones take.
        """
        failing = self._failing()
        if failing:
            return min(map(len, failing.values())) >= PARTNERS + len(failing) - 1
        is_any_fast = self.limit is not None and not all(map(self._is_beyond_limit, self.results))
        return bool(self._well()) and (is_any_fast or any(map(self._is_bad, self.results)))

    def _links(self) -> list[Group]:
        """Find pairs that do badly, of nodes that do well with others."""
        found: list[Group] = [pair for pair in self.results if len(pair) == 2 and self._is_link(pair)]
        new = [self.nodes]
        while new:  # Each time those that share a node with what was found may have been left out.
            rest = tuple(sorted(self._well().difference(_without(found))))
            new = self._drive(within(rest)) if len(rest) > 1 and self._judged([rest])[0] else []
            new = [pair for pair in new if pair not in found]
            found += new
        return found

    def _drive(self, part: Part) -> list[Group]:
        try:
            groups = next(part)
            while True:
                groups = part.send(self._judged(groups))
        except StopIteration as end:
            found: list[Group] = end.value
            return found

    def _judged(self, groups: list[Group]) -> list[bool]:
        """Measure groups once, slow ones twice; tell which do badly."""
        self._measure([group for group in groups if not self.looks[group]])
        self._measure([group for group in groups if self.looks[group] == 1 and self._is_slow(group)])
        return [*map(self._is_bad, groups)]

    def _look_again(self, groups: Iterable[Group]) -> None:
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
        result = self.results[group]
        return result is not None and self.usual is not None and result > SLOW * self.usual

    def _is_beyond_limit(self, group: Group) -> bool:
        """Tell whether a group that did not fail is too slow; where others are little faster, it is not at fault."""
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
