"""Runs that are hurt on purpose: wait for what they tell, hurt them, and see that nothing of them is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from allranks.system.processes import marked
from waiting import PATIENCE, is_alive, wait_for

CGROUPS = Path("/sys/fs/cgroup")

#: What an import of torch can wait for, as ``extra`` of :func:`count_imports`: a fifo that only a test opens.
GATE = "            open('gate').close()\n"


def count_imports(allranks: Any, extra: str = "") -> tuple[Path, dict[str, str]]:
    """Let every interpreter note its process id when it imports torch; return the file, and the environment.

    ``extra`` is run then too, in lines that are indented by twelve spaces.
    """
    site = allranks.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        # Not where somebody only asks whether it is there, as a check before the run does.
        "        importing = sys._getframe(2).f_code.co_name == '_find_and_load_unlocked'\n"
        "        if name == 'torch' and importing:\n"
        "            open(os.environ['IMPORTS'], 'a').write(f'{os.getpid()}\\n')\n" + extra + "        return None\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    return allranks.folder / "imports", {"PYTHONPATH": str(site), "IMPORTS": str(allranks.folder / "imports")}


@dataclass
class Watch:
    """Looks at the only run of a directory while it continues."""

    allranks: Any
    others: list[int] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run's directory, as soon as there is one with an agent."""
        folders = self.allranks.runs
        return wait_for("a run", lambda: folders() and (folders()[0] / "record.json").exists() and folders()[0])

    @property
    def node(self) -> Path:
        return self.run / "attempts" / "000" / "node-000"

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events told so far, all or of one kind."""
        path = self.node / "agent.jsonl"
        text = path.read_text() if path.exists() else ""
        told = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in told if kind in (None, event["kind"])]

    def event(self, kind: str, number: int = 1) -> dict[str, Any]:
        """Wait for an event of a kind, or for so many of them, and return the last."""
        return wait_for(f"event {kind}", lambda: len(self.events(kind)) >= number and self.events(kind)[number - 1])

    def line(self, rank: int, text: str, stream: str = "out") -> str:
        """Wait until a rank has written a line that starts with ``text``; return the rest of it."""
        path = self.node / f"rank-{rank}.{stream}"

        def look() -> str | None:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            found = [line for line in lines if line.startswith(text) and line.endswith("\n")]
            return found[0] if found else None

        try:
            return wait_for(f"rank {rank} to say {text!r}", look)[len(text) :].strip()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.found()}") from None

    def found(self) -> str:
        """Return what the run's processes have written, and in which system call each of them is."""
        files = [self.run / "record.json", *sorted(path for path in self.node.iterdir() if path.is_file())]
        texts = [f"{path.name}: {path.read_text()}" for path in files]
        for pid in marked("ALLRANKS_RUN_DIR", str(self.run)):
            for name in ("cmdline", "stat", "wchan", "syscall"):
                with suppress(OSError):
                    texts.append(f"{pid} {name}: {Path(f'/proc/{pid}/{name}').read_text()}")
        return "\n".join(texts)

    def pid_file(self, name: str) -> int:
        """Wait for a file that a process wrote its id into."""
        path = self.allranks.folder / name
        pid = int(wait_for(name, lambda: path.exists() and path.read_text().endswith("\n") and path.read_text()))
        self.others.append(pid)
        return pid

    def agent(self) -> int:
        """Return the agent's process id as soon as the record has it."""
        return int(wait_for("the agent", lambda: self.allranks.record(self.run)["handle"]["pid"]))

    def fork_server(self) -> int:
        """Return the process id of the fork server: the parent of the ranks."""
        rank = self.event("ranks-started")["ranks"][0]["pid"]
        return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])

    def exits(self) -> list[tuple[int, int]]:
        """Return rank and code of all ranks that have ended, as they ended."""
        return [(event["rank"], event["code"]) for event in self.events("rank-exited")]

    def no_rank_left(self) -> None:
        """Fail if a rank of the run is alive now."""
        ranks = [rank["pid"] for event in self.events("ranks-started") for rank in event["ranks"]]
        assert [pid for pid in ranks if is_alive(pid)] == []

    def nothing_left(self) -> None:
        """Wait until no process of the run is left; what nobody ends sleeps longer than this waits."""
        run = str(self.run)
        wait_for("nothing left", lambda: not marked("ALLRANKS_RUN_DIR", run))
        wait_for("nothing left", lambda: not any(map(is_alive, self.others)))

    def status(self) -> dict[str, Any]:
        """Return what `allranks status` tells, as it is in the record then."""
        assert self.allranks("status").rc in (0, 1)
        told: dict[str, Any] = self.allranks.record(self.run)["status"]
        return told


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Give a control group whose processes may have so many bytes of memory; skip where none can be made."""
    v1 = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if v1 else CGROUPS) / f"allranks-{os.getpid()}"
    name = "memory.limit_in_bytes" if v1 else "memory.max"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this user may make no control groups here")
    try:
        if not (folder / name).exists():
            pytest.skip("there is no limit of memory in control groups here")
        (folder / name).write_text(str(limit))
        yield folder
    finally:
        wait_for(f"{folder} to be empty", lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def run_in_group(allranks: Any, group: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``allranks`` to its end, with all that it starts in a control group."""
    command = ["sh", "-ec", 'echo $$ >"$0"/cgroup.procs; exec "$@"', group, sys.executable, "-m", "allranks", *words]
    return subprocess.run(
        command, cwd=allranks.folder, env=allranks.env, text=True, capture_output=True, timeout=PATIENCE, check=False
    )
