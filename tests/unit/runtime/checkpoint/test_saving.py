"""Saving and continuing with one rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from allranks.errors import RankError
from allranks.record.checkpoints import entries, problems, unfinished
from allranks.runtime.checkpoint.export import load


def steps(folder):
    return [entry.step for entry in entries(folder)]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_training_that_was_continued_is_equal_to_the_bit(loop):
    first = loop(every=4, keep=10, background=False)
    first.train(10)
    whole = first.weights()
    second = loop()
    assert second.checkpoints.resumed.step == 8
    assert second.ctx.progress.step == 8
    second.train(2)
    assert equal(second.weights(), whole)


def test_the_background_writes_the_moment_of_the_save(loop, tmp_path):
    made = loop()
    made.train(2)
    made.checkpoints.save()
    then = made.weights()
    made.train(5)
    assert made.checkpoints.wait()
    assert equal(load(tmp_path / "checkpoints" / "step-000000002", "model"), then)
    assert not unfinished(tmp_path / "checkpoints")
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-000000002"


def test_closing_the_context_waits_for_the_disk(loop, tmp_path):
    made = loop()
    made.train(1)
    made.checkpoints.save()
    made.ctx.close()
    assert steps(tmp_path / "checkpoints") == [1]
    assert not list(problems(tmp_path / "checkpoints" / "step-000000001"))


def test_closing_the_context_saves_the_last_step(loop, tmp_path):
    made = loop(every=3)
    made.train(5)
    made.ctx.close()
    assert steps(tmp_path / "checkpoints") == [5, 3]
    again = loop()
    assert again.checkpoints.resumed.step == 5
    assert equal(again.weights(), made.weights())
    again.ctx.close()  # Nothing was trained: nothing is saved.
    assert steps(tmp_path / "checkpoints") == [5, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_step_is_not_saved_where_not_wanted_or_after_an_error(loop, tmp_path, fails):
    made = loop(every=3, save_at_end=fails, background=False)
    made.train(5)
    made.ctx.__exit__(*((ValueError, ValueError(), None) if fails else (None, None, None)))
    assert steps(tmp_path / "checkpoints") == [3]


def test_the_run_dir_is_the_folder_of_the_run_else_the_working_directory(context, tmp_path, monkeypatch):
    monkeypatch.delenv("ALLRANKS_RUN_DIR", raising=False)
    assert context().run_dir == Path()
    monkeypatch.setenv("ALLRANKS_RUN_DIR", str(tmp_path))
    assert context().run_dir == tmp_path


def test_dtypes_and_odd_shapes_come_back(context, tmp_path):
    class Holder:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    ctx = context()
    ctx.checkpoints(tmp_path / "c", thing=Holder(tensors), background=False).save()
    other = Holder({})
    ctx = context()
    ctx.checkpoints(tmp_path / "c", thing=other)
    assert other.state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert other.state[name].dtype == tensor.dtype
        assert torch.equal(other.state[name].to(torch.complex64), tensor.to(torch.complex64))


def test_the_newest_and_the_best_stay(loop, tmp_path):
    made = loop(keep=2, best="loss:min", background=False)
    for loss in (0.5, 0.1, 0.4, 0.3, 0.2, 0.9):
        made.train(1)
        made.checkpoints.save(loss)
    assert steps(tmp_path / "checkpoints") == [6, 5, 2]


def test_the_newest_is_the_one_saved_last_whatever_its_step(loop, tmp_path):
    made = loop(background=False, keep=9)
    made.train(3)
    made.checkpoints.save()
    again = loop(resume=False, background=False, keep=9)
    assert again.checkpoints.resumed is None
    again.train(2)
    again.checkpoints.save()
    assert steps(tmp_path / "checkpoints") == [2, 3]
    assert loop().checkpoints.resumed.step == 2


def test_a_second_save_of_a_step_replaces_the_first(loop, tmp_path):
    made = loop(best="accuracy:max", background=False)
    made.train(1)
    made.checkpoints.save()
    made.checkpoints.save(0.5)
    (entry,) = entries(tmp_path / "checkpoints")
    assert (entry.manifest.metric, entry.manifest.sequence) == (0.5, 2)
    assert not unfinished(tmp_path / "checkpoints")


@pytest.mark.parametrize(("every", "calls"), [(1, 3), (9, 1)])
def test_the_state_is_read_once_a_save_and_once_ahead_of_the_first(context, tmp_path, every, calls):
    class Counted:
        calls = 0

        def state_dict(self):
            self.calls += 1
            return {}

        def load_state_dict(self, state):
            pass

    part = Counted()
    checkpoints = context().checkpoints(tmp_path, part=part, every=every, background=False, save_at_end=False)
    for _ in range(3):
        checkpoints.step()
    checkpoints._schedule._every_steps = 9
    checkpoints.step()
    assert part.calls == calls


def test_every_means_multiples(loop, tmp_path):
    loop(every="3 steps", keep=9, background=False).train(10)
    assert steps(tmp_path / "checkpoints") == [9, 6, 3]


def test_a_signal_saves_and_stops(loop, tmp_path, capfd):
    made = loop()
    made.train(2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert made.train(1)
    assert made.ctx.stopping
    assert made.checkpoints.step()
    assert not list(problems(tmp_path / "checkpoints" / "step-000000003"))
    assert "stopping at step 3: got SIGUSR1; saved" in capfd.readouterr().err


def test_nothing_is_done_between_micro_batches(loop, tmp_path):
    made = loop(every=1, background=False)
    made.ctx.progress.accumulation = 2
    assert not made.checkpoints.step()
    assert made.ctx.progress.step == 0
    made.ctx.progress.micro = 1
    assert not made.checkpoints.step()
    assert steps(tmp_path / "checkpoints") == [1]


def test_steps_are_counted_by_whoever_counts_them(context, tmp_path):
    ctx = context()
    model = ctx.prepare(nn.Linear(2, 2))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    checkpoints = ctx.checkpoints(tmp_path / "c", model=model, optimizer=optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoints.step()
    assert ctx.progress.step == 3


def test_config_is_kept(loop, context, tmp_path):
    made = loop(config={"lr": 0.1, "layers": [1, 2]}, background=False)
    made.checkpoints.save()
    assert loop().checkpoints.resumed.config == {"lr": 0.1, "layers": [1, 2]}


def test_another_model_is_refused_and_nothing_is_loaded(loop):
    made = loop(background=False)
    made.train(1)
    made.checkpoints.save()
    torch.manual_seed(3)
    with pytest.raises(RankError, match="is of another model") as raised:
        loop(width=7)
    assert "0.weight ([6, 4] there, [7, 4] here)" in str(raised.value)
    assert "optimizer: parameter 0 is [6, 4] there and [7, 4] here" in str(raised.value)


def test_keys_of_another_model_are_named(context, tmp_path):
    context().checkpoints(tmp_path, model=nn.Linear(2, 2), background=False).save()
    before = nn.Bilinear(2, 2, 2, bias=False)
    weights = before.weight.clone()
    with pytest.raises(RankError, match="bias, which the model does not have"):
        context().checkpoints(tmp_path, model=before)
    assert torch.equal(before.weight, weights)
    with pytest.raises(RankError, match=r"model: it lacks 0\.weight, 0\.bias"):
        context().checkpoints(tmp_path, model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(RankError, match="it holds no ema"):
        context().checkpoints(tmp_path, model=nn.Linear(2, 2), ema=nn.Linear(2, 2))


def test_another_number_of_parameters_is_refused(context, tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    context().checkpoints(tmp_path, optimizer=optimizer, background=False).save()
    with pytest.raises(RankError, match="optimizer: it is of 2 parameters, and here are 1"):
        context().checkpoints(tmp_path, optimizer=torch.optim.SGD([model.weight]))


def test_a_part_that_cannot_load_is_named(context, tmp_path):
    class Picky:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise ValueError("not this one")

    context().checkpoints(tmp_path, picky=Picky(), background=False).save()
    with pytest.raises(RankError, match=r"picky cannot be loaded\n  why: ValueError: not this one"):
        context().checkpoints(tmp_path, picky=Picky())


def test_parts_that_are_not_asked_for_are_told(context, tmp_path, capfd):
    context().checkpoints(tmp_path, model=nn.Linear(2, 2), ema=nn.Linear(2, 2), background=False).save()
    context().checkpoints(tmp_path, model=nn.Linear(2, 2))
    assert "also holds ema, which ctx.checkpoints() was not given" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"best": "loss"}, "does not say what is best"),
        ({"best": "loss:less"}, "does not say what is best"),
        ({"every": "often"}, "every='often'"),
        ({"config": {"a": {1}}}, r"config\['a'\] cannot be saved"),
        ({"number": 3}, r"ctx.checkpoints\(number=...\): int has no state_dict"),
    ],
)
def test_arguments_that_make_no_sense(context, tmp_path, options, text):
    with pytest.raises(RankError, match=text):
        context().checkpoints(tmp_path, **{"model": nn.Linear(1, 1), **options})


def test_nothing_to_save(context, tmp_path):
    with pytest.raises(RankError, match="without anything to save"):
        context().checkpoints(tmp_path)


def test_a_folder_that_cannot_be_written_is_told_at_once(context, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match="checkpoints cannot be written to"):
        context().checkpoints(tmp_path / "file" / "below", model=nn.Linear(1, 1))


def test_a_folder_that_goes_away_costs_the_save_and_not_the_training(loop, tmp_path, capfd):
    made = loop(background=False)
    made.train(1)
    made.checkpoints.save()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    made.train(1)
    made.checkpoints.save()
    assert not made.checkpoints.wait()
    assert "the checkpoint of step 2 could not be saved" in str(made.checkpoints.last_error)
    assert capfd.readouterr().err.count("allranks: error: the checkpoint of step 2") == 1
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints")
    made.train(1)
    made.checkpoints.save()
    assert made.checkpoints.wait()
    assert steps(tmp_path / "checkpoints") == [3, 1]


def test_random_states_of_all_kinds_continue(loop):
    import random

    import numpy

    made = loop(background=False)
    made.checkpoints.save()
    drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    made = loop()
    assert [random.random(), numpy.random.rand(), torch.rand(1).item()] == drawn


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_no_finite_number_is_never_the_best(loop, tmp_path, mode):
    made = loop(keep=1, best=f"loss:{mode}", background=False)
    for loss in (float("nan"), 0.5, float("inf"), -float("inf"), float("nan")):
        made.train(1)
        made.checkpoints.save(loss)
        assert made.checkpoints.wait()
    assert steps(tmp_path / "checkpoints") == [5, 2]


def test_old_ones_that_cannot_be_removed_do_not_fail_the_save(loop, tmp_path, monkeypatch, capfd):
    def fail(*args, **kwargs):
        raise ValueError("not today")

    monkeypatch.setattr("allranks.runtime.checkpoint.directory.CheckpointDirectory.prune", fail)
    made = loop(background=False)
    made.checkpoints.save()
    assert made.checkpoints.wait()
    assert "could not be removed: ValueError: not today" in capfd.readouterr().err


def test_beginning_anew_loses_nothing_that_is_there(loop, tmp_path, capfd):
    made = loop(background=False, best="loss:min", keep=2)
    for loss in (0.1, 0.5):
        made.train(1)
        made.checkpoints.save(loss)
    weights = made.weights()
    again = loop(background=False, best="loss:min", keep=1, resume=False)
    for loss in (0.9, 0.7, 0.8, 0.85):
        again.train(1)
        again.checkpoints.save(loss)
    assert steps(tmp_path / "checkpoints") == [4, 2]
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("*.before")) == ["step-000000001.before", "step-000000002.before"]
    assert equal(load(folder / "step-000000002.before", "model"), weights)
    assert "step-000000002.before" in capfd.readouterr().err
    third = loop(background=False, keep=1, resume=False)
    third.train(2)
    third.checkpoints.save()
    assert steps(folder) == [2, 4]
    assert (folder / "step-000000002.before-2").exists()


def test_a_save_within_an_effective_batch_is_refused(loop, tmp_path):
    made = loop(background=False)
    made.ctx.progress.accumulation = 2
    with pytest.raises(RankError, match="within an effective batch, after micro-batch 1 of 2"):
        made.checkpoints.save()
    made.ctx.progress.micro = 1
    made.checkpoints.save()
    assert steps(tmp_path / "checkpoints") == [0]


def test_a_save_notices_a_request_to_stop(loop, tmp_path, capfd):
    made = loop()
    made.checkpoints.save()
    assert not made.ctx.stopping
    os.kill(os.getpid(), signal.SIGTERM)
    made.ctx.progress.step = 7
    made.checkpoints.save()
    assert made.ctx.stopping
    assert steps(tmp_path / "checkpoints") == [7, 0]
    made.checkpoints.save()
    assert capfd.readouterr().err.count("stopping at step 7: got SIGTERM; saved") == 1


def test_a_second_checkpointer_is_refused_until_the_first_is_closed(context, tmp_path):
    ctx = context()
    first = ctx.checkpoints(tmp_path / "a", model=nn.Linear(1, 1))
    with pytest.raises(RankError, match=r"was called before in this context, for .*/a"):
        ctx.checkpoints(tmp_path / "b", model=nn.Linear(1, 1))
    first.close()
    ctx.checkpoints(tmp_path / "b", model=nn.Linear(1, 1))


def test_a_loader_and_an_optimizer_that_are_not_saved_are_told_once(context, tmp_path, capfd):
    ctx = context()
    model = ctx.prepare(nn.Linear(2, 2))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=1, quiet=True)
    checkpoints = ctx.checkpoints(tmp_path / "c", every=1, model=model)
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
        checkpoints.step()
    told = capfd.readouterr().err
    assert told.count("the loader is not among the parts: its epochs start again after a resume") == 1
    assert told.count("the optimizer is not among the parts") == 1


def test_all_that_is_at_work_is_saved_and_nothing_told(context, tmp_path, capfd):
    ctx = context()
    model = ctx.prepare(nn.Linear(2, 2))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=1, quiet=True)
    checkpoints = ctx.checkpoints(tmp_path / "c", every=1, model=model, optimizer=optimizer, loader=loader)
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
        checkpoints.step()
    assert "not among the parts" not in capfd.readouterr().err
