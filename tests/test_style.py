"""Style, types and layers, as ``make lint`` checks them, beside the other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SHELL = sorted(path.relative_to(ROOT) for path in (ROOT / "src").rglob("*.sh"))
COMMANDS = {
    "types": ["mypy"],
    "layers": ["lint-imports"],
    "style": ["ruff", "check", "--no-cache"],
    "format": ["ruff", "format", "--check", "--no-cache"],
    "shell": ["shellcheck", "--severity=style", "--exclude=SC1090,SC1091", *map(str, SHELL)],
}


@pytest.mark.parametrize("what", COMMANDS)
def test_nothing_is_to_be_mended(what: str) -> None:
    """The types take more than 10 s: mypy reads all of src, and pydantic."""
    name, *options = COMMANDS[what]
    done = subprocess.run([BIN / name, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
