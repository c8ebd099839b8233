"""Plays what runs a command here: numactl and its like, containers, ``conda run``, ``uv run``."""

from __future__ import annotations

import itertools
import os
import re
import shlex

from allranks.convert.recorder.common import LAUNCHERS, PYTHON, WITHIN, Env, options, part_of, rank, start

WRAPPERS = ("numactl", "taskset", "stdbuf", "unbuffer", "ionice", "time", "catchsegv", "nsys")
CONTAINERS = ("singularity", "apptainer", "docker", "podman", "shifter", "sarus", "enroot")
CONDAS = ("conda", "mamba", "micromamba")
RUNNERS = ("uv", "poetry", "pipenv", "pixi")


def wrapper(words: list[str], env: Env, cwd: str) -> int:
    """Play a command that only changes how another one runs."""
    name = os.path.basename(words[0])
    given, rest = options(name, words[1:])
    if name == "taskset" and "-c" not in given and "--cpu-list" not in given:
        rest = rest[1:]
    if name == "taskset" and rest and re.fullmatch(r"[\d,-]+", rest[0]):
        rest = rest[1:]
    if name == "nsys":
        rest = [*itertools.dropwhile(lambda word: not part_of(os.path.basename(word)), rest)] or rest
    return start(rest, env, cwd) if rest else 0


def within(words: list[str], env: Env, cwd: str) -> int:
    """Play a container, ``conda run`` and the like: the command begins at the first word that is one."""
    name = os.path.basename(words[0])
    at = next((at for at in range(1, len(words)) if is_command(words[at])), None)
    if at is None or (name not in CONTAINERS and words[1:2] != ["run"]):
        return rank("binary", name, words[1:], [], env, cwd) if name in RUNNERS else 0
    if name not in CONDAS:
        return start(words[at:], {**env, WITHIN: shlex.join(words[:at])}, cwd)
    given = dict(itertools.pairwise(words[1:at]))
    chosen = next((given[option] for option in ("-n", "--name", "-p", "--prefix") if given.get(option)), "")
    return start(words[at:], {**env, "CONDA_DEFAULT_ENV": chosen}, cwd)


def is_command(word: str) -> bool:
    """Return whether a word can be the command that a container runs."""
    name = os.path.basename(word)
    return bool(PYTHON.fullmatch(name)) or name in ("bash", "sh", "srun", "mpirun", "mpiexec", *LAUNCHERS)
