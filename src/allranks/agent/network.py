"""Which network interface the ranks use, and how many CPU threads: decided on each node, from what it has.

Libraries choose by lists of names, or take the address that the host's own name stands for, which may be the
loopback's. The right interface is the one that carries the route to the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.system.cgroups import usable_cpus
from allranks.system.routes import LOOPBACK, interface_to

_GLOO, _NCCL, _THREADS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class NetworkSetting:
    """A variable that the ranks get, and why; a value of None means that it is left alone."""

    name: str
    value: str | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}{'' if self.value is None else '=' + self.value}: {self.why}"


def decide(
    master: str, nodes: int, ranks: int, environ: Mapping[str, str], *, sys: str = "/sys", proc: str = "/proc"
) -> list[NetworkSetting]:
    """Decide the variables of this node's network and CPUs; what is set already stays.

    ``nodes`` of them meet at the host ``master``, and this one has ``ranks`` ranks. The kernel shows devices in ``sys``
    and routes in ``proc``.
    """
    cpus = int(environ.get(contract.NODE_CPUS) or usable_cpus())
    threads = NetworkSetting(_THREADS, str(max(1, cpus // ranks)), f"CPUs: {cpus}, ranks: {ranks}")
    decided = [*_interfaces(master, nodes, environ, Path(sys), Path(proc)), threads]
    return [setting for setting in decided if setting.name not in environ]


def apply(settings: list[NetworkSetting], environ: MutableMapping[str, str]) -> None:
    """Set what was decided, and list it in :data:`contract.DECIDED`."""
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
        # Without "=" it would also match all interfaces whose names start so.
        yield NetworkSetting(_NCCL, f"={interface}", f"{why}; no InfiniBand or RoCE device is active")


def _active_device(sys: Path) -> str | None:
    """Return the name of an InfiniBand or RoCE device with a port that is up; None if there is none."""
    for state in sorted(sys.glob("class/infiniband/*/ports/*/state")):
        try:
            if "ACTIVE" in state.read_text():
                return f"{state.parts[-4]} port {state.parts[-2]}"
        except OSError:
            continue
    return None
