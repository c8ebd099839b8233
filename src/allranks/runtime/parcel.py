"""Values that one rank hands to others through the store: signed with the run's key, and read without running code.

Who reaches the store's port can set any key there: it has no password. Unpickling what is found there would run a
stranger's code; :func:`torch.load` with ``weights_only`` runs none, and reads what :data:`SENDABLE` names.
"""

from __future__ import annotations

import hmac
import io
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.errors import RankError
from allranks.runs import key

if TYPE_CHECKING:
    import torch

SENDABLE = "numbers, texts, bytes, tensors, or lists, tuples, sets and dicts of them; or nothing"
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)
#: How a file begins that torch.save has written since 1.6: others are unpickled by older code, which had holes.
_ZIP = b"PK"
_SIGNATURE = 32
_VALUE, _ERROR = b"V", b"E"


class Parcels:
    """Packs and opens values.

    Args:
        restart: generation of ranks, of which no value is taken in another one.
        device: where tensors of another rank's GPU go to on this rank.
    """

    def __init__(self, restart: int, device: torch.device) -> None:
        self._label = f"{os.environ.get(contract.ATTEMPT)}/{restart}"
        self._device = device
        self._key = _key_of_run()

    def value(self, place: str, value: object, name: str) -> bytes:
        """Pack a value for a place in the store.

        Raises:
            RankError: it is of a type that could not be read without running code; ``name`` is what gave it.
        """
        import torch

        stream = io.BytesIO()
        torch.save(_plain(value, name), stream)
        return self._signed(place, _VALUE + stream.getvalue())

    def error(self, place: str, told: dict[str, str | None]) -> bytes:
        """Pack the parts of an error that all who open this shall raise."""
        return self._signed(place, _ERROR + json.dumps(told).encode())

    def is_ours(self, place: str, parcel: bytes) -> bool:
        """Tell whether a rank of this run has packed it for that place."""
        return hmac.compare_digest(parcel[:_SIGNATURE], self._signature(place, parcel[_SIGNATURE:]))

    def is_error(self, parcel: bytes) -> bool:
        """Tell whether it holds an error."""
        return parcel[_SIGNATURE:][:1] == _ERROR

    def opened(self, parcel: bytes) -> Any:
        """Return the value of a parcel that is ours.

        Raises:
            RankError: the one that it holds.
        """
        import torch

        data = parcel[_SIGNATURE + 1 :]
        if self.is_error(parcel):
            raise RankError(**json.loads(data))
        if not data.startswith(_ZIP):
            raise RankError("what rank 0 handed to the others is not of torch.save", why="something else has set it")
        return torch.load(io.BytesIO(data), map_location=self._place, weights_only=True)

    def _place(self, storage: Any, location: str) -> Any:
        import torch

        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, str(self._device))  # type: ignore[no-untyped-call]

    def _signed(self, place: str, data: bytes) -> bytes:
        return self._signature(place, data) + data

    def _signature(self, place: str, data: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._label}/{place}\n".encode() + data, "sha256")


def _key_of_run() -> bytes:
    """Return the key of the run; where something else has started the ranks there is none, and all know that."""
    folder = os.environ.get(contract.RUN_DIR)
    path = Path(folder, contract.KEY_FILE) if folder else None
    return key.read(path) if path and path.exists() else b""


def _plain(value: object, name: str) -> Any:
    """Return a value that is read without running code; NumPy's numbers become Python's.

    Raises:
        RankError: a part of it is of another type.
    """
    import torch

    kind = type(value)
    if kind in _LEAVES or kind in (torch.Tensor, torch.nn.Parameter):
        return value
    if kind in _LISTS:
        return kind(_plain(part, name) for part in value)  # type: ignore[attr-defined]
    if kind in _MAPPINGS:
        return kind((_plain(key, name), _plain(part, name)) for key, part in value.items())  # type: ignore[attr-defined]
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _plain(value.item(), name)  # type: ignore[attr-defined]
    stranger = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise RankError(
        f"what {name} returned on rank 0 cannot be sent to the other ranks: {stranger}",
        why="another type could only be read by running code that it brings along",
        fix=f"return {SENDABLE}",
    )
