"""The command as a real process, in directories of the test's own."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest
from hypothesis import settings

from environments import clean_environment
from waiting import PATIENCE
from warm_python import WarmPopen, WarmPython

#: What nohup, or a shell that starts the tests in the background, has had ignored: every child would ignore it too.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)
#: Until tests run: a worker imports torch and reads all tests, and would look for garbage in them again and again.
gc.disable()
settings.register_profile("busy", deadline=None)  # A timing is never a test.
settings.load_profile("busy")
#: Rank 1 fails when rank 0 has said its line.
FAILING_SCRIPT = """\
import os, sys, time
rank = os.environ["RANK"]
print("hello from", rank, flush=True)
if rank == "1":
    while not os.path.exists("said"):
        time.sleep(0.01)
    print("oops", file=sys.stderr)
    sys.exit(3)
open("said", "w").close()
time.sleep(300)
"""
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

    @property
    def message(self) -> dict[str, str]:
        """The slots of the error: ``error`` says what happened, then ``why``, ``fix`` and ``see``."""
        return dict(re.findall(r"^(?:  )?(error|why|fix|see): (.*)$", self.stderr, re.MULTILINE))

    @property
    def by_rank(self) -> dict[int, list[str]]:
        """What each rank has written to stdout: whether equal lines are folded depends on when they were written."""
        lines: dict[int, list[str]] = {}
        for first, last, text in re.findall(r"^\[(\d+)(?:-(\d+))?\] (.*)$", self.stdout, re.MULTILINE):
            for rank in range(int(first), int(last or first) + 1):
                lines.setdefault(rank, []).append(text)
        return lines


@dataclass
class Allranks:
    """Runs ``python -m allranks`` in a directory, as a process.

    Attributes:
        folder: where it runs unless a call says ``cwd``; its ``runs`` directory is there.
        env: its environment; a call's keyword arguments in capitals are added, None removes.
        warm: starts the command without its imports.
        ranks: starts ranks without their imports, and without the command.
        checks: whether ``run`` does its preflight checks, which start an interpreter; see the fixture ``checked``.
    """

    folder: Path
    env: dict[str, str]
    warm: WarmPython
    ranks: WarmPython
    checks: bool = False
    _started: list[subprocess.Popen[bytes] | WarmPopen] = field(default_factory=list)

    def __call__(
        self, *args: str | Path, cwd: Path | None = None, timeout: float = PATIENCE, **env: str | None
    ) -> Result:
        """Run to the end and return code, stdout and stderr."""
        wanted = self._environment(env)
        if self.warm.can_run(wanted):
            warm = self.warm.start("module", "allranks", self._words(args), cwd or self.folder, wanted)
            with closing(warm):
                return Result(*warm.finish(timeout))
        process = self.popen(*args, cwd=cwd, **env)
        out, err = process.communicate(timeout=timeout)
        return Result(process.returncode, out, err)

    def popen(
        self, *args: str | Path, cwd: Path | None = None, fresh: bool = False, **env: str | None
    ) -> subprocess.Popen[bytes] | WarmPopen:
        """Start it, and return the process with pipes at stdout and stderr, in a session of its own.

        ``fresh``: in a new interpreter, so that it takes the time to import what it needs.
        """
        wanted = self._environment(env)
        process: subprocess.Popen[bytes] | WarmPopen
        if not fresh and self.warm.can_run(wanted):
            process = self.warm.popen("module", "allranks", self._words(args), cwd or self.folder, wanted)
        else:
            process = self._new(self._words(args), cwd or self.folder, wanted)
        self._started.append(process)
        return process

    @staticmethod
    def _new(words: list[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "allranks", *words],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _environment(self, changes: dict[str, str | None]) -> dict[str, str]:
        changed = {**self.env, **changes}
        return {name: value for name, value in changed.items() if value is not None}

    def _words(self, args: tuple[str | Path, ...]) -> list[str]:
        words = [str(word) for word in args]
        if words[:1] == ["run"] and not self.checks and not {"--check", "--no-check"} & {*words}:
            words.insert(1, "--no-check")
        return words

    def script(self, text: str | bytes, name: str = "train.py") -> Path:
        """Write a script into the directory."""
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def job(self, text: str, name: str = "job.yaml") -> Path:
        """Write a job file into the directory."""
        return self.script(text, name)

    def runs(self) -> list[Path]:
        """Return the directories of all runs here, the oldest first."""
        folder = self.folder / "runs"
        # Those with a dot come and go: a link that is gone when it is looked at does not look like one.
        return sorted(path for path in folder.glob("[!.]*") if not path.is_symlink()) if folder.is_dir() else []

    def run(self) -> Path:
        """Return the directory of the only run here."""
        (folder,) = self.runs()
        return folder

    def record(self, run: Path | None = None) -> dict[str, Any]:
        """Return the record of a run, of the only one here by default."""
        found: dict[str, Any] = json.loads(((run or self.run()) / "record.json").read_text())
        return found

    def close(self) -> None:
        """Kill what is left of the commands, and of every run in the test's directory, until nothing is."""
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream:
                    stream.close()
        deadline = time.monotonic() + PATIENCE
        while left := processes_of_runs_in(self.folder.parent):
            assert time.monotonic() < deadline, f"processes of runs do not end: {left}"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def processes_of_runs_in(folder: Path) -> list[int]:
    """Return the living processes of all runs below a directory; each run marks its own in their environment."""
    found, needle = [], b"\0ALLRANKS_RUN_DIR=" + os.fsencode(folder.resolve()) + b"/"
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It ended while we looked; that of a zombie is empty.
            if needle in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture
def allranks_env(tmp_path: Path) -> dict[str, str]:
    """Give an environment that knows nothing of launchers, with a home of its own and short waits."""
    home = tmp_path / "home"
    home.mkdir()
    return clean_environment(home)


@pytest.fixture(scope="session")
def warm_command() -> Iterator[WarmPython]:
    """Give what starts the command from an interpreter that has imported all of it, and no torch."""
    modules = _modules("checks", "cli", "clusters", "job", "launch", "logs", "plan", "record", "runs", "system")
    with closing(WarmPython(modules, clean_environment(Path.home()))) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmPython]:
    """Give what starts scripts from an interpreter that has imported torch and the runtime; one thread for OpenMP."""
    with closing(WarmPython(*for_ranks())) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_lightning() -> Iterator[WarmPython]:
    """Give the same, where Lightning is imported too."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    modules, environment = for_ranks()
    with closing(WarmPython([*modules, "lightning.pytorch"], environment)) as warm:
        yield warm


def for_ranks() -> tuple[list[str], dict[str, str]]:
    """Return what a rank imports, and an environment for ranks."""
    # Optimizers and FSDP import the latter two when they are first used, which takes as long as torch itself.
    modules = ["torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", *_modules("runtime")]
    return modules, {**clean_environment(Path.home()), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def run_python(warm_ranks: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Give a function that runs a script, with torch at hand: its text, its arguments, environment and directory."""

    def run(script: str, *args: object, env: dict[str, str], cwd: Path | None = None) -> Result:
        path = tmp_path_factory.mktemp("script") / "script.py"
        path.write_text(script)
        assert warm_ranks.can_run(env)
        with closing(warm_ranks.start("script", str(path), [*map(str, args)], cwd or Path.cwd(), env)) as process:
            return Result(*process.finish(PATIENCE))

    return run


def _modules(*packages: str) -> list[str]:
    """Return the names of all modules in packages of ours."""
    paths = [(import_module(f"allranks.{name}").__path__, f"allranks.{name}.") for name in packages]
    return [module.name for path, prefix in paths for module in walk_packages(path, prefix)]


@pytest.fixture
def allranks(
    tmp_path: Path, allranks_env: dict[str, str], warm_command: WarmPython, warm_ranks: WarmPython
) -> Iterator[Allranks]:
    """Give the command, in an empty directory ``work``; after the test none of its processes may be left."""
    folder = tmp_path / "work"
    folder.mkdir()
    command = Allranks(folder, allranks_env, warm_command, warm_ranks)
    yield command
    command.close()


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the directory of a run of two ranks that has failed; tests do not change it."""
    folder = tmp_path_factory.mktemp("a failed run")
    (folder / "train.py").write_text(FAILING_SCRIPT)
    keep = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    command = [sys.executable, "-m", "allranks", "run", "train.py", "--name", "demo", "--nproc-per-node", "2"]
    done = subprocess.run(command, cwd=folder, env={**env, "HOME": str(folder)}, capture_output=True, check=False)
    assert done.returncode == 3, done.stderr.decode()
    (run,) = (path for path in (folder / "runs").iterdir() if path.name != "latest")
    assert json.loads((run / "record.json").read_text())["status"]["state"] == "FAILED"
    return run


@pytest.fixture
def checked(allranks: Allranks) -> None:
    """Have ``run`` do its preflight checks."""
    allranks.checks = True


@pytest.fixture
def weird_tmp_path(tmp_path: Path) -> Path:
    """Give a directory whose name holds what shells and parsers stumble over."""
    folder = tmp_path / WEIRD_NAME
    folder.mkdir()
    return folder


def processes_of(run: str | Path) -> dict[int, str]:
    """Return the living processes of a run, by its directory or its id: process id to command line.

    The directory stands in the environment of each. An id alone may also be that of a run elsewhere.
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
    """Give a function that fails while a process of a run, named by directory or id, is alive after ``seconds``."""

    def check(run: str | Path, seconds: float = 0.0) -> None:
        deadline = time.monotonic() + seconds
        while (left := processes_of(run)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"processes of {run} are left: {left}"

    return check


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Keep the tests themselves from the garbage collector, which works from now on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show where the time went: seconds and tests by directory, the slowest tests, and those that do not say why."""
    seconds, own = Counter[str](), Counter[str]()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
            own[report.nodeid] += report.duration if report.when == "call" else 0  # Others share its fixtures.
    if not seconds:
        return
    folders: dict[str, list[float]] = {}
    for name, spent in seconds.items():
        folders.setdefault(name.partition("::")[0].rpartition("/")[0], []).append(spent)
    terminalreporter.section("seconds by directory, tests, directory")
    for folder, each in sorted(folders.items(), key=lambda item: -sum(item[1])):
        terminalreporter.line(f"{sum(each):8.1f} {len(each):5} {folder}")
    terminalreporter.section("the slowest tests, in seconds")
    for name, spent in seconds.most_common(15):
        terminalreporter.line(f"{spent:8.1f} {name[:140]}")
    root = terminalreporter.config.rootpath
    silent = [(name, spent) for name, spent in own.most_common() if spent > 10 and not _says_why(root, name)]
    if silent:
        terminalreporter.section(f"over 10 s, and the docstring does not say why: {len(silent)}")
    for name, spent in silent[:15]:
        terminalreporter.line(f"{spent:8.1f} {name[:140]}")


def _says_why(root: Path, name: str) -> bool:
    """Return whether the docstring of a test says why it takes more than 10 s; workers of xdist have it, not we."""
    path, _, function = name.partition("[")[0].partition("@")[0].partition("::")
    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function.rpartition("::")[2]:
            return "10 s" in (ast.get_docstring(node) or "")
    return True  # It is no function: hypothesis or a plug-in made it.
