"""What the arguments of a script name: files of configuration, which are checked, and directories that it writes to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from allranks.checks.model import Finding, Seen, failed, passed, skipped, warned
from allranks.checks.registry import on_the_whole
from allranks.job.problems import listed

_FILE = re.compile(r"\.(ya?ml|json|toml)$", re.IGNORECASE)
_NO_PATH = re.compile(r"://|[,;*?$%{}\[\]]|^~")
_CONFIG = re.compile(r"-+([a-z]+[-_.])*(config|conf|cfg|settings)([-_.]?(file|path|json|yaml))?", re.IGNORECASE)
#: Such an option names a file that the script writes.
_WRITTEN = re.compile(r"save|out|write|dump|export", re.IGNORECASE)
_FOLDER = re.compile(r"-+(\w+[-_])*(checkpoints?|ckpts?|output|save)[-_]?(dir|folder|path|root)?", re.IGNORECASE)

#: As many directories are searched for a file, breadth first.
_MOST_FOLDERS = 300
#: A file of more bytes is data, which would take long to parse.
_LARGEST = 1 << 20


def pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the values among arguments, each with the option before it, if there is one."""
    option = ""
    for word in args:
        name, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield name, value
            option = ""
        elif word.startswith("-"):
            option = word
        else:
            yield option, word
            option = ""


def named_files(args: Sequence[str], workdir: Path) -> list[tuple[str, Path]]:
    """Return the files of YAML, JSON or TOML that arguments name, each with its option.

    What only the script can make a path of is none: an address, a list, a pattern, a variable, a home.
    """
    named = ((option, value) for option, value in pairs(args) if _FILE.search(value) and not _NO_PATH.search(value))
    found = [(option or "argument", workdir / value) for option, value in named]
    return [(option, path) for option, path in found if not _WRITTEN.search(option)]


def _find_below(name: str, folder: Path) -> Path | None:
    """Find a file of that name below a directory: a script may look for its configuration there."""
    waiting, left = deque([folder]), _MOST_FOLDERS
    while waiting and left:
        left -= 1
        inside = waiting.popleft()
        if (inside / name).is_file():
            return inside / name
        with contextlib.suppress(OSError), os.scandir(inside) as entries:
            waiting += sorted(Path(entry.path) for entry in entries if entry.is_dir() and entry.name[0] != ".")
    return None


def named_folders(args: Sequence[str], workdir: Path) -> dict[str, str]:
    """Return the directories that a script is told to write to, by the option."""
    found = [(option, value) for option, value in pairs(args) if _FOLDER.fullmatch(option)]
    return {option: str(workdir / value) for option, value in found if not _FILE.search(value)}


def why_no_config(path: Path) -> str | None:
    """Return why a file cannot be parsed as what its name says it is; None: it can, or no parser is here."""
    try:
        if path.stat().st_size <= _LARGEST:
            _PARSERS[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return " ".join(str(error).split())
    except RecursionError:
        return "it is nested too deeply"
    return None


def _yaml(text: str) -> None:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        for _ in YAML(typ="safe", pure=True).parse(text):  # Events alone: a tag may be the script's own.
            pass
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from error
    except YAMLError as error:  # A character that YAML has no place for.
        raise ValueError(str(error)) from error


def _toml(text: str) -> None:
    if sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], object]] = {".yaml": _yaml, ".yml": _yaml, ".json": json.loads, ".toml": _toml}


@on_the_whole("config", why="a missing or unreadable configuration fails all ranks", facts=("files",))
def config(seen: Seen) -> Iterator[Finding]:
    """Check that the files that the script's arguments name exist, and can be parsed."""
    named = named_files(seen.job.args, Path(seen.plan.workdir))
    if not named:
        yield skipped("no argument names a YAML, JSON or TOML file")
    for option, path in named:
        yield _config(option, path, seen)


def _config(option: str, path: Path, seen: Seen) -> Finding:
    if seen.plan.copied_to and Path(seen.plan.workdir) not in path.parents:
        return passed(f"{path} is taken to be on the machines: it is not among what is copied there ({option})")
    if not path.is_file():
        return _missing(option, path, seen)
    if _CONFIG.fullmatch(option) and (why := why_no_config(path)):
        # Many read JSON with comments in it.
        return (warned if path.suffix == ".json" else failed)(f"{path}: {why}", fix="correct it there")
    without = [node.host for node in seen.nodes if (node.facts.get("files") or {}).get(str(path))]
    if without and not seen.plan.copied_to:
        return failed(f"{listed(without, 'and')} cannot read {path}", fix="put it where all nodes see it")
    return passed(f"{path} ({option})")


def _missing(option: str, path: Path, seen: Seen) -> Finding:
    """Judge a file that is not there: a script may look for it in other directories, or write it; so may a set-up."""
    script = next((reason.value for reason in seen.plan.reasons if reason.subject == "script"), None)
    folders = [Path(seen.plan.workdir), *([Path(script).parent] if script else [])]
    if other := next(filter(None, (_find_below(path.name, folder) for folder in folders)), None):
        return passed(f"{other}: taken to be what {option} means")
    if not _CONFIG.fullmatch(option):
        return passed(f"{path} is not there: taken to be written by the script ({option})")
    if not seen.is_prepared:
        return passed(f"{path} is not there: taken to be written by environment.setup or .node_setup ({option})")
    return failed(f"there is no {path}, which {option} names", fix=f"correct {option}; it is relative to workdir")
