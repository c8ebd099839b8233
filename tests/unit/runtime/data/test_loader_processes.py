"""Loaders in real ranks and with real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from allranks import Context
from allranks.runtime.data.mapped import Order
from allranks.runtime.data.workers import cpus_of
from waiting import PATIENCE, is_alive, wait_for

Ranks = Callable[..., list[tuple[int, str, str]]]


def said(results: list[tuple[int, str, str]]) -> list[list[Any]]:
    """Give what the ranks printed as JSON, line by line."""
    for code, _, err in results:
        assert code == 0, err
    return [[json.loads(line) for line in out.splitlines() if line.startswith(("[", "{"))] for _, out, _ in results]


TRAIN = """
import json, os, random
import torch, allranks
from torch.utils.data import TensorDataset

class Noisy:
    def __len__(self): return 23
    def __getitem__(self, i): return i, torch.rand(()).item(), random.random()

with allranks.init(device="cpu", seed=3) as ctx:
    loader = ctx.loader(Noisy(), global_batch_size=6, workers=int(os.environ["WORKERS"]))
    loader.load_state_dict(json.loads(os.environ["STATE"])) if "STATE" in os.environ else None
    steps = 0
    for epoch in loader.epochs(2):
        for number, *noise in loader:
            kept = ctx.progress.samples
            rows = [(epoch, *row) for row in zip(number.tolist(), *(n.tolist() for n in noise))]
            print(json.dumps([len(number), rows[:kept]]))
            steps += 1
            ctx.progress.stopping = str(steps) == os.environ.get("STOP")
            if ctx.progress.stopping:
                print(json.dumps(loader.state_dict()))
    loader.close()
    print(json.dumps(torch.rand(2).tolist()))
    ctx.progress.stopping = False
"""


def test_the_same_samples_on_any_number_of_ranks_and_workers(run_ranks: Ranks) -> None:
    def train(world_size: int, **variables: str) -> tuple[list[Any], list[Any], Any]:
        ranks = said(run_ranks(TRAIN, world_size, **variables))
        numbers = [rank.pop() for rank in ranks]
        states = [rank.pop() for rank in ranks] if "STOP" in variables else [None]
        assert all(step[0] for rank in ranks for step in rank)
        steps = [[row for part in step for row in part[1]] for step in zip(*ranks, strict=True)]
        return steps, numbers, states[0]

    alone, numbers, _ = train(1, WORKERS="0")
    for epoch in range(2):
        order = [row[1] for step in alone for row in step if row[0] == epoch]
        assert order == Order(23, 3).take(epoch, 0, 23).tolist()
    two = train(2, WORKERS="2")
    assert two[0] == alone
    assert two[1][0] == numbers[0]
    begun, _, state = train(3, WORKERS="0", STOP="5")
    rest, _, _ = train(2, WORKERS="1", STATE=json.dumps(state))
    assert begun + rest == alone


EVALUATE = """
import json
import torch, allranks
from torch.utils.data import IterableDataset, TensorDataset

class Stream(IterableDataset):
    def __iter__(self): return iter(range(17))

def fields():
    p = ctx.progress
    return [p.samples, p.total, p.full, p.last, p.left]

with allranks.init(device="cpu") as ctx:
    training = ctx.loader(TensorDataset(torch.arange(20)), global_batch_size=6)
    for _ in training:
        before = fields()
        for same_steps in (True, False):
            for dataset in (TensorDataset(torch.arange(17)), Stream()):
                loader = ctx.evaluation_loader(dataset, batch_size=2, same_steps=same_steps)
                for batch in loader:
                    numbers = batch[0] if isinstance(batch, list) else batch
                    assert ctx.progress.samples == len(numbers)
                    print(json.dumps(numbers.tolist()))
                assert fields() == before, (fields(), before)
                print(json.dumps(["end"]))
        break
    alone = ctx.evaluation_loader(TensorDataset(torch.arange(17)), batch_size=20, whole=True)
    assert [batch[0].tolist() for batch in alone] == [list(range(17))]
"""


def test_an_evaluation_has_each_sample_once(run_ranks: Ranks) -> None:
    ranks = said(run_ranks(EVALUATE, 3))
    for number in range(4):
        parts = []
        for rank in ranks:
            end = rank.index(["end"])
            parts.append(rank[:end])
            del rank[: end + 1]
        seen = [one for part in parts for batch in part for one in batch]
        assert sorted(seen) == list(range(17))
        counts = {len(part) for part in parts}
        assert len(counts) == 1 if number < 2 else counts <= {2, 3}


STREAM = """
import json, os, random
import torch, allranks
from torch.utils.data import IterableDataset, get_worker_info

class Stream(IterableDataset):
    epoch = None
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self):
        numbers = list(range(20))
        random.shuffle(numbers)
        for number in numbers:
            yield self.epoch, number, torch.rand(()).item()

with allranks.init(device="cpu", seed=3) as ctx:
    loader = ctx.loader(Stream(), global_batch_size=6, workers=int(os.environ["WORKERS"]))
    loader.load_state_dict(json.loads(os.environ["STATE"])) if "STATE" in os.environ else None
    for epoch in loader.epochs(2):
        for batch in loader:
            p = ctx.progress
            print(json.dumps([list(zip(*(part.tolist() for part in batch)))[:p.samples], p.total, p.left, p.last]))
            if "STOP" in os.environ and p.left == 0: break
        if "STOP" in os.environ: break
    print(json.dumps(loader.state_dict() | {"random": [torch.rand(2).tolist(), random.random()]}))
"""


def test_a_stream_has_the_same_batches_on_any_number_of_ranks(run_ranks: Ranks) -> None:
    def train(world_size: int, **variables: str) -> tuple[list[Any], dict[str, Any]]:
        ranks = said(run_ranks(STREAM, world_size, **variables))
        states = [rank.pop() for rank in ranks]
        steps = []
        for parts in zip(*ranks, strict=True):
            rows = sorted(row for part in parts for row in part[0])
            assert {part[1] for part in parts} == {len(rows)}
            steps.append([rows, parts[0][2:]])
        return steps, states[0]

    alone, state = train(1, WORKERS="0")
    assert [rest for _, rest in alone] == [[None, None], [None, None], [None, None], [0, 2]] * 2
    for epoch in range(2):
        rows = [row for rows, _ in alone for row in rows if row[0] == epoch]
        assert sorted(row[1] for row in rows) == list(range(20))
    three, other = train(3, WORKERS="1")
    assert three == alone
    assert other["random"] == state["random"]
    begun, state = train(2, WORKERS="0", STOP="1")
    rest, _ = train(1, WORKERS="0", STATE=json.dumps(state))
    assert begun + rest == alone


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pass_over_a_stream_that_is_held_changes_nothing_in_the_next(ctx: Context, sharded: bool) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    loader = ctx.loader(Stream(), batch_size=2, workers=1, sharded=sharded, quiet=True)
    held = iter(loader)
    assert next(held).tolist() == [0, 1]
    batches = iter(loader)
    assert next(batches).tolist() == [2, 3]
    del held
    assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7]]


SHARDED = """
import json, os
import torch, allranks
from torch.utils.data import IterableDataset

class Part(IterableDataset):
    def __iter__(self): return iter(range(100 * ctx.rank, 100 * ctx.rank + [7, 9][ctx.rank]))

with allranks.init(device="cpu") as ctx:
    loader = ctx.loader(Part(), batch_size=2, sharded=True, workers=int(os.environ["WORKERS"]))
    for epoch in loader.epochs(2):
        for batch in loader:
            p = ctx.progress
            print(json.dumps([batch.tolist(), p.samples, p.total, p.left]))
            if epoch == 0 and p.left == 0:
                state = loader.state_dict()
    if ctx.is_main: print(loader.state_dict()["epoch"], state["position"])
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_parts_of_different_length_end_together(run_ranks: Ranks, workers: str) -> None:
    results = run_ranks(SHARDED, 2, WORKERS=workers)
    ranks = said(results)
    epoch = [[[0, 1], 2, 4, None], [[2, 3], 2, 4, None], [[4, 5], 2, 4, None], [[6], 1, 3, 0]]
    assert ranks[0] == epoch * 2
    assert [step[0] for step in ranks[1]] == [[100, 101], [102, 103], [104, 105], [106, 107]] * 2
    lines = results[0][1].splitlines()
    assert lines.count("data: the epoch ended after 4 steps, for lack of samples on rank 0") == 2
    assert lines[-1] == "2 16"


WORKERS = """
import os, signal, sys, time
import torch, allranks

class Slow:
    def __len__(self): return 64
    def __getitem__(self, i): return os.getpid()

with allranks.init(device="cpu") as ctx:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    loader = ctx.loader(Slow(), batch_size=4, workers=2, quiet=True)
    seen = set()
    for epoch in loader.epochs(2):
        for step, batch in enumerate(loader):
            seen |= set(batch.tolist())
            if step == 3:
                print(*sorted(seen), flush=True)
                sys.stdin.readline()
    print("after", *sorted(seen), flush=True)
    sys.stdin.readline()
    loader.close()
"""


@pytest.fixture
def training(tmp_path: Path, clean_env: dict[str, str]) -> Callable[[], subprocess.Popen[str]]:
    """Give a function that starts a rank with workers, which leads a process group of its own."""
    path = tmp_path / "script.py"
    path.write_text(WORKERS)

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, str(path)], env=clean_env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )

    return start


def ended(pids: list[int]) -> bool:
    """Wait until none of the processes is there."""
    return wait_for("the end of workers", lambda: not any(map(is_alive, pids)))


def test_workers_survive_signals_to_the_group_and_end_with_the_loader(
    training: Callable[[], subprocess.Popen[str]],
) -> None:
    with training() as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        workers = [int(word) for word in rank.stdout.readline().split()]
        assert len(workers) == 2
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.killpg(rank.pid, number)
        print(file=rank.stdin, flush=True)
        assert [int(word) for word in rank.stdout.readline().split()] == workers
        print(file=rank.stdin, flush=True)
        assert rank.stdout.readline().split() == ["after", *map(str, workers)]
        assert all(is_alive(worker) for worker in workers)
        print(file=rank.stdin, flush=True)
        assert rank.wait(PATIENCE) == 0
        assert ended(workers)


def test_workers_end_when_their_rank_is_killed(training: Callable[[], subprocess.Popen[str]]) -> None:
    with training() as rank:
        assert rank.stdout is not None
        workers = [int(word) for word in rank.stdout.readline().split()]
        assert all(is_alive(worker) for worker in workers)
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait(PATIENCE)
        assert ended(workers)


STUCK = """
import os, subprocess, time
import torch, allranks
# How long torch waits for a worker before it loses patience.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5

class Stuck:
    def __len__(self): return 64
    def __getitem__(self, i):
        if i > 7:
            child = subprocess.Popen(["sleep", "600"])
            child.terminate()
            assert child.wait() == -15
            open(f"stuck-{os.getpid()}", "x").close()
            while True:
                time.sleep(600)
        return os.getpid()

ctx = allranks.init(device="cpu")
loader = ctx.loader(Stuck(), batch_size=4, workers=2, shuffle=False, quiet=True)
batches = iter(loader)
pids = {*next(batches).tolist(), *next(batches).tolist()}
while any(not os.path.exists(f"stuck-{pid}") for pid in pids):
    time.sleep(0.01)
print(*pids, flush=True)
if os.environ["LEAVE"] == "close": ctx.close()
"""


@pytest.mark.parametrize("leave", ["close", "exit"])
def test_workers_that_are_stuck_end_all_the_same(tmp_path: Path, clean_env: dict[str, str], leave: str) -> None:
    """It takes more than 10 s on a slow machine: an interpreter of its own imports torch."""
    path = tmp_path / "script.py"
    path.write_text(STUCK)
    env = {**clean_env, "LEAVE": leave}
    done = subprocess.run(
        [sys.executable, str(path)], env=env, cwd=tmp_path, timeout=PATIENCE, check=True, capture_output=True, text=True
    )
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    assert ended(workers)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([(0, range(8))], [8]),
        ([(0, range(8))] * 4, [2, 2, 2, 2]),
        ([(0, range(8))] * 3, [2, 2, 2]),
        ([(0, range(3))] * 3, [1, 1, 1]),
        ([(0, range(2))] * 4, [1, 1, 1, 1]),
        ([(0, range(0, 6)), (0, range(6, 8))], [6, 2]),
        ([(0, range(4)), (1, range(4)), (1, range(4))], [4, 2, 2]),
    ],
)
def test_cpus_are_shared_out_among_those_who_may_use_them(
    members: list[tuple[int, range]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A container's quota, which a machine that runs this may have, is another matter.
    monkeypatch.setattr("allranks.system.cgroups.quota", lambda: None)
    assert [cpus_of(rank, members) for rank in range(len(members))] == expected
