"""Where somebody is sent who looks for runs in the wrong directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.runs.record import where_runs_are


def _fix(monkeypatch: pytest.MonkeyPatch, cwd: Path) -> str:
    monkeypatch.chdir(cwd)
    return where_runs_are(cwd / "runs")


def test_runs_above_and_below_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "all" / "my lab"
    for folder in (project / "runs" / "old", project / "src" / "deep" / "down"):
        folder.mkdir(parents=True)
    start = "start one: allranks run train.py"
    assert _fix(monkeypatch, tmp_path / "all") == start  # A directory of runs that holds none is no place to go to.
    (project / "runs" / "old" / "record.json").touch()
    below = "cd 'my lab', where runs are, or --runs-folder 'my lab/runs'"
    assert _fix(monkeypatch, tmp_path / "all") == below
    assert _fix(monkeypatch, tmp_path) == start  # One level below, and two above.
    assert _fix(monkeypatch, project / "src") == "cd .., where runs are, or --runs-folder ../runs"
    assert _fix(monkeypatch, project / "src" / "deep") == "cd ../.., where runs are, or --runs-folder ../../runs"
    assert _fix(monkeypatch, project / "src" / "deep" / "down") == start
