"""What goes over the network and to disks, by counters of the kernel."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.system.traffic import Rates, _queue_lengths, disk_bytes, network_bytes

#: As the kernel writes /proc/net/dev: bytes are the first and the ninth number.
DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier ...
    lo: 999 9 0 0 0 0 0 0 999 9 0 0 0 0 0 0
  eth0: 1000 10 0 0 0 0 0 0 200 2 0 0 0 0 0 0
docker0:5000 50 0 0 0 0 0 0 6000 6 0 0 0 0 0 0
   ib0: 70000 7 0 0 0 0 0 0 80000 8 0 0 0 0 0 0
"""


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Give /proc and /sys of a machine with a card."""
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "net").mkdir(parents=True)
    (proc / "net" / "dev").write_text(DEV)
    (sys / "class" / "net" / "eth0" / "device").mkdir(parents=True)
    return proc, sys


def test_cards_count_and_what_is_over_them_does_not(machine: tuple[Path, Path]) -> None:
    assert network_bytes(*machine) == {"net_in": 1000, "net_out": 200}


def test_infiniband_counts_words_of_four_bytes(machine: tuple[Path, Path]) -> None:
    for port, words in (("1", (100, 10)), ("2", (1, 0))):
        counters = machine[1] / "class" / "infiniband" / "mlx5_0" / "ports" / port / "counters"
        counters.mkdir(parents=True)
        for way, count in zip(("rcv", "xmit"), words, strict=True):
            (counters / f"port_{way}_data").write_text(f"{count}\n")
    assert network_bytes(*machine) == {"net_in": 1404, "net_out": 240}


def test_in_a_container_without_cards_all_interfaces_count(machine: tuple[Path, Path], tmp_path: Path) -> None:
    assert network_bytes(machine[0], tmp_path / "none") == {"net_in": 6000, "net_out": 6200}


def test_a_machine_without_either_has_no_traffic(tmp_path: Path) -> None:
    assert network_bytes(tmp_path, tmp_path) == {"net_in": 0, "net_out": 0}


def test_bytes_of_disks_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    lines = ("rchar: 900", "wchar: 800", "syscr: 7", "syscw: 6", "read_bytes: 4096", "write_bytes: 8192")
    (tmp_path / "7" / "io").write_text("".join(f"{line}\n" for line in (*lines, "cancelled_write_bytes: 0")))
    assert disk_bytes(7, str(tmp_path)) == (4096, 8192)
    assert disk_bytes(8, str(tmp_path)) == (0, 0), "there is no such process"
    names = [line.split(":")[0] for line in Path("/proc/self/io").read_text().splitlines()]
    assert names == [*(line.split(":")[0] for line in lines), "cancelled_write_bytes"], "this kernel's are others"


def test_rates_are_growth_by_the_second() -> None:
    rates = Rates()
    assert rates.of({"read": 1000}, 10.0) == {}
    assert rates.of({"read": 4000}, 12.0) == {"read": 1500}
    assert rates.of({"read": 3000}, 14.0) == {"read": 0}, "a process has ended, and its counts with it"
    assert rates.of({"read": 3000, "write": 7}, 14.5) == {"read": 0, "write": 0}


def _answer(*queues: tuple[str, int]) -> bytes:
    """Return what the kernel answers: a message for each queue, with its kind and statistics, and the end."""
    found = b""
    for kind, packets in queues:
        name = struct.pack("=HH", 4 + len(kind), 1) + kind.encode() + bytes(-len(kind) % 4)
        statistics = struct.pack("=HHQ7I", 4 + 40, 3, 10**6, 900, 1, 2, 0, 0, packets, 1500 * packets) + bytes(4)
        found += struct.pack("=IHHII", 36 + len(name + statistics), 36, 2, 1, 0) + bytes(20) + name + statistics
    return found + struct.pack("=IHHIII", 20, 3, 2, 1, 0, 0)


def test_lengths_of_queues() -> None:
    assert [*_queue_lengths(_answer(("noqueue", 0), ("tbf", 42), ("fq_codel", 7)))] == [0, 42, 7]
    assert [*_queue_lengths(_answer())] == []


#: In a network of its own: a link of 80 kbit/s, whose bucket holds one packet, before and after twenty are sent.
SLOW_LINK = """\
ip link add eth0 type veth peer name eth1 && ip address add 198.18.0.1/24 dev eth0 || exit 9
ip link set eth0 up && ip link set eth1 up && ip neigh add 198.18.0.2 lladdr 02:00:00:00:00:02 dev eth0
tc qdisc add dev eth0 root tbf rate 80kbit burst 2kb latency 10s || exit 9
exec "$0" -c '
import socket
from allranks.system.traffic import packets_wait
print(packets_wait())
for _ in range(20):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(1000), ("198.18.0.2", 9))
print(packets_wait())
'
"""


def test_packets_wait_for_a_slow_link() -> None:
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", SLOW_LINK, sys.executable], capture_output=True, text=True
    )
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip(f"no network of its own: {done.stderr}")
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")
