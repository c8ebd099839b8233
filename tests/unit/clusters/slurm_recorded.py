"""The recorded answers of a real Slurm (tests/cluster/answers), in the form in which our own commands get them."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from allranks.clusters.batch.scheduler import JobInfo
from allranks.clusters.slurm_words import ACCOUNTED, parse_accounted, parse_shown

ANSWERS = Path(__file__).parents[2] / "cluster" / "answers" / "slurm-22.05"
NAMES = sorted(folder.name for folder in ANSWERS.iterdir() if folder.is_dir())


def text_of(name: str, file: str) -> str:
    return (ANSWERS / name / file).read_text()


def json_of(name: str, file: str) -> Any:
    return json.loads(text_of(name, file))["jobs"][0]


def accounting(name: str) -> str:
    """Return what sacct would have said if asked for the columns that we ask for."""
    first, *lines = text_of(name, "sacct.txt").splitlines()
    places = [first.split("|").index(column) for column in ACCOUNTED]
    rows = ([line.split("|")[place] for place in places] for line in lines)
    return "".join("|".join(row) + "\n" for row in rows)


def shown(name: str) -> JobInfo:
    (job,) = parse_shown(text_of(name, "scontrol.txt"))
    return job


def accounted(name: str) -> JobInfo:
    (job,) = parse_accounted(accounting(name))
    return job


def failures(file: str) -> list[tuple[list[str], int, str]]:
    """Return the recorded commands that failed: command, exit code, what was said."""
    blocks = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*?)\[exit (\d+)\]", (ANSWERS / file).read_text(), re.MULTILINE)
    return [(command.split(), int(code), said) for command, said, code in blocks if code != "0"]


def at(clock: str) -> float:
    """Return the time on the day of the recording."""
    return datetime.fromisoformat(f"2026-11-20T{clock}").replace(tzinfo=timezone.utc).timestamp()
