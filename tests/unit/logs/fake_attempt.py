"""A run's directory as ranks and agent write it, with the time given by the test."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeAlias

from allranks import contract
from allranks.logs.merge import MergedLogs
from allranks.record.logindex import LogIndexWriter

#: What a rank writes: its number, the text, its stream and its node; or a number of ms, after which the agents look.
Step: TypeAlias = "int | tuple[int, bytes] | tuple[int, bytes, str] | tuple[int, bytes, str, int]"


class FakeAttempt:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ms = 1_700_000_000_000
        self.log = io.BytesIO()
        self.out = _Tee("o", self)
        self.err = _Tee("e", self)
        self._writers: dict[int, LogIndexWriter] = {}

    def node(self, node: int = 0) -> Path:
        path = self.folder / f"node-{node:03d}"
        path.mkdir(exist_ok=True, parents=True)
        return path

    def path(self, rank: int, stream: str = "out", node: int = 0) -> Path:
        return self.node(node) / contract.rank_log(rank, stream)

    def write(self, rank: int, data: bytes, stream: str = "out", node: int = 0) -> None:
        with self.path(rank, stream, node).open("ab") as file:
            file.write(data)
        self.writer(node).watch([rank])

    def writer(self, node: int = 0) -> LogIndexWriter:
        if node not in self._writers:
            self._writers[node] = LogIndexWriter(self.node(node), clock=lambda: self.ms / 1000 + 0.0001)
        return self._writers[node]

    def tick(self, after: int = 0) -> None:
        self.ms += after
        for writer in self._writers.values():
            writer.tick()

    def play(self, *steps: Step) -> None:
        for step in steps:
            if isinstance(step, int):
                self.tick(step)
            else:
                self.write(*step)

    def merged(self, **options: object) -> MergedLogs:
        options.setdefault("clock", lambda: self.ms / 1000)
        return MergedLogs(self.folder, self.out.write, self.err.write, **options)  # type: ignore[arg-type]

    def shown(self) -> bytes:
        """What both sinks got since the last call, in one order."""
        data = self.log.getvalue()
        self.log.seek(0)
        self.log.truncate()
        return data

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _Tee:
    """A sink that writes also into the log of both."""

    def __init__(self, kind: str, attempt: FakeAttempt) -> None:
        self.data = b""
        self._log = attempt.log

    def write(self, data: bytes, /) -> object:
        self.data += data
        return self._log.write(data)
