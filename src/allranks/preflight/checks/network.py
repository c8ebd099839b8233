"""What each node knows of the network: names, the interface to the others, InfiniBand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from allranks.preflight.compare import odd_ones
from allranks.preflight.meeting import has_met, told, why_nothing
from allranks.preflight.model import Finding, Node, Seen, failed, passed, skipped, warned
from allranks.preflight.registry import on_each_node, on_the_whole

#: A resolver that gets no answer asks again after 5 s.
_SLOW_SECONDS = 2.0
_DOWN = ("down", "lowerlayerdown", "notpresent")
#: One interface by its name; NCCL takes lists, and what must not be taken, too.
_PLAIN_NAME = re.compile(r"=?[^,^=]+")
_INFINIBAND = "an InfiniBand or RoCE port that is not active leaves its traffic to the others, or to Ethernet"


@on_each_node(
    "hostname",
    why="libraries that ask for the address of their own host get one that no other node reaches",
    fact="names",
)
def hostname(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at what a node's own name means on it."""
    if why := why_nothing(seen):
        return skipped(why)
    own = fact["own"]
    what = f"{own['name']} {_means(own)}"
    if not own["error"] and own["addresses"][0] not in own["loopback"]:
        return passed(what)
    why = "allranks tells torch the interface to use, but what asks for the host's own address cannot be reached by it"
    fix = f"a line in /etc/hosts of {node.host}: the address that other nodes see, then {own['name']}"
    return warned(what, fix=fix, why=why)


@on_the_whole(
    "master-name", why="each node must find the first one by its name, at the same address", facts=("names", "reach")
)
def master_name(seen: Seen) -> Iterator[Finding]:
    """Look at what the name of the first node means on the others; on itself it may be anything."""
    if why := why_nothing(seen, "names"):
        yield skipped(why)
        return
    names = {host: fact["master"] for host, fact in told(seen, "names").items() if fact["master"]}
    names.pop(seen.nodes[0].host, None)
    if not names:
        yield skipped("nobody knows yet where the nodes are to meet")
        return
    usual, odd = odd_ones({host: frozenset(name["addresses"]) for host, name in names.items()})
    bad = [finding for node in seen.nodes if (finding := _misnamed(node, names.get(node.host), usual))]
    yield from bad
    if not bad:
        name = next(name for host, name in names.items() if host not in odd)
        yield passed(f"{name['name']} {_means(name)}")


def _misnamed(node: Node, name: Any, usual: frozenset[str]) -> Finding | None:
    if name is None or (has_met(node) and not usual.isdisjoint(name["addresses"])):
        return None
    what, hosts = f"{name['name']} {_means(name)}", f"/etc/hosts or DNS of {node.host}"
    if len(name["loopback"]) == len(name["addresses"]) and not has_met(node):
        why = "" if name["error"] else f"{node.host} would look for the first node on itself"
        return failed(what, fix=f"correct {hosts}, or give an address: --master-addr", host=node.host, why=why)
    if usual.isdisjoint(name["addresses"]):
        others = ", ".join(sorted(usual)) or "nothing"
        return warned(f"{what}, and {others} on others", fix=f"correct {hosts}", host=node.host)
    return None


def _means(name: Any) -> str:
    return f"has no address: {name['error']}" if name["error"] else f"means {', '.join(name['addresses'])}"


@on_each_node(
    "dns", why="torch's store asks for the name of each address that connects, one after the other", fact="names"
)
def dns(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at how long it takes to find the name of an address."""
    if why := why_nothing(seen):
        return skipped(why)
    reverse = fact["reverse"]
    if reverse is None:
        return skipped("the first node has no address there whose name could be asked for")
    seconds = reverse["seconds"]
    if seconds is not None and seconds < _SLOW_SECONDS:
        return passed(f"names of addresses are found within {_SLOW_SECONDS:g} s")
    took = "no answer" if seconds is None else f"{seconds:.1f} s"
    fix = 'all nodes in /etc/hosts, or environment.variables: {RES_OPTIONS: "timeout:1 attempts:1"}'
    return warned(f"the name of {reverse['address']}: {took}", fix=fix)


@on_each_node(
    "interface",
    why="gloo and NCCL connect through the interface that carries the route to the first node",
    fact="interface",
    also=("reach", "interfaces"),
)
def interface(fact: Any, node: Node, seen: Seen) -> Finding:
    """Look at whether there is such an interface, and whether it is up."""
    asked, known = seen.job.launch.interface, fact or {"route": None, "all": node.facts.get("interfaces", ())}
    name = _used(known, seen)
    if asked and name is None and known["all"] and _PLAIN_NAME.fullmatch(asked):
        fix = f"launch.interface (--interface): {node.host} has {', '.join(known['all'])}"
        return failed(f"there is no interface {asked}", fix=fix)
    if fact is None:
        return skipped(why_nothing(seen, "interface"))
    if name is None:
        what = fact["why"].removeprefix("left alone: ")
        fix = f"see ip route on {node.host}; --master-addr for another network, --interface for another interface"
        # The first node is where it is.
        return (failed if node.number and not fact["address"] else warned)(what, fix=fix)
    card = fact["all"][name]
    if card["state"] in _DOWN and not has_met(node):
        return failed(f"{name} is {card['state']}", fix=f"on {node.host}: ip link set {name} up; is its cable in?")
    return passed(f"{name}, {fact['address']}" if fact["address"] and not asked else name)


@on_the_whole(
    "mtu",
    why="packets larger than the smallest MTU on the way are lost: connections are made, and then hang",
    facts=("interface",),
)
def mtu(seen: Seen) -> Iterator[Finding]:
    """Look at whether the interfaces have the same MTU."""
    cards = _cards(seen)
    if why := why_nothing(seen, "interface") or ("" if cards else "no interface is known"):
        yield skipped(why)
        return
    usual, odd = odd_ones({host: card["mtu"] for host, (_, card) in cards.items()})
    for host, value in odd.items():
        name = cards[host][0]
        fix = f"on {host}: ip link set {name} mtu {usual}; or all others, and the switch, as {host}"
        yield warned(f"{value} at {name}, and {usual} on the others", fix=fix, host=host)
    if not odd:
        yield passed(f"{usual} bytes on all nodes")


@on_the_whole("speed", why="the slowest link sets the pace of every collective", facts=("interface",))
def speed(seen: Seen) -> Iterator[Finding]:
    """Look at whether an interface is slower than those of the others."""
    if why := why_nothing(seen, "interface"):
        yield skipped(why)
        return
    speeds = {host: card["speed"] for host, (_, card) in _cards(seen).items() if card["speed"]}
    if not speeds:
        yield skipped("the kernel knows no speed of these interfaces")
        return
    fastest_first = dict(sorted(speeds.items(), key=lambda item: -item[1]))
    usual, odd = odd_ones(fastest_first)
    slow = {host: value for host, value in odd.items() if value < usual}
    for host, value in slow.items():
        fix = f"look at cable, port and switch of {host}: ethtool {_cards(seen)[host][0]}"
        yield warned(f"{_gigabits(value)}, and {_gigabits(usual)} on the others", fix=fix, host=host, exclude=host)
    if not slow:
        yield passed(_gigabits(usual))


@on_the_whole("infiniband", why=_INFINIBAND, facts=("infiniband",))
def infiniband(seen: Seen) -> Iterator[Finding]:
    """Look at whether ports of InfiniBand and RoCE devices are in the same state on all nodes, and looked after."""
    ports = {
        host: {f"{port['device']}/{port['port']}": port for port in fact}
        for host, fact in told(seen, "infiniband").items()
    }
    names = sorted({name for each in ports.values() for name in each})
    if not names:
        yield skipped(
            "there is no InfiniBand or RoCE device" if ports else why_nothing(seen, "infiniband") or "not told"
        )
        return
    bad = [*_unmanaged(ports), *(finding for name in names for finding in _differing(name, ports))]
    yield from bad
    if not bad:
        states = [port["state"] for each in ports.values() for port in each.values()]
        yield passed(f"{states.count('ACTIVE')} of {len(states)} ports active, the same on all nodes")


def _unmanaged(ports: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    for host, each in ports.items():
        for name, port in each.items():
            if port["state"] in ("INIT", "ARMED") and port["layer"] == "InfiniBand":
                fix = f"is a subnet manager running? sminfo on {host}; opensm"
                yield warned(
                    f"{name} is {port['state']}: no subnet manager has set it up", fix=fix, host=host, exclude=host
                )


def _differing(name: str, ports: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield the nodes where a port is not active, or slower, that is active on most of the nodes."""
    states = {host: each[name]["state"] if name in each else "missing" for host, each in ports.items()}
    active_first = dict(sorted(states.items(), key=lambda item: item[1] != "ACTIVE"))
    usual, odd = odd_ones(active_first)
    if usual != "ACTIVE":
        return
    for host, state in odd.items():
        if state not in ("INIT", "ARMED"):
            fix = f"look at its cable and switch: ibstat on {host}"
            yield warned(f"{name} is {state}, and active on the others", fix=fix, host=host, exclude=host)
    rates = {host: gigabits(ports[host][name]) for host, state in states.items() if state == "ACTIVE"}
    fastest_first = dict(sorted(rates.items(), key=lambda item: -item[1]))
    best, others = odd_ones(fastest_first)
    for host, rate in others.items():
        if rate < best:
            fix = f"look at its cable and switch: ibstat on {host}"
            yield warned(
                f"{name} runs at {rate:g} Gbit/s, and at {best:g} on the others", fix=fix, host=host, exclude=host
            )


def gigabits(port: Any) -> float:
    """Return a port's rate in Gbit/s, which the kernel writes as ``100 Gb/sec (4X EDR)``."""
    found = re.match(r"[\d.]+", port["rate"])
    return float(found[0]) if found else 0.0


def _used(fact: Any, seen: Seen) -> str | None:
    """Return the interface that the ranks will use, if one can be told."""
    asked = seen.job.launch.interface
    if not asked:
        name: str | None = fact["route"]
        return name
    wanted = asked.removeprefix("=")
    if seen.plan.backend == "gloo" or wanted in fact["all"]:
        return wanted if wanted in fact["all"] else None
    return next((name for name in fact["all"] if name.startswith(wanted)), None)


def _cards(seen: Seen) -> dict[str, tuple[str, Any]]:
    """Return the interface that each node uses, and what the kernel tells of it."""
    used = {host: (_used(fact, seen), fact["all"]) for host, fact in told(seen, "interface").items()}
    return {host: (name, cards[name]) for host, (name, cards) in used.items() if name}


def _gigabits(megabits: int) -> str:
    return f"{megabits / 1000:g} Gbit/s"
