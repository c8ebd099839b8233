"""The command that runs something on another machine."""

from __future__ import annotations

import pytest

from allranks.clusters.ssh.transport import fix_for, ssh_command
from allranks.job.hosts import parse_hosts


def test_ssh_asks_nobody_and_gives_a_silent_machine_up() -> None:
    (host,) = parse_hosts(["ann@gpu01:2222"])
    options = ("-T", "-x", "-a", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5")
    named = ("-l", "ann", "-p", "2222", "gpu01")
    assert ssh_command(host, ("echo", "two words")) == ("ssh", *options, *named, "echo 'two words'")


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("Connection refused", "start sshd on gpu01, or give the port at which it listens"),
        ("Connection timed out", "see whether gpu01 is up, and whether a firewall closes the port of its sshd"),
        ("No route to host", "see whether gpu01 is up, and the network between the two"),
        ("Timeout, server gpu01 not responding.", "see whether gpu01 has lost its power, or its network"),
        ("what nobody knows", "see what ssh -p 2222 ann@gpu01 says"),
    ],
)
def test_what_to_do_is_no_question_since_another_way_out_may_follow(said: str, fix: str) -> None:
    assert fix_for("ann@gpu01:2222", f"ssh: {said}") == fix
