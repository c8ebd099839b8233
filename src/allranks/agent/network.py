"""Which network interface the ranks use, and how many CPU threads: decided on each node, from what it has.

Libraries choose by lists of names, or take the address that the host's own name stands for, which may be the
loopback's. The right interface is the one that carries the route to the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.probe.cgroups import usable_cpus
from allranks.routes import LOOPBACK, interface_to

_GLOO, _NCCL, _THREADS = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"


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
        yield Setting(_GLOO, LOOPBACK, "all ranks are on this node")
        return
    interface, why = interface_to(master, proc)
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
    cpus = usable_cpus()
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
