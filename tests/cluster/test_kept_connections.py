"""Connections over ssh that are kept: who makes them, who does not, and what becomes of them."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_tools import wait_until
from nodes import Network
from ssh_nodes import SshNodes

from allranks.clusters.ssh import transport
from allranks.clusters.ssh.transport import run_all, ssh_command, ssh_options
from allranks.job.hosts import parse_hosts
from allranks.system.commands import Answer


@pytest.fixture
def nodes(ssh_nodes: SshNodes, network: Network) -> Iterator[SshNodes]:
    """Give the nodes without a kept connection; what a test broke is whole again afterwards."""
    ssh_nodes.end_kept()
    config = (ssh_nodes.folder / "config").read_text()
    yield ssh_nodes
    (ssh_nodes.folder / "config").write_text(config)
    ssh_nodes.end_kept()
    for name, node in network.nodes.items():
        if not node.is_alive:
            network.start_nodes([name])
            ssh_nodes.restart(name)
        network.mend(name)


def hosts_say(nodes: SshNodes, hosts: str = "gpu[01-02]", **options: object) -> list[Answer]:
    """Have hosts say their names."""
    commands = [ssh_command(host, ["hostname"]) for host in parse_hosts([hosts])]
    return run_all(commands, options.pop("environ", nodes.env(os.environ)), **options)  # type: ignore[arg-type]


def logins(nodes: SshNodes, name: str) -> int:
    """Return how often a node's sshd has let somebody in."""
    return nodes.log(name).read_text().count("Accepted publickey")


def own(nodes: SshNodes, *lines: str, host: str = "*") -> None:
    """Put lines for a host into the user's configuration."""
    config = nodes.folder / "config"
    config.write_text("\n    ".join((f"Host {host}", *lines)) + "\n" + config.read_text())
    transport._has_own.cache_clear()


def test_a_second_command_goes_over_the_same_connection(nodes: SshNodes) -> None:
    before = logins(nodes, "gpu01")
    for _ in range(3):
        assert [answer.out for answer in hosts_say(nodes)] == ["gpu01\n", "gpu02\n"]
    assert logins(nodes, "gpu01") == before + 1
    assert len(nodes.kept()) == 2
    (folder,) = (nodes.runtime).iterdir()
    assert (folder.name, oct(folder.stat().st_mode)) == ("allranks-ssh", "0o40700")


def test_rsync_goes_over_the_same_connection(nodes: SshNodes, tmp_path: Path) -> None:
    hosts_say(nodes)
    before = logins(nodes, "gpu01")
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("text")
    (host,) = parse_hosts(["gpu01"])
    ssh = shlex.join(["ssh", *ssh_options(host)])
    command = ["rsync", "-r", "-e", ssh, f"{tmp_path}/from/", f"gpu01:{tmp_path}/to/"]
    assert run_all([command], nodes.env(os.environ)) == [Answer(0, "", "")]
    assert (tmp_path / "to" / "file").read_text() == "text"
    assert logins(nodes, "gpu01") == before


@pytest.mark.parametrize("lines", [("ControlPath {}/own-%C", "ControlMaster auto"), ("ControlPath none",)])
@pytest.mark.parametrize("host", ["*", "gpu02"])
def test_who_has_settings_for_it_has_the_say(nodes: SshNodes, lines: tuple[str, ...], host: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # Paths of sockets must be short, and pytest's may not be.
        own(nodes, *(line.format(folder) for line in lines), host=host)
        for _ in range(2):
            assert [answer.out for answer in hosts_say(nodes)] == ["gpu01\n", "gpu02\n"]
    assert nodes.kept() == []


@pytest.mark.parametrize("breaks", ["a file", "open to all", "somebody else's", "a link"])
def test_no_folder_for_the_sockets(
    nodes: SshNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    _without_runtime(monkeypatch, tmp_path)
    folder = tmp_path / f"allranks-ssh-{os.getuid()}"
    if breaks == "a file":
        folder.write_text("")
    elif breaks == "a link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to("other")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777) if breaks == "open to all" else os.chown(folder, 1000, 1000)
    environ = {name: value for name, value in nodes.env(os.environ).items() if name != "XDG_RUNTIME_DIR"}
    assert [answer.out for answer in hosts_say(nodes, environ=environ)] == ["gpu01\n", "gpu02\n"]
    assert _masters_in(tmp_path) == []


def test_a_path_that_is_too_long_for_a_socket(nodes: SshNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    _without_runtime(monkeypatch, long)
    environ = {**nodes.env(os.environ), "XDG_RUNTIME_DIR": str(long)}
    assert [answer.out for answer in hosts_say(nodes, environ=environ)] == ["gpu01\n", "gpu02\n"]
    assert [*long.iterdir()] == []


def test_a_machine_that_was_started_anew_is_reached(nodes: SshNodes, network: Network) -> None:
    hosts_say(nodes)
    network.kill("gpu02")
    network.start_nodes(["gpu02"])
    nodes.restart("gpu02")
    assert [answer.out for answer in hosts_say(nodes)] == ["gpu01\n", "gpu02\n"]


def test_a_connection_to_a_machine_that_is_gone_is_not_used_twice(nodes: SshNodes, network: Network) -> None:
    """It takes more than 10 s on a slow machine: the one that is gone has 8 s to answer."""
    hosts_say(nodes)
    network.cut("gpu02")
    one, two = hosts_say(nodes, seconds=8.0)  # Room for the first to answer.
    assert (one.out, two.unreached, two.is_late) == ("gpu01\n", True, True)
    network.mend("gpu02")
    before = logins(nodes, "gpu02")
    assert [answer.out for answer in hosts_say(nodes)] == ["gpu01\n", "gpu02\n"]
    assert logins(nodes, "gpu02") == before + 1


def test_a_connection_that_is_kept_is_no_child_of_the_terminal(nodes: SshNodes) -> None:
    """Ctrl-C there, and its end, are not for it."""
    hosts_say(nodes)
    assert all(os.getsid(process) == process for process in nodes.kept())


def test_waiting_ends_when_nobody_waits_any_more(nodes: SshNodes) -> None:
    commands = [ssh_command(host, ["sleep", "1000"]) for host in parse_hosts(["gpu[01-02]"])]
    looks = iter([False] * 8)
    answers = run_all(commands, nodes.env(os.environ), seconds=None, is_over=lambda: next(looks, True))
    assert [(answer.unreached, answer.is_late) for answer in answers] == [(True, True)] * 2


def test_the_end_of_an_sshd_ends_what_was_kept(nodes: SshNodes) -> None:
    hosts_say(nodes)
    assert len(nodes.kept()) == 2
    nodes.restart("gpu01")
    nodes.restart("gpu02")
    wait_until("the end of kept connections", lambda: nodes.kept() == [])


def _without_runtime(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have temporary files in a directory, wherever they may go."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("allranks.clusters.ssh.transport._SHORT", str(folder))


def _masters_in(folder: Path) -> list[bytes]:
    found = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [title for title in found if title.startswith(b"ssh: " + os.fsencode(folder))]
