"""Which network interface the ranks use, and how many CPU threads: decided on each node, from what it has.

Libraries choose by lists of names, or take the address that the host's own name stands for, which may be the
loopback's. The right interface is the one that carries the route to the other nodes.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from allranks import contract

_GLOO, _NCCL, _THREADS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"
_LOOPBACK = "lo"
#: linux/sockios.h: the addresses of all interfaces, each as an ifreq of this size (man 7 netdevice).
_SIOCGIFCONF, _IFREQ, _MOST_ADDRESSES = 0x8912, 40, 1024
#: Nothing is sent to it: connecting a UDP socket only asks for the route.
_ANY_PORT = 9


@dataclass(frozen=True)
class Setting:
    """A variable that the ranks get, and why; a value of None means that it is left alone."""

    name: str
    value: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}{'' if self.value is None else '=' + self.value}: {self.why}"


def decide(
    master: str, nodes: int, ranks: int, environ: Mapping[str, str], *, sys: str = "/sys", proc: str = "/proc"
) -> list[Setting]:
    """Decide what this node's ranks are told of its network and its CPUs; what is set already stays.

    Args:
        master: the host where the nodes meet.
        nodes: how many there are.
        ranks: how many are on this node.
        environ: of this process.
        sys: where the kernel tells of devices.
        proc: where it tells of routes.
    """
    decided = [*_interfaces(master, nodes, environ, Path(sys), Path(proc)), _threads(ranks)]
    return [setting for setting in decided if setting.name not in environ]


def apply(settings: list[Setting], environ: MutableMapping[str, str]) -> None:
    """Set what was decided, and say what that is."""
    decided = {setting.name: setting.value for setting in settings if setting.value is not None}
    environ.update({**decided, contract.DECIDED: " ".join(decided)})


def _interfaces(master: str, nodes: int, environ: Mapping[str, str], sys: Path, proc: Path) -> Iterator[Setting]:
    if nodes == 1:
        yield Setting(_GLOO, _LOOPBACK, "all ranks are on this node")
        return
    interface, why = _interface_to(master, proc)
    if interface is None:
        yield Setting(_GLOO, None, why)
        return
    yield Setting(_GLOO, interface, why)
    if environ.get(contract.BACKEND) == "gloo":
        return
    if device := _active_device(sys):
        yield Setting(_NCCL, None, f"left to NCCL: {device} is active")
    else:
        # Without "=" it would also stand for all interfaces whose names begin so.
        yield Setting(_NCCL, f"={interface}", f"{why}; no InfiniBand or RoCE device is active")


def _threads(ranks: int) -> Setting:
    cpus = len(os.sched_getaffinity(0))
    return Setting(_THREADS, str(max(1, cpus // ranks)), f"CPUs: {cpus}, ranks: {ranks}")


def _active_device(sys: Path) -> str | None:
    """Name a device for remote direct memory access with a port that is up, InfiniBand or RoCE."""
    for state in sorted(sys.glob("class/infiniband/*/ports/*/state")):
        try:
            if "ACTIVE" in state.read_text():
                return f"{state.parts[-4]} port {state.parts[-2]}"
        except OSError:
            continue
    return None


def _interface_to(master: str, proc: Path) -> tuple[str | None, str]:
    """Return the interface that carries the route to ``master``, and why that one; or None, and why not."""
    try:
        address = _local_address(master)
    except OSError as error:
        return None, f"left alone: there is no route to {master}: {error.strerror}"
    if not ipaddress.ip_address(address).is_loopback:
        interface = _interface_of(address, proc)
        if interface:
            return interface, f"it carries the route to {master}"
        return None, f"left alone: no interface has the address {address} of the route to {master}"
    if master == address:
        return _LOOPBACK, f"all nodes are on this machine: they meet at {master}"
    # Here is the master, whose own name stands for its loopback, as in Debian's /etc/hosts.
    interface = _first_route(proc)
    return interface, f"{master} is this node itself, and {interface or 'no interface'} carries its first route"


def _local_address(master: str) -> str:
    """Return the address of ours from which ``master`` is reached."""
    family, kind, protocol, _, target = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]).partition("%")[0]


def _interface_of(address: str, proc: Path) -> str | None:
    """Return the interface that has an address of ours."""
    wanted = ipaddress.ip_address(address)
    pairs = _ipv4_addresses() if wanted.version == 4 else _ipv6_addresses(proc)
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


def _ipv6_addresses(proc: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each interface with each of its addresses, from ``net/if_inet6``."""
    for line in _lines(proc / "net/if_inet6"):
        fields = line.split()
        yield fields[-1], bytes.fromhex(fields[0])


def _first_route(proc: Path) -> str | None:
    """Return the interface of the default route, or of the cheapest of others, from ``net/route``."""
    routes = [line.split() for line in _lines(proc / "net/route")[1:]]
    ordered = sorted((not fields[1] == fields[7] == "00000000", int(fields[6]), fields[0]) for fields in routes)
    return ordered[0][2] if ordered else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
