"""The format of checkpoints on disk: lists the checkpoints of a directory and verifies them, without torch.

``docs/reference/checkpoint-format.md`` describes it. A checkpoint is a directory ``step-000001200`` with

- ``rank-N.data``: raw bytes of tensors, one file for each rank that wrote some,
- ``rank-N.json``: the index of these tensors, and a checksum of each part of the data file,
- ``objects.pt``, ``config.json``: everything else,
- ``checkpoint.json``: the manifest, written last, with size and CRC-32 of all others. Without it nothing counts.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.record.files import read_failure

MANIFEST = "checkpoint.json"
FORMAT = "allranks checkpoint"
VERSION = 1
OBJECTS = "objects.pt"
CONFIG = "config.json"
LATEST = "latest"
#: Bytes of a data file under one checksum. Small enough to stay in a core's cache between checksum and write.
PART = 16 << 20
#: Bytes that have one sum in a checksum, and the 64-bit words in them.
BLOCK = 4096
_WORDS = BLOCK // 8
#: Bytes that torch sums in one thread.
_ONE_THREAD = 1 << 17

_NAME = re.compile(r"step-(\d{9,})")
#: A save that is, or was, being written (tmp), removed (gone) or replaced (old):
#: ``.step-000001200.tmp-<job>-<host>-<pid>.<number>``.
_UNFINISHED = re.compile(r"\.step-(\d{9,})\.(tmp|gone|old)-(.+)")


class CorruptError(AllranksError):
    """A checkpoint is corrupt."""


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` holds.

    Attributes:
        step: optimizer steps done.
        sequence: number of the save in this directory: the greatest is the newest, whatever clocks and steps say.
        time: seconds since 1970.
        world_size: ranks of the job that saved.
        job: identifies the job that saved.
        epoch: epoch of the loader; None if no part has one.
        metric: the value that ``best`` compares; None if it was not given.
        metric_name: its name.
        parts: name of each part and its kind: module, optimizer or other.
        files: size in bytes of each file, and the CRC-32 of all but the data files.
        torch: version of torch that wrote it.
    """

    step: int
    sequence: int
    time: float
    world_size: int
    job: str
    epoch: int | None
    metric: float | None
    metric_name: str | None
    parts: dict[str, str]
    files: dict[str, dict[str, int]]
    torch: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file["size"] for file in self.files.values())

    def to_text(self) -> str:
        """Write the manifest with a checksum of itself."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "crc32": _crc_of(body)}, indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Parse the result of :meth:`to_text`.

        Raises:
            ValueError: it is invalid; with the reason.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError("it is not a manifest of a checkpoint")
        crc = body.pop("crc32", None)
        if _crc_of(body) != crc:
            raise ValueError("its checksum does not match")
        if body["version"] > VERSION:
            raise ValueError(f"it has format version {body['version']}, and this allranks knows up to {VERSION}")
        return cls(**{field.name: body[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, contiguous and in row-major order in a data file, from an offset in bytes on.

    ``start`` is the index of its first element in the tensor.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint: its dtype as torch spells it, bytes of an element, its shape, boxes that cover it."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a directory.

    Attributes:
        path: its directory.
        step: its number of steps, by its name.
        manifest: None if it cannot be read.
        problem: why the checkpoint does not count, by its manifest and its sizes alone; None if it does.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None

    @property
    def sequence(self) -> int:
        """Order among the checkpoints of a directory."""
        return self.manifest.sequence if self.manifest else 0


def name_of(step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step:09d}"


def entries(directory: Path) -> list[CheckpointEntry]:
    """Return the checkpoints in ``directory``, the newest first; those without a readable manifest are ordered by step.

    It reads only manifests and sizes. :func:`problems` reads all bytes.
    """
    known, lost = [], []
    for path in _subdirectories(directory):
        if match := _NAME.fullmatch(path.name):
            try:
                manifest = read_manifest(path)
            except CorruptError as error:
                lost.append(CheckpointEntry(path, int(match[1]), None, error.why))
            else:
                known.append(CheckpointEntry(path, int(match[1]), manifest, _wrong_size(path, manifest)))
    known.sort(key=lambda entry: (entry.sequence, entry.step))
    for one in sorted(lost, key=lambda entry: entry.step):
        later = [place for place, entry in enumerate(known) if entry.step > one.step]
        known.insert(later[0] if later else len(known), one)
    return known[::-1]


def unfinished(directory: Path) -> list[tuple[Path, int, str, str]]:
    """Return the directories of incomplete and running saves: path, step, kind and owner."""
    matches = [(path, _UNFINISHED.fullmatch(path.name)) for path in _subdirectories(directory)]
    return [(path, int(match[1]), match[2], match[3]) for path, match in matches if match]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``path``.

    Raises:
        CorruptError: there is none, or it cannot be read.
    """
    try:
        return Manifest.from_text((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptError(f"{path} is not a complete checkpoint", why=f"it has no {MANIFEST}") from None
    except OSError as error:
        raise CorruptError(f"{path} cannot be read", why=f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is corrupt", why=f"{MANIFEST}: {error}") from error


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_tensors(path: Path, manifest: Manifest) -> dict[str, TensorEntry]:
    """Return the tensors that a checkpoint holds, by name; tied ones appear under each name.

    Raises:
        CorruptError: the checksum of an index does not match.
    """
    found: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    for index in _indexes(path, manifest):
        aliases.update(index["aliases"])
        for name, raw in index["tensors"].items():
            chunks = list(found[name].chunks) if name in found else []
            for offset, start, shape in raw["chunks"]:
                chunks.append(Chunk(index["data"], offset, tuple(start), tuple(shape)))
            found[name] = TensorEntry(raw["dtype"], raw["itemsize"], tuple(raw["shape"]), tuple(chunks))
    return {**found, **{alias: found[name] for alias, name in aliases.items()}}


def _indexes(path: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    for name in sorted(manifest.files):
        if name.startswith("rank-") and name.endswith(".json"):
            yield json.loads(read_file(path, name, manifest))


def read_file(path: Path, name: str, manifest: Manifest) -> bytes:
    """Read a small file of a checkpoint and verify it by the manifest.

    Raises:
        CorruptError: it cannot be read, or its checksum does not match.
    """
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise CorruptError(f"{path} is corrupt", why=f"{name}: {error.strerror}") from error
    if zlib.crc32(data) != manifest.files[name]["crc32"]:
        raise CorruptError(f"{path} is corrupt", why=f"{name}: its checksum does not match")
    return data


def problems(path: Path, *, share: int = 0, shares: int = 1) -> Iterator[str]:
    """Read a checkpoint and yield its errors, naming file and part; none if it is complete.

    Several readers take a ``share`` of the data each, from 0, of so many ``shares``; each reads all small files.
    """
    try:
        manifest = read_manifest(path)
        if sizes := _wrong_size(path, manifest):
            yield sizes
            return
        for name in sorted(manifest.files):
            if "crc32" in manifest.files[name]:
                read_file(path, name, manifest)
        for index in _indexes(path, manifest):
            yield from _corrupt_parts(path, index, share, shares)
    except CorruptError as error:
        yield error.why or error.what


def _corrupt_parts(path: Path, index: dict[str, Any], share: int, shares: int) -> Iterator[str]:
    """Read every ``shares``-th part of a data file."""
    name, size, sums = index["data"], index["part"], index["sums"]
    buffer = memoryview(bytearray(size))
    try:
        with (path / name).open("rb") as stream:
            for part in range(share, len(sums), shares):
                stream.seek(part * size)
                if checksum(buffer[: stream.readinto(buffer)]) != sums[part]:
                    yield f"{name}: the checksum of part {part + 1} of {len(sums)} does not fit"
    except OSError as error:
        yield f"{name}: {error.strerror}"


def _wrong_size(path: Path, manifest: Manifest) -> str | None:
    for name, file in sorted(manifest.files.items()):
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != file["size"]:
            return f"{name}: it has {size} bytes instead of {file['size']}"
    return None


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_failure(directory, error) from error


def checksum(data: memoryview) -> int:
    """Return the checksum of whole blocks, by NumPy or torch if this process has loaded one, else by Python alone.

    The sum of a block is that of its 512 words of 64 bits (little endian, unsigned), modulo 2^64; the checksum is the
    CRC-32 of these sums, one behind the other. A changed word changes the sum of its block, and a block that is lost or
    elsewhere changes the CRC. A CRC-32 of all bytes would take nine times as long (0.34 s/GB against 0.04, measured
    with zlib's and NumPy 2.4), which the training would pay for.
    """
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    if numpy is not None:
        words = numpy.frombuffer(data, dtype="<u8").reshape(-1, _WORDS)
        return zlib.crc32(numpy.add.reduce(words, axis=1).tobytes())
    if torch is not None:
        words = torch.frombuffer(data, dtype=torch.int64)
        sums = torch.cat([piece.view(-1, _WORDS).sum(1) for piece in words.split(_ONE_THREAD // 8)])
        return zlib.crc32(bytes(sums.untyped_storage()))
    return zlib.crc32(plain_sums(data))


def plain_sums(data: memoryview) -> bytes:
    """Return the sums of the blocks with the standard library alone: some seconds for each GB."""
    words = data.cast("B").cast("Q")
    sums = array("Q", (sum(words[start : start + _WORDS]) % (1 << 64) for start in range(0, len(words), _WORDS)))
    return sums.tobytes()
