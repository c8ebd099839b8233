"""``allranks estimate``: by a step of the job's script, and by numbers."""

from __future__ import annotations

import json

import pytest

#: 100 parameters and a bias: 404 bytes. Plain SGD has no state.
SCRIPT = """\
import torch
import allranks

with allranks.init() as ctx:
    model = ctx.prepare(torch.nn.Linear(100, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 100)), global_batch_size=64)
    checkpoints = ctx.checkpoints("checkpoints", every=1, model=model)
    for epoch in loader.epochs(1000000):
        for (inputs,) in loader:
            with ctx.accumulate(model, 2):
                ctx.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
            ctx.metrics.log(loss=1.0)
            checkpoints.step()
"""


def test_a_script_makes_one_step_and_leaves_no_run(allranks) -> None:
    """It takes more than 10 s on a slow machine: a rank that imports torch."""
    allranks.script(SCRIPT)
    layout = ("--nproc-per-node", "4", "--nodes", "1,2", "--network", "10GbE", "--json")
    done = allranks("estimate", "train.py", *layout)
    assert done.rc == 0, done.stderr
    found = json.loads(done.out)
    assert found["step"]["optimizers"] == ["SGD"]
    assert (found["needs"]["parameters"], found["needs"]["checkpoint"], found["needs"]["optimizer_state"]) == (
        404,
        404,
        0,
    )
    rows = {(row["nodes"], row["strategy"]): row for row in found["rows"]}
    assert [*rows] == [(1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp")]
    assert [row["effective_batch"] for row in rows.values()] == [128] * 4
    assert [row["rank_batch"] for row in rows.values()] == [16, 16, 8, 8]
    assert rows[2, "ddp"]["sends"] == 2 * 404 * 7 // 8
    assert rows[2, "ddp"]["seconds"] == rows[2, "ddp"]["sends"] / 1.25e9
    assert rows[1, "ddp"]["seconds"] is None  # 10GbE is between nodes.
    assert {path.name for path in allranks.folder.iterdir()} == {"runs", "train.py"}
    assert [path.name for path in (allranks.folder / "runs").iterdir()] == [".estimates"]
    assert json.loads(allranks("ps", "--json").stdout) == []


def test_a_plan_and_the_verdict_show_what_was_estimated(allranks) -> None:
    """It takes more than 10 s: a step, two ranks that fail, and five commands."""
    script = allranks.script(SCRIPT)
    assert allranks("estimate", "train.py", "--nproc-per-node", "2").rc == 0
    (row,) = _estimated(allranks, "--nproc-per-node", "2")
    assert row["why"] == "allranks estimate: ddp, which sends 404 B in a step"
    assert _estimated(allranks, "--nproc-per-node", "3") == []
    assert _estimated(allranks, "--nproc-per-node", "2", "--", "--lr", "0.1") == []
    says = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    )
    script.write_text(
        f"raise SystemExit('{says} of which 1.00 GiB is free. Process 1 has 0 bytes memory in use. '\n"
        "'Including non-PyTorch memory, this process has 7.00 GiB memory in use.')"
    )
    (row,) = _estimated(allranks, "--nproc-per-node", "2")
    assert row["why"] == "allranks estimate, before train.py was changed: ddp, which sends 404 B in a step"
    assert allranks("run", "train.py", "--nproc-per-node", "2").rc == 1
    cause = json.loads(allranks("why", "--json").stdout)["diagnosis"]["cause"]
    what = "the GPU has too little memory (8.0 GiB): an allocation of 2.00 GiB failed"
    assert cause == f"{what}; allranks estimate: {row['value']} per rank"


def _estimated(allranks, *options: str) -> list[dict[str, str]]:
    """Return the rows of the plan that tell of the memory."""
    rows = json.loads(allranks("plan", "train.py", "--json", *options).stdout)["reasons"]
    return [row for row in rows if row["subject"] == "memory per rank"]


@pytest.mark.parametrize(
    ("option", "typed", "meant"), [("dtype", "torch.bfloat16", "bf16"), ("optimizer", "AdamW8bit", "adamw-8bit")]
)
def test_names_of_pytorch_and_other_tools(allranks, option: str, typed: str, meant: str) -> None:
    given = {"dtype": "fp32", "optimizer": "adamw"} | {option: meant}
    done = allranks("estimate", "--parameters", "1B", f"--{option}", typed)
    assert done.stdout.splitlines()[0] == f"estimate for 1B parameters in {given['dtype']}, {given['optimizer']}"


def test_numbers_need_no_script(allranks) -> None:
    given = ("--parameters", "1.3B", "--dtype", "BF16", "--activations", "8GB", "--nproc-per-node", "8")
    done = allranks("estimate", *given, "--nodes", "4", "--network", "100GbE", "--disk", "2GB/s")
    assert (done.rc, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "estimate for 1.3B parameters in bf16, adamw"
    assert "checkpoint 7.8 GB 3.9 s at 2 GB/s" in lines
    assert "activations 8 GB as given" in lines
    assert "4 32 ddp 18.4 GB 24 GB 5.04 GB 403 ms unknown" in lines
    assert "4 32 fsdp 8.32 GB 16 GB 7.56 GB 604 ms unknown" in lines
    assert any(line.startswith("unknown: effective batch") for line in lines)
    assert not any(line.startswith("unknown: activations, and so memory") for line in lines)


def test_steps_have_a_time_and_a_cost(allranks) -> None:
    """A ring of 2 and 4 ranks sends 1 and 1.5 times the gradients of 4 GB: at 4 GB/s in 1 and 1.5 s."""
    given = ("--parameters", "1B", "--network", "4GB/s", "--nodes", "1,2,4", "--compute", "1", "--price", "3.6")
    done = allranks("estimate", *given)
    assert (done.rc, done.stderr) == (0, "")
    table = [words[-3:] for line in done.stdout.splitlines() if (words := line.split())[2:3] in (["ddp"], ["-"])]
    assert table == [["1.00", "x", "1.00"], ["1.00", "x", "2.00"], ["1.60", "x", "2.50"]]
    found = json.loads(allranks("estimate", *given, "--json").out)
    rows = [row for row in found["rows"] if row["strategy"] == "ddp"]
    assert [row["step_seconds"] for row in rows] == pytest.approx([1.0, 2.0, 2.5])
    assert [row["speedup"] for row in rows] == pytest.approx([1.0, 1.0, 1.6])
    assert [row["cost"] for row in rows] == pytest.approx([1.0, 2.0, 2.5])
    assert not [line for line in found["unknown"] if "computation" in line]
    of_no_network = allranks("estimate", "--parameters", "1B", "--nproc-per-node", "2", "--compute", "1")
    assert "unknown: STEP, SPEED and COST: they need the time of the communication" in of_no_network.stdout.splitlines()
    alone = allranks("estimate", "--parameters", "1B", "--price", "3.6")
    assert (alone.rc, alone.message["error"]) == (2, "--price needs --compute")


@pytest.mark.parametrize(("nodes", "counts"), [("2:4", [2, 4]), ("3", [3])])
def test_rows_are_those_of_the_nodes(allranks, nodes: str, counts: list[int]) -> None:
    done = allranks("estimate", "--parameters", "1M", "--nodes", nodes, "--json")
    assert [row["nodes"] for row in json.loads(done.out)["rows"]] == [each for each in counts for _ in range(2)]


def test_a_script_that_only_mentions_allranks_is_not_run(allranks) -> None:
    allranks.script("# allranks run train.py\nopen('trained', 'w')\n")
    done = allranks("estimate", "train.py")
    assert (done.rc, done.message["error"]) == (2, "train.py does not use allranks.init()")
    assert [path.name for path in allranks.folder.iterdir()] == ["train.py"]


def test_ranks_of_a_node_are_those_of_the_job(allranks) -> None:
    given = ("estimate", "--parameters", "1M", "--nodes", "1", "--json")
    allranks.job("script: train.py\nlaunch: {nproc_per_node: cpu}\nresources: {cpus_per_node: 6}\n")
    assert json.loads(allranks(*given, "job.yaml").out)["ranks_per_node"] == 6
    two = allranks("estimate", "--parameters", "1M", "--network", "1GB/s", "--network", "2GB/s")
    assert two.message["error"] == "--network: two rates"


def test_no_notification_is_sent(allranks) -> None:
    """It takes more than 10 s on a slow machine: a rank that imports torch."""
    allranks.script(SCRIPT)
    allranks.job("script: train.py\nnotify: {on: [start, end], command: touch notified}\n")
    assert allranks("estimate", "job.yaml").rc == 0
    assert not (allranks.folder / "notified").exists()
