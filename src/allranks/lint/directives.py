"""Directives of Slurm, PBS and Grid Engine, and the resources that they request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from allranks.lint.expand import UNKNOWN, Piece
from allranks.lint.model import Directive, Script
from allranks.lint.syntax import SYNTAX, Call

Family = Literal["slurm", "pbs", "grid_engine"]

_LINE = re.compile(r"(?:#(?P<slurm>SBATCH)(?=\s)|#(?P<pbs>PBS)(?=\s)|#(?P<grid_engine>\$)(?=\s*-))(?P<rest>.*)")
_WORD = re.compile(r"""(?:[^\s"'#]|"[^"]*"|'[^']*'|(?<=\S)#)+""")
#: ``4``, ``a100:4``, ``gpu:a100:4``, ``gpu``.
_GPUS = re.compile(r"(?:gres[/:])?(?:gpu:)?(?:[A-Za-z_][\w.+-]*:)?(\d{1,4})(?:\(.*\))?|gpu(?::[A-Za-z]\w*)?")
#: Options of PBS's qsub and of Grid Engine's that take no value.
_FLAGS = {"pbs": {"-V", "-h", "-I", "-X", "-z", "-f"}, "grid_engine": {"-V", "-cwd", "-notify", "-h"}}


@dataclass(frozen=True)
class Resources:
    """What the directives request; None where it is not requested or not known."""

    nodes: int | None = None  # Number of nodes. At least this many where a range is requested.
    gpus: int | None = None  # GPUs of each node.
    tasks: int | None = None  # Tasks in all.
    tasks_per_node: int | None = None  # Tasks of each node.
    cpus_per_task: int | None = None
    processes: int | None = None  # MPI processes of each chunk, of PBS.


def read_directives(piece: Piece) -> list[Directive]:
    """Return the directives of a script in their order, those that Slurm and PBS do not read among them."""
    found: list[Directive] = []
    offset = 0
    has_begun = False
    for raw in piece.data.split(b"\n"):
        line = raw.decode("utf-8", "surrogateescape").rstrip("\r")
        match = _LINE.match(line) if line.startswith("#") else None
        if match:
            family: Family = "slurm" if match["slurm"] else "pbs" if match["pbs"] else "grid_engine"
            is_read = not has_begun or family == "grid_engine"
            found += _of_line(family, line, match.start("rest"), offset, piece, is_read)
        elif line.strip() and not line.lstrip().startswith("#"):
            has_begun = True
        offset += len(raw) + 1
    return found


def _of_line(family: Family, line: str, start: int, offset: int, piece: Piece, is_read: bool) -> Iterator[Directive]:
    words: list[re.Match[str]] = []
    end = start
    for match in _WORD.finditer(line, start):
        if "#" in line[max(start, end - 1) : match.start()]:
            break  # A comment.
        words.append(match)
        end = match.end()
    position = 0
    while position < len(words):
        text, at = words[position][0], words[position].start()
        position += 1
        if not text.startswith("-"):
            continue
        name, value, value_at = _option(family, text, at)
        if value is None and _takes_value(family, name) and position < len(words):
            following = words[position]
            if not following[0].startswith("-") or family != "slurm":
                value, value_at = following[0], following.start()
                position += 1
                if (family, name) == ("grid_engine", "-pe") and position < len(words):
                    value, position = f"{value} {words[position][0]}", position + 1
        clean = re.sub(r"[\"']", "", value or "")
        yield Directive(
            family, name, clean, piece.at(offset + _bytes(line, at)), piece.at(offset + _bytes(line, value_at)), is_read
        )  # fmt: skip


def _bytes(line: str, position: int) -> int:
    return len(line[:position].encode("utf-8", "surrogateescape"))


def _option(family: Family, text: str, at: int) -> tuple[str, str | None, int]:
    if family == "slurm":
        syntax = SYNTAX["sbatch"]
        name, equals, value = text.partition("=")
        if text.startswith("--"):
            name = syntax.canonical(name)
            return name.lstrip("-"), value if equals else None, at + len(text) - len(value)
        long = syntax.canonical(text[:2]).lstrip("-")
        return long, text[2:] or None, at + 2
    if family == "pbs" and text[1:2] in set("loeNqjkWMAPJtm"):
        return text[:2], text[2:] or None, at + 2
    return text, None, at


def _takes_value(family: Family, name: str) -> bool:
    if family == "slurm":
        return f"--{name}" in SYNTAX["sbatch"].valued
    return name not in _FLAGS[family]


def options_of(call: Call) -> list[Directive]:
    """Return the options of a call of ``srun`` or ``sbatch`` as directives; a value that is not known is a mark."""
    named = ((given, given.value.value) for given in call.given if given.name.startswith("--"))
    return [
        Directive("slurm", given.name[2:], UNKNOWN if value is None else value, given.at, given.at, is_read=True)
        for given, value in named
    ]


def resources_of(script: Script) -> Resources:
    """Return what the directives request."""
    if script.kind == "slurm":
        return _slurm(script)
    return _pbs(script) if script.kind == "pbs" else Resources()


def number(text: str | None) -> int | None:
    """Return the first number of ``2`` or ``2-4``; None for anything else."""
    match = re.fullmatch(r"(\d{1,6})(?:-\d{1,6})?", text or "")
    return int(match[1]) if match else None


def gpus_in(text: str | None) -> int | None:
    """Return the GPUs of ``4``, ``a100:4``, ``gpu:a100:4`` or ``gpu``; None if none are requested."""
    if text is None:
        return None
    matches = [_GPUS.fullmatch(piece) for piece in text.split(",")]
    counts = [int(match[1] or 1) for match in matches if match]
    return sum(counts) if counts else None


def _slurm(script: Script) -> Resources:
    tasks, per_node = number(script.option("ntasks")), number(script.option("ntasks-per-node"))
    asked = script.option("nodes")
    nodes = number(asked)
    if asked is None and tasks in (None, 1):
        nodes = 1
    if asked is None and tasks and per_node and tasks % per_node == 0:
        nodes = tasks // per_node
    gpus = gpus_in(script.option("gpus-per-node"))
    gres = script.option("gres")
    if gpus is None and gres and "gpu" in gres:
        gpus = gpus_in(",".join(piece for piece in gres.split(",") if piece.startswith("gpu")))
    total = gpus_in(script.option("gpus"))
    if gpus is None and total and nodes and total % nodes == 0:
        gpus = total // nodes
    if tasks and nodes and (per_node is None or tasks < nodes * per_node):  # --ntasks wins: the other is a limit.
        per_node = tasks // nodes if tasks % nodes == 0 else None
    per_task = gpus_in(script.option("gpus-per-task"))
    if gpus is None and per_task and (per_node or tasks is None):
        gpus = per_task * (per_node or 1)
    return Resources(nodes, gpus, tasks, per_node, number(script.option("cpus-per-task")))


def _pbs(script: Script) -> Resources:
    for directive in script.options("-l"):
        if match := re.search(r"(?:^|,)(select|nodes)=([^,\s]+)", directive.value):
            return _chunks(match[2], "ngpus" if match[1] == "select" else "gpus")
    return Resources()


def _chunks(text: str, gpus_key: str) -> Resources:
    nodes, kinds = 0, set()
    for chunk in text.split("+"):
        count, _, rest = chunk.partition(":")
        if not count.isdecimal():
            return Resources()
        nodes += int(count)
        values = dict(item.partition("=")[::2] for item in rest.split(":"))
        kinds.add((number(values.get(gpus_key)), number(values.get("mpiprocs", values.get("ppn")))))
    gpus, processes = ({kind[at] for kind in kinds} for at in (0, 1))
    return Resources(
        nodes, gpus.pop() if len(gpus) == 1 else None, processes=processes.pop() if len(processes) == 1 else None
    )  # fmt: skip


def known_variables(script: Script, resources: Resources) -> dict[str, str]:
    """Return the variables whose values follow from the directives."""
    if script.kind != "slurm":
        return {}
    tasks = resources.tasks
    if tasks is None and resources.nodes and number(script.option("ntasks-per-node")):
        tasks = resources.nodes * (resources.tasks_per_node or 1)
    fixed = resources.nodes if script.option("nodes") is None or "-" not in (script.option("nodes") or "") else None
    values = {
        "SLURM_NNODES": fixed,
        "SLURM_JOB_NUM_NODES": fixed,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": number(script.option("ntasks-per-node")),
        "SLURM_CPUS_PER_TASK": resources.cpus_per_task,
        "SLURM_GPUS_PER_NODE": gpus_in(script.option("gpus-per-node")) if script.option("gpus-per-node") else None,
        "SLURM_GPUS_ON_NODE": resources.gpus,
    }
    return {name: str(value) for name, value in values.items() if value is not None}
