"""Plays what has a login shell on other machines read a command: ssh, rsh, pdsh, clush."""

from __future__ import annotations

import os
from collections.abc import Iterable

from allranks.convert.recorder.common import HOST, PATH, VIA, Env, options, run
from allranks.convert.recorder.hosts import hosts_in
from allranks.system.hostlist import expand


def login(host: str, **more: str) -> Env:
    """Return the environment of a new login on a host."""
    kept = {name: os.environ[name] for name in ("HOME", "USER", "BASH_ENV", "LC_ALL") if name in os.environ}
    return {**kept, "PATH": PATH, HOST: host, "HOSTNAME": host, **more}


def shell(hosts: Iterable[str], command: str, env: Env | None = None) -> int:
    """Have a login shell on each host read a command; of stdin if there is none."""
    code = 0
    for host in hosts:
        words = ["bash", "-c", command.replace("%h", host)] if command else ["bash", "-s"]
        code = run(words, login(host, **(env or {}), **{VIA: "ssh"}), os.environ["HOME"]) or code
    return code


def ssh(words: list[str], env: Env, cwd: str) -> int:
    """Play ssh and rsh."""
    given, rest = options("ssh", words[1:])
    if not rest:
        return 255
    # Options may follow the host.
    _, command = options("ssh", rest[1:])
    return 0 if "-O" in given else shell([rest[0].rpartition("@")[2]], " ".join(command))


def pdsh(words: list[str], env: Env, cwd: str) -> int:
    """Play pdsh and clush."""
    given, rest = options("pdsh", words[1:])
    listed = given.get("-w") or env.get("WCOLL", "")
    if listed.startswith("^"):
        hosts = [host for host, _ in hosts_in(listed[1:], cwd)]
    else:
        hosts = [host.rpartition("@")[2] for host in expand(listed)] if listed else []
    return shell(hosts, " ".join(rest))
