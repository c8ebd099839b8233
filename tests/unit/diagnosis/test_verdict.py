"""Of several failures the first cause is named, and not what followed it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.diagnosis import cuda_memory
from allranks.diagnosis.model import Diagnosis
from allranks.diagnosis.sources import of_files, of_text
from allranks.errors import RunFolderError, UsageError

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/user/{file}", line {line}, in <module>\n{error}\n'
#: Parts of torch's message that a GPU is full.
CARD = "2.00 GiB. GPU 0 has a total capacity of 23.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory,"
ALLOCATED = "Of the allocated memory 9.00 GiB is allocated by PyTorch, and"
UNUSED = "is reserved by PyTorch but unallocated."
OLD = "1.00 GiB free; 6.10 GiB reserved in total by PyTorch)"
CLOSED = "RuntimeError: [/build/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:38032"


def verdict(text: str | bytes) -> Diagnosis:
    found = of_text(text.encode() if isinstance(text, str) else text)
    assert found
    return found


def test_a_victim_is_not_the_cause(tmp_path: Path) -> None:
    for rank in range(64):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        error = CLOSED if rank != 17 else "ZeroDivisionError: division by zero"
        (folder / "stderr.log").write_text(TRACEBACK.format(file="train.py", line=88, error=error))
    found = of_files([tmp_path])
    assert found
    assert (found.id, found.rank, found.place, found.sure) == ("script-exception", 17, "train.py:88", "certain")
    assert found.followed == "another rank ended, and gloo lost its connection"


def test_a_cause_is_found_above_what_many_ranks_say_of_it() -> None:
    cause = TRACEBACK.format(file="train.py", line=88, error="ZeroDivisionError: division by zero")
    text = "".join(f"[rank17]: {line}\n" for line in cause.splitlines())
    frames = "".join(f"frame #{number}: c10::f() + 0x96\n" for number in range(40))
    text += "".join(f"[rank{rank}]: {CLOSED}\n{frames}" for rank in range(18, 512))
    found = verdict(text)
    assert (found.id, found.sure, found.rank, found.place) == ("script-exception", "certain", 17, "train.py:88")


@pytest.mark.parametrize(
    ("frame", "expected", "sure"),
    [
        ("/env/lib/python3.10/site-packages/transformers/trainer.py", "package-versions", "likely"),
        ("/env/lib/python3.10/site-packages/torch/nn/modules/module.py", "script-exception", "likely"),
        ("/home/user/train.py", "script-exception", "likely"),
    ],
)
def test_a_package_that_calls_another_with_an_unknown_argument(frame: str, expected: str, sure: str) -> None:
    error = "TypeError: Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'"
    found = verdict(
        TRACEBACK.format(file="train.py", line=9, error=f'  File "{frame}", line 4, in f\n    g()\n{error}')
    )
    assert (found.id, found.sure) == (expected, sure)


def test_of_two_lines_that_only_follow_the_one_that_says_more_is_named() -> None:
    general = "[rank5]:[E1 ProcessGroupNCCL.cpp:681] [Rank 5] Some NCCL operations have failed or timed out.\n"
    remote = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    assert verdict(general).id == "nccl-timeout"
    assert verdict(general + remote).id == "nccl-remote"


@pytest.mark.parametrize(
    ("message", "expected"), [("Connection reset by peer", "store-lost"), ("Unknown error -1", "abort")]
)
def test_a_c_plus_plus_exception_is_what_its_message_says(message: str, expected: str) -> None:
    found = verdict(f"terminate called after throwing an instance of 'std::system_error'\n  what():  {message}\n")
    assert (found.id, found.evidence[0].text) == (expected, f"  what():  {message}")


def test_what_an_ended_process_has_left_is_no_cause() -> None:
    left = "/usr/lib/python3.10/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/x': "
    ended = "ERROR:composer.cli.launcher:Rank 1 crashed with exit code 1.\n"
    found = verdict(f"{ended}{left}[Errno 2] No such file or directory: '/x'\n")
    assert (found.id, found.sure, len(found.evidence)) == ("launcher-report", "unknown", 1)


def test_an_exception_that_hands_another_one_on_comes_after_it() -> None:
    handed_on = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])\n"
    assert verdict(handed_on).id == "library-exception"
    found = verdict(handed_on + TRACEBACK.format(file="train.py", line=9, error="KeyError: 'weights'"))
    assert (found.id, found.place) == ("script-exception", "train.py:9")


def test_what_torchrun_names_first_comes_first() -> None:
    texts = [f"[rank{rank}]: {line}" for rank in (0, 3) for line in TRACEBACK.format(
        file="train.py", line=rank + 1, error="ValueError: bad").splitlines()]  # fmt: skip
    report = "Root Cause (first observed failure):\n[0]:\n  time : now\n  rank      : 3 (local_rank: 3)\n"
    found = verdict("\n".join(texts) + "\n" + report)
    assert (found.rank, found.place) == (3, "train.py:4")


@pytest.mark.parametrize(("own", "sure"), [("", "likely"), (f"[rank0]: {CLOSED}\n", "certain")])
def test_a_cause_is_certain_only_if_the_rank_that_failed_first_was_heard(own: str, sure: str) -> None:
    missing = "[rank3]: ModuleNotFoundError: No module named 'apex'\n"
    report = "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n"
    found = verdict(f"{missing}{own}{report}")
    assert (found.id, found.rank, found.sure) == ("import-missing", 3, sure)


def test_a_warning_of_an_old_driver_explains_that_no_gpu_was_found() -> None:
    warning = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    error = "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    found = verdict(f"{warning}\n{TRACEBACK.format(file='train.py', line=12, error=error)}")
    assert (found.id, found.sure) == ("driver-too-old", "likely")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("OSError: [Errno 122] Disk quota exceeded", "quota"),
        ("OSError: [Errno 28] No space left on device: '/home/u/m.pt'", "disk-full"),
    ],
)
def test_why_a_checkpoint_was_not_written_comes_before_that_it_was_not(error: str, expected: str) -> None:
    torch = "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 13107264 vs 13107154"
    first = TRACEBACK.format(file="train.py", line=210, error=torch)
    handling = "During handling of the above exception, another exception occurred:"
    found = verdict(f"{first}\n{handling}\n\n{TRACEBACK.format(file='train.py', line=210, error=error)}")
    assert found.id == expected


def test_what_a_script_survives_is_not_the_cause() -> None:
    caught = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. Trying a smaller batch\n"
    steps = "".join(f"step {step} loss 1.0\n" for step in range(1000))
    found = verdict(caught + steps + TRACEBACK.format(file="train.py", line=9, error="KeyError: 'x'"))
    assert (found.id, found.place) == ("script-exception", "train.py:9")


def test_an_abort_by_the_watchdog_only_follows_the_timeout() -> None:
    text = (
        "what():  [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2) ran for 600014 milliseconds"
    )
    found = verdict(f"terminate called after throwing an instance of 'c10::DistBackendError'\n  {text}\n")
    assert (found.id, found.sure, found.rank) == ("nccl-timeout", "unknown", 3)


def test_an_exception_that_python_ignores_is_not_the_cause() -> None:
    ignored = "Exception ignored in: <function Loader.__del__>\n"
    ignored += TRACEBACK.format(file="loader.py", line=1, error="AttributeError: 'Loader' has no attribute 'x'")
    found = verdict(ignored + TRACEBACK.format(file="train.py", line=9, error="ValueError: bad"))
    assert found.place == "train.py:9"


FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
DUPLICATE = "init.cc:1 NCCL WARN Duplicate GPU detected : rank 0 and rank 4 both on CUDA device 7000"
BELOW = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
  File "{file}", line 12, in load
NameError: bad"""
SHAPES = "RuntimeError: The size of tensor a (8) must match the size of tensor b (2) at non-singleton dimension 0"
ORDINARY = "Building the vocabulary\nUsing the cache\nReading the index\nFound 12 files\n"


@pytest.mark.parametrize(
    ("text", "expected", "sure"),
    [
        (FULL, "cuda-out-of-memory", "certain"),
        (f"{FULL}\n{ORDINARY}", "cuda-out-of-memory", "likely"),  # It may have been caught, and printed.
        (TRACEBACK.format(file="train.py", line=9, error=FULL) + ORDINARY, "cuda-out-of-memory", "certain"),
        (f"{FULL}\n" + "step 7 loss: 2.1\n" * 4, "cuda-out-of-memory", "likely"),
        (f"{FULL}\n" + " 10%|#   | 1/10 [00:01<00:09,  1.20it/s]\n" * 4, "cuda-out-of-memory", "likely"),
        (f"[rank1]: RuntimeError: other\n{ORDINARY * 9}[rank0]: {FULL}", "cuda-out-of-memory", "likely"),
        (f"{DUPLICATE}\nsrun: error: node1: task 0: Exited with exit code 1", "gpu-duplicate", "certain"),
        (f"{DUPLICATE}\n{ORDINARY}", "gpu-duplicate", "likely"),
        (f"srun: error: node1: task 0: Exited with exit code 1\n{DUPLICATE}", "gpu-duplicate", "likely"),
        ("ValueError: bad", "script-exception", "likely"),
        (TRACEBACK.format(file="train.py", line=9, error="NameError: bad"), "script-exception", "certain"),
        (TRACEBACK.format(file="train.py", line=9, error="ValueError: bad"), "script-exception", "likely"),
        (TRACEBACK.format(file="../site-packages/a.py", line=9, error="NameError: bad"), "script-exception", "likely"),
        (BELOW.format(file="train.py"), "script-exception", "certain"),
        (BELOW.format(file="/v/site-packages/a.py"), "script-exception", "likely"),
        (SHAPES, "shape-mismatch", "likely"),
        (TRACEBACK.format(file="train.py", line=9, error=SHAPES), "shape-mismatch", "certain"),
        (TRACEBACK.format(file="../site-packages/a.py", line=9, error=SHAPES), "shape-mismatch", "likely"),
        (f"FileNotFoundError: a.json\n\nDuring handling of the above exception, another exception occurred:\n\n{FULL}",
         "cuda-out-of-memory", "likely"),
    ],
)  # fmt: skip
def test_a_verdict_is_certain_where_the_logs_leave_no_other_cause(text: str, expected: str, sure: str) -> None:
    found = verdict(f"{text}\n")
    assert (found.id, found.sure) == (expected, sure)


def test_a_command_that_is_not_there_is_not_the_cause_after_a_rank_has_failed() -> None:
    missing = "train.sh: line 45: --epochs: command not found"
    waited = "[rank1]:[E1 ProcessGroupNCCL.cpp:6] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL"
    assert (verdict(missing).id, verdict(missing).sure) == ("command-not-found", "certain")
    assert (verdict(f"{waited}\n{missing}").id, verdict(f"{waited}\n{missing}").sure) == ("nccl-timeout", "unknown")


@pytest.mark.parametrize("said", ["/bin/sh: 1: nvidia-smi: not found", "grep: /etc/x: Permission denied"])
def test_a_command_that_failed_before_python_ran_is_not_the_cause(said: str) -> None:
    found = verdict(f"{said}\n" + TRACEBACK.format(file="train.py", line=9, error="NameError: x"))
    assert (found.id, found.sure) == ("script-exception", "certain")
    assert verdict(said).id != "script-exception"


def test_a_warning_that_alone_says_little_is_unknown() -> None:
    line = "socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111)."
    assert [verdict(f"[{level} {line}").sure for level in "WE"] == ["unknown", "likely"]
    old = "slurmstepd: error: Exceeded step memory limit at some point."
    found = verdict(f"{old}\n" + TRACEBACK.format(file="train.py", line=9, error="KeyError: 'x'"))
    assert (found.id, verdict(old).sure) == ("script-exception", "likely")


def test_an_exception_that_python_ignores_is_none() -> None:
    ignored = TRACEBACK.format(file="loader.py", line=1, error="OSError: [Errno 9] Bad file descriptor")
    assert of_text(f"Exception ignored in: <function Loader.__del__>\n{ignored}Done.\n".encode()) is None


def test_a_warning_counts_where_nothing_else_was_found() -> None:
    old = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    assert (verdict(old).id, verdict(old).sure) == ("driver-too-old", "likely")
    full = f"{old}\nOSError: [Errno 28] No space left on device: 'model.pt'"
    assert (verdict(full).id, verdict(full).sure) == ("disk-full", "certain")


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31mValueError: bad\x1b[0m",
        "[rank3]: ValueError: bad",
        "[3]: ValueError: bad",
        "[default3]:[rank3]: ValueError: bad",
        "[1,3]<stderr>: ValueError: bad",
        "3: ValueError: bad",
        "2026-01-31 14:00:00,123 [rank3]: ValueError: bad",
        "node7: ValueError: bad",
        "(train pid=77, ip=10.0.0.7) ValueError: bad",
        "10%|#    | 1/10\r20%|##   | 2/10\rValueError: bad",
        "ValueError: bad\r\n",
        "x" * 10_000_000 + "\nValueError: bad",
        "ValueError: " + "x" * 10_000_000,
        "ValueError: bad\nhalf a li",
    ],
    ids=range(14),
)
def test_what_stands_around_a_line(text: str) -> None:
    assert verdict(text).id == "script-exception"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_encodings(encoding: str) -> None:
    assert verdict("é\nValueError: größer\n".encode(encoding)).id == "script-exception"


@given(st.binary(max_size=2000))
def test_no_bytes_break_it(data: bytes) -> None:
    of_text(data)


def test_of_a_huge_file_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        for _ in range(100):
            stream.write(b"step 1 loss 2.0\n" * 65536)
        stream.write(b"ValueError: bad\nthe end\n")
    found = of_files([log])
    assert found and (found.id, found.evidence[0].number) == ("script-exception", -2)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file or directory"):
        of_files([tmp_path / "nothing"])
    with pytest.raises(RunFolderError, match="cannot read"):
        of_files([Path("/proc/self/mem")])


def test_a_torch_without_cuda_is_no_wrong_version() -> None:
    """What torch 2.13's CPU build says to ``torch.cuda.set_device(0)``."""
    found = verdict("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'")
    assert (found.id, found.sure) == ("torch-without-cuda", "certain")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (f"{CARD} this process has 22.00 GiB memory in use. {ALLOCATED} 500.00 MiB {UNUSED}", "cuda-out-of-memory"),
        (f"{CARD} this process has 22.00 GiB memory in use. {ALLOCATED} 1536.00 MiB {UNUSED}", "cuda-out-of-memory"),
        (f"{CARD} this process has 10.00 GiB memory in use. {ALLOCATED} 0.50 GiB {UNUSED}", "cuda-memory-of-others"),
        (f"{CARD} this process has 22.00 GiB memory in use. {ALLOCATED} 3.00 GiB {UNUSED}", "cuda-memory-fragmented"),
        (f"20.00 MiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already allocated; {OLD}", "cuda-out-of-memory"),
        ("502.00 MiB (GPU 1; 39.59 GiB total capacity; 35.54 GiB already allocated; 276.19 MiB free; 37.22 GiB "
         "reserved in total by PyTorch)", "cuda-out-of-memory"),
        (f"2.00 GiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB already allocated; {OLD}", "cuda-out-of-memory"),
        ("20.00 MiB", "cuda-out-of-memory"),
        (f"{CARD} Process 7 has 2.00 GiB memory in use. Process 8 has 22.00 GiB memory in use. Of the allocated memory "
         f"21.00 GiB is allocated by PyTorch, and 500.00 MiB {UNUSED}", "cuda-out-of-memory"),
    ],
)  # fmt: skip
def test_whose_memory_fills_the_gpu(numbers: str, expected: str) -> None:
    text = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {numbers}"
    assert cuda_memory.reason(text)[0] == expected
    assert verdict(text).id == expected


@pytest.mark.parametrize(
    ("frame", "error", "expected"),
    [
        ('"/home/user/data.py", line 7, in f', "_pickle.UnpicklingError: invalid load key, 'x'.", "script-exception"),
        ('"/home/user/data.py", line 7, in f', "EOFError: Ran out of input", "script-exception"),
        ('"/opt/lib/python3.12/zipfile.py", line 9, in f', "zipfile.BadZipFile: not a zip file", "library-exception"),
        ('"/v/torch/serialization.py", line 9, in load', "EOFError: Ran out of input", "checkpoint-damaged"),
        ('"/home/user/a.py", line 7, in load_checkpoint', "pickle.UnpicklingError: truncated", "checkpoint-damaged"),
    ],
)  # fmt: skip
def test_only_what_loads_a_checkpoint_finds_it_damaged(frame: str, error: str, expected: str) -> None:
    loaded = "step 1: state = torch.load(path)\n"
    traceback = f'Traceback (most recent call last):\n  File "/home/user/a.py", line 3, in <module>\n  File {frame}\n'
    found = verdict(f"{loaded}{traceback}{error}\n")
    assert found.id == expected
    assert verdict(error).id != "checkpoint-damaged"


WORKER = """Traceback (most recent call last):
  File "/home/user/train.py", line 30, in <module>
    for batch in loader:
  File "/v/site-packages/torch/_utils.py", line 769, in reraise
    raise exception
{error}: Caught {error} in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/v/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/user/data.py", line 12, in __getitem__
    return self.rows[index]["image"]
  File "/v/site-packages/library/rows.py", line 7, in __getitem__
    return self.items[index]
{error}: {message}
"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
@pytest.mark.parametrize(
    ("error", "message", "expected", "sure"),
    [
        ("KeyError", "'image'", "dataloader-worker-error", "likely"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'a.png'", "file-not-found", "certain"),
        ("ZeroDivisionError", "division by zero", "dataloader-worker-error", "certain"),
    ],
)
def test_an_exception_in_a_data_loader_worker_is_placed_where_it_was_raised(
    error: str, message: str, expected: str, sure: str, prefix: str
) -> None:
    lines = WORKER.format(error=error, message=message).splitlines()
    found = verdict("".join(f"{prefix}{line}\n" for line in lines))
    assert (found.id, found.sure, found.place) == (expected, sure, "data.py:12")
    assert found.evidence[0].text == f"{error}: {message}"
    if expected == "dataloader-worker-error":
        assert found.cause == f"the dataset raised {error} in a data loader worker"


def test_of_chained_exceptions_in_a_worker_the_last_is_placed() -> None:
    first, _, rest = WORKER.format(error="KeyError", message="1").partition("Original Traceback")
    inner = 'Original Traceback (most recent call last):\n  File "pandas/index.pyx", line 70, in get_loc\nKeyError: 1\n'
    then = "\nThe above exception was the direct cause of the following exception:\n\nTraceback"
    found = verdict(f"{first}{inner}{then}{rest}")
    assert (found.id, found.place, found.evidence[0].number) == ("dataloader-worker-error", "data.py:12", 9)
    assert verdict(f"{first}{inner}").place == "train.py:30"


def test_a_worker_s_traceback_without_the_user_s_code_is_placed_where_the_loader_was_used() -> None:
    text = WORKER.format(error="KeyError", message="'image'").replace("/home/user/data.py", "/v/site-packages/data.py")
    assert verdict(text).place == "train.py:30"
    assert verdict(text.partition("Original")[0]).place == "train.py:30"


def test_a_store_that_not_all_ranks_reached_names_how_many_came_and_the_address(tmp_path: Path) -> None:
    joined = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined."
    asked = "The client socket has timed out after 300000ms while trying to connect to (node1, 29501)."
    start = "not all ranks reached rank 0's store"
    end = "; they use different addresses or ports, or a firewall is between"
    assert verdict(joined).cause == f"{start}: 1/2 came{end}"
    line = f"[E1128 03:01:26.7 socket.cpp:1028] [c10d] {asked}"
    assert verdict(line).cause == f"{start}; node1:29501 did not answer{end}"
    both = verdict(f"{joined}\ntorch.distributed.DistNetworkError: {asked}")
    assert both.cause == f"{start}: 1/2 came; node1:29501 did not answer{end}"
    assert (both.id, both.sure, both.retry) == ("store-connect", "likely", "after a change")
    for rank, text in enumerate((joined, f"torch.distributed.DistNetworkError: {asked}")):
        (tmp_path / f"rank-{rank}.err").write_text(f"{text}\n")
    found = of_files([tmp_path])
    assert found and (found.id, found.cause) == ("store-connect", f"{start}: 1/2 came{end}")


def test_a_sentence_is_filled_from_the_same_report_of_the_same_rank_alone() -> None:
    full = "torch.OutOfMemoryError: CUDA out of memory."
    exact = f"{full} Tried to allocate 2.00 GiB"
    little = "the GPU has too little memory"
    assert verdict(f"[rank1]: {full}\n[rank1]: {exact}\n").cause == f"{little}: an allocation of 2.00 GiB failed"
    for other in (f"[rank0]: {exact}\n", "[rank1]: step\n" * 100 + f"[rank1]: {exact}\n"):
        found = verdict(f"[rank1]: {full}\n{other}")
        assert (found.rank, found.cause) == (1, little)


ACCOUNT, NODES = "Invalid account or account/partition combination", "Requested node configuration is not available"
TIME = "Requested time limit is invalid (missing or exceeds some limit)"
NONE = "Slurm has no such account, partition or QOS for this user"


@pytest.mark.parametrize(
    ("said", "expected", "cause", "advice"),
    [
        (f"{ACCOUNT} specified", "slurm-account", f"{NONE}: {ACCOUNT}", "scheduler.account"),
        ("Invalid qos specification", "slurm-account", f"{NONE}: Invalid qos specification", "qos"),
        ("Invalid partition name specified", "slurm-partition", "Slurm has no such partition: gpux", "sinfo"),
        (TIME, "slurm-time", f"Slurm does not allow the job's time: {TIME}", "resources.time"),
        (NODES, "slurm-configuration", f"the partition cannot run such a job: {NODES}", "sinfo"),
        ("Job dependency problem", "slurm-rejected", "Slurm rejected the job: Job dependency problem", "#SBATCH"),
        ("Unable to contact slurm controller", "slurm-unreachable", "Slurm's controller did not answer", "sinfo"),
    ],
)
def test_what_slurm_says_as_it_rejects_a_job_is_quoted(said: str, expected: str, cause: str, advice: str) -> None:
    before = "sbatch: error: invalid partition specified: gpux\n" if "partition name" in said else ""
    found = verdict(f"{before}sbatch: error: Batch job submission failed: {said}\n")
    assert (found.id, found.cause, found.sure) == (expected, cause, "certain")
    assert advice in found.fix


def test_a_script_that_slurm_lost_is_no_command_that_is_not_there() -> None:
    assert (
        of_text(b"slurmstepd: error: execve(): /var/spool/slurmd/job7/slurm_script: No such file or directory") is None
    )
    assert verdict("slurmstepd: error: execve(): /opt/run: No such file or directory").id == "command-not-found"


def test_a_rendezvous_whose_pipe_broke_lost_its_connection() -> None:
    broken = TRACEBACK.format(file="../v/site-packages/torch/x.py", line=1, error="RuntimeError: Broken pipe")
    lost = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the store has failed."
    assert verdict(broken + lost).id == "rendezvous-connection"
    assert (verdict(broken).id, verdict(broken).sure) == ("store-lost", "unknown")


LOST = """Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 1284, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
  File "/usr/lib/python3.12/multiprocessing/connection.py", line 620, in SocketClient
    s.connect(address)
{}

The above exception was the direct cause of the following exception:

RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly
"""


@pytest.mark.parametrize("error", ["FileNotFoundError: [Errno 2] No such file or directory", "EOFError"])
def test_a_process_that_is_gone_is_not_a_file_that_is_missing(error: str) -> None:
    verdict = of_text(LOST.format(error).encode())
    assert verdict and (verdict.id, verdict.sure) == ("dataloader-worker-killed", "likely")


def test_a_rank_that_torchrun_has_killed_is_not_the_cause() -> None:
    report = """Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 77)
  traceback : Signal 9 (SIGKILL) received by PID 77
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 78)
"""
    others = of_text(report.format(1).encode())
    own = of_text(report.format(-9).encode())
    assert others and (others.id, others.sure) == ("launcher-report", "unknown")
    assert own and (own.id, own.sure) == ("killed", "likely")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("srun: error: n1: task 3: Killed\nsrun: Job step aborted: Waiting up to 32 seconds.\n", "killed"),
        (
            "srun: error: n1: task 3: Exited with exit code 16\nsrun: Job step aborted: Waiting up to 32 seconds.\n"
            "srun: error: n2: tasks 4-7: Killed\n",
            "launcher-report",
        ),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-31T14:00:00 ***\n"
            "srun: error: n2: tasks 4-7: Killed\n",
            "launcher-report",
        ),
    ],
)
def test_a_task_that_srun_has_killed_is_not_the_cause(log: str, expected: str) -> None:
    found = of_text(log.encode())
    assert found and found.id == expected


def test_an_environment_that_was_not_set_up_explains_that_torch_is_missing() -> None:
    shell = "/var/spool/slurmd/job7/slurm_script: line 3: activate: No such file or directory\n"
    traceback = 'Traceback (most recent call last):\n  File "run.py", line 1, in <module>\n'
    missing = "ModuleNotFoundError: No module named '{}'\n"
    found = of_text((shell + traceback + missing.format("torch")).encode())
    assert found
    assert (found.id, found.sure) == ("conda-missing", "certain")
    found = of_text((shell + traceback + missing.format("flash_attn")).encode())
    assert found
    assert (found.id, found.sure) == ("import-missing", "certain")
