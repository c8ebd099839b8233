"""What jobs ask for, and where it is free: chunks of nodes, by counting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pbs_standin.words import Flavour, RefusedError

#: What a node of the stand-in has; memory in kB.
NODE = {"ncpus": 8, "ngpus": 4, "mem": 8 << 20}
KNOWN = {*NODE, "mpiprocs", "ompthreads", "host", "vnode", "arch"}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Chunk:
    """One piece of a node.

    Attributes:
        counted: how much of ncpus, ngpus and mem (kB) it takes.
        lines: how often its host stands in the nodefile.
        host: the node that it must be on; any node if empty.
    """

    counted: dict[str, int]
    lines: int = 1
    host: str = ""


@dataclass
class Node:
    """A node as the scheduler sees it.

    Attributes:
        used: the chunks on it, by slot and job; the slot is what exec_host shows.
        exclusive: the job that has it to itself.
        is_up: whether the server hears from it.
    """

    name: str
    used: dict[int, tuple[str, Chunk]] = field(default_factory=dict)
    exclusive: str = ""
    is_up: bool = True

    def free(self, name: str) -> int:
        """Return how much of a resource is free."""
        return NODE[name] - sum(chunk.counted.get(name, 0) for _, chunk in self.used.values())

    def lacks(self, chunk: Chunk) -> str:
        """Return the first resource that a chunk wants and that is not free here."""
        return next((name for name, amount in chunk.counted.items() if amount > self.free(name)), "")

    def jobs(self) -> list[str]:
        """Return the jobs on it, each once."""
        return [*dict.fromkeys(job for job, _ in self.used.values())]

    def take(self, job: str, chunk: Chunk) -> int:
        """Give a chunk to a job, and return its slot."""
        slot = next(number for number in range(10_000) if number not in self.used)
        self.used[slot] = (job, chunk)
        return slot

    def release(self, job: str) -> None:
        """Take back all that a job has."""
        self.used = {slot: use for slot, use in self.used.items() if use[0] != job}
        self.exclusive = "" if self.exclusive == job else self.exclusive


def kilobytes(text: str) -> int | None:
    """Return an amount of memory in kB, rounded up; None for one that is none."""
    if not (parts := re.fullmatch(r"(\d+)([kmgt]?)[bw]?", text.lower())):
        return None
    return -(-int(parts[1]) * UNITS[parts[2]] // 1024)


def seconds(text: str) -> int | None:
    """Return a walltime in seconds; None for one that is none."""
    if not re.fullmatch(r"\d+(:\d+){0,3}(\.\d*)?", text):
        return None
    total = 0
    for part in text.partition(".")[0].split(":"):
        total = total * 60 + int(part)
    return total


def clock(amount: int) -> str:
    """Return seconds as HH:MM:SS."""
    return f"{amount // 3600:02}:{amount // 60 % 60:02}:{amount % 60:02}"


def chunks_of_select(text: str, flavour: Flavour) -> list[Chunk]:
    """Return the chunks of `-l select=`; raise for what the real one refuses."""
    found = []
    for part in text.split("+"):
        first, *pairs = part.split(":")
        count = 1 if "=" in first else _count(first, "Resource_List.select")
        pairs = [first, *pairs] if "=" in first else pairs
        found += [_chunk(pairs, flavour)] * count
    return found


def _chunk(pairs: list[str], flavour: Flavour) -> Chunk:
    given = dict(pair.partition("=")[::2] for pair in pairs)
    for name in given.keys() - KNOWN:
        raise RefusedError(f"Unknown resource: {name}", 187)
    counted: dict[str, int] = {"ncpus": 1}
    counted |= {name: _count(given[name], f"select.{name}") for name in ("ncpus", "ngpus") if name in given}
    if "mem" in given:
        amount = kilobytes(given["mem"])
        if amount is None:
            raise RefusedError("Illegal attribute or resource value select.mem", 166)
        counted["mem"] = amount
    lines = _count(given.get("mpiprocs", "1"), "select.mpiprocs")
    return Chunk(counted, lines, given.get("host") or given.get("vnode") or "")


def _count(text: str, name: str) -> int:
    if not text.isdigit():
        raise RefusedError(f"Illegal attribute or resource value {name}", 166)
    return int(text)


def chunks_of_nodes(text: str, names: Sequence[str]) -> list[Chunk]:
    """Return the chunks of `-l nodes=`, each for a node of its own: a count or a name, ppn and gpus."""
    found = []
    for part in text.split("+"):
        first, *rest = part.split(":")
        given = dict(pair.partition("=")[::2] for pair in rest if "=" in pair)
        properties = [word for word in rest if "=" not in word]
        is_named = not first.isdigit()
        wrong = given.keys() - {"ppn", "gpus"} or {*properties} - {"gpu", "shared", "exclusive_process"}
        if wrong or (is_named and first not in names) or not all(value.isdigit() for value in given.values()):
            raise no_such_nodes()
        processes = int(given.get("ppn", 1))
        counted = {"ncpus": processes} | ({"ngpus": int(given["gpus"])} if "gpus" in given else {})
        found += [Chunk(counted, processes, first if is_named else "")] * (1 if is_named else int(first))
    return found


def no_such_nodes() -> RefusedError:
    """Refuse nodes that Torque does not have."""
    why = "nodes file is empty, all systems are busy, or no nodes have the requested feature"
    return RefusedError(
        f"submit error (Job exceeds queue resource limits MSG=cannot locate feasible nodes ({why}))", 188
    )


def totals(chunks: Iterable[Chunk]) -> dict[str, int]:
    """Return what all chunks take together."""
    sums: dict[str, int] = {}
    for chunk in chunks:
        for name, amount in chunk.counted.items():
            sums[name] = sums.get(name, 0) + amount
    return sums


def never(chunks: Sequence[Chunk], place: str, nodes: Sequence[Node]) -> str:
    """Say why a job can never run here; nothing for one that can."""
    names = [node.name for node in nodes]
    for chunk in chunks:
        if chunk.host and chunk.host not in names:
            return f"Insufficient amount of resource: host ({chunk.host} != {','.join(names)})"
    if place.startswith("scatter") and len(chunks) > len(nodes):
        return "Not enough total nodes available"
    for name, wanted in totals(chunks).items():
        if wanted > len(nodes) * NODE[name]:
            free = sum(node.free(name) for node in nodes)
            return f"Insufficient amount of resource: {name} (R: {wanted} A: {free} T: {len(nodes) * NODE[name]})"
    return ""


def _lacking(chunks: Sequence[Chunk], place: str, usable: Sequence[Node]) -> str:
    """Say what the nodes together lack for a job."""
    if not usable:
        return "No available resources on nodes"
    for name, wanted in totals(chunks).items():
        free = sum(node.free(name) for node in usable)
        if wanted > free:
            return f"Insufficient amount of resource: {name} (R: {wanted} A: {free} T: {len(usable) * NODE[name]})"
    if place.startswith("scatter") and len(chunks) > len(usable):
        return "Not enough free nodes available"
    return ""


def placed(job: str, chunks: Sequence[Chunk], place: str, nodes: Sequence[Node]) -> list[tuple[Node, int]] | str:
    """Give a job its chunks and return node and slot of each; or say what is lacking, with nothing given."""
    is_exclusive = place.endswith(("excl", "exclhost"))
    usable = [node for node in nodes if node.is_up and not node.exclusive and not (is_exclusive and node.used)]
    given: list[tuple[Node, int]] = []
    lacking = _lacking(chunks, place, usable)
    for chunk in chunks if not lacking else []:
        taken = [node for node, _ in given]
        if place.startswith("pack") and taken:
            candidates = taken[:1]
        else:
            candidates = [node for node in usable if not (place.startswith("scatter") and node in taken)]
        candidates = [node for node in candidates if chunk.host in ("", node.name)]
        if place.startswith("pack") and not taken:
            whole = totals(chunks)
            candidates = [node for node in candidates if not node.lacks(Chunk(whole))]
        node = next((node for node in candidates if not node.lacks(chunk)), None)
        if node is None:
            lacks = next((node.lacks(chunk) for node in usable if node.lacks(chunk)), "")
            lacking = f"Insufficient amount of resource: {lacks} " if lacks else "No available resources on nodes"
            break
        given.append((node, node.take(job, chunk)))
    if lacking:
        for node in nodes:
            node.release(job)
        return lacking
    for node, _ in given:
        node.exclusive = job if is_exclusive else ""
    return given
