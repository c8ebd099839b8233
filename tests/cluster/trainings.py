"""The training of ``exact_light.py`` as a job of a scheduler, for tests that take it off its nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_tools import ClusterError

import exact_runs
from allranks import contract
from exact_runs import SCRIPT
from waiting import PATIENCE

#: 240 steps.
OPTIONS = ("--epochs", "30", "--size", "96", "--every", "3", "--quiet")


def undisturbed(lab: Any, *options: str) -> tuple[int, str]:
    """Return what such a training on two ranks ends with that nothing happens to."""
    return exact_runs.undisturbed(lab, *options)


@dataclass
class Training:
    """A training with a rank on each of its nodes, slow until it is let go.

    Attributes:
        lab: the command, in a directory that knows the cluster.
        cluster: the cluster, or the site that has it: what waits.
        flags: of the run.
        script: the training, or what runs it.
    """

    lab: Any
    cluster: Any
    flags: tuple[str, ...]
    script: Path = SCRIPT

    def __post_init__(self) -> None:
        number = len(self.lab.runs())
        self.lab.env["OMP_NUM_THREADS"] = "1"  # Sums are rounded as their parts are shared by threads.
        self.checkpoints = self.lab.folder / f"checkpoints-{number}"
        flags = ("--on", "lab", "--nproc-per-node", "1", *self.flags)
        options = ("--folder", self.checkpoints.name, "--slow-until", "go", "--pause", "1", *OPTIONS)
        self.process = self.lab.popen("run", self.script, *flags, "--", *options)
        self.run: Path = self.cluster.wait_until("the run", lambda: self.lab.runs()[number:])[0]

    def saves(self, attempt: int = 0) -> None:
        """Wait until an attempt has saved; if it never does, raise with what agents and ranks have written."""
        try:
            self.cluster.wait_until(f"a checkpoint of attempt {attempt}", lambda: attempt in self._saved())
        except ClusterError as error:
            logs = [*self.run.glob("*.out"), *self.run.glob("attempts/*/node-*/agent.*")]
            logs += self.run.glob("attempts/*/node-*/rank-*")
            raise ClusterError("\n".join([str(error), *(f"{log}:\n{log.read_text()}" for log in logs)])) from None

    def trains(self, attempt: int = 0) -> str:
        """Wait until an attempt has saved; return its job."""
        self.saves(attempt)
        return self.job(attempt)

    def resume(self) -> None:
        """Have another attempt follow the last one, as a person does."""
        self.process = self.lab.popen("resume", self.run.name)

    def end(self) -> str:
        """Let it continue at full speed; return what it printed once it has succeeded, and check ``said``."""
        (self.lab.folder / "go").touch()
        out, err = self.process.communicate(timeout=2 * PATIENCE)  # Of several attempts, it may be.
        self.said = err.decode().splitlines()
        assert self.process.returncode == 0, err.decode()
        assert self.state == "SUCCEEDED"
        return str(out.decode())

    @property
    def state(self) -> str:
        """Its state, as the record has it."""
        return str(self.lab.record(self.run)["status"]["state"])

    @property
    def attempts(self) -> int:
        """How many there were."""
        return len(list((self.run / contract.ATTEMPTS_DIR).iterdir()))

    def job(self, attempt: int) -> str:
        """Return the job that an attempt was."""
        return (self.run / contract.attempt_dir(attempt) / contract.JOB).read_text().strip()

    def decision(self, attempt: int) -> dict[str, Any]:
        """Return what was decided at the end of an attempt."""
        found: dict[str, Any] = json.loads((self.run / contract.attempt_dir(attempt) / contract.AGAIN).read_text())
        return found

    def notes(self) -> list[dict[str, Any]]:
        """Return what was noted of its checkpoints."""
        try:
            lines = (self.run / contract.CHECKPOINTS_FILE).read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _saved(self) -> set[int]:
        return {note["attempt"] for note in self.notes() if note["path"]}


def both(lab: Any, cluster: Any, *flags: str) -> list[Training]:
    """Train with both launchers at once, on two nodes each."""
    return [Training(lab, cluster, ("--nodes", "2", "--launcher", name, *flags)) for name in ("torchrun", "direct")]


def assert_it_went_on_where_it_left(training: Training) -> None:
    """The second attempt has started with the checkpoint that the first one has saved as it left."""
    notes = training.notes()
    left = next(note["step"] for note in notes if note["leaving"])
    assert 0 < left == next(note["step"] for note in notes if note["attempt"] == 1)
