"""What a person at a terminal sees: colours there, and none with NO_COLOR."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from allranks.cli import render
from allranks.cli.render import harmless, one_line


def at_terminal(allranks, *args: str, before: tuple[str, ...] = (), **env: str) -> bytes:
    """Run a command with a terminal as stdin, stdout and stderr; return all that it wrote there.

    ``before`` is what it is given to as its last arguments.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "allranks", *args],
        cwd=allranks.folder,
        env={**allranks.env, **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux reports a terminal that nobody holds any more so.
            break
        if not data:
            break
        said += data
    os.close(ours)
    process.wait(60)
    return said


def test_colour_on_a_terminal(allranks):
    assert b"\x1b[1m\x1b[31merror:\x1b[0m there is no run in " in at_terminal(allranks, "status", TERM="xterm")


def test_states_have_colours_and_lines_are_cut_at_the_terminals_width(allranks):
    allranks.script("")
    run = allranks.folder / "runs"
    assert allranks("run", "train.py", "--name", "demo").rc == 0
    (name,) = (path.name for path in run.iterdir() if path.name != "latest")
    state = b"\x1b[32mSUCCEEDED\x1b[0m"
    assert b"state      " + state + b"\r\n" in at_terminal(allranks, "status", TERM="xterm")
    header, row = at_terminal(allranks, "ps", TERM="xterm", COLUMNS="30").splitlines()
    assert header == f"{'RUN'.ljust(len(name))}  STATE      EXIT  RANKS".encode()[:29] + "…".encode()
    assert (
        row
        == name.encode() + b"  " + state + "  0     1      local"[: 29 - len(name) - 11].encode() + "…\x1b[0m".encode()
    )


def test_a_reason_that_has_no_room_beside_its_run_is_shown_below(allranks):
    allranks.script("raise SystemExit(3)")
    allranks("run", "train.py", "--name", "a-name-that-takes-all-the-room-of-a-terminal")
    header, row, reason = at_terminal(allranks, "ps", TERM="dumb", COLUMNS="80").decode().splitlines()
    assert "REASON" not in header
    assert row.startswith("a-name-that-takes-all-the-room-of-a-terminal")
    assert reason == "  rank 0 exited with code 3"


def test_ages_and_times(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 200_000.0)
    ages = [render.age(200_000.0 - passed) for passed in (-5, 0, 59.9, 60, 3599, 3600, 86399, 86400, 180_000)]
    assert ages == [
        "0 s ago",
        "0 s ago",
        "59 s ago",
        "1 min ago",
        "59 min ago",
        "1 h ago",
        "23 h ago",
        "1 d ago",
        "2 d ago",
    ]
    assert (render.iso(1.5), render.iso(None)) == ("1970-01-01T00:00:01.500+00:00", None)


@pytest.mark.parametrize("env", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_colour_where_it_is_not_wanted(allranks, env: dict[str, str]):
    allranks.script("print('hello')\nprint('a\\rb\\rc', flush=True)\n")
    said = at_terminal(allranks, "run", "train.py", **env)
    assert b"[0] hello" in said
    assert b"\x1b[3" not in said
    assert b"error" not in said
    if env["TERM"] == "dumb":
        assert b"\x1b" not in said


def test_ranks_have_colours_of_their_own(allranks):
    allranks.script("print('hello')\n")
    assert b"\x1b[36m[0]\x1b[0m hello" in at_terminal(allranks, "run", "train.py", TERM="xterm")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é ⛛ 語 \U0001f600", "plain é ⛛ 語 \U0001f600"),
        ("\x1b[1;38:5:9mred\x1b[0m\x1b[m a\tb\r\n", "\x1b[1;38:5:9mred\x1b[0m\x1b[m a\tb\r\n"),
        ("a\x1b[2J\x1b[1;1H\x1b[?1049h\x1b[5Ab\x1b[K", "ab"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b]8;;http://x\x1b\\\\", r"\x1b]8;;http://x\x1b\\"),
        ("\x1bP1$r\x1bc\x1b(0", r"\x1bP1$r\x1bc\x1b(0"),
        ("\x9b2J\x9d0;t\x9c\x85", r"\x9b2J\x9d0;t\x9c\x85"),
        ("a\x08\x7f\x00\x07\x0b\x0c\x0e", r"a\x08\x7f\x00\x07\x0b\x0c\x0e"),
        ("\x1b\x1b[A[2J", r"\x1b[2J"),
        ("\x1b[3\n1m", "\\x1b[3\n1m"),
        ("end\x1b", r"end\x1b"),
        ("\udc9b2J\udce9", "\\x9b2J\udce9"),
    ],
)
def test_a_terminal_obeys_nothing_but_colours(text: str, shown: str):
    assert harmless(text) == shown


def test_one_line_is_one_line():
    assert one_line("n1\r\nerror:\x1b[2J\t\x1b[31mx") == r"n1\r\nerror:" + "\t\x1b[31mx"


#: Titles, cursor moves, C1 controls in UTF-8 and alone, backspace, NUL, and an escape at the end of what is written.
HOSTILE = b"\x1b]0;own\x07 \x1b[2J\x1b[31mred\x1b[0m \xc2\x9b2J \x9b2J \xe9 \x08\x00 caf\xc3\xa9\t\x1b"


def test_what_ranks_write_cannot_command_a_terminal(allranks):
    allranks.script(f"import os\nos.write(1, {HOSTILE!r})\nos.write(1, b'[2J\\nlast\\x1b')\n")
    said = at_terminal(allranks, "run", "train.py", "--name", "demo", NO_COLOR="1", TERM="xterm")
    shown = b"[0] \\x1b]0;own\\x07 \x1b[31mred\x1b[0m \\x9b2J \\x9b2J \xe9 \\x08\\x00 caf\xc3\xa9\t\r\n"
    assert shown in said
    # Before it ends, an unfinished line may be shown as a prompt, and is wiped.
    assert b"[0] last\\x1b\r\n" in said.replace(b"[0] last\\x1b\r\x1b[K", b"")
    assert shown + b"[0] last\\x1b\r\n" in at_terminal(allranks, "logs", TERM="dumb")
    assert allranks("logs").out == b"[0] " + HOSTILE + b"[2J\n[0] last\x1b\n"  # A pipe gets every byte.


NAMED = """\
import os, socket, sys
socket.sethostname("n\\x1b]0;own\\x07\\x9b2J\\nerror: x")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_name_of_a_host_cannot_command_a_terminal(allranks):
    before = ("unshare", "--uts", sys.executable, "-c", NAMED)
    if os.geteuid() or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("needs to be allowed to make a namespace")
    allranks.script("")
    said = at_terminal(allranks, "run", "train.py", before=before, TERM="xterm", NO_COLOR="1")
    said += at_terminal(allranks, "status", before=before, TERM="xterm", NO_COLOR="1")
    said += at_terminal(allranks, "top", before=before, TERM="xterm", NO_COLOR="1")
    assert rb" on n\x1b]0;own\x07\x9b2J\nerror: x" in said
    assert not {0x07, 0x9B} & {*said}
    assert b"\x1b" not in re.sub(rb"\x1b\[\d*[AJK]", b"", said), "of allranks itself, for what it draws below the log"
    assert b"\nerror" not in said


def test_status_wraps_what_is_longer_than_the_terminal_is_wide(allranks):
    allranks.script("raise ValueError('the shapes of these two tensors do not match: 3 and 4')\n")
    assert allranks("run", "train.py").rc == 1
    whole = allranks("status").stdout
    cause = next(line for line in whole.splitlines() if line.startswith("cause"))
    said = at_terminal(allranks, "status", NO_COLOR="1", TERM="xterm", COLUMNS="50").decode().replace("\r\n", "\n")
    assert max(map(len, said.splitlines())) <= 50
    indent = "\n" + " " * cause.index("ValueError")
    wrapped = cause.replace("two tensors", f"two{indent}tensors").replace("4 (", f"4{indent}(")
    assert f"\n{wrapped}\n" in said


def test_frames_of_others_are_folded_on_a_terminal_alone(allranks):
    allranks.script("import json\njson.loads('{')\n")
    said = at_terminal(allranks, "run", "train.py", NO_COLOR="1", TERM="xterm").decode().replace("\r\n", "\n")
    last = r'\[0\]   File ".*decoder.py", line \d+, in raw_decode\n(\[0\]     .*\n)+'
    shown = rf"\[0\]     json.loads\('{{'\)\n\[0\]   … 2 frames in python\n{last}\[0\] json.decoder.JSONDecodeError: "
    assert re.search(shown, said)
    assert said.count("decoder.py") == 1
    assert allranks("logs").stderr.count("decoder.py") == 2
