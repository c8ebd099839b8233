"""What somebody meant who misspelled a name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from allranks.job.problems import closest, did_you_mean


@pytest.mark.parametrize(
    ("word", "choices", "meant"),
    [
        ("nodse", ["nodes", "name"], "nodes"),
        ("NODES", ["nodes"], "nodes"),
        ("max-restarts", ["max_restarts"], "max_restarts"),
        ("part", ["port", "partition"], "partition"),
        ("Adam", ["adamw", "adam"], "adam"),
        ("lba", ["local", "lab"], "lab"),
        ("no", ["nodes"], None),
        ("no", ["on"], None),
        ("--", ["--nodes"], None),
        ("lr", ["mail"], None),
        ("x", [], None),
    ],
)
def test_what_was_meant(word: str, choices: list[str], meant: str | None) -> None:
    assert closest(word, choices) == meant
    assert did_you_mean(word, choices) == (f"did you mean '{meant}'?" if meant else None)


def test_finding_what_was_meant_imports_nothing_heavy() -> None:
    code = "import sys, allranks.job.problems; print({'pydantic', 'ruamel', 'click', 'difflib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
