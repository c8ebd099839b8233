"""Slurm's short way to write host names."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.system.hostlist import MOST_HOSTS, expand, fold, split


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu01", ["gpu01"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[0-1]n[1-2]", ["rack0n1", "rack0n2", "rack1n1", "rack1n2"]),
        ("n[1-2]-ib, x", ["n1-ib", "n2-ib", "x"]),
        ("a-b.example.org", ["a-b.example.org"]),
    ],
)
def test_examples(text, hosts):
    assert list(expand(text)) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "gpu[", "gpu[]", "gpu[a-b]", "gpu[3-1]", "gpu]1", "gpu[1-2", "n[1,,2]"])
def test_bad_lists(text):
    with pytest.raises(ValueError, match=r"."):
        list(expand(text))


@pytest.mark.parametrize(
    "text", ["n[0-65535]", "n[0-255]m[0-255]", "a[1-2]," + ",".join(f"b{n}" for n in range(65_534))]
)
def test_as_many_hosts_as_a_list_can_have(text):
    hosts = list(expand(text))
    assert len({*hosts}) == MOST_HOSTS
    assert {*expand(fold(hosts))} == {*hosts}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("n[0-65536]", "'n[0-65536]'"),
        ("n[0-99999999]", "'n[0-99999999]'"),
        (f"n[0-{'9' * 18}]", f"'n[0-{'9' * 18}]'"),
        ("n[0-255]m[0-256]", "'n[0-255]m[0-256]'"),
        ("a[0-65534],b,c", "'a[0-65534],b,c'"),
        ("[0-9]" * 2000, f"'{'[0-9]' * 11}[0-9…'"),
    ],
)
def test_more_hosts_than_a_list_can_have_are_refused_before_the_first(text, shown):
    with pytest.raises(ValueError, match=r".") as raised:
        next(expand(text))
    assert str(raised.value) == f"{shown} is more than 65,536 hosts, the most that a list can have"


def test_names_and_numbers_that_are_too_long():
    with pytest.raises(ValueError, match=r"is a name of 100,001 characters, and 255 is the most"):
        next(expand("a" * 100_000 + "[0-9]"))
    with pytest.raises(ValueError, match=r"invalid range of numbers: '0000000000000000000-1'"):
        next(expand("n[0000000000000000000-1]"))


def test_a_long_text_is_split_in_no_time():
    count = 1_000_000  # Where each comma has what follows it looked at, this takes hours.
    assert split("n," * count + "n") == ["n"] * (count + 1)
    assert split("n" + "[" * count + ",n") == ["n" + "[" * count, "n"]


@given(st.lists(st.tuples(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1)), min_size=1, max_size=3))
def test_any_ranges_are_counted_before_they_are_listed(ranges):
    text = "n" + "".join(f"[{first}-{last}]" for first, last in ranges)
    try:
        hosts = list(itertools.islice(expand(text), MOST_HOSTS + 1))
    except ValueError:
        return
    assert len(hosts) == math.prod(last - first + 1 for first, last in ranges) <= MOST_HOSTS


names = st.from_regex(r"[a-z]{1,4}-?", fullmatch=True)


@given(
    names,
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_ranges_give_every_number_once_with_its_zeros(prefix, ranges, width):
    written = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more in ranges)
    wanted = [f"{prefix}{n:0{width}d}" for first, more in ranges for n in range(first, first + more + 1)]
    assert list(expand(f"{prefix}[{written}]")) == wanted


@given(st.lists(names, min_size=1, max_size=6))
def test_plain_names_come_back_as_they_are(hosts):
    assert list(expand(",".join(hosts))) == hosts


@given(st.text(alphabet="ab01[]-, ", max_size=12))
def test_any_text_gives_hosts_or_a_value_error(text):
    try:
        hosts = list(expand(text))
    except ValueError:
        return
    assert hosts
    assert not any(set(host) & set("[], ") for host in hosts)


hosts = st.from_regex(r"[a-z]{0,3}-?[0-9]{1,3}(-ib)?|[a-z]{1,4}", fullmatch=True)


@given(st.lists(hosts, min_size=1, max_size=8))
def test_what_is_folded_can_be_expanded(found):
    assert sorted(expand(fold(found))) == sorted({*found})


def test_hosts_in_a_row_are_folded():
    assert fold(["gpu03", "gpu01", "login", "gpu02", "gpu07"]) == "gpu[01-03,07],login"
    assert fold(["10.0.0.9"]) == "10.0.0.9"
