"""A training that is killed, stopped and continued ends as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torment import Torment

from exact_runs import command, samples, trained, undisturbed, undisturbed_output, weights_in
from waiting import PATIENCE, wait_for

LOSS = re.compile(r"epoch (\d+) loss (\d+\.\d{9})")
KILLS = 50
STOPS = 15
CONTINUED = re.compile(r"continuing from hurt/step-(\d+) ")
#: 1200 steps, and a save every few of them.
LONG = ("--epochs", "150", "--size", "96", "--every", "5", "--quiet")
#: With a pause in each step it lasts as long as what happens to it, and takes less from the machine.
SLOWLY = ("--slow-until", "never", "--pause", "0.01")


@pytest.mark.timeout(900)
def test_fifty_kills_change_nothing(allranks: Any) -> None:
    """It takes more than 10 s: a training starts fifty times and more.

    The agent is drawn less often than ranks: its end is one of the command too, and the next one imports torch again.
    """
    whole = undisturbed(allranks, *LONG)
    victims = [*["a rank", "all ranks"] * 3, "agent"]
    hurt = allranks.folder / "hurt"
    torment = Torment(allranks, hurt, signal.SIGKILL, times=KILLS, victims=victims, seconds=0.5, seed=20)
    out = torment.run(*command("hurt", *LONG, *SLOWLY, flags=("--max-restarts", "1000", "--restart-delay", "0")))
    assert len(torment.hit) == KILLS
    assert set(torment.hit) == set(victims)
    assert {victim for victim, _ in torment.ends} == {"agent"}
    assert torment.in_writing > 0
    assert weights_in(out) == whole
    assert whole[0] == 1200


@pytest.mark.timeout(900)
def test_many_stops_change_nothing(allranks: Any) -> None:
    """It takes more than 10 s: the command starts again after each stop."""
    whole = undisturbed(allranks, *LONG)
    victims = ["a rank", "all ranks", "agent", "command"]
    hurt = allranks.folder / "hurt"
    torment = Torment(allranks, hurt, signal.SIGTERM, times=STOPS, victims=victims, seconds=1.0, seed=20)
    out = torment.run(*command("hurt", *LONG, *SLOWLY))
    assert len(torment.hit) == len(torment.ends) == STOPS
    assert set(torment.hit) == set(victims)
    # A rank that does not listen yet dies of the signal.
    assert {code for victim, code in torment.ends if "rank" in victim} <= {75, 143}
    assert {code for victim, code in torment.ends if "rank" not in victim} == {143}
    assert 75 in {code for _, code in torment.ends}
    assert torment.in_writing > 0
    assert weights_in(out) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_rank_that_is_asked_to_stop_makes_all_save_and_leave(
    allranks: Any, watch: Any, number: signal.Signals
) -> None:
    """It takes more than 10 s: a training, its continuation, and once for all the undisturbed one."""
    options = ("--epochs", "60", "--every", "1h", "--accumulate", "2")
    process = allranks.popen(*command("parts", *options, flags=("--max-restarts", "3")))
    watch.line(1, "epoch 2 ")
    os.kill(watch.event("ranks-started")["ranks"][1]["pid"], number)
    first, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err.decode()
    *_, stopped, following = err.decode().splitlines()
    step = re.fullmatch(
        rf"allranks: {watch.run.name} stopped at step (\d+), with a checkpoint "
        r"\(the ranks have saved and exited, as requested\)",
        stopped,
    )[1]
    assert following == f"next: allranks resume {watch.run.name} (from step {step})"
    status = watch.status()
    assert (status["state"], status["exit_code"], status["restarts"]) == ("PREEMPTED", 75, 0)
    assert f"got {number.name} (rank 1); saved parts/step-" in (watch.node / "rank-0.err").read_text()
    second, _ = trained(allranks, "parts", *options)
    whole = undisturbed_output(allranks, *options)
    assert weights_in(second) == weights_in(whole)
    parts, expected = samples(first.decode()), samples(whole)
    assert parts
    assert not parts.keys() & samples(second).keys()
    assert parts | samples(second) == expected


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_to_the_agent_reaches_the_ranks(allranks: Any, watch: Any, number: signal.Signals) -> None:
    """It takes more than 10 s on a slow machine: a training imports torch, trains and saves."""
    process = allranks.popen(*command("parts", "--epochs", "2000", "--every", "1h"))
    watch.line(0, "epoch 2 ")
    os.kill(watch.agent(), number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, err.decode()
    assert [event["signal"] for event in watch.events("warned")] == [number.name]


@pytest.mark.parametrize("name", ["cancel", "SIGINT", "SIGHUP"])
def test_cancelling_saves_and_resume_says_from_where(allranks: Any, watch: Any, name: str) -> None:
    """By the verb, by Ctrl-C and by a terminal that is closed.

    It takes more than 10 s on a slow machine: a training and its continuation.
    """
    process = allranks.popen(*command("parts", "--epochs", "2000", "--every", "1h"))
    watch.line(0, "epoch 2 ")
    if name == "cancel":
        assert allranks("cancel").rc == 0
    else:
        process.send_signal(getattr(signal, name))
    err = process.communicate(timeout=PATIENCE)[1].decode()
    run, number = watch.run.name, signal.SIGTERM if name == "cancel" else getattr(signal, name)
    assert process.returncode == 128 + number
    assert watch.status()["state"] == "CANCELLED"
    assert [event["code"] for event in watch.events("rank-exited")] == [75, 75]
    (saved,) = (allranks.folder / "parts").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    cancelled = f"allranks: {run} was cancelled at step {step}, with a checkpoint (got {number.name})"
    assert err.splitlines()[-2:] == [cancelled, f"next: allranks resume {run} (from step {step})"]
    resumed = allranks.popen("resume")
    log = watch.run / "attempts" / "001" / "node-000" / "rank-0.err"
    wait_for("the continuation", lambda: log.exists() and f"step-{step:09} " in log.read_text())
    resumed.send_signal(signal.SIGTERM)
    first, *_ = resumed.communicate(timeout=PATIENCE)[1].decode().splitlines()
    assert first == f"allranks: {run}: attempt 2, from step {step}"


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a place for the checkpoints of four ranks, from which trainings with fewer continue."""
    return tmp_path_factory.mktemp("of-four") / "parts"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_of_four_ranks_goes_on_with_fewer(allranks: Any, of_four: Path, ranks: int) -> None:
    """It takes more than 10 s on a slow machine: the first one trains on four ranks twice."""
    options = ("--size", "100", "--batch", "12", "--dropout", "0", "--epochs", "4", "--every", "5")
    whole = undisturbed_output(allranks, *options, ranks=4)
    if not of_four.exists():
        # 9 steps an epoch: the newest checkpoint of two epochs lies in the middle of one.
        two_epochs = (*options[:-4], "--epochs", "2", "--every", "7")
        trained(allranks, of_four, *two_epochs, ranks=4)
    shutil.copytree(of_four, allranks.folder / "parts", symlinks=True)
    second, _ = trained(allranks, "parts", *options, ranks=ranks)
    steps = samples(whole)
    assert len(steps) == 36
    assert sorted(chain.from_iterable(steps[key] for key in steps if key[0] == 1)) == list(range(100))
    continued = samples(second)
    start = min(step for _, step, _ in continued)
    assert start in (7, 14)  # The second save is put off while the first is still being written.
    assert continued == {key: steps[key] for key in steps if key[1] >= start}
    losses = {int(epoch): float(loss) for epoch, loss in LOSS.findall(whole)}
    found = {int(epoch): float(loss) for epoch, loss in LOSS.findall(second)}
    assert sorted(found) == ([0, 1, 2, 3] if start == 7 else [1, 2, 3])
    assert {epoch: losses[epoch] for epoch in found} == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize(
    "way",
    [
        "--strategy ddp --workers 1",
        "--precision fp16 --clip-norm 0.5",
        "--precision bf16 --accumulate 2",
        "--strategy fsdp --precision fp16 --accumulate 2 --clip-norm 0.5",
    ],
)
def test_a_killed_rank_and_then_a_stop_change_nothing_either_way(allranks: Any, way: str) -> None:
    """It takes more than 10 s: a training, its continuation, and the undisturbed one."""
    options = ("--epochs", "6", "--every", "3", "--quiet", *way.split())
    first = allranks(*command("hurt", *options, "--hurt", flags=("--max-restarts", "1")))
    assert first.rc == 75, first.stderr
    assert allranks.record()["status"]["restarts"] == 1
    out, err = trained(allranks, "hurt", *options)
    (killed,), (stopped,) = ({*CONTINUED.findall(text)} for text in (first.stderr, err))
    assert killed == "000000009"
    assert stopped in ("000000017", "000000018")  # Ranks agree on a stop every half second, and where a save is due.
    assert weights_in(out) == undisturbed(allranks, *options)
