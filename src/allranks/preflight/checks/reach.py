"""The network between nodes: whether the first one can be reached, whether all can, and what time it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from allranks.job.units import format_count
from allranks.preflight.meeting import has_met, told, why_nothing
from allranks.preflight.model import Finding, Node, Seen, failed, passed, skipped, warned
from allranks.preflight.registry import on_the_whole

_FIREWALL = "nft list ruleset; iptables -L -n"
#: Two tries at the same time, by clocks that may differ a little, are told apart by more than this many seconds.
_SURELY = 2.0
#: Files and log lines of different nodes come in the wrong order.
_CLOCK_SECONDS = 1.0


@on_the_whole("port", why="the nodes meet at a port of the first one, which nobody else may hold", facts=("port",))
def port(seen: Seen) -> Iterator[Finding]:
    """Look at whether the first node can listen at the port."""
    if why := why_nothing(seen, "port"):
        yield skipped(why)
        return
    (host, fact), *_ = told(seen, "port").items()
    if fact["error"] is None:
        yield passed(f"{fact['port']} is free", host=host)
        return
    what, end = _holder(fact["holder"])
    fix = f"--master-port with another one{end}"
    yield failed(f"{fact['port']}: {fact['error'].lower()}{what}", fix=fix, host=host)


def _holder(holder: Any) -> tuple[str, str]:
    """Say who holds a port, and how to end that."""
    if holder is None:
        return "", ""
    if holder["pid"] is None:
        return f", by a process of user {holder['user']}", ""
    return f", by process {holder['pid']}: {holder['command']}", f", or end that process: kill {holder['pid']}"


@on_the_whole(
    "reach",
    why="all nodes connect to the first one before anything else, and its ranks wait for them",
    facts=("reach", "names", "port"),
)
def reach(seen: Seen) -> Iterator[Finding]:
    """Look at which nodes cannot connect to the first one at the port where they are to meet."""
    if why := _why_nobody_came(seen):
        yield skipped(why)
        return
    first, *others = [node for node in seen.nodes if node.facts.get("reach") is not None]
    lost = [node for node in others if not has_met(node)]
    if lost and len(lost) == len(others) > 1:
        yield _nobody_reaches(first, lost, seen)
    else:
        yield from (_unreached(node, first, seen) for node in lost)
    if met := [node for node in others if has_met(node)]:
        longest = max(2000 * node.facts["reach"]["clock"]["within"] for node in met)
        yield passed(f"{len(met)} of {len(others)} reach {_place(seen)}, there and back in {longest:.1f} ms at most")


def _why_nobody_came(seen: Seen) -> str:
    """Say why nobody can have reached the first node, whatever the network is like."""
    if why := why_nothing(seen, "reach"):
        return why
    first = seen.nodes[0]
    if not (found := first.facts.get("reach")):
        return f"{first.host} has not listened: {first.errors.get('reach', 'see check nodes')}"
    if found["error"]:
        return f"{first.host} cannot listen at port {_meeting(seen)[1]}: see check port"
    return "" if len(told(seen, "reach")) > 1 else "no other node could be looked at"


def _nobody_reaches(first: Node, lost: list[Node], seen: Seen) -> Finding:
    texts = Counter(node.facts["reach"]["error"]["text"] for node in lost)
    what = f"none of {format_count(len(lost), 'other node')} reaches {_place(seen)}: {'; '.join(texts)}"
    if all(_is_late(node, first) for node in lost):
        return warned(f"{what}, when it did not listen any more", fix=_SLOW_SET_UP, host=first.host)
    fix = f"look for a firewall on {first.host} ({_FIREWALL}), and at its interface; --master-addr for another network"
    return failed(what, fix=fix, host=first.host)


def _unreached(node: Node, first: Node, seen: Seen) -> Finding:
    error = node.facts["reach"]["error"]
    what = f"it cannot reach {_place(seen)}: {error['text']}"
    if _is_late(node, first):
        return warned(f"{what}, when {first.host} did not listen any more", fix=_SLOW_SET_UP, host=node.host)
    fix = f"look for a firewall on {node.host} and {first.host}: {_FIREWALL}"
    if error["kind"] in ("route", "name"):
        fix = f"see on {node.host}: getent hosts {_meeting(seen)[0]}; ip route"
    return failed(what, fix=fix, host=node.host, exclude=node.host)


_SLOW_SET_UP = "try again; are set-up lines slower there than elsewhere, or is its clock off?"


def _is_late(node: Node, first: Node) -> bool:
    """Tell whether a node may have come when the first one was gone: then nothing refuses it but the closed port."""
    tried, listened = node.facts["reach"], first.facts["reach"]
    if tried["error"]["kind"] not in ("refused", "closed"):
        return False
    return bool(min(tried["ended"], listened["ended"]) - max(tried["began"], listened["began"]) < _SURELY)


def _place(seen: Seen) -> str:
    address, port = _meeting(seen)
    return f"{address} at port {port}"


def _meeting(seen: Seen) -> tuple[str, int]:
    """Return where the nodes meet: those of a scheduler find out themselves, and agree on the first one."""
    first = seen.nodes[0]
    port = seen.plan.master_port or first.facts.get("port", {}).get("port", 0)
    return seen.plan.master_addr or first.host, port


@on_the_whole(
    "clock",
    why="files and log lines of several nodes seem to be in another order; from 5 minutes on, Kerberos refuses a node",
    facts=("reach",),
)
def clock(seen: Seen) -> Iterator[Finding]:
    """Look at how far the clocks of nodes are from what most of them say. No rank needs to know what time it is."""
    if why := _why_nobody_came(seen):
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


@on_the_whole(
    "mesh",
    why="ranks connect to ranks of all other nodes, at ports that nobody has chosen",
    facts=("reach", "mesh"),
    is_full=True,
)
def mesh(seen: Seen) -> Iterator[Finding]:
    """Look at whether each node connects to each other one, and find the node or the link at fault where not."""
    if why := why_nothing(seen, "reach"):
        yield skipped(why)
        return
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
        yield _bad_node(here[worst], count, of_it, len(here) - 1)
        left = {link: why for link, why in left.items() if link not in of_it}
    for pair in dict.fromkeys(frozenset(link) for link in left):
        first, second = (here[number] for number in sorted(pair, key=int))
        yield _bad_link(first, second, left)


def _bad_link(a: Node, b: Node, links: dict[tuple[str, str], str]) -> Finding:
    there, back = links.get((str(a.number), str(b.number))), links.get((str(b.number), str(a.number)))
    if there and back:
        what = f"it and {b.host} cannot connect to each other: {there}"
    else:
        what = f"it cannot connect to {b.host}: {there}" if there else f"{b.host} cannot connect to it: {back}"
    return failed(what, fix=f"look for a firewall on both: {_FIREWALL}", host=a.host, exclude=a.host)


def _bad_node(node: Node, count: int, links: dict[tuple[str, str], str], others: int) -> Finding:
    them = f"{count} of {format_count(others, 'other node')}"
    ways = {number == str(node.number) for number, _ in links}
    if len(ways) == 2:
        what = f"it and {them} cannot connect to each other"
    else:
        what = f"it cannot connect to {them}" if True in ways else f"{them} cannot connect to it"
    why = "; ".join(Counter(links.values()))
    fix = f"look for a firewall on it: {_FIREWALL}"
    return failed(f"{what}: {why}", fix=fix, host=node.host, exclude=node.host)
