"""The manifest of a checkpoint, ``checkpoint.json``: what makes it count."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError

MANIFEST = "checkpoint.json"
FORMAT = "allranks checkpoint"
VERSION = 1


class DamagedError(AllranksError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint.json`` holds.

    Attributes:
        step: optimizer steps done.
        sequence: counts the saves in this folder: the greatest is the newest, whatever clocks and steps say.
        time: seconds since 1970.
        world_size: ranks of the job that saved.
        job: identifies the job that saved.
        epoch: epoch of the loader; None if no part has one.
        metric: what ``best`` compares; None if it was not given.
        metric_name: its name.
        parts: name of each part and its kind: module, optimizer or other.
        files: size in bytes of each file, and the CRC-32 of those that have none elsewhere.
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
        """Read what :meth:`to_text` wrote.

        Raises:
            ValueError: it is not that; with the reason.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError("it is no manifest of a checkpoint")
        crc = body.pop("crc32", None)
        if _crc_of(body) != crc:
            raise ValueError("its checksum does not fit")
        if body["version"] > VERSION:
            raise ValueError(f"it has format version {body['version']}, and this allranks knows up to {VERSION}")
        return cls(**{field.name: body[field.name] for field in fields(cls)})


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in ``path``.

    Raises:
        DamagedError: there is none, or it cannot be read.
    """
    try:
        return Manifest.from_text((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"{path} is no whole checkpoint", why=f"it has no {MANIFEST}") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read", why=f"{MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged", why=f"{MANIFEST}: {error}") from error


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
