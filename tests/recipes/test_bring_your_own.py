"""Scripts for other launchers, before and after: stopped in the middle and continued, they end as if undisturbed."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

import pytest
import torch

from packages import needs

RECIPE = Path(__file__).parents[2] / "recipes" / "bring-your-own"
EPOCH = re.compile(r"^(?:\[0\] )?epoch (\d): loss (\d\.\d{4})$", re.MULTILINE)
STOPPED = re.compile(r"allranks: stopping at step (\d+): got SIGUSR1 \(rank 1\); saved checkpoints/step-")
ARGS = {"deepspeed": ["--deepspeed_config", RECIPE / "ds_config.json"]}
#: Runs a script; its last rank gets a signal after so many steps.
SIGNALLED = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

script, left = sys.argv[1], int(sys.argv[2])
sys.argv[:] = [script, *sys.argv[3:]]
sys.path[0] = os.path.dirname(script)

def count(*_):
    global left
    left -= 1
    if left == 0 and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
        os.kill(os.getpid(), signal.SIGUSR1)

register_optimizer_step_post_hook(count)
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def train(warm_ranks, tmp_path):
    """Give a function that runs a script in a directory of its own; it gives exit code, stdout and stderr of rank 0."""
    signalled = tmp_path / "signalled.py"
    signalled.write_text(SIGNALLED)

    def run(name, folder, ranks=2, signal_after=0, args=(), warm=None):
        (tmp_path / folder).mkdir(exist_ok=True)
        script, words = RECIPE / f"{name}.py", [*ARGS.get(name.partition("_")[0], []), *args]
        if signal_after:
            script, words = signalled, [script, signal_after, *words]
        done = (warm or warm_ranks).run_ranks(script, words, tmp_path / folder, ranks, CUDA_VISIBLE_DEVICES="")
        assert len({code for code, _, _ in done}) == 1, done
        code, out, err = done[0]
        return code, out.decode(), err.decode()

    return run


def test_the_job_file_reaches_its_loss_with_two_ranks(allranks, train, tmp_path):
    """It takes more than 10 s: torch is imported by an agent."""
    job = RECIPE / "job.yaml"
    done = allranks("run", job, "--nproc-per-node", "2", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 0, done.stderr
    epochs = EPOCH.findall(done.stdout)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
    assert float(epochs[-1][1]) < 0.05  # The targets' variance is 0.47.
    assert stop_and_continue(train, "torchrun") == epochs
    assert data(tmp_path / "parts") == data(allranks.run())


@needs("accelerate")
@pytest.mark.parametrize("name", ["accelerate", "deepspeed"])
def test_stopped_and_continued_it_equals_an_undisturbed_training_to_the_bit(train, tmp_path, name):
    """It takes more than 10 s: three trainings of two ranks, and Accelerate is large to import."""
    code, out, err = train(f"{name}_after", "whole")
    assert code == 0, err
    epochs = EPOCH.findall(out)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
    assert float(epochs[-1][1]) < 0.05
    assert stop_and_continue(train, name) == epochs
    assert data(tmp_path / "parts") == data(tmp_path / "whole")


def stop_and_continue(train, name, continues="continuing from checkpoints/step-", warm=None):
    """Stop a training of 128 steps between two saved steps; return the epochs that both parts have printed."""
    code, before, err = train(f"{name}_after", "parts", signal_after=40, warm=warm)
    assert code == 75, err
    # Ranks agree at steps whose distance at most doubles: after step 40, at 63 or sooner.
    assert 40 <= int(STOPPED.search(err)[1]) < 64
    code, after, err = train(f"{name}_after", "parts", warm=warm)
    assert code == 0, err
    assert f"allranks: {continues}" in err
    return EPOCH.findall(before) + EPOCH.findall(after)


def data(folder):
    """Return the last weights and optimizer state, as bytes."""
    assert (folder / "checkpoints" / "latest").readlink() == Path("step-000000128")
    return (folder / "checkpoints" / "latest" / "rank-0.data").read_bytes()


@needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_hugging_face_is_continued_to_the_bit(train, tmp_path):
    """It takes more than 10 s: three processes import transformers."""
    code, _, err = train("trainer_after", "whole")
    assert code == 0, err
    code, _, err = train("trainer_after", "parts", signal_after=40)
    assert code == 75, err
    (step,) = STOPPED.findall(err)
    code, out, err = train("trainer_after", "parts")
    assert code == 0, err
    assert float(re.search(r"^loss (\d\.\d{4})$", out, re.MULTILINE)[1]) < 0.05
    saved = tmp_path / "parts" / "checkpoints"
    assert {f"checkpoint-{each}" for each in (step, 50, 100, 128)} <= {path.name for path in saved.iterdir()}
    for name in ("model.safetensors", "optimizer.pt", "rng_state_1.pth", "trainer_state.json"):
        path = Path("checkpoints", "checkpoint-128", name)
        assert (tmp_path / "parts" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


def test_a_trainer_of_lightning_is_continued_to_the_bit(train, warm_lightning, tmp_path):
    """It takes more than 10 s: three trainings of two ranks, and Lightning is large to import."""
    code, out, err = train("lightning_after", "whole", warm=warm_lightning)
    assert code == 0, err
    epochs = EPOCH.findall(out)
    assert [number for number, _ in epochs] == ["1", "2", "3", "4"]
    assert float(epochs[-1][1]) < 0.05
    assert stop_and_continue(train, "lightning", "continuing from step", warm_lightning) == epochs
    whole, parts = (
        torch.load(tmp_path / folder / "checkpoints" / "step-000000128.ckpt", weights_only=False)
        for folder in ("whole", "parts")
    )
    assert parts["global_step"] == 128
    curves = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in ("whole", "parts")]
    whole_curve, curve = ([{**json.loads(line), "time": 0, "steps_per_second": 0} for line in each] for each in curves)
    assert curve == whole_curve
    assert [line["step"] for line in curve] == [49, 99]
    for name, tensor in whole["state_dict"].items():
        assert torch.equal(parts["state_dict"][name], tensor)
    moments = whole["optimizer_states"][0]["state"]
    for index, state in parts["optimizer_states"][0]["state"].items():
        assert torch.equal(state["exp_avg_sq"], moments[index]["exp_avg_sq"])


@needs("accelerate")
@pytest.mark.parametrize(
    ("name", "ranks", "args"),
    [("torchrun_before", 2, []), ("accelerate_before", 1, []), ("deepspeed_before", 1, ["--local_rank", 0])],
)
def test_the_scripts_before_are_complete(train, name, ranks, args):
    """It takes more than 10 s on a slow machine: Accelerate and DeepSpeed are large to import."""
    code, out, err = train(name, "before", ranks, args=args)
    assert code == 0, err
    assert float(EPOCH.findall(out)[-1][1]) < 0.05


def test_wrong_arguments_and_a_missing_config_are_named(train):
    """It takes more than 10 s on a slow machine: torch is imported first."""
    code, _, err = train("deepspeed_after", "wrong", 1, args=["--lr", "0.1"])
    assert (code, err.splitlines()[-1]) == (2, "deepspeed_after.py: error: unrecognized arguments: --lr 0.1")
    code, _, err = train("deepspeed_after", "wrong", 1, args=["--deepspeed_config", "nowhere.json"])
    assert (code, err.splitlines()[-1]) == (2, "deepspeed_after.py: error: there is no file nowhere.json")


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed", "trainer", "lightning"])
def test_the_readme_shows_the_lines_that_are_added(name):
    text = (RECIPE / "README.md").read_text()
    before, after = ((RECIPE / f"{name}_{when}.py").read_text().splitlines()[1:] for when in ("before", "after"))
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    changed = [line for line in lines if not line.startswith("@@") and line[1:].strip()]
    assert f"| `{name}_after.py` | {sum(line[0] == '+' for line in changed)} |" in text
    if name == "torchrun":
        assert "```diff\n" + "\n".join(changed) + "\n```" in text
