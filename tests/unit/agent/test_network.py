"""The interface is the one of the route, and what is there already stays."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from allranks import contract
from allranks.agent import network
from allranks.agent.network import NetworkSetting, decide
from allranks.system import routes
from allranks.system.cgroups import usable_cpus

CPUS = usable_cpus()
ROUTES = """\
Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
slow0\t00000000\t010200C0\t0003\t0\t0\t200\t00000000\t0\t0\t0
fast0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
"""


def by_name(settings: list[NetworkSetting]) -> dict[str, str | None]:
    return {setting.name: setting.value for setting in settings}


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Give a /sys with an InfiniBand device that is down."""
    port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    return tmp_path / "sys"


def own_address() -> str | None:
    """Return an address of this machine that is not its loopback's, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.18.255.254", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_the_interface_that_has_the_address_of_the_route(sys: Path) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this machine has no network")
    found = by_name(decide(address, 2, 1, {}, sys=str(sys)))
    interface = found["GLOO_SOCKET_IFNAME"]
    assert Path("/sys/class/net", interface).exists()
    assert interface != "lo"
    assert found["NCCL_SOCKET_IFNAME"] == f"={interface}"


def test_an_active_device_is_left_to_nccl(sys: Path) -> None:
    (sys / "class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
    settings = decide("127.0.0.1", 2, 1, {}, sys=str(sys))
    assert by_name(settings) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": None,
        "OMP_NUM_THREADS": str(CPUS),
    }
    assert str(settings[1]) == "NCCL_SOCKET_IFNAME: left to NCCL: mlx5_0 port 1 is active"
    environ: dict[str, str] = {}
    network.apply(settings, environ)
    decided = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(CPUS)}
    assert environ == {**decided, contract.DECIDED: "GLOO_SOCKET_IFNAME OMP_NUM_THREADS"}
    assert contract.undecided({**environ, "NCCL_SOCKET_IFNAME": "ib0"}).keys() == {
        contract.DECIDED,
        "NCCL_SOCKET_IFNAME",
    }


def test_what_is_set_stays(sys: Path) -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": ""}
    assert by_name(decide("127.0.0.1", 2, 1, environ, sys=str(sys))) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert "NCCL_SOCKET_IFNAME" not in by_name(decide("127.0.0.1", 2, 1, {contract.BACKEND: "gloo"}, sys=str(sys)))


def test_ranks_share_the_cpus_and_one_node_needs_no_network(sys: Path) -> None:
    found = by_name(decide("no-such-host.invalid", 1, 2 * CPUS, {}, sys=str(sys)))
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_the_name_of_this_node_may_mean_its_loopback(sys: Path, tmp_path: Path) -> None:
    """As 127.0.1.1 in Debian's /etc/hosts; localhost stands for such a name here."""
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "route").write_text(ROUTES)
    found = by_name(decide("localhost", 2, 1, {}, sys=str(sys), proc=str(tmp_path / "proc")))
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("fast0", "=fast0")
    (tmp_path / "proc" / "net" / "route").write_text("".join(ROUTES.splitlines(keepends=True)[:2]))
    found = by_name(decide("localhost", 2, 1, {}, sys=str(sys), proc=str(tmp_path / "proc")))
    assert found["GLOO_SOCKET_IFNAME"] == "docker0"


def test_a_master_without_a_name_is_said(sys: Path) -> None:
    (setting, threads) = decide("no-such-host.invalid", 2, 1, {}, sys=str(sys))
    assert (setting.name, setting.value, threads.name) == ("GLOO_SOCKET_IFNAME", None, "OMP_NUM_THREADS")
    assert setting.why.startswith("left alone: there is no route to no-such-host.invalid: ")


def listens_at(master: str) -> str:
    with routes.listen_for(master, 0) as listener:
        return str(listener.getsockname()[0])


def test_node_0_listens_where_the_others_come_and_nowhere_else() -> None:
    assert (listens_at("127.0.0.1"), listens_at("::1")) == ("127.0.0.1", "::1")
    assert listens_at("localhost") in ("127.0.0.1", "::1")
    if address := own_address():
        assert listens_at(address) == address


@pytest.mark.parametrize("master", ["no-such-host.invalid", "192.0.2.1", ""], ids=["unknown", "of a service", "none"])
def test_node_0_listens_at_all_its_addresses_where_none_is_meant(master: str) -> None:
    assert listens_at(master) == ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
