"""Checkpoints on disk: what is in a folder of them, and whether each is whole. Needs no torch.

The format is described in ``docs/reference/checkpoint-format.md``. A checkpoint is a folder ``step-000001200`` with

- ``rank-N.data``: raw bytes of tensors, one file for each rank that wrote some,
- ``rank-N.json``: which tensors these are and where, and a checksum of each part of the data file,
- ``objects.pt``, ``config.json``: what is no tensor,
- ``checkpoint.json``: the manifest, written last, with size and CRC-32 of all others. Without it nothing counts.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.runs.blocksums import checksum as of_blocks
from allranks.runs.manifest import MANIFEST, DamagedError, Manifest, read_manifest

__all__ = [
    "CONFIG",
    "LATEST",
    "MANIFEST",
    "OBJECTS",
    "PART",
    "Chunk",
    "DamagedError",
    "Entry",
    "Manifest",
    "TensorEntry",
    "entries",
    "name_of",
    "problems",
    "read_file",
    "read_index",
    "read_manifest",
    "read_tensors",
    "unfinished",
]

OBJECTS = "objects.pt"
CONFIG = "config.json"
LATEST = "latest"
#: Bytes of a data file under one checksum. Small enough to stay in a core's cache between checksum and write.
PART = 16 << 20

_NAME = re.compile(r"step-(\d{9,})")
#: A save that is being written (tmp), removed (gone), replaced (old), or was cut off in it:
#: ``.step-000001200.tmp-<job>-<host>-<pid>.<number>``.
_UNFINISHED = re.compile(r"\.step-(\d{9,})\.(tmp|gone|old)-(.+)")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, contiguous and in row-major order in a data file.

    Attributes:
        file: name of the data file.
        offset: where it begins there, in bytes.
        start: index of its first element in the tensor.
        shape: its shape.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint: its dtype as torch spells it, its shape, and its pieces.

    Attributes:
        dtype: as torch spells it, such as ``bfloat16``.
        itemsize: bytes of an element.
        shape: of the whole tensor.
        chunks: boxes that cover it.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder, whole or not.

    Attributes:
        path: its folder.
        step: from its name.
        manifest: None if it has none that can be read.
        problem: why it does not count; None if nothing is wrong at first sight.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None

    @property
    def sequence(self) -> int:
        """Order among the checkpoints of a folder."""
        return self.manifest.sequence if self.manifest else 0


def name_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:09d}"


def entries(folder: Path) -> list[Entry]:
    """Return the checkpoints in ``folder``, the newest first; those without a readable manifest are ordered by step.

    Only manifests and sizes are looked at. :func:`problems` reads all bytes.
    """
    found = [_entry(path, int(match[1])) for path in _listed(folder) if (match := _NAME.fullmatch(path.name))]
    known = sorted((entry for entry in found if entry.manifest), key=lambda entry: (entry.sequence, entry.step))
    for lost in sorted((entry for entry in found if not entry.manifest), key=lambda entry: entry.step):
        later = [place for place, entry in enumerate(known) if entry.step > lost.step]
        known.insert(later[0] if later else len(known), lost)
    return known[::-1]


def unfinished(folder: Path) -> list[tuple[Path, int, str, str]]:
    """Return what saves that were cut off have left, or are writing now: folder, step, kind and whose it is."""
    matches = [(path, _UNFINISHED.fullmatch(path.name)) for path in _listed(folder)]
    return [(path, int(match[1]), match[2], match[3]) for path, match in matches if match]


def read_tensors(path: Path, manifest: Manifest) -> dict[str, TensorEntry]:
    """Read from the indexes which tensors a checkpoint holds, by name; tied ones appear under each name.

    Raises:
        DamagedError: an index does not fit its checksum.
    """
    found: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    for name in sorted(name for name in manifest.files if name.startswith("rank-") and name.endswith(".json")):
        index = read_index(path, name, manifest)
        aliases.update(index["aliases"])
        for tensor, raw in index["tensors"].items():
            old = found.get(tensor)
            pieces = tuple(
                Chunk(index["data"], offset, tuple(start), tuple(shape)) for offset, start, shape in raw["chunks"]
            )
            chunks = (*old.chunks, *pieces) if old else pieces
            found[tensor] = TensorEntry(raw["dtype"], raw["itemsize"], tuple(raw["shape"]), chunks)
    return {**found, **{alias: found[name] for alias, name in aliases.items()}}


def read_index(path: Path, name: str, manifest: Manifest) -> dict[str, Any]:
    """Read an index, ``rank-N.json``, and check it.

    Raises:
        DamagedError: it cannot be read, or does not fit its checksum.
    """
    data = read_file(path, name, manifest)
    index: dict[str, Any] = json.loads(data)
    return index


def read_file(path: Path, name: str, manifest: Manifest) -> bytes:
    """Read a small file of a checkpoint and check it against the manifest.

    Raises:
        DamagedError: it cannot be read, or does not fit its checksum.
    """
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} is damaged", why=f"{name}: {error.strerror}") from error
    if zlib.crc32(data) != manifest.files[name]["crc32"]:
        raise DamagedError(f"{path} is damaged", why=f"{name}: its checksum does not fit")
    return data


def problems(
    path: Path, *, share: int = 0, shares: int = 1, checksum: Callable[[memoryview], int] = of_blocks
) -> Iterator[str]:
    """Read a checkpoint and yield what is wrong, naming file and part; nothing if it is whole.

    Args:
        path: its folder.
        share: which share of the data to read, from 0; small files are read in each.
        shares: how many readers there are.
        checksum: of a part; a quicker way than that of ``blocksums``, where there is one.
    """
    try:
        manifest = read_manifest(path)
        if sizes := _wrong_size(path, manifest):
            yield sizes
            return
        for name in sorted(manifest.files):
            if "crc32" in manifest.files[name]:
                read_file(path, name, manifest)
        for name in sorted(name for name in manifest.files if name.startswith("rank-") and name.endswith(".json")):
            yield from _bad_parts(path, read_index(path, name, manifest), share, shares, checksum)
    except DamagedError as error:
        yield error.why or error.what


def _bad_parts(
    path: Path, index: dict[str, Any], share: int, shares: int, checksum: Callable[[memoryview], int]
) -> Iterator[str]:
    """Read every ``shares``-th part of a data file."""
    name, size, sums = index["data"], index["part"], index["sums"]
    buffer = bytearray(size)
    try:
        with (path / name).open("rb", buffering=0) as stream:
            for part in range(share, len(sums), shares):
                stream.seek(part * size)
                if checksum(memoryview(buffer)[: _fill(stream, buffer)]) != sums[part]:
                    yield f"{name}: the checksum of part {part + 1} of {len(sums)} does not fit"
    except OSError as error:
        yield f"{name}: {error.strerror}"


def _fill(stream: Any, buffer: bytearray) -> int:
    """Read until the buffer is full or the file is over, and return how many bytes there are."""
    view, done = memoryview(buffer), 0
    while done < len(buffer) and (count := stream.readinto(view[done:])):
        done += count
    return done


def _entry(path: Path, step: int) -> Entry:
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        return Entry(path, step, None, error.why)
    return Entry(path, step, manifest, _wrong_size(path, manifest))


def _wrong_size(path: Path, manifest: Manifest) -> str | None:
    for name, file in sorted(manifest.files.items()):
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != file["size"]:
            return f"{name}: it has {size} bytes instead of {file['size']}"
    return None


def _listed(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AllranksError(f"cannot read {folder}", why=error.strerror) from error
