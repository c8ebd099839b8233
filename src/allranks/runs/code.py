"""The user's code at the start of a run: commit and uncommitted changes of its git work tree."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

from allranks import contract
from allranks.errors import RunFolderError
from allranks.job.problems import printable
from allranks.job.variables import PLACEHOLDER, scrub, secret_values
from allranks.record.files import write_atomically, write_json
from allranks.runs.record import Run

#: Limits for git on a slow disk, and for the size of a diff.
_SECONDS, _MOST_BYTES = 5.0, 1 << 18
_SHORT = 9
#: The start of the diff of each file.
_EACH = re.compile(r"^(?=diff --git )", re.MULTILINE)
#: A webhook URL in a job file, which is a secret.
_WEBHOOK = re.compile(r"""(\bwebhook["']?\s*[:=]\s*)[^\s,}]+""")
#: Options that make the diff independent of the user's configuration.
_DIFF = ("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")


@dataclass(frozen=True)
class Code:
    """The code with which an attempt was started.

    Attributes:
        root: the directory of the work tree.
        commit: the commit that was checked out.
        branch: its branch; ``HEAD`` if there is none.
        changed: tracked files that differed from the commit, with a hash of each diff; empty if the diff was too long.
           The diff is stored beside this record.
    """

    root: str
    commit: str
    branch: str
    changed: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the commit and the number of changed files."""
        if not self.changed:
            return self.commit[:_SHORT]
        files = f"{len(self.changed)} file{'s' if len(self.changed) > 1 else ''} changed"
        return f"{self.commit[:_SHORT]} with {files} ({_hash(json.dumps(self.changed))[:_SHORT]})"


def record_code(run: Run, script: Path, environ: Mapping[str, str]) -> threading.Thread | None:
    """Record the code of a run's newest attempt in a thread; None if the script is not in a git work tree.

    ``environ`` holds the job's secrets, which are removed from the diff.
    """
    if not any((folder / ".git").exists() for folder in script.parents):
        return None
    thread = threading.Thread(target=_record, args=(run, script.parent, environ), name="allranks-code")
    thread.start()
    return thread


def _record(run: Run, folder: Path, environ: Mapping[str, str]) -> None:
    deadline = time.monotonic() + _SECONDS
    where = _git(folder, deadline, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD").splitlines()
    if len(where) != 3:
        return  # There is no commit yet, or git rejects the directory as another user's.
    root, commit, branch = where
    secrets = [*filter(None, [environ.get(contract.NOTIFY_WEBHOOK)]), *secret_values(environ)]
    names = [*filter(None, _git(Path(root), deadline, *_DIFF, "--name-only", "-z").split("\0"))]
    text = scrub(_git(Path(root), deadline, *_DIFF), secrets) if names else ""
    text = _WEBHOOK.sub(rf"\1{PLACEHOLDER}", text)
    diffs = [_hash(each) for each in _EACH.split(text)[1:]]
    if len(text.encode()) >= _MOST_BYTES:
        diffs.pop()
    code = Code(root, commit, branch, dict(zip_longest(names, diffs[: len(names)], fillvalue="")))
    with contextlib.suppress(RunFolderError):  # The disk is full: the run continues without this record.
        if text:
            write_atomically(run.attempt_folder / contract.CODE_DIFF, text, run.record.file_mode)
        write_json(run.attempt_folder / contract.CODE_RECORD, asdict(code), run.record.file_mode)


def _hash(text: str) -> str:
    import hashlib  # The import takes some milliseconds, and most runs do not need it.

    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _git(folder: Path, deadline: float, *words: str) -> str:
    """Return the start of git's output; empty if it fails or takes too long."""
    command = ("git", "-C", str(folder), "-c", "core.quotePath=off", *words)
    try:
        process = subprocess.Popen(
            command,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return ""  # git is not installed.
    with process:
        assert process.stdout
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
        watch.start()
        data = process.stdout.read(_MOST_BYTES)
        is_cut = len(data) == _MOST_BYTES
        if is_cut:
            process.kill()
        code = process.wait()
        watch.cancel()
    return data.decode(errors="replace") if is_cut or code == 0 else ""


def code_of(run: Run) -> Code | None:
    """Return the recorded code of the newest attempt that has one; None if there is none."""
    for number in range(run.attempt, -1, -1):
        path = run.folder / contract.attempt_dir(number) / contract.CODE_RECORD
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = Code(**json.loads(path.read_text(encoding="utf-8")))
            if re.fullmatch(r"[0-9a-f]{40,64}", found.commit):  # Else it may be an option for git.
                return found
    return None


def differing_files(one: Code, other: Code) -> list[str]:
    """Return the files that may differ between two codes; between two commits only if git still has both here."""
    between = ""
    if one.commit != other.commit:
        words = ("diff", "--name-only", "-z", one.commit, other.commit)
        between = _git(Path(other.root), time.monotonic() + _SECONDS, *words)
    changed = {*one.changed, *other.changed}
    if one.commit == other.commit:
        changed = {name for name in changed if not one.changed.get(name) == other.changed.get(name) != ""}
    return [printable(name) for name in sorted({*filter(None, between.split("\0")), *changed})]
