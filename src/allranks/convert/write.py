"""Drafts as the text of job files, with where each value came from; one file for scripts that flags tell apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from allranks.convert.draft import KINDS, Draft, Given, short
from allranks.job.options import OPTIONS
from allranks.job.spec import Job
from allranks.job.yaml import dump_yaml

#: Sections in the order in which they are written; keys of the top level come first.
_SECTIONS = ("resources", "launch", "environment", "scheduler", "retry", "notify")
_TOP = ("name", "script", "module", "binary", "args", "workdir", "cluster")
#: Keys that hold lines of the script, with their section.
_LINES = {"setup": "environment", "node_setup": "environment", "resources": "scheduler", "directives": "scheduler"}
#: What a flag can change, so that scripts that differ in it alone are one job.
_FLAGS = (
    *("name", "resources.nodes", "resources.gpus_per_node", "resources.cpus_per_node", "resources.memory"),
    *("resources.time", "launch.nproc_per_node", "scheduler.partition", "scheduler.qos"),
)
_WIDTH = 100


def job_text(draft: Draft, name: str, others: Sequence[tuple[Draft, list[str]]]) -> str:
    """Return the job file of a draft, which is called ``name``; ``others`` it replaces too, each with its flags."""
    comments = _Comments(draft)
    body: list[str] = []
    for key in _TOP:
        if key in draft.values:
            given = draft.values[key]
            above = comments.above(given, "") if key != "cluster" else ()  # It stands for all directives.
            body += [*above, *_entry(draft, key, given, "")]
    for section in _SECTIONS:
        body += _section(draft, section, comments)
    lines = [f"# Written by allranks convert from {short(draft.path)}."]
    each = [*([(draft, [])] if draft.node else []), *others]
    lines += [f"# {short(other.path)}: {other.command(name, flags)}" for other, flags in each]
    lines += comments.header()
    missing = [note for note in draft.notes if note.kind == "not taken over"]
    foot = [f"# {place_of(draft, note.line)}: {note.what}" for note in missing]
    return "\n".join([*lines, *body, *(["", "# Not taken over:", *foot] if foot else [])]) + "\n"


def _section(draft: Draft, section: str, comments: _Comments) -> Iterator[str]:
    paths = [path for path in draft.values if path.startswith(f"{section}.") and ".variables." not in path]
    lines = [name for name, place in _LINES.items() if place == section and draft.setup.get(name)]
    variables = [path for path in draft.values if path.startswith(f"{section}.variables.")]
    if paths or lines or variables:
        yield f"{section}:"
    order = [*Job.sections()[section].model_fields]
    for path in sorted(paths, key=lambda path: order.index(path.rpartition(".")[2])):
        yield from comments.above(draft.values[path], "  ")
        yield from _entry(draft, path.rpartition(".")[2], draft.values[path], "  ")
    for name in lines:
        yield f"  {name}:"
        for given in draft.setup[name]:
            yield from comments.above(given, "    ")
            yield from _line(given.value, "    ", f"  # {place_of(draft, given.line)}")
    if variables:
        yield "  variables:"
    for path in variables:
        yield from comments.above(draft.values[path], "    ")
        yield from _entry(draft, path.rpartition(".")[2], draft.values[path], "    ")


def place_of(draft: Draft, line: int) -> str:
    """Return the file and the line of a line of a draft's text; 0 is the script as a whole."""
    path, line = draft.view.script.text.where(line) if line else (draft.path, 0)
    return f"{short(PurePath(path).name)}:{line}" if line else short(PurePath(path).name)


def _entry(draft: Draft, key: str, given: Given, indent: str) -> Iterator[str]:
    """Write a key with its value, and where that came from; a short list on one line."""
    where = f"  # {place_of(draft, given.line) if given.line else ''} {given.why}".rstrip().replace("#  ", "# ")
    first, *items = dump_yaml({key: given.value}).rstrip("\n").split("\n")
    flat = f"{indent}{first} [{', '.join(item.strip().removeprefix('- ') for item in items)}]"
    if isinstance(given.value, list) and any("\n" in item for item in given.value):
        yield indent + first + where
        for item in given.value:
            yield from _line(item, f"{indent}  ", "")
    elif items and len(flat) <= _WIDTH:
        yield flat + where
    else:
        yield indent + first + where
        yield from (indent + item for item in items)


def _line(value: str, indent: str, where: str) -> Iterator[str]:
    """Write a line of shell, or several, as an item of a list."""
    text = value.rstrip("\n")
    if "\n" not in text or not all(char.isprintable() or char in "\n" for char in text):
        yield f"{indent}- {dump_yaml({'x': text})[3:].rstrip()}{where}"
        return
    yield f"{indent}- |{2 if text[0].isspace() else ''}{where}"
    yield from (f"{indent}  {line}".rstrip() for line in text.split("\n"))


class _Comments:
    """The user's comments, each written once, with the value that it belongs to."""

    def __init__(self, draft: Draft) -> None:
        self._by_line: dict[int, str] = {}
        view = draft.view
        for at, text in view.script.comments:
            line = view.place(at).line
            if re.match(r"#(SBATCH|PBS|\$)\s", text):
                text = (re.search(r"\s#\s.*", text[1:]) or [""])[0].strip()
            if text.strip("#!-=* \t") and not text.startswith("#!") and not re.match(r"#\s*allranks:", text):
                self._by_line[line] = short(text)
        self._text = view.script.text

    def above(self, given: Given, indent: str) -> Iterator[str]:
        """Yield the comment at the end of a value's line, and the lines of comment directly above it."""
        found = [self._by_line.pop(given.line)] if given.line in self._by_line else []
        line = given.line - 1
        while line > 0 and self._text.line(line).endswith("\\"):
            line -= 1  # The statement starts further above.
        while line in self._by_line and self._text.line(line).lstrip().startswith("#"):
            found.insert(0, self._by_line.pop(line))
            line -= 1
        return (f"{indent}{text}" for text in found)

    def header(self) -> list[str]:
        """Return the comments that the script starts with, if no value has them."""
        line, found = 1, []
        while line <= self._text.lines and (not self._text.line(line).strip() or self._text.line(line).startswith("#")):
            if line in self._by_line and not re.match(r"#(SBATCH|PBS|\$)\s", self._text.line(line)):
                found.append(self._by_line.pop(line))
            line += 1
        return found


def together(drafts: Sequence[Draft]) -> list[list[tuple[Draft, list[str]]]]:
    """Return the drafts by job file: each with the flags that make it of the first one."""
    found: list[list[tuple[Draft, list[str]]]] = []
    for draft in drafts:
        for group in found:
            flags = difference(group[0][0], draft)
            if flags is not None:
                group.append((draft, flags))
                break
        else:
            found.append([(draft, [])])
    return found


def difference(base: Draft, other: Draft) -> list[str] | None:
    """Return the flags that make one job the other; None if they differ in more than flags can say."""
    one, two = _settings(base), _settings(other)
    flags: list[str] = []
    names = {option.path: option.flags for option in OPTIONS}
    for path in dict.fromkeys([*one, *two]):
        if one.get(path) == two.get(path):
            continue
        value = two.get(path, 1 if path == "resources.nodes" else None)
        if path not in _FLAGS or value is None or base.incomplete:
            return None
        spelled = "--nodes" if path == "resources.nodes" else names[path][0]
        flags += [spelled, str(value)]
    return flags


def _settings(draft: Draft) -> dict[str, Any]:
    lines = {name: [given.value for given in found] for name, found in draft.setup.items()}
    return {**{path: given.value for path, given in draft.values.items()}, **lines, "kind": draft.kind}


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def report(draft: Draft) -> Iterator[str]:
    """Yield the lines that say what became of each part of a script."""
    kept = [(given.line, path, given.why or _text(given.value)) for path, given in draft.values.items()]
    kept += [
        (given.line, f"{_LINES[name]}.{name}", given.value) for name, found in draft.setup.items() for given in found
    ]
    yield "kept:"
    yield from (f"  {place_of(draft, line)}: {path}: {short(why, 80)}".rstrip(": ") for line, path, why in sorted(kept))
    for kind, meaning in KINDS.items():
        notes = sorted((note for note in draft.notes if note.kind == kind), key=lambda note: note.line)
        if notes:
            yield f"{kind} ({meaning}):"
            yield from (f"  {place_of(draft, note.line)}: {note.what}" for note in notes)
