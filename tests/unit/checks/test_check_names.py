"""Which checks are run: by name, of a command line and of a job."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from allranks.checks.model import Check
from allranks.checks.registry import all_checks, chosen
from allranks.errors import UsageError


def names(checks: tuple[Check, ...]) -> list[str]:
    return [check.name for check in checks]


def test_names_can_be_typed() -> None:
    assert [name for name in names(all_checks()) if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
    assert len(set(names(all_checks()))) == len(all_checks()) > 10


def test_quick_ones_are_taken_unless_others_are_asked_for() -> None:
    slow = {check.name for check in all_checks() if check.is_full}
    quick = names(chosen((), (), is_full=False))
    assert slow
    assert slow.isdisjoint(quick)
    assert names(chosen((), (), is_full=True)) == names(all_checks())
    one = next(iter(slow))
    assert names(chosen([one, "shm"], (), is_full=False)) == [
        name for name in names(all_checks()) if name in (one, "shm")
    ]
    assert names(chosen([one, "shm"], ["shm"], is_full=False)) == [one]
    assert names(chosen((), ["shm", "nodes"], is_full=False)) == [
        name for name in quick if name not in ("shm", "nodes")
    ]


@pytest.mark.parametrize(("only", "skip"), [(["memloc"], []), ([], ["memloc"])])
def test_an_unknown_name_is_told_with_the_one_that_was_meant(only: list[str], skip: list[str]) -> None:
    with pytest.raises(UsageError, match="there is no check 'memloc'") as raised:
        chosen(only, skip, is_full=False)
    assert raised.value.fix == "did you mean 'memlock'?"


def test_names_are_given_with_commas_and_more_than_once(allranks: Any) -> None:
    def told(*flags: str) -> list[str]:
        result = allranks("check", "--json", *flags)
        assert (result.rc, result.stderr) == (0, "")
        return list(dict.fromkeys(each["check"] for each in json.loads(result.stdout)["checks"]))

    assert told("--only", "shm, nodes", "--only", "threads") == ["nodes", "shm", "threads"]
    assert told("--only", "shm,nodes,threads", "--skip", "nodes", "--skip", "threads,memlock") == ["shm"]
    allranks.job("binary: 'true'\nchecks: {skip: 'shm, threads'}\n")
    left = told("--skip", "nodes")
    assert {"shm", "threads", "nodes"}.isdisjoint(left)
    assert "variables" in left
    assert told("--only", "shm,nodes") == ["nodes", "shm"]


def test_nothing_is_run_for_a_name_that_there_is_not(allranks: Any) -> None:
    result = allranks("check", "--only", "shm,tread")
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr.startswith("error: there is no check 'tread'\n  why: the checks are: ")
    assert result.stderr.endswith("  fix: did you mean 'threads'?\n")
