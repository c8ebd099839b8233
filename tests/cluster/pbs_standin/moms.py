"""The server's side of the MOMs: orders to them, and what they say."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIGKILL = 9


@dataclass
class Task:
    """One task on one node.

    Attributes:
        process: as its node counts; 0 until it has started.
        ended: gives its exit status (256 and the signal, if one killed it), None if its node died.
    """

    number: int
    job: str
    node: str
    ended: asyncio.Future[int | None]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    process: int = 0


class Moms:
    """All nodes' MOMs.

    Args:
        lost: is called with the name of a node whose MOM has ended.
        found: is called with the name of a node whose MOM is there.
    """

    def __init__(self, lost: Callable[[str], None], found: Callable[[str], None]) -> None:
        self._lost, self._found = lost, found
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._numbers = itertools.count(1)
        self.tasks: dict[int, Task] = {}
        self._waiting: dict[tuple[str, str, str], asyncio.Future[dict[str, Any] | None]] = {}

    def is_alive(self, node: str) -> bool:
        """Whether a node's MOM is there."""
        return node in self._writers

    async def serve(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear a MOM until it ends."""
        self._writers[node] = writer
        self._found(node)
        try:
            while line := await reader.readline():
                self._hear(node, json.loads(line))
        except ConnectionError:
            pass
        del self._writers[node]
        for task in [task for task in self.tasks.values() if task.node == node]:
            self._over(task, None)
        for key in [key for key in self._waiting if key[0] == node]:
            self._waiting.pop(key).set_result(None)
        self._lost(node)

    def _hear(self, node: str, said: dict[str, Any]) -> None:
        if "started" in said:
            task = self.tasks[said["started"]]
            task.process = said["process"]
            task.started.set()
        elif "ended" in said:
            self._over(self.tasks[said["ended"]], said["status"])
        else:
            kind = "begun" if "begun" in said else "finished"
            if waiting := self._waiting.pop((node, kind, said[kind]), None):
                waiting.set_result(said)

    def _over(self, task: Task, status: int | None) -> None:
        del self.tasks[task.number]
        task.started.set()
        task.ended.set_result(status)

    def tell(self, node: str, order: dict[str, Any]) -> None:
        """Give a MOM an order, if it is there."""
        if writer := self._writers.get(node):
            writer.write(json.dumps(order).encode() + b"\n")

    async def ask(self, node: str, kind: str, order: dict[str, Any]) -> dict[str, Any] | None:
        """Give a MOM an order about a job, and return its answer; None if it is not there, or not any more."""
        if not self.is_alive(node):
            return None
        answer: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting[node, kind, order["job"]] = answer
        self.tell(node, order)
        return await answer

    def start(self, node: str, job: str, order: dict[str, Any]) -> Task:
        """Start a task on a node; one that is dead gives a task that has ended."""
        task = Task(next(self._numbers), job, node, asyncio.get_running_loop().create_future())
        self.tasks[task.number] = task
        if self.is_alive(node):
            self.tell(node, {"do": "start", "task": task.number, "job": job, **order})
        else:
            self._over(task, None)
        return task

    def signal(self, job: str, number: int, *, node: str, task: int | None = None, ending: bool = False) -> None:
        """Signal all tasks of a job on a node, or one."""
        order = {"do": "signal", "job": job, "signal": number, "task": task, "ending": ending}
        self.tell(node, order)

    def of_job(self, job: str) -> list[Task]:
        """Return the tasks of a job that have not ended."""
        return [task for task in self.tasks.values() if task.job == job]

    async def end_all(self, job: str) -> None:
        """Kill all tasks of a job on all nodes, and return when they have ended."""
        tasks = self.of_job(job)
        for node in {task.node for task in tasks}:
            self.signal(job, SIGKILL, node=node)
        if tasks:
            await asyncio.wait([task.ended for task in tasks])
