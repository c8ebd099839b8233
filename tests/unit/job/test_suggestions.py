"""Every value that breaks a rule is answered with what to write, which is then taken."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.errors import JobError
from allranks.job.load import load_job
from allranks.job.spec import Job, Section

WRONG = (["30M", "b"], [["a"]], [None], {"a": "b"}, True, "what is it?", -7, "")


def keys(model: type[Section], above: str = "") -> Iterator[str]:
    sections = model.sections()
    for name in model.model_fields:
        yield from keys(sections[name], f"{name}.") if name in sections else [f"{above}{name}"]


def errors_of(folder: Path, key: str, value: str) -> list[str]:
    """Return the errors about a key of a job file with a value as it is written."""
    section, _, name = key.rpartition(".")
    target = "" if key in ("script", "module", "binary") else "script: t\n"
    (folder / "job.yaml").write_text(
        target + (f"{section}: {{{name}: {value}}}\n" if section else f"{name}: {value}\n")
    )
    try:
        load_job(Path("job.yaml"), flags={}, environ={}, cwd=folder)
    except JobError as error:
        return str(error).split("\nerror: ")
    return []


@pytest.mark.parametrize("wrong", WRONG, ids=json.dumps)
def test_every_error_about_a_value_says_what_to_write(tmp_path: Path, wrong: object) -> None:
    found = {key: errors_of(tmp_path, key, json.dumps(wrong)) for key in keys(Job) if key != "cluster"}
    assert [error for errors in found.values() for error in errors if "\n  fix: " not in error] == []
    assert sum(map(len, found.values())) > 5
    for key, errors in found.items():
        if line := re.search(r"\n  fix: (?:leave it out, or )?write (\w+): (\S+)$", "".join(errors)):
            assert line[1] == key.rpartition(".")[2]
            assert errors_of(tmp_path, key, line[2]) == []
