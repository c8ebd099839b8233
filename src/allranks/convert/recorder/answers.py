"""Plays commands that answer what a script asks of its machine, and those that need not do anything."""

from __future__ import annotations

from allranks.convert.recorder.common import FACTS, HOST, Env, find
from allranks.convert.recorder.hosts import place_of

#: They print, wait, or end other processes: no job needs them.
_QUIET_NAMES = """
    sleep squeue sinfo sacct clear tput ps pgrep pkill killall kill uptime free df du lscpu lspci nvcc ip ifconfig
    ibstat ibv_devinfo rocm-smi module ml ulimit nvidia-cuda-mps-control scancel sync qstat pbsnodes
"""
QUIET = frozenset(_QUIET_NAMES.split())
#: They find the processes that use a port or a file: here there is none.
UNUSED = ("nc", "lsof", "fuser")


def quiet(words: list[str], env: Env, cwd: str) -> int:
    """Do nothing."""
    return 0


def unused(words: list[str], env: Env, cwd: str) -> int:
    """Find nothing."""
    return 1


def hostname(words: list[str], env: Env, cwd: str) -> int:
    """Print the name, or the address, of the host."""
    host = env.get(HOST, "")
    print(address(host) if {"-i", "-I", "--ip-address", "--all-ip-addresses"} & {*words} else host)
    return 0


def address(host: str) -> str:
    """Return an address for a host."""
    return f"10.0.0.{place_of(host) + 1}"


def getent(words: list[str], env: Env, cwd: str) -> int:
    """Print the address of a host."""
    print(f"{address(words[-1])} {words[-1]}")
    return 0


def nvidia_smi(words: list[str], env: Env, cwd: str) -> int:
    """Print a line for each GPU."""
    for gpu in range(FACTS.seen_gpus):
        print(f"GPU {gpu}: A GPU (UUID: GPU-{gpu})" if "-L" in words else gpu)
    return 0


def nproc(words: list[str], env: Env, cwd: str) -> int:
    """Print the number of CPUs."""
    print(FACTS.cpus)
    return 0


def which(words: list[str], env: Env, cwd: str) -> int:
    """Print where commands are."""
    for name in words[1:]:
        path = find(name, env, cwd)
        print(path if "/" in path else f"/usr/bin/{name}")
    return 0
