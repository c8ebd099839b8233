"""Recordings and what is heard in them: made here, files in a directory, or tar files of them."""

from __future__ import annotations

import io
import random
import tarfile
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

RATE = 8000  # samples a second
NOTES = {"do": 400, "re": 520, "mi": 680, "fa": 880, "so": 1150}  # hertz
HELD_OUT = 10  # Every tenth recording is held out.
POOL = 16  # So many batches are sorted by length at a time.
END, UNKNOWN = 0, 1


class Vocabulary:
    """The words of all texts, by number."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.words = ["", "?", *sorted({word for text in texts for word in text.split()})]
        self.numbers = {word: number for number, word in enumerate(self.words)}
        self.length = 1 + max(len(text.split()) for text in texts)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tensor:
        """Return the numbers of a text's words, and END."""
        words = [self.numbers.get(word, UNKNOWN) for word in text.split()][: self.length - 1]
        return torch.tensor([*words, END])


@dataclass(frozen=True)
class Example:
    """One recording, or two that are compared, as functions that read them; their samples; and the text."""

    recordings: tuple[Callable[[], Tensor], ...]
    samples: int
    text: str


class Recordings(Dataset[Any]):
    """An item has the recordings, one or two, and the numbers of the words."""

    def __init__(self, examples: Sequence[Example], vocabulary: Vocabulary) -> None:
        self.examples, self.vocabulary = examples, vocabulary

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> tuple[list[Tensor], Tensor]:
        example = self.examples[number]
        return [read() for read in example.recordings], self.vocabulary.encode(example.text)


class Bucketed(Dataset[Any]):
    """An endless list to train on, in which each batch has recordings of about one length, so that little is padding.

    What is in a batch depends on its number and the seed alone. Each of ``parts`` ranks has the same mix of lengths.
    """

    def __init__(self, recordings: Recordings, batch: int, parts: int, seed: int) -> None:
        self.recordings, self.batch, self.parts, self.seed = recordings, batch, parts, seed
        self.batches = len(recordings) // batch  # In a turn.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return self.batch * 10**9  # More than any training takes.

    def __getitem__(self, number: int) -> tuple[list[Tensor], Tensor]:
        return self.recordings[self.choose(number)]

    def choose(self, number: int) -> int:
        """Return which recording is at a place in the list."""
        turn, place = divmod(number, self.batches * self.batch)
        return self._order(turn)[place]

    def _shuffle(self, turn: int) -> list[int]:
        numbers = random.Random(f"{self.seed}/{turn}")
        order = numbers.sample(range(len(self.recordings)), self.batches * self.batch)
        batches = []
        for start in range(0, len(order), POOL * self.batch):
            pool = sorted(order[start : start + POOL * self.batch], key=lambda at: self.recordings.examples[at].samples)
            batches += [pool[first : first + self.batch] for first in range(0, len(pool), self.batch)]
        numbers.shuffle(batches)
        return [at for batch in batches for part in range(self.parts) for at in batch[part :: self.parts]]


def collate(items: list[tuple[list[Tensor], Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return recordings (batch, 2, samples), how many samples each has, 0 for none, and texts with END behind them."""
    both = [[*recordings, *([torch.zeros(0)] * (2 - len(recordings)))] for recordings, _ in items]
    lengths = torch.tensor([[len(each) for each in pair] for pair in both])
    audio = pad_sequence([each for pair in both for each in pair], batch_first=True)
    texts = pad_sequence([text for _, text in items], batch_first=True, padding_value=END)
    return audio.view(len(items), 2, -1), lengths, texts


def split(examples: Sequence[Example]) -> tuple[Recordings, Recordings]:
    """Return recordings to train on, and others to evaluate with."""
    training = [example for number, example in enumerate(examples) if number % HELD_OUT]
    vocabulary = Vocabulary([example.text for example in training])
    return Recordings(training, vocabulary), Recordings(examples[::HELD_OUT], vocabulary)


def make(count: int) -> tuple[Recordings, Recordings]:
    """Make melodies to be written down, and every third time two whose first notes are compared."""
    numbers = random.Random(0)
    examples = []
    for number in range(count):
        melodies = [numbers.choices([*NOTES], k=numbers.randint(2, 5)) for _ in range(1 + (number % 3 == 0))]
        text = " ".join(melodies[0])
        if len(melodies) == 2:
            first, second = (NOTES[melody[0]] for melody in melodies)
            text = f"the second starts {'higher' if second > first else 'lower' if second < first else 'the same'}"
        played = [play(melody, numbers.randrange(1 << 30)) for melody in melodies]
        examples.append(Example(tuple(map(_kept, played)), sum(map(len, played)), text))
    return split(examples)


def play(melody: Sequence[str], seed: int) -> Tensor:
    """Return a recording of a melody: notes of 50 to 100 ms, in noise."""
    numbers = torch.Generator().manual_seed(seed)
    notes = []
    for note in melody:
        length, phase = (float(each) for each in torch.rand(2, generator=numbers))
        time = torch.arange(int(RATE * (0.05 + 0.05 * length))) / RATE
        notes += [torch.sin(6.2832 * (NOTES[note] * time + phase)), torch.zeros(RATE // 100)]
    audio = torch.cat(notes)
    return audio + 0.1 * torch.randn(len(audio), generator=numbers)


def _kept(audio: Tensor) -> Callable[[], Tensor]:
    return lambda: audio


def load(folder: Path) -> tuple[Recordings, Recordings]:
    """Read a directory: 1.wav and 1.txt and so on, with 1.2.wav a second recording; or tar files of such files."""
    shards = sorted(folder.glob("*.tar"))
    files: dict[str, Callable[[], bytes]] = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                files[f"{shard.name}/{member.name}"] = _part(shard, member.offset_data, member.size)
    if not shards:
        files = {path.name: path.read_bytes for path in sorted(folder.iterdir())}
    examples = []
    for name in (name.removesuffix(".txt") for name in files if name.endswith(".txt")):
        sounds = [files[each] for each in (f"{name}.wav", f"{name}.2.wav") if each in files]
        if not sounds:
            raise SystemExit(f"error: {folder}: {name}.wav is missing\n  why: there is a text for it, {name}.txt")
        samples = sum(map(_samples_of, sounds))
        text = files[f"{name}.txt"]().decode().lower()
        examples.append(Example(tuple(map(_decoder, sounds)), samples, text))
    if len(examples) < HELD_OUT:
        raise SystemExit(
            f"error: --data-dir {folder} has {len(examples)} texts\n  why: at least {HELD_OUT} are needed\n"
            "  fix: files as 1.wav and 1.txt, or tar files of them"
        )
    return split(examples)


def _part(path: Path, offset: int, size: int) -> Callable[[], bytes]:
    def read() -> bytes:
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    return read


def _samples_of(read: Callable[[], bytes]) -> int:
    with wave.open(io.BytesIO(read())) as recording:
        if (recording.getframerate(), recording.getsampwidth()) != (RATE, 2):
            raise SystemExit(f"error: recordings must be WAV files of {RATE} Hz and 16 bits")
        return recording.getnframes()


def _decoder(read: Callable[[], bytes]) -> Callable[[], Tensor]:
    def decode() -> Tensor:
        with wave.open(io.BytesIO(read())) as recording:
            data = torch.frombuffer(bytearray(recording.readframes(recording.getnframes())), dtype=torch.int16)
            return data.view(-1, recording.getnchannels())[:, 0] / 32768

    return decode
