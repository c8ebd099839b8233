"""What all recorders have in common: facts, options of commands, starting another recorder, recording a rank."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Sequence

Env = dict[str, str]
Part = Callable[[list[str], Env, str], int]

HERE = "/.allranks"
RECORDS = "/.allranks-records/all"
#: The host that a command runs on, what it runs in (a container, ``uv run``), and who started it.
HOST, WITHIN, VIA = "_RECORDER_HOST", "_RECORDER_WITHIN", "_RECORDER_VIA"
PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?|ipython3?")
#: First on PATH: what environments that are active where allranks runs have too, one of them as a recorder.
FIRST = f"{HERE}/first"
BINS = (FIRST, "/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin")
#: Of a login.
PATH = "/usr/local/bin:/usr/bin:/bin"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
#: What a recorder says of a file that it cannot read, before its path.
NO_FILE = "there is no file"
#: By name, each command that is played; every Python is ``python``. ``main`` fills it.
PARTS: dict[str, Part] = {}


class Facts:
    """What recorders answer from; ``main`` fills it from ``facts.json``."""

    hosts: list[str]
    gpus: int
    seen_gpus: int  # Those that nvidia-smi lists.
    cpus: int
    tasks: int | None
    options: dict[str, tuple[list[str], dict[str, str], bool]]
    modules: dict[str, str]


FACTS = Facts()


def options(name: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of a command, by their usual names, each with its last value, and the words that follow."""
    valued, same, attaches = FACTS.options.get(name, ([], {}, False))
    given: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        typed, equals, value = word.partition("=")
        if attaches and not word.startswith("--"):
            typed, equals, value = word[:2], word[2:], word[2:].removeprefix("=")
        typed = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
        key = same.get(typed, typed)
        key = f"-{key}" if key not in valued and f"-{key}" in valued and not attaches else key
        if key in ("--mca", "-mca", "--gmca", "--prtemca"):
            del words[:2]
        elif key.strip("-") in ("genv", "env", "x") and name.startswith(("mpi", "orte")):
            if equals and key != "-x":
                words.insert(0, value)  # --env=NAME=VALUE
            count = 1 if key == "-x" or "=" in "".join(words[:1]) else 2  # NAME=VALUE, or NAME VALUE.
            given["-x"] = given.get("-x", "") + "=".join(words[:count]) + "\n"
            del words[:count]
        else:
            given[key] = value if equals else words.pop(0) if key in valued and words else ""
    return given, words


def number(text: str | None, otherwise: int) -> int:
    """Return the last number of ``2``, ``1:2`` or ``1-2``."""
    found = re.fullmatch(r"(?:\d+[:-])?(\d+)", (text or "").strip())
    return int(found[1]) if found else otherwise


def text_of(path: str, cwd: str) -> str:
    """Return the text of a file."""
    with open(os.path.join(cwd, os.path.expanduser(path)), encoding="utf-8", errors="replace") as file:
        return file.read()


def find(name: str, env: Env, cwd: str) -> str:
    """Return where the shell would have found a command outside of the sandbox; its name if on the usual path."""
    if "/" in name:
        return os.path.normpath(os.path.join(cwd, name))
    for folder in env.get("PATH", "").split(":"):
        path = os.path.join(folder, name)
        # A virtual environment that is not on this machine has the commands that it is activated for.
        is_elsewhere = folder == f"{env.get('VIRTUAL_ENV')}/bin" and not os.path.exists(f"{folder}/python")
        if folder.rstrip("/") not in BINS and (is_elsewhere or os.path.isfile(path)):
            return os.path.normpath(path)
    return name


def part_of(name: str) -> Part | None:
    """Return what plays a command; None if it is a program like any other."""
    return PARTS.get("python" if PYTHON.fullmatch(name) else name)


def play(words: list[str], env: Env, cwd: str) -> int:
    """Play the part of a command."""
    part = part_of(os.path.basename(words[0]))
    return part(words, env, cwd) if part else rank("binary", words[0], words[1:], [], env, cwd)


def start(words: list[str], env: Env, cwd: str) -> int:
    """Start a command as another one does; a recorder in this process."""
    if part := part_of(os.path.basename(words[0])):
        return part(words, env, cwd)
    path = os.path.join(cwd, words[0])
    if "/" in words[0] and os.path.isfile(path) and not os.access(path, os.X_OK):
        with open(path, "rb") as file:
            first = file.readline(200)
        if first.startswith(b"#!") and re.search(rb"(ba)?sh\b", first):
            words = ["bash", *words]
        elif first.startswith(b"#!") and b"python" in first:
            return play(["python", *words], env, cwd)
    try:
        return run(words, env, cwd)
    except OSError:
        return rank("binary", words[0], words[1:], [], env, cwd)


def run(words: list[str], env: Env, cwd: str) -> int:
    """Run a program of the sandbox."""
    import subprocess

    return subprocess.run(words, env=env, cwd=cwd).returncode


def rank(kind: str, path: str, args: Sequence[str], python: list[str], env: Env, cwd: str) -> int:
    """Record a rank, or a command that is none, in one piece: who reads the record decides."""
    if kind == "script":
        path = os.path.normpath(os.path.join(cwd, path))
    where = {"cwd": cwd, "host": env.get(HOST), "files": files_in(args, cwd)}
    what = {"kind": kind, "path": path, "args": list(args), "python": python, "env": env, **where}
    file = os.open(RECORDS, os.O_WRONLY | os.O_APPEND)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)
    return 0


def files_in(args: Sequence[str], cwd: str) -> dict[str, str]:
    """Return the checksums of the files that arguments name; of large ones, which no script has just written, none."""
    found = {}
    for word in args:
        path = os.path.join(cwd, word.rpartition("=")[2])
        if os.path.isfile(path) and os.path.getsize(path) < 1_000_000:
            with open(path, "rb") as file:
                found[word] = f"crc {zlib.crc32(file.read()):08x}"
    return found
