"""``allranks convert``: what scripts of all kinds become, and what it says of them.

``golden.txt`` has the answers; ``make golden`` writes them again: read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.cli import convert

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.txt"
SCRIPTS = sorted(path.name for path in (HERE / "scripts").iterdir())
#: What the scripts name, so that their jobs can be planned.
FILES = ("train.py", "fit.py", "finetune.py", "pretrain.py")
_TITLE = "== "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with what the scripts name, in which the commands are typed."""
    for name in FILES:
        (tmp_path / name).touch()
    (tmp_path / "hosts.txt").write_text("gpu1\ngpu2\ngpu3\ngpu4\n")
    for name in SCRIPTS:
        (tmp_path / name).write_bytes((HERE / "scripts" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def typed(*words: str) -> int:
    """Type the command, and return its exit code."""
    code = convert.command.main([*words], standalone_mode=False)
    assert isinstance(code, int)
    return code


def blocks() -> dict[str, str]:
    parts = GOLDEN.read_text().split(_TITLE)[1:] if GOLDEN.exists() else []
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code = typed(name)
    said = capsys.readouterr()
    text = f"{said.out}exit {code}\n{said.err}\n".replace(str(folder), "$PWD")
    if os.environ.get("ALLRANKS_UPDATE_GOLDEN"):
        found = blocks() | {name: text}
        GOLDEN.write_text("".join(f"{_TITLE}{title}\n{found[title]}" for title in sorted(found) if title in SCRIPTS))
    assert text == blocks()[name]
