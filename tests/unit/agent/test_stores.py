"""Stores that are served when somebody connects."""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore

from allranks import contract
from allranks.agent.listener import listen
from allranks.agent.stores import Stores
from allranks.agent.torch_import import TorchImport
from allranks.errors import LaunchError


@pytest.fixture
def torch():
    return TorchImport()


@pytest.fixture
def stores(torch):
    stores = Stores(torch, "127.0.0.1", partial(listen, "127.0.0.1", None))
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


def test_torch_is_imported_when_somebody_connects_and_not_before(stores, torch):
    port = stores.open()
    stores.tick()
    assert (torch.has_begun, torch.is_over) == (False, False)
    assert not connected(stores, port).check(["key"])
    assert torch.is_over


def test_where_torch_is_there_a_store_is_served_at_once(stores, torch):
    torch.finish()
    first = client(stores.open())
    first.set("key", "old")
    assert first.check(["key"])
    assert not client(stores.open()).check(["key"])
    assert not torch.has_begun


def test_a_store_that_nobody_needed_leaves_its_port(stores):
    port = stores.open()
    stores.open()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_a_loss_is_told_to_the_ranks_of_its_generation(stores):
    stores.tell_of_loss()
    port = stores.open()
    store = connected(stores, port)
    assert not store.check([contract.RANK_GONE])
    stores.tell_of_loss()
    assert store.check([contract.RANK_GONE])
    assert not client(stores.open()).check([contract.RANK_GONE])


def test_ranks_that_are_answered_later_hear_of_an_earlier_loss(stores):
    port = stores.open()
    stores.tell_of_loss()
    assert connected(stores, port).check([contract.RANK_GONE])


def test_a_torch_that_cannot_be_imported_is_told_once(stores, torch, monkeypatch):
    port = stores.open()
    monkeypatch.setitem(sys.modules, "allranks.agent.rendezvous", None)
    with socket.create_connection(("127.0.0.1", port)):
        stores.tick()
        torch._thread.join()
        with pytest.raises(LaunchError, match="cannot import torch"):
            stores.tick()
        stores.tick()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
