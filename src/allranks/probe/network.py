"""What a machine knows of the network: names, the interface to the others, InfiniBand."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allranks.probe.order import Order
from allranks.probe.reading import text_of
from allranks.routes import interface_to, local_address

#: The resolver of the C library waits for 5 s, and then asks again.
_REVERSE_SECONDS = 3.0
_INTERFACES, _DEVICES = Path("/sys/class/net"), Path("/sys/class/infiniband")
_COUNTERS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")


def names(order: Order) -> dict[str, Any]:
    """Return what names mean here: the machine's own, and that of the first node; and how long the way back takes."""
    own = _meaning(socket.gethostname())
    master = _meaning(order.master_addr) if order.master_addr else None
    return {"own": own, "master": master, "reverse": _reverse((own if order.node == 0 else master) if master else None)}


def interface(order: Order) -> dict[str, Any] | None:
    """Return the interface that carries the route to the first node, and all there are; None for a node alone."""
    if not order.master_addr:
        return None
    name, why = interface_to(order.master_addr, Path("/proc"))
    cards = {folder.name: _card(folder) for folder in sorted(_INTERFACES.iterdir()) if folder.is_dir()}
    return {"route": name, "why": why, "address": _address_to(order.master_addr), "all": cards}


def infiniband(order: Order) -> list[dict[str, Any]]:
    """Return the ports of all devices for remote direct memory access, InfiniBand or RoCE."""
    return [
        {
            "device": folder.parts[-3],
            "port": int(folder.name),
            "state": text_of(folder / "state").partition(": ")[2],
            "physical": text_of(folder / "phys_state").partition(": ")[2],
            "rate": text_of(folder / "rate"),
            "layer": text_of(folder / "link_layer"),
        }
        for folder in sorted(_DEVICES.glob("*/ports/*"))
    ]


def _meaning(name: str) -> dict[str, Any]:
    """Return the addresses of a name, or why it has none."""
    began = time.monotonic()
    found: dict[str, Any] = {"name": name, "full": None, "addresses": [], "loopback": [], "error": None}
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
        found["full"] = answers[0][3]
        found["addresses"] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        found["loopback"] = [each for each in found["addresses"] if _is_loopback(each)]
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return {**found, "seconds": round(time.monotonic() - began, 4)}


def _reverse(meaning: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return how many seconds it takes to find the name of an address; None for longer than anybody waits."""
    outside = [each for each in meaning["addresses"] if each not in meaning["loopback"]] if meaning else []
    if not outside:
        return None
    began = time.monotonic()
    asking = threading.Thread(target=_name_of, args=(outside[0],), daemon=True)
    asking.start()
    asking.join(_REVERSE_SECONDS)
    return {"address": outside[0], "seconds": None if asking.is_alive() else round(time.monotonic() - began, 4)}


def _name_of(address: str) -> None:
    try:
        socket.getnameinfo((address, 0), 0)
    except OSError:
        pass  # It has none: how long that answer takes is what counts.


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_to(master: str) -> str | None:
    """Return the address of ours from which a host is reached; None where there is no route to it."""
    try:
        return local_address(master)
    except OSError:
        return None


def _card(folder: Path) -> dict[str, Any]:
    """Return what the kernel tells of an interface: MTU in bytes, speed in Mbit/s where it has one, and its state."""
    speed, mtu = text_of(folder / "speed"), text_of(folder / "mtu")
    return {
        "mtu": int(mtu) if mtu.isdecimal() else None,
        "speed": int(speed) if speed.isdecimal() and int(speed) else None,  # -1 where nobody knows.
        "state": text_of(folder / "operstate"),
        "counters": dict(_counters(folder / "statistics")),
    }


def _counters(folder: Path) -> Iterator[tuple[str, int]]:
    for name in _COUNTERS:
        if (text := text_of(folder / name)).isdecimal():
            yield name, int(text)
