"""Images of individuals: drawn here, or a directory with a folder for each individual."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

HELD_OUT = 4  # Every fourth individual is held out: no image of it is trained on.
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


class Images(Dataset[Any]):
    """Images of known individuals; an item is an image (3, size, size) from 0 to 1, and the individual's number.

    Attributes:
        sources: of each image: a file, or the pixels as bytes.
        labels: of each image: the number of its individual, from 0.
        of: of each individual: the numbers of its images.
    """

    def __init__(self, sources: Sequence[Path | Tensor], labels: Sequence[int], size: int) -> None:
        self.sources, self.labels, self.size = sources, labels, size
        self.of: list[list[int]] = [[] for _ in range(1 + max(labels))]
        for number, label in enumerate(labels):
            self.of[label].append(number)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        source = self.sources[number]
        pixels = read(source, self.size) if isinstance(source, Path) else source
        return pixels.float() / 255, self.labels[number]


class Balanced(Dataset[Any]):
    """An endless list of images to train on, in which each batch has so many images of so many individuals.

    In a turn each individual comes at most once; those that do not fill a batch are left for the next turn. What is in
    a batch depends on its number and the seed alone. So the loader divides and resumes it as any other dataset: the
    ranks share the individuals of a batch, and no two have the same one.
    """

    def __init__(self, images: Images, individuals: int, each: int, seed: int) -> None:
        self.images, self.individuals, self.each, self.seed = images, individuals, each, seed
        self.batches = len(images.of) // individuals  # In a turn.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return self.individuals * self.each * 10**9  # More than any training takes.

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        pixels, label = self.images[self.choose(number)]
        return augment(pixels), label

    def choose(self, number: int) -> int:
        """Return which image is at a place in the list."""
        batch, place = divmod(number, self.individuals * self.each)
        turn, batch = divmod(batch, self.batches)
        individual = self._order(turn)[batch * self.individuals + place // self.each]
        there = self.images.of[individual]
        # Different images, as far as there are so many.
        chosen = random.Random(f"{self.seed}/{turn}/{individual}").sample(there, min(self.each, len(there)))
        return chosen[place % self.each % len(chosen)]

    def _shuffle(self, turn: int) -> list[int]:
        return random.Random(f"{self.seed}/{turn}").sample(range(len(self.images.of)), len(self.images.of))


def augment(pixels: Tensor) -> Tensor:
    """Shift an image, change its brightness and erase a rectangle. The loader seeds ``random`` for each image."""
    size = pixels.shape[-1]
    most = size // 8
    pixels = functional.pad(pixels[None], (most,) * 4, mode="reflect")[0]
    top, left = random.randint(0, 2 * most), random.randint(0, 2 * most)
    pixels = pixels[:, top : top + size, left : left + size] * random.uniform(0.7, 1.3)
    if random.random() < 0.5:
        height, width = (random.randint(size // 8, size // 2) for _ in range(2))
        top, left = random.randint(0, size - height), random.randint(0, size - width)
        pixels[:, top : top + height, left : left + width] = random.random()
    return pixels


def load(folder: Path | None, size: int, individuals: int) -> tuple[Images, Images]:
    """Return the images to train on, and those of the individuals that are held out."""
    named = draw(individuals, size) if folder is None else find(folder)
    split: list[list[Sequence[Path | Tensor]]] = [[], []]
    for number, sources in enumerate(named):
        split[number % HELD_OUT == HELD_OUT - 1].append(sources)
    if not any(len(sources) > 1 for sources in split[1]):
        raise SystemExit(
            f"error: {folder or 'the drawn set'} has {len(named)} individuals, and none to evaluate with\n"
            f"  why: every fourth is held out, and one of those needs two images or more\n"
            f"  fix: {HELD_OUT} individuals or more"
        )
    training, held_out = (
        Images([one for own in part for one in own], [at for at, own in enumerate(part) for _ in own], size)
        for part in split
    )
    return training, held_out


def find(folder: Path) -> list[list[Path]]:
    """Return the image files of each individual, in the order of their names."""
    if not folder.is_dir():
        raise SystemExit(f"error: there is no directory {folder}\n  fix: --data-dir DIR, or leave it out")
    inside = [
        sorted(path for path in each.rglob("*") if path.suffix.lower() in SUFFIXES) for each in sorted(folder.iterdir())
    ]
    found = [paths for paths in inside if paths]
    if not found:
        raise SystemExit(
            f"error: {folder} has no images\n  why: a folder for each individual is expected: {folder}/NAME/1.jpg\n"
            f"  fix: the images' names end with one of {', '.join(sorted(SUFFIXES))}"
        )
    return found


def read(path: Path, size: int) -> Tensor:
    """Read an image file as bytes (3, size, size)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            data = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR).tobytes()
    except OSError as error:
        # SystemExit would end a worker of the loader without a word of why.
        raise ValueError(f"cannot read {path}: {error}") from None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def draw(individuals: int, size: int, seed: int = 0) -> list[list[Tensor]]:
    """Draw images of individuals, always the same: a few of some, many of others.

    An individual is a disc with spots: their places and two colours are its own. Each image shows it turned, sheared,
    from another distance, in another light, before another background, partly covered, and with noise.
    """
    numbers = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=numbers) * (high - low) + low

    drawn = []
    for _ in range(individuals):
        count = 4 + round(16 * float(between(0, 1, 1)) ** 2)
        spots = between(0, 1, 1, 1, 5, 5).gt(0.5)
        pattern = torch.where(spots, *between(0, 1, 2, 1, 3, 1, 1)).expand(count, -1, -1, -1)
        turned, zoom, shear = between(-0.5, 0.5, count), between(0.9, 1.3, count), between(-0.2, 0.2, count)
        view = torch.stack([turned.cos(), shear - turned.sin(), shear + turned.sin(), turned.cos()], 1).view(-1, 2, 2)
        view = torch.cat([view * zoom[:, None, None], between(-0.3, 0.3, count, 2, 1)], 2)
        grid = functional.affine_grid(view, [count, 3, size, size], align_corners=False)
        body = functional.grid_sample(pattern, grid, mode="bilinear", padding_mode="border", align_corners=False)
        behind = functional.interpolate(between(0, 1, count, 1, 4, 4), size=(size, size), mode="bilinear")
        images = torch.where(grid.norm(dim=3)[:, None] < 1, body, behind)
        images = images * between(0.6, 1.2, count, 1, 1, 1) * between(0.85, 1.15, count, 3, 1, 1)
        for image in images:  # Something is in front of it.
            top, left = (int(between(0, 0.75, 1) * size) for _ in range(2))
            image[:, top : top + size // 4, left : left + size // 4] = between(0, 1, 3, 1, 1)
        images += 0.05 * torch.randn(images.shape, generator=numbers)
        drawn.append(list(images.clamp(0, 1).mul(255).byte()))
    return drawn
