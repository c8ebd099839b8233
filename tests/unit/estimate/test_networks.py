"""The network of an estimate: by name, by rate, or as a self-test has measured it."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks import contract
from allranks.errors import UsageError
from allranks.estimate.network import measured, named
from allranks.record.files import write_json
from allranks.record.selftest import Bandwidth, RankInfo, TrainingMessage, send
from allranks.runs.record import Record


@pytest.mark.parametrize(
    ("text", "bandwidth", "one_node", "two_nodes"),
    [
        ("100GbE", 12.5e9, False, True),
        ("hdr", 25e9, False, True),
        ("NVLink4", 450e9, True, False),
        ("12.5GB/s", 12.5e9, True, True),
        ("500MB/s", 5e8, True, True),
    ],
)
def test_a_network_by_name_or_rate(text: str, bandwidth: float, one_node: bool, two_nodes: bool) -> None:
    network = named(text)
    assert (network.bandwidth, network.serves(1), network.serves(2)) == (bandwidth, one_node, two_nodes)


def test_bits_are_not_taken_for_bytes() -> None:
    with pytest.raises(UsageError):
        named("100Gb/s")


def record_self_test(runs: Path, name: str, hosts: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Write a run whose two ranks have reported the times of two all-reduces."""
    record = Record(
        id=name,
        name="test",
        cluster="local",
        kind="local",
        world_size=2,
        nnodes=1,
        host="h",
        stop_timeout=1,
        file_mode=0o600,
        created=0.0,
    )
    node = runs / name / contract.node_dir(0, 0)
    node.mkdir(parents=True)
    write_json(runs / name / contract.RECORD_FILE, record.to_json())
    for rank, host in enumerate(hosts):
        send(RankInfo(rank, 2, host, rank, 0, "cpu", None, "2.13", "gloo"))
        send(Bandwidth(rank, 1 << 10, 0.001))
        send(Bandwidth(rank, 1 << 20, 0.01 * (rank + 1)))
        send(TrainingMessage(rank, "all_gather", 1 << 20, 0.004))
        (node / contract.rank_log(rank, "out")).write_text(capsys.readouterr().out)


def test_what_a_self_test_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_self_test(tmp_path, "test-1", ("a", "a"), capsys)
    record_self_test(tmp_path, "test-2", ("a", "b"), capsys)
    by_nodes = {network.serves(1): network for network in measured(tmp_path)}
    # Two ranks send as many bytes as they reduce, and half of what they gather; the slower one counts.
    curves = {"all_reduce": [(1 << 10, 0.001), (1 << 20, 0.02)], "all_gather": [(1 << 19, 0.004)]}
    assert by_nodes[True].curves == by_nodes[False].curves == curves
    assert by_nodes[True].bandwidth == (1 << 20) / 0.02
    assert by_nodes[True].on_cpus
    assert by_nodes[True].name == "test-1, 2 ranks on 1 node, gloo"
    assert by_nodes[False].serves(2)


def test_without_a_self_test_nothing_is_measured(tmp_path: Path) -> None:
    assert [*measured(tmp_path)] == []
