"""The directory in which the tests of ``allranks convert --verify`` type."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which the commands are typed, with what the scripts name."""
    home = tmp_path / "home"
    work = home / "work"
    for each in (work, work / "project", work / "sub"):
        each.mkdir(parents=True)
        (each / "train.py").touch()
        (each / "prepare.py").touch()
    (home / "train.py").touch()
    (work / "hosts.txt").write_text("gpu1\ngpu2\n")
    (work / "slots.txt").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for name in [each for each in os.environ if each.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return work
