"""Runs on a cluster ``lab`` that commands follow, several at once: their jobs, their ends, and their ranks."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

from cluster_tools import wait_until
from pbs_cluster import PbsCluster

from waiting import PATIENCE


@dataclass
class Followed:
    """A run on ``lab`` that ``allranks run`` has submitted and follows.

    Attributes:
        lab: the command, in a directory that knows the cluster.
        name: of the run.
        process: the command that follows it.
        rc: what that ended with, after ``end``; stdout and stderr are what it had said.
    """

    lab: Any
    name: str
    process: Popen[bytes]
    rc: int | None = None
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)

    @property
    def folder(self) -> Path:
        """Of the run."""
        return run_named(self.lab, self.name)

    @property
    def job(self) -> str:
        """The id of its job."""
        return str(self.lab.record(self.folder)["handle"]["job_id"])

    @property
    def state(self) -> str:
        """Its state, as the record has it."""
        return str(self.lab.record(self.folder)["status"]["state"])

    def end(self, seconds: float = PATIENCE) -> Followed:
        """Wait for the end of the command."""
        out, err = self.process.communicate(timeout=seconds)
        self.rc, self.stdout, self.stderr = self.process.returncode, out.decode(), err.decode()
        return self

    def wait_for_job(self) -> str:
        """Wait until the run is submitted, and return the id of its job."""

        def is_submitted() -> bool:
            records = [json.loads(path.read_text()) for path in self.lab.folder.glob(f"runs/{self.name}-*/record.json")]
            return any(record["handle"]["job_id"] for record in records)

        wait_until(f"{self.name} to be submitted", is_submitted)
        return self.job

    def wait_for_ranks(self, count: int = 1, line: str = "up\n") -> Followed:
        """Wait until so many ranks have written nothing but a line."""

        def are_up() -> bool:
            logs = self.lab.folder.glob(f"runs/{self.name}-*/attempts/*/node-*/rank-*.out")
            return sum(log.read_text() == line for log in logs) == count

        wait_until(f"{count} ranks of {self.name}", are_up)
        # Ranks may be up before the command has recorded what it started.
        wait_until(f"the handle of {self.name}", lambda: any(self.lab.record(self.folder)["handle"].values()))
        return self


def follow(lab: Any, name: str, script: str | Path, *words: object, **env: str | None) -> Followed:
    """Submit a run of this name on ``lab``, and follow it."""
    return Followed(lab, name, lab.popen("run", script, "--on", "lab", "--name", name, *map(str, words), **env))


def run_named(lab: Any, name: str) -> Path:
    """Return the directory of the only run whose name starts so."""
    (folder,) = (run for run in lab.runs() if run.name.startswith(f"{name}-"))
    return Path(folder)


def hosts_of(pbs: PbsCluster, job: str) -> list[str]:
    """Return the different hosts that PBS gave a job, in its order."""
    found = pbs.job(job)["exec_host"].split("+")
    return list(dict.fromkeys(part.partition("/")[0] for part in found))


def given_to(run: Followed) -> list[list[Any]]:
    """Return what the ranks of a run have written, in lines ``given [...]``, of what they were given."""
    logs = run.lab.folder.glob(f"runs/{run.name}-*/attempts/000/node-*/rank-*.out")
    found = "".join(log.read_text() for log in logs)
    return [json.loads(line) for line in re.findall(r"^given (\[.*\])$", found, re.MULTILINE)]


def files_with(folder: Path, text: bytes) -> list[tuple[Path, int]]:
    """Return the files below a directory that have this text in them, with their modes; what goes meanwhile is gone."""
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):
            if text in path.read_bytes():
                found.append((path, path.stat().st_mode & 0o777))
    return found
