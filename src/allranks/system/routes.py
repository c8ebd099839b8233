"""The network interface with the route to another machine, and listening sockets."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from allranks.system.processes import text_of

LOOPBACK = "lo"
#: linux/sockios.h: the addresses of all interfaces, each as an ifreq of this size (man 7 netdevice).
_SIOCGIFCONF, _IFREQ, _MOST_ADDRESSES = 0x8912, 40, 1024
#: No packet is sent to it: connecting a UDP socket only looks up the route.
_ANY_PORT = 9


def interface_to(master: str, proc: Path) -> tuple[str | None, str]:
    """Return the interface with the route to a host, and the reason; or None, and why there is none.

    ``proc`` is the mount point of procfs.
    """
    try:
        address = local_address(master)
    except OSError as error:
        return None, f"left alone: there is no route to {master}: {error.strerror}"
    if not ipaddress.ip_address(address).is_loopback:
        interface = _interface_of(address, proc)
        if interface:
            return interface, f"it carries the route to {master}"
        return None, f"left alone: no interface has the address {address} of the route to {master}"
    if master == address:
        return LOOPBACK, f"all nodes are on this machine: they meet at {master}"
    # This machine is the master, and its name resolves to the loopback, as in Debian's /etc/hosts.
    interface = _first_route(proc)
    return interface, f"{master} is this node itself, and {interface or 'no interface'} carries its first route"


def local_address(master: str) -> str:
    """Return the local address for connections to ``master``; raise an OSError if there is no route or no such name."""
    family, kind, protocol, _, target = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]).partition("%")[0]


def listen_everywhere(port: int, backlog: int = 128) -> socket.socket:
    """Listen on a port (0: a free one) of all addresses of this machine, IPv4 and IPv6."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)


def listen_for(master: str, port: int, backlog: int = 128) -> socket.socket:
    """Listen at the address of ``master``, this node's name on other nodes, or at all addresses if that is unclear.

    It is unclear if the name resolves to the loopback, as in Debian's /etc/hosts, or to an address that this machine
    does not have, such as that of a service.

    Raises:
        OSError: the port is in use, or not allowed for this user.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    means_loopback = master in ("localhost", *found)
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if means_loopback or not ipaddress.ip_address(address).is_loopback:
            with contextlib.suppress(OSError):
                socket.create_server((address, 0), family=family).close()  # Fails if it is not this machine's.
                break
    else:
        return listen_everywhere(port, backlog)
    return socket.create_server((address, port), family=family, backlog=backlog)


def _interface_of(address: str, proc: Path) -> str | None:
    """Return the interface that has an address of this machine."""
    wanted = ipaddress.ip_address(address)
    pairs: Iterable[tuple[str, bytes]] = _ipv4_addresses()
    if wanted.version == 6:
        pairs = ((fields[-1], bytes.fromhex(fields[0])) for fields in _table(proc / "net/if_inet6"))
    return next((name for name, packed in pairs if packed == wanted.packed), None)


def _ipv4_addresses() -> Iterator[tuple[str, bytes]]:
    """Yield each interface with each of its addresses."""
    room = array.array("B", bytes(_IFREQ * _MOST_ADDRESSES))
    address, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, address))
    used, _ = struct.unpack("iP", answer)
    data = room.tobytes()
    for start in range(0, used, _IFREQ):
        name = data[start : start + 16].partition(b"\0")[0].decode(errors="replace")
        yield name.partition(":")[0], data[start + 20 : start + 24]  # eth0:1 is a second address of eth0.


def _first_route(proc: Path) -> str | None:
    """Return the interface of the default route, else of the route with the lowest metric, from ``net/route``."""
    routes = _table(proc / "net/route")[1:]
    ordered = sorted((not fields[1] == fields[7] == "00000000", int(fields[6]), fields[0]) for fields in routes)
    return ordered[0][2] if ordered else None


def _table(path: Path) -> list[list[str]]:
    return [line.split() for line in text_of(path).splitlines()]
