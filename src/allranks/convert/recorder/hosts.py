"""Hosts of the allocation, and starting a command on them as often as there are tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allranks.convert.recorder.common import FACTS, HOST, Env, start, text_of

#: What torchrun sets in each rank.
OF_RANK = """
    RANK={rank} LOCAL_RANK={local} WORLD_SIZE={total} LOCAL_WORLD_SIZE={count} GROUP_RANK={node}
    GROUP_WORLD_SIZE={nodes} MASTER_ADDR={address} MASTER_PORT={port}
"""
#: In a word of a command: the local rank of the task.
LOCAL = "\0"


def hosts_in(path: str, cwd: str) -> list[tuple[str, int]]:
    """Return the hosts of a file, each with its slots; 0 where it has none."""
    found: dict[str, int] = {}
    for words in filter(None, (line.split("#")[0].split() for line in text_of(path, cwd).splitlines())):
        host, _, count = words[0].rpartition("@")[2].partition(":")
        slots = next((word.partition("=")[2] for word in words[1:] if word.startswith("slots=")), count)
        found[host] = int(slots) if slots else 0
    return list(found.items())


def place_of(host: str) -> int:
    """Return the number of a host among those of the allocation."""
    return FACTS.hosts.index(host) if host in FACTS.hosts else len(FACTS.hosts)


def on(host: str, env: Env) -> Env:
    """Return an environment that a command takes along to a host."""
    return {**env, HOST: host, "HOSTNAME": host}


def meeting(address: str | None, port: str | int | None) -> dict[str, object]:
    """Return where ranks meet, as fields of ``OF_RANK``."""
    return {"address": address or "localhost", "port": port or 29500}


def spread(total: int, hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Return how many of all tasks each host has: the same, and of the first ones one more."""
    each, more = divmod(total, max(len(hosts), 1))
    return [(host, each + (at < more)) for at, host in enumerate(hosts)]


def tasks(
    counts: Sequence[tuple[str, int]],
    words: Sequence[str],
    env: Env,
    cwd: str,
    variables: str,
    more: Mapping[str, object],
    *,
    node: int = 0,
    nodes: int = 0,
) -> int:
    """Start a command as often on each host as ``counts`` says.

    Args:
        variables: ``NAME={field}`` for each one that is set. The fields are rank, local (rank), host, node (its
            number), count (of its tasks), total, nodes, and ``more``.
        node: the number of the first of the hosts, where they are not all ``nodes``.
    """
    total = nodes * counts[0][1] if nodes else sum(count for _, count in counts)
    rank, code = node and node * counts[0][1], 0
    for number, (host, count) in enumerate(counts, node):
        fields = {**more, "host": host, "node": number, "count": count, "total": total, "nodes": nodes or len(counts)}
        for local in range(count):
            given = (each.partition("=") for each in variables.split())
            place = {name: value.format(rank=rank, local=local, **fields) for name, _, value in given}
            typed = [word.replace(LOCAL, str(local)) for word in words]
            code = start(typed, {**on(host, env), **place}, cwd) or code
            rank += 1
    return code
