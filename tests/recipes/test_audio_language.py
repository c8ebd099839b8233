"""The recipe that writes what is heard: what it learns, that ranks agree, and how it is measured."""

from __future__ import annotations

import json
import math
import re
import sys
import tarfile
import wave
from pathlib import Path

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "audio-language"
SMALL = ["--melodies=60", "--width=16", "--layers=1", "--batch-size=8", "--steps=4", "--eval-every=1", "--beam=2"]
SHOWN = re.compile(r"^\[0\] Step (\d+): loss \d+\.\d{4}, exact (\d\.\d{4}), bleu (\d\.\d{4})$", re.MULTILINE)


def test_the_job_file_reaches_its_quality_with_two_ranks(allranks):
    """It takes more than 10 s: it is a whole training."""
    words = ("--nproc-per-node", "2")
    done = allranks("run", RECIPE / "job.yaml", *words, timeout=600, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert done.rc == 0, done.stderr
    shown = SHOWN.findall(done.stdout)
    assert [step for step, _, _ in shown] == ["100", "200", "300", "400"]
    assert float(shown[-1][1]) >= 0.9
    assert float(shown[-1][2]) >= 0.95


@pytest.fixture(scope="module")
def train(warm_ranks, stopping, tmp_path_factory):
    """Give a function that trains in a directory, and gives loss, exact matches and BLEU of each step."""
    root = tmp_path_factory.mktemp("audio")

    def run(name, ranks, *, stopped=False):
        folder = root / name
        folder.mkdir(exist_ok=True)
        script, words = RECIPE / "train.py", [*SMALL, "--checkpoint-dir", folder / "checkpoints"]
        if stopped:
            script, words = stopping, [script, *words]
        done = warm_ranks.run_ranks(script, words, folder, ranks, CUDA_VISIBLE_DEVICES="")
        assert [code for code, _, _ in done] == [75 if stopped else 0] * ranks, done
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(each["step"], each["loss"], each["exact"], each["bleu"]) for each in records if "bleu" in each]

    run.root = root
    return run


def test_ranks_do_not_change_the_losses_and_a_stop_changes_nothing(train):
    """Ranks add the same gradients in another order: single precision's 2^-24, which Adam's first steps enlarge."""
    alone = train("alone", 1)
    assert [step for step, *_ in alone] == [1, 2, 3, 4]
    two = train("two", 2)
    assert [loss for _, loss, *_ in two] == pytest.approx([loss for _, loss, *_ in alone], rel=1e-4)
    train("stopped", 2, stopped=True)
    assert train("stopped", 2) == two
    last = Path("checkpoints") / "step-000000004" / "rank-0.data"
    assert (train.root / "stopped" / last).read_bytes() == (train.root / "two" / last).read_bytes()


def test_a_batch_has_about_one_length_and_ranks_the_same_mix(recipe):
    data = recipe["data"]
    examples = [data.Example((), samples, "do") for samples in range(100)]
    recordings = data.Recordings(examples, data.Vocabulary(["do"]))
    bucketed = data.Bucketed(recordings, batch=8, parts=2, seed=0)
    chosen = [bucketed.choose(number) for number in range(8 * 12 * 2)]
    assert sorted(chosen[:96]) == sorted({*chosen[:96]})
    for start in range(0, 96, 8):
        batch = chosen[start : start + 8]
        assert max(batch) - min(batch) < 14  # Of 96 that are sorted, 8 follow each other; 4 are left out.
        first, second = batch[:4], batch[4:]
        assert sorted(batch)[::2] == first
        assert sorted(batch)[1::2] == second
    assert chosen[96:] != chosen[:96]
    again = data.Bucketed(recordings, 8, 2, 0)
    assert [again.choose(number) for number in (150, 3)] == [chosen[150], chosen[3]]


def test_bleu_is_that_of_its_paper(recipe):
    """By hand: of "a b c d" for "a b c e f", 3 of 4 words, 2 of 3 pairs, 1 of 2 triples and no four are right."""
    train = recipe["train"]
    found = train.count([1, 2, 3, 4], [1, 2, 3, 5, 6])
    assert found == [1, 0, 4, 5, 3, 4, 2, 3, 1, 2, 0, 1]
    assert train.bleu(found[2:]) == 0
    sums = [a + b for a, b in zip(found, train.count([1, 2, 3, 4], [1, 2, 3, 4]), strict=True)]
    expected = math.exp(1 - 9 / 8) * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25
    assert train.bleu(sums[2:]) == pytest.approx(expected)
    assert train.bleu(train.count([], [1])[2:]) == 0
    assert train.words([5, 6, 0, 7]) == [5, 6]


def test_the_decoder_sees_no_later_word_and_no_padding(recipe):
    torch.manual_seed(0)
    model = recipe["model"].Listener(words=9, width=16, layers=1).eval()
    audio = torch.randn(2, 2, 1600)
    lengths, texts = torch.tensor([[1600, 800], [900, 0]]), torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]])
    logits = model(audio, lengths, texts)
    assert logits.shape == (2, 4, 9)
    changed = texts.clone()
    changed[:, 2] = 8
    torch.testing.assert_close(model(audio, lengths, changed)[:, :3], logits[:, :3])
    other = audio.clone()
    other[1, 1] = 7.0  # Of a recording that is not there.
    torch.testing.assert_close(model(other, lengths, texts), logits)


def test_more_beams_find_a_text_that_is_likelier(recipe):
    """Greedily and by a search: the text that the network itself finds more likely is that of the search."""
    torch.manual_seed(1)
    model = recipe["model"].Listener(words=6, width=16, layers=1).eval()
    model.output.weight.data *= 6
    audio, lengths = torch.randn(16, 2, 800), torch.full((16, 2), 800)
    likely = []
    for beam in (1, 5):
        texts = model.write(audio, lengths, 4, beam)
        logits = model(audio, lengths, torch.nn.functional.pad(texts, (0, 1))[:, :5])[:, :4]
        chosen = logits.log_softmax(2).gather(2, texts[..., None])[..., 0]
        counts = (texts == 0).cumsum(1) - (texts == 0).long() < 1  # Up to the first END.
        likely.append((chosen * counts).sum(1))
        if beam == 1:
            torch.testing.assert_close(logits.argmax(2)[counts], texts[counts])
    assert (likely[1] >= likely[0] - 1e-4).float().mean() > 0.8
    assert likely[1].sum() > likely[0].sum()


def test_files_and_tar_files_of_them_are_read_alike(recipe, tmp_path):
    data = recipe["data"]
    folder, shards = tmp_path / "files", tmp_path / "shards"
    folder.mkdir()
    shards.mkdir()
    for number in range(10):
        write(folder / f"{number}.wav", [16384] * (3 + number))
        (folder / f"{number}.txt").write_text("Do re" if number else "do so")
    write(folder / "0.2.wav", [-16384])
    for shard in range(2):
        with tarfile.open(shards / f"{shard}.tar", "w") as archive:
            for path in sorted(folder.iterdir()):
                if int(path.name[0]) // 5 == shard:
                    archive.add(path, path.name)
    for where in (folder, shards):
        training, held_out = data.load(where)
        assert (len(training), len(held_out)) == (9, 1)
        assert [example.samples for example in training.examples] == [*range(4, 13)]
        assert training.vocabulary.words == ["", "?", "do", "re"]
        recordings, text = held_out[0]
        assert [each.tolist() for each in recordings] == [[0.5, 0.5, 0.5], [-0.5]]
        assert text.tolist() == [2, 1, 0]
    audio, lengths, texts = data.collate([held_out[0], training[0]])
    assert (audio.shape, lengths.tolist()) == ((2, 2, 4), [[3, 1], [4, 0]])
    assert texts.tolist() == [[2, 1, 0], [2, 3, 0]]
    (folder / "3.wav").unlink()
    with pytest.raises(SystemExit, match=r"3\.wav is missing"):
        data.load(folder)
    write(folder / "3.wav", [0], rate=16000)
    with pytest.raises(SystemExit, match="recordings must be WAV files of 8000 Hz and 16 bits"):
        data.load(folder)
    with pytest.raises(SystemExit, match="has 0 texts"):
        data.load(tmp_path)


def write(path, samples, rate=8000):
    with wave.open(str(path), "wb") as recording:
        recording.setparams((1, 2, rate, 0, "NONE", ""))
        recording.writeframes(b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--data-dir", "nowhere"], "error: there is no directory nowhere: --data-dir DIR, or leave it out"),
        (["--beam", "wide"], "error: argument --beam: invalid positive value: 'wide'"),
        (["--steps", "0"], "error: argument --steps: invalid positive value: '0'"),
        (["--batch-size", "0"], "error: argument --batch-size: invalid positive value: '0'"),
        (["--lr", "0"], "error: --lr must be greater than 0"),
        (["--melodies", "9"], "error: --melodies 9 is too few: 10 or more, of which every tenth is held out"),
        (["--width", "30"], "error: --width 30 does not divide by the 4 heads of a layer"),
    ],
)
def test_wrong_arguments_are_named(recipe, monkeypatch, capsys, args, text):
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit):
        recipe["train"].parse_args()
    assert text in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_named(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--melodies", "60", "--batch-size", "64"])
    with pytest.raises(SystemExit, match="--batch-size 64 is impossible\n  why: there are 54 examples, and 1 ranks"):
        recipe["train"].main()
