"""``allranks lint``: what fails, hangs or trains wrongly in launch scripts that were written by hand."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli import render
from allranks.cli.runs import comma_separated, json_option
from allranks.errors import UsageError
from allranks.job.units import format_count

if TYPE_CHECKING:
    from allranks.lint.engine import Finding
    from allranks.lint.model import Place

_STDIN = "-"


@click.command("lint")
@click.argument("files", nargs=-1, metavar="[FILE… | DIRECTORY… | -]")
@click.option("--explain", metavar="CODE", help="Explain one rule, by its code or name.")
@click.option("--select", metavar="CODES", multiple=True, help="Only these rules, separated by commas: AR101, AR3, ….")
@click.option("--ignore", metavar="CODES", multiple=True, help="Leave these rules out.")
@click.option("--fix", "is_fix", is_flag=True, help="Mend what can be mended safely, and show the difference.")
@click.option("--sarif", "as_sarif", is_flag=True, help="Print SARIF, for code review.")
@json_option
def command(
    files: tuple[str, ...],
    explain: str | None,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    is_fix: bool,
    as_sarif: bool,
    as_json: bool,
) -> int:
    """Find faults in sbatch, PBS, Grid Engine and shell scripts that start PyTorch.

    \b
    allranks lint train.sbatch             what fails, hangs or trains wrongly, and what to write instead
    allranks lint scripts/                 all scripts below a directory
    cat job.sh | allranks lint -
    allranks lint --explain AR101

    Reads the scripts, and runs nothing of them. The comment "# allranks: ignore[AR101]" leaves out one finding, at the
    end of its line or on the line above.

    Exits with 1 if anything is more than a hint.
    """
    from allranks.lint.engine import chosen, lint, mended

    if explain:
        return _explain(explain)
    if not files:
        raise UsageError("no file to read", fix="allranks lint FILE, DIRECTORY or -")
    if as_json and as_sarif:
        raise UsageError("--json and --sarif exclude each other", fix="one of them")
    if is_fix and _STDIN in files:
        raise UsageError("--fix needs a file", why="stdin cannot be written", fix="allranks lint --fix FILE")
    rules = chosen(comma_separated(select), comma_separated(ignore))
    scripts: list[tuple[str, bytes]] = []
    for name, data in _read(files):
        found = lint(name, data, rules) if is_fix else []
        if any(finding.edits for finding in found):
            before, data = data, mended(data, found)
            _write(Path(name), before, data)
        scripts.append((name, data))
    # What is found in a file that another one sources is found with that one too, but repaired in its own place only.
    by_place: dict[tuple[str, str, Place], Finding] = {}
    for name, data in scripts:
        for finding in lint(name, data, rules):
            key = finding.rule.code, finding.path, finding.place
            if finding.edits or key not in by_place:
                by_place[key] = finding
    findings = list(by_place.values())
    _show(findings, len(scripts), as_json=as_json, as_sarif=as_sarif)
    return int(any(finding.rule.severity != "hint" for finding in findings))


def _read(files: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each script; what is none is an error alone, and is left out among others."""
    from allranks.lint.files import not_for, other_kind, read, scripts_of, why_not_read

    names = [_STDIN] if _STDIN in files else []
    names += [str(path) for path in scripts_of([name for name in files if name != _STDIN])]
    for name in names:
        if name == _STDIN:
            name, data = "stdin", sys.stdin.buffer.read()
        else:
            data = read(Path(name))
        kind = other_kind(name, data)
        if kind and len(names) == 1:
            raise not_for("lint", name, kind)
        reason = kind or why_not_read(data)
        if reason and len(names) == 1:
            why = f"it is {reason}"
            raise UsageError(f"cannot read {name} as a script", why=why, fix="allranks lint FILE, DIRECTORY or -")
        if reason:
            render.talk(f"allranks: lint: {render.one_line(name)} is not read: {reason}")
        else:
            yield name, data


def _explain(word: str) -> int:
    from allranks.lint.engine import generic, rule_of

    rule = rule_of(word)
    lines = [f"{rule.code} {rule.name} ({rule.severity})", f"what: {generic(rule.what)}", f"fix: {generic(rule.fix)}"]
    lines += [f"versions: {rule.versions}"] if rule.versions else []
    lines.append(f"source: {rule.source}")
    render.data("\n".join(lines))
    return 0


def _write(path: Path, before: bytes, after: bytes) -> None:
    """Show the difference on stderr, and write the file; its mode stays."""
    old, new = (data.decode("utf-8", "replace").splitlines() for data in (before, after))
    if old == new:
        render.talk(f"allranks: lint: {path}: line ends without carriage returns")
    for line in difflib.unified_diff(old, new, str(path), str(path), n=1, lineterm=""):
        render.talk(render.one_line(line) if line.strip() else line)
    try:
        path.write_bytes(after)
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=error.strerror or str(error), fix="make it writable") from error


def _show(findings: list[Finding], count: int, *, as_json: bool, as_sarif: bool) -> None:
    if as_json:
        render.as_json({"files": count, "findings": [finding.to_json() for finding in findings]})
        return
    if as_sarif:
        from allranks.lint.sarif import sarif

        render.as_json(sarif(findings))
        return
    for finding in findings:
        rule = finding.rule
        where = f"{render.one_line(finding.path)}:{finding.place.line}:{finding.place.column}"
        versions = f" ({rule.versions})" if rule.versions else ""
        render.data(f"{where}: {rule.code} {rule.severity}: {finding.what}{versions}")
        render.data(f"  fix: {finding.fix}\n  see: allranks lint --explain {rule.code}")
    totals = Counter(finding.rule.severity for finding in findings)
    parts = [f"{totals[severity]} {severity}" for severity in ("fatal", "likely") if totals[severity]]
    if totals["hint"]:
        parts.append(format_count(totals["hint"], "hint"))
    render.talk(f"allranks: lint: {format_count(count, 'file')}: {', '.join(parts) or 'nothing found'}")
    fixable = sum(1 for finding in findings if finding.edits)
    if fixable:
        render.talk(f"next: allranks lint --fix repairs {fixable} of them")
