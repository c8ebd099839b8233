"""The command that runs something on another machine."""

from __future__ import annotations

from allranks.clusters.ssh.transport import ssh_command
from allranks.job.hosts import parse_hosts


def test_ssh_asks_nobody_and_gives_a_silent_machine_up() -> None:
    (host,) = parse_hosts(["ann@gpu01:2222"])
    options = ("-T", "-x", "-a", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5")
    named = ("-l", "ann", "-p", "2222", "gpu01")
    assert ssh_command(host, ("echo", "two words")) == ("ssh", *options, *named, "echo 'two words'")
