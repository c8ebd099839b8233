"""What the kernel is told of a connection between two agents: when a machine that says nothing is gone."""

from __future__ import annotations

import socket

import pytest

from allranks.agent.channel import Channel

#: The probes that may be in vain, and the milliseconds that something sent may wait for an answer.
OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)


@pytest.mark.parametrize(("patient", "options"), [(True, [1, 1, 30, 30_000]), (False, [1, 1, 5, 5_000])])
def test_a_machine_is_asked_each_second_and_given_up_after_the_real_wait(patient: bool, options: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        channel = Channel(ours, patient=patient)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [ours.getsockopt(socket.IPPROTO_TCP, option) for option in OPTIONS] == options
        channel.close()
