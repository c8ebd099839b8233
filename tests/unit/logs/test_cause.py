"""Which line of what a process wrote to stderr says why it ended."""

from __future__ import annotations

import pytest

from allranks import contract
from allranks.errors import RankError
from allranks.logs.cause import find_cause

#: How Python shows an error of ours, in a rank and outside.
OURS = (
    f"Traceback (most recent call last):\nallranks.errors.RankError: {RankError('no room', why='full', fix='free it')}"
)
VALUE_ERROR = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/net.py", line 12, in main
    torch.stack(rows)
  File "/home/me/.venv/lib/python3.11/site-packages/torch/functional.py", line 3, in stack
    return _stack(rows)
ValueError: no rows
"""
PLACED = "ValueError: no rows (net.py:12)"
CPP_STACK = """\
Exception raised from meta at /pytorch/build/aten/src/ATen/RegisterCPU.cpp:4 (most recent call first):
C++ CapturedTraceback:
#4 std::_Function_handler<std::shared_ptr<c10::LazyValue> ()>::_M_invoke from Logging.cpp:0
#5 c10::Error::Error(c10::SourceLocation, std::string) from ??:0
#38 _start from ??:0
"""
DEVICE_ASSERT = """\
/pytorch/aten/src/ATen/native/cuda/Loss.cu:250: nll_loss: block: [0,0,0], thread: [5,0,0] Assertion `t >= 0` failed.
Traceback (most recent call last):
  File "train.py", line 20, in <module>
    loss.item()
torch.AcceleratorError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""
HINTS = "".join(line + "\n" for line in DEVICE_ASSERT.splitlines()[5:])
TIMED_OUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
)
ENDS_WITH = f"Process group watchdog thread terminated with exception: [Rank 0] {TIMED_OUT}"
FRAMES = """\
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:635 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2a in /lib/libc10.so)
frame #1: <unknown function> + 0xdbbf4 (0x7f2b in /lib/libstdc++.so.6)
frame #2: clone + 0x40 (0x7f2c in /lib/libc.so.6)

"""  # noqa: E501
ABORTED = """\
Fatal Python error: Aborted

Thread 0x00007f2a (most recent call first):
  File "/home/me/train.py", line 31 in <module>
"""
WATCHDOG = f"""\
[rank0]:[E1122 10:00:00.000000000 ProcessGroupNCCL.cpp:632] [Rank 0] {TIMED_OUT}
[rank0]:[E1122 10:00:00.000000000 ProcessGroupNCCL.cpp:698] [Rank 0] To avoid data inconsistency, we end the process.
[rank0]:[E1122 10:00:00.000000000 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 0] {ENDS_WITH}
{FRAMES}terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] {ENDS_WITH}
{FRAMES}"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 3, in <module>
  |     raise ExceptionGroup("all", [...])
  | ExceptionGroup: all (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/data.py", line 7, in read
    |     raise OSError("gone")
    | OSError: gone
    +---------------- 2 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "/home/me/data.py", line 8, in read
    |     raise ExceptionGroup("more", [...])
    | ExceptionGroup: more (1 sub-exception)
    +-+---------------- 1 ----------------
      | KeyError: 'x'
      +------------------------------------
"""
SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/train.py", line 3 in read
  File "/home/me/train.py", line 5 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
#: Below the user's line are files of a run's copy of allranks, one in each of its directories.
IN_OURS = "Traceback (most recent call last):\n" + "".join(
    f'  File "{file}", line 3, in a\n'
    for file in (
        "/home/me/train.py",
        "/home/me/runs/x-1/code/allranks/__init__.py",
        *(f"/home/me/runs/x-1/code/allranks/{part}/a.py" for part in contract.NODE_CODE if "." not in part),
    )
)
IN_OURS += "ValueError: invalid rank\n"
WORKER = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    for batch in loader:
  File "/opt/lib/python3.11/site-packages/torch/_utils.py", line 7, in reraise
    raise exception
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 8, in __getitem__
    raise ValueError("bad sample 3")
ValueError: bad sample 3

"""
IGNORED = """\
Exception ignored in: <function Loader.__del__ at 0x7f>
Traceback (most recent call last):
  File "/home/me/data.py", line 40, in __del__
AttributeError: 'Loader' object has no attribute 'file'
"""
LEAKED = """\
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 6 leaked
semaphore objects
  warnings.warn('resource_tracker: There appear to be %d '
"""
WANDB = "wandb: \nwandb: 🚀 View run tidy-1 at: https://wandb.ai/me\nwandb: Find logs at: wandb/run-1/logs\n"
HYDRA = "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
SYNTAX = "  File \"/home/me/train.py\", line 2\n    if True\n           ^\nSyntaxError: expected ':'\n"
STORE = "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /a\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("\n  \n", None),
        ("Traceback\nValueError: boom\n", "ValueError: boom"),
        ("no data here\n", "no data here"),
        (VALUE_ERROR, PLACED),
        (VALUE_ERROR.replace("\n", "\n[rank0]: "), PLACED),
        (VALUE_ERROR + VALUE_ERROR.replace("no rows", "b"), "ValueError: b (net.py:12)"),
        (SYNTAX, "SyntaxError: expected ':' (train.py:2)"),
        (OURS, "no room"),
        (OURS.replace("\n", "\n[rank0]: "), "no room"),
        (OURS + "\n[W1122 21:52:22 socket.cpp:1] a warning\n\n", "no room"),
        (OURS + "\nlast words\n", "no room"),
        ("allranks: error: no room\n  why: full\n", "no room"),
        ("allranks: stopping at step 3\n", "stopping at step 3"),
        ("why: not ours\nfix: nor this", "fix: nor this"),
        (GROUP, "OSError: gone (data.py:7); KeyError: 'x'"),
        (GROUP.replace("\n", "\n[rank3]: "), "OSError: gone (data.py:7); KeyError: 'x'"),
        (WORKER, "ValueError: bad sample 3 (data.py:8)"),
        (VALUE_ERROR + CPP_STACK, PLACED),
        (STORE + CPP_STACK, STORE.strip()),
        (DEVICE_ASSERT, "torch.AcceleratorError: CUDA error: device-side assert triggered (train.py:20)"),
        (
            "terminate called after throwing an instance of 'c10::Error'\n"
            f"  what():  CUDA error: device-side assert triggered\n{HINTS}{FRAMES}",
            "CUDA error: device-side assert triggered",
        ),
        (
            "terminate called after throwing an instance of 'int'\nAborted (core dumped)\n",
            "terminate called after throwing an instance of 'int'",
        ),
        (VALUE_ERROR + "terminate called without an active exception\n", PLACED),
        ("terminate called without an active exception\n", "terminate called without an active exception"),
        (WATCHDOG, TIMED_OUT),
        (WATCHDOG + ABORTED, TIMED_OUT),
        (FRAMES + ABORTED, "Fatal Python error: Aborted (train.py:31)"),
        (SEGFAULT, "Fatal Python error: Segmentation fault (train.py:3)"),
        (IN_OURS, "ValueError: invalid rank (train.py:3)"),
        ("RuntimeError: [/__w/gloo/transport/tcp/pair.cc:553] Connection closed\n", "RuntimeError: Connection closed"),
        (VALUE_ERROR + HYDRA, PLACED),
        (VALUE_ERROR + WANDB, PLACED),
        (VALUE_ERROR + LEAKED, PLACED),
        (VALUE_ERROR + IGNORED, PLACED),
        (VALUE_ERROR.replace("ValueError: no rows", "a.B: first\nsecond\n"), "a.B: first (net.py:12)"),
        ("no data\n" + HYDRA + WANDB, "no data"),
        (WANDB, None),
        ("2026-11-22 10:00:00,001 INFO epoch 3\nINFO:root:x\n 45%|####   | 45/100\n", None),
        ("/home/me/train.py:3: UserWarning: odd\n  warn('odd')\n", None),
    ],
)
def test_the_cause(text: str, expected: str | None):
    assert find_cause(text.splitlines()) == expected
