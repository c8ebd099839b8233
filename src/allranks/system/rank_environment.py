"""Reads and checks the environment variables by which a launcher identifies each rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from allranks.contract import FIRST_PORT, PORTS
from allranks.errors import RankEnvironmentError

Variables = Mapping[str, str]

LOOPBACK = "127.0.0.1"


class RankEnvironment(NamedTuple):
    """A rank's place. None is unknown: the ranks then count their hosts at the rendezvous."""

    kind: str  # How the rank was started, such as "torchrun".
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    master_addr: str = LOOPBACK
    master_port: int = 0  # 0 in a world of one without a port.
    restart: int = 0


class EnvironmentKind:
    """A way to start ranks: for each property the variables that may hold it; the first one set counts."""

    name: ClassVar[str]
    rank: ClassVar[tuple[str, ...]]
    world_size: ClassVar[tuple[str, ...]]
    local_rank: ClassVar[tuple[str, ...]] = ()
    local_world_size: ClassVar[tuple[str, ...]] = ()
    node_rank: ClassVar[tuple[str, ...]] = ()
    restart: ClassVar[tuple[str, ...]] = ()

    def present(self, env: Variables) -> bool:
        """Return whether the process was started as a rank this way."""
        return self.get(env, self.rank + self.world_size) is not None

    def read(self, env: Variables) -> RankEnvironment:
        """Read and check this rank's place.

        Raises:
            RankEnvironmentError: naming the variables, what is wrong with them and what to do.
        """
        rank, world = self.find_rank(env), self.find_world_size(env)
        if rank is None or world is None:
            raise self.half_set(env, self.rank, self.world_size)
        self.below(env, self.rank, rank, self.world_size, world)
        local_world = self.find_local_world_size(env)
        several_hosts = local_world is None or local_world < world
        addr, port = (LOOPBACK, 0) if world == 1 else self.master(env, several_hosts)
        return RankEnvironment(
            kind=self.name,
            rank=rank,
            world_size=world,
            local_rank=self._local_rank(env, world, local_world),
            local_world_size=1 if world == 1 else local_world,
            node_rank=0 if world == 1 else self.find_node_rank(env),
            master_addr=self.get(env, ("MASTER_ADDR",)) or addr,
            master_port=self.number(env, ("MASTER_PORT",)) or port,
            restart=self.number(env, self.restart) or 0,
        )

    # --- methods that a kind may override ---

    def find_rank(self, env: Variables) -> int | None:
        """Find the rank."""
        return self.number(env, self.rank)

    def find_world_size(self, env: Variables) -> int | None:
        """Find the number of ranks."""
        return self.number(env, self.world_size, least=1)

    def find_local_rank(self, env: Variables) -> int | None:
        """Find the rank among those on this host."""
        return self.number(env, self.local_rank)

    def find_local_world_size(self, env: Variables) -> int | None:
        """Find the number of ranks on this host."""
        return self.number(env, self.local_world_size, least=1)

    def find_node_rank(self, env: Variables) -> int | None:
        """Find this host's number among the hosts: 0 if it has all ranks."""
        if self.node_rank:
            return self.number(env, self.node_rank)
        return 0 if self.find_local_world_size(env) == self.find_world_size(env) else None

    def master(self, env: Variables, several_hosts: bool) -> tuple[str, int]:
        """Find the rendezvous address and port, for a world of several ranks.

        MASTER_ADDR and MASTER_PORT take precedence. Otherwise ranks of one host use that host and a port derived from
        :meth:`job_key`; ranks of several hosts need :meth:`find_master_host`.
        """
        addr = self.get(env, ("MASTER_ADDR",)) or (self.find_master_host(env) if several_hosts else LOOPBACK)
        port = self.number(env, ("MASTER_PORT",), least=1)
        return addr, port or derived_port(self.job_key(env))

    def find_master_host(self, env: Variables) -> str:
        """Find the host of rank 0, for ranks on several hosts."""
        raise RankEnvironmentError(
            f"MASTER_ADDR is not set, and {self.name} started ranks on several hosts",
            why=f"{self.name} does not report which host rank 0 is on",
            fix="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks",
        )

    def job_key(self, env: Variables) -> str:
        """Return a text that is the same for all ranks of this job and different from other jobs."""
        raise NotImplementedError

    # --- reading ---

    @staticmethod
    def get(env: Variables, names: tuple[str, ...]) -> str | None:
        """Return the first of the variables that is not empty."""
        return next((env[name].strip() for name in names if env.get(name, "").strip()), None)

    def number(self, env: Variables, names: tuple[str, ...], least: int = 0) -> int | None:
        """Return the first of the variables that is not empty, as a number."""
        text = self.get(env, names)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            name = self._set_name(env, names)
            raise RankEnvironmentError(
                f"{name}={text} is not a number of {least} or more",
                why=f"{self.name} sets {name} for each rank; something has overwritten it",
                fix=f"do not set {name} yourself, or set it to a number",
            )
        return int(text)

    def below(self, env: Variables, names: tuple[str, ...], value: int, limits: tuple[str, ...], limit: int) -> None:
        """Check that a rank is below the number of ranks."""
        if value < limit:
            return
        name, bound = self._set_name(env, names), self._set_name(env, limits)
        raise RankEnvironmentError(
            f"{name}={value} is not below {bound}={limit}",
            why=f"ranks count from 0, so that the last of {limit} is {limit - 1}",
            fix=f"give each rank its own {name} from 0 to {limit - 1}, or correct {bound}",
        )

    def half_set(self, env: Variables, *groups: tuple[str, ...]) -> RankEnvironmentError:
        """Return the error for variables of which only some are set."""
        there = [self._set_name(env, group) for group in groups if self.get(env, group) is not None]
        missing = [group[0] for group in groups if self.get(env, group) is None]
        return RankEnvironmentError(
            f"{_are(there)} set, but {_are(missing)} not",
            why=f"the variables by which {self.name} identifies a rank are only partly set",
            fix=self.advice(env, there, missing),
        )

    def advice(self, env: Variables, there: list[str], missing: list[str]) -> str:
        """Return the fix for half-set variables."""
        return f"let {self.name} set all of them, or unset {' and '.join(there)} to run a single process"

    def _local_rank(self, env: Variables, world: int, local_world: int | None) -> int:
        local_rank = self.find_local_rank(env)
        if local_rank is None:
            if world > 1:
                raise self.half_set(env, self.rank, self.world_size, self.local_rank)
            return 0
        if local_world is not None:
            self.below(env, self.local_rank, local_rank, self.local_world_size, local_world)
        return local_rank

    def _set_name(self, env: Variables, names: tuple[str, ...]) -> str:
        return next((name for name in names if env.get(name, "").strip()), names[0])


def _are(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def derived_port(key: str) -> int:
    """Derive a port from a text that the ranks of one job share.

    Two jobs on the same host get the same port in 1 of 16,000 cases; the port may also be in use by another program.
    Rank 0 then reports it, and MASTER_PORT can set another one.
    """
    return FIRST_PORT + zlib.crc32(key.encode()) % PORTS
