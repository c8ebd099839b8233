"""A line by itself: which class of failure it is, and how sure that is."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib
from test_real_logs import FINER

from allranks.diagnosis.model import Level
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.sources import of_text

WORDINGS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text())
#: Rules of what ended a job from outside, whose message is final wherever it stands.
OUTSIDE = {rule.id for rule in RULES if rule.level is Level.OUTSIDE}
STEP = "srun: error: Task launch for StepId=7.4 failed on node n1: "


@pytest.mark.parametrize(
    ("line", "expected", "sure"),
    [
        ("RuntimeError: [enforce fail] ss1.ss_family == ss2.ss_family. 2 vs 10", "gloo-connect", "likely"),
        ("RuntimeError: disagreement between rank0 and rank3: rank0: [1]", "collective-mismatch", "certain"),
        ("[ERROR] [launch.py:434:sigkill_handler] ['train.py'] exits with return code = -7", "bus-error", "likely"),
        (f"{STEP}Unable to layout tasks on given cpus", "slurm-step", "certain"),
        ("3: srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)", "slurm-step", "likely"),
        ("AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
         "gradient_acc_step * world_size 256 != 4 * 8 * 1", "deepspeed-configuration", "certain"),
        ("PMII_singinit: execv failed: No such file or directory", "mpi-pmi", "likely"),
        ("2024-01-01 10:00:00,123 - trainer - INFO - [rank0]: AssertionError: bad", "script-exception", "likely"),
        ("I0101 10:00:00.123456 77 main.go:1] [rank0]: AssertionError: bad", "script-exception", "likely"),
        ("2024-05-06 21:24:16 | ERROR | stderr | [rank0]: AssertionError: bad", "script-exception", "likely"),
        ("E       AssertionError: bad", "script-exception", "likely"),
        ("ERROR 09-22 20:31:06 [core.py:586] AssertionError: bad", "script-exception", "likely"),
        ("ProcessExitedException: process 0 terminated with exit code 3221225477", "segmentation-fault", "likely"),
        ("subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no n1 hostname' returned non-zero exit "
         "status 255.", "ssh-unreachable", "certain"),
        ("Couldn't connect to the Hub: 429 Client Error: Too Many Requests", "hub-limit", "likely"),
        (f"{STEP}Job credential expired", "slurm-credential", "certain"),
        ("x:1:2 [0] misc/socket.cc:4 NCCL WARN socketStartConnect: Connect to 10.0.0.2<3> failed : "
         "Software caused connection abort", "nccl-remote", "unknown"),
        ("qsub: submit error (PBS server internal error)", "pbs-unreachable", "certain"),
        ("01/31/2026 14:00:00  S    Job deleted at request of ada@node1", "cancelled", "likely"),
        ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)", "slurm-rejected", "certain"),
        ("srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.",
         "slurm-step", "certain"),
        ("salloc: error: Node failure on node7", "node-lost", "certain"),
        ("qsub: directive error: -l slect=1:ncpus=4", "pbs-rejected", "certain"),
        ("qsub: Maximum number of jobs already in queue for user ada", "pbs-rejected", "certain"),
        ("=>> PBS: job killed: ncpus 5.2 exceeded limit 4 (sum)", "pbs-limit", "certain"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "time-limit", "certain"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "host-memory-slurm", "certain"),
        ("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)", "killed", "likely"),
        ("mpirun has detected an attempt to run as root.", "launcher-arguments", "certain"),
        ('mpirun: Error: unknown option "-npernodes"', "launcher-arguments", "certain"),
        ("[n1:7:0] ib_log.c:1 UCX  ERROR Transport retry count exceeded on mlx5_0:1/IB", "nccl-infiniband", "certain"),
        ('FATAL:   "train.py": executable file not found in $PATH', "command-not-found", "certain"),
        ("docker: Error response from daemon: pull access denied for foo/bar", "container", "certain"),
        ("client_loop: send disconnect: Broken pipe", "ssh-unreachable", "certain"),
        ("srun: error: node1: task 3: Aborted (core dumped)", "abort", "likely"),
        ("node7: bash: torchrun: command not found", "command-not-found", "certain"),
        ("Exception: the batch is empty", "script-exception", "likely"),
        ("RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
         "dtype-mismatch", "certain"),
        ("RuntimeError: Input type (float) and bias type (c10::Half) should be the same", "dtype-mismatch", "certain"),
        ("RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
         "device-mismatch", "certain"),
        ("HfHubHTTPError: 504 Server Error: Gateway Time-out for url: https://x", "hub-unreachable", "likely"),
        ("qsub: invalid option -- 'w'", "pbs-rejected", "certain"),
        ("qsub: node(s) specification error", "pbs-rejected", "certain"),
        ("comment = Can Never Run: Insufficient amount of resource: ngpus", "pbs-rejected", "certain"),
        ("RuntimeError: can't create new processes if CUDA is already initialized.", "fork-after-cuda", "certain"),
        ("KeyError: 'unexpected key \"head.weight\" in state_dict'", "state-dict", "certain"),
        ("KeyError: 'unexpected key'", "script-exception", "likely"),
        ("RuntimeError: unexpected EOF. The file might be corrupted.", "checkpoint-damaged", "certain"),
        ("ValueError: Error initializing torch.distributed using tcp://: no rank", "rank-variables", "certain"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'sbatch'", "command-not-found", "certain"),
        ("Job exceeded its walltime limit. Job was aborted", "time-limit", "certain"),
        ("ValueError: Error initializing the reader", "script-exception", "likely"),
    ],
)  # fmt: skip
def test_a_line_has_its_class(line: str, expected: str, sure: str) -> None:
    found = of_text(line.encode())
    assert found
    assert (found.id, found.sure) == (expected, sure)


def test_classes_have_several_wordings() -> None:
    assert len(WORDINGS) >= 130
    assert len([name for name, lines in WORDINGS.items() if len(lines) >= 3]) >= 125


@pytest.mark.parametrize("name", WORDINGS)
def test_each_wording_has_its_class(name: str) -> None:
    found = {line: verdict and verdict.id for line in WORDINGS[name] for verdict in (of_text(line.encode()),)}
    wrong = {line: id for line, id in found.items() if FINER.get(id or "", id) != FINER.get(name, name)}
    assert wrong == {}


@pytest.mark.parametrize("name", [name for name in WORDINGS if name not in OUTSIDE])
@pytest.mark.parametrize("after", ["Epoch 1: loss 0.3", "loading a part of the data"])
@pytest.mark.parametrize("end", ["done", "srun: error: n1: task 0: Exited with exit code 1"])
def test_a_message_that_a_script_survives_is_no_certain_cause(name: str, after: str, end: str) -> None:
    """An exception that is printed without its frames may have been caught."""
    found = [of_text(f"{line}\n{8 * (after + chr(10))}{end}\n".encode()) for line in WORDINGS[name]]
    assert [each for each in found if each and each.sure == "certain" and each.id not in OUTSIDE] == []
