"""Saving with several ranks: shared writing, sharded models, agreeing to stop, another number of ranks."""

from __future__ import annotations

import pytest

from allranks.record.checkpoints import entries, problems, read_manifest, read_tensors
from waiting import ALL_HERE

START = """
import os, signal, sys
import allranks, torch
from torch import nn
from allranks.runtime.checkpoint import restore, snapshot
restore._TOGETHER = snapshot.LEAST_SHARE = int(os.environ.get("LEAST_SHARE", 64 << 20))

def digest(state):
    return [round(float(t.double().sum()), 9) for t in state.values()]
"""

PLAIN = (
    START
    + """
with allranks.init(seed=1) as ctx:
    torch.manual_seed(3)
    model = ctx.prepare(nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 8)))
    optimizer = ctx.optimizer(torch.optim.Adam, model, lr=0.1)
    checkpoints = ctx.checkpoints("checkpoints", model=model, optimizer=optimizer)
    bare = getattr(model, "module", model)
    print("loaded", checkpoints.resumed and checkpoints.resumed.step, *digest(bare.state_dict()))
    for _ in range(int(os.environ.get("STEPS", 3))):
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
    checkpoints.save()
    if ctx.is_main or os.environ.get("ALL"):
        print("saved", *digest(bare.state_dict()))
    print("random", torch.rand(1).item())
    print("moment", optimizer.state_dict()["state"][0]["exp_avg"].double().sum().item())
print("durable", checkpoints.last)
"""
)


def told(results, word):
    """Return what the ranks printed after a word, which all of them must have ended well to do."""
    for code, _, err in results:
        assert code == 0, err
    return [
        [line.removeprefix(word).strip() for line in out.splitlines() if line.startswith(word)] for _, out, _ in results
    ]


def test_two_ranks_share_the_writing_and_one_or_three_continue(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run_ranks(PLAIN, 2, LEAST_SHARE="1000")
    saved = told(first, "saved")[0][0]
    assert told(first, "durable") == [["checkpoints/step-000000003"]] * 2
    path = tmp_path / "checkpoints" / "step-000000003"
    files = read_manifest(path).files
    sizes = [files[f"rank-{rank}.data"]["size"] for rank in (0, 1)]
    assert min(sizes) > max(sizes) * 0.7
    assert not list(problems(path))
    for world, continues in ((1, "1 rank continues from 2:"), (3, "3 ranks continue from 1:")):
        again = run_ranks(PLAIN, world, STEPS="0")
        assert told(again, "loaded") == [[f"3 {saved}"]] * world
        assert continues in again[0][2]
        assert len({rank[0] for rank in told(again, "random")}) == world


def test_rank_0_writes_alone_what_is_small_and_random_states_continue_on_each_rank(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run_ranks(PLAIN, 2)
    assert set(read_manifest(tmp_path / "checkpoints" / "latest").files) == {
        "rank-0.data",
        "rank-0.json",
        "objects.pt",
        "config.json",
    }
    again = run_ranks(PLAIN, 2, STEPS="0")
    assert told(again, "random") == told(first, "random")
    assert told(again, "moment") == told(first, "moment")


SHARDED = (
    START
    + """
with allranks.init(seed=1) as ctx:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 5))
    model = ctx.prepare(net, strategy=os.environ["STRATEGY"])
    optimizer = ctx.optimizer(torch.optim.Adam, model, lr=0.1)
    checkpoints = ctx.checkpoints("checkpoints", model=model, optimizer=optimizer)
    for _ in range(int(os.environ.get("STEPS", 3))):
        model(torch.ones(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    state = getattr(model, "module", model).state_dict()
    print("weights", digest({name: full(tensor) for name, tensor in state.items()}))
    moments = optimizer.state_dict()["state"]
    print("moments", [round(full(moments[i]["exp_avg_sq"]).double().sum().item(), 9) for i in sorted(moments)])
    if "STEPS" not in os.environ:
        checkpoints.save()
"""
)


def test_a_sharded_model_is_continued_on_other_ranks_and_unsharded_and_back(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run_ranks(SHARDED, 2, STRATEGY="fsdp")
    weights, moments = told(first, "weights")[0], told(first, "moments")[0]
    path = tmp_path / "checkpoints" / "step-000000003"
    tensors = read_tensors(path, read_manifest(path))
    assert [chunk.shape for chunk in tensors["model/0.weight"].chunks] == [(4, 10), (3, 10)]
    for world, strategy in ((3, "fsdp"), (1, "auto"), (2, "ddp")):
        again = run_ranks(SHARDED, world, STRATEGY=strategy, STEPS="0")
        assert told(again, "weights") == [weights] * world
        assert told(again, "moments") == [moments] * world
    (path / "checkpoint.json").unlink()
    plain = run_ranks(SHARDED, 2, STRATEGY="ddp")
    again = run_ranks(SHARDED, 2, STRATEGY="fsdp", STEPS="0")
    assert told(again, "weights") == [told(plain, "weights")[0]] * 2
    assert told(again, "moments") == [told(plain, "moments")[0]] * 2


OFTEN = (
    START
    + """
with allranks.init(seed=1) as ctx:
    model = ctx.prepare(nn.Linear(300, 300))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    checkpoints = ctx.checkpoints("checkpoints", every="0.01 s", model=model, optimizer=optimizer)
    seen = set()
    while len(seen) < 3 and ctx.progress.step < 5000:
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
        seen.add(checkpoints.last)
    print("saved", len(seen), checkpoints.last_error)
"""
)


def test_ranks_that_share_the_writing_save_by_time_while_they_train(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(OFTEN, 2, LEAST_SHARE="1000")
    assert told(results, "saved") == [["3 None"]] * 2
    found = entries(tmp_path / "checkpoints")
    assert len(found) >= 2
    assert not [problem for entry in found for problem in problems(entry.path)]
    assert "rank-1.data" in found[0].manifest.files


STOPPED = (
    START
    + """
with allranks.init(seed=1) as ctx:
    model = ctx.prepare(nn.Linear(4, 4))
    optimizer = ctx.optimizer(torch.optim.SGD, model, lr=0.1)
    checkpoints = ctx.checkpoints("checkpoints", model=model, optimizer=optimizer)
    for number in range(100000):
        if number == 50 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpoints.step():
            break
    print("stopped", ctx.progress.step, flush=True)
"""
)


def test_a_signal_to_one_rank_stops_all_at_one_step(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(STOPPED, 2)
    assert [code for code, _, _ in results] == [75, 75], results
    steps = {out.split()[-1] for _, out, _ in results}
    assert len(steps) == 1
    assert 51 <= int(*steps) < 1000
    (entry,) = entries(tmp_path / "checkpoints")
    assert entry.step == int(*steps)
    assert not list(problems(entry.path))
    assert "got SIGTERM (rank 1); saved checkpoints/step-" in results[0][2]


def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told(run_ranks(PLAIN, 2), "saved")
    results = run_ranks(PLAIN.replace("300, 8", "300, 9"), 2)
    assert all(code not in (0, 75) and "is of another model" in err for code, _, err in results), results


def test_a_folder_that_cannot_be_written_is_told_on_all_ranks(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").write_text("")
    results = run_ranks(PLAIN, 2)
    assert all(code not in (0, 75) and "checkpoints cannot be written to" in err for code, _, err in results), results


UNREADABLE = """
from allranks.errors import AllranksError
from allranks.runtime.checkpoint import directory

def refuse(path):
    raise AllranksError(f"cannot read {path}", why="Permission denied")  # As of a directory of mode 0o300.

directory.unfinished = refuse
"""


def test_a_folder_that_cannot_be_read_is_told_on_all_ranks(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, _, err in run_ranks(UNREADABLE + PLAIN, 2):
        assert code not in (0, 75)
        assert "checkpoints cannot be written to checkpoints" in err
        assert "why: cannot read checkpoints: Permission denied" in err


def test_a_damaged_checkpoint_is_skipped_by_all_ranks(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        told(run_ranks(PLAIN, 2, LEAST_SHARE="1000"), "saved")
    data = tmp_path / "checkpoints" / "step-000000006" / "rank-1.data"
    content = data.read_bytes()
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    again = run_ranks(PLAIN, 2, STEPS="0")
    assert [rank[0].split()[0] for rank in told(again, "loaded")] == ["3", "3"]
    assert "step-000000006 is corrupt and is skipped: rank-1.data: the checksum of part 1 of 1" in again[0][2]


#: The job ends soon after torch has been imported, however long that takes.
IN_TIME = STOPPED.replace("model=model", 'leave_before="1h", model=model').replace("number == 50", "number < 0")
IN_TIME = IN_TIME.replace(START, f'{START}import time\nos.environ["ALLRANKS_END_TIME"] = str(time.time() + 4)\n')


def test_the_end_of_the_jobs_time_stops_all_ranks_ahead_of_it(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(IN_TIME, 2)
    assert [code for code, _, _ in results] == [75, 75], results
    (entry,) = entries(tmp_path / "checkpoints")
    assert {out.split()[-1] for _, out, _ in results} == {str(entry.step)}
    assert entry.step < 100000
    assert "the job's time is nearly over" in results[0][2]


SAVED_ONLY = (
    START
    + """
with allranks.init(seed=1) as ctx:
    model = ctx.prepare(nn.Linear(4, 4))
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    for number in range(5):
        if number == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        ctx.progress.step += 1
        checkpoints.save()
        if ctx.stopping:
            break
"""
)


def test_ranks_that_only_save_notice_a_signal_to_one_of_them(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(SAVED_ONLY, 2)
    assert [code for code, _, _ in results] == [75, 75], results
    assert [entry.step for entry in entries(tmp_path / "checkpoints")] == [3, 2, 1]
    assert "stopping at step 3: got SIGTERM (rank 1); saved checkpoints/step-000000003" in results[0][2]


SLOW = (
    ALL_HERE
    + START
    + """
from datetime import timedelta
from allranks.runtime.checkpoint import directory

seconds = 4.0
write = directory.write_rank

def slow(*given):
    # A disk that takes twice the timeout of collective operations.
    time.sleep(seconds)  # The time is the subject.
    return write(*given)

all_here(0, 1)
with allranks.init(seed=1, timeout=timedelta(seconds=seconds / 2)) as ctx:
    if ctx.is_main:
        directory.write_rank = slow
    torch.manual_seed(3)
    model = ctx.prepare(nn.Linear(300, 300))
    checkpoints = ctx.checkpoints("checkpoints", model=model)
    checkpoints.save()
    print("durable", checkpoints.wait())
    print("files", *sorted(file.name for file in checkpoints.last.glob("*.data")))
"""
)


@pytest.mark.parametrize(("least", "files"), [("1000", "rank-0.data rank-1.data"), ("99999999", "rank-0.data")])
def test_a_save_may_take_longer_than_the_timeout(run_ranks, tmp_path, monkeypatch, least, files):
    monkeypatch.chdir(tmp_path)
    results = run_ranks(SLOW, 2, LEAST_SHARE=least)
    assert told(results, "durable") == [["True"]] * 2
    assert told(results, "files") == [[files]] * 2
