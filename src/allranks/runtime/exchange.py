"""Values that ranks exchange beside gradients: small ones over the CPU, and results of functions that rank 0 runs.

While rank 0 works alone, the others wait in the store, so that no collective operation times out. The result travels
through the store, signed with the run's key: anyone who reaches the store's port can set any key, and unpickling such a
value would run foreign code. :func:`torch.load` with ``weights_only`` runs no code, and reads the types that
:data:`SENDABLE` names.
"""

from __future__ import annotations

import hmac
import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from allranks import contract
from allranks.errors import AllranksError, RankError
from allranks.record.files import read_key
from allranks.runtime import log
from allranks.runtime.peers import Peers, poll
from allranks.runtime.steptime import EXCHANGE, StepClock

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from allranks.runtime.context import Context

T = TypeVar("T")

SENDABLE = "numbers, texts, bytes, tensors, or lists, tuples, sets and dicts of them; or nothing"
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_LISTS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)
#: First bytes of torch.save's format since 1.6. torch reads other formats with older, unsafe code.
_ZIP = b"PK"
_SIGNATURE = 32
_VALUE, _ERROR = b"V", b"E"
#: Rank 0 may serve the store: after an error it waits this long for the others to read it.
_SECONDS_TO_READ = 5.0


class CpuGroup:
    """Exchanges small values between ranks, over the CPU. Use it as ``ctx.control``.

    All methods are collective: every rank calls them at the same point.

    Attributes:
        group: the gloo process group that it uses, for tensors on the CPU; None in a world of one rank.
    """

    def __init__(self, world_size: int, timeout: timedelta, clock: StepClock) -> None:
        self._world_size = world_size
        self._clock = clock
        self.group: ProcessGroup | None = None
        if world_size > 1:
            from torch import distributed

            if distributed.get_backend() == "gloo":
                self.group = distributed.group.WORLD
            else:  # The default group does not work on the CPU.
                self.group = distributed.new_group(backend="gloo", timeout=timeout)

    def agree(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks."""
        if self.group is None:
            return list(values)
        import torch
        from torch import distributed

        box = torch.tensor(values, dtype=torch.int64)
        with self._clock.during(EXCHANGE):
            distributed.all_reduce(box, distributed.ReduceOp.MAX, group=self.group)
        return [int(value) for value in box.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks, on all ranks."""
        if self.group is None:
            return [value]
        from torch import distributed

        box: list[T | None] = [None] * self._world_size
        with self._clock.during(EXCHANGE):
            distributed.all_gather_object(box, value, group=self.group)
        return box  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        if self.group is None:
            return value
        from torch import distributed

        box = [value]
        with self._clock.during(EXCHANGE):
            distributed.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.agree(0)

    def release(self) -> None:
        """Drop the reference to the group, so that its threads end when torch destroys it.

        A gloo thread that frees a tensor while the interpreter exits aborts the process (seen with torch 2.13:
        "terminate called without an active exception").
        """
        self.group = None


class SignedValues:
    """Packs and unpacks values; a value of another generation of ranks is not authentic.

    Tensors of another rank's GPU go to ``device`` on this rank.
    """

    def __init__(self, restart: int, device: torch.device) -> None:
        self._label = f"{os.environ.get(contract.ATTEMPT)}/{restart}"
        self._device = device
        # Under other launchers all ranks lack a key, and do without.
        directory = os.environ.get(contract.RUN_DIR)
        path = Path(directory, contract.KEY_FILE) if directory else None
        self._key = read_key(path) if path and path.exists() else b""

    def pack(self, place: str, value: object, name: str) -> bytes:
        """Pack a value for a place in the store.

        Raises:
            RankError: its type cannot be read without running code; ``name`` is the function that returned it.
        """
        import torch

        stream = io.BytesIO()
        torch.save(_sendable(value, name), stream)
        return self._signed(place, _VALUE + stream.getvalue())

    def pack_error(self, place: str, parts: dict[str, str | None]) -> bytes:
        """Pack the parts of an error that :meth:`unpack` raises."""
        return self._signed(place, _ERROR + json.dumps(parts).encode())

    def is_authentic(self, place: str, packed: bytes) -> bool:
        """Return True if a rank of this run has packed it for this place."""
        return hmac.compare_digest(packed, self._signed(place, packed[_SIGNATURE:]))

    def is_error(self, packed: bytes) -> bool:
        """Return True if it holds an error."""
        return packed[_SIGNATURE:][:1] == _ERROR

    def unpack(self, packed: bytes) -> Any:
        """Return an authentic value, or raise the error that it holds."""
        import torch

        data = packed[_SIGNATURE + 1 :]
        if self.is_error(packed):
            raise RankError(**json.loads(data))
        if not data.startswith(_ZIP):
            raise RankError("the value of rank 0 was not written by torch.save", why="another program has set it")

        def locate(storage: Any, location: str) -> Any:
            target = "cpu" if location == "cpu" else str(self._device)
            return torch.serialization.default_restore_location(storage, target)  # type: ignore[no-untyped-call]

        return torch.load(io.BytesIO(data), map_location=locate, weights_only=True)

    def _signed(self, place: str, data: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._label}/{place}\n".encode() + data, "sha256") + data


def _sendable(value: object, name: str) -> Any:
    """Return a value that can be read without running code; NumPy's numbers become Python's."""
    import torch

    kind = type(value)
    if kind in _LEAVES or kind in (torch.Tensor, torch.nn.Parameter):
        return value
    if kind in _LISTS:
        return kind(_sendable(part, name) for part in value)  # type: ignore[attr-defined]
    if kind in _MAPPINGS:
        return kind((_sendable(key, name), _sendable(part, name)) for key, part in value.items())  # type: ignore[attr-defined]
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _sendable(value.item(), name)  # type: ignore[attr-defined]
    stranger = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise RankError(
        f"what {name} returned on rank 0 cannot be sent to the other ranks: {stranger}",
        why="another type could only be read by running code that it brings along",
        fix=f"return {SENDABLE}",
    )


class MainRank:
    """Runs functions on rank 0 and hands their results to all ranks through the store."""

    def __init__(self, ctx: Context) -> None:
        self._rank = ctx.rank
        self._world_size = ctx.world_size
        self._store = ctx._store
        self._values = SignedValues(ctx.restart, ctx.device)
        self._watch = ctx._watch  # It numbers the calls, and finds ranks that disagree on the number of steps.
        self._clock = ctx.progress.clock
        self._peers = Peers(ctx.rank, ctx.world_size, ctx._store)
        self._inside = self._has_noted = False

    def on_main(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run ``fn`` on rank 0 and return its result on all ranks; inside such a function, only run it.

        Raises:
            RankError: on the other ranks: rank 0 failed in it, or is gone. On all: the result cannot be sent.
        """
        name = getattr(fn, "__qualname__", type(fn).__name__)
        if self._inside:
            return fn(*args, **kwargs)
        place = self._watch.arrive(f"waits in ctx.on_main({name})" if self._rank else f"runs ctx.on_main({name})")
        return self.run(f"main/{place}", lambda: fn(*args, **kwargs), f"ctx.on_main({name})")

    def run(self, key: str, call: Callable[[], T], name: str) -> T:
        """Run ``call`` on rank 0 and return its result on all ranks, under a key in the store that is used once."""
        if self._world_size == 1:
            return call()
        if self._rank == 0:
            return self._lead(key, call, name)
        value: T = self._follow(key, name)
        return value

    def _lead(self, key: str, call: Callable[[], T], name: str) -> T:
        store = self._store
        self._inside = True
        try:
            value = call()
            store.set(key, self._values.pack(key, value, name))  # type: ignore[arg-type]
        except BaseException as error:
            if isinstance(error, AllranksError):
                parts = {"what": f"rank 0: {error.what}", "why": error.why, "fix": error.fix}
            else:
                parts = {
                    "what": f"rank 0 failed in {name}: {type(error).__name__}: {error}",
                    "why": "the other ranks waited for what it returns",
                    "fix": "read the traceback of rank 0: allranks logs --rank 0",
                }
            with suppress(RuntimeError):  # Report the original error, even if the store is gone too.
                store.set(key, self._values.pack_error(key, parts))  # type: ignore[arg-type]
                poll(lambda: store.add(f"{key}/read", 0) >= self._world_size - 1 or None, _SECONDS_TO_READ)
            raise
        finally:
            self._inside = False
        return value

    def _follow(self, key: str, name: str) -> Any:
        store = self._store

        def query() -> bytes | None:
            self._watch.raise_verdict()
            gone = self._peers.is_gone(0)
            if store.check([key]):
                found = store.get(key)
                if self._values.is_authentic(key, found):
                    return found
                if not self._has_noted:
                    rank = f"rank {self._rank} waits in {name}"
                    log(f"note: {rank}: what stands in the store was not signed with this run's key")
                self._has_noted = True
            if gone:  # Publish it for ranks on other machines, which cannot see the process.
                death = self._values.pack_error(key, vars(self._rank_0_ended(name, "its process is gone")))
                store.set(key, death)  # type: ignore[arg-type]
                return death
            return None

        try:
            with self._clock.during(EXCHANGE):
                answer = poll(query)
            assert answer
            if store.add(f"{key}/read", 1) == self._world_size - 1 and not self._values.is_error(answer):
                store.delete_key(key)
        except RuntimeError as error:
            raise self._rank_0_ended(name, str(error).strip().split("\n")[0]) from error
        return self._values.unpack(answer)

    def _rank_0_ended(self, name: str, why: str) -> RankError:
        return RankError(
            f"rank 0 ended while rank {self._rank} waited for it in {name}",
            why=why,
            fix="read the log of rank 0: allranks logs --rank 0",
        )
