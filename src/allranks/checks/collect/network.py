"""What a machine knows of the network: names, the interface to the other nodes, InfiniBand."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks.checks.collect.gather import ProbeRequest
from allranks.system.processes import text_of
from allranks.system.routes import interface_to, local_address

#: The resolver of the C library waits for 5 s, and then asks again.
_REVERSE_SECONDS = 3.0
_INTERFACES, _DEVICES = Path("/sys/class/net"), Path("/sys/class/infiniband")


def names(request: ProbeRequest) -> dict[str, Any]:
    """Resolve the machine's own name and that of the first node, and measure how long reverse lookup takes."""
    own = _resolve(socket.gethostname())
    if not request.master_addr:
        return {"own": own, "master": None, "reverse": None}
    master = _resolve(request.master_addr)
    return {"own": own, "master": master, "reverse": _reverse(own if request.node == 0 else master)}


def interface(request: ProbeRequest) -> dict[str, Any] | None:
    """Return the interface that carries the route to the first node, and all there are; None for a single node."""
    if not request.master_addr:
        return None
    name, why = interface_to(request.master_addr, Path("/proc"))
    cards = {folder.name: _card(folder) for folder in sorted(_INTERFACES.iterdir()) if folder.is_dir()}
    address = None
    with suppress(OSError):  # There is no route to it.
        address = local_address(request.master_addr)
    return {"route": name, "why": why, "address": address, "all": cards}


def infiniband(request: ProbeRequest) -> list[dict[str, Any]]:
    """Return the ports of all devices for remote direct memory access, InfiniBand or RoCE."""
    return [
        {
            "device": folder.parts[-3],
            "port": int(folder.name),
            "state": text_of(folder / "state").partition(": ")[2],
            "rate": text_of(folder / "rate"),
            "layer": text_of(folder / "link_layer"),
        }
        for folder in sorted(_DEVICES.glob("*/ports/*"))
    ]


def _resolve(name: str) -> dict[str, Any]:
    """Return the addresses of a name, or why it has none."""
    found: dict[str, Any] = {"name": name, "addresses": [], "loopback": [], "error": None}
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found["addresses"] = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
        found["loopback"] = [
            each for each in found["addresses"] if ipaddress.ip_address(each.partition("%")[0]).is_loopback
        ]
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _reverse(resolved: dict[str, Any]) -> dict[str, Any] | None:
    """Measure how many seconds it takes to find the name of an address; None for more than the time limit."""
    outside = [each for each in resolved["addresses"] if each not in resolved["loopback"]]
    if not outside:
        return None
    began = time.monotonic()

    def ask() -> None:
        with suppress(OSError):  # It has no name: how long that answer takes is what counts.
            socket.getnameinfo((outside[0], 0), 0)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_REVERSE_SECONDS)
    return {"address": outside[0], "seconds": None if asking.is_alive() else round(time.monotonic() - began, 4)}


def _card(folder: Path) -> dict[str, Any]:
    """Return what the kernel reports of an interface: MTU in bytes, speed in Mbit/s where it has one, and its state."""
    speed, mtu = text_of(folder / "speed"), text_of(folder / "mtu")
    return {
        "mtu": int(mtu) if mtu.isdecimal() else None,
        "speed": int(speed) if speed.isdecimal() and int(speed) else None,  # -1 where it is unknown.
        "state": text_of(folder / "operstate"),
    }
