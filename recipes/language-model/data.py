"""Tokens to train on: of made stories, of text files byte by byte, or of a file of token numbers."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

SEPARATOR = 0  # The byte that begins each document: text does not hold it.
STORIES = 10_000
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Hana", "Ivo", "Kim", "Max", "Noor", "Otto"]
COLOURS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey"]
THINGS = ["apples", "stones", "shells", "books", "coins", "cups", "keys", "boats", "cards", "drums", "flags", "hats"]
PLACES = ["river", "market", "school", "forest", "garden", "harbour"]


class Text(NamedTuple):
    """Sequences (N, length + 1) to train on, those that are held out, and what is known of their entropy.

    ``entropy`` is in nats a token: no model has a smaller loss on average. None for text that was not made here.
    """

    training: TensorDataset
    held_out: TensorDataset
    entropy: float | None


def load(path: Path | None, length: int, vocab_size: int) -> Text:
    """Pack all documents into sequences of ``length`` tokens and the one that follows; the last 5 % are held out.

    Documents follow each other, so that no token is padding; the model keeps them apart by their separators.
    """
    tokens, entropy = made_stories() if path is None else (read(path), None)
    count = (len(tokens) - 1) // length
    if count < 2:
        raise SystemExit(
            f"error: {path or 'the text'} has {len(tokens)} tokens, too few for sequences of {length}\n"
            f"  fix: a shorter --sequence-length: {max(1, (len(tokens) - 1) // 100)}"
        )
    # The largest number of a long file is not looked for: it would be read completely before the first step.
    if (largest := int((tokens[:1_000_000].int() & 0xFFFF).max())) >= vocab_size:
        raise SystemExit(f"error: {path} holds the token {largest}\n  fix: --vocab-size {largest + 1} or more")
    sequences = tokens.unfold(0, length + 1, length)  # A view: the last token of each is the next one's first.
    held_out = max(1, count // 20)
    return Text(TensorDataset(sequences[:-held_out]), TensorDataset(sequences[-held_out:]), entropy)


def read(path: Path) -> torch.Tensor:
    """Read a text file, all ``.txt`` files in a directory, or token numbers of 16 bits (``.bin``), which are mapped."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not path.exists():
        raise SystemExit(f"error: there is no file or directory {path}\n  fix: --data FILE, or leave it out")
    if not files:
        raise SystemExit(
            f"error: {path} has no files *.txt\n  fix: a directory with text files, or one file: --data FILE"
        )
    try:
        if path.suffix == ".bin":
            return torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.int16)
        texts = [b"\0" + file.read_bytes().strip(b"\0").replace(b"<|endoftext|>", b"\0") for file in files]
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"error: cannot read {path}\n  why: {error}") from error
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def made_stories(count: int = STORIES, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Make short stories, always the same, in which names, things and sums have to be remembered.

    All choices are uniform, and can be read off the text. So its entropy is the sum of their logarithms.
    """
    generator, nats, stories = random.Random(seed), 0.0, []

    def choose(options: list[str] | range) -> str:
        nonlocal nats
        nats += math.log(len(options))
        return str(generator.choice(options))

    for _ in range(count):
        name, colour, thing = choose(NAMES), choose(COLOURS), choose(THINGS)
        have = int(choose(range(1, 10)))
        story = f"{name} has {have} {colour} {thing}."
        for _ in range(int(choose(range(1, 4)))):
            place = choose(PLACES)
            if int(choose(range(2))):
                change = int(choose(range(1, 10)))
                story += f" At the {place} {name} finds {change} more."
            else:
                change = -int(choose(range(1, have + 1)))
                story += f" At the {place} {name} gives away {-change}."
            have += change
            story += f" Now {name} has {have} {colour} {thing}."
            if have == 0:
                break
        stories.append(f"\0{story}")
    text = "".join(stories).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), nats / len(text)
