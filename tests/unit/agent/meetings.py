"""A coordinator, with agents that are played by hand over real connections."""

from __future__ import annotations

import select
import socket
import time

from allranks.agent.nodes.channel import Channel
from allranks.agent.nodes.coordinator import Coordinator
from allranks.agent.stores import listen
from node_orders import NODE
from waiting import PATIENCE

KEY = bytes(range(32))


def orders(nodes=3, **fields):
    place = {"attempt": 2, "nnodes": nodes, "nproc_per_node": 2, "min_nodes": nodes, "master_addr": "localhost"}
    return NODE._replace(**{**place, **fields})


class Meeting:
    """A coordinator, and what it did."""

    def __init__(self, spec, torch="2.13.0"):
        self.listener = listen(None, None)
        self.spec = spec
        self.port = self.listener.getsockname()[1]
        self.stores = self.losses = 0
        self.addresses = []
        self.coordinator = Coordinator(spec, KEY, self.listener, self, torch)
        self.agents = []

    def open(self, address):
        self.stores += 1
        self.addresses.append(address)
        return 1000 + self.stores

    def tick(self):
        pass

    def report_loss(self):
        self.losses += 1

    was_used = True

    def agent(self, node, *, behind=0.0, ranks=2, **fields):
        agent = Agent(self, behind)
        said = {"attempt": 2, "node": node, "host": f"host{node}", "ranks": ranks, "torch": "2.13.0"}
        agent.say("hello", **{**said, **fields})
        return agent

    def ready(self, *nodes, **options):
        """Bring agents that are ready."""
        agents = [self.agent(node, **options) for node in nodes]
        for agent in agents:
            agent.say("ready")
        return agents

    def close(self):
        self.coordinator.close()
        for agent in self.agents:
            agent.socket.close()


class Agent:
    """The other end of a connection to the coordinator, with a clock that is so many seconds behind."""

    def __init__(self, meeting, behind=0.0, key=KEY):
        self.meeting = meeting
        self.behind = behind
        self.socket = socket.create_connection(("127.0.0.1", meeting.port))
        meeting.agents.append(self)
        self.channel = Channel(self.socket, key, is_coordinator=False, patient=True)
        self.heard = []
        self.wait("a greeting", lambda: self.channel.has_heard)

    def say(self, kind, **fields):
        self.channel.send(kind, **{"sent": time.time() - self.behind, **fields})

    def hear(self, kind):
        """Wait until the coordinator has said something of a kind, and return it."""
        found = self.wait(kind, lambda: [message for message in self.heard if message["kind"] == kind])[0]
        self.heard.remove(found)
        return found

    def wait(self, what, done):
        deadline = time.monotonic() + PATIENCE
        while not (found := done()):
            assert time.monotonic() < deadline, f"waited for {what}, heard {self.heard}"
            self.meeting.coordinator.tick()
            select.select([self.channel], [], [], 0.01)
            self.heard += self.channel.receive()
        return found
