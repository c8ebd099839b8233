"""The search by halving, on nodes that are made up: whatever is wrong is found, in few rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from allranks.trial.halving import Culprit, Fault, Group, Result, find

GOOD = 1.0


class Cluster:
    """Nodes, some of which, or links between which, do badly."""

    def __init__(self, nodes: int, faults: Iterable[Group], *, bad: Result = 20.0, noise: Sequence[float] = (1.0,)):
        self.nodes, self.bad, self.noise = range(nodes), bad, noise
        self.faults = [set(fault) for fault in faults]
        self.asked: list[list[Group]] = []

    def __call__(self, groups: Sequence[Group]) -> list[Result]:
        in_use = [node for group in groups for node in group]
        assert len({*in_use}) == len(in_use), "groups of a round share a node"
        assert all(len(group) > 1 and list(group) == sorted(group) for group in groups)
        self.asked.append([*groups])
        return [self._result(group) for group in groups]

    def _result(self, group: Group) -> Result:
        if any(fault <= {*group} for fault in self.faults):
            return self.bad
        return GOOD * self.noise[len(self.asked) % len(self.noise)]


def culprits(fault: Fault | None) -> list[Group]:
    assert fault
    return [culprit.nodes for culprit in fault.culprits]


sizes = st.integers(2, 64)
how_bad = st.none() | st.floats(8.0, 1000.0)
noises = st.lists(st.floats(1.0, 2.0), min_size=1, max_size=7)


@given(sizes.filter(lambda size: size > 2), how_bad, noises, st.data())
def test_a_node_is_found(size: int, bad: Result, noise: list[float], data: st.DataObject):
    node = data.draw(st.integers(0, size - 1))
    cluster = Cluster(size, [(node,)], bad=bad, noise=noise)
    assert culprits(find(cluster.nodes, cluster)) == [(node,)]


@given(sizes.filter(lambda size: size > 2), how_bad, noises, st.data())
def test_a_link_is_found(size: int, bad: Result, noise: list[float], data: st.DataObject):
    link = data.draw(st.sampled_from([*combinations(range(size), 2)]))
    cluster = Cluster(size, [link], bad=bad, noise=noise)
    assert culprits(find(cluster.nodes, cluster)) == [link]


@given(sizes, st.data())
def test_the_rounds_grow_with_the_logarithm_of_the_nodes(size: int, data: st.DataObject):
    links = [*combinations(range(size), 2)]
    fault = data.draw(st.sampled_from([*((node,) for node in range(size)), *links]))
    cluster = Cluster(size, [fault], bad=data.draw(how_bad))
    found = find(cluster.nodes, cluster, usual=GOOD)
    assert found and found.rounds == len(cluster.asked) <= 4 * ceil(log2(size)) + 4


@given(sizes, noises)
def test_where_nothing_is_wrong_nothing_is_found(size: int, noise: list[float]):
    cluster = Cluster(size, [], noise=noise)
    assert find(cluster.nodes, cluster) is None


@given(st.integers(8, 64), how_bad, st.data())
def test_two_nodes_in_different_halves_are_both_found(size: int, bad: Result, data: st.DataObject):
    one, other = data.draw(st.integers(0, size // 2 - 2)), data.draw(st.integers((size + 1) // 2, size - 1))
    cluster = Cluster(size, [(one,), (other,)], bad=bad)
    found = find(cluster.nodes, cluster, usual=GOOD)
    assert sorted(culprits(found)) == [(one,), (other,)]


def test_two_nodes_alone_are_a_link_that_failed_or_is_slower_than_is_known():
    failing = Cluster(2, [(0,)], bad=None)
    assert find((0, 1), failing) == Fault((Culprit((0, 1), None),), 0, None, None, 1)
    slow = Cluster(2, [(0,)])
    assert find((0, 1), slow, usual=GOOD) == Fault((Culprit((0, 1), 20.0),), 0, 20.0, GOOD, 3)
    assert find((0, 1), slow) is None


def test_what_the_culprits_took_is_told_beside_what_is_usual():
    cluster = Cluster(4, [(1, 2)])
    assert find(cluster.nodes, cluster) == Fault((Culprit((1, 2), 20.0),), 0, 20.0, GOOD, len(cluster.asked))


def test_a_slow_measurement_that_does_not_come_again_is_no_fault():
    cluster = Cluster(8, [(3,)])

    def once(groups: Sequence[Group]) -> list[Result]:
        results = cluster(groups)
        if len(cluster.asked) == 2:
            cluster.faults.clear()
        return results

    assert find(cluster.nodes, once) is None


def test_what_fails_only_all_together_is_told_so():
    cluster = Cluster(8, [range(8)], bad=None)
    assert find(cluster.nodes, cluster) == Fault((), 0, None, GOOD, len(cluster.asked))


def test_where_all_fails_a_few_are_named_and_the_rest_is_counted():
    cluster = Cluster(16, combinations(range(16), 2), bad=None)
    found = find(cluster.nodes, cluster)
    assert culprits(found) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert (found and found.more, found and found.usual) == (4, None)


def test_all_three_that_fail_with_each_other_leave_nothing_to_tell_them_apart():
    cluster = Cluster(3, combinations(range(3), 2), bad=None)
    found = find(cluster.nodes, cluster)
    assert found and (found.culprits, found.seconds) == ((), None)


def test_what_is_slow_for_a_while_is_not_named():
    """The first two measurements of each group are slow by chance, as on a busy machine."""
    seen: dict[tuple[int, ...], int] = {}

    def measure(groups):
        for group in groups:
            seen[group] = seen.get(group, 0) + 1
        return [20.0 if seen[group] < 3 and 2 in group else GOOD for group in groups]

    found = find(range(4), measure)
    assert found is None or found.culprits == ()
