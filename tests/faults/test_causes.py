"""What `why:` says of the ways in which trainings fail: the cause, and neither a library's last words nor a victim."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from waiting import ALL_HERE

#: What stands in for the text of a library that is not here: printed, as it prints it, by a process that aborts.
ABORTS = "import os, sys\nprint({text!r}, file=sys.stderr, flush=True)\nos.abort()\n"
ASSERTED = """\
CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FRAMES = """\
Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2a in /lib/libc10.so)
frame #2: clone + 0x40 (0x7f2c in /lib/libc.so.6)
"""
TERMINATED = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  "
TIMED_OUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
)
WATCHDOG = f"""\
[rank0]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] {TIMED_OUT}
[rank0]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:698] [Rank 0] To avoid data inconsistency, we are taking it down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] \
{TIMED_OUT}
{FRAMES}"""
WANDB = "wandb: 🚀 View run tidy-1 at: https://wandb.ai/me\nwandb: Find logs at: wandb/run-1/logs"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB."
HYDRA = """\
import sys, traceback
try:
    {}["lr"]
except KeyError:
    traceback.print_exc()
    print("\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", file=sys.stderr)
    sys.exit(1)
"""
CPP_STACK = "\\nException raised from meta at R.cpp:4:\\nC++ CapturedTraceback:\\n#4 f from ??:0\\n#38 _start from ??:0"
#: Of the third line.
ZERO = "ZeroDivisionError: division by zero (train.py:3)"
ALONE: dict[str, tuple[str, str | None]] = {
    "ValueError": ("def f(n):\n    raise ValueError(f'bad {n}')\n\nf(3)\n", "ValueError: bad 3 (train.py:2)"),
    "KeyError": ("{}['weights']", "KeyError: 'weights' (train.py:1)"),
    "no module": ("import nothing_here", "ModuleNotFoundError: No module named 'nothing_here' (train.py:1)"),
    "no file": ("open('no.csv')", "FileNotFoundError: [Errno 2] No such file or directory: 'no.csv' (train.py:1)"),
    "syntax": (
        "open('broken.py', 'w').write('import os\\nif True\\n')\nimport broken\n",
        "SyntaxError: expected ':' (broken.py:2)",
    ),
    "in a library": ("import json\njson.loads('{')\n", r"json.decoder.JSONDecodeError: Expecting .* \(train.py:2\)"),
    "assertion": ("assert 1 == 2, 'shapes differ'", "AssertionError: shapes differ (train.py:1)"),
    "bare assertion": ("assert 1 == 2", "AssertionError (train.py:1)"),
    "recursion": ("def f():\n    f()\n\nf()\n", r"RecursionError: maximum recursion depth exceeded.* \(train.py:2\)"),
    "from": (
        "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('no a') from e\n",
        "RuntimeError: no a (train.py:4)",
    ),
    "context": (
        "try:\n    {}['a']\nexcept KeyError:\n    raise RuntimeError('no a')\n",
        "RuntimeError: no a (train.py:4)",
    ),
    "several lines": ("raise RuntimeError('first\\nsecond')", "RuntimeError: first (train.py:1)"),
    "an empty first line": ("raise RuntimeError('\\n\\nbad state\\n')", "RuntimeError: bad state (train.py:1)"),
    "C++ stack": (f"raise RuntimeError('mat1 and mat2{CPP_STACK}')", "RuntimeError: mat1 and mat2 (train.py:1)"),
    "exit text": ("import sys\nsys.exit('no such data')\n", "no such data"),
    "exit text of several lines": ("import sys\nsys.exit('no such data\\nsee the wiki')\n", "no such data"),
    "exit text after a caught error": (
        "import sys, traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        "sys.exit('no such data')\n",
        "no such data",
    ),
    "arguments": (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n",
        "train.py: error: the following arguments are required: data",
    ),
    "exit 3": ("import sys\nsys.exit(3)\n", None),
    "exit 3 after a warning": ("import sys, warnings\nwarnings.warn('odd')\nsys.exit(3)\n", None),
    "os._exit": ("import os\nos._exit(7)\n", None),
    "SIGKILL": (
        "import os\nos.kill(os.getpid(), 9)\n",
        "the kernel did not kill it for its memory: a person, a scheduler or another program did",
    ),
    "SIGSEGV": ("import os\nos.kill(os.getpid(), 11)\n", None),
    "SIGSEGV, faulthandler": (
        "import faulthandler, os\nfaulthandler.enable()\nos.kill(os.getpid(), 11)\n",
        "Fatal Python error: Segmentation fault (train.py:3)",
    ),
    "abort, faulthandler": (
        "import faulthandler, os\nfaulthandler.enable()\nos.abort()\n",
        "Fatal Python error: Aborted (train.py:3)",
    ),
    "C++": (ABORTS.format(text=TERMINATED + "no kernel image\n" + FRAMES), "no kernel image"),
    "device assert": (
        f"raise RuntimeError({ASSERTED!r})",
        "RuntimeError: CUDA error: device-side assert triggered (train.py:1)",
    ),
    "device assert, C++": (
        ABORTS.format(text=TERMINATED + ASSERTED + FRAMES),
        "CUDA error: device-side assert triggered",
    ),
    "out of memory on a GPU": (f"raise MemoryError({OUT_OF_MEMORY!r})", f"MemoryError: {OUT_OF_MEMORY} (train.py:1)"),
    "NCCL's watchdog": (ABORTS.format(text=WATCHDOG), TIMED_OUT),
    "hydra": (HYDRA, "KeyError: 'lr' (train.py:3)"),
    "wandb": (f"import atexit, sys\natexit.register(print, {WANDB!r}, file=sys.stderr)\n1 / 0\n", ZERO),
    "leaked memory": (
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=1)\n1 / 0\n",
        ZERO,
    ),
    "destructor": ("class C:\n    __del__ = lambda self: {}['late']\nc = C(); 1 / 0\n", ZERO),
    "exit handler": ("import atexit\natexit.register(lambda: {}['late'])\n1 / 0\n", ZERO),
    "thread": (
        "import sys, threading\nt = threading.Thread(target=lambda: {}['a'])\nt.start()\nt.join()\nsys.exit(1)\n",
        "KeyError: 'a' (train.py:2)",
    ),
    "ours": (
        "from allranks.errors import RankError\nraise RankError('no room', why='full', fix='free it')\n",
        "no room",
    ),
}
if sys.version_info >= (3, 11):
    ALONE["group"] = ("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])", "ValueError: 1; TypeError: 2")

#: Rank 0 fails and takes its time to end, as one does that waits for its GPU, its workers or its tracker.
FAILS_FIRST = """\
import atexit, os, time
def leave():
    open("failed", "w").close()
    time.sleep(1000)
if os.environ["RANK"] == "0":
    atexit.register(leave)
    {}["weights"]
while not os.path.exists("failed"):
    time.sleep(.01)
raise ConnectionResetError("Connection reset by peer")
"""
PAIR = "import time, torch, torch.distributed as dist\nfrom datetime import timedelta\n"
MEET = f"{PAIR}dist.init_process_group('gloo', timeout=timedelta(seconds=TIMEOUT))\n"
LETS_GO = f"""\
{MEET}import atexit, os
def leave():
    open("said", "w").close()
    time.sleep(1000)
try:
    if dist.get_rank() == 1:
        atexit.register(leave)
        raise ValueError("no data")
    dist.all_reduce(torch.ones(1))
finally:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    else:
        while not os.path.exists("said"):  # Rank 1's words are on record by then.
            time.sleep(.01)
"""
TOGETHER: dict[str, tuple[str, int, str]] = {
    "all": (
        MEET + "torch.ones(2, 3) @ torch.ones(4, 5)\n",
        -1,
        r"RuntimeError: mat1 and mat2 shapes cannot be multiplied .* \(train.py:4\)",
    ),
    "one of two": (
        MEET + "if dist.get_rank() == 1:\n    raise ValueError('no data')\ndist.all_reduce(torch.ones(1))\n",
        1,
        r"ValueError: no data \(train.py:5\)",
    ),
    "one of two, which lets go of the group and ends last": (LETS_GO, 1, r"ValueError: no data \(train.py:11\)"),
    "one has finished": (
        MEET + "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))\n",
        0,
        r"rank 1 exited with code 0 while rank 0 was in a collective \(train.py:5\)",
    ),
    "a timeout": (
        f"{ALL_HERE}all_here(0, 1)\n"
        + MEET.replace("TIMEOUT", "5")
        + "if dist.get_rank() == 1:\n    time.sleep(1000)\ndist.all_reduce(torch.ones(1))\n",
        0,
        r"rank 1 was still running when a collective of rank 0 timed out \(train.py:16\)",
    ),
    "a worker": (
        "from torch.utils.data import DataLoader\nclass Data:\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, i):\n        raise ValueError(f'bad {i}')\n"
        "list(DataLoader(Data(), num_workers=1))\n",
        -1,
        r"ValueError: bad 0 \(train.py:6\)",
    ),
}


def cause(allranks: Any) -> str | None:
    """Return the cause on record, which is also what the error, and `status`, say."""
    status = allranks.record()["status"]
    assert status["state"] == "FAILED"
    found: str | None = status["cause"]
    return found


#: The verdict on each: rule, how sure it is, and whether a retry can help. All others are exceptions of the script.
OWN = ("script-exception", "likely", "never")
OF_THE_CODE = ("script-exception", "certain", "never")
OF_A_LIBRARY = ("library-exception", "likely", "never")
UNKNOWN = ("", "unknown", "")
EXITED = ("script-exit", "certain", "never")
CRASHED, ABORTED = ("segmentation-fault", "likely", "after a change"), ("abort", "likely", "after a change")
VERDICTS = {
    "no module": ("import-missing", "certain", "never"),
    "no file": ("file-not-found", "certain", "after a change"),
    "syntax": ("syntax-error", "certain", "never"),
    "in a library": OF_A_LIBRARY,
    "several lines": OF_A_LIBRARY,
    "an empty first line": OF_A_LIBRARY,
    "C++ stack": OF_A_LIBRARY,
    "ours": ("own-error", "likely", "never"),
    "exit text": EXITED,
    "exit text of several lines": EXITED,
    "exit 3": UNKNOWN,
    "exit 3 after a warning": UNKNOWN,
    "os._exit": UNKNOWN,
    "arguments": ("arguments", "certain", "never"),
    "SIGKILL": ("killed-by-another-process", "likely", "as it is"),
    "SIGSEGV": CRASHED,
    "SIGSEGV, faulthandler": CRASHED,
    "abort, faulthandler": ABORTED,
    "C++": ABORTED,
    "device assert": ("device-assert", "certain", "never"),
    "device assert, C++": ("device-assert", "certain", "never"),
    "out of memory on a GPU": ("cuda-out-of-memory", "certain", "after a change"),
    "NCCL's watchdog": ("nccl-timeout", "unknown", ""),
    "all": ("shape-mismatch", "certain", "never"),
    "one has finished": ("rank-finished", "likely", "never"),
    "a timeout": ("rank-late", "likely", "after a change"),
    "a worker": ("dataloader-worker-error", "likely", "never"),
    **dict.fromkeys(("recursion", "wandb", "leaked memory", "destructor", "exit handler"), OF_THE_CODE),
}


def verdict(allranks: Any) -> tuple[tuple[str, str, str], int]:
    """Return what the run keeps of the verdict, and the rank that it names."""
    found = json.loads((allranks.run() / "diagnosis.json").read_text())["diagnosis"]
    return (found["id"], found["sure"], found["retry"]), found["rank"]


@pytest.mark.parametrize("kind", ALONE)
def test_the_cause_of_a_rank_that_fails(allranks: Any, kind: str) -> None:
    script, expected = ALONE[kind]
    allranks.script(script)
    done = allranks("run", "train.py")
    assert done.rc != 0
    found = cause(allranks)
    if found != expected:
        assert found
        assert expected
        assert re.fullmatch(expected, found), found
    said = found or ("it wrote nothing to stderr" if kind in ("exit 3", "os._exit") else None)
    why = f"\n  why: {said}\n" if said else "\n  fix: "
    assert re.search(rf"\nerror: rank 0 [^\n]*{re.escape(why)}", "\n" + done.stderr)
    assert verdict(allranks) == (VERDICTS.get(kind, OWN), 0)


def test_the_cause_stays_known(allranks: Any) -> None:
    allranks.script("1 / 0")
    allranks("run", "train.py")
    assert re.search(r"^cause +ZeroDivisionError: division by zero \(train.py:1\)$", allranks("status").stdout, re.M)


def test_a_rank_that_was_left_alone_is_not_to_blame(allranks: Any) -> None:
    allranks.script(FAILS_FIRST)
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--stop-timeout", "5")
    assert "error: rank 0 failed\n  why: KeyError: 'weights' (train.py:7)\n" in done.stderr
    status = allranks.record()["status"]
    assert (done.rc, status["rank"], status["cause"]) == (1, 0, "KeyError: 'weights' (train.py:7)")


def test_an_error_before_a_restart_is_not_the_cause(allranks: Any) -> None:
    allranks.script(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('once')\nos._exit(5)\n"
    )
    assert allranks("run", "train.py", "--max-restarts", "1").rc == 5
    assert cause(allranks) is None


def test_the_verdict_is_on_the_last_of_several_failures(allranks: Any) -> None:
    allranks.script(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    {}['w']\nraise ValueError('labels')\n"
    )
    assert allranks("run", "train.py", "--max-restarts", "1").rc == 1
    found = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    evidence = [line["text"] for line in found["evidence"]]
    assert (found["place"], evidence, found["sure"]) == ("train.py:4", ["ValueError: labels"], "likely")


@pytest.mark.parametrize("kind", TOGETHER)
def test_the_cause_of_ranks_that_meet(allranks: Any, kind: str) -> None:
    """It takes more than 10 s: two ranks import torch."""
    script, rank, expected = TOGETHER[kind]
    allranks.script(script.replace("TIMEOUT", "60"))
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    found = cause(allranks)
    assert found
    assert re.fullmatch(expected, found), found
    is_of_others = kind in ("all", "one has finished", "a timeout")
    assert ("\n  fix: correct train.py:" in done.stderr) == (not is_of_others), done.stderr
    assert rank in (-1, allranks.record()["status"]["rank"])
    kept, named = verdict(allranks)
    assert kept == VERDICTS.get(kind, OWN)
    assert rank in (-1, named)
