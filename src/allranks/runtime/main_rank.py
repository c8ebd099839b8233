"""Work for rank 0 alone, while the others wait: however long it takes, no collective operation times out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from allranks.errors import AllranksError, RankError
from allranks.runtime.parcel import Parcels
from allranks.runtime.peer import Peers
from allranks.runtime.poll import poll
from allranks.runtime.say import say

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from allranks.runtime.watch_steps import StepWatch

T = TypeVar("T")

#: After an error, rank 0 may take the store with it: it waits so long for the others to read what happened.
_SECONDS_TO_READ = 5.0


class MainRank:
    """Runs functions on rank 0 and hands their values to all ranks through the store.

    Args:
        rank: of this process.
        world_size: number of ranks.
        store: what the ranks share.
        parcels: how values travel in it.
        watch: numbers the calls, and knows when ranks disagree on the number of steps.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, parcels: Parcels, watch: StepWatch) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._parcels = parcels
        self._watch = watch
        self._peers = Peers(rank, world_size, store)
        self._inside = self._has_noted = False

    def on_main(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run ``fn`` on rank 0 and give its value on all ranks; inside such a function, just run it.

        Raises:
            RankError: on the other ranks: rank 0 failed in it, or is gone. On all: the value cannot be sent.
        """
        name = getattr(fn, "__qualname__", type(fn).__name__)
        if self._inside:
            return fn(*args, **kwargs)
        place = self._watch.arrive(f"waits in ctx.on_main({name})" if self._rank else f"runs ctx.on_main({name})")
        return self.run(f"main/{place}", lambda: fn(*args, **kwargs), f"ctx.on_main({name})")

    def run(self, key: str, call: Callable[[], T], name: str) -> T:
        """Run ``call`` on rank 0 and give its value on all ranks.

        Args:
            key: of this call in the store; the same on all ranks, and used once.
            call: what rank 0 runs.
            name: what it is, for messages.

        Raises:
            RankError: as :meth:`on_main`.
        """
        if self._world_size == 1:
            return call()
        if self._store is None:
            raise RankError(
                "ctx.on_main() cannot reach the other ranks",
                why="the script has started the process group itself, and its store cannot be found",
                fix="call allranks.init() instead of torch.distributed.init_process_group()",
            )
        if self._rank == 0:
            return self._lead(self._store, key, call, name)
        value: T = self._follow(self._store, key, name)
        return value

    def _lead(self, store: Store, key: str, call: Callable[[], T], name: str) -> T:
        self._inside = True
        try:
            value = call()
            store.set(key, self._parcels.value(key, value, name))  # type: ignore[arg-type]
        except BaseException as error:
            with suppress(RuntimeError):  # The error counts, and not that the store is gone as well.
                store.set(key, self._parcels.error(key, _told(error, name)))  # type: ignore[arg-type]
                poll(lambda: store.add(f"{key}/read", 0) >= self._world_size - 1 or None, _SECONDS_TO_READ)
            raise
        finally:
            self._inside = False
        return value

    def _follow(self, store: Store, key: str, name: str) -> Any:
        def look() -> bytes | None:
            self._watch.raise_verdict()
            gone = self._peers.is_gone(0)
            if store.check([key]):
                found = store.get(key)
                if self._parcels.is_ours(key, found):
                    return found
                self._note_stranger(name)
            if gone:  # Ranks of other machines cannot see it, and read it here.
                left_alone = self._parcels.error(key, vars(self._left_alone(name, "its process is gone")))
                store.set(key, left_alone)  # type: ignore[arg-type]
                return left_alone
            return None

        try:
            answer = poll(look)
            assert answer
            if store.add(f"{key}/read", 1) == self._world_size - 1 and not self._parcels.is_error(answer):
                store.delete_key(key)
        except RuntimeError as error:
            raise self._left_alone(name, str(error).strip().split("\n")[0]) from error
        return self._parcels.opened(answer)

    def _note_stranger(self, name: str) -> None:
        if not self._has_noted:
            say(f"note: rank {self._rank} waits in {name}: what stands in the store was not signed with this run's key")
        self._has_noted = True

    def _left_alone(self, name: str, why: str) -> RankError:
        return RankError(
            f"rank 0 ended while rank {self._rank} waited for it in {name}",
            why=why,
            fix="look at the log of rank 0: allranks logs --rank 0",
        )


def _told(error: BaseException, name: str) -> dict[str, str | None]:
    """Give the parts of the error that the other ranks raise."""
    if isinstance(error, AllranksError):
        return {"what": f"rank 0: {error.what}", "why": error.why, "fix": error.fix}
    return {
        "what": f"rank 0 failed in {name}: {type(error).__name__}: {error}",
        "why": "the other ranks waited for what it returns",
        "fix": "look at the traceback of rank 0: allranks logs --rank 0",
    }
