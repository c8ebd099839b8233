"""Variants are compared as strictly as complete files: every line counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import Golden, StaleVariantError, difference, patched

BASE = "#!/bin/sh\n\nset -e\ncd /project\n\nexec python\n"
TEXTS = [
    BASE,
    "",
    "set -e",
    BASE.removesuffix("\n"),
    BASE + "\n",
    "\n" + BASE,
    BASE.replace("\n\n", "\n+ -\n@@ line 1\n"),
    BASE.replace("set -e\n", ""),
    BASE.replace("python", "python\rtrain.py\f"),
    "\n".join(reversed(BASE.split("\n"))),
]


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Return a directory with one complete file, ``base.sh``, and three variants."""
    folder = tmp_path / "kind"
    folder.mkdir()
    (folder / "base.sh").write_text("")
    golden = Golden(folder)
    monkeypatch.delenv("ALLRANKS_UPDATE_GOLDEN", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("ALLRANKS_UPDATE_GOLDEN", "1")
        golden.compare("same.sh", BASE)
        golden.compare("base.sh", BASE)
        golden.compare("loud.sh", BASE.replace("-e", "-ex"))
        golden.compare("one.line", "python\n")
    return golden


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("base", TEXTS)
def test_a_base_and_a_difference_are_the_whole_text(base: str, text: str):
    assert patched(base, difference(base, text)) == text


def test_variants_hold_only_what_differs(golden: Golden, tmp_path: Path):
    assert (tmp_path / "kind.variants").read_text() == (
        "=== loud.sh differs from base.sh\n@@ line 3\n-set -e\n+set -ex\n"
        "=== one.line\n@@ line 1\n+python\n"
        "=== same.sh differs from base.sh\n"
    )
    assert golden.names() == ["base.sh", "loud.sh", "one.line", "same.sh"]
    assert golden.names(".sh") == ["base.sh", "loud.sh", "same.sh"]
    assert golden.read("loud.sh") == BASE.replace("-e", "-ex")


@pytest.mark.parametrize("line", range(BASE.count("\n") + 1))
@pytest.mark.parametrize("name", ["base.sh", "same.sh", "loud.sh"])
def test_each_line_of_a_variant_counts(golden: Golden, name: str, line: int):
    lines = golden.read(name).split("\n")
    golden.compare(name, "\n".join(lines))
    was = lines[line]
    lines[line] += " "
    with pytest.raises(AssertionError) as caught:
        golden.compare(name, "\n".join(lines))
    assert str(caught.value) == f"{name} differs:\n@@ line {line + 1}\n-{was}\n+{was} "


def test_a_variant_is_stale_where_its_base_lost_the_line(golden: Golden, tmp_path: Path):
    (tmp_path / "kind/base.sh").write_text(BASE.replace("-e", "-u"))
    with pytest.raises(StaleVariantError, match="line 3 of the base is not 'set -e'"):
        golden.read("loud.sh")


def test_a_new_base_leaves_variants_as_they_were(golden: Golden, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ALLRANKS_UPDATE_GOLDEN", "1")
    golden.compare("base.sh", "#!/bin/sh\n")
    assert golden.read("same.sh") == BASE
    assert golden.read("loud.sh") == BASE.replace("-e", "-ex")
