"""What the ranks of a run tell of themselves, and what they must tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

#: A line of Python: this rank's numbers, its host, and how many ranks there are, which is in ``total``.
TELL = """\
print("who", json.dumps([
    *[int(os.environ[name]) for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()],
    socket.gethostname(), int(total),
]), flush=True)
"""
#: Each rank tells who it is, and imports no torch for that. Agents have met by then. Ranks without one meet at the
#: master port, as a process group does.
PLACES = f"""\
import json, os, socket, sys, time
rank, total, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
    if rank == 0:
        with socket.create_server(("", port), backlog=total) as server:
            calls = [server.accept()[0] for _ in range(1, total)]
        for call in calls:
            call.sendall(str(total).encode())
    while rank:
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], port)) as call:
                total = int(call.recv(10))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
{TELL}"""
#: A rank that continues until it is told to end.
UP = "import time\nprint('up', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
#: A rank that continues until there is a file ``go``, and ends with the code that is in it.
GOES = """\
import os, sys, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
print("went", flush=True)
sys.exit(int(open("go").read()))
"""
#: Each rank tells who it is, after all of them have met.
WHO = f"""\
import json, os, socket, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
{TELL}
dist.barrier()
dist.destroy_process_group()
"""


def who(text: str) -> list[list[Any]]:
    """Return what the ranks told of themselves, by rank."""
    return sorted(json.loads(found) for found in re.findall(r"who (\[.*\])$", text, re.MULTILINE))


def expected(counts: list[int], hosts: list[str] | None = None) -> list[list[Any]]:
    """Return what the ranks on these hosts, or on node01, node02, …, must tell, so many on each."""
    found: list[list[Any]] = []
    names = hosts or [f"node{node:02}" for node in range(1, len(counts) + 1)]
    for host, count in zip(names, counts, strict=True):
        found += [[len(found) + local, local, sum(counts), count, host, sum(counts)] for local in range(count)]
    return found


def told(lab: Any, run: Path | None = None) -> tuple[str, str, str | None]:
    """Return what status says of a run's state, what ps says of it, and the exit code that status says."""
    folder = run or lab.run()
    state, code = shown(lab, folder)
    return state, listed(lab)[folder.name], code


def shown(lab: Any, run: Path) -> tuple[str, str | None]:
    """Return the state and the exit code that status says of a run."""
    said = lab("status", run.name).stdout
    (state,) = re.findall(r"^state +(.*)$", said, re.MULTILINE)
    code = re.search(r"^exit code +(.*)$", said, re.MULTILINE)
    return state, code and code[1]


def listed(lab: Any) -> dict[str, str]:
    """Return what ps says of all runs, by their names."""
    return {row[0]: row[1] for line in lab("ps").stdout.splitlines() if (row := line.split())}


def ranks_saying(text: str, line: str) -> list[int]:
    """Return the ranks that have written a line: ``[0-3] up``, ``[1:2] up``, ``[0,2-3] up``."""
    found: list[int] = []
    for ranks in re.findall(rf"^\[(?:\d+:)?([\d,-]+)\] {line}$", text, re.MULTILINE):
        for first, _, last in (part.partition("-") for part in ranks.split(",")):
            found += range(int(first), int(last or first) + 1)
    return sorted(found)
