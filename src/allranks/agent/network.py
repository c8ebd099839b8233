"""Chooses on each node the network interface of the ranks and their number of CPU threads.

NCCL and Gloo choose an interface by a list of names, or by the address of the host's own name, which may be the
loopback. The right interface is the one with the route to the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from allranks import contract
from allranks.system.cgroups import usable_cpus
from allranks.system.routes import LOOPBACK, interface_to

_GLOO, _NCCL, _THREADS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"


class NetworkSetting(NamedTuple):
    """A variable of the ranks, and the reason; None as the value leaves the variable unchanged."""

    name: str
    value: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}{'' if self.value is None else '=' + self.value}: {self.why}"


def decide(
    master: str, nodes: int, ranks: int, environ: Mapping[str, str], *, sys: str = "/sys", proc: str = "/proc"
) -> list[NetworkSetting]:
    """Return the network and thread settings of this node; variables that are set already stay.

    The job has ``nodes`` nodes, which meet at the host ``master``; this node has ``ranks`` ranks. ``sys`` and ``proc``
    are the mount points of the kernel's file systems.
    """
    cpus = int(environ.get(contract.NODE_CPUS) or usable_cpus())
    threads = NetworkSetting(_THREADS, str(max(1, cpus // ranks)), f"CPUs: {cpus}, ranks: {ranks}")
    decided = [*_interfaces(master, nodes, environ, Path(sys), Path(proc)), threads]
    return [setting for setting in decided if setting.name not in environ]


def apply(settings: list[NetworkSetting], environ: MutableMapping[str, str]) -> None:
    """Set the variables in ``environ``, and list their names in :data:`contract.DECIDED`."""
    decided = {setting.name: setting.value for setting in settings if setting.value is not None}
    environ.update({**decided, contract.DECIDED: " ".join(decided)})


def _interfaces(master: str, nodes: int, environ: Mapping[str, str], sys: Path, proc: Path) -> Iterator[NetworkSetting]:
    if nodes == 1:
        yield NetworkSetting(_GLOO, LOOPBACK, "all ranks are on this node")
        return
    interface, why = interface_to(master, proc)
    if interface is None:
        yield NetworkSetting(_GLOO, None, why)
        return
    yield NetworkSetting(_GLOO, interface, why)
    if environ.get(contract.BACKEND) == "gloo":
        return
    if device := _active_device(sys):
        yield NetworkSetting(_NCCL, None, f"left to NCCL: {device} is active")
    else:
        # Without "=" NCCL also takes every interface whose name starts with this one.
        yield NetworkSetting(_NCCL, f"={interface}", f"{why}; no InfiniBand or RoCE device is active")


def _active_device(sys: Path) -> str | None:
    """Return the name of an InfiniBand or RoCE device with an active port; None if there is none."""
    for state in sorted(sys.glob("class/infiniband/*/ports/*/state")):
        try:
            if "ACTIVE" in state.read_text():
                return f"{state.parts[-4]} port {state.parts[-2]}"
        except OSError:
            continue
    return None
