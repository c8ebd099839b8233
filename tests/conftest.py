"""The command as a real process, in folders of the test's own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from allranks import contract

#: What a calling shell, a launcher or a scheduler may have set and a test must not inherit.
FOREIGN = re.compile(
    r"""(ALLRANKS_|_ALLRANKS|TORCHELASTIC_|TORCH_|PET_|NCCL_|GLOO_|SLURM_|PBS_|OMPI_|PMI|MASTER_|GROUP_|ROLE_|LOCAL_)
    |(RANK|WORLD_SIZE|NPROC_PER_NODE|BACKEND|LOG_LEVEL|CONDA_ENV|CUDA_VISIBLE_DEVICES|NO_COLOR|FORCE_COLOR
      |OMP_NUM_THREADS|PYTHONPATH|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE|PYTHONSAFEPATH|COVERAGE_PROCESS_\w+)$""",
    re.VERBOSE,
)
#: What nohup, or a shell that starts the tests in the background, has had ignored: every child would ignore it too.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
WEIRD_NAME = "a b 'c' \"d\" $HOME\n; touch pwned"


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    rc: int
    out: bytes
    err: bytes

    @property
    def stdout(self) -> str:
        return self.out.decode(errors="backslashreplace")

    @property
    def stderr(self) -> str:
        return self.err.decode(errors="backslashreplace")


@dataclass
class Allranks:
    """Runs ``python -m allranks`` in a folder, as a process.

    Attributes:
        folder: where it runs unless a call says ``cwd``; its ``runs`` folder is there.
        env: its environment; a call's keyword arguments in capitals are added, None removes.
    """

    folder: Path
    env: dict[str, str]
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, *args: str | Path, cwd: Path | None = None, timeout: float = 90, **env: str | None) -> Result:
        """Run to the end and return code, stdout and stderr."""
        process = self.popen(*args, cwd=cwd, **env)
        out, err = process.communicate(timeout=timeout)
        return Result(process.returncode, out, err)

    def popen(self, *args: str | Path, cwd: Path | None = None, **env: str | None) -> subprocess.Popen[bytes]:
        """Start, and return the process with pipes at stdout and stderr; a session of its own."""
        wanted = {**self.env, **{name: value for name, value in env.items() if value is not None}}
        for name in (name for name, value in env.items() if value is None):
            wanted.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "allranks", *map(str, args)],
            cwd=cwd or self.folder,
            env=wanted,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def script(self, text: str | bytes, name: str = "train.py") -> Path:
        """Write a script into the folder."""
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def job(self, text: str, name: str = "job.yaml") -> Path:
        """Write a job file into the folder."""
        return self.script(text, name)

    def runs(self) -> list[Path]:
        """Return the folders of all runs here, the oldest first."""
        folder = self.folder / "runs"
        return sorted(path for path in folder.glob("*") if not path.is_symlink()) if folder.is_dir() else []

    def run(self) -> Path:
        """Return the folder of the only run here."""
        (folder,) = self.runs()
        return folder

    def record(self, run: Path | None = None) -> dict[str, Any]:
        """Return the record of a run, of the only one here by default."""
        found: dict[str, Any] = json.loads(((run or self.run()) / "record.json").read_text())
        return found

    def close(self) -> None:
        """Kill what is left of the commands, and of every run in the test's folder, until nothing is."""
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        deadline = time.monotonic() + 10
        while left := _of_runs_in(self.folder.parent):
            assert time.monotonic() < deadline, f"processes of runs do not end: {left}"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _of_runs_in(folder: Path) -> list[int]:
    """Return the living processes of all runs below a folder; each run marks its own in their environment."""
    found, needle = [], b"\0ALLRANKS_RUN_DIR=" + os.fsencode(folder.resolve()) + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It ended while we looked; that of a zombie is empty.
            if needle in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _clean_environment(home: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return {**env, contract.WAITS: "0.1", "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "dumb"}


@pytest.fixture
def allranks_env(tmp_path: Path) -> dict[str, str]:
    """Give an environment that knows nothing of launchers, with a home of its own and short waits."""
    home = tmp_path / "home"
    home.mkdir()
    return _clean_environment(home)


@pytest.fixture
def allranks(tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[Allranks]:
    """Give the command, in an empty folder ``work``; after the test none of its processes may be left."""
    folder = tmp_path / "work"
    folder.mkdir()
    command = Allranks(folder, allranks_env)
    yield command
    command.close()


@pytest.fixture
def weird_tmp_path(tmp_path: Path) -> Path:
    """Give a folder whose name holds what shells and parsers stumble over."""
    folder = tmp_path / WEIRD_NAME
    folder.mkdir()
    return folder


def processes_of(run: str | Path) -> dict[int, str]:
    """Return the living processes of a run, by its folder or its id: process id to command line.

    The folder stands in the environment of each. An id alone may also be that of a run elsewhere.
    """
    found, needle = {}, f"{run}/".encode() if isinstance(run, Path) else run.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            command = (entry / "cmdline").read_bytes()
            named = needle in (entry / "environ").read_bytes() or needle in command
        except OSError:
            continue  # It ended while we looked.
        if named and state not in (b"Z", b"X") and int(entry.name) != os.getpid():
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.fixture
def assert_nothing_left() -> Callable[..., None]:
    """Give a function that fails while a process of a run, named by folder or id, is alive after ``seconds``."""

    def check(run: str | Path, seconds: float = 0.0) -> None:
        deadline = time.monotonic() + seconds
        while (left := processes_of(run)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"processes of {run} are left: {left}"

    return check
