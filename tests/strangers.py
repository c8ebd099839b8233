"""What another user of a machine can do to a run: says to each of its ports what ``scripts/stranger.py`` knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.system.processes import marked
from waiting import PATIENCE

SOURCE = Path(__file__).parent / "scripts" / "stranger.py"
MARK = Path("/tmp/a-stranger-was-here")
_LISTENS = "0A"  # man 5 proc
#: Rank 0 works alone until there is a file ``go``, and the others wait for what it returns: then it is attacked.
ATTACKED = """\
import os, pathlib, sys, time, torch, torch.distributed as dist
import allranks
def work():
    pathlib.Path("works").touch()
    while not os.path.exists("go"):
        time.sleep(0.01)
    return {"value": torch.arange(3), "text": "fine"}
with allranks.init() as ctx:
    told = ctx.on_main(work)
    print(ctx.rank, told["value"].tolist(), told["text"], *ctx.sum(1.0), flush=True)
"""
ARGUMENT = "an-argument-of-the-user"


def why_no_strangers() -> str | None:
    """Say what keeps a test from being another user; None where it can."""
    return None if sys.platform == "linux" and os.geteuid() == 0 else "only root may become another user"


def listening(run: Path) -> dict[int, set[tuple[str, int]]]:
    """Return where agents and ranks listen: by a process in each network namespace, addresses and ports.

    What a scheduler's own commands listen at is not asked: they have ways of their own to know each other.
    """
    found: dict[int, set[tuple[str, int]]] = defaultdict(set)
    namespaces: dict[str, int] = {}
    for pid in marked(contract.RUN_DIR, str(run)):
        with suppress(OSError):
            namespace = str(Path(f"/proc/{pid}/ns/net").readlink())
            if not Path(f"/proc/{pid}/exe").readlink().name.startswith("python"):
                continue
            sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
            for address, port, inode in _listeners(pid):
                if f"socket:[{inode}]" in sockets:
                    found[namespaces.setdefault(namespace, pid)].add((address, port))
    return dict(found)


def _listeners(pid: int) -> list[tuple[str, int, str]]:
    """Return address, port and inode of all sockets that listen in the network namespace of a process."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTENS:
                found.append((_address(address), int(port, 16), fields[9]))
    return found


def _address(text: str) -> str:
    """Return an address, from hexadecimal words in the order of this machine."""
    words = [
        bytes.fromhex(text[start : start + 8])[:: -1 if sys.byteorder == "little" else 1]
        for start in range(0, len(text), 8)
    ]
    packed = b"".join(words)
    if packed.startswith(bytes(10) + b"\xff\xff"):
        packed = packed[12:]
    if not any(packed):
        return "*"
    return ".".join(map(str, packed)) if len(packed) == 4 else packed.hex(":", 2)


def _said_to(run: Path) -> dict[tuple[int, str], str]:
    """Have a stranger say all it knows to all ports of a run; return what was answered, by port and kind."""
    answers = {}
    for pid, places in listening(run).items():
        targets = [("127.0.0.1" if address == "*" else address, port) for address, port in sorted(places)]
        enter = ["nsenter", "--target", str(pid), "--net"] if _is_elsewhere(pid) else []
        done = subprocess.run(
            [*enter, os.path.realpath(sys.executable), "-I", "-c", SOURCE.read_text()],
            input=json.dumps(targets),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        answers |= {(port, kind): answer for port, kind, answer in json.loads(done.stdout)}
    return answers


def _is_elsewhere(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def assert_strangers_learn_nothing(run: Path) -> None:
    """Let a stranger try all ports of a run: none of its code runs, and no answer has directory, key or arguments."""
    MARK.unlink(missing_ok=True)
    answers = _said_to(run)
    was_there = MARK.exists()
    MARK.unlink(missing_ok=True)
    assert not was_there
    key = (run / contract.KEY_FILE).read_text().strip()
    for secret in (str(run), run.name, key, bytes.fromhex(key).decode("latin-1"), ARGUMENT, "train.py"):
        assert [kind for kind, answer in answers.items() if secret in answer] == []
