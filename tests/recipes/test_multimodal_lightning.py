"""The recipe with images, sounds and captions: what it learns, and the files that it reads."""

from __future__ import annotations

import json
import re
import wave
from pathlib import Path

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "multimodal-lightning"
SHOWN = re.compile(r"^\[0\] Epoch (\d+): exact (\d\.\d{4}), top1 (\d\.\d{4})$", re.MULTILINE)

pytest.importorskip("lightning")


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


def test_a_missing_directory_is_named(recipe, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--data-dir", "nowhere"])
    with pytest.raises(
        SystemExit, match="error: there is no directory nowhere\n  fix: --data-dir DIR, or leave it out"
    ):
        recipe["train"].main()


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
