"""The pages make a site, and read as well as plain files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT

from waiting import PATIENCE

DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
CONFIG = ROOT / "zensical.toml"
LINK = re.compile(r"\]\((?!https://|#)([^)\s#]+)")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the pages in a directory, as ``make docs`` does."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages, so that nothing is built in the checkout."""
    if not find_spec("zensical"):
        pytest.skip("zensical is not installed: pip install -c constraints.txt -e '.[docs]'")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CONFIG, tmp_path)
    return tmp_path


def test_the_site_is_built_without_warnings(copy: Path):
    """It takes more than 10 s on a slow machine: it builds the whole site."""
    done = build(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in DOCS}
    built = {path.parent.relative_to(copy / "site") for path in (copy / "site").rglob("index.html")}
    assert built == {Path() if page.name == "index" else page for page in pages}
    assert not list((copy / "site").rglob("*.py"))
    api = (copy / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="contextloader"' in api
    assert 'href="#contextloader"' in api


def test_a_link_to_a_heading_that_is_not_there_fails_the_build(copy: Path):
    """It takes more than 10 s on a slow machine: it builds the whole site."""
    with (copy / "docs" / "tutorial.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](reference/api.md#no-such-heading)\n")
    done = build(copy)
    assert done.returncode != 0
    assert "anchor does not exist" in done.stdout + done.stderr


def test_the_navigation_has_each_page_once():
    named = re.findall(r'"([\w/-]+\.md)"', CONFIG.read_text(encoding="utf-8"))
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_right_in_the_site_and_as_a_file(page: Path):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        assert (page.parent / link).resolve().is_relative_to(ROOT / "docs"), "the site has only docs/"
    # GitHub takes what is indented by three spaces for a part of a numbered list, the site only by four.
    assert not re.search(r"^ {1,3}```", text, re.MULTILINE)
