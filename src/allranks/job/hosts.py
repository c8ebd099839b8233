"""The machines of a job that no scheduler chooses: a list, or a file of hosts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allranks.errors import JobError
from allranks.job.units import format_count
from allranks.system.hostlist import MOST_HOSTS, expand, split

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: A name neither starts like an option of ssh nor holds what a shell would read.
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")
#: An address of IPv6 without a port: the same groups as those of an item.
_ADDRESS = re.compile(r"(?:([^@\s]+)@)?([0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.%\w]*)()()")
_ITEM = re.compile(r"(?:([^@\s]+)@)?(?:\[([^\]]*:[^\]]*)\]|(.+?))(?::(\d{1,5}))?")
_SLOTS = re.compile(r"slots=(?!0+$)(\d{1,4})")
#: Text that is names of machines, not an invalid number of nodes.
_OF_A_NAME = re.compile(r"[A-Za-z].*[\d,\[@.-]|\d\.\d+\.\d|:.*:")


class Host(NamedTuple):
    """A machine that is reached over SSH."""

    name: str  # As ssh knows it: a name, an alias from its configuration, or an address.
    user: str | None = None  # The login there; None: as ssh's configuration says.
    port: int | None = None  # Of its sshd; None: likewise.
    slots: int | None = None  # The number of its ranks in a file of hosts; None if there is none.

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name and self.port else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}:{self.port}" if self.port else user + name


def look_like_hosts(text: str) -> bool:
    """Return whether ``--nodes`` was given names of machines instead of a number."""
    return bool(_OF_A_NAME.search(text))


def parse_hosts(items: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts in items such as ``gpu[1-3]``, ``ada@gpu7:2222``, ``10.0.0.4`` or ``[2001:db8::7]:22``.

    ValueError: an item is none, a host is listed twice, or there are more than :data:`MOST_HOSTS`.
    """
    return _each_once(_hosts_in(items))


def read_hostfile(text: str) -> tuple[Host, ...]:
    """Return the hosts in a file of hosts, as Open MPI and DeepSpeed read it: ``gpu1 slots=8`` on each line."""
    found = _each_once(_hosts_in_lines(text))
    if not found:
        raise ValueError("it names no host")
    return found


def _hosts_in_lines(text: str) -> Iterator[Host]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            slots = None
            for word in words[1:]:
                match = _SLOTS.fullmatch(word)
                if not match:
                    raise ValueError(f"{word!r} is not understood, only slots=N is")
                if slots:
                    raise ValueError("slots= is given twice")
                slots = int(match[1])
            for host in _parse(words[0]):
                yield host._replace(slots=slots)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def hosts_of(job: Job, folder: Path) -> tuple[Host, ...]:
    """Return the hosts of a job: as many as it asks for of those that are listed, in their order; spares are last.

    Those of ``scheduler.exclude`` are left out, and the next ones take their place. The path of a file of hosts is
    relative to ``folder``.

    Raises:
        JobError: there are none, too few, or what lists them cannot be read.
    """
    listed, spares, excluded = _listed(job, folder), job.resources.spares, {*_excluded(job)}
    found = tuple(host for host in listed if excluded.isdisjoint(_ways_to_name(host)))
    if listed and not found:
        raise JobError(
            "scheduler.exclude leaves no host",
            why=f"all that are listed are among {', '.join(job.scheduler.exclude)}",
            fix="exclude fewer, or list more hosts in resources.hosts",
        )
    least, most = _requested(job) or (1, max(1, len(found) - spares))
    if least + spares > len(found):
        raise _too_few(job, found, len(listed) - len(found))
    return found[: most + spares]


def taking_part(job: Job, hosts: Sequence[Host]) -> tuple[int, int]:
    """Return how few and how many of a job's hosts take part at the same time; the others are spares."""
    most = len(hosts) - job.resources.spares
    least, _ = _requested(job) or (most, most)
    return least, most


def _requested(job: Job) -> tuple[int, int] | None:
    return job.resources.nodes if "nodes" in job.resources.model_fields_set else None


def excluded_in_vain(job: Job, folder: Path) -> tuple[str, ...]:
    """Return what ``scheduler.exclude`` names that is not among the hosts that are listed."""
    used = {name for host in _listed(job, folder) for name in _ways_to_name(host)}
    return tuple(str(host) for host in _excluded(job) if host not in used)


def _ways_to_name(host: Host) -> set[Host]:
    """Return the excluded hosts that mean this one: by name, and by user and port or without them."""
    return {Host(host.name, user, port) for user in (None, host.user) for port in (None, host.port)}


def _excluded(job: Job) -> tuple[Host, ...]:
    try:
        return _at_most(_hosts_in(job.scheduler.exclude))
    except ValueError as error:
        raise JobError(f"scheduler.exclude: {error}", fix="--exclude gpu2,gpu[5-7]") from error


def _too_few(job: Job, found: Sequence[Host], excluded: int) -> JobError:
    spares, requested = job.resources.spares, _requested(job)
    wanted = []
    if requested:
        wanted.append(f"{'at least ' if requested[0] < requested[1] else ''}{format_count(requested[0], 'node')}")
    if spares:
        wanted.append(format_count(spares, "spare"))
    there = f"{format_count(len(found), 'host')} {'is' if len(found) == 1 else 'are'}"
    there += " left without those of scheduler.exclude" if excluded else " listed"
    why = ", ".join(map(str, found[:5])) + ", …" * (len(found) > 5)
    fix = f"--nodes {len(found) - spares}" if len(found) > spares else "fewer --spares"
    what = f"{' and '.join(wanted)} were requested, and {there}"
    return JobError(what, why=why, fix=f"{fix}, or more hosts in resources.hosts")


def _listed(job: Job, folder: Path) -> tuple[Host, ...]:
    resources = job.resources
    try:
        if resources.hosts:
            return parse_hosts(resources.hosts)
        if resources.hostfile:
            return read_hostfile((folder / resources.hostfile).read_text(encoding="utf-8"))
    except OSError as error:
        what = f"resources.hostfile: cannot read {resources.hostfile}"
        fix = f"write a host on each line of {folder / str(resources.hostfile)}, or --hosts gpu1,gpu2"
        raise JobError(what, why=error.strerror, fix=fix) from error
    except ValueError as error:
        where = "resources.hosts" if resources.hosts else f"resources.hostfile: {resources.hostfile}"
        known = "write gpu[1-3], ada@gpu7:2222 or 10.0.0.4; in a file a line each, with slots=8 behind it"
        what, _, fix = str(error).partition("; ")
        raise JobError(f"{where}: {what}", fix=fix or known) from error
    raise JobError(
        f"cluster {job.cluster} has no hosts",
        why="over SSH the job must name its machines",
        fix="resources: {hosts: 'gpu[1-4]'} in the entry of clusters.yaml, or --hosts gpu1,gpu2",
    )


def _hosts_in(items: Sequence[str]) -> Iterator[Host]:
    for item in items:
        for part in split(item):
            yield from _parse(part)


def _at_most(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts; a short item may stand for many, so they are counted while they come."""
    found = tuple(itertools.islice(hosts, MOST_HOSTS + 1))
    if len(found) > MOST_HOSTS:
        raise ValueError(f"these are more than {MOST_HOSTS:,} hosts, the most that a list can have")
    return found


def _parse(item: str) -> Iterator[Host]:
    match = _ADDRESS.fullmatch(item) or _ITEM.fullmatch(item)
    if not match:
        raise ValueError(f"invalid host: {item!r}")
    user, address, names, port = match.groups()
    for name in [address] if address else expand(names):
        if not _NAME.fullmatch(name) or (user and not _NAME.fullmatch(user)):
            raise ValueError(f"invalid host: {item!r}")
        if port and not 1 <= int(port) <= 65535:
            raise ValueError(f"{item!r}: there is no port {port}")
        yield Host(name, user, int(port) if port else None)


def _each_once(hosts: Iterable[Host]) -> tuple[Host, ...]:
    found = _at_most(hosts)
    seen: set[tuple[str, int | None]] = set()
    for host in found:
        if (host.name, host.port) in seen:
            raise ValueError(f"{host} is listed twice; list it once: --nproc-per-node 2 starts two ranks on each host")
        seen.add((host.name, host.port))
    return found
