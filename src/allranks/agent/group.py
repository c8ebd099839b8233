"""The ranks of this node, one generation after the other: started, watched, ended, and told of."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from allranks import contract
from allranks.agent.generation import Generation, variables
from allranks.agent.rank import RankOrder
from allranks.agent.ranks import Listening, RankExit, Ranks
from allranks.agent.stop import Stop
from allranks.contract import NodeSpec
from allranks.processes import catches
from allranks.runs.events import EventWriter
from allranks.runs.logindex import LogIndexWriter

_KILL_PATIENCE = 5.0
#: How soon a user in a hurry is noticed.
_HURRY_SECONDS = 0.1


class RankGroup:
    """The ranks of this node. It knows nothing of torch, and decides nothing: its callers do.

    Args:
        node: the node's orders.
        folder: the node's folder in the run's record.
        ranks: the ranks, as the starter tells of them.
        python: command line of the interpreter up to the script, or None to run it in the forked one.
        events: where to tell what happens.
        index: told which logs to watch.
        stop: requests to end; a hurried one cuts the patience with the ranks short.

    Attributes:
        started: when the newest generation was started, in monotonic seconds.
        first_failure: the global rank that failed first, and its end, if it is to blame for what follows.
    """

    def __init__(
        self,
        node: NodeSpec,
        folder: Path,
        ranks: Ranks,
        python: tuple[str, ...] | None,
        events: EventWriter,
        index: LogIndexWriter,
        stop: Stop,
    ) -> None:
        self.started = 0.0
        self.first_failure: tuple[int, RankExit] | None = None
        self._node = node
        self._folder = folder
        self._ranks = ranks
        self._python = python
        self._events = events
        self._index = index
        self._stop = stop
        self._generation: Generation | None = None
        self._told = 0
        self._blames = True
        self._unheard: list[tuple[int, signal.Signals]] = []  # warnings, and the local ranks that they are for

    @property
    def is_running(self) -> bool:
        """Tell whether a rank is alive."""
        return bool(self._ranks.pids)

    @property
    def wants_to_continue(self) -> bool:
        """Tell whether a rank was asked to stop, has saved, and is to be started again by whoever asked."""
        return self.left_with(contract.CONTINUE_LATER) is not None

    def left_with(self, code: int) -> int | None:
        """Return the first rank that exited with ``code``; None if there is none."""
        assert self._generation is not None
        ranks = (self._generation.ranks[ended.local_rank] for ended in self._ranks.exits if ended.code == code)
        return next(ranks, None)

    def start(self, generation: Generation) -> None:
        """Start a generation.

        Raises:
            LaunchError: the system allows no further process.
        """
        self._generation = generation
        self._index.watch(generation.ranks)
        self._told, self.first_failure, self._blames = 0, None, True
        pids = self._ranks.start({local: self._order(generation, local) for local in self._locals()})
        self.started = time.monotonic()
        self._tell_start(generation, pids)

    def look(self, seconds: float) -> None:
        """Tell of the ranks that have ended; if there are none, wait so long for one."""
        if self._told == len(self._ranks.exits):
            self._ranks.wait(seconds)
        for number in self._stop.take_warnings():
            self._events.write(contract.WARNED, signal=number.name)
            self._unheard += [(local_rank, number) for local_rank in self._locals()]
        self._hand_on_warnings()
        self._tell_exits()

    def end(self, number: signal.Signals, patience: Callable[[], float] | None = None) -> None:
        """End all ranks: ``number``, patience, then SIGKILL; at once when the user is in a hurry.

        Args:
            number: the signal that they get first.
            patience: gives the seconds that they have to leave, which may change meanwhile; by default the job says so.
        """
        asked = patience or (lambda: self._node.stop_timeout)
        for current, seconds in ((number, asked), (signal.SIGKILL, lambda: _KILL_PATIENCE)):
            if not self._ranks.pids:
                break
            self._ranks.signal(current)
            began = time.monotonic()
            while self._ranks.pids and (left := began + seconds() - time.monotonic()) > 0:
                if self._stop.hurry and current != signal.SIGKILL:
                    break
                self._ranks.wait(min(left, _HURRY_SECONDS))
        self._tell_exits()

    def give_up(self) -> None:
        """End all ranks, as the request to stop asks for if there is one; who fails from now on is not to blame."""
        self._blames = False
        self.end(self._stop.signal or signal.SIGTERM)

    def forgive(self) -> None:
        """Blame nobody for what follows: the job goes on, and who asks for its end from now on cancels it."""
        self.first_failure, self._blames = None, False

    def attend(self, other: Listening) -> None:
        """Have somebody else hear what comes for him, whenever the ranks are waited for."""
        self._ranks.attend(other)

    def pause(self, restart: int, delay: float, blamed: int | None) -> None:
        """Tell of a restart, and of the rank that is to blame for it; wait so many seconds before it."""
        most = self._node.max_restarts
        self._events.write(contract.RESTART, restart=restart, delay=delay, because_of_rank=blamed, max_restarts=most)
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0:
            self._ranks.wait(left)

    def _locals(self) -> range:
        return range(self._node.nproc_per_node)

    def _hand_on_warnings(self) -> None:
        """Hand warnings on to the ranks that listen to them; others get them once they do, if they ever do.

        A rank that still imports or loads its data would die of a warning instead of saving after its first step.
        """
        for warning in self._unheard.copy():
            local_rank, number = warning
            pid = self._ranks.pids.get(local_rank)
            if pid is not None and catches(pid, number) is not False:
                self._ranks.signal(number, local_rank)
                self._unheard.remove(warning)

    def _order(self, generation: Generation, local_rank: int) -> RankOrder:
        rank = generation.ranks[local_rank]

        def log(stream: str) -> str:
            return str(self._folder / contract.rank_log(rank, stream))

        error_file = str(self._folder / contract.rank_error(rank, generation.restart))
        return RankOrder(
            kind=self._node.kind,
            target=self._node.target,
            args=self._node.args,
            python=self._python,
            variables=variables(self._node, generation, local_rank, error_file),
            out=log("out"),
            err=log("err"),
            file_mode=self._node.file_mode,
        )

    def _tell_start(self, generation: Generation, pids: Mapping[int, int]) -> None:
        self._events.write(
            contract.RANKS_STARTED,
            restart=generation.restart,
            world_size=generation.world_size,
            nodes=generation.nodes,
            master_addr=generation.master_addr,
            master_port=generation.master_port,
            ranks=[
                {"rank": generation.ranks[local], "local_rank": local, "pid": pids[local]} for local in self._locals()
            ],
        )

    def _tell_exits(self) -> None:
        for ended in self._ranks.exits[self._told :]:
            assert self._generation is not None
            rank = self._generation.ranks[ended.local_rank]
            self._events.write(
                contract.RANK_EXITED, rank=rank, pid=ended.pid, code=ended.code, ended=ended.time, **_memory(ended)
            )
            if _is_failure(ended) and self.first_failure is None and self._blames:
                self.first_failure = (rank, ended)
        self._told = len(self._ranks.exits)


def _memory(ended: RankExit) -> dict[str, int]:
    """Return the bytes of memory that a killed rank had at most, and could have: they may be why."""
    if ended.code != -signal.SIGKILL:
        return {}
    from allranks.probe import cgroups

    limits = (cgroups.memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return {"memory": ended.memory, "memory_limit": min(filter(None, limits))}


def _is_failure(ended: RankExit) -> bool:
    return ended.code not in (0, contract.CONTINUE_LATER)
