"""Scenes that are seen, heard and described: made here, or files in a directory."""

from __future__ import annotations

import itertools
import math
import wave
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

COLOURS = {"red": (1, 0.2, 0.2), "green": (0.2, 1, 0.2), "blue": (0.3, 0.3, 1), "yellow": (1, 1, 0.2)}
SHAPES = ("disc", "square", "cross", "ring")
PITCHES = {"low": 60, "middle": 120, "high": 240}  # oscillations in a recording
RHYTHMS = {"once": 1, "twice": 2, "often": 4}  # bursts in a recording
HELD_OUT = 6  # Every sixth combination, or file, is held out: nothing is trained on it.
END, UNKNOWN = 0, 1


class Vocabulary:
    """The words of captions, by number."""

    def __init__(self, captions: Sequence[str]) -> None:
        words = sorted({word for caption in captions for word in caption.split()})
        self.numbers = {word: number for number, word in enumerate(words, 2)}
        self.length = 1 + max(len(caption.split()) for caption in captions)

    def __len__(self) -> int:
        return 2 + len(self.numbers)

    def encode(self, caption: str) -> Tensor:
        """Return the numbers of a caption's words, with END behind them, up to the longest one's length."""
        words = [self.numbers.get(word, UNKNOWN) for word in caption.split()][: self.length - 1]
        return torch.tensor(words + [END] * (self.length - len(words)))


def make(size: int, samples: int) -> tuple[Dataset, Dataset, Vocabulary]:
    """Make scenes to train on and others of combinations that are not among those; the same in each process."""
    combinations = [*itertools.product(COLOURS, SHAPES, PITCHES, RHYTHMS)]
    captions = [f"a {colour} {shape} sounds {pitch} {rhythm}" for colour, shape, pitch, rhythm in combinations]
    vocabulary = Vocabulary(captions)
    held_out = torch.arange(len(combinations)) % HELD_OUT == 0
    numbers = torch.Generator().manual_seed(0)
    sets = []
    for chosen, count in ((~held_out, 16), (held_out, 4)):
        of = chosen.nonzero().flatten().repeat(count)
        images = torch.stack([draw(combinations[number], size, numbers) for number in of])
        audio = torch.stack([play(combinations[number], samples, numbers) for number in of])
        texts = torch.stack([vocabulary.encode(captions[number]) for number in of])
        sets.append(TensorDataset(images, audio, texts))
    return sets[0], sets[1], vocabulary


def draw(scene: tuple[str, ...], size: int, numbers: torch.Generator) -> Tensor:
    """Return an image (3, size, size) of a scene: its shape somewhere, on a background of noise."""
    axis = torch.linspace(-1, 1, size)
    shift = torch.rand(2, generator=numbers) * 0.6 - 0.3
    x, y = (axis[None, :] - shift[0]).abs(), (axis[:, None] - shift[1]).abs()
    radius = (x.square() + y.square()).sqrt()
    masks = {
        "disc": radius < 0.6,
        "square": torch.maximum(x, y) < 0.5,
        "cross": (torch.minimum(x, y) < 0.2) & (torch.maximum(x, y) < 0.6),
        "ring": (radius < 0.65) & (radius > 0.35),
    }
    image = 0.2 * torch.rand(3, size, size, generator=numbers)
    return torch.where(masks[scene[1]], torch.tensor(COLOURS[scene[0]])[:, None, None] - image, image)


def play(scene: tuple[str, ...], samples: int, numbers: torch.Generator) -> Tensor:
    """Return a recording of a scene: bursts of its pitch, in noise."""
    time = torch.linspace(0, 1, samples)
    start = torch.rand(2, generator=numbers)
    tone = torch.sin(2 * math.pi * (PITCHES[scene[2]] * time + start[0]))
    is_on = ((time + 0.2 * start[1]) * RHYTHMS[scene[3]]) % 1 < 0.5
    return tone * is_on + 0.2 * torch.randn(samples, generator=numbers)


class Files(Dataset):
    """Scenes in files: an image, a recording (WAV, 16 bits) and a caption, such as 1.png, 1.wav and 1.txt."""

    def __init__(self, names: Sequence[Path], vocabulary: Vocabulary, size: int, samples: int) -> None:
        self.names, self.vocabulary, self.size, self.samples = names, vocabulary, size, samples

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        from PIL import Image

        name = self.names[number]
        with Image.open(name.with_suffix(".png")) as image:
            pixels = torch.tensor([*image.convert("RGB").resize((self.size, self.size)).tobytes()]) / 255
        with wave.open(str(name.with_suffix(".wav"))) as recording:
            data = bytearray(recording.readframes(self.samples))
            audio = torch.frombuffer(data, dtype=torch.int16).float()[:: recording.getnchannels()] / 32768
        audio = torch.nn.functional.pad(audio, (0, self.samples - len(audio)))
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1), audio, self.vocabulary.encode(read(name))


def read(name: Path) -> str:
    return name.with_suffix(".txt").read_text().lower()


def load(folder: Path, size: int, samples: int) -> tuple[Dataset, Dataset, Vocabulary]:
    """Return scenes to train on and held out ones of a directory, and the words of the former."""
    names = sorted(path.with_suffix("") for path in folder.glob("*.txt"))
    missing = [
        name.with_suffix(end) for name in names for end in (".png", ".wav") if not name.with_suffix(end).exists()
    ]
    if len(names) < HELD_OUT or missing:
        why = (
            f"{missing[0]} is missing"
            if missing
            else f"it has {len(names)} captions (*.txt), at least {HELD_OUT} are needed"
        )
        raise SystemExit(
            f"error: --data-dir {folder} has no scenes\n  why: {why}\n  fix: files as 1.png, 1.wav and 1.txt"
        )
    training = [name for number, name in enumerate(names) if number % HELD_OUT]
    vocabulary = Vocabulary([read(name) for name in training])
    return (
        Files(training, vocabulary, size, samples),
        Files(names[::HELD_OUT], vocabulary, size, samples),
        vocabulary,
    )
