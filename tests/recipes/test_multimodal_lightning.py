"""The recipe with images, sounds and captions: what it learns, and the files that it reads."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path

import pytest
import torch

from packages import needs

RECIPE = Path(__file__).parents[2] / "recipes" / "multimodal-lightning"
SHOWN = re.compile(r"^\[0\] Epoch (\d+): exact (\d\.\d{4}), top1 (\d\.\d{4})$", re.MULTILINE)

pytestmark = needs("lightning")


def test_the_job_file_reaches_its_quality_with_two_ranks(allranks):
    """It takes more than 10 s: it is a whole training, and Lightning is large to import."""
    words = ("--nproc-per-node", "2")
    done = allranks("run", RECIPE / "job.yaml", *words, timeout=600, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 0, done.stderr
    shown = SHOWN.findall(done.stdout)
    assert [epoch for epoch, _, _ in shown] == ["2", "4", "6", "8"]
    assert float(shown[-1][1]) >= 0.85
    assert float(shown[-1][2]) >= 0.95
    lines = [json.loads(line) for line in (allranks.run() / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "contrast" in line] == [*range(9, 240, 10)]
    assert [f"{line['exact']:.4f}" for line in lines if "exact" in line] == [exact for _, exact, _ in shown]


def test_files_of_scenes_are_read(recipe, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for number in range(7):
        pillow.new("RGB", (40, 20), (255, 51, 0)).save(tmp_path / f"{number}.png")
        with wave.open(str(tmp_path / f"{number}.wav"), "wb") as recording:
            recording.setparams((1, 2, 8000, 0, "NONE", ""))
            recording.writeframes((16384).to_bytes(2, "little", signed=True) * 3)
        (tmp_path / f"{number}.txt").write_text(f"Seen {number % 2}" + " again" * (number == 6))
    training, held_out, vocabulary = recipe["data"].load(tmp_path, 4, 5)
    assert (len(training), len(held_out)) == (5, 2)
    assert vocabulary.numbers == {"0": 2, "1": 3, "seen": 4}
    image, audio, text = held_out[1]
    assert image[:, 1, 1].tolist() == pytest.approx([1, 0.2, 0])
    assert audio.tolist() == [0.5, 0.5, 0.5, 0, 0]
    assert text.tolist() == [4, 2, 0]  # Cut to the longest caption that is trained on.
    (tmp_path / "3.wav").unlink()
    with pytest.raises(SystemExit, match=r"why: .*3\.wav is missing"):
        recipe["data"].load(tmp_path, 4, 5)


SMALL = ["--image-size=8", "--samples=512", "--width=16", "--layers=1", "--batch-size=480"]


@pytest.fixture(scope="module")
def train(warm_lightning, stopping, tmp_path_factory):
    """Give a function that trains four steps of an epoch in a directory; it gives what was recorded, and the state."""
    root = tmp_path_factory.mktemp("multimodal")

    def run(name, ranks, *, stopped=False):
        folder = root / name
        folder.mkdir(exist_ok=True)
        script, words = RECIPE / "train.py", [*SMALL, "--epochs=1", "--checkpoint-dir", folder / "saved"]
        if stopped:
            script, words = stopping, [script, *words]
        done = warm_lightning.run_ranks(script, words, folder, ranks, CUDA_VISIBLE_DEVICES="")
        assert [code for code, _, _ in done] == [75 if stopped else 0] * ranks, done
        said = done[0][1].decode() + done[0][2].decode()
        newest = sorted((folder / "saved").glob("step-*.ckpt"))[-1]
        return said, torch.load(newest, weights_only=False)

    return run


def test_one_rank_learns_what_two_do_and_a_stop_changes_nothing(train):
    """Ranks add the same gradients in another order: single precision's 2^-24, which Adam's first steps enlarge.

    It takes more than 10 s on a slow machine: four trainings with Lightning.
    """
    said, alone = train("alone", 1)
    assert re.search(r"^Epoch 1: exact \d\.\d{4}, top1 \d\.\d{4}$", said, re.MULTILINE)  # An odd last epoch, too.
    assert alone["global_step"] == 4
    _, two = train("two", 2)
    _, left = train("stopped", 2, stopped=True)
    assert left["global_step"] == 1
    said, continued = train("stopped", 2)
    assert "allranks: continuing from step 1" in said
    assert continued["global_step"] == 4
    for name, tensor in two["state_dict"].items():
        if not name.endswith("in_proj_bias"):  # The keys' bias has no effect: its gradient is rounding errors alone.
            torch.testing.assert_close(alone["state_dict"][name], tensor, rtol=0, atol=1e-4)
        assert torch.equal(continued["state_dict"][name], tensor), name


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--data-dir", "nowhere"], "error: there is no directory nowhere: --data-dir DIR, or leave it out"),
        (["--epochs", "0"], "error: argument --epochs: invalid positive value: '0'"),
        (["--lr", "high"], "error: argument --lr: invalid float value: 'high'"),
        (["--lr", "-1"], "error: --lr must be greater than 0"),
        (["--width", "30"], "error: --width 30 does not divide by the 4 heads of a layer"),
        (["--samples", "127"], "error: --samples 127 is too few: a spectrum takes 128"),
    ],
)
def test_wrong_arguments_are_named(recipe, monkeypatch, capsys, args, text):
    monkeypatch.setattr("sys.argv", ["train.py", *args])
    with pytest.raises(SystemExit):
        recipe["train"].parse_args()
    assert text in capsys.readouterr().err


def test_without_pillow_a_directory_of_images_is_refused_at_once(recipe, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(recipe["train"], "find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["train.py", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit):
        recipe["train"].parse_args()
    assert "error: --data-dir needs a package: pip install pillow" in capsys.readouterr().err


def test_a_batch_that_is_larger_than_the_data_is_named(warm_lightning, tmp_path):
    """It takes more than 10 s on a slow machine: Lightning is large to import."""
    ((code, _, err),) = warm_lightning.run_ranks(
        RECIPE / "train.py", ["--batch-size", "1921"], tmp_path, 1, CUDA_VISIBLE_DEVICES=""
    )
    assert code == 1
    assert (
        "error: --batch-size 1921 is impossible\n  why: there are 1920 scenes to train on, and 1 ranks" in err.decode()
    )


def test_scenes_with_one_caption_are_equally_right(recipe):
    contrast, scale = recipe["model"].contrast, torch.tensor(3.0)
    axes = torch.eye(3)
    alike = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]])
    same = contrast(axes[[0, 0, 1]], axes[[0, 0, 1]], alike, scale)
    other = contrast(axes[[0, 0, 1]], axes[[1, 1, 0]], alike, scale)
    expected = -torch.tensor([20.0855, 20.0855, 0.0]).log_softmax(0)[0] * 2 / 3
    expected = expected - torch.tensor([0.0, 0.0, 20.0855]).log_softmax(0)[2] / 3
    assert same.item() == pytest.approx(expected.item(), rel=1e-4)
    assert other.item() > 10


def test_the_language_model_sees_no_later_word(recipe):
    model = recipe["model"].LanguageModel(words=9, length=4, width=8, layers=1).eval()
    prefix, texts = torch.randn(2, 2, 8), torch.tensor([[3, 4, 5], [6, 7, 8]])
    logits = model(prefix, texts)
    assert logits.shape == (2, 4, 9)
    torch.testing.assert_close(model(prefix, texts[:, :1]), logits[:, :2])
    described = model.describe(prefix, 4)
    torch.testing.assert_close(model(prefix, described[:, :3]).argmax(2), described)
