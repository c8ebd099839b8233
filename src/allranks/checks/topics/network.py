"""The network: names, interfaces and InfiniBand of each node, and whether the nodes reach each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

from allranks.checks.model import Finding, Node, Seen, failed, odd_ones, passed, skipped, warned
from allranks.checks.registry import WholeCheck, on_each_node, on_the_whole
from allranks.job.units import format_count

#: A resolver that gets no answer asks again after 5 s.
_SLOW_SECONDS = 2.0
_DOWN = ("down", "lowerlayerdown", "notpresent")
#: One interface by its name; NCCL takes lists, and what must not be taken, too.
_PLAIN_NAME = re.compile(r"=?[^,^=]+")
_SLOW_SET_UP = "try again; are set-up lines slower there than elsewhere, or is its clock off?"
_FIREWALL = "nft list ruleset; iptables -L -n"
#: Two tries are certainly not at the same time, by clocks that may differ a little, if more seconds are between them.
_SURELY = 2.0
#: Files and log lines of different nodes come in the wrong order.
_CLOCK_SECONDS = 1.0


def facts_of(seen: Seen, fact: str) -> dict[str, Any]:
    """Return a fact of all nodes that have reported it and that it is about, by host."""
    return {node.host: node.facts[fact] for node in seen.nodes if node.facts.get(fact) is not None}


def why_nothing(seen: Seen, fact: str = "") -> str:
    """Return why there is nothing to check between nodes; empty if there is."""
    if not seen.nodes:
        return seen.why_no_nodes
    if len(seen.nodes) == 1:
        return "there is only one node"
    if fact and not facts_of(seen, fact):
        errors = [node.errors[fact] for node in seen.nodes if fact in node.errors]
        return errors[0] if errors else "the rendezvous address is not known yet"
    return ""


def between_nodes(name: str, *, why: str, facts: tuple[str, ...], is_full: bool = False) -> Callable[..., WholeCheck]:
    """Register a check of two nodes or more that is skipped where none has reported the first of the facts."""

    def register(function: WholeCheck) -> WholeCheck:
        def find(seen: Seen) -> Iterable[Finding]:
            reason = why_nothing(seen, facts[0])
            return [skipped(reason)] if reason else function(seen)

        return on_the_whole(name, why=why, facts=facts, is_full=is_full)(find)

    return register


def has_met(node: Node) -> bool:
    """Return True if a node has reached the first one or, if it is that, has been reached."""
    found = node.facts.get("reach")
    return found is not None and found["error"] is None and bool(node.number or found["came"])


@on_each_node(
    "hostname",
    why="libraries that look up their own host's address get one that other nodes cannot reach",
    fact="names",
)
def hostname(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check what a node's own name means on it."""
    if reason := why_nothing(seen):
        return skipped(reason)
    own = fact["own"]
    what = f"{own['name']} {_means(own)}"
    if not own["error"] and own["addresses"][0] not in own["loopback"]:
        return passed(what)
    why = "allranks sets the interface for torch, but libraries that look up the host's own address cannot be reached"
    fix = f"a line in /etc/hosts of {node.host}: the address that other nodes see, then {own['name']}"
    return warned(what, fix=fix, why=why)


@between_nodes(
    "master-name", why="each node must resolve the first node's name to the same address", facts=("names", "reach")
)
def master_name(seen: Seen) -> Iterator[Finding]:
    """Check what the name of the first node means on the others; on itself it may be anything."""
    names = {host: fact["master"] for host, fact in facts_of(seen, "names").items() if fact["master"]}
    names.pop(seen.nodes[0].host, None)
    if not names:
        yield skipped("the rendezvous address is not known yet")
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
    "dns", why="torch's store resolves the name of each connecting address, one after the other", fact="names"
)
def dns(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check how long it takes to find the name of an address."""
    if reason := why_nothing(seen):
        return skipped(reason)
    reverse = fact["reverse"]
    if reverse is None:
        return skipped("the first node has no address there to look up")
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
    """Check that there is such an interface, and that it is up."""
    requested, known = seen.job.launch.interface, fact or {"route": None, "all": node.facts.get("interfaces", ())}
    name = _used(known, seen)
    if requested and name is None and known["all"] and _PLAIN_NAME.fullmatch(requested):
        fix = f"launch.interface (--interface): {node.host} has {', '.join(known['all'])}"
        return failed(f"there is no interface {requested}", fix=fix)
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
    return passed(f"{name}, {fact['address']}" if fact["address"] and not requested else name)


@between_nodes(
    "mtu",
    why="packets above the smallest MTU on the path are lost: connections open, and then hang",
    facts=("interface",),
)
def mtu(seen: Seen) -> Iterator[Finding]:
    """Check that the interfaces have the same MTU."""
    cards = _cards(seen)
    if not cards:
        yield skipped("no interface is known")
        return
    usual, odd = odd_ones({host: card["mtu"] for host, (_, card) in cards.items()})
    for host, value in odd.items():
        name = cards[host][0]
        fix = f"on {host}: ip link set {name} mtu {usual}; or all others, and the switch, as {host}"
        yield warned(f"{value} at {name}, and {usual} on the others", fix=fix, host=host)
    if not odd:
        yield passed(f"{usual} bytes on all nodes")


@between_nodes("speed", why="the slowest link sets the pace of every collective", facts=("interface",))
def speed(seen: Seen) -> Iterator[Finding]:
    """Check that no interface is slower than those of the others."""
    speeds = {host: card["speed"] for host, (_, card) in _cards(seen).items() if card["speed"]}
    if not speeds:
        yield skipped("the kernel does not report the speed of these interfaces")
        return
    usual, odd = odd_ones(dict(sorted(speeds.items(), key=lambda item: -item[1])))
    slow = {host: value for host, value in odd.items() if value < usual}
    for host, value in slow.items():
        fix = f"check cable, port and switch of {host}: ethtool {_cards(seen)[host][0]}"
        yield warned(
            f"{value / 1000:g} Gbit/s, and {usual / 1000:g} Gbit/s on the others", fix=fix, host=host, exclude=host
        )
    if not slow:
        yield passed(f"{usual / 1000:g} Gbit/s")


@on_the_whole(
    "infiniband",
    why="the traffic of an inactive InfiniBand or RoCE port goes through the others, or through Ethernet",
    facts=("infiniband",),
)
def infiniband(seen: Seen) -> Iterator[Finding]:
    """Check that ports of InfiniBand and RoCE devices are in the same state on all nodes, and managed."""
    ports = {
        host: {f"{port['device']}/{port['port']}": port for port in fact}
        for host, fact in facts_of(seen, "infiniband").items()
    }
    names = sorted({name for each in ports.values() for name in each})
    if not names:
        why = "there is no InfiniBand or RoCE device"
        yield skipped(why if ports else why_nothing(seen, "infiniband"))
        return
    bad = [*_unmanaged(ports), *(finding for name in names for finding in _differ(name, ports))]
    yield from bad
    if not bad:
        states = [port["state"] for each in ports.values() for port in each.values()]
        yield passed(f"{states.count('ACTIVE')} of {len(states)} ports active, the same on all nodes")


def _unmanaged(ports: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    for host, each in ports.items():
        for name, port in each.items():
            if port["state"] in ("INIT", "ARMED") and port["layer"] == "InfiniBand":
                what = f"{name} is {port['state']}: no subnet manager has set it up"
                fix = f"is a subnet manager running? sminfo on {host}; opensm"
                yield warned(what, fix=fix, host=host, exclude=host)


def _differ(name: str, ports: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield the nodes where a port is not active, or slower, that is active on most of the nodes."""
    states = {host: each[name]["state"] if name in each else "missing" for host, each in ports.items()}
    usual, odd = odd_ones(dict(sorted(states.items(), key=lambda item: item[1] != "ACTIVE")))
    if usual != "ACTIVE":
        return
    for host, state in odd.items():
        if state not in ("INIT", "ARMED"):
            fix = f"check its cable and switch: ibstat on {host}"
            yield warned(f"{name} is {state}, and active on the others", fix=fix, host=host, exclude=host)
    rates = {host: gigabits(ports[host][name]) for host, state in states.items() if state == "ACTIVE"}
    best, others = odd_ones(dict(sorted(rates.items(), key=lambda item: -item[1])))
    for host, rate in others.items():
        if rate < best:
            fix = f"check its cable and switch: ibstat on {host}"
            what = f"{name} runs at {rate:g} Gbit/s, and at {best:g} on the others"
            yield warned(what, fix=fix, host=host, exclude=host)


def gigabits(port: Any) -> float:
    """Return a port's rate in Gbit/s, which the kernel writes as ``100 Gb/sec (4X EDR)``."""
    found = re.match(r"[\d.]+", port["rate"])
    return float(found[0]) if found else 0.0


def _used(fact: Any, seen: Seen) -> str | None:
    """Return the interface that the ranks will use; None if that is unknown."""
    requested = seen.job.launch.interface
    if not requested:
        name: str | None = fact["route"]
        return name
    wanted = requested.removeprefix("=")
    if wanted in fact["all"]:
        return wanted
    start_so = [name for name in fact["all"] if name.startswith(wanted)]
    return start_so[0] if start_so and seen.plan.backend != "gloo" else None


def _cards(seen: Seen) -> dict[str, tuple[str, Any]]:
    """Return the interface that each node uses, and what the kernel reports of it."""
    used = {host: (_used(fact, seen), fact["all"]) for host, fact in facts_of(seen, "interface").items()}
    return {host: (name, cards[name]) for host, (name, cards) in used.items() if name}


# --- whether the nodes can meet: the first one's port, the way to it, the clocks, and the ways between all others ---


@between_nodes("port", why="the nodes rendezvous at a port of the first one, which must be free", facts=("port",))
def port(seen: Seen) -> Iterator[Finding]:
    """Check that the first node can listen at the port."""
    (host, fact), *_ = facts_of(seen, "port").items()
    if fact["error"] is None:
        yield passed(f"{fact['port']} is free", host=host)
        return
    holder, what, fix = fact["holder"], f"{fact['port']}: {fact['error'].lower()}", "--master-port with another one"
    if holder and holder["pid"] is None:
        what += f", by a process of user {holder['user']}"
    elif holder:
        what += f", by process {holder['pid']}: {holder['command']}"
        fix += f", or end that process: kill {holder['pid']}"
    yield failed(what, fix=fix, host=host)


@on_the_whole(
    "reach",
    why="all nodes connect to the first one at the start, and its ranks wait for them",
    facts=("reach", "names", "port"),
)
def reach(seen: Seen) -> Iterator[Finding]:
    """Check that all nodes can connect to the first one at the port where they are to meet."""
    if why := _why_none_connected(seen):
        yield skipped(why)
        return
    first, *others = [node for node in seen.nodes if node.facts.get("reach") is not None]
    lost = [node for node in others if not has_met(node)]
    if lost and len(lost) == len(others) > 1:
        texts = Counter(node.facts["reach"]["error"]["text"] for node in lost)
        what = f"none of {format_count(len(lost), 'other node')} reaches {_meeting(seen)}: {'; '.join(texts)}"
        if all(_is_late(node, first) for node in lost):
            yield warned(f"{what}, when it did not listen any more", fix=_SLOW_SET_UP, host=first.host)
        else:
            fix = f"look for a firewall on {first.host} ({_FIREWALL}), and at its interface; "
            fix += "--master-addr for another network"
            yield failed(what, fix=fix, host=first.host)
    else:
        yield from (_unreached(node, first, seen) for node in lost)
    if met := [node for node in others if has_met(node)]:
        longest = max(2000 * node.facts["reach"]["clock"]["within"] for node in met)
        yield passed(f"{len(met)} of {len(others)} reach {_meeting(seen)}, there and back in {longest:.1f} ms at most")


def _why_none_connected(seen: Seen) -> str:
    """Return why no node can have reached the first one, whatever the network is like; empty if some may have."""
    if why := why_nothing(seen, "reach"):
        return why
    first = seen.nodes[0]
    if not (found := first.facts.get("reach")):
        return f"{first.host} has not listened: {first.errors.get('reach', 'see check nodes')}"
    if found["error"]:
        return f"{first.host} cannot listen at port {_port(seen)}: see check port"
    return "" if len(facts_of(seen, "reach")) > 1 else "no other node could be probed"


def _unreached(node: Node, first: Node, seen: Seen) -> Finding:
    error = node.facts["reach"]["error"]
    what = f"it cannot reach {_meeting(seen)}: {error['text']}"
    if _is_late(node, first):
        return warned(f"{what}, when {first.host} did not listen any more", fix=_SLOW_SET_UP, host=node.host)
    fix = f"look for a firewall on {node.host} and {first.host}: {_FIREWALL}"
    if error["kind"] in ("route", "name"):
        fix = f"see on {node.host}: getent hosts {seen.plan.master_addr or first.host}; ip route"
    return failed(what, fix=fix, host=node.host, exclude=node.host)


def _is_late(node: Node, first: Node) -> bool:
    """Return True if a node may have come when the first one was gone: then only the closed port refused it."""
    tried, listened = node.facts["reach"], first.facts["reach"]
    if tried["error"]["kind"] not in ("refused", "closed"):
        return False
    return bool(min(tried["ended"], listened["ended"]) - max(tried["began"], listened["began"]) < _SURELY)


def _meeting(seen: Seen) -> str:
    """Write where the nodes meet: those of a scheduler find out themselves, and agree on the first one."""
    return f"{seen.plan.master_addr or seen.nodes[0].host} at port {_port(seen)}"


def _port(seen: Seen) -> int:
    return seen.plan.master_port or seen.nodes[0].facts.get("port", {}).get("port", 0)


@on_the_whole(
    "clock",
    why="different clocks reorder log lines and file times of nodes; from 5 minutes on, Kerberos rejects a node",
    facts=("reach",),
)
def clock(seen: Seen) -> Iterator[Finding]:
    """Check how far the clocks of nodes are from what most of them say. No rank needs to know what time it is."""
    if why := _why_none_connected(seen):
        yield skipped(why)
        return
    first = seen.nodes[0].host
    clocks = {node.host: node.facts["reach"]["clock"] for node in seen.nodes[1:] if has_met(node)}
    if not clocks:
        yield skipped(f"no node has reached {first}")
        return
    behind = {first: 0.0, **{host: each["ahead"] for host, each in clocks.items()}}
    usual = median(behind.values()) if len(behind) > 2 else 0.0
    within = max(each["within"] for each in clocks.values())
    off = {host: usual - value for host, value in behind.items() if abs(value - usual) - within > _CLOCK_SECONDS}
    for host, seconds in off.items():
        where = "the others" if len(behind) > 2 else first
        what = f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {where}"
        yield warned(what, fix=f"on {host}: chronyc tracking, or timedatectl; start chronyd or ntpd", host=host)
    if not off:
        largest = 1000 * max(abs(value - usual) for value in behind.values())
        yield passed(f"at most {largest:.1f} ms apart, measured to {1000 * within:.1f} ms")


@between_nodes(
    "mesh",
    why="ranks connect to ranks of all other nodes, on ports that the kernel chooses",
    facts=("reach", "mesh"),
    is_full=True,
)
def mesh(seen: Seen) -> Iterator[Finding]:
    """Check that each node connects to each other one, and find the node or the link at fault if not."""
    here = {str(node.number): node for node in seen.nodes if node.facts.get("mesh") is not None}
    if len(here) < 2:
        yield skipped(seen.nodes[0].errors.get("mesh", "no two nodes have met, or there are more than 64"))
        return
    links = {
        (number, other): why
        for number, node in here.items()
        for other, why in node.facts["mesh"]["unreached"].items()
        if other in here
    }
    yield from _at_fault(links, here)
    if not links:
        yield passed(f"{format_count(len(here) * (len(here) - 1), 'connection')} between {len(here)} nodes")


def _at_fault(links: dict[tuple[str, str], str], here: dict[str, Node]) -> Iterator[Finding]:
    """Yield the nodes that most others have trouble with, and then the links that are left."""
    left = dict(links)
    while left:
        counts = Counter(number for pair in {frozenset(link) for link in left} for number in pair)
        worst, count = max(counts.items(), key=lambda item: (item[1], -int(item[0])))
        if count < 2 or 2 * count <= len(here) - 1:
            break
        of_it = {link: why for link, why in left.items() if worst in link}
        them = f"{count} of {format_count(len(here) - 1, 'other node')}"
        yield _cut_off(here[worst], them, of_it, "it")
        left = {link: why for link, why in left.items() if link not in of_it}
    for pair in dict.fromkeys(frozenset(link) for link in left):
        first, second = sorted(pair, key=int)
        of_pair = {link: why for link, why in left.items() if frozenset(link) == pair}
        yield _cut_off(here[first], here[second].host, of_pair, "both")


def _cut_off(node: Node, them: str, links: dict[tuple[str, str], str], where: str) -> Finding:
    """Make a finding that a node cannot connect to some others, or these to it."""
    is_from_here = {number == str(node.number) for number, _ in links}
    if len(is_from_here) == 2:
        what = f"it and {them} cannot connect to each other"
    else:
        what = f"it cannot connect to {them}" if True in is_from_here else f"{them} cannot connect to it"
    fix = f"look for a firewall on {where}: {_FIREWALL}"
    return failed(f"{what}: {'; '.join(Counter(links.values()))}", fix=fix, host=node.host, exclude=node.host)
