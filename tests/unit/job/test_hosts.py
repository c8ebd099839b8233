"""Machines of a job: lists and files of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import JobError
from allranks.job.hosts import (
    Host,
    excluded_in_vain,
    hosts_of,
    look_like_hosts,
    parse_hosts,
    read_hostfile,
    taking_part,
)
from allranks.job.spec import Job

names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z0-9]", fullmatch=True)
hosts = st.builds(
    Host,
    names,
    user=st.none() | st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    port=st.none() | st.integers(1, 65535),
    slots=st.none(),  # Only a file of hosts has them.
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu[1-3]", [Host("gpu1"), Host("gpu2"), Host("gpu3")]),
        ("gpu1,gpu2", [Host("gpu1"), Host("gpu2")]),
        ("ada@gpu[1,3]:2222, x", [Host("gpu1", "ada", 2222), Host("gpu3", "ada", 2222), Host("x")]),
        ("10.0.0.4", [Host("10.0.0.4")]),
        ("10.0.0.[4-5]", [Host("10.0.0.4"), Host("10.0.0.5")]),
        ("2001:db8::7", [Host("2001:db8::7")]),
        ("ada@[2001:db8::7]:22", [Host("2001:db8::7", "ada", 22)]),
        ("fe80::1%eth0", [Host("fe80::1%eth0")]),
        ("gpu1:22,gpu1:23", [Host("gpu1", None, 22), Host("gpu1", None, 23)]),
    ],
)
def test_lists(text: str, expected: list[Host]):
    assert [*parse_hosts([text])] == expected


@given(st.lists(hosts, min_size=1, max_size=6, unique_by=lambda host: (host.name, host.port)))
def test_what_is_written_is_read_again(given: list[Host]):
    assert [*parse_hosts([",".join(map(str, given))])] == given
    assert [*parse_hosts([*map(str, given)])] == given
    assert [*read_hostfile("\n".join(map(str, given)))] == given


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("-oProxyCommand=touch", "invalid host: '-oProxyCommand=touch'"),
        ("ada@-x", "invalid host: 'ada@-x'"),
        ("-x@gpu1", "invalid host: '-x@gpu1'"),
        ("gpu1;reboot", "invalid host: 'gpu1;reboot'"),
        ("$(reboot)", "invalid host: '$(reboot)'"),
        ("gpu1:70000", "'gpu1:70000': there is no port 70000"),
        ("gpu1:0", "'gpu1:0': there is no port 0"),
        ("gpu[3-1]", "invalid range of numbers: '3-1'"),
        ("gpu1,,gpu2", "an empty name in 'gpu1,,gpu2'"),
        ("gpu1,gpu1", "gpu1 is listed twice"),
        ("ada@gpu1,bob@gpu1", "bob@gpu1 is listed twice"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, error: str):
    with pytest.raises(ValueError, match=r".") as raised:
        parse_hosts([text])
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize("items", [["a[0-65535],b"], ["a[0-65535]", "b"], [f"r{n}n[0-65535]" for n in range(20_000)]])
def test_more_hosts_than_a_list_can_have(items: list[str]):
    for read in (parse_hosts, lambda items: read_hostfile("\n".join(items).replace(",", "\n"))):
        with pytest.raises(ValueError, match=r"^these are more than 65,536 hosts, the most that a list can have$"):
            read(items)


def test_all_of_a_long_list_are_excluded():
    job = _job("n[1-65535]", hosts="n[0-65535]")
    assert hosts_of(job, Path()) == (Host("n0"),)


@given(st.text(max_size=12))
def test_any_text_gives_hosts_or_a_value_error(text: str):
    try:
        found = parse_hosts([text])
    except ValueError:
        return
    assert found
    assert not any(host.name.startswith("-") or set(host.name) & set(" ;&|$`'\"\\\n") for host in found)


@pytest.mark.parametrize(
    "text", ["gpu1,gpu2", "gpu-node1", "gpu[1-3]", "10.0.0.1,10.0.0.2", "2001::1,2001::2", "a@b", "gpu1"]
)
def test_names_instead_of_a_number_of_nodes(text: str):
    assert look_like_hosts(text)


@pytest.mark.parametrize("text", ["2", "2:4", "-1", "1.5", "", "eight", "2,4"])
def test_a_number_of_nodes_is_no_name(text: str):
    assert not look_like_hosts(text)


def test_a_file_of_hosts():
    text = "# two racks\n\ngpu[1-2] slots=8\n  ada@gpu7:2222   slots=4  # the old one\nx\n"
    assert [*read_hostfile(text)] == [
        Host("gpu1", slots=8),
        Host("gpu2", slots=8),
        Host("gpu7", "ada", 2222, 4),
        Host("x"),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gpu1\ngpu2 slot=8\n", "line 2: 'slot=8' is not understood, only slots=N is"),
        ("gpu1 slots=0", "line 1: 'slots=0' is not understood, only slots=N is"),
        ("gpu1 slots=1 slots=2", "line 1: slots= is given twice"),
        ("# nothing\n", "it names no host"),
        ("gpu1\ngpu1", "gpu1 is listed twice"),
    ],
)
def test_what_is_no_file_of_hosts(text: str, error: str):
    with pytest.raises(ValueError, match=r".") as raised:
        read_hostfile(text)
    assert str(raised.value).startswith(error)


def _job(exclude: str | None = None, **resources: object) -> Job:
    scheduler = {} if exclude is None else {"exclude": exclude}
    return Job.model_validate({"script": "train.py", "cluster": "lab", "resources": resources, "scheduler": scheduler})


def test_the_first_ones_are_taken_if_a_job_asks_for_fewer(tmp_path: Path):
    assert [host.name for host in hosts_of(_job(hosts="gpu[1-4]", nodes=2), tmp_path)] == ["gpu1", "gpu2"]
    assert len(hosts_of(_job(hosts="gpu[1-4]"), tmp_path)) == 4
    (tmp_path / "hosts").write_text("gpu1 slots=2\ngpu2\n")
    assert hosts_of(_job(hostfile="hosts"), tmp_path) == (Host("gpu1", slots=2), Host("gpu2"))


@pytest.mark.parametrize(
    ("resources", "count", "part"),
    [
        ({}, 5, (5, 5)),
        ({"nodes": 2}, 2, (2, 2)),
        ({"nodes": "2:4"}, 4, (2, 4)),
        ({"nodes": "2:8"}, 5, (2, 5)),
        ({"spares": 2}, 5, (3, 3)),
        ({"nodes": 2, "spares": 1}, 3, (2, 2)),
        ({"nodes": "2:8", "spares": 1}, 5, (2, 4)),
    ],
)
def test_how_many_take_part(tmp_path: Path, resources: dict[str, object], count: int, part: tuple[int, int]):
    job = _job(hosts="gpu[1-5]", **resources)
    found = hosts_of(job, tmp_path)
    assert ([host.name for host in found], taking_part(job, found)) == ([f"gpu{n}" for n in range(1, count + 1)], part)


@given(st.integers(1, 9), st.integers(0, 9), st.none() | st.tuples(st.integers(1, 9), st.integers(0, 9)))
def test_whatever_is_asked_for_there_are_enough_or_an_error(listed: int, spares: int, nodes: tuple[int, int] | None):
    asked = {} if nodes is None else {"nodes": f"{nodes[0]}:{sum(nodes)}"}
    job = _job(hosts=f"gpu[1-{listed}]", spares=spares, **asked)
    try:
        found = hosts_of(job, Path())
    except JobError:
        assert listed < spares + (nodes[0] if nodes else 1)
        return
    least, most = taking_part(job, found)
    assert 1 <= least <= most == len(found) - spares
    assert len(found) <= listed
    assert nodes is None or (nodes[0] == least and most <= sum(nodes))


@pytest.mark.parametrize(
    ("exclude", "resources", "left"),
    [
        ("gpu2", {"hosts": "gpu[1-4]"}, ["gpu1", "gpu3", "gpu4"]),
        ("gpu[1,3]", {"hosts": "gpu[1-4]"}, ["gpu2", "gpu4"]),
        ("gpu2", {"hosts": "gpu[1-4]", "nodes": 3}, ["gpu1", "gpu3", "gpu4"]),
        ("gpu1", {"hosts": "gpu[1-4]", "nodes": 2, "spares": 1}, ["gpu2", "gpu3", "gpu4"]),
        ("gpu2,gpu2", {"hosts": "gpu[1-2]"}, ["gpu1"]),
        ("gpu2", {"hosts": "ada@gpu[1-2]:2222"}, ["ada@gpu1:2222"]),
        ("ada@gpu2:2222", {"hosts": "ada@gpu[1-2]:2222"}, ["ada@gpu1:2222"]),
        ("gpu1:23", {"hosts": "gpu1:22,gpu1:23"}, ["gpu1:22"]),
        ("bob@gpu2,gpu22", {"hosts": "ada@gpu[1-2]"}, ["ada@gpu1", "ada@gpu2"]),
    ],
)
def test_hosts_that_are_left_out(tmp_path: Path, exclude: str, resources: dict[str, object], left: list[str]):
    assert [*map(str, hosts_of(_job(exclude, **resources), tmp_path))] == left


def test_hosts_of_a_file_are_left_out_too(tmp_path: Path):
    (tmp_path / "hosts").write_text("gpu1 slots=2\ngpu2\n")
    assert hosts_of(_job("gpu2", hostfile="hosts"), tmp_path) == (Host("gpu1", slots=2),)


def test_what_is_excluded_in_vain(tmp_path: Path):
    assert excluded_in_vain(_job("gpu2,gpu9,bob@gpu1", hosts="gpu[1-4]"), tmp_path) == ("gpu9", "bob@gpu1")


@pytest.mark.parametrize(
    ("exclude", "resources", "error"),
    [
        (
            "gpu2",
            {"nodes": 3},
            "3 nodes were requested, and 2 hosts are left without those of scheduler.exclude\n  why: gpu1, gpu3\n"
            "  fix: --nodes 2, or more hosts in resources.hosts",
        ),
        (
            "gpu[1-3]",
            {},
            "scheduler.exclude leaves no host\n  why: all that are listed are among gpu[1-3]\n"
            "  fix: exclude fewer, or list more hosts in resources.hosts",
        ),
        ("gpu[1", {}, "scheduler.exclude: 'gpu[1' has a bracket that is not closed or holds no numbers\n"),
    ],
)
def test_too_many_are_left_out(tmp_path: Path, exclude: str, resources: dict[str, object], error: str):
    with pytest.raises(JobError) as raised:
        hosts_of(_job(exclude, hosts="gpu[1-3]", **resources), tmp_path)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    ("resources", "error"),
    [
        ({}, "cluster lab has no hosts\n"),
        ({"hosts": "gpu[1-2]", "nodes": 3}, "3 nodes were requested, and 2 hosts are listed\n  why: gpu1, gpu2\n"),
        ({"hosts": "gpu1", "nodes": "2:4"}, "at least 2 nodes were requested, and 1 host is listed\n  why: gpu1\n"),
        ({"hosts": "gpu[1-2]", "spares": 2}, "2 spares were requested, and 2 hosts are listed\n  why: gpu1, gpu2\n"),
        (
            {"hosts": "gpu[1-4]", "nodes": 4, "spares": 1},
            "4 nodes and 1 spare were requested, and 4 hosts are listed\n  why: gpu1, gpu2, gpu3, gpu4\n",
        ),
        ({"hosts": "gpu[1"}, "resources.hosts: "),
        ({"hostfile": "nowhere"}, "resources.hostfile: cannot read nowhere\n  why: No such file or directory"),
    ],
)
def test_errors_name_what_was_asked_for(tmp_path: Path, resources: dict[str, object], error: str):
    with pytest.raises(JobError) as raised:
        hosts_of(_job(**resources), tmp_path)
    assert str(raised.value).startswith(error)
