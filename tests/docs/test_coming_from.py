"""What the pages *coming from …* show is what the commands do with the old files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT

PAGES = ROOT / "docs" / "coming-from"
KITS = [
    (path, *match.groups())
    for path in sorted(PAGES.glob("*.md"))
    for match in re.finditer(r"from old/([\w-]+): ([\w. -]+) -->(.*?)<!-- end", path.read_text("utf-8"), re.DOTALL)
]


def test_each_directory_of_old_files_is_on_a_page():
    assert sorted(kit for _, kit, _, _ in KITS) == sorted(path.name for path in (PAGES / "old").iterdir())


@pytest.mark.parametrize(("page", "kit", "scripts", "text"), KITS, ids=[kit for _, kit, _, _ in KITS])
def test_the_commands_do_what_the_page_shows(page: Path, kit: str, scripts: str, text: str, allranks: Any):
    project = allranks.folder / "project"
    shutil.copytree(PAGES / "old" / kit, project)
    (project / "train.py").touch()
    done = allranks("convert", *scripts.split(), "-o", ".", cwd=project, HOME=str(allranks.folder))
    assert (done.rc, "does not work yet" in done.stderr) == (0, False)
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert [(project / "job.yaml").read_text(encoding="utf-8")] == shown
    assert (project / "clusters.yaml").exists() == ("clusters.yaml" in text)
    found = allranks("lint", *scripts.split(), cwd=project).stdout
    places = re.findall(r"^(\S+:\d+):\d+: (AR\d+) (\w+):", found, re.MULTILINE)
    assert re.findall(r"^\| `([^`]*)` \| \[(AR\d+)\]\S* (\w+) \|", text, re.MULTILINE) == places
