"""The search for what is at fault, on nodes that are made up: what is bad is found, what is good is not named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.selftest.halving import Culprit, Group, IsolationResult, Result, find, pairings

GOOD = 1.0


class Cluster:
    """Nodes, some of which, or links between which, do badly."""

    def __init__(self, nodes: int, faults: Iterable[Group] | Mapping[Group, Result], bad: Result = None) -> None:
        self.nodes, self.noise = range(nodes), [1.0]
        self.faults: dict[Group, Result] = dict(faults if isinstance(faults, Mapping) else dict.fromkeys(faults, bad))
        self.asked: list[list[Group]] = []

    def __repr__(self) -> str:
        return f"{len(self.nodes)} nodes with {self.faults}"

    def __call__(self, groups: Sequence[Group]) -> list[Result]:
        in_use = [node for group in groups for node in group]
        assert len({*in_use}) == len(in_use), "groups of a round share a node"
        assert all(len(group) > 1 and list(group) == sorted(group) for group in groups)
        self.asked.append([*groups])
        return [self.result(group) for group in groups]

    def result(self, group: Group) -> Result:
        took = [seconds for fault, seconds in self.faults.items() if {*fault} <= {*group}]
        if None in took:
            return None
        return max([GOOD * self.noise[len(self.asked) % len(self.noise)], *filter(None, took)])

    def others(self, node: int) -> set[int]:
        return {*self.nodes} - {node}

    def is_bad(self, node: int, other: int, than: float = 2.0) -> bool:
        """Return whether two do badly: they fail, or take longer than good ones may, or than something else takes."""
        took = self.result((node, other))
        return took is None or took > than

    def well(self) -> set[int]:
        return {node for node in self.nodes if not all(self.is_bad(node, other) for other in self.others(node))}

    def best(self, node: int) -> float:
        return min(self.result((node, other)) or float("inf") for other in self.others(node))

    def is_true(self, culprit: Culprit) -> bool:
        """A link does worse than its ends with others; a node does so with three others, or with all that do well."""
        node, *other = culprit.nodes
        if other:
            return all(self.is_bad(*culprit.nodes, than=2 * self.best(end)) for end in culprit.nodes)
        worse = {other for other in self.others(node) if self.is_bad(node, other, than=2 * self.best(other))}
        return node not in self.well() or len(worse) >= 3 or (len(worse) == 2 and worse == self.well() - {node})

    def find(self, limit: Result = None) -> IsolationResult:
        found = find(self.nodes, self, limit=limit)
        assert found.rounds == len(self.asked)
        return found


def named(found: IsolationResult) -> list[Group]:
    return [culprit.nodes for culprit in found.culprits]


sizes = st.integers(3, 16)
how_bad = st.none() | st.floats(8.0, 1000.0)
noises = st.lists(st.floats(1.0, 2.0), min_size=1, max_size=7)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw nodes of which any do badly, and any links: each in its own way, or all alike."""
    nodes = range(draw(sizes))
    alike, is_alike = draw(how_bad), draw(st.booleans())
    seconds = st.just(alike) if is_alike else st.sampled_from([None, 8.0, 100.0, 1500.0])
    links = draw(st.dictionaries(st.sampled_from([*combinations(nodes, 2)]), seconds))
    alone = draw(st.dictionaries(st.sampled_from(nodes), seconds))
    cluster = Cluster(len(nodes), {**links, **{(node,): took for node, took in alone.items()}})
    cluster.noise = draw(noises) if is_alike else [GOOD]
    return cluster


@given(clusters())
def test_what_is_named_is_bad_and_something_bad_is_named(cluster: Cluster) -> None:
    found = cluster.find()
    assert [culprit for culprit in found.culprits if not cluster.is_true(culprit)] == []
    if cluster.well():
        assert bool(found.culprits) == any(cluster.is_bad(*pair) for pair in combinations(cluster.nodes, 2))
    elif len({*cluster.faults.values()}) == 1:  # Else some do worse than others.
        assert (found.culprits, found.more) == ((), 0)


@pytest.mark.parametrize("bad", [None, 20.0])
@pytest.mark.parametrize("size", range(3, 9))
def test_of_any_nodes_at_fault_all_are_named_and_no_other(size: int, bad: Result) -> None:
    sets = chain.from_iterable(combinations([(node,) for node in range(size)], count) for count in range(size + 1))
    for at_fault in sets:
        expected = at_fault if len(at_fault) < size - 1 else ()
        assert tuple(named(Cluster(size, at_fault, bad).find())) == expected


@pytest.mark.parametrize("bad", [None, 20.0])
@pytest.mark.parametrize("at_fault", [range(0, 64, 4), range(16), [5, 17, 40]])
def test_among_64_many_nodes_are_named(at_fault: Sequence[int], bad: Result) -> None:
    assert named(Cluster(64, [(node,) for node in at_fault], bad).find()) == [(node,) for node in at_fault]


@given(sizes, st.sampled_from([None, 20.0]))
def test_where_all_do_badly_none_is_named(size: int, bad: Result) -> None:
    found = Cluster(size, combinations(range(size), 2), bad).find()
    assert (found.culprits, found.more, found.is_bad, found.seconds) == ((), 0, bad is None, bad)


@pytest.mark.parametrize(("bad", "rounds"), [(None, 5), (20.0, 11)])
def test_a_node_among_64_takes_few_rounds(bad: Result, rounds: int) -> None:
    for node in range(64):
        found = Cluster(64, [(node,)], bad).find()
        assert (named(found), found.rounds) == ([(node,)], rounds)


@given(st.sampled_from([*combinations(range(64), 2)]), how_bad)
def test_a_link_among_64_is_found_in_some_twenty_rounds(link: Group, bad: Result) -> None:
    found = Cluster(64, [link], bad).find()
    assert named(found) == [link]
    assert found.rounds <= 28  # The last one looks for further links.


@given(st.integers(2, 64), noises)
def test_where_nothing_is_wrong_nothing_is_found(size: int, noise: list[float]) -> None:
    cluster = Cluster(size, [])
    cluster.noise = noise
    found = cluster.find()
    assert (found.is_bad, found.culprits, found.more) == (False, (), 0)


def test_nodes_known_to_be_fast_are_not_tried_in_all_pairs() -> None:
    assert Cluster(64, []).find(limit=2.0).rounds == 2
    assert Cluster(64, []).find().rounds == 16


def test_two_nodes_alone_are_a_link_that_failed_or_is_slower_than_is_known() -> None:
    failed, slow = (Culprit((0, 1), seconds) for seconds in (None, 20.0))
    assert Cluster(2, [(0,)]).find() == IsolationResult(True, (failed,), 0, None, None, 1)
    assert Cluster(2, [(0,)], 20.0).find(limit=10.0) == IsolationResult(True, (slow,), 0, 20.0, 20.0, 2)
    assert Cluster(2, [(0,)], 20.0).find(limit=20.0) == IsolationResult(False, (), 0, 20.0, 20.0, 1)
    assert Cluster(2, [(0,)], 20.0).find() == IsolationResult(False, (), 0, 20.0, 20.0, 1)


def test_all_slower_than_is_known_are_bad_and_the_slowest_is_named() -> None:
    every = {(node,): 20.0 for node in range(4)}
    assert Cluster(4, every).find(limit=10.0) == IsolationResult(True, (), 0, 20.0, 20.0, 4)
    assert named(Cluster(4, {**every, (2,): 100.0}).find(limit=10.0)) == [(2,)]


def test_a_node_is_at_fault_that_is_much_slower_than_the_fastest() -> None:
    assert not Cluster(4, [(2,)], 2.5).find().is_bad
    assert named(Cluster(4, [(2,)], 3.5).find(limit=4.0)) == [(2,)]
    little = Cluster(4, [(2,)], 2.5).find(limit=2.0)
    assert (little.is_bad, little.culprits, little.more) == (True, (), 0)


def test_what_fails_only_all_together_is_told_so() -> None:
    cluster = Cluster(8, [tuple(range(8))])
    assert cluster.find() == IsolationResult(True, (), 0, None, GOOD, len(cluster.asked))


def test_a_node_that_was_tried_with_too_few_is_counted_and_not_named() -> None:
    """Of 64 nodes two do well, and meet in the last of the rounds of pairs."""
    well = pairings(range(64))[14][3]
    found = Cluster(64, [(node,) for node in range(64) if node not in well]).find()
    assert all(node not in well for (node,) in named(found))
    assert len(found.culprits) + found.more == 62
    assert found.more


def test_a_fast_pair_that_is_only_found_in_the_end_makes_slow_what_was_well_before() -> None:
    """Of the first pairs each is as slow as the other, and all together are slower."""
    cluster = Cluster(4, {(0, 2): 64.0, (2, 3): 8.0, (0,): 8.0})
    assert named(cluster.find()) == [(0,), (2, 3)]


@pytest.mark.parametrize("bad", [None, 20.0])
def test_links_that_share_a_node_with_others_are_named_too(bad: Result) -> None:
    """Halving finds links of different nodes alone: it is done again without what was found."""
    links = [(0, 2), (0, 3), (1, 4)]
    assert sorted(named(find(range(8), Cluster(8, links, bad)))) == links


@pytest.mark.parametrize("size", range(4, 66, 2))
def test_two_halves_that_do_not_reach_each_other_are_links(size: int) -> None:
    half = size // 2
    found = Cluster(size, [(one, other) for one in range(half) for other in range(half, size)]).find()
    assert found.culprits
    assert all(one < half <= other for one, other in named(found))


@given(st.integers(2, 65))
def test_in_rounds_of_pairs_each_node_meets_each_other_one_once(size: int) -> None:
    rounds = pairings(range(size))
    assert sorted(chain.from_iterable(rounds)) == [*combinations(range(size), 2)]
    assert len(rounds) == size - 1 + size % 2
    assert all(len({*chain.from_iterable(pairs)}) == 2 * len(pairs) for pairs in rounds)


def test_a_slow_measurement_that_does_not_come_again_is_no_fault() -> None:
    cluster = Cluster(8, [(3,)], 20.0)

    def once(groups: Sequence[Group]) -> list[Result]:
        results = cluster(groups)
        if len(cluster.asked) == 2:
            cluster.faults.clear()
        return results

    assert not find(cluster.nodes, once).is_bad


def test_what_is_slow_for_a_while_is_not_named() -> None:
    """The first two measurements of each group are slow by chance, as on a busy machine."""
    seen: dict[Group, int] = {}

    def measure(groups: Sequence[Group]) -> list[Result]:
        for group in groups:
            seen[group] = seen.get(group, 0) + 1
        return [20.0 if seen[group] < 3 and 2 in group else GOOD for group in groups]

    assert find(range(4), measure).culprits == ()


def test_where_all_together_fail_a_slow_node_is_not_named() -> None:
    """A busy machine is slow here and there: that is not why a link lets nothing through."""
    cluster = Cluster(8, {(2, 5): None, (1,): 20.0})
    assert named(cluster.find()) == [(2, 5)]
