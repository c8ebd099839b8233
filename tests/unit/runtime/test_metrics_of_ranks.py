"""ctx.metrics on several ranks: names that differ, ends, resuming, and files."""

from __future__ import annotations

import json

from metric_lines import lines_of

from allranks import contract

RANKS = """
import json, torch, allranks
with allranks.init(log_every=4) as ctx:
    progress, metrics = ctx.progress, ctx.metrics
    for number in range(1, 11):
        metrics.start_step()
        progress.step += 1
        if ctx.rank == 2:
            progress.samples = 0  # a rank that has only fillers, and says NaN
            metrics.log(loss=float("nan"))
            continue
        progress.samples = 2 - ctx.rank
        metrics.log(loss=torch.tensor(float(number)))
        if ctx.rank == 1 and number > 5:
            metrics.log(late=7.0, weight=2)
    means = [metrics.means(), metrics.means()]
    metrics.log(loss=float(ctx.rank), weight=1)
    means.append(metrics.means())
print(json.dumps(means))
"""


def test_ranks_that_log_different_names_get_the_same_means(run_ranks, tmp_path):
    results = run_ranks(RANKS, world_size=3, ALLRANKS_RUN_DIR=str(tmp_path))
    assert [(code, err) for code, _, err in results] == [(0, "")] * 3
    for _, out, _ in results:
        assert json.loads(out) == [{"loss": 5.5, "late": 7.0}, {}, {"loss": 1.0}]
    assert lines_of(tmp_path) == [
        {"step": 4, "loss": 2.5},
        {"step": 8, "loss": 6.5},  # "late" is new to the ranks, and comes with the next one
        {"step": 10, "loss": (9.5 * 6 + 3) / 9, "late": 7.0},
    ]


ONE_RANK = """
import allranks
with allranks.init() as ctx:
    if ctx.rank == 1:
        ctx.metrics.log(loss=4.0)
        ctx.metrics.log(loss=1.0, weight=2)
"""


def test_what_only_one_rank_logs_is_written_at_the_end(run_ranks, tmp_path):
    results = run_ranks(ONE_RANK, world_size=3, ALLRANKS_RUN_DIR=str(tmp_path))
    assert [(code, err) for code, _, err in results] == [(0, "")] * 3
    assert lines_of(tmp_path) == [{"step": 0, "loss": 2.0}]


LAST_RECORD = """
import torch, allranks
with allranks.init(log_every=2) as ctx:
    model = ctx.prepare(torch.nn.Linear(1, 1))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    ctx.checkpoints("saved", model=model, optimizer=optimizer)
    for number in range(4):
        ctx.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        ctx.metrics.log(loss=10.0 * number + ctx.rank)
    if ctx.rank == 1:
        ctx.metrics.log(new=3.0)
"""


def test_a_record_that_the_last_checkpoint_asks_for_is_written_once(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(LAST_RECORD, ALLRANKS_RUN_DIR=str(tmp_path))
    assert [(code, err) for code, _, err in results] == [(0, "")] * 2
    assert lines_of(tmp_path) == [
        {"step": 2, "loss": 5.5},
        {"step": 4, "loss": 25.5},
        {"step": 4, "new": 3.0},
    ]


RESUME = """
import json, os, torch, allranks
with allranks.init(log_every=4) as ctx:
    progress, metrics = ctx.progress, ctx.metrics
    path = os.environ["ALLRANKS_RUN_DIR"] + "/state.pt"
    if os.path.exists(path):
        state = torch.load(path)
        progress.load_state_dict(state["progress"])
        metrics.load_state_dict(state["metrics"])
    for number in range(progress.step + 1, int(os.environ["STOP_AT"]) + 1):
        metrics.start_step()
        progress.step += 1
        progress.samples = 6 // ctx.world_size
        metrics.log(loss=torch.tensor(float(number + ctx.rank)) - (ctx.world_size - 1) / 2)
    if progress.step == 6:
        saved = metrics.state_dict()
        if ctx.is_main:
            torch.save({"progress": progress.state_dict(), "metrics": saved}, path)
        progress.stopping = True
        raise SystemExit(0)
    print(json.dumps(metrics.means()))
"""


def test_the_mean_of_an_epoch_is_right_after_a_resume_on_another_number_of_ranks(run_ranks, tmp_path):
    variables = {"ALLRANKS_RUN_DIR": str(tmp_path)}
    first = run_ranks(RESUME, world_size=2, STOP_AT="6", **variables)
    assert [(code, err) for code, _, err in first] == [(contract.CONTINUE_LATER, "")] * 2
    second = run_ranks(RESUME, world_size=3, STOP_AT="10", **variables)
    assert [(code, err) for code, _, err in second] == [(0, "")] * 3
    assert [json.loads(out) for _, out, _ in second] == [{"loss": 5.5}] * 3
    assert lines_of(tmp_path) == [
        {"step": 4, "loss": 2.5},
        {"step": 8, "loss": 6.5},
        {"step": 10, "loss": 9.5},
    ]


TRAINING = """
import torch, allranks
with allranks.init(log_every=5) as ctx:
    model = ctx.prepare(torch.nn.Linear(1, 1, bias=False))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.0)
    for number in range(1, 13):
        with ctx.accumulate(model, steps=2):
            loss = model(torch.ones(1, 1)).sum() * 0 + number
            ctx.backward(loss)
        optimizer.step()
        ctx.metrics.log(loss=loss)
"""


def test_records_in_a_training_loop(run_ranks, tmp_path):
    results = run_ranks(TRAINING, ALLRANKS_RUN_DIR=str(tmp_path))
    assert [(code, err) for code, _, err in results] == [(0, "")] * 2
    assert lines_of(tmp_path) == [{"step": 5, "loss": 5.5}, {"step": 6, "loss": 11.5}]


def test_without_a_run_the_file_is_where_the_script_was_started(run_ranks, tmp_path):
    script = f"import os\nos.chdir({str(tmp_path)!r})\n" + RANKS
    for expected in ("metrics go to metrics.jsonl", "it is now metrics.1.jsonl"):
        (_, _, err), *others = run_ranks(script, world_size=2)
        assert expected in err
        assert [err for _, _, err in others] == [""]
    assert (tmp_path / "metrics.1.jsonl").exists()
