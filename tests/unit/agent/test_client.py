"""How an agent comes to node 0's, and the version of torch that it names there."""

from __future__ import annotations

import socket
import sys
import time

import pytest
from meetings import KEY, orders

from allranks import contract
from allranks.agent.nodes import client as client_module
from allranks.agent.nodes.client import CoordinatorClient, torch_to_match
from allranks.agent.nodes.coordinator import Coordinator
from allranks.agent.stop import StopRequest
from allranks.agent.stores import listen
from allranks.errors import LaunchError
from allranks.record.events import EventWriter


@pytest.mark.parametrize(("backend", "wanted"), [("gloo", "2.13.0"), ("nccl", "2.13.0+cu130")])
def test_the_build_of_torch_matters_where_it_says_which_nccl(monkeypatch, backend, wanted):
    monkeypatch.setenv(contract.BACKEND, backend)
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")
    assert torch_to_match() == wanted


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"__init__.py": "1 / 0", "version.py": "a = '1'\n__version__ = '2.13.0+cu130'\n"}, "2.13.0+cu130"),
        ({"__init__.py": "1 / 0", "version.py": "__version__: str = '2.13.0'\n"}, "2.13.0"),
        ({"__init__.py": "1 / 0", "version.py": "from built import version\n"}, None),
        ({"__init__.py": "1 / 0"}, None),
        ({"readme.txt": ""}, None),
        ({}, None),
    ],
    ids=["a build", "typed", "elsewhere", "broken", "a directory", "none"],
)
def test_the_version_of_torch_is_told_without_its_import(tmp_path, monkeypatch, files, version):
    for name, text in files.items():
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / name).write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert torch_to_match() == version


def make_client(spec, folder):
    return CoordinatorClient(spec, KEY, StopRequest(lambda stop: None), EventWriter(folder / "agent.jsonl"), None)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "connection refused"),
        ("no-such-host.invalid", "no-such-host.invalid cannot be resolved: "),
    ],
)
def test_it_is_said_why_node_0_cannot_be_reached(tmp_path, monkeypatch, host, why):
    monkeypatch.setattr(client_module, "DIAL_SECONDS", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # It does not listen.
        port = nobody.getsockname()[1]
        client = make_client(orders(2, node=1, master_addr=host, master_port=port), tmp_path)
        with pytest.raises(LaunchError) as caught:
            client.join(time.sleep)
    assert caught.value.what == f"node 1 ({socket.gethostname()}) cannot reach node 0 at {host}:{port} for 0.2 s"
    assert str(caught.value.why).startswith(why)
    where = "in its run's directory (the log of its job, or attempts/002/node-000/agent.log)"
    assert str(caught.value.fix).startswith(f"see what the agent of node 0 says, {where};")


def test_an_agent_that_begins_anew_while_it_is_dialled_is_dialled_again(meet, tmp_path):
    """As when node 0 finds, after the import of torch, that it must not fork: others have dialled by then."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        client = make_client(orders(2, node=1, master_addr="127.0.0.1", master_port=port), tmp_path)
        steps = iter(range(1000))
        meetings = []

        def wait(seconds):
            if next(steps) == 0:
                before.accept()[0].close()
                before.close()
            elif not meetings:
                meetings.append(meet(orders(2, master_port=port)))
                meetings[0].listener.close()
                meetings[0].listener = listener = listen(None, port)
                meetings[0].coordinator = Coordinator(meetings[0].spec, KEY, listener, meetings[0], None)
            else:
                meetings[0].coordinator.tick()
            client.tick()

        client.join(wait)
    assert client.outcome is None
    client.leave(time.sleep, 0.0, None)
