"""The network, judged by what nodes have told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from seen import found, seen_of

from allranks.checks.model import Grade, Seen, failed, passed, skipped

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04", "gpu05")


def nodes(name: str, *facts: Any, hosts: tuple[str, ...] = HOSTS, job: Any = None) -> Seen:
    """Return what checks are given where nodes tell one fact each."""
    return seen_of({host: {name: fact} for host, fact in zip(hosts, facts, strict=False)}, job)


def grades(check: str, seen: Seen) -> list[tuple[str, str, str]]:
    return [(each.grade.value, each.host, each.what) for each in found(check, seen)]


def name_of(name: str, *addresses: str, error: str | None = None) -> dict[str, Any]:
    loopback = [each for each in addresses if each.startswith("127.")]
    return {"name": name, "full": name, "addresses": [*addresses], "loopback": loopback, "error": error, "seconds": 0.1}


def names(host: str, *own: str, master: dict[str, Any] | None = None, seconds: float | None = 0.1) -> dict[str, Any]:
    reverse = {"address": "10.0.0.1", "seconds": seconds}
    return {"own": name_of(host, *own), "master": master or name_of("gpu01", "10.0.0.1"), "reverse": reverse}


def card(mtu: int = 1500, speed: int | None = 10000, state: str = "up") -> dict[str, Any]:
    return {"mtu": mtu, "speed": speed, "state": state, "counters": {"rx_errors": 17}}


def route(address: str | None = "10.0.0.1", name: str | None = "eth0", **cards: Any) -> dict[str, Any]:
    why = "it carries the route to gpu01" if name else "left alone: there is no route to gpu01: Network is unreachable"
    return {"route": name, "why": why, "address": address, "all": {"lo": card(65536, None, "unknown"), **cards}}


def came(*others: int, error: str | None = None, began: float = 0.0, ended: float = 10.0) -> dict[str, Any]:
    why = {"kind": "port", "text": error} if error else None
    return {"error": why, "came": [*others], "strangers": [], "began": began, "ended": ended}


def met(ahead: float = 0.0, within: float = 0.0001) -> dict[str, Any]:
    clock = {"ahead": ahead, "within": within}
    return {"error": None, "address": "10.0.0.1", "clock": clock, "seconds": 0.01, "began": 0.0, "ended": 0.1}


def unmet(kind: str, text: str, began: float = 0.0, ended: float = 10.0) -> dict[str, Any]:
    return {"error": {"kind": kind, "text": text}, "seconds": 5.0, "began": began, "ended": ended}


def meeting(*facts: Any) -> Seen:
    seen = nodes("reach", *facts)
    return replace(seen, plan=replace(seen.plan, master_addr="gpu01", master_port=29500))


@pytest.mark.parametrize("check", ["hostname", "master-name", "dns", "mtu", "speed", "port", "reach", "clock", "mesh"])
def test_one_node_meets_nobody(check: str) -> None:
    facts = {"names": None, "interface": None, "port": None, "reach": None, "mesh": None}
    assert [each.grade for each in found(check, seen_of({"vm": facts}))] == [Grade.SKIP]


@pytest.mark.parametrize("check", ["interface", "mtu", "speed", "port", "reach", "clock", "mesh"])
def test_nobody_knows_yet_where_nodes_are_to_meet(check: str) -> None:
    facts = {"interface": None, "port": None, "reach": None, "mesh": None}
    findings = found(check, seen_of({"gpu01": facts, "gpu02": facts}))
    assert {replace(each, host="") for each in findings} == {skipped("the rendezvous address is not known yet")}


def test_a_name_that_means_the_loopback_is_told_of_the_node() -> None:
    debian = names("gpu01", "127.0.1.1")
    first, second = found("hostname", nodes("names", debian, names("gpu02", "10.0.0.2", "127.0.1.1")))
    assert (first.grade, first.host, first.what) == (Grade.WARN, "gpu01", "gpu01 means 127.0.1.1")
    assert first.fix == "a line in /etc/hosts of gpu01: the address that other nodes see, then gpu01"
    assert second == passed("gpu02 means 10.0.0.2, 127.0.1.1", host="gpu02")


def test_the_first_node_may_mean_anything_by_its_own_name() -> None:
    own = names("gpu01", master=name_of("gpu01", "127.0.1.1", "fe80::1"))
    seen = nodes("names", own, names("gpu02"), names("gpu03"))
    assert found("master-name", seen) == [passed("gpu01 means 10.0.0.1")]


def test_what_others_mean_by_the_name_of_the_first_node() -> None:
    wrong = [
        names("gpu02", master=name_of("gpu01", "127.0.1.1")),
        names("gpu03", master=name_of("gpu01", error="Name or service not known")),
        names("gpu04", master=name_of("gpu01", "10.9.9.9")),
    ]
    seen = nodes("names", names("gpu01"), *[names(host) for host in "abc"], *wrong, hosts=("gpu01", *"abc", *HOSTS[1:]))
    assert grades("master-name", seen) == [
        ("FAIL", "gpu02", "gpu01 means 127.0.1.1"),
        ("FAIL", "gpu03", "gpu01 has no address: Name or service not known"),
        ("WARN", "gpu04", "gpu01 means 10.9.9.9, and 10.0.0.1 on others"),
    ]


def test_nodes_on_one_machine_may_meet_at_its_loopback() -> None:
    local = names("vm", master=name_of("127.0.0.1", "127.0.0.1"))
    seen = seen_of({"a": {"names": local, "reach": came(1)}, "b": {"names": local, "reach": met()}})
    assert found("master-name", seen) == [passed("127.0.0.1 means 127.0.0.1")]


def test_one_address_of_several_is_enough() -> None:
    one, other = name_of("gpu01", "10.0.0.1", "10.0.0.9"), name_of("gpu01", "10.0.0.9")
    seen = nodes("names", names("gpu01"), names("gpu02", master=one), names("gpu03", master=other))
    assert [each.grade for each in found("master-name", seen)] == [Grade.PASS]


def test_names_that_take_long_to_find() -> None:
    seen = nodes("names", names("gpu01"), names("gpu02", seconds=2.5), names("gpu03", seconds=None))
    assert grades("dns", seen) == [
        ("PASS", "gpu01", "names of addresses are found within 2 s"),
        ("WARN", "gpu02", "the name of 10.0.0.1: 2.5 s"),
        ("WARN", "gpu03", "the name of 10.0.0.1: no answer"),
    ]


def test_interfaces() -> None:
    seen = nodes(
        "interface",
        route(eth0=card()),
        route("10.0.0.2", eth0=card(state="lowerlayerdown")),
        route(None, None, eth0=card()),
        route("10.0.0.4", "wg0", wg0=card(state="unknown", speed=None)),
    )
    assert grades("interface", seen) == [
        ("PASS", "gpu01", "eth0, 10.0.0.1"),
        ("FAIL", "gpu02", "eth0 is lowerlayerdown"),
        ("FAIL", "gpu03", "there is no route to gpu01: Network is unreachable"),
        ("PASS", "gpu04", "wg0, 10.0.0.4"),
    ]


def test_an_interface_that_was_asked_for() -> None:
    job = {"launch": {"interface": "ib0", "backend": "gloo"}}
    seen = nodes("interface", route(eth0=card(), ib0=card(2044)), route(eth0=card()), job=job)
    assert grades("interface", seen) == [("PASS", "gpu01", "ib0"), ("FAIL", "gpu02", "there is no interface ib0")]
    assert found("interface", seen)[1].fix == "launch.interface (--interface): gpu02 has lo, eth0"


def test_a_state_that_only_the_kernel_believes_in_is_no_fault() -> None:
    """Some drivers never say that their interface is up: what counts is that the first node was reached by it."""
    seen = seen_of({host: {"interface": route(tun0=card(state="down"), name="tun0")} for host in HOSTS[:2]})
    reached = [
        replace(node, facts={**node.facts, "reach": came(1) if node.number == 0 else met()}) for node in seen.nodes
    ]
    assert [each.grade for each in found("interface", replace(seen, nodes=tuple(reached)))] == [Grade.PASS] * 2


def test_the_odd_mtu_and_the_slow_link() -> None:
    seen = nodes(
        "interface",
        route(eth0=card(9000)),
        route(eth0=card(1500, 1000)),
        route(eth0=card(9000, 25000)),
        route(eth0=card(9000)),
    )
    assert grades("mtu", seen) == [("WARN", "gpu02", "1500 at eth0, and 9000 on the others")]
    assert grades("speed", seen) == [("WARN", "gpu02", "1 Gbit/s, and 10 Gbit/s on the others")]
    two = nodes("interface", route(eth0=card(speed=1000)), route(eth0=card()))
    assert grades("speed", two) == [("WARN", "gpu01", "1 Gbit/s, and 10 Gbit/s on the others")]
    virtual = nodes("interface", *[route(eth0=card(speed=None))] * 2)
    assert found("speed", virtual) == [skipped("the kernel does not report the speed of these interfaces")]


def ports(*states: str, rate: str = "100 Gb/sec (4X EDR)") -> list[dict[str, Any]]:
    return [
        {
            "device": f"mlx5_{number}",
            "port": 1,
            "state": state,
            "physical": "LinkUp",
            "rate": rate,
            "layer": "InfiniBand",
        }
        for number, state in enumerate(states)
    ]


def test_infiniband_ports_are_compared() -> None:
    good = ports("ACTIVE", "DOWN")  # The second one has no cable anywhere.
    assert found("infiniband", nodes("infiniband", good, good)) == [
        passed("2 of 4 ports active, the same on all nodes")
    ]
    assert found("infiniband", nodes("infiniband", [], [])) == [skipped("there is no InfiniBand or RoCE device")]
    slow = ports("ACTIVE", "DOWN", rate="25 Gb/sec (1X EDR)")
    assert grades("infiniband", nodes("infiniband", good, ports("DOWN", "DOWN"), good, slow)) == [
        ("WARN", "gpu02", "mlx5_0/1 is DOWN, and active on the others"),
        ("WARN", "gpu04", "mlx5_0/1 runs at 25 Gbit/s, and at 100 on the others"),
    ]
    assert grades("infiniband", nodes("infiniband", ports("INIT"), ports("ACTIVE"), [])) == [
        ("WARN", "gpu01", "mlx5_0/1 is INIT: no subnet manager has set it up"),
        ("WARN", "gpu03", "mlx5_0/1 is missing, and active on the others"),
    ]


@pytest.mark.parametrize(
    ("holder", "what", "fix"),
    [
        (None, "29500: address already in use", "--master-port with another one"),
        (
            {"user": 1000, "pid": None, "command": None},
            "29500: address already in use, by a process of user 1000",
            "--master-port with another one",
        ),
        (
            {"user": 0, "pid": 17, "command": "python train.py"},
            "29500: address already in use, by process 17: python train.py",
            "--master-port with another one, or end that process: kill 17",
        ),
    ],
)
def test_a_port_that_is_taken(holder: Any, what: str, fix: str) -> None:
    fact = {"port": 29500, "error": "Address already in use", "holder": holder}
    assert found("port", nodes("port", fact, None)) == [failed(what, fix=fix, host="gpu01")]


def test_all_nodes_reach_the_first() -> None:
    assert found("reach", meeting(came(1, 2), met(), met(within=0.002))) == [
        passed("2 of 2 reach gpu01 at port 29500, there and back in 4.0 ms at most")
    ]


def test_one_node_does_not_reach_the_first() -> None:
    lost, good = found("reach", meeting(came(1), met(), unmet("dropped", "no answer within 5 s")))
    assert lost == failed(
        "it cannot reach gpu01 at port 29500: no answer within 5 s",
        fix="look for a firewall on gpu03 and gpu01: nft list ruleset; iptables -L -n",
        host="gpu03",
        exclude="gpu03",
    )
    assert good.what.startswith("1 of 2 reach gpu01")


def test_nobody_reaches_the_first() -> None:
    dropped = unmet("dropped", "no answer within 5 s")
    what = "none of 2 other nodes reaches gpu01 at port 29500: no answer within 5 s"
    assert grades("reach", meeting(came(), dropped, dropped)) == [("FAIL", "gpu01", what)]
    what = "it cannot reach gpu01 at port 29500: no answer within 5 s"
    assert grades("reach", meeting(came(), dropped)) == [("FAIL", "gpu02", what)]


def test_a_node_that_was_refused_when_the_first_one_had_gone() -> None:
    """Only the closed port has refused it: nothing is known of the network."""
    late = unmet("refused", "connection refused", began=100.0, ended=110.0)
    what = "it cannot reach gpu01 at port 29500: connection refused, when gpu01 did not listen any more"
    assert grades("reach", meeting(came(1), met(), late))[0] == ("WARN", "gpu03", what)
    at_once = unmet("refused", "connection refused", began=1.0, ended=11.0)
    assert grades("reach", meeting(came(1), met(), at_once))[0][:2] == ("FAIL", "gpu03")


def test_a_first_node_that_cannot_listen_is_not_the_fault_of_others() -> None:
    strange = unmet("stranger", "another program listens there: it says ''")
    reason = [skipped("gpu01 cannot listen at port 29500: see check port")]
    for check in ("reach", "clock"):
        assert found(check, meeting(came(error="Address already in use"), strange)) == reason


def test_clocks() -> None:
    assert found("clock", meeting(came(1, 2), met(0.9), met(-0.002, 0.001))) == [
        passed("at most 900.0 ms apart, measured to 1.0 ms")
    ]
    assert grades("clock", meeting(came(1), met(-7200))) == [("WARN", "gpu02", "7200.0 s ahead of gpu01")]
    assert grades("clock", meeting(came(1, 2), met(3), met(3))) == [("WARN", "gpu01", "3.0 s ahead of the others")]
    assert [each.grade for each in found("clock", meeting(came(1), met(3, within=2.5)))] == [Grade.PASS]


def meshed(*unreached: dict[str, str]) -> Seen:
    facts = [{"tried": len(unreached) - 1, "unreached": each} for each in unreached]
    seen = meeting(came(*range(1, len(unreached))), *[met()] * (len(unreached) - 1))
    both = [replace(node, facts={**node.facts, "mesh": fact}) for node, fact in zip(seen.nodes, facts, strict=True)]
    return replace(seen, nodes=tuple(both))


def test_the_link_or_the_node_at_fault() -> None:
    why = "no answer within 5 s"
    assert found("mesh", meshed({}, {}, {})) == [passed("6 connections between 3 nodes")]
    assert grades("mesh", meshed({}, {"2": why}, {}, {})) == [("FAIL", "gpu02", f"it cannot connect to gpu03: {why}")]
    assert grades("mesh", meshed({}, {}, {"1": why}, {})) == [("FAIL", "gpu02", f"gpu03 cannot connect to it: {why}")]
    both = meshed({"2": why}, {"2": why}, {"0": why, "1": why}, {})
    assert grades("mesh", both) == [("FAIL", "gpu03", f"it and 2 of 3 other nodes cannot connect to each other: {why}")]
    inwards = meshed({"3": why}, {"3": why}, {"3": why}, {})
    assert grades("mesh", inwards) == [("FAIL", "gpu04", f"3 of 3 other nodes cannot connect to it: {why}")]
    outwards = meshed({}, {}, {}, {"0": why, "1": why, "2": why})
    assert grades("mesh", outwards) == [("FAIL", "gpu04", f"it cannot connect to 3 of 3 other nodes: {why}")]


def test_a_node_is_at_fault_only_with_more_than_half_of_the_others() -> None:
    why = "no answer within 5 s"
    half = meshed({}, {"2": why, "3": why}, {}, {}, {})
    assert grades("mesh", half) == [("FAIL", "gpu02", f"it cannot connect to {host}: {why}") for host in HOSTS[2:4]]
    more = meshed({}, {"2": why, "3": why, "4": why}, {}, {}, {})
    assert grades("mesh", more) == [("FAIL", "gpu02", f"it cannot connect to 3 of 4 other nodes: {why}")]
    assert grades("mesh", meshed({"1": why}, {})) == [("FAIL", "gpu01", f"it cannot connect to gpu02: {why}")]
