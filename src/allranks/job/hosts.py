"""The machines of a job that no scheduler chooses: a list, or a file of hosts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import JobError
from allranks.hostlist import MOST_HOSTS, expand, split
from allranks.job.units import format_count

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: No name begins like an option of ssh, and none holds what a shell would read.
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")
#: An address of IPv6 without a port: the same groups as those of an item.
_ADDRESS = re.compile(r"(?:([^@\s]+)@)?([0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.%\w]*)()()")
_ITEM = re.compile(r"(?:([^@\s]+)@)?(?:\[([^\]]*:[^\]]*)\]|(.+?))(?::(\d{1,5}))?")
_SLOTS = re.compile(r"slots=(\d{1,4})")
#: What tells names of machines from a number of nodes that is written out.
_OF_A_NAME = re.compile(r"[A-Za-z].*[\d,\[@.-]|\d\.\d+\.\d|:.*:")


@dataclass(frozen=True)
class Host:
    """A machine that is reached over SSH.

    Attributes:
        name: as ssh knows it: a name, an alias from its configuration, or an address.
        user: whom to be there; None: as ssh's configuration says.
        port: where its sshd listens; None: likewise.
        slots: how many ranks a file of hosts gives it, if it does.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}:{self.port}" if self.port else user + name


def look_like_hosts(text: str) -> bool:
    """Tell whether ``--nodes`` was given names of machines instead of a number."""
    return bool(_OF_A_NAME.search(text))


def parse_hosts(items: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts in items such as ``gpu[1-3]``, ``ada@gpu7:2222``, ``10.0.0.4`` or ``[2001:db8::7]:22``.

    Raises:
        ValueError: an item is none, a host stands there twice, or there are more than :data:`MOST_HOSTS`.
    """
    return _each_once(_hosts_in(items))


def read_hostfile(text: str) -> tuple[Host, ...]:
    """Return the hosts in a file of hosts, as Open MPI and DeepSpeed read it: ``gpu1 slots=8`` on each line.

    Raises:
        ValueError: a line is not written so, or a host stands there twice.
    """
    found = _each_once(_hosts_in_lines(text))
    if not found:
        raise ValueError("no host stands in it")
    return found


def _hosts_in_lines(text: str) -> Iterator[Host]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            slots = [_slots(word) for word in words[1:]]
            if len(slots) > 1:
                raise ValueError("slots stand there twice")
            for host in _parse(words[0]):
                yield Host(host.name, host.user, host.port, *slots)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def hosts_of(job: Job, folder: Path) -> tuple[Host, ...]:
    """Return the hosts of a job: as many as it asks for of those that are listed, in their order; spares are last.

    Those of ``scheduler.exclude`` are left out, and the next ones take their place.

    Args:
        job: the job.
        folder: what the path of a file of hosts is relative to.

    Raises:
        JobError: there are none, too few, or what lists them cannot be read.
    """
    listed, spares, excluded = _listed(job, folder), job.resources.spares, _excluded(job)
    found = tuple(host for host in listed if not _excluding(excluded, host))
    if listed and not found:
        raise _none_left(job)
    least, most = _asked(job) or (1, max(1, len(found) - spares))
    if least + spares > len(found):
        raise _too_few(job, found, len(listed) - len(found))
    return found[: most + spares]


def taking_part(job: Job, hosts: Sequence[Host]) -> tuple[int, int]:
    """Return how few and how many of a job's hosts take part at the same time; the others are spares."""
    most = len(hosts) - job.resources.spares
    least, _ = _asked(job) or (most, most)
    return least, most


def _asked(job: Job) -> tuple[int, int] | None:
    return job.resources.nodes if "nodes" in job.resources.model_fields_set else None


def excluded_in_vain(job: Job, folder: Path) -> tuple[str, ...]:
    """Return what ``scheduler.exclude`` names that is not among the hosts that are listed."""
    excluded = _excluded(job)
    used = {host for listed in _listed(job, folder) for host in _excluding(excluded, listed)}
    return tuple(str(host) for hosts in excluded.values() for host in hosts if host not in used)


def _excluding(excluded: dict[str, list[Host]], host: Host) -> list[Host]:
    """Return those of the excluded hosts that mean this one: by name alone, or whom to be there and the port too."""
    same = excluded.get(host.name, ())
    return [each for each in same if each.user in (None, host.user) and each.port in (None, host.port)]


def _excluded(job: Job) -> dict[str, list[Host]]:
    """Return the hosts of ``scheduler.exclude`` by name: each of a long list is looked up for each of another."""
    found: dict[str, list[Host]] = {}
    try:
        for host in _at_most(_hosts_in(job.scheduler.exclude)):
            found.setdefault(host.name, []).append(host)
    except ValueError as error:
        raise JobError(f"scheduler.exclude: {error}", fix="--exclude gpu2,gpu[5-7]") from error
    return found


def _none_left(job: Job) -> JobError:
    return JobError(
        "scheduler.exclude leaves no host",
        why=f"all that are listed are among {', '.join(job.scheduler.exclude)}",
        fix="exclude fewer, or list more hosts in resources.hosts",
    )


def _too_few(job: Job, found: Sequence[Host], excluded: int) -> JobError:
    spares, asked = job.resources.spares, _asked(job)
    least, most = asked or (0, 0)
    wanted = [f"{'at least ' if least < most else ''}{format_count(least, 'node')}"] if asked else []
    wanted += [format_count(spares, "spare")] if spares else []
    left = len(found) - spares
    there = f"{_is(len(found))} left without those of scheduler.exclude" if excluded else f"{_is(len(found))} listed"
    return JobError(
        f"{' and '.join(wanted)} were asked for, and {format_count(len(found), 'host')} {there}",
        why=", ".join(map(str, found[:5])) + ", …" * (len(found) > 5),
        fix=(f"--nodes {left}" if left > 0 else "fewer --spares") + ", or more hosts in resources.hosts",
    )


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _listed(job: Job, folder: Path) -> tuple[Host, ...]:
    resources = job.resources
    try:
        if resources.hosts:
            return parse_hosts(resources.hosts)
        if resources.hostfile:
            return read_hostfile((folder / resources.hostfile).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"resources.hostfile: cannot read {resources.hostfile}", why=error.strerror) from error
    except ValueError as error:
        where = "resources.hosts" if resources.hosts else f"resources.hostfile: {resources.hostfile}"
        fix = "write gpu[1-3], ada@gpu7:2222 or 10.0.0.4; in a file a line each, with slots=8 behind it"
        raise JobError(f"{where}: {error}", fix=fix) from error
    raise JobError(
        f"cluster {job.cluster} has no hosts",
        why="over SSH nobody else says which machines a job runs on",
        fix="resources: {hosts: 'gpu[1-4]'} in the entry of clusters.yaml, or --hosts gpu1,gpu2",
    )


def _hosts_in(items: Sequence[str]) -> Iterator[Host]:
    return (host for item in items for part in split(item) for host in _parse(part))


def _at_most(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts; each item may be short and stand for many, so they are counted while they come."""
    found = tuple(itertools.islice(hosts, MOST_HOSTS + 1))
    if len(found) > MOST_HOSTS:
        raise ValueError(f"these are more than {MOST_HOSTS:,} hosts, the most that a list can have")
    return found


def _parse(item: str) -> Iterator[Host]:
    match = _ADDRESS.fullmatch(item) or _ITEM.fullmatch(item)
    if not match:
        raise ValueError(f"{item!r} is no host")
    user, address, names, port = match.groups()
    for name in [address] if address else expand(names):
        if not _NAME.fullmatch(name) or (user and not _NAME.fullmatch(user)):
            raise ValueError(f"{item!r} is no host")
        if port and not 1 <= int(port) <= 65535:
            raise ValueError(f"{item!r}: there is no port {port}")
        yield Host(name, user, int(port) if port else None)


def _slots(word: str) -> int:
    match = _SLOTS.fullmatch(word)
    if not match or not int(match[1]):
        raise ValueError(f"{word!r} is not understood, only slots=N is")
    return int(match[1])


def _each_once(hosts: Iterable[Host]) -> tuple[Host, ...]:
    seen: set[tuple[str, int | None]] = set()
    found = _at_most(hosts)
    for host in found:
        if (host.name, host.port) in seen:
            raise ValueError(f"{host} stands there twice: each host runs one agent, with as many ranks as it has GPUs")
        seen.add((host.name, host.port))
    return found
