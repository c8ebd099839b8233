"""A training that is hurt again and again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import PATIENCE, wait_for


class Torment:
    """Sends a signal to a victim that is drawn, at moments that are drawn, so many times in all.

    Args:
        allranks: the command.
        checkpoints: directory that the training saves to.
        number: the signal.
        times: how often.
        victims: of these: ``a rank``, ``all ranks``, ``agent``, ``command``.
        seconds: the longest time from the start of the ranks to the signal, where it does not wait for a save.
        seed: of what is drawn.

    Attributes:
        hit: the victims, in order.
        ends: the last victim and the exit code of each command but the last.
        in_writing: how often a checkpoint was being written just then.
        patience: seconds after which a command has hung.
    """

    patience = PATIENCE

    def __init__(
        self,
        allranks: Any,
        checkpoints: Path,
        number: signal.Signals,
        *,
        times: int,
        victims: Sequence[str],
        seconds: float,
        seed: int,
    ) -> None:
        self.allranks, self.checkpoints, self.random = allranks, checkpoints, random.Random(seed)
        self.number, self.times, self.victims, self.seconds = number, times, victims, seconds
        self.hit: list[str] = []
        self.ends: list[tuple[str, int]] = []
        self.in_writing = 0
        self._seen = self._ranks()

    def run(self, *args: Any) -> str:
        """Run the command again whenever a signal has ended it; return what the last one printed."""
        while True:
            process, before = self.allranks.popen(*args), len(self.hit)
            while len(self.hit) < self.times and self._hit(process):
                pass
            out, err = process.communicate(timeout=self.patience)
            if process.returncode == 0:
                return str(out.decode())
            assert len(self.hit) > before, err.decode()
            self.ends.append((self.hit[-1], process.returncode))
            self.between()

    def between(self) -> None:
        """Do something more to the training before the command is run again: nothing here."""

    def _hit(self, process: Any) -> bool:
        """Send the signal to something of a whole generation; tell whether the command still runs."""
        wait_for("ranks", lambda: self._ranks() not in ([], self._seen) or process.poll() is not None)
        if process.poll() is not None:
            return False
        self._seen = ranks = self._ranks()
        self._wait(process)
        victim = self.random.choice(self.victims)
        for pid in self._processes(victim, ranks, process):
            with suppress(ProcessLookupError):
                os.kill(pid, self.number)
        self.hit.append(victim)
        if victim in ("agent", "command"):
            process.wait(timeout=PATIENCE)
        return process.poll() is None

    def _wait(self, process: Any) -> None:
        """Wait for a moment while the ranks start, one in a save, or one in the steps after it."""
        moment = self.random.choice(["start", "start", "save", "steps"])
        if moment != "start":
            wait_for("a checkpoint in writing", lambda: self._is_writing() or process.poll() is not None)
        if moment == "save":
            self.in_writing += self._is_writing()
        else:
            time.sleep(self.random.uniform(0.0, self.seconds if moment == "start" else 0.3))  # To be at any moment.

    def _processes(self, victim: str, ranks: list[int], process: Any) -> list[int]:
        agent = self.allranks.record(self._run())["handle"]["pid"]
        ids = {"all ranks": ranks, "agent": [agent], "command": [process.pid]}
        return ids[victim] if victim in ids else [self.random.choice(ranks)]

    def _run(self) -> Path:
        return Path(self.allranks.folder, "runs", "latest").resolve()

    def _is_writing(self) -> bool:
        with suppress(FileNotFoundError):
            return any(".tmp" in path.name for path in self.checkpoints.iterdir())
        return False

    def _ranks(self) -> list[int]:
        """Return the process ids of the newest generation of the newest run."""
        path = self._run() / "attempts" / "000" / "node-000" / "agent.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        started = [line for line in lines if '"ranks-started"' in line and line.endswith("\n")]
        return [rank["pid"] for rank in json.loads(started[-1])["ranks"]] if started else []
