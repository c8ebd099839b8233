"""What all parts of the test clusters use: one error, commands that must succeed, and waiting."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from waiting import PATIENCE

T = TypeVar("T")


class ClusterError(Exception):
    """The cluster cannot be brought up, or a command on it failed."""


def missing_commands(packages: Mapping[str, str]) -> str | None:
    """Say which commands are not here, and what installs them."""
    absent = [command for command in packages if not shutil.which(command)]
    if not absent:
        return None
    wanted = " ".join(dict.fromkeys(packages[command] for command in absent))
    return f"no {', '.join(absent)} here: apt-get install --no-install-recommends {wanted}"


def called(command: Sequence[str | Path], **options: Any) -> str:
    """Run a command to its end and return its stdout; raise with its own words if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ClusterError(f"{' '.join(map(str, command))} ended with {done.returncode}: {said}")
    return str(done.stdout)


def wait_until(what: str, done: Callable[[], T | None], seconds: float = PATIENCE, every: float = 0.05) -> T:
    """Return what ``done`` gives as soon as it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {seconds:g} s for {what}")
        time.sleep(every)
    return found


def passwd_of_root(home: Path) -> str:
    """Return the users of this machine, root with another home, for nodes whose users are none of this machine."""
    of_root = re.compile(r"^(root:(?:[^:\n]*:){4})[^:\n]*", re.MULTILINE)
    return of_root.sub(rf"\g<1>{home}", Path("/etc/passwd").read_text())
