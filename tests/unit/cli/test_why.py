"""``allranks why``, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from test_terminal import at_terminal

FAILS = "import os\nif os.environ['RANK'] == '1':\n    {}['weights']\nimport time\ntime.sleep(1000)\n"
TRACEBACK = """Traceback (most recent call last):
  File "/home/user/train.py", line 88, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def test_a_run_of_which_a_rank_failed(allranks: Any) -> None:
    allranks.script(FAILS)
    assert allranks("run", "train.py", "--nproc-per-node", "3", "--name", "fails").rc == 1
    done = allranks("why")
    log = next(allranks.folder.glob("runs/fails-*/attempts/000/node-000/rank-1.err"))
    number = 1 + log.read_text().splitlines().index("KeyError: 'weights'")  # Python 3.11 and later mark the place.
    log = log.relative_to(allranks.folder)
    lines = done.stdout.splitlines()
    assert (done.rc, lines[0].partition(",")[0]) == (0, "failed  rank 1")
    assert lines[1:] == [
        "cause   the script raised KeyError (train.py:3)",
        f"see     {log}:{number}",
        "        KeyError: 'weights'",
        f"fix     correct train.py:3, then: allranks resume {log.parts[1]} "
        "(no checkpoint: from the beginning, unless the script loads its own)",
        "retry   will not help: change the script or its environment first",
        "sure    likely (script-exception)",
    ]
    found = json.loads(allranks("why", "fails", "--json").stdout)["diagnosis"]
    assert (found["id"], found["rank"], found["place"], found["retry"]) == (
        "script-exception",
        1,
        "train.py:3",
        "never",
    )
    assert found["evidence"][0]["file"].endswith(str(log))


def test_a_rank_that_was_killed(allranks: Any) -> None:
    allranks.script(
        "import os\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\nimport time\ntime.sleep(1000)\n"
    )
    allranks("run", "train.py", "--nproc-per-node", "2")
    lines = allranks("why").stdout.splitlines()
    assert lines[0].partition(",")[0] == "failed  rank 1"
    cause = "a process was killed (SIGKILL), and not because memory ran out: by a person, a scheduler or a program"
    assert lines[1] == f"cause   {cause}"
    assert lines[3] == "        control group: SIGKILL, and oom_kill did not grow since the ranks started"
    assert lines[5] == "        rank 1 was killed by SIGKILL"
    assert lines[-1] == "sure    likely (killed-by-another-process)"


def test_a_run_that_did_not_fail(allranks: Any) -> None:
    allranks.script("print('hello')\n")
    allranks("run", "train.py", "--name", "good")
    done = allranks("why")
    assert (done.rc, done.stdout) == (0, "")
    assert done.stderr.startswith("allranks: good-") and done.stderr.endswith(
        " succeeded: there is no failure to explain\n"
    )
    assert json.loads(allranks("why", "--json").stdout) == {"state": "SUCCEEDED", "diagnosis": None}


def test_a_file_of_another_launcher(allranks: Any) -> None:
    (allranks.folder / "slurm-4242.out").write_text(f"epoch 1\n{TRACEBACK}srun: error: node1: task 0: Exited with 1\n")
    done = allranks("why", "slurm-4242.out")
    assert (done.rc, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:3] == [
        "cause   the GPU has too little memory: an allocation of 2.00 GiB failed (train.py:88)",
        "see     slurm-4242.out:5",
        "        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]


def test_several_files_and_a_directory(allranks: Any) -> None:
    folder = allranks.folder / "logs"
    folder.mkdir()
    (folder / "job.e7").write_text("mpirun detected that one or more processes exited with non-zero status\n")
    (folder / "job.o7").write_text(TRACEBACK)
    for targets in (["logs"], ["logs/job.e7", "logs/job.o7"]):
        found = json.loads(allranks("why", *targets, "--json").stdout)["diagnosis"]
        expected = ("cuda-out-of-memory", "the launcher reported that a rank failed")
        assert (found["id"], found["followed"]) == expected


def test_a_pipe(allranks: Any) -> None:
    command = [sys.executable, "-m", "allranks", "why", "-"]
    done = subprocess.run(command, input=TRACEBACK.encode(), capture_output=True, env=allranks.env, check=True)
    assert done.stdout.startswith(b"cause   the GPU has too little memory")
    assert b"\nsee     line 4 of stdin\n" in done.stdout


def test_logs_that_tell_of_no_failure(allranks: Any) -> None:
    (allranks.folder / "good.log").write_text("epoch 1\nepoch 2\n")
    done = allranks("why", "good.log")
    assert (done.rc, done.stdout) == (0, "cause   unknown: no line of good.log tells of a failure\n")
    assert done.stderr.startswith("next: look at what it printed last")
    assert json.loads(allranks("why", "good.log", "--json").stdout) == {"diagnosis": None}


def test_only_consequences_are_no_cause(allranks: Any) -> None:
    text = "[rank0]: RuntimeError: [/build/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:38032\n"
    (allranks.folder / "rank0.log").write_text(text)
    lines = allranks("why", "rank0.log").stdout.splitlines()
    assert lines[1] == "cause   unknown: another rank ended, and gloo lost its connection"
    assert lines[-1] == "sure    unknown (gloo-closed)"


def test_it_needs_no_torch(allranks: Any) -> None:
    (allranks.folder / "a.log").write_text(TRACEBACK)
    code = "import sys; from allranks.cli.main import cli; cli.main(['why', 'a.log'], standalone_mode=False)"
    code += "; assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    assert subprocess.run([sys.executable, "-c", code], cwd=allranks.folder, env=env, check=False).returncode == 0


def test_a_terminal_shows_all_there_is_to_copy(allranks: Any) -> None:
    allranks.script(FAILS)
    allranks("run", "train.py", "--nproc-per-node", "3", "--name", "fails")
    whole = allranks("why").stdout.splitlines()
    shown = at_terminal(allranks, "why", TERM="dumb", COLUMNS="60").decode().split("\r\n")[:-1]
    start = next(at for at, line in enumerate(shown) if line.startswith("fix"))
    fix = shown[start : next(at for at, line in enumerate(shown) if line.startswith("retry"))]
    assert max(map(len, fix)) <= 60
    assert [line[:8].strip() for line in fix] == ["fix", "", ""]
    assert f"fix     {' '.join(line[8:] for line in fix)}" in whole


def test_a_terminal_is_not_obeyed(allranks: Any) -> None:
    (allranks.folder / "a.log").write_bytes(b"ValueError: \x1b]0;title\x07bad \x1b[2J\x00end\n")
    assert "\x1b" not in allranks("why", "a.log").stdout
