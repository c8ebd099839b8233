"""What a batch scheduler is asked for is one line each, with values as the scheduler reads them."""

from __future__ import annotations

import pytest

from allranks.errors import JobError
from allranks.plan.directives import Directive, written


def line(value: str) -> str:
    (found,) = written([Directive("--account", value, "scheduler.account")], "#SBATCH")
    return found


@pytest.mark.parametrize("value", ["lab", "a100&nvlink|h100*2", "gpu[01-03,07]", "%A_%a", "été", "$USER", "`x`"])
def test_plain_values_stand_as_they_are(value: str):
    assert line(value) == f"#SBATCH --account={value}"


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("my project", '"my project"'),
        ("it's", '"it\'s"'),
        ('say "hi"', r'"say \"hi\""'),
        ("back\\slash", r'"back\\slash"'),
        ("a#b", '"a#b"'),
        ("", '""'),
    ],
)
def test_others_are_quoted(value: str, quoted: str):
    assert line(value) == f"#SBATCH --account={quoted}"


@pytest.mark.parametrize("value", ["two\nlines", "a\rb", "a\tb", "a\0b", "\x1b[2J", "a\u2028b"])
def test_what_is_no_single_line_is_refused(value: str):
    with pytest.raises(
        JobError, match=r"^--account=.* cannot be asked for\n  why: a directive is one line of text\n  fix: write sch"
    ):
        line(value)


def test_a_note_is_a_comment_above_its_line():
    asked = [Directive("--mem", "2G", "resources.memory", "of each\nnode"), Directive("--exclusive", None, "x")]
    assert list(written(asked, "#SBATCH")) == ["# of each\\x0anode", "#SBATCH --mem=2G", "#SBATCH --exclusive"]
    assert [(found.reason.subject, found.reason.value, found.reason.why) for found in asked] == [
        ("--mem", "2G", "resources.memory"),
        ("--exclusive", "", "x"),
    ]
