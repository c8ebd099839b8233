"""The start of a rank where there is no agent, at the end of node.sh: ``--rank COMMAND…``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.agent import network
from allranks.agent.batch_job import this_job
from allranks.agent.heartbeat import complain
from allranks.contract import BatchSpec, NodeSpec


def main(argv: list[str]) -> NoReturn:
    """Set the rank's variables, this node's network and threads, and its logs; then become its command."""
    environ = os.environ
    run = Path(environ[contract.RUN_DIR])
    node = NodeSpec.from_json((run / contract.NODE_ORDERS).read_text(encoding="utf-8"))
    orders = BatchSpec.from_json((run / contract.BATCH_ORDERS).read_text(encoding="utf-8"))
    place = this_job(orders, node).place()
    environ[contract.NODE_RANK] = str(place.node)
    folder = run / contract.node_dir(int(environ[contract.ATTEMPT]), place.node)
    folder.mkdir(0o750 if node.file_mode & 0o040 else 0o700, parents=True, exist_ok=True)
    if place.local_rank == 0:
        # It keeps the heartbeat and the index of the logs of this node's ranks.
        ranks = [str(rank) for rank in place.ranks]
        subprocess.Popen([sys.executable, str(run / contract.CODE), "--companion", *ranks])
    environ.update(
        {
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "GROUP_RANK": str(place.node),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(len(place.ranks)),
            "GROUP_WORLD_SIZE": environ[contract.NODE_COUNT],
            "MASTER_ADDR": environ[contract.RDZV_HOST],
            "MASTER_PORT": environ[contract.RDZV_PORT],
            contract.RUN_ID: node.run_id,
        }
    )
    settings = network.decide(environ["MASTER_ADDR"], int(environ[contract.NODE_COUNT]), len(place.ranks), environ)
    network.apply(settings, environ)
    if place.local_rank == 0:
        for setting in settings:
            complain(f"allranks: node {place.node}: {setting}")
    environ.setdefault("PYTHONUNBUFFERED", "1")
    for stream, name in ((1, "out"), (2, "err")):
        log = os.open(folder / contract.rank_log(place.rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, stream)
        os.close(log)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        complain(f"{argv[0]}: {error.strerror}")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
