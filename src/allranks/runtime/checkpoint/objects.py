"""What is no tensor in a checkpoint, ``objects.pt``: loaded without running any code that stands in it."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from allranks.errors import RankError
from allranks.runs.checkpoints import OBJECTS

#: How torch names what it does not load with ``weights_only=True``.
_REFUSED = re.compile(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) ([\w.]+)")


def load_objects(path: Path, data: bytes) -> dict[str, Any]:
    """Load ``objects.pt`` of the checkpoint in ``path`` from its bytes.

    Raises:
        RankError: it holds what cannot be loaded without code; the error names the object and its type.
    """
    try:
        objects: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - the bytes may be anything
        refused = _REFUSED.search(str(error))
        raise _foreign(path, data, refused[1]) if refused else _unreadable(path, error) from None
    return objects


def _foreign(path: Path, data: bytes, kind: str) -> RankError:
    places: list[str] = []
    with suppress(Exception):  # The error tells enough without the place.
        places = list(_places_of(kind, _Inert(_pickle_in(data)).load()))
    where = f", {places[0]}," if places else ""
    return RankError(
        f"{path}: {OBJECTS} holds an object{where} of type {kind}, which cannot be loaded without running code",
        why="ctx.checkpoints() saves no such object: another program wrote or changed this checkpoint",
        fix="use one that a training of yours has saved; export of a part to a .safetensors file reads tensors alone",
    )


def _unreadable(path: Path, error: Exception) -> RankError:
    return RankError(
        f"{path}: {OBJECTS} cannot be loaded",
        why=f"{type(error).__name__}: {error}".splitlines()[0],
        fix="use a checkpoint that a training of yours has saved",
    )


def _pickle_in(data: bytes) -> io.BytesIO:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return io.BytesIO(archive.read(name))


class _StandIn(dict[Any, Any]):
    """An instance of any class in a pickle: takes what the pickle gives it, and does nothing."""

    kind = ""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __call__(self, *_: object) -> _StandIn:
        return self

    def __setstate__(self, _: object) -> None:
        """Take the state."""

    def append(self, _: object) -> None:
        """Take an item, as a list does."""


class _Inert(pickle.Unpickler):
    """Reads how the objects in a pickle lie in each other, with a stand-in for each class and function."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name in ("OrderedDict", "Counter"):
            return {"OrderedDict": OrderedDict, "Counter": Counter}[name]
        return type(name, (_StandIn,), {"kind": f"{module}.{name}"})

    def persistent_load(self, _: object) -> None:
        """Leave out a tensor's bytes."""


def _places_of(kind: str, value: Any, place: str = "") -> Iterator[str]:
    """Yield where objects of a type are: the keys that lead to them, joined by dots."""
    if isinstance(value, _StandIn) and value.kind == kind:
        yield place
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, child in children:
        yield from _places_of(kind, child, f"{place}.{key}" if place else str(key))
