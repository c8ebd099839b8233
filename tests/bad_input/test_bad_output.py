"""Ranks that say strange things and ranks that die: every byte comes through, and the first failure is named."""

from __future__ import annotations

import json
import os

import pytest

DIES_BEFORE = """\
import os, sys
if os.environ["RANK"] == "1":
    sys.exit("no data")
import torch.distributed as dist
dist.init_process_group("gloo")
"""
DIES_DURING = """\
import os, signal
import torch.distributed as dist
if os.environ["RANK"] == "1":
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
    store.wait(["rank 0 is there"])
    os.kill(os.getpid(), signal.SIGKILL)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
store.set("rank 0 is there", "1")
dist.init_process_group("gloo")
print("never")
"""
DIES_AFTER = """\
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
dist.barrier()  # Both have said so.
if dist.get_rank() == 1:
    raise ValueError("loss is nan")
dist.all_reduce(torch.ones(1))
dist.barrier()
print("never")
"""


@pytest.mark.parametrize(
    ("script", "code", "why", "out"),
    [
        (DIES_BEFORE, 1, "no data", ""),
        (DIES_DURING, 137, None, ""),
        ("import os\nos._exit(5 * (os.environ['RANK'] == '1'))", 5, "it wrote nothing to stderr", ""),
        (DIES_AFTER, 1, "ValueError: loss is nan (train.py:8)", "[0-1] ready\n"),
    ],
    ids=["before init", "during init", "in silence", "after init"],
)
def test_rank_that_dies(allranks, assert_nothing_left, script: str, code: int, why: str | None, out: str):
    allranks.script(script)
    result = allranks("run", "train.py", "--nproc-per-node", "2", "--stop-timeout", "5")
    run = allranks.run()
    assert (result.rc, "never" in result.stdout) == (code, False)
    assert sorted(result.stdout.splitlines()) in (sorted(out.splitlines()), ["[0] ready", "[1] ready"])
    message = result.message
    assert (message["error"].split()[:2], message["why"]) == (["rank", "1"], why or message["why"])
    assert message["see"] == f"runs/{run.name}/attempts/000/node-000/rank-1.err"
    status = allranks.record()["status"]
    assert (status["state"], status["exit_code"], status["rank"]) == ("FAILED", code, 1)
    assert_nothing_left(run)


def test_ten_megabytes_without_a_newline(allranks):
    """All bytes arrive, in pieces that each name their rank."""
    allranks.script("import sys\nfor i in range(2500):\n    sys.stdout.write('%04d' % i * 1024)\n")
    result = allranks("run", "train.py")
    assert result.rc == 0
    assert result.out.endswith(b"\n")
    pieces = result.out[:-1].split(b"\n")
    assert all(piece.startswith(b"[0] ") for piece in pieces)
    assert max(map(len, pieces)) <= (1 << 20) + len(b"[0] ")
    assert b"".join(piece[4:] for piece in pieces) == b"".join(b"%04d" % i * 1024 for i in range(2500))
    assert allranks("logs").out == result.out


def test_bytes_that_are_no_text(allranks):
    data = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    allranks.script(f"import sys\nsys.stdout.buffer.write({data!r} + b'\\n')\nsys.stderr.buffer.write(b'\\xff\\n')\n")
    result = allranks("run", "train.py")
    assert (result.rc, result.out) == (0, b"[0] " + data + b"\n")
    assert b"[0] \xff\n" in result.err
    assert allranks("logs").out == result.out


def test_last_words_that_are_no_text(allranks):
    """What the error quotes from a log is made fit for a terminal."""
    allranks.script(
        "import os\nos.write(2, b'\\x1b]0;title\\x07 caf\\xe9 \\xf0\\x9f\\x92\\xa5\\n')\nraise SystemExit(4)\n"
    )
    result = allranks("run", "train.py")
    assert result.rc == 4
    assert "  why: \\x1b]0;title\\x07 caf� 💥\n" in result.stderr
    assert json.loads(allranks("status", "--json").stdout)["status"]["exit_code"] == 4


def test_arguments_that_are_no_text(allranks):
    """File names need not be UTF-8; they are handed on byte for byte."""
    allranks.script("import os, sys\nprint([os.fsencode(word) for word in sys.argv[1:]])\n")
    word = os.fsdecode(b"caf\xe9")
    plan = allranks("plan", "train.py", "--json", "--", word)
    assert (plan.rc, plan.stderr) == (0, "")
    json.loads(plan.stdout)
    result = allranks("run", "train.py", "--", word)
    assert (result.rc, result.stdout) == (0, "[0] [b'caf\\xe9']\n")
