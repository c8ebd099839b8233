"""A store of its own for each generation, which listens before any rank starts and is served when one connects."""

from __future__ import annotations

import fcntl
import resource
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from allranks import contract
from allranks.agent.stores import Stores, has_caller, listen
from allranks.errors import LaunchError
from waiting import wait_for


@pytest.fixture
def stores():
    stores = Stores()
    yield stores
    stores.close()


def client(port):
    return TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=10))


def connected(stores, port):
    """Return a client's store, which is served while it connects."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client, port)
        deadline = time.monotonic() + 10
        while not waiting.done():
            assert time.monotonic() < deadline, "the store is not served"
            stores.tick()
        return waiting.result()


def test_torch_is_imported_when_somebody_connects_and_not_before(stores):
    port = stores.open("127.0.0.1")
    stores.tick()
    assert stores._import is None
    assert not connected(stores, port).check(["key"])
    assert not stores._import.is_alive()


def test_who_connected_before_there_was_a_store_is_answered(stores):
    port = stores.open("127.0.0.1")
    assert not has_caller(stores._listener)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client, port)
        select.select([stores._listener], [], [], 10)
        assert has_caller(stores._listener)
        stores.import_torch()
        stores.tick()
        assert not waiting.result(10).check(["key"])
    assert stores.open("127.0.0.1") != port


def test_a_caller_is_seen_however_many_connections_are_open():
    """select() knows no descriptors above 1023, and node 0's agent has one for each other agent."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual[1], usual[1]))
    try:
        with listen("127.0.0.1", None) as first:
            listener = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD, 1024))
        with listener, socket.create_connection(listener.getsockname()):
            assert has_caller(listener)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_a_fixed_port_is_free_for_the_next_generation():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stores = Stores(port)
    stores.import_torch()
    for _ in range(3):
        assert stores.open("127.0.0.1") == port
        store = client(port)
        assert not store.check(["key"])
        store.set("key", "old")
    stores.close()


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            Stores(port).open("127.0.0.1")
    error = caught.value
    assert (error.what, error.why) == (f"cannot listen on 127.0.0.1:{port}", "Address already in use")
    assert error.fix == "leave out launch.master_port (--master-port, MASTER_PORT): a free port is taken then"


def test_an_address_of_another_machine_is_named():
    with pytest.raises(LaunchError) as caught:
        Stores().open("192.0.2.1")
    fix = "launch.master_addr (--master-addr, MASTER_ADDR) must be an address of this machine"
    assert (caught.value.what, caught.value.fix) == ("cannot listen on 192.0.2.1:0", fix)


def test_where_torch_is_there_a_store_is_served_at_once(stores):
    stores.import_torch()
    first = client(stores.open("127.0.0.1"))
    first.set("key", "old")
    assert first.check(["key"])
    assert not client(stores.open("127.0.0.1")).check(["key"])
    assert stores._import is None


@pytest.mark.parametrize("has_torch", [False, True])
def test_ranks_have_met_once_one_of_them_left_a_key(stores, has_torch):
    if has_torch:
        stores.import_torch()
    port = stores.open("127.0.0.1")
    stores.tick()
    assert not stores.was_used
    store = connected(stores, port)
    assert not stores.was_used
    store.add("key", 1)  # It is answered, as set is not.
    assert stores.was_used
    stores.open("127.0.0.1")
    assert not stores.was_used


def test_a_store_that_nobody_needed_leaves_its_port(stores):
    port = stores.open("127.0.0.1")
    stores.open("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_loss_is_told_to_the_ranks_of_its_generation(stores):
    stores.report_loss()
    port = stores.open("127.0.0.1")
    store = connected(stores, port)
    assert not store.check([contract.RANK_GONE])
    stores.report_loss()
    wait_for("the loss in the store", lambda: store.check([contract.RANK_GONE]))
    assert not client(stores.open("127.0.0.1")).check([contract.RANK_GONE])


def test_ranks_that_are_answered_later_hear_of_an_earlier_loss(stores):
    port = stores.open("127.0.0.1")
    stores.report_loss()
    assert connected(stores, port).check([contract.RANK_GONE])


def test_a_torch_that_cannot_be_imported_is_told_once(stores, monkeypatch):
    port = stores.open("127.0.0.1")
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with socket.create_connection(("127.0.0.1", port)):
        stores.tick()
        stores._import.join()
        with pytest.raises(LaunchError, match="cannot import torch"):
            stores.tick()
        stores.tick()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
