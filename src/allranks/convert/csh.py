"""Scripts of csh and tcsh, as the bash that does the same: line by line, so that lines keep their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

from allranks.errors import UsageError

_VALUE = r"(\"[^\"]*\"|'[^']*'|`[^`]*`|(?:[^\s;()`\"']|`[^`]*`)*)"
_NUMBERS = {"==": "-eq", "!=": "-ne", "<": "-lt", ">": "-gt", "<=": "-le", ">=": "-ge"}
#: Files that set up the shell itself: bash has its own.
_START_FILES = re.compile(r"\S*(\.t?cshrc|\.login|/modules\.csh|/init/t?csh|/lmod\.csh|conda\.csh)")
#: Words at the start of a line, and expansions, that bash has no line for.
_BEYOND = re.compile(
    r"\s*((switch|case|breaksw|while|goto|onintr|alias|repeat|limit|unlimit|set|if|foreach|source)\b|@\s)"
)
_EXPANSIONS = re.compile(r"\$\w+\[|\$\{\w+\[|\$<|\$\w+:[a-z]|\$\{\w+:[a-z]")


def is_csh(path: str, data: bytes) -> bool:
    """Return whether a script is for csh or tcsh: by its first line, ``-S`` of qsub, or its name."""
    text = data[:4000].decode("utf-8", "replace")
    if text.startswith("#!"):
        return bool(re.match(r"#!\s*\S*(/|\s)t?csh\b", text))
    return path.endswith((".csh", ".tcsh")) or bool(re.search(r"^#(PBS|\$)\s+-S\s+\S*/t?csh\b", text, re.MULTILINE))


def as_bash(path: str, data: bytes) -> bytes:
    """Return a script as one of bash: itself unless it is for csh.

    Raises:
        UsageError: a line of csh has no counterpart here.
    """
    if not is_csh(path, data):
        return data
    lines: list[str] = []
    end = ""  # Of a here-document.
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        if end:
            end = "" if line.strip() == end else end
        elif number == 1 and line.startswith("#!"):
            line = "#!/bin/bash"
        elif not line.lstrip().startswith("#"):
            end = found[1] if (found := re.search(r"<<\s*[\"']?(\w+)", line)) else ""
            written = _written(line)
            if written is None:
                raise UsageError(
                    f"cannot convert {path}",
                    why=f"{path}:{number}: {line.strip()}: a line of csh that bash has no line for",
                    fix="write it as bash does, and #!/bin/bash as the first line of the script",
                )
            line = written
        lines.append(line)
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def _written(line: str) -> str | None:
    """Write a line of csh as bash; None if there is no line of bash that does the same."""
    for pattern, bash in _WORDS:
        line = re.sub(pattern, bash, line)
    if _EXPANSIONS.search(line):
        return None
    for pattern, write in _LINES:
        if found := re.fullmatch(rf"(\s*){pattern}\s*;?\s*(#.*)?", line):
            written = write(found)
            return None if written is None else found[1] + written
    return None if _BEYOND.match(line) else line


def _list(found: re.Match[str]) -> str | None:
    """Write ``set x = (a b)`` as a text, of which bash makes the same words."""
    return None if re.search(r"[\"'`]", found[3]) else f'{found[2]}="{found[3].strip()}"'


def _condition(text: str) -> str | None:
    """Write what stands in the brackets of ``if ( … )``; None if that is not known."""
    tests = []
    for part in re.split(r"(&&|\|\|)", text):
        word = r"(\"[^\"]*\"|'[^']*'|[^\s\"'()]+)"
        if part in ("&&", "||"):
            tests.append(part)
        elif found := re.fullmatch(r"\s*(!?)\s*\$\{?\?(\w+)\}?\s*", part):
            tests.append(f'[ {"-z" if found[1] else "-n"} "${{{found[2]}+set}}" ]')
        elif found := re.fullmatch(rf"\s*(!?)\s*-([defrwx])\s+{word}\s*", part):
            tests.append(f"[ {found[1]} -{found[2]} {found[3]} ]".replace("[  ", "[ "))
        elif found := re.fullmatch(rf"\s*{word}\s*(==|!=|<=|>=|<|>)\s*{word}\s*", part):
            is_number = found[2] not in ("==", "!=") or re.fullmatch(r"\d+", found[3]) or found[1] == "$#"
            sign = _NUMBERS[found[2]] if is_number else found[2].replace("==", "=")
            tests.append(f"[ {_quoted(found[1])} {sign} {_quoted(found[3])} ]")
        else:
            return None
    return " ".join(tests)


def _quoted(word: str) -> str:
    return f'"{word}"' if word.startswith("$") else word


def _if(found: re.Match[str]) -> str | None:
    condition = _condition(found[3])
    if condition is None:
        return None
    if found[4] == "then":
        return f"{'elif' if found[2] else 'if'} {condition}; then"
    command = _written(found[4])
    return command and f"if {condition}; then {command}; fi"


def _source(found: re.Match[str]) -> str | None:
    if _START_FILES.fullmatch(found[2]):
        return ":"
    return f"source {found[2].removesuffix('.csh')}" if found[2].endswith("/activate.csh") else None


#: Parts of lines that bash writes otherwise.
_WORDS = (
    (r"\$\{?#argv\}?", "$#"),
    (r"\$\{?argv\[(\d+)\]\}?", r"$\1"),
    (r"\$(argv\b(\[\*\])?|\{argv\})", "$*"),
    (r"\$status\b", "$?"),
    (r">>&\s*(\S+)", r">> \1 2>&1"),
)
#: Lines of csh, and what writes each as bash; None if it cannot.
_LINES: tuple[tuple[str, Callable[[re.Match[str]], str | None]], ...] = (
    (rf"set\s+(\w+)\s*=\s*{_VALUE}", lambda found: f"{found[2]}={found[3]}"),
    (r"set\s+(\w+)\s*=\s*\(([^()]*)\)", _list),
    (r"set\s+(\w+)", lambda found: f"{found[2]}="),
    (rf"setenv\s+(\w+)\s+{_VALUE}", lambda found: f"export {found[2]}={found[3]}"),
    (r"setenv\s+(\w+)", lambda found: f"export {found[2]}="),
    (r"unsetenv\s+(\w+)", lambda found: f"unset {found[2]}"),
    (r"@\s+(\w+)\s*=\s*([^;#]+)", lambda found: f"{found[2]}=$(({found[3].strip()}))"),
    (r"foreach\s+(\w+)\s*\((.*)\)", lambda found: f"for {found[2]} in {found[3].strip()}; do"),
    (r"end", lambda _: "done"),
    (r"endif", lambda _: "fi"),
    (r"(else\s+)?if\s*\((.*)\)\s*(then)", _if),
    (r"()if\s*\((.*?)\)\s+(\S.*)", _if),
    (r"source\s+(\S+)", _source),
)
