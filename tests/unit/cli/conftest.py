"""One finished run that tests only read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Rank 1 fails when rank 0 has said its line.
SCRIPT = """\
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


@pytest.fixture(scope="session")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the directory of a run of two ranks that has failed; tests do not change it."""
    folder = tmp_path_factory.mktemp("a failed run")
    (folder / "train.py").write_text(SCRIPT)
    keep = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    command = [sys.executable, "-m", "allranks", "run", "train.py", "--name", "demo", "--nproc-per-node", "2"]
    done = subprocess.run(command, cwd=folder, env={**env, "HOME": str(folder)}, capture_output=True, check=False)
    assert done.returncode == 3, done.stderr.decode()
    (run,) = (path for path in (folder / "runs").iterdir() if path.name != "latest")
    assert json.loads((run / "record.json").read_text())["status"]["state"] == "FAILED"
    return run
