"""Whether the nodes can meet: the first one's port, the way to it, the clocks, and the ways between all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from allranks.checks.model import Finding, Node, Seen, failed, passed, skipped, warned
from allranks.checks.registry import on_the_whole
from allranks.checks.topics.network import between_nodes, facts_of, has_met, why_nothing
from allranks.job.units import format_count

_SLOW_SET_UP = "try again; are set-up lines slower there than elsewhere, or is its clock off?"
_FIREWALL = "nft list ruleset; iptables -L -n"
#: Two tries are certainly not at the same time, by clocks that may differ a little, if more seconds are between them.
_SURELY = 2.0
#: Files and log lines of different nodes come in the wrong order.
_CLOCK_SECONDS = 1.0


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
