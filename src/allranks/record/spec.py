"""Configurations of a node's agent and of a batch job's supervisor: files of JSON in the run's directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from allranks import contract


class NodeSpec(NamedTuple):
    """The configuration of one node's agent. It holds no values of environment variables."""

    run_id: str
    run_dir: str
    attempt: int
    node: int
    nnodes: int
    nproc_per_node: int
    kind: Literal["script", "module", "binary"]
    #: Absolute path of the script or binary, or name of the module.
    target: str
    args: tuple[str, ...]
    #: Interpreter options of the ranks, such as -O; ranks with options start as plain interpreters.
    python_options: tuple[str, ...]
    warm: bool
    max_restarts: int
    restart_delay: float
    stop_timeout: float
    master_addr: str
    #: None chooses a free port.
    master_port: int | None
    #: Permission bits of the files that the agent creates.
    file_mode: int
    #: With fewer nodes than this the job cannot continue.
    min_nodes: int = 1
    #: Number of nodes that wait to replace a lost one: initially the last nodes.
    spares: int = 0
    #: Seconds without progress after which the ranks count as hung; None: derived from their usual step; 0: never.
    hang_timeout: float | None = None
    #: What follows a hang. None: report it, and end the run if the time limit is near and no terminal follows it.
    on_hang: Literal["report", "restart", "end"] | None = None

    def to_json(self) -> str:
        """Return it as indented JSON."""
        return json.dumps(self._asdict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> NodeSpec:
        """Read the result of :meth:`to_json`, also of another version: a run may be resumed with a later one."""
        return cls(**_known(text, cls._fields))

    def command(self, python: Sequence[str]) -> tuple[str, ...]:
        """Return a rank's command; ``python`` is the command line of its interpreter."""
        starter = {"script": python, "module": (*python, "-m"), "binary": ()}[self.kind]
        return (*starter, self.target, *self.args)

    @property
    def places(self) -> int:
        """Most nodes that take part, without spares."""
        return self.nnodes - self.spares

    @property
    def folder_mode(self) -> int:
        """Permission bits of the directories that the agent creates."""
        return 0o750 if self.file_mode & 0o040 else 0o700

    @property
    def needs_all(self) -> bool:
        """Whether the job cannot continue without any of its nodes."""
        return self.min_nodes >= self.nnodes


class BatchSpec(NamedTuple):
    """The configuration of a batch job's supervisor."""

    #: The scheduler's module for code inside a job: see :class:`allranks.agent.batch_job.BatchJob`.
    module: str
    #: The script to submit for another attempt.
    script: str
    #: The program that starts a task on a node, if there is a choice, and the user's options for it.
    start_with: str | None
    options: tuple[str, ...]
    #: Whether each task is a rank; else each is a node's agent.
    is_direct: bool
    is_array: bool
    #: Whether the job was started inside an allocation.
    is_inside: bool
    master_addr: str | None
    #: Most attempts of the run; None: no automatic attempts.
    max_attempts: int | None
    #: Requested time limit, and how long before it ranks are warned (0: no warning), in seconds.
    time: int | None
    warn_before: int
    #: Whether to remove the run's file of secrets after the last attempt.
    removes_secrets: bool
    #: The kinds of end after which another attempt follows.
    retry_on: tuple[str, ...] = (contract.NODE, contract.PREEMPTION)

    def to_json(self) -> str:
        """Return it as indented JSON."""
        return json.dumps(self._asdict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BatchSpec:
        """Read the result of :meth:`to_json`, also of another version: a run may be resumed with a later one."""
        return cls(**_known(text, cls._fields))


def _known(text: str, names: Sequence[str]) -> dict[str, Any]:
    raw = {name: value for name, value in json.loads(text).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
