"""``allranks run`` on a machine that has GPUs: forked warm ranks, nccl by default, errors before NCCL's own.

One GPU is enough for all of them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist"
#: The first line runs before anything is imported: torch is there already in a rank that was forked.
FORKED = """
import sys; forked = "torch" in sys.modules
import json, torch
started = torch.cuda.is_initialized()
"""
TELL = "print(json.dumps(facts), flush=True)\n"


@pytest.fixture
def allranks(allranks):
    """Give the command, seeing the GPUs that this process sees."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        allranks.env["CUDA_VISIBLE_DEVICES"] = visible
    return allranks


@pytest.fixture
def run(allranks):
    """Give a function that runs a script, and gives the result and the last line of JSON that each rank printed."""

    def start(text, *options):
        allranks.script(text)
        done = allranks("run", "train.py", *options, timeout=150)
        assert agent_started(allranks)["plain"] is None  # The ranks were forked.
        logs = sorted(allranks.run().glob("attempts/000/node-000/rank-*.out"), key=lambda path: int(path.stem[5:]))
        printed = [path.read_text().splitlines() for path in logs]
        return done, [json.loads(lines[-1]) for lines in printed if lines]

    return start


def agent_started(allranks):
    text = (allranks.run() / "attempts" / "000" / "node-000" / "agent.jsonl").read_text()
    return next(event for event in map(json.loads, text.splitlines()) if event["kind"] == "agent-started")


def test_cuda_works_in_a_forked_rank_and_starts_there_only(run):
    text = f"""{FORKED}
x = torch.arange(4.0, device="cuda", requires_grad=True)
(x * x).sum().backward()
facts = [forked, started, torch.cuda.is_initialized(), x.grad.tolist()]
{TELL}"""
    done, facts = run(text, "--nproc-per-node", "1")
    assert done.rc == 0, done.stderr
    assert facts == [[True, False, True, [0.0, 2.0, 4.0, 6.0]]]


def test_a_restarted_rank_has_cuda_too(run):
    text = f"""{FORKED}
import os
torch.ones(3, device="cuda")
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restart == 0:
    os._exit(3)
facts = [forked, started, restart, torch.ones(3, device="cuda").sum().item()]
{TELL}"""
    done, facts = run(text, "--nproc-per-node", "1", "--max-restarts", "1")
    assert done.rc == 0, done.stderr
    assert facts == [[True, False, 1, 3.0]]


def test_by_default_all_gpus_add_up_over_nccl(run):
    text = f"""{FORKED}
import allranks
with allranks.init() as ctx:
    ones = torch.full((1024,), float(ctx.rank + 1), device=ctx.device)
    torch.distributed.all_reduce(ones)
    facts = [forked, started, ctx.backend, str(ctx.device), torch.cuda.current_device(), ones.unique().tolist()]
    facts.append(ctx.sum(1, 0.5))
{TELL}"""
    done, facts = run(text)
    assert done.rc == 0, done.stderr
    count = torch.cuda.device_count()
    total = [float(count * (count + 1) // 2)]
    assert facts == [[True, False, "nccl", f"cuda:{rank}", rank, total, [count, count / 2]] for rank in range(count)]
    assert "destroy_process_group" not in done.stderr


def test_two_ranks_on_one_gpu_are_named_before_nccl_fails(run):
    """gloo lets the plan start two ranks where there may be one GPU; the script then wants nccl on it."""
    text = 'import allranks\nallranks.init("nccl", device="cuda:0")\n'
    done, _ = run(text, "--nproc-per-node", "2", "--backend", "gloo")
    assert done.rc == 1
    assert re.search(r"DeviceError: ranks 0 and 1 on \S+ are bound to the same GPU, \S+", done.stderr)
    assert "fix: " in done.stderr
    assert "ncclInvalidUsage" not in done.stderr


def test_a_local_rank_beyond_the_gpus_is_named_and_the_others_do_not_wait(run):
    count = torch.cuda.device_count()
    done, _ = run('import allranks\nallranks.init("nccl")\n', "--nproc-per-node", str(count + 1), "--backend", "gloo")
    assert done.rc == 1
    there = f"{'is' if count == 1 else 'are'} {count}"
    assert f"DeviceError: rank {count} (local rank {count}) on " in done.stderr
    assert f"needs GPU {count}, but there {there}\n" in done.stderr


def test_more_ranks_than_gpus_over_nccl_are_refused_before_the_start(allranks):
    count = torch.cuda.device_count()
    allranks.script("")
    done = allranks("run", "train.py", "--nproc-per-node", str(count + 1), "--backend", "nccl")
    assert done.rc == 3
    assert f"{count + 1} ranks on {count} GPU" in done.stderr
    assert allranks.runs() == []


def test_gloo_uses_the_cpu(run):
    text = f"""{FORKED}
import allranks
with allranks.init() as ctx:
    facts = [ctx.backend, str(ctx.device), ctx.sum(1), started, torch.cuda.is_initialized()]
{TELL}"""
    done, facts = run(text, "--nproc-per-node", "2", "--backend", "gloo")
    assert done.rc == 0, done.stderr
    assert facts == [["gloo", "cpu", [2.0], False, False]] * 2


def test_the_mnist_recipe_trains_on_the_gpu(allranks):
    ranks = min(2, torch.cuda.device_count())
    done = allranks("run", RECIPE / "job.yaml", "--nproc-per-node", str(ranks), timeout=170)
    assert done.rc == 0, done.stderr
    assert f"[0] Processes: {ranks} on cuda (nccl), master node: 127.0.0.1\n" in done.stdout
    epochs = re.findall(r"Epoch (\d+) - Avg Loss: \d+\.\d{4}, Accuracy: (\d+\.\d{2})%\n", done.stdout)
    assert [int(epoch) for epoch, _ in epochs] == list(range(1, 9))
    assert float(epochs[-1][1]) >= 97
    assert (allranks.run() / "checkpoints" / "latest").readlink() == Path("step-000000184")
