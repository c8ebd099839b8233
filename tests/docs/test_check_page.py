"""What the page about checks shows for a site's own ones works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks

PAGE = ROOT / "docs/how-to/check.md"


def shown(language: str, beginning: str) -> str:
    (text,) = [each.text for each in blocks(language) if each.page == PAGE and each.text.startswith(beginning)]
    return text


@pytest.mark.parametrize("name", ["swap", "scratch"])
def test_a_check_that_the_page_shows_is_run(allranks: Any, tmp_path: Path, name: str) -> None:
    program = allranks.folder / "checks" / "scratch"
    program.parent.mkdir()
    program.write_text(shown("sh", "#!/bin/sh"))
    program.chmod(0o755)
    allranks.job("binary: 'true'\nchecks: {folder: checks}\n")
    (tmp_path / "lab_checks.py").write_text(shown("python", "# lab_checks.py"))
    package = tmp_path / "lab_checks-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-checks\nVersion: 1.0\n")
    (points,) = [each.text for each in blocks("toml") if each.page == PAGE]
    heading, _, lines = points.partition("\n")
    assert heading == '[project.entry-points."allranks.checks"]'
    (package / "entry_points.txt").write_text(f"[allranks.checks]\n{lines.replace(chr(34), '')}")
    result = allranks("check", "--json", "--only", name, SCRATCH="/", PYTHONPATH=str(tmp_path))
    (found,) = json.loads(result.stdout)["checks"]
    assert found["check"] == name
    assert found["what"].endswith({"swap": "% free", "scratch": "% full"}[name])
