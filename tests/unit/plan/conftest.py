"""Plans in memory, and scripts that show what they would have given the agent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE

#: Stands where a container's command would: shows what the agent's command would get.
SHOW = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], open({out!r}, 'w'))"


@pytest.fixture
def executed(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, str], str]]:
    """Give a function that runs a node script with bash: words of the agent, its environment and its directory."""

    def run(
        make: Callable[[tuple[str, ...]], str], environ: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str], str]:
        out, script = tmp_path / "shown.json", tmp_path / "node.sh"
        script.write_text(make((sys.executable, "-c", SHOW.format(out=str(out)))), encoding="utf-8")
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **(environ or {})}
        done = subprocess.run(
            ["bash", str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        shown: Any = json.loads(out.read_text(encoding="utf-8"))
        return shown[0], shown[1], shown[2]

    return run
