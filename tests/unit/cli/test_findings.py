"""How the findings of ``allranks check`` are counted."""

from __future__ import annotations

import pytest

from allranks.checks.model import Check, Finding, Result, failed, passed, skipped, warned
from allranks.checks.preflight import Report
from allranks.cli.findings import show

CHECK = Check("shm", "Data loaders use it.", lambda _: ())


@pytest.mark.parametrize(
    ("findings", "summary"),
    [
        ([], "nothing was checked"),
        ([warned("1 MB", fix="more")], "1 warning"),
        ([warned("1 MB", fix="more"), warned("2 MB", fix="more")], "2 warnings"),
        ([passed("1 GB", host="gpu1"), passed("1 GB", host="gpu2")], "1 passed"),
        (
            [failed("0 MB", fix="more"), warned("1 MB", fix="more"), passed("1 GB"), skipped("not Linux")],
            "1 failed, 1 warning, 1 passed, 1 skipped",
        ),
    ],
)
def test_the_summary_counts_different_findings(
    capfd: pytest.CaptureFixture[str], findings: list[Finding], summary: str
) -> None:
    show(Report(tuple(Result(CHECK, found) for found in findings), (), 0.1))
    assert capfd.readouterr().err == f"allranks: {summary}, in 0.1 s\n"
