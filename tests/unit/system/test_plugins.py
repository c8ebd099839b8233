"""Entry points of other packages: they are read once for a path, and again when that has changed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from allranks.system import plugins


def test_a_package_that_is_added_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plugins.points("allranks.of_this_test")
    package = tmp_path / "added-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[allranks.of_this_test]\none = json:loads\n")
    monkeypatch.syspath_prepend(tmp_path)
    (point,) = plugins.points("allranks.of_this_test")
    assert (point.name, plugins.load(point, "test")("1")) == ("one", 1)


def test_packages_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reads = list[int]()
    read = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: (reads.append(1), read())[1])
    monkeypatch.syspath_prepend(tmp_path)  # A path that nothing has read yet.
    assert (list(plugins.points("allranks.one")), list(plugins.points("allranks.other"))) == ([], [])
    assert reads == [1]
