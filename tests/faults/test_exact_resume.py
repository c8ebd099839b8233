"""A training that is killed, stopped and continued ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fault_tools import wait_for

SCRIPT = Path(__file__).parent.parent / "scripts" / "exact_training.py"
WEIGHTS = re.compile(r"step (\d+) weights ([0-9a-f]{64})")
SAMPLES = re.compile(r"^\[(\d+)\] epoch (\d+) step (\d+) samples \[(.*)\]$", re.MULTILINE)
LOSS = re.compile(r"epoch (\d+) loss (\d+\.\d{9})")
KILLS = 50


def command(folder: str, *options: str, ranks: int = 2, flags: tuple[str, ...] = ()) -> tuple[Any, ...]:
    flags = ("--nproc-per-node", str(ranks), "--backend", "gloo", *flags)
    return ("run", SCRIPT, *flags, "--", "--folder", folder, *options)


def weights(done: Any) -> tuple[int, str]:
    """Return the step and the digest of the weights that a training ended with."""
    assert done.rc == 0, done.stderr
    ((step, digest),) = WEIGHTS.findall(done.stdout)
    return int(step), digest


def samples(text: str) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each step, by epoch and step: those of rank 0 first."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for rank, epoch, step, numbers in SAMPLES.findall(text):
        found.setdefault((int(epoch), int(step)), {})[int(rank)] = json.loads(f"[{numbers}]")
    return {key: list(chain.from_iterable(by_rank[r] for r in sorted(by_rank))) for key, by_rank in found.items()}


class Torment:
    """Kills a rank, all ranks or the agent, again and again, at moments that are drawn."""

    def __init__(self, allranks: Any, checkpoints: Path, seed: int) -> None:
        self.allranks, self.checkpoints, self.random = allranks, checkpoints, random.Random(seed)
        self.kills: list[str] = []
        self.in_writing = 0
        self._seen: list[int] = []

    def run(self, *args: Any) -> str:
        """Run the command again whenever its agent was killed; return what the last one printed."""
        while True:
            process = self.allranks.popen(*args)
            while len(self.kills) < KILLS and self._kill(process):
                pass
            out, err = process.communicate(timeout=150)
            if process.returncode == 0:
                return str(out.decode())
            assert self.kills[-1] == "agent", err.decode()

    def _kill(self, process: Any) -> bool:
        """Kill something of a whole generation; tell whether the command still runs."""
        ranks = wait_for("ranks", lambda: self._new_ranks() or process.poll() is not None)
        if process.poll() is not None:
            return False
        self._seen = ranks
        if self.random.random() < 0.4:
            wait_for("a checkpoint in writing", lambda: self._is_writing() or process.poll() is not None)
            self.in_writing += self._is_writing()
        else:
            time.sleep(self.random.uniform(0.0, 0.3))  # A random moment is what is asked for.
        victim = self.random.choice(["a rank", "all ranks", "agent"])
        agent = self.allranks.record(self._run())["handle"]["pid"]
        for pid in {"a rank": [self.random.choice(ranks)], "all ranks": ranks, "agent": [agent]}[victim]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills.append(victim)
        if victim == "agent":
            process.wait(timeout=60)
        return process.poll() is None

    def _run(self) -> Path:
        return (self.allranks.folder / "runs" / "latest").resolve()

    def _is_writing(self) -> bool:
        with suppress(FileNotFoundError):
            return any(".tmp" in path.name for path in self.checkpoints.iterdir())
        return False

    def _new_ranks(self) -> list[int] | None:
        """Return the process ids of the newest generation, unless it was hurt before."""
        path = self._run() / "attempts" / "000" / "node-000" / "agent.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        started = [event["ranks"] for event in events if event["kind"] == "ranks-started"]
        pids = [rank["pid"] for rank in started[-1]] if started else []
        return pids if pids and pids != self._seen else None


@pytest.mark.timeout(600)
def test_fifty_kills_change_nothing(allranks: Any) -> None:
    options = ("--epochs", "400", "--size", "96", "--every", "5", "--quiet")
    undisturbed = weights(allranks(*command("whole", *options), timeout=150))
    torment = Torment(allranks, allranks.folder / "hurt", seed=20)
    flags = ("--max-restarts", "1000", "--restart-delay", "0")
    out = torment.run(*command("hurt", *options, flags=flags))
    assert len(torment.kills) == KILLS
    assert set(torment.kills) == {"a rank", "all ranks", "agent"}
    assert torment.in_writing > 0
    ((step, digest),) = WEIGHTS.findall(out)
    assert (int(step), digest) == undisturbed == (3200, digest)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_rank_that_is_asked_to_stop_makes_all_save_and_leave(
    allranks: Any, watch: Any, number: signal.Signals
) -> None:
    options = ("--epochs", "60", "--every", "1h", "--accumulate", "2")
    process = allranks.popen(*command("parts", *options, flags=("--max-restarts", "3")))
    watch.line(1, "epoch 2 ")
    os.kill(watch.event("ranks-started")["ranks"][1]["pid"], number)
    first, err = process.communicate(timeout=60)
    assert process.returncode == 75, err.decode()
    said = f"error: {watch.run.name} is to be continued\n  why: asked to stop, the ranks have saved and left\n"
    assert said in err.decode()
    status = watch.status()
    assert (status["state"], status["exit_code"], status["restarts"]) == ("PREEMPTED", 75, 0)
    assert f"got {number.name} (rank 1); saved parts/step-" in (watch.node / "rank-0.err").read_text()
    second = allranks(*command("parts", *options))
    whole = allranks(*command("whole", *options))
    assert weights(second) == weights(whole)
    parts, expected = samples(first.decode()), samples(whole.stdout)
    assert parts
    assert not parts.keys() & samples(second.stdout).keys()
    assert parts | samples(second.stdout) == expected


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_to_the_agent_reaches_the_ranks(allranks: Any, watch: Any, number: signal.Signals) -> None:
    process = allranks.popen(*command("parts", "--epochs", "2000", "--every", "1h"))
    watch.line(0, "epoch 2 ")
    os.kill(watch.agent(), number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err.decode()
    assert [event["signal"] for event in watch.events("warned")] == [number.name]


def test_cancelling_saves_and_ends_as_cancelled(allranks: Any, watch: Any) -> None:
    process = allranks.popen(*command("parts", "--epochs", "2000", "--every", "1h"))
    watch.line(0, "epoch 2 ")
    assert allranks("cancel").rc == 0
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert watch.status()["state"] == "CANCELLED"
    assert [event["code"] for event in watch.events("rank-exited")] == [75, 75]
    assert (allranks.folder / "parts" / "latest").exists()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_of_four_ranks_goes_on_with_fewer(allranks: Any, ranks: int) -> None:
    options = ("--size", "100", "--batch", "12", "--dropout", "0", "--epochs", "4", "--every", "5")
    whole = allranks(*command("whole", *options, ranks=4), timeout=150)
    # 9 steps an epoch: the newest checkpoint of two epochs lies in the middle of one.
    first = allranks(*command("parts", *options[:-4], "--epochs", "2", "--every", "7", ranks=4), timeout=150)
    assert first.rc == 0, first.stderr
    second = allranks(*command("parts", *options, ranks=ranks), timeout=150)
    steps = samples(whole.stdout)
    assert len(steps) == 36
    assert sorted(chain.from_iterable(steps[key] for key in steps if key[0] == 1)) == list(range(100))
    continued = samples(second.stdout)
    start = min(step for _, step in continued)
    assert start in (8, 15)  # The second save is put off while the first is still being written.
    assert continued == {key: steps[key] for key in steps if key[1] >= start}
    losses = {int(epoch): float(loss) for epoch, loss in LOSS.findall(whole.stdout)}
    found = {int(epoch): float(loss) for epoch, loss in LOSS.findall(second.stdout)}
    assert sorted(found) == ([0, 1, 2, 3] if start == 8 else [1, 2, 3])
    assert {epoch: losses[epoch] for epoch in found} == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("option", [("--strategy", "ddp"), ("--workers", "1")], ids=" ".join)
def test_a_killed_rank_changes_nothing_either_way(allranks: Any, watch: Any, option: tuple[str, str]) -> None:
    options = ("--epochs", "8", "--every", "3", *option)
    process = allranks.popen(*command("hurt", *options, flags=("--max-restarts", "3")))
    watch.line(1, "epoch 2 ")
    os.kill(watch.event("ranks-started")["ranks"][1]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, watch.status()["restarts"]) == (0, 1), err.decode()
    (hurt,) = WEIGHTS.findall(out.decode())
    assert (int(hurt[0]), hurt[1]) == weights(allranks(*command("whole", *options)))
