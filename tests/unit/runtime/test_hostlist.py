"""Slurm's short way to write host names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.hostlist import expand, fold


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
