"""Findings in SARIF 2.1.0, the format that services for code review read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks import __version__
from allranks.lint.engine import PAGE, Finding
from allranks.lint.rules import RULES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"fatal": "error", "likely": "warning", "hint": "note"}


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a SARIF log with one run."""
    used = {finding.rule.code for finding in findings}
    rules = [rule for rule in RULES if rule.code in used]
    index = {rule.code: position for position, rule in enumerate(rules)}
    described = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.name.replace("-", " ")},
            "help": {"text": f"{PAGE}#{rule.code.lower()}-{rule.name}"},
            "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        }
        for rule in rules
    ]
    run = {
        "tool": {"driver": {"name": "allranks lint", "version": __version__, "rules": described}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, index[finding.rule.code]) for finding in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, index: int) -> dict[str, Any]:
    region = {"startLine": finding.place.line, "startColumn": finding.place.column}
    location = {"artifactLocation": {"uri": finding.path.replace("\\", "/")}, "region": region}
    return {
        "ruleId": finding.rule.code,
        "ruleIndex": index,
        "level": _LEVELS[finding.rule.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}"},
        "locations": [{"physicalLocation": location}],
    }
