"""``allranks test`` with two ranks on this machine: all is right, or what is not is named."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from fault_tools import Watch

from allranks.system.processes import marked
from trial_faults import hurt
from waiting import wait_for

TWO = ("--nproc-per-node", "2", "--backend", "gloo")
ENDED = "rank 1 exited with code 1"
HOST = socket.gethostname()
COLLECTIVES = [
    *("all_reduce int64", "all_reduce float32", "broadcast from rank 0", "broadcast from rank 1", "all_gather"),
    *("reduce_scatter", "all_to_all", "gather", "scatter", "send and receive", "barrier", "all_gather_object"),
]
SIZES = [f"{1 << power} KiB" for power in range(0, 10, 2)] + [f"{1 << power} MiB" for power in range(0, 8, 2)]


def told(done: Any) -> dict[str, dict[str, Any]]:
    """Return the parts of a test with --json, by name."""
    return {part["name"]: part for part in json.loads(done.stdout)["parts"]}


def test_all_is_right(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch, measure, and train."""
    done = allranks("test", *TWO, "--json")
    assert done.rc == 0, done.stderr
    found, parts = json.loads(done.stdout), told(done)
    ways = [f"rank {one} on {HOST} to rank {1 - one} on {HOST}" for one in (0, 1)]
    # A message that takes long is the last one, which may be so on a machine that is busy.
    sizes = [f"all_reduce of {size}" for size in SIZES if f"all_reduce of {size}" in parts]
    assert [*parts] == [*COLLECTIVES, *sizes, *ways, "training (auto)"]
    assert found["good"]
    assert {(part["wrong"], part["why_not"]) for part in parts.values()} == {("", "")}
    assert [(who["rank"], who["host"], who["local_rank"], who["device"]) for who in found["ranks"]] == [
        (rank, HOST, rank, "cpu") for rank in (0, 1)
    ]
    losses = parts["training (auto)"]["losses"]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 100
    assert allranks.record()["name"] == "test"
    assert not (allranks.folder / "runs" / "latest").exists()


def test_one_rank_alone(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: the rank imports torch, and trains in two ways."""
    done = allranks("test", "--nproc-per-node", "1", "--backend", "gloo", "--full", "--json")
    assert done.rc == 0, done.stderr
    parts = told(done)
    names = [name for name in COLLECTIVES if name != "broadcast from rank 1"]
    assert [*parts] == [*names, "training (auto)", "training (ddp)"]
    skipped = {name: part["why_not"] for name, part in parts.items() if part["why_not"]}
    assert skipped == {"send and receive": "one rank has no neighbour"}


def test_the_job_gives_all_but_its_script(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch, measure, and train."""
    allranks.job(
        "script: gone.py\nargs: [--epochs, '3']\nlaunch: {nproc_per_node: 2, backend: gloo, max_restarts: 3}\n"
        "environment: {variables: {SEEN: yes}}\n"
    )
    assert allranks("test").rc == 0
    job = (allranks.run() / "job.yaml").read_text()
    assert "gone.py" not in job
    assert "epochs" not in job
    assert "max_restarts: 0" in job
    assert "SEEN:" in job


def test_a_wrong_result_is_named_with_its_rank(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch, each for itself."""
    done = allranks("test", *TWO, *hurt(allranks.folder / "site", "broadcast: is wrong", "rank 1"))
    assert done.rc == 3
    lines = done.stdout.splitlines()
    assert lines[1 + 2].startswith("broadcast from rank 0  WRONG ")
    assert lines[1 + 3] == f"  on rank 1 on {HOST}: number 3 must be 4, and is 5"
    assert not any(line.startswith(("all_reduce of", "training")) for line in lines)
    assert done.stderr.splitlines()[-4:] == [
        f"error: {allranks.run().name}: broadcast from rank 0, and 1 other part of the test went wrong",
        f"  why: on rank 1 on {HOST}: number 3 must be 4, and is 5",
        "  fix: allranks check --full, with the same job, looks at all that the machine has",
        f"  see: runs/{allranks.run().name}/attempts/000",
    ]


def test_large_messages_that_are_wrong(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch, and the ranks train."""
    done = allranks("test", *TWO, "--json", *hurt(allranks.folder / "site", "all_reduce: is wrong for many", "rank 1"))
    assert done.rc == 3
    assert not json.loads(done.stdout)["good"]
    wrong = {name: part["wrong"] for name, part in told(done).items() if part["wrong"]}
    assert wrong.pop("all_reduce of 1 KiB") == f"on rank 1 on {HOST}: all numbers must be 3, and are 3 to 4"
    assert wrong.pop("training (auto)").startswith(f"on all ranks; on rank 0 on {HOST}: the loss of step ")
    assert wrong == {}


def test_what_a_backend_lacks_is_skipped_with_its_words(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch, and the ranks train."""
    fault = hurt(allranks.folder / "site", "reduce_scatter: is lacking", "rank 1")
    fault_of_all = [word.replace("FAULT_AT=rank 1", f"FAULT_AT={HOST}") for word in fault]
    done = allranks("test", *TWO, *fault_of_all)
    assert done.rc == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("reduce_scatter"))
    assert lines[at].split() == ["reduce_scatter", "skipped"]
    assert lines[at + 1] == "  ProcessGroupNone does not support reduce_scatter"


@pytest.mark.parametrize(
    ("fault", "code", "error", "place"),
    [
        ("all_to_all_single: dies", 137, "rank 1 was killed by SIGKILL", " in all_to_all"),
        (
            "no torch",
            1,
            "rank 1 exited with code 1\n  why: ModuleNotFoundError: No module named 'torch'",
            "not there",
        ),
    ],
)
def test_a_rank_that_fails(allranks: Any, fault: str, code: int, error: str, place: str) -> None:
    """It takes more than 10 s on a slow machine: the agent and the ranks import torch, each for itself."""
    done = allranks("test", *TWO, *hurt(allranks.folder / "site", fault, "rank 1"))
    assert done.rc == code
    assert f"\nerror: {error}" in done.stderr
    assert place in next(line for line in done.stderr.splitlines() if "it ended with " in line)


def test_a_rank_that_hangs(allranks: Any) -> None:
    """It takes more than 10 s: the agent and both ranks import torch, each for itself, and rank 0 waits for 6 s."""
    fault = hurt(allranks.folder / "site", "all_to_all_single: hangs", "rank 1", together=2)
    done = allranks("test", *TWO, *fault, "--timeout", "6", "--stop-timeout", "2")
    assert done.rc == 1
    assert "it ended with 2 ranks in all_to_all\n" in done.stderr
    assert "\nerror: rank 0 exited with code 1\n" in done.stderr


def test_ctrl_c_ends_all_ranks(allranks: Any, watch: Watch, finish: Any) -> None:
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch, each for itself."""
    process = allranks.popen("test", *TWO, *hurt(allranks.folder / "site", "all_to_all_single: hangs", "rank 1"))
    watch.line(1, 'allranks-trial OperationStarted {"rank": 1, "name": "all_to_all"}')
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert "was cancelled" in err
    watch.no_rank_left()
    watch.nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_trial_of_a_check(allranks: Any, finish: Any, number: signal.Signals, code: int) -> None:
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch, each for itself."""
    fault = hurt(allranks.folder / "site", "all_to_all_single: hangs", "rank 1")
    process = allranks.popen("check", "--only", "all-reduce", *TWO, *fault)

    def hanging() -> list[Path]:
        logs = allranks.folder.glob("runs/.look-*/*/attempts/000/*/rank-1.out")
        return [log for log in logs if '"name": "all_to_all"' in log.read_text()]

    (log,) = wait_for("rank 1 to hang", hanging)
    process.send_signal(number)
    ended, out, err = finish(process)
    assert (ended, out) == (code, "")
    assert f"allranks: check: {number.name}: test-" in err
    assert [*allranks.folder.glob("runs*")] == []
    assert marked("ALLRANKS_RUN_DIR", str(log.parents[3])) == []


def test_a_port_that_is_taken_is_told_as_a_run_tells_it(allranks: Any) -> None:
    (allranks.folder / "train.py").write_text("print('up')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = ("--master-port", str(taken.getsockname()[1]))
        test, run = allranks("test", *TWO, *port), allranks("run", "train.py", *TWO, *port, "--no-check")
    assert (test.rc, test.stdout) == (run.rc, "")
    assert test.stderr.splitlines()[-3:] == run.stderr.splitlines()[-3:]


def test_torchs_own_launcher_is_refused(allranks: Any) -> None:
    done = allranks("test", *TWO, "--no-agent")
    assert (done.rc, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: the self-test needs allranks' agent, and torch's own launcher starts ranks without it",
        "  why: launch.agent is false",
        "  fix: allranks test --agent --launcher torchrun",
    ]
    assert allranks.runs() == []


def test_a_full_check_tries_the_ranks_too(allranks: Any) -> None:
    """It takes more than 10 s: two checks start ranks that import torch, and those of the first train in two ways."""
    names = ("--only", "nodes,all-reduce,bandwidth,neighbours,training")
    good = allranks("check", *TWO, "--full", *names, "--json")
    assert good.rc == 0, good.stderr
    grades = [(each["check"], each["grade"]) for each in json.loads(good.stdout)["checks"]]
    parts = [(name, "PASS") for name in ("nodes", "all-reduce", "bandwidth", "neighbours", "training", "training")]
    assert grades == parts
    assert not (allranks.folder / "runs").exists()
    fault = hurt(allranks.folder / "site", "all_to_all_single: dies", "rank 1")
    bad = allranks("check", *TWO, *names, "--json", *fault)
    assert bad.rc == 3
    found = {each["check"]: (each["grade"], each["what"]) for each in json.loads(bad.stdout)["checks"]}
    grade, what = found["all-reduce"]
    assert grade == "FAIL"
    assert what.startswith("rank 1 was killed by SIGKILL; it ended with ")
    skipped = ("SKIP", "no rank got as far as measuring it")
    assert (found["bandwidth"], found["neighbours"]) == (skipped, skipped)
