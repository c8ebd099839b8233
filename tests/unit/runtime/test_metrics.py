"""ctx.metrics: means over samples and ranks, records, resuming, and errors."""

from __future__ import annotations

import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch
from metric_lines import lines_of

from allranks import Context, RankError, contract


def make_context(**fields):
    return Context(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
        environment="single process",
        master_addr="127.0.0.1",
        **fields,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRANKS_RUN_DIR", str(tmp_path))
    return tmp_path


def step(ctx, **values):
    """Do what a training loop does in one step."""
    ctx.metrics.start_step()
    ctx.progress.step += 1
    ctx.metrics.log(**values)


def test_a_mean_is_over_samples(folder):
    ctx = make_context()
    for samples, loss in ((256, 1.0), (256, torch.tensor(2.0)), (128, torch.tensor(3.0, requires_grad=True))):
        ctx.progress.samples = samples
        ctx.metrics.log(loss=loss)
    ctx.progress.samples = 0
    ctx.metrics.log(loss=math.nan)
    assert ctx.metrics.means() == {"loss": (256 + 512 + 384) / 640}
    assert ctx.metrics.means() == {}


def test_without_a_loader_each_value_counts_once_and_a_weight_can_be_given(folder):
    ctx = make_context()
    ctx.metrics.log(a=1, b=True)
    ctx.metrics.log(a=4, weight=2)
    ctx.metrics.log(a=torch.tensor(7.0), weight=torch.tensor(3.0))
    ctx.metrics.log(a=math.nan, weight=torch.tensor(0.0))
    assert ctx.metrics.means() == {"a": (1 + 8 + 21) / 6, "b": 1.0}


def test_many_values_with_weights_that_change(folder):
    ctx = make_context(log_every=0)
    for number in range(5000):
        ctx.metrics.log(every=number, weight=1 if number < 2500 else 3)
        if number % 2:
            ctx.metrics.log(odd=torch.tensor(float(number)))
    first, second = sum(range(2500)), sum(range(2500, 5000))
    assert ctx.metrics.means() == {"every": (first + 3 * second) / 10_000, "odd": sum(range(1, 5000, 2)) / 2500}


@pytest.mark.parametrize("value", [3, True + 2, 3.0, torch.tensor(3), torch.tensor([3.0]), torch.tensor([[3]])])
def test_numbers_of_all_kinds(folder, value):
    ctx = make_context()
    ctx.metrics.log(a=value)
    ctx.metrics.log(a=1, weight=3)
    assert ctx.metrics.means() == {"a": 1.5}


def test_what_is_logged_over_and_over_takes_no_more_memory(folder):
    ctx = make_context(log_every=0)
    for number in range(3000):
        ctx.metrics.log(loss=float(number))
    assert len(ctx.metrics._numbers["loss"]) <= 1000
    assert ctx.metrics.means() == {"loss": 1499.5}


def test_bf16_and_float32_of_numpy_are_added_up_in_double_precision(folder):
    import numpy

    ctx = make_context()
    for _ in range(1000):
        ctx.metrics.log(half=torch.tensor(1.0, dtype=torch.bfloat16), single=numpy.float32(0.1))
    assert ctx.metrics.means() == {"half": 1.0, "single": pytest.approx(float(numpy.float32(0.1)), rel=1e-12)}


def test_a_record_every_few_steps_and_the_rest_at_the_end(folder):
    with make_context(log_every=2) as ctx:
        for number in range(1, 6):
            step(ctx, loss=float(number))
        assert ctx.metrics.means() == {"loss": 3.0}
    assert lines_of(folder) == [
        {"step": 2, "loss": 1.5},
        {"step": 4, "loss": 3.5},
        {"step": 5, "loss": 5.0},
    ]


def test_a_record_has_the_speed_since_the_one_before_it(folder, monkeypatch):
    now = 1.8e9
    monkeypatch.setattr("allranks.runtime.metrics.records.time", SimpleNamespace(time=lambda: now))
    with make_context(log_every=2) as ctx:
        ctx.progress.full, ctx.progress.accumulation = 32, 3
        for seconds in (0.25, 0.25, 1.0, 1.0):
            step(ctx, loss=1.0)
            now += seconds
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [(line["step"], line["steps_per_second"], line["samples_per_second"]) for line in lines]
    assert speeds == [(2, 4.0, 4.0 * 32 * 3), (4, 1.0, 1.0 * 32 * 3)]


def test_tokens_of_a_batch_make_a_speed_of_all_ranks_and_micro_batches(folder, monkeypatch):
    now = 1.8e9
    monkeypatch.setattr("allranks.runtime.metrics.records.time", SimpleNamespace(time=lambda: now))
    with make_context(log_every=2) as ctx:
        ctx.progress.accumulation = 3
        for tokens in (2000, 2048, 1024):
            step(ctx, tokens=tokens)
            now += 0.25
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [(line["step"], line["tokens"], line["steps_per_second"], line["tokens_per_second"]) for line in lines]
    assert speeds == [(2, 2024.0, 4.0, 4.0 * 2024 * 3), (3, 1024.0, 4.0, 4.0 * 1024 * 3)]


def test_a_script_may_measure_its_tokens_per_second_itself(folder):
    with make_context(log_every=1) as ctx:
        ctx.metrics.record(tokens_per_second=5.0)
        step(ctx, tokens=2000, tokens_per_second=7.0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens_per_second"] for line in lines] == [5.0, 7.0]


def test_no_records_with_log_every_0_but_those_of_the_script(folder):
    with make_context(log_every=0) as ctx:
        for number in range(4):
            step(ctx, loss=float(number))
        ctx.metrics.record(accuracy=torch.tensor(0.5), epoch=3)
    assert lines_of(folder) == [{"step": 4, "accuracy": 0.5, "epoch": 3.0}]


def test_nothing_logged_makes_no_file(folder):
    with make_context(log_every=1) as ctx:
        for _ in range(3):
            step(ctx)
    assert not list(folder.iterdir())


def test_a_number_that_is_not_finite_is_null(folder):
    with make_context(log_every=1) as ctx:
        step(ctx, loss=math.nan, other=-math.inf)
    assert lines_of(folder) == [{"step": 1, "loss": None, "other": None}]


def test_resume_drops_what_is_made_once_more(folder):
    with make_context(log_every=2) as ctx:
        for number in range(1, 9):
            step(ctx, loss=float(number))
            if number == 5:
                state = ctx.metrics.state_dict()
    undisturbed = lines_of(folder)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # an attempt died while it wrote
    with make_context(log_every=2) as ctx:
        ctx.progress.step = 5
        ctx.metrics.load_state_dict(state)
        assert [line["step"] for line in lines_of(folder)] == [2, 4]
        for number in range(6, 9):
            step(ctx, loss=float(number))
        assert ctx.metrics.means() == {"loss": 4.5}
    assert lines_of(folder) == undisturbed


@pytest.fixture
def no_second_passes(monkeypatch):
    """Let records wait that need not be written at once."""
    monkeypatch.setattr("allranks.runtime.trackers.base._SECONDS", math.inf)


def test_what_is_asked_for_is_in_the_file_before(folder, no_second_passes):
    ctx = make_context(log_every=1)
    asks = [lambda: None, ctx.metrics.means, ctx.metrics.state_dict, ctx.abandon]
    lines = []
    for ask in asks:
        for _ in range(2):
            step(ctx, loss=1.0)
        ask()
        lines.append(len(lines_of(folder)))
    # The record of a step is made when the next one starts; a state holds no step that has no record.
    assert lines == [1, 3, 6, 7]


KILLED = """
import os, pickle, signal, sys, allranks
from allranks.runtime.trackers import base
base._SECONDS = float("inf")
path = os.environ["ALLRANKS_RUN_DIR"] + "/state"
with allranks.init(log_every=1) as ctx:
    if os.path.exists(path):
        with open(path, "rb") as stream:
            state = pickle.load(stream)
        ctx.progress.step = state["step"]
        ctx.metrics.load_state_dict(state)
    while ctx.progress.step < 9:
        ctx.metrics.start_step()
        ctx.progress.step += 1
        ctx.metrics.log(loss=ctx.progress.step)
        if ctx.progress.step == 5 and not os.path.exists(path):
            with open(path, "wb") as stream:
                pickle.dump(ctx.metrics.state_dict(), stream)
        elif ctx.progress.step == 8 and "kill" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_and_a_resume_there_is_each_step_once(run_ranks, tmp_path):
    variables = {"ALLRANKS_RUN_DIR": str(tmp_path)}
    ((code, _, _),) = run_ranks(KILLED, world_size=1, kill="yes", **variables)
    assert code == -signal.SIGKILL
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert run_ranks(KILLED, world_size=1, **variables) == [(0, "", "")]
    assert lines_of(tmp_path) == [{"step": number, "loss": float(number)} for number in range(1, 10)]


def test_a_state_holds_plain_values(folder, tmp_path):
    ctx = make_context()
    ctx.metrics.log(loss=torch.tensor(2.0), weight=3)
    state = ctx.metrics.state_dict()
    assert state == {"step": 0, "epoch": {"loss": [6.0, 3.0]}, "window": {"loss": [6.0, 3.0]}}
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert ctx.metrics.means() == {"loss": 2.0}


def test_a_job_that_was_asked_to_stop_leaves_the_rest_to_its_checkpoint(folder):
    ctx = make_context(log_every=2)
    for _ in range(3):
        step(ctx, loss=1.0)
    ctx.progress.stopping = True
    with pytest.raises(SystemExit) as left:
        ctx.close()
    assert left.value.code == contract.CONTINUE_LATER
    assert [line["step"] for line in lines_of(folder)] == [2]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"loss": "low"}, r"metric loss is a str: 'low'"),
        ({"loss": None}, r"metric loss is a NoneType"),
        ({"loss": torch.ones(3)}, r"metric loss is a tensor of shape \(3,\)(.|\n)*fix: .*log\(loss=loss.mean\(\)\)"),
        ({"loss": 1, "weight": -1}, r"invalid weight: weight=-1"),
        ({"loss": 1, "weight": math.nan}, r"invalid weight: weight=nan"),
        ({"step": 1}, r"cannot be named 'step'"),
        ({"loss": 1j}, r"metric loss is a complex"),
        ({"loss": torch.tensor(1j)}, r"metric loss is a tensor of shape \(\) and type torch.complex64"),
    ],
)
def test_what_is_no_metric_is_an_error(values, what, folder):
    ctx = make_context()
    with pytest.raises(RankError, match=what):
        ctx.metrics.log(**values)
    if "weight" not in values:
        with pytest.raises(RankError, match=what.split("(.")[0]):
            ctx.metrics.record(**values)


@pytest.mark.parametrize("log_every", [-1, 1.5, True])
def test_log_every_that_cannot_be(log_every):
    import allranks

    with pytest.raises(RankError, match=r"log_every=.* cannot be"):
        allranks.init(log_every=log_every)
