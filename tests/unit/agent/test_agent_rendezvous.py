"""A store of its own for each generation, held before any rank starts."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from allranks.agent.listener import has_caller, listen, port_of
from allranks.agent.rendezvous import OneNodeRendezvous
from allranks.errors import LaunchError
from waiting import PATIENCE


def _port(info):
    return info.bootstrap_store_info.master_port


def _client(port):
    return TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=PATIENCE))


def test_each_generation_has_a_store_of_its_own():
    rendezvous = OneNodeRendezvous("run", "127.0.0.1", None)
    first = rendezvous.next_rendezvous()
    _client(_port(first)).set("key", "old")
    assert _client(_port(first)).check(["key"])
    second = rendezvous.next_rendezvous()
    assert not _client(_port(second)).check(["key"])
    assert (second.rank, second.world_size, second.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert rendezvous.shutdown()


def test_who_dialled_before_there_was_a_store_is_answered():
    listener = listen("127.0.0.1", None)
    assert not has_caller(listener)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_client, port_of(listener))
        select.select([listener], [], [], 10)
        assert has_caller(listener)
        rendezvous = OneNodeRendezvous("run", "127.0.0.1", None, listener)
        info = rendezvous.next_rendezvous()
        assert not waiting.result(10).check(["key"])
    assert _port(rendezvous.next_rendezvous()) != _port(info)


def test_a_fixed_port_is_free_for_the_next_generation():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = OneNodeRendezvous("run", "127.0.0.1", port)
    for _ in range(3):
        info = rendezvous.next_rendezvous()
        assert _port(info) == port
        client = _client(port)
        assert not client.check(["key"])
        client.set("key", "old")
        del info  # As the agent does: who keeps it keeps the port.


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            OneNodeRendezvous("run", "127.0.0.1", port).next_rendezvous()
    error = caught.value
    assert (error.what, error.why) == (f"cannot listen on 127.0.0.1:{port}", "Address already in use")
    assert error.fix == "leave out launch.master_port (--master-port, MASTER_PORT): a free port is taken then"


def test_an_address_of_another_machine_is_named():
    with pytest.raises(LaunchError) as caught:
        OneNodeRendezvous("run", "192.0.2.1", None).next_rendezvous()
    fix = "launch.master_addr (--master-addr, MASTER_ADDR) must be an address of this machine"
    assert (caught.value.what, caught.value.fix) == ("cannot listen on 192.0.2.1:0", fix)
