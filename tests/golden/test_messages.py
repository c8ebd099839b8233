"""Every block of ``messages.txt`` is typed, and answered as it says; nothing is left behind where nothing was started.

``make golden`` writes the answers again: read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from golden_messages import FILE, Block, Step, read_blocks, replace_block

BLOCKS = read_blocks(FILE.read_text())[1]
#: A message: notes, then what happened, why, what to do and where to look. Several mistakes each have these.
MESSAGE = re.compile(r"((allranks:|\[0\]) .+\n)*((error: .+\n)(\S.+\n)*(  why: .+\n)?(  fix: .+\n)?(  see: .+\n)?)+")
#: What differs from run to run, or from machine to machine, and what was not typed.
VARYING = {
    r"\b(demo|train)-\d{4}-\d{4}": r"\1-ID",
    r"\d[\d.]* (kB|MB|GB|TB)": "SIZE",
    r"\d[\d.]* (ms|s)\b": "TIME",
    r"backend (nccl|gloo).*": "backend BACKEND",
    r"(allranks run) --no-check": r"\1",  # The fixture adds it.
}
USAGE, PREFLIGHT = 2, 3


@pytest.mark.parametrize("block", BLOCKS, ids=[block.title for block in BLOCKS])
def test_message(allranks: Any, block: Block, request: pytest.FixtureRequest) -> None:
    allranks.script("")
    if any("FAILED_RUN" in step.command for step in block.steps):
        allranks.env["FAILED_RUN"] = str(request.getfixturevalue("failed_run"))
    found = Block(block.title, tuple(_typed(allranks, step) for step in block.steps), block.after)
    if os.environ.get("ALLRANKS_UPDATE_GOLDEN"):
        FILE.write_text(replace_block(FILE.read_text(), found))
    assert str(found) == str(read_one(block.title))


def test_titles_are_unique_and_the_file_is_as_it_would_be_written() -> None:
    text = FILE.read_text()
    first, blocks = read_blocks(text)
    titles = [block.title for block in blocks]
    assert len(titles) == len(set(titles))
    assert first + "".join(map(str, blocks)) == text


def read_one(title: str) -> Block:
    """Return a block as it stands in the file now."""
    return next(block for block in read_blocks(FILE.read_text())[1] if block.title == title)


def _typed(allranks: Any, step: Step) -> Step:
    """Type one command, and return it with what it gave."""
    if not step.is_ours:
        subprocess.run(["bash", "-ec", step.command], cwd=allranks.folder, env=allranks.env, check=True)
        return step
    before = allranks.runs()
    words = shlex.split(step.command)
    command = words.index("allranks")
    result = allranks(*words[command + 1 :], **dict(word.split("=", 1) for word in words[:command]))
    if result.rc:
        assert result.stdout == ""
        assert MESSAGE.fullmatch(result.stderr), result.stderr
    if result.rc in (USAGE, PREFLIGHT):
        assert allranks.runs() == before
    return Step(step.command, (f"exit {result.rc}", *_anywhere(allranks, result.stderr).splitlines()))


def _anywhere(allranks: Any, text: str) -> str:
    """Return a message without what depends on the machine, the directory and the time."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for known, name in (
        (str(allranks.folder), "$PWD"),
        (allranks.env["HOME"], "$HOME"),
        (f"Python {version}", "Python"),
    ):
        text = text.replace(known, name)
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text
