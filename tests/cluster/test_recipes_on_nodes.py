"""Recipes are taken off two nodes in the middle of their training, and end with what an undisturbed training gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sites import Site, SshSite, on

from allranks import contract
from mnist_files import write_mnist
from waiting import PATIENCE

RECIPES = Path(__file__).parents[2] / "recipes"
#: Of each recipe: arguments with which it is small, and has some steps left after the third.
SMALL = {
    "audio-language": "--melodies 60 --width 16 --layers 1 --batch-size 8 --steps 12 --eval-every 4 --beam 1",
    "bring-your-own": "",
    "language-model": "--data DATA/text.txt --layers 1 --width 16 --steps 12 --log-every 100 --strategy fsdp",
    "mnist": "--data-dir DATA --batch-size 8 --epochs 3",
    "multimodal-lightning": "--epochs 2 --image-size 8 --samples 512 --width 16 --layers 1",
    "reid": "--individuals 12 --individuals-per-batch 8 --image-size 16 --steps 12 --eval-every 4 --partial-fc",
}
#: In the first attempt, rank 0 stays in its third step until it is asked to stop, by a signal that any thread may get.
HELD = """\
import os, signal
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook

held, steps = Path(__file__).with_name("held"), 0

def hold(*_):
    global steps
    steps += 1
    if steps == 3 and os.environ["RANK"] == "0" and not held.exists():
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        held.touch()
        while os.read(reader, 1)[0] not in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            pass
        signal.set_wakeup_fd(-1)

register_optimizer_step_post_hook(hold)
"""
#: What a recipe prints as it goes on.
SHOWN = re.compile(r"^(?:Epoch|epoch|Step) \d+.*$", re.MULTILINE)


@pytest.mark.parametrize("recipe", SMALL)
@on("slurm", "ssh")
def test_a_recipe_that_is_taken_off_its_nodes_ends_as_if_undisturbed(
    site: Site, tmp_path: Path, request: pytest.FixtureRequest, recipe: str
) -> None:
    """Slurm requeues it; over SSH it is cancelled and resumed. The language model and the classifier are split.

    It takes more than 10 s: torch, and Lightning for one, is imported twice on each node, and Slurm lets a requeued job
    wait for 11 s.
    """
    lab, on_lightning = site.lab, recipe == "multimodal-lightning"
    warm = request.getfixturevalue("warm_lightning" if on_lightning else "warm_ranks")
    write_mnist(tmp_path)
    (tmp_path / "text.txt").write_text("the old fox sees the red hen and " * 300)
    args = SMALL[recipe].replace("DATA", str(tmp_path)).split()
    assert lab("init", "mine", "--recipe", recipe).rc == 0
    script = lab.folder / "mine" / ("torchrun_after.py" if recipe == "bring-your-own" else "train.py")
    done = warm.run_ranks(script, args, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert [code for code, _, _ in done] == [0, 0], done
    undisturbed = SHOWN.findall(done[0][1].decode()), measured(tmp_path)
    assert undisturbed[0]
    assert bool(undisturbed[1]) == (recipe != "bring-your-own")

    text = script.read_text()
    assert text.count("\nimport allranks\n") == 1
    script.write_text(text.replace("\nimport allranks\n", "\nimport allranks\nimport held\n"))
    script.with_name("held.py").write_text(HELD)
    lab.env["OMP_NUM_THREADS"] = "1"
    # Where Slurm itself starts the ranks, Lightning would requeue the job too if the recipe did not have its plug-in.
    launcher = ["--launcher", "direct"] if on_lightning and "direct" in site.launchers else []
    words = ("--on", "lab", "--nodes", "2", "--nproc-per-node", "1", *launcher, "--", *args)
    process = lab.popen("run", "mine/job.yaml", *words)
    site.wait_until("the third step", script.with_name("held").exists)
    run = lab.run()
    site.let_save()
    if isinstance(site, SshSite):
        assert lab("cancel", timeout=PATIENCE).rc == 0
        process.communicate(timeout=PATIENCE)
        process = lab.popen("resume", run.name)
    else:
        site.requeue((run / contract.attempt_dir(0) / contract.JOB).read_text().strip())
    _, err = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, err.decode()
    left, resumed = (saved(run, attempt) for attempt in (0, 1))
    assert 3 <= left == resumed < 12
    shown = [path.read_text() for path in sorted(run.glob("attempts/*/node-000/rank-0.out"))]
    assert (SHOWN.findall("".join(shown)), measured(run)) == undisturbed
    site.assert_nothing_left()


def measured(folder: Path) -> list[dict[str, Any]]:
    """Return what a training has recorded, but for times and speeds."""
    path = folder / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [
        {name: value for name, value in record.items() if name != "time" and not name.endswith("_per_second")}
        for record in records
    ]


def saved(run: Path, attempt: int) -> int:
    """Return the step that an attempt started with, or that the first one saved as it left."""
    notes = map(json.loads, (run / contract.CHECKPOINTS_FILE).read_text().splitlines())
    return next(note["step"] for note in notes if note["attempt"] == attempt and (attempt or note["leaving"]))
