"""The re-identification recipe: what it learns, that ranks and a split classifier agree, and how it is measured."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional

RECIPE = Path(__file__).parents[2] / "recipes" / "reid"
#: Nine individuals to train on, and 25 images of three others, which no number of ranks here divides.
SMALL = [
    "--individuals=12",
    "--image-size=16",
    "--individuals-per-batch=8",
    "--warmup=1",
    "--steps=4",
    "--eval-every=1",
]
SHOWN = re.compile(
    r"^\[0\] Step (\d+): loss \d+\.\d{4}, mAP (\d\.\d{4}), top1 \d\.\d{4}, top5 \d\.\d{4}$", re.MULTILINE
)


@pytest.fixture(scope="module")
def train(warm_ranks, stopping, tmp_path_factory):
    """Give a function that trains in a directory, and gives its loss and mAP at each step, and what rank 0 said."""
    root = tmp_path_factory.mktemp("reid")

    def run(name, *args, ranks=1, stopped=False):
        folder = root / name
        folder.mkdir(exist_ok=True)
        words = [*SMALL, "--checkpoint-dir", folder / "checkpoints", *args]
        script = RECIPE / "train.py"
        if stopped:
            script, words = stopping, [script, *words]
        done = warm_ranks.run_ranks(script, words, folder, ranks, CUDA_VISIBLE_DEVICES="")
        assert [code for code, _, _ in done] == [75 if stopped else 0] * ranks, done
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(each["step"], each["loss"], each["mAP"]) for each in records if "mAP" in each], done[0][2].decode()

    run.root = root
    return run


@pytest.fixture(scope="module")
def split(train):
    """Give what a training with a split classifier on two ranks gives, which several tests compare with."""
    return train("split", "--partial-fc", ranks=2)[0]


def test_the_job_file_reaches_its_map_with_two_ranks(allranks):
    """It takes more than 10 s: it is a whole training."""
    words = ("--nproc-per-node", "2", "--", "--tracker", "wandb")
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = allranks("run", RECIPE / "job.yaml", *words, timeout=600, **variables)
    assert done.rc == 0, done.stderr
    assert "[0] Processes: 2 on cpu; " in done.stdout
    shown = {int(step): float(value) for step, value in SHOWN.findall(done.stdout)}
    assert [*shown] == [50, 100, 150, 200]
    assert shown[200] >= 0.7  # 0.3 before the first step.
    listed = json.loads(allranks("checkpoint", "ls", allranks.run() / "checkpoints", "--json").stdout)
    best = max(shown, key=shown.__getitem__)
    assert [entry["step"] for entry in listed] == sorted({best, 200})  # The best and the newest.
    (logged,) = (allranks.run() / "wandb").glob("offline-run-*/*.wandb")
    assert b"mAP" in logged.read_bytes()


def test_neither_ranks_nor_a_split_classifier_change_the_loss(train, split):
    """Ranks add the same gradients in another order: single precision's 2^-24, which Adam's first steps enlarge.

    It takes more than 10 s on a slow machine: seven ranks start.
    """
    alone, _ = train("alone")
    assert [step for step, _, _ in alone] == [1, 2, 3, 4]
    assert alone[3][1] < alone[0][1]
    two, _ = train("two", ranks=2)
    four, _ = train("four", "--partial-fc", ranks=4)  # Of nine classes, the last of four ranks has none.
    for losses in (two, split, four):
        assert [loss for _, loss, _ in losses] == pytest.approx([loss for _, loss, _ in alone], rel=1e-4)


def test_stopped_and_continued_equals_undisturbed_to_the_bit(train, split):
    _, said = train("stopped", "--partial-fc", ranks=2, stopped=True)
    assert "stopping at step 1: got SIGUSR1" in said
    shutil.copytree(train.root / "stopped", train.root / "on one rank")
    continued, said = train("stopped", "--partial-fc", ranks=2)
    assert "continuing from" in said
    assert continued == split
    last = Path("checkpoints") / "step-000000004"
    for rank in (0, 1):
        saved = [(train.root / name / last / f"rank-{rank}.data").read_bytes() for name in ("split", "stopped")]
        assert saved[0] == saved[1]
    alone, _ = train("on one rank", "--partial-fc")
    assert [loss for _, loss, _ in alone] == pytest.approx([loss for _, loss, _ in split], rel=1e-4)


EVALUATED = """
import sys
sys.path.insert(0, sys.argv[1])
import allranks, torch, train
from torch.utils.data import TensorDataset

angles = torch.tensor([0.0, 0.1, 0.3, 0.7, 1.5])
with allranks.init() as ctx:
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([0, 0, 1, 0, 2]))
    print(train.evaluate(ctx, torch.nn.Identity(), ctx.evaluation_loader(data, batch_size=1)))
"""


def test_each_image_is_looked_for_once_among_those_of_all_ranks(warm_ranks, tmp_path):
    """By hand, for images 0, 1 and 3, of one individual; images 2 and 4 are the only ones of theirs.

    Image 0 finds 1, 2, 3, 4: (1/1 + 2/3) / 2. So does image 1: 0, 2, 3, 4. Image 3 finds 2, 1, 0, 4: (1/2 + 2/3) / 2.
    """
    script = tmp_path / "evaluated.py"
    script.write_text(EVALUATED)
    for code, out, err in warm_ranks.run_ranks(script, [RECIPE], tmp_path, 2, CUDA_VISIBLE_DEVICES=""):
        assert code == 0, err.decode()
        scores = json.loads(out.decode().replace("'", '"'))
        assert scores == pytest.approx({"mAP": (5 / 6 + 5 / 6 + 7 / 12) / 3, "top1": 2 / 3, "top5": 1})


def test_a_batch_has_images_of_each_individual_once(recipe):
    data = recipe["data"]
    labels = [0] * 2 + [1] * 9 + [2] * 4 + [3] * 5 + [4] * 6
    images = data.Images([torch.zeros(3, 8, 8, dtype=torch.uint8)] * len(labels), labels, 8)
    balanced = data.Balanced(images, individuals=2, each=3, seed=0)
    chosen = [balanced.choose(number) for number in range(6 * 200)]
    turns = Counter()
    for start in range(0, len(chosen), 6):
        first, second = chosen[start : start + 3], chosen[start + 3 : start + 6]  # What two ranks would get.
        owners = [{labels[image] for image in part} for part in (first, second)]
        assert [len(owner) for owner in owners] == [1, 1]
        assert owners[0] != owners[1]
        turns.update(owners[0] | owners[1])
        for part in (first, second):
            assert len(set(part)) == min(3, labels.count(labels[part[0]]))
    assert set(chosen) == set(range(len(labels)))
    assert min(turns.values()) > 60  # Of 80: one of the five waits in each turn of two batches.
    again = data.Balanced(images, individuals=2, each=3, seed=0)
    assert [again.choose(number) for number in (700, 3)] == [chosen[700], chosen[3]]
    assert [data.Balanced(images, 2, 3, seed=1).choose(number) for number in range(60)] != chosen[:60]


def test_pooling_and_margins_are_those_of_their_papers(recipe):
    model = recipe["model"]
    maps = torch.rand(2, 5, 3, 4) + 0.1
    torch.testing.assert_close(model.GeM(1.0)(maps), maps.mean((2, 3)))
    torch.testing.assert_close(model.GeM(3.0)(maps)[1, 2] ** 3, (maps[1, 2] ** 3).mean())
    assert model.dynamic_margins([1, 16, 10_000]).tolist() == pytest.approx([0.55, 0.3, 0.1])
    angles, margins = torch.tensor([0.3, 1.5, 3.0]), torch.tensor([0.5, 0.2, 0.4])
    expected = [math.cos(0.8), math.cos(1.7), math.cos(3.0) - 0.4 * math.sin(0.4)]
    assert model.with_margin(angles.cos(), margins).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_nearest_center_of_a_class_counts(recipe):
    loss = recipe["model"].SubcenterArcFace([1, 16], 2, device=torch.device("cpu"), centers=2, scale=10)
    turned = torch.tensor([[0.0, 2.0], [1.0, 2.5]])  # Angles of the centers of both classes.
    loss.weight.data = 3 * torch.stack([turned.cos(), turned.sin()], 2)  # Their lengths do not matter.
    angle = torch.tensor(0.4)
    logits = torch.tensor([[math.cos(0.4 + 0.55), math.cos(0.6)], [math.cos(0.4), math.cos(0.6 + 0.3)]]) * 10
    for label in (0, 1):
        found = loss(torch.stack([angle.cos(), angle.sin()])[None], torch.tensor([label]))
        torch.testing.assert_close(found, functional.cross_entropy(logits[label][None], torch.tensor([label])))


def test_a_folder_of_images_for_each_individual_is_read(recipe, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for name, images in {"a": 1, "b": 3, "c": 2, "d": 2, "e": 1}.items():
        (tmp_path / name / "left").mkdir(parents=True)
        for number in range(images):
            pillow.new("RGB", (40, 20), (255, 51, 0)).save(tmp_path / name / "left" / f"{number}.png")
    (tmp_path / "a" / "notes.txt").touch()
    training, held_out = recipe["data"].load(tmp_path, 8, 64)
    assert training.labels == [0, 1, 1, 1, 2, 2, 3]
    assert [path.parts[-3:] for path in held_out.sources] == [("d", "left", "0.png"), ("d", "left", "1.png")]
    pixels, label = held_out[1]
    assert (pixels.shape, label) == ((3, 8, 8), 0)
    assert pixels[:, 4, 4].tolist() == pytest.approx([1, 0.2, 0])
    (tmp_path / "d" / "left" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"cannot read .*0\.png"):
        held_out[0]
    (tmp_path / "d" / "left" / "1.png").unlink()
    with pytest.raises(SystemExit, match="has 5 individuals, and none to evaluate with"):
        recipe["data"].load(tmp_path, 8, 64)
    with pytest.raises(SystemExit, match="a folder for each individual is expected"):
        recipe["data"].load(tmp_path / "b" / "left", 8, 64)


def test_without_pillow_a_folder_of_images_is_refused_at_once(recipe, monkeypatch, capsys):
    monkeypatch.setattr(recipe["train"], "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data-dir", "images"])
    with pytest.raises(SystemExit):
        recipe["train"].parse_args()
    assert "error: --data-dir needs a package: pip install pillow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "args", "text"),
    [
        (None, ["--steps", "many"], "error: argument --steps: invalid positive value: 'many'"),
        (None, ["--lr", "0"], "error: --lr and --scale must be greater than 0"),
        (None, ["--warmup", "-1"], "error: --warmup and --weight-decay must be 0 or more"),
        (None, ["--tracker", "paper"], "error: argument --tracker: invalid choice: 'paper'"),
        (None, ["--backbone", "resnet18"], "error: --backbone needs a package: pip install timm"),
        (None, ["--config", "nowhere.json"], "error: cannot read nowhere.json\n  why: [Errno 2] No such file"),
        ('{"lr": 1,}', [], "error: cannot read own.json\n  why: "),
        ('[["lr", 1]]', [], "error: cannot read own.json\n  why: 'list' object has no attribute 'items'"),
        ('{"lr": 1}', [], "error: the following arguments are required: --image-size, --width"),
        ('{"lr": 1, "rate": 2}', ["--image-size", "8"], "error: the following arguments are required: --width"),
        ('{"lr": "high"}', [], "error: argument --lr: invalid float value: 'high'"),
    ],
)
def test_wrong_arguments_and_configs_are_named(recipe, tmp_path, monkeypatch, capsys, config, args, text):
    monkeypatch.chdir(tmp_path)
    if "timm" in text and recipe["train"].find_spec("timm"):
        pytest.skip("timm is here")
    if config:
        (tmp_path / "own.json").write_text(config)
        args = ["--config", "own.json", *args]
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit) as caught:
        recipe["train"].parse_args()
    assert text in f"{caught.value.code}{capsys.readouterr().err}"


def test_a_config_holds_arguments_which_those_that_are_typed_override(recipe, tmp_path, monkeypatch):
    known = json.loads((RECIPE / "config.json").read_text())
    (tmp_path / "own.json").write_text(json.dumps({**known, "partial-fc": True, "pretrained": False, "lr": 0.5}))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(tmp_path / "own.json"), "--steps", "7"])
    args = recipe["train"].parse_args()
    assert (args.partial_fc, args.pretrained, args.lr, args.steps, args.width) == (True, False, 0.5, 7, 64)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--data-dir", "nowhere"], "error: there is no directory nowhere\n  fix: --data-dir DIR, or leave it out"),
        (
            ["--individuals-per-batch", "7"],
            "error: --individuals-per-batch 7 is impossible\n  why: there are 48 to train",
        ),
    ],
)
def test_missing_data_and_a_batch_that_does_not_divide_are_named(warm_ranks, tmp_path, args, text):
    done = warm_ranks.run_ranks(RECIPE / "train.py", args, tmp_path, 2, CUDA_VISIBLE_DEVICES="")
    for code, _, err in done:
        assert code == 1
        assert text in err.decode()
        assert "Traceback" not in err.decode()
