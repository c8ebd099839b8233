"""Why torch's own launcher ended, from what it and the ranks of its node wrote to stderr."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from allranks.processes import rank_ended
from allranks.runs.cause import find_cause, tail

#: How the launcher's own traceback begins: it was started by ``python -m``. The last one is its own.
_TRACEBACK, _ITS_OWN = "Traceback (most recent call last):", "_run_module_as_main"
#: What it logs of the ranks that it ends, and what the C++ library says of a process that is aborted.
_NO_CAUSE = re.compile(r"torch[./]distributed[./]elastic|^terminate called ")
#: A warning of its own, which ends with the line of its source, indented.
_WARNING = re.compile(r"torch/distributed/launch\.py:\d+: \w*Warning")
#: The end of torchrun's report: which rank was the first to fail.
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)


def causes(path: Path) -> list[str]:
    """Return what tells why a node's launcher ended: the last thing that a rank said, else what torchrun reports.

    Args:
        path: the stderr of launcher and ranks.
    """
    lines = tail(path)
    if said := find_cause(_of_ranks(lines)):
        return [said]
    return [rank_ended(int(rank), int(code)) for rank, code in _ROOT_CAUSE.findall("\n".join(lines))][-1:]


def _of_ranks(lines: Sequence[str]) -> Iterator[str]:
    starts = [at for at, line in enumerate(lines[:-1]) if line == _TRACEBACK and _ITS_OWN in lines[at + 1]]
    end = starts[-1] if starts else len(lines)
    warns = False
    for line in lines[:end]:
        warns = warns or bool(_WARNING.search(line))
        if not warns and not _NO_CAUSE.search(line):
            yield line
        warns = warns and not line.startswith("  ")
