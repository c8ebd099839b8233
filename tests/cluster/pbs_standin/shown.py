"""How `qstat` and `pbsnodes` show things: tables, attributes line by line, and JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pbs_standin.job import Job
from pbs_standin.resources import NODE, Node, clock, totals
from pbs_standin.words import SERVER, Flavour

#: A line of `qstat -f` has 79 columns, a tab counting as 8.
COLUMNS = 79
HEADS = {
    "openpbs": (
        "Job id            Name             User              Time Use S Queue\n"
        "----------------  ---------------- ----------------  -------- - -----\n",
        "{:<17.17} {:<16.16} {:<16.16}  {:>8} {} {:<16}\n",
    ),
    "torque": (
        "Job ID                    Name             User            Time Use S Queue\n"
        "------------------------- ---------------- --------------- -------- - -----\n",
        "{:<25.25} {:<16.16} {:<15.15} {:>8} {} {:<15}\n",
    ),
}


def table(jobs: Iterable[Job], flavour: Flavour) -> str:
    """Return the short list of jobs; nothing at all for none."""
    head, row = HEADS[flavour.name]
    rows = []
    for job in jobs:
        used = clock(job.used) if job.started and not job.is_array else "0"
        rows.append(row.format(job.id, job.name, "root", used, job.state, job.queue))
    return head + "".join(rows) if rows else ""


def flat(attributes: Mapping[str, Any], *, nested: tuple[str, ...] = ("Variable_List",)) -> dict[str, str]:
    """Return attributes with one level: `Resource_List.walltime`; those of ``nested`` stay one value."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, dict) and name in nested:
            found[name] = ",".join(f"{key}={part}" for key, part in value.items())
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": str(part) for key, part in value.items()}
        elif isinstance(value, list):
            found[name] = ", ".join(value)
        else:
            found[name] = str(value)
    return found


def full(job: Job, *, wide: bool) -> str:
    """Return all attributes of a job, line by line."""
    lines = [wrapped(f"    {name} = ", value, wide=wide) for name, value in flat(job.attributes()).items()]
    return "\n".join([f"Job Id: {job.id}", *lines, "", ""])


def wrapped(start: str, value: str, *, wide: bool) -> str:
    """Return a line, broken at commas where that helps and anywhere else where it does not."""
    if wide:
        return start + value
    text, column = start, len(start)
    for number, part in enumerate(_parts(value)):
        if number and column + len(part) > COLUMNS:
            text, column = f"{text}\n\t", 8
        for mark in part:
            if column >= COLUMNS:
                text, column = f"{text}\n\t", 8
            text, column = text + mark, column + 1
    return text


def _parts(value: str) -> list[str]:
    *parts, last = value.split(",")
    return [f"{part}," for part in parts] + [last]


def as_json(kind: str, things: Mapping[str, Any]) -> str:
    """Return what `-F json` says; without things, its last line has no end."""
    head = {"timestamp": int(time.time()), "pbs_version": "23.06.06", "pbs_server": SERVER}
    text = json.dumps({**head, **({kind: things} if things else {})}, indent=4, separators=(",", ":"))
    # The real one does it by hand: what looks like a number is one, whatever it means.
    text = re.sub(r'":"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|nan|inf)"(?=,?$)', r'":\1', text, flags=re.MULTILINE)
    return text + "\n" if things else text


def node(node: Node, flavour: Flavour) -> dict[str, Any]:
    """Return the attributes of a node."""
    used = totals(chunk for _, chunk in node.used.values())
    if flavour.is_torque:
        return _torque_node(node)
    state = "down" if not node.is_up else "job-exclusive" if node.exclusive or not node.free("ncpus") else "free"
    counts = {"mem": f"{NODE['mem'] >> 20}gb", "ncpus": NODE["ncpus"], "ngpus": NODE["ngpus"]}
    return {
        "Mom": node.name,
        "Port": 15002,
        "pbs_version": "23.06.06",
        "ntype": "PBS",
        "state": state,
        "pcpus": 2,
        **({"jobs": node.jobs()} if node.used else {}),
        "resources_available": {"arch": "linux", "host": node.name, **counts, "vnode": node.name},
        "resources_assigned": {name: f"{amount}kb" if name == "mem" else amount for name, amount in used.items()},
        "resv_enable": "True",
        "sharing": "default_shared",
        "license": "l",
    }


def _torque_node(node: Node) -> dict[str, Any]:
    state = "down" if not node.is_up else "free" if node.free("ncpus") else "job-exclusive"
    shown = {"state": state, "power_state": "Running", "np": NODE["ncpus"], "ntype": "cluster"}
    jobs = {"jobs": [f"{slot}/{job}" for slot, (job, _) in node.used.items()]} if node.used else {}
    return {**shown, **jobs, "mom_service_port": 15002, "mom_manager_port": 15003, "gpus": NODE["ngpus"]}


def node_lines(name: str, attributes: Mapping[str, Any]) -> str:
    """Return a node's attributes, line by line."""
    lines = [f"     {key} = {value}" for key, value in flat(attributes, nested=()).items()]
    return "\n".join([name, *lines, "", ""])


def queue(name: str, limits: Mapping[str, str], jobs: Iterable[Job]) -> dict[str, Any]:
    """Return the attributes of a queue."""
    states = [job.state for job in jobs if job.queue == name and not job.is_over]
    names = {"Queued": "Q", "Held": "H", "Waiting": "W", "Running": "R", "Exiting": "E", "Begun": "B"}
    count = "".join(f"{word}:{states.count(letter)} " for word, letter in names.items())
    return {
        "queue_type": "Execution",
        "total_jobs": len(states),
        "state_count": f"Transit:0 {count}",
        **({"resources_max": dict(limits)} if limits else {}),
        "enabled": "True",
        "started": "True",
    }
