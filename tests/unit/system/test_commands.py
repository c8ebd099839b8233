"""Commands that are waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.system.commands import run_one
from waiting import is_alive


def test_a_slow_reader_gets_all_that_is_sent() -> None:
    sent = "x" * 300_000  # More than a pipe holds.
    answer = run_one(["sh", "-c", "sleep 0.5; wc -c"], os.environ, sent=sent, seconds=30)
    assert (answer.code, answer.out.strip()) == (0, "300000")


def test_a_command_that_reads_nothing_may_end() -> None:
    answer = run_one(["sh", "-c", "echo done; exec 0<&-; exit 3"], os.environ, sent="x" * 300_000, seconds=30)
    assert (answer.code, answer.out, answer.is_late) == (3, "done\n", False)


def test_a_command_that_takes_too_long_is_ended() -> None:
    answer = run_one(["sleep", "300"], os.environ, seconds=0.3)
    assert (answer.is_late, answer.unreached, answer.err) == (True, True, "no answer within 0.3 s")


def test_ctrl_c_leaves_no_process_however_early_it_comes(tmp_path: Path) -> None:
    """The command itself sends it, in the moment in which it starts."""
    file = tmp_path / "pid"
    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            run_one(["sh", "-c", f"echo $$ >{file}; kill -INT $PPID; exec sleep 300"], os.environ)
        assert not is_alive(int(file.read_text()))
