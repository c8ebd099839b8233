"""What the ranks of a run tell of themselves, and what they must tell."""

from __future__ import annotations

import json
import re
from typing import Any

#: A line of Python: this rank's numbers, its host, and how many ranks it has met, which is in ``total``.
TELL = """\
print("who", json.dumps([
    *[int(os.environ[name]) for name in "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()],
    socket.gethostname(), int(total),
]), flush=True)
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


def expected(counts: list[int]) -> list[list[Any]]:
    """Return what the ranks on node01, node02, … must tell, so many on each."""
    found: list[list[Any]] = []
    for node, count in enumerate(counts, 1):
        found += [
            [len(found) + local, local, sum(counts), count, f"node{node:02}", sum(counts)] for local in range(count)
        ]
    return found
