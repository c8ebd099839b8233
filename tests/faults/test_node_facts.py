"""What only the node of a failed rank knows: the agent records it, and the verdict rests on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fault_tools import memory_group, run_in_group

from allranks.agent.node_facts import NodeFacts

#: Rank 1 fails, and the others would continue for long.
FAILS = 'import os, time\nif os.environ["RANK"] == "1":\n    {end}\ntime.sleep(1000)\n'
EATS = "x = []\n    while True:\n        x.append(bytearray(10 << 20))"
#: A child of rank 1 is killed, as a data loader's worker is, and the rank itself fails for that.
CHILD_EATS = """\
import os, subprocess, sys
    if subprocess.run([sys.executable, "-c", "x = []\\nwhile True: x.append(bytearray(10 << 20))"]).returncode == -9:
        raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed.")
"""
NOT_FOR_MEMORY = "a process was killed (SIGKILL), and not because memory ran out: by a person, a scheduler or a program"


def verdict(allranks: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    return found


def facts(allranks: Any) -> list[str]:
    events = (allranks.run() / "attempts" / "000" / "node-000" / "agent.jsonl").read_text().splitlines()
    return [line for event in map(json.loads, events) if event["kind"] == "node-facts" for line in event["lines"]]


@pytest.mark.parametrize("end", [EATS, CHILD_EATS], ids=["rank", "child"])
def test_the_kernel_has_killed_for_memory(allranks: Any, end: str) -> None:
    allranks.script(FAILS.format(end=end))
    with memory_group(300 << 20) as group:
        run_in_group(allranks, group, "run", "train.py", "--no-check", "--nproc-per-node", "2")
        found = verdict(allranks)
    assert (found["id"], found["sure"], found["rank"]) == ("host-memory-killed", "certain", 1)
    assert found["cause"].endswith(": the limit of its control group is 300 MiB")
    assert found["retry"] == "after a change"
    assert found["evidence"][0]["text"].startswith("control group: oom_kill grew by 1 since the ranks started")
    assert found["evidence"][0]["file"].endswith("node-000/agent.jsonl")


def test_sigkill_that_was_not_for_memory(allranks: Any) -> None:
    allranks.script(FAILS.format(end="os.kill(os.getpid(), 9)"))
    with memory_group(300 << 20) as group:
        run_in_group(allranks, group, "run", "train.py", "--no-check", "--nproc-per-node", "2")
    found = verdict(allranks)
    assert (found["id"], found["sure"], found["rank"]) == ("killed-by-another-process", "likely", 1)
    assert (found["cause"], found["retry"]) == (NOT_FOR_MEMORY, "as it is")


def test_an_exception_that_memory_has_nothing_to_do_with(allranks: Any) -> None:
    """A child was killed for memory before, and the script survived that."""
    child = CHILD_EATS.replace('raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed.")', "{}[1]")
    allranks.script(FAILS.format(end=child))
    with memory_group(300 << 20) as group:
        run_in_group(allranks, group, "run", "train.py", "--no-check", "--nproc-per-node", "2")
    found = verdict(allranks)
    assert (found["id"], found["sure"], found["cause"]) == ("script-exception", "likely", "the script raised KeyError")


def nvidia_smi(folder: Path, body: str) -> str:
    """Write a stand-in for nvidia-smi; return the path to look for commands in."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return f"{tool.parent}:{os.environ['PATH']}"


def test_a_gpu_that_is_lost_explains_errors_of_cuda(allranks: Any, tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost."
    path = nvidia_smi(tmp_path, f"echo '{lost}'; exit 15")
    error = 'raise RuntimeError("CUDA error: unspecified launch failure")'
    allranks.script(FAILS.format(end=error))
    allranks("run", "train.py", "--nproc-per-node", "2", PATH=path)
    found = verdict(allranks)
    assert (found["id"], found["sure"], found["retry"]) == ("gpu-lost", "certain", "on other nodes")
    assert found["evidence"][0]["text"] == f"nvidia-smi: {lost}"
    assert found["evidence"][1]["text"] == "RuntimeError: CUDA error: unspecified launch failure"


def test_who_holds_a_gpus_memory(allranks: Any, tmp_path: Path) -> None:
    body = f"""\
case $1 in
--query-gpu=*) echo "0, 00000000:3B:00.0, 2" ;;
*) echo "00000000:3B:00.0, {os.getpid()}, 70000 MiB" ;;
esac"""
    path = nvidia_smi(tmp_path, body)
    full = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.00 GiB of which 1.00 GiB is "
    )
    full += "free. Including non-PyTorch memory, this process has 9.00 GiB memory in use. Of the allocated memory"
    allranks.script(FAILS.format(end=f"raise MemoryError({full!r})"))
    allranks("run", "train.py", "--nproc-per-node", "2", PATH=path)
    assert facts(allranks)[0] == "GPU 0: 2 memory errors that ECC could not correct, since its driver was loaded"
    found = verdict(allranks)
    assert (found["id"], found["sure"], found["rank"]) == ("cuda-memory-of-others", "certain", 1)
    named = [line["text"] for line in found["evidence"] if f"process {os.getpid()} (" in line["text"]]
    assert len(named) == 1
    assert named[0].startswith("GPU 0: ") and named[0].endswith(", not of this run, holds 70000 MiB")


def test_a_driver_that_does_not_answer_holds_nothing_up(allranks: Any, tmp_path: Path) -> None:
    allranks.script(FAILS.format(end="{}[1]"))
    done = allranks("run", "train.py", "--nproc-per-node", "2", PATH=nvidia_smi(tmp_path, "exec sleep 1000"))
    assert done.rc == 1
    events = (allranks.run() / "attempts" / "000" / "node-000" / "agent.jsonl").read_text().splitlines()
    times = {event["kind"]: event["time"] for event in map(json.loads, events)}
    assert times["ended"] - times["rank-exited"] < 30


def test_a_full_disk(allranks: Any, small_disk: Path) -> None:
    fill = 'f = open(os.environ["DISK"] + "/fill", "wb", buffering=0)\n    while True:\n        f.write(b"x" * 4096)'
    allranks.script(FAILS.format(end=fill))
    allranks("run", "train.py", "--nproc-per-node", "2", DISK=str(small_disk), TMPDIR=str(small_disk))
    assert [line for line in facts(allranks) if line.startswith(f"warning: {small_disk} is full: 0 of ")]
    found = verdict(allranks)
    assert (found["id"], found["sure"], found["rank"]) == ("disk-full", "certain", 1)


def test_the_kernels_log(tmp_path: Path) -> None:
    """Of messages that name no test of another process: it is the log of the whole machine."""
    facts = NodeFacts(tmp_path)
    said = f"nfs: server allranks-test-{os.getpid()} not responding, timed out"
    try:
        with Path("/dev/kmsg").open("w") as log:
            log.write(f"allranks-test-{os.getpid()}: nothing to see\n")
            log.flush()
            log.write(f"{said}\n")
    except OSError:
        pytest.skip("this user may not write to the kernel's log")
    found = facts.collect({1}, was_killed=False)
    facts.close()
    assert [line for line in found if f"-{os.getpid()}" in line] == [f"kernel: {said}"]


def test_a_crash_of_a_process_that_is_no_rank_explains_nothing(tmp_path: Path) -> None:
    facts = NodeFacts(tmp_path)
    ours, other = os.getpid(), os.getpid() + 1
    crashes = "{0}[{1}]: segfault at 0 ip 7f01 sp 7fff error 4 in libc.so.6[7f0102c44000+156000]"
    traps = "traps: {0}[{1}] general protection fault ip:7f01 sp:7fff error:0 in libc.so.6[7f0102c44000+156000]"
    name = f"test-{ours}"
    try:
        with Path("/dev/kmsg").open("w") as log:
            for pid in (ours, other):
                for line in (crashes, traps):
                    log.write(line.format(name, pid) + "\n")
                    log.flush()
    except OSError:
        pytest.skip("this user may not write to the kernel's log")
    found = facts.collect({ours}, was_killed=False)
    facts.close()
    said = [f"kernel: {line.format(name, ours)}" for line in (crashes, traps)]
    assert [line for line in found if name in line] == said
