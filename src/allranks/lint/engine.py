"""Applies the rules to scripts: what is chosen, what a comment leaves out, what is found."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from allranks.errors import UsageError
from allranks.lint.model import Place, Text
from allranks.lint.reading import View, read_branches
from allranks.lint.rules import RULES
from allranks.lint.rules.base import Edit, Rule

#: The page of the rules. A rule's heading is its code and name.
PAGE = "docs/reference/lint.md"
#: Characters of a value of the script in a sentence.
_LONG = 100
_COMMENT = re.compile(r"#\s*allranks:\s*ignore(?:\[([\w\s,-]*)\])?")


@dataclass(frozen=True)
class Finding:
    """One fault in a file."""

    rule: Rule
    path: str
    place: Place
    at: int = field(compare=False)  # Its offset in the text of the script.
    what: str
    fix: str
    edits: tuple[Edit, ...] = field(default=(), compare=False)

    @property
    def page(self) -> str:
        """Where the rule is explained."""
        return f"{PAGE}#{self.rule.code.lower()}-{self.rule.name}"

    def to_json(self) -> dict[str, object]:
        """Return the finding as plain data."""
        return {
            "path": self.path,
            "line": self.place.line,
            "column": self.place.column,
            "code": self.rule.code,
            "name": self.rule.name,
            "severity": self.rule.severity,
            "what": self.what,
            "fix": self.fix,
            "versions": self.rule.versions or None,
            "fixable": bool(self.edits),
            "page": self.page,
        }


def chosen(select: Sequence[str], ignore: Sequence[str]) -> tuple[Rule, ...]:
    """Return the rules that are selected, by code, by name, or by the beginning of codes, without those ignored."""
    wanted = [rule for rule in RULES if not select or any(_matches(rule, word) for word in select)]
    for word in (*select, *ignore):
        if not any(_matches(rule, word) for rule in RULES):
            fix = f"a code such as {RULES[0].code}, AR1 for its family, or a name"
            raise UsageError(f"no such rule: {word}", fix=fix)
    return tuple(rule for rule in wanted if not any(_matches(rule, word) for word in ignore))


def _matches(rule: Rule, word: str) -> bool:
    return rule.name == word.lower() or (word.upper().startswith("AR") and rule.code.startswith(word.upper()))


def rule_of(word: str) -> Rule:
    """Return a rule by its code or name."""
    for rule in RULES:
        if word.upper() == rule.code or word.lower() == rule.name:
            return rule
    fix = f"a code such as {RULES[0].code}, or a name: each finding shows its own"
    raise UsageError(f"no such rule: {word}", fix=fix)


class _Capitals(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name.upper()


def generic(text: str) -> str:
    """Return a sentence of a rule, with the names of its fields in capitals."""
    return text.format_map(_Capitals())


def lint(path: str, data: bytes, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Return what the rules find in a script, in the order of its lines."""
    found: dict[tuple[str, str, Place], Finding] = {}
    ignored: dict[int, Collection[str]] | None = None
    for view in read_branches(path, data):
        for rule in rules:
            for finding in _findings(rule, view):
                if ignored is None:
                    ignored = _ignored(view.script.text)
                codes = ignored.get(view.place(finding.at).line)
                if codes is None or (codes and rule.code not in codes and rule.name not in codes):
                    found.setdefault((rule.code, finding.path, finding.place), finding)
    # The script's own first.
    return sorted(found.values(), key=lambda each: (each.path != path, each.path, each.place, each.rule.code))


def _findings(rule: Rule, view: View) -> Iterator[Finding]:
    text = view.script.text
    for hit in rule.check(view):
        fields = {name: _shown(value) for name, value in hit.fields.items()}
        what, fix = rule.what.format(**fields), rule.fix.format(**fields)
        place = view.place(hit.at)
        path, line = text.where(place.line)
        edits = tuple(edit for edit in hit.edits if edit.end <= text.size)
        yield Finding(rule, path, Place(line, place.column), hit.at, what, fix, edits)


def _shown(value: object) -> str:
    """Return a value of the script as one short line."""
    text = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ue000\ue001]", " ", str(value)).split())
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _ignored(text: Text) -> dict[int, Collection[str]]:
    """Return the codes that comments leave out, by line; an empty collection is all."""
    found: dict[int, Collection[str]] = {}
    for number in range(1, text.lines + 1):
        line = text.line(number)
        match = _COMMENT.search(line)
        if not match:
            continue
        codes = frozenset(code.strip() for code in (match[1] or "").split(",") if code.strip())
        lines = [number]
        if line.lstrip().startswith("#") and not line.startswith(("#SBATCH", "#PBS", "#$")):
            lines = list(_statement(text, number + 1))
        for each in lines:
            found[each] = codes
    return found


def _statement(text: Text, first: int) -> Iterator[int]:
    """Yield the lines of the statement that starts at a line."""
    for number in range(first, text.lines + 1):
        yield number
        if not text.line(number).rstrip("\r").endswith("\\"):
            return


def mended(data: bytes, findings: Sequence[Finding]) -> bytes:
    """Return a file with the changes that its findings propose."""
    edits = sorted({edit for finding in findings for edit in finding.edits}, key=lambda edit: edit.start, reverse=True)
    last = len(data) + 1
    for edit in edits:
        if edit.end <= last:
            data = data[: edit.start] + edit.text + data[edit.end :]
            last = edit.start
    return data
