"""A node's network and threads as lines of shell, where a scheduler starts the ranks and there is no agent.

``python <run>/code --settings`` prints them for the rank that it is called in; the first rank of a node says why.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import NoReturn

from allranks import contract
from allranks.agent import network


def main() -> NoReturn:
    """Decide, print, and say."""
    environ = os.environ
    nodes, ranks = int(environ[contract.NODE_COUNT]), int(environ["LOCAL_WORLD_SIZE"])
    decided: dict[str, str] = {}
    settings = network.decide(environ["MASTER_ADDR"], nodes, ranks, environ)
    network.apply(settings, decided)
    for name, value in decided.items():
        print(f"export {name}={shlex.quote(value)}")
    for setting in settings:
        if environ["LOCAL_RANK"] == "0":
            print(f"allranks: node {environ[contract.NODE_RANK]}: {setting}", file=sys.stderr)
    sys.exit(0)
