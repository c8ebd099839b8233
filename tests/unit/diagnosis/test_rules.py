"""The table of rules: each is whole, known by one name, and reached."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from test_real_logs import SAMPLES

from allranks.diagnosis.matching import rules_of
from allranks.diagnosis.model import Rule
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.sources import of_text
from allranks.diagnosis.text import Log
from allranks.diagnosis.verdict import sentence
from allranks.job.options import OPTIONS

#: Ordinary lines, which ended no run.
HARMLESS = [
    "Process group initialized (nccl): rank 0 of world size 8",
    "NCCL_IB_TIMEOUT=22",
    "best_loss: inf",
    "loss: info_nce=3.2",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "Couldn't reach huggingface.co; using cached version",
    "No GPU found, using CPU",
    "Latest checkpoint: not found, starting from scratch",
    "#SBATCH --mail-type=NODE_FAIL",
    "Auto-requeue: SIGUSR1 when job preempted",
    "prolog took 3 s, 0 errors",
    "cpus per task SLURM_CPUS_PER_TASK not set, using 8",
    "mismatch count across ranks = 0",
    "pcie bus errors: 0",
    "tcsetattr: Input/output error",
    "podman: 0 errors",
    "apex not available: cannot import name 'amp' from 'apex'",
    "mkdir: cannot create directory 'x': Permission denied",
    "{'loss': nan, 'epoch': 0.2}",
    "slurmstepd: error: Exceeded step memory limit at some point. Step may have been partially swapped out to disk.",
    "ModuleNotFoundError: No module named 'apex' - falling back to torch.nn.LayerNorm",
    "NVIDIA A100 with CUDA capability sm_80 is not compatible with the current PyTorch installation.",
    "wandb: ERROR Error while calling W&B API: permission denied (<Response [403]>)",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 111).",
    "[loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 32",
]
#: A line for each rule that no real log shows, or that the label of one does not name.
LINES = {
    "index-out-of-range": "IndexError: index out of range in self",
    "second-backward": "RuntimeError: Trying to backward through the graph a second time",
    "initialized-twice": "ValueError: trying to initialize the default process group twice!",
    "half-precision-weights": "ValueError: Attempting to unscale FP16 gradients.",
    "host-memory-killed": "Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB",
    "name-resolution": "socket.gaierror: [Errno -2] Name or service not known",
    "nccl-invalid-usage": "RuntimeError: NCCL error in: c10d/NCCLUtils.hpp:121, invalid argument (ncclInvalidArgument)",
    "node-lost": "slurmstepd: error: *** JOB 77 ON node1 CANCELLED AT 2026-01-31T14:00:00 DUE TO NODE FAILURE ***",
    "nccl-version-mismatch": "bootstrap.cc:1 NCCL WARN Message truncated : received 256 bytes instead of 64",
    "cancelled": "slurmstepd: error: *** JOB 77 ON node1 CANCELLED AT 2026-01-31T14:00:00 ***",
    "killed-by-another-process": "control group: SIGKILL, and oom_kill did not grow since the ranks started",
    "rank-finished": "rank 1 exited with code 0 while rank 0 was in a collective (train.py:7)",
    "rank-late": "rank 1 was still running when a collective of rank 0 timed out (train.py:7)",
    "link-down": "link ib0 went down 2 times since the ranks started",
    "killed": "ERROR: failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: /usr/bin/python3",
    "own-error": "allranks.errors.StdinError: the script reads stdin, which this rank does not have",
    "venv-missing": "bash: line 8: /home/ada/.venv/bin/activate: No such file or directory",
    "library-exception": "RuntimeError: something else",
    "bus-error": "ERROR: failed (exitcode: -7) local_rank: 1 (pid: 77) of binary: /usr/bin/python3",
    "checkpoint-world-size": "ZeRORuntimeException: loaded used a DP world size of 8 but the current world size is 16.",
    "slurm-time": "sbatch: error: Batch job submission failed: Requested time limit is invalid",
    "slurm-partition": "sbatch: error: invalid partition specified: gpux",
    "slurm-credential": "srun: error: Application launch failed: Invalid job credential",
    "pbs-unreachable": "pbs_iff: cannot connect to host",
    "gpu-peer-access": "RuntimeError: CUDA error: peer access is not supported between these two devices",
    "pbs-limit": "=>> PBS: job killed: ncpus 5.2 exceeded limit 4 (sum)",
    "pbs-output": "Post job file processing error; job 77.pbs01 on host node1/0",
    "gpu-link": "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "slurm-rejected": "sbatch: error: Batch job submission failed: Job dependency problem",
    "time-limit": "=>> PBS: job killed: walltime 61 exceeded limit 60",
    "gpu-not-available": "AssertionError: CUDA is not available",
    "no-space": "OSError: [Errno 28] No space left on device",
    "no-gradient": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "fsdp-frozen-parameters": "ValueError: Must flatten tensors with uniform `requires_grad`",
    "cuda-error": "RuntimeError: CUDA error: invalid argument",
    "data-damaged": "PIL.UnidentifiedImageError: cannot identify image file '/data/x.jpg'",
    "dataset-empty": "ValueError: num_samples should be a positive integer value, but got num_samples=0",
    "configuration-key": "omegaconf.errors.ConfigAttributeError: Missing key use_acc",
    "rendezvous-connection": "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: no",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_whole(rule: Rule) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.id)
    assert rule.cause and rule.cause[0] != " " and not rule.cause.endswith(".")
    assert rule.fix and rule.source
    assert rule.retry in ("never", "after a change", "as it is", "on other nodes")
    assert len(rule.compiled) == len(rule.patterns)


def test_each_has_its_own_name() -> None:
    assert [name for name, count in Counter(rule.id for rule in RULES).items() if count > 1] == []
    assert len(RULES) >= 90


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_advice_names_keys_and_flags_that_there_are(rule: Rule) -> None:
    keys = {option.path for option in OPTIONS} | {"environment.setup", "environment.variables"}
    sections = {key.partition(".")[0] for key in keys if "." in key} | {"network"}
    named = re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z_]+", rule.fix)
    assert {*named} <= keys


#: No text says so, but what the agent has recorded: tests/faults/test_causes.py.
OF_A_RECORD = ("script-exit",)


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """Give the names of the rules that real logs reach."""
    return {found.id for sample in SAMPLES if (found := of_text(sample["text"].encode()))}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id not in OF_A_RECORD], ids=lambda rule: rule.id)
def test_a_rule_is_reached(rule: Rule, shown: set[str]) -> None:
    if rule.id in LINES:
        found = of_text(LINES[rule.id].encode())
        assert found and found.id == rule.id
    else:
        assert rule.id in shown


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_no_certain_cause(line: str) -> None:
    found = of_text(f"{line}\nepoch 1\ndone\n".encode())
    assert found is None or found.sure != "certain"
    traceback = 'Traceback (most recent call last):\n  File "/home/user/train.py", line 9, in <module>\nKeyError: 1\n'
    found = of_text(f"{line}\nepoch 1\n{traceback}".encode())
    assert found and (found.id == "script-exception" or found.sure != "certain")


def test_what_a_rule_matches_is_looked_at() -> None:
    """Rules are tried only on lines with a word of failure: none of their lines may lack one."""
    lines = [line for sample in SAMPLES for line in sample["text"].splitlines() if "frame #" not in line]
    telling = {*Log("", lines).telling}
    assert [line for at, line in enumerate(lines) if rules_of(line) and at not in telling] == []
    assert 0 < len(telling) < len(lines)


@pytest.mark.parametrize(
    ("template", "captured", "expected"),
    [
        ("the port[ {port}] is used", {"port": "29500"}, "the port 29500 is used"),
        ("the port[ {port}] is used", {}, "the port is used"),
        ("{error} was raised", {"error": "KeyError"}, "KeyError was raised"),
    ],
)
def test_sentences_are_filled(template: str, captured: dict[str, str], expected: str) -> None:
    assert sentence(template, captured) == expected
