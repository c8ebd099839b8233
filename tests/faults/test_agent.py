"""What the agent starts, how, and what it tells of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

from fault_tools import count_imports

from allranks.agent.workers import fork_policy
from waiting import PATIENCE, wait_for

ENVIRONMENT = "import json, os\nwith open('env-' + os.environ['RANK'], 'w') as f: json.dump(dict(os.environ), f)\n"
#: Ours, and not the same for two runs.
OURS = {
    "ALLRANKS_RUN_ID",
    "ALLRANKS_RUN_DIR",
    "ALLRANKS_ATTEMPT",
    "ALLRANKS_STEP_FILE",
    "ALLRANKS_BACKEND",
    "ALLRANKS_DECIDED",
}
OURS |= {"GLOO_SOCKET_IFNAME"}
DIFFERS = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PYTHONPATH", "OMP_NUM_THREADS"}


def _environments(folder):
    found = [json.loads((folder / f"env-{rank}").read_text()) for rank in (0, 1)]
    for rank in (0, 1):
        (folder / f"env-{rank}").unlink()
    return found


#: How the ranks start, and what their script is.
STARTS = {
    "forked": ("--warm", ENVIRONMENT),
    "plain": ("--no-warm", ENVIRONMENT),
    "warm": ("--warm", f"import torch\n{ENVIRONMENT}"),
}


def test_the_environment_is_that_of_torchrun(allranks):
    """It takes more than 10 s: torchrun and then three runs, of which two import torch."""
    allranks.script(ENVIRONMENT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    env = {**allranks.env, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, "train.py"], cwd=allranks.folder, env=env, check=True, capture_output=True, start_new_session=True
    )
    theirs = _environments(allranks.folder)
    for start, (warm, text) in STARTS.items():
        before = {*allranks.runs()}
        allranks.script(text)
        assert allranks("run", "train.py", "--nproc-per-node", "2", warm).rc == 0
        (run,) = {*allranks.runs()} - before
        ours = _environments(allranks.folder)
        for their, our in zip(theirs, ours, strict=True):
            _compare(their, our, run, start)
        assert ("PYTHONUNBUFFERED" in ours[0]) == (start == "plain")


def _compare(their, our, run, start):
    """Compare the environments that torchrun and the agent have given to a rank of the same number."""
    shell = {"PWD", "SHLVL", "OLDPWD", "_", "PYTHONUNBUFFERED", "LC_CTYPE"}
    assert set(our) - shell - set(their) == OURS | {"PYTHONPATH", "PYTHONBREAKPOINT"}, start
    # Where a torchrun has that one, it is about torchrun's own signals.
    assert set(their) - shell - set(our) - {"TORCHELASTIC_SIGNALS_TO_HANDLE"} == set(), start
    known = (set(their) & set(our)) - shell - DIFFERS
    addresses = {"MASTER_ADDR"}
    assert {n: our[n] for n in known - addresses} == {n: their[n] for n in known - addresses}, start
    assert our["TORCHELASTIC_RUN_ID"] == our["ALLRANKS_RUN_ID"] == run.name
    assert our["ALLRANKS_RUN_DIR"] == str(run)
    assert our["MASTER_ADDR"] == "127.0.0.1"
    assert "ALLRANKS_LIFELINE" not in our


def test_torch_is_imported_once_for_all_ranks(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent imports torch."""
    imports, env = count_imports(allranks)
    allranks.script("import os, torch\nprint(os.getpid(), torch.ones(1).item())\n")
    assert allranks("run", "train.py", "--nproc-per-node", "3", **env).rc == 0
    assert imports.read_text() == f"{watch.agent()}\n"
    assert watch.event("agent-started")["plain"] is None
    assert len({(watch.node / f"rank-{rank}.out").read_text() for rank in range(3)}) == 3


def test_what_an_optimizer_imports_is_imported_once_on_a_machine_without_a_gpu(allranks):
    """It takes more than 10 s on a slow machine: the agent imports torch, and what an optimizer needs."""
    allranks.script("import sys\nfrom torch import optim\nprint('torch._dynamo' in sys.modules)\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    is_shared = not any(device.exists() for device in fork_policy._GPU_DEVICES)
    assert (done.rc, done.by_rank) == (0, {0: [str(is_shared)], 1: [str(is_shared)]})


def test_plain_ranks_import_torch_themselves(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent and both ranks import torch."""
    imports, env = count_imports(allranks)
    allranks.script("import torch")
    assert allranks("run", "train.py", "--nproc-per-node", "2", "--no-warm", **env).rc == 0
    assert len(set(imports.read_text().split())) == 3
    assert watch.event("agent-started")["plain"] == "launch.warm is false"


def test_an_import_that_leaves_a_thread_makes_ranks_plain(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent imports torch."""
    start = "threading.Thread(target=time.sleep, args=(300,), daemon=True).start()"
    thread = f"            import threading, time\n            {start}\n"
    _, env = count_imports(allranks, thread)
    allranks.script("import os, sys\nprint(os.environ.get('ALLRANKS_PLAIN_BECAUSE'), 'torch' in sys.modules)\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2", **env)
    assert (done.rc, done.by_rank) == (0, {0: ["None False"], 1: ["None False"]})
    started = watch.event("agent-started")
    assert started["plain"] == "importing torch left 1 threads running"
    assert started["pid"] == watch.agent()


def test_a_script_that_sets_threads_before_torch_gets_its_way(allranks, watch):
    """It takes more than 10 s on a slow machine: the agent and the rank import torch."""
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\nprint(torch.get_num_threads())\n"
    allranks.script(text)
    assert allranks("run", "train.py", OMP_NUM_THREADS="2").stdout == "[0] 1\n"
    why = "train.py sets OMP_NUM_THREADS, which is read while torch is imported"
    assert watch.event("agent-started")["plain"] == why


def test_interpreter_options_reach_the_ranks(allranks, watch):
    allranks.script("import sys\nprint(sys.flags.optimize, sys.argv[1:])\nassert False\n")
    done = allranks("run", "train.py", "--python", f"{sys.executable} -O", "--", "--optimize")
    assert (done.rc, done.stdout) == (0, "[0] 1 ['--optimize']\n")
    assert watch.event("agent-started")["plain"] == "the interpreter has options: -O"


def test_a_program_runs_too(allranks, watch):
    script = allranks.script('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $1"\nexit 4\n', "job.sh")
    script.chmod(0o755)
    done = allranks("run", "--binary", "./job.sh", "--", "a b")
    assert (done.rc, done.stdout) == (4, "[0] 0 of 1: a b\n")
    assert watch.event("agent-started")["plain"] == "the job runs a program, not Python"


LOADER = """\
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index ** 2)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.ones(600, 600) @ torch.ones(600, 600)  # A parallel region, before workers are forked.
    for method, workers in (("fork", 2), ("spawn", 1)):  # Each that is spawned imports torch.
        total = sum(b.sum() for b in DataLoader(Squares(), 2, num_workers=workers, multiprocessing_context=method))
        dist.all_reduce(total)
        print(method, int(total), flush=True)
    dist.destroy_process_group()
"""


def test_data_loader_workers_start_by_fork_and_by_spawn(allranks, watch):
    """It takes more than 10 s on a slow machine: workers that are spawned import torch."""
    allranks.script(LOADER)
    done = allranks("run", "train.py", "--nproc-per-node", "2", OMP_NUM_THREADS="2")
    assert (done.rc, done.by_rank) == (0, {rank: ["fork 280", "spawn 280"] for rank in (0, 1)}), done.stderr
    watch.nothing_left()


def _shape(event):
    return {name: value for name, value in event.items() if name not in ("time", "host", "pid", "ended", "ranks")}


#: Rank 1 ends when rank 0 has ended, and has been reaped: only then its process id is no one's.
ONE_AFTER_THE_OTHER = """\
import os, time
print(1)
if os.environ["RANK"] == "0":
    with open("first.tmp", "w") as file:
        file.write(f"/proc/{os.getpid()}")
    os.rename("first.tmp", "first")
else:
    while not os.path.exists("first") or os.path.exists(open("first").read()):
        time.sleep(.01)
"""


def test_the_events_of_a_run(allranks, watch):
    allranks.script(ONE_AFTER_THE_OTHER)
    assert allranks("run", "train.py", "--nproc-per-node", "2").rc == 0
    started, ranks, *exits, ended = watch.events()
    assert set(started) == {"time", "host", "kind", "pid", "began", "python", "torch", "plain"}
    assert started["host"] == os.uname().nodename
    assert started["python"] == sys.executable
    assert _shape(ranks) == {
        "kind": "ranks-started",
        "restart": 0,
        "world_size": 2,
        "nodes": 1,
        "master_addr": "127.0.0.1",
        "master_port": ranks["master_port"],
    }
    assert [(rank["rank"], rank["local_rank"]) for rank in ranks["ranks"]] == [(0, 0), (1, 1)]
    assert [_shape(event) for event in exits] == [{"kind": "rank-exited", "rank": n, "code": 0} for n in (0, 1)]
    assert [event["pid"] for event in exits] == [rank["pid"] for rank in ranks["ranks"]]
    assert exits[0]["ended"] <= exits[1]["ended"]
    assert _shape(ended) == {
        "kind": "ended",
        "state": "SUCCEEDED",
        "exit_code": 0,
        "reason": None,
        "because_of_rank": None,
        "lost": [],
    }
    assert (watch.node / "lines.idx").exists()
    names = {path.name for path in watch.node.iterdir()}
    assert names >= {"agent.jsonl", "agent.log", "heartbeat", "rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err"}
    assert {path.stat().st_mode & 0o777 for path in watch.node.iterdir()} == {0o600}


def test_the_events_of_a_run_that_failed(allranks, watch):
    allranks.script("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 37)\ntime.sleep(300)\n")
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    assert done.rc == 128 + 37
    _, _, first, second, ended = watch.events()
    assert _shape(first) == {"kind": "rank-exited", "rank": 1, "code": -37}
    assert _shape(second) == {"kind": "rank-exited", "rank": 0, "code": -15}
    reason = "rank 1 was killed by signal 37"
    assert _shape(ended) == {
        "kind": "ended",
        "state": "FAILED",
        "exit_code": 165,
        "reason": reason,
        "because_of_rank": 1,
        "lost": [],
    }


def test_the_heart_beats(allranks, watch):
    allranks.script("import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    process = allranks.popen("run", "train.py")
    watch.line(0, "up")
    first = (watch.node / "heartbeat").read_text()
    assert re.fullmatch(r"\d{10}\.\d{6}\n", first)
    second = wait_for("a second beat", lambda: (beat := (watch.node / "heartbeat").read_text()) != first and beat)
    assert 0.45 < float(second) - float(first) < 30  # A tenth of 5 s. After 30 s without one, a run counts as lost.
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143


def test_ten_jobs_at_once(allranks, finish):
    allranks.script("import os\nprint(os.environ['MASTER_PORT'], os.environ['ALLRANKS_RUN_ID'])\n")
    started = [allranks.popen("run", "train.py", "--nproc-per-node", "2") for _ in range(10)]
    results = [finish(process) for process in started]
    assert [code for code, _, _ in results] == [0] * 10, results
    said = [out.split() for _, out, _ in results]
    assert len({words[1] for words in said}) == 10
    assert {words[2] for words in said} == {run.name for run in allranks.runs()}
    assert len(allranks.runs()) == 10
