"""`make cluster`: a Slurm cluster for a person, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_tools import ClusterError
from slurm_cluster import SlurmCluster
from slurm_conf import Shape

PREFIX = "slurm-of-"
USE = """\
A Slurm cluster with {shape.nodes} nodes of {shape.gpus} GPUs. In another terminal:

  export SLURM_CONF={conf}
  sinfo
  sbatch --nodes=2 --gres=gpu:2 --wrap='srun hostname'
  srun --nodes=4 hostname

A shell on a node:      {shell}
Logs of the daemons:    {logs}

Ctrl-C ends it and removes all of it.
"""


def main() -> int:
    """Bring it up, say how to use it, wait, and take it down."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=Shape.nodes)
    parser.add_argument("--gpus", type=int, default=Shape.gpus, help="on each node")
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, and a database for it")
    parser.add_argument("--cgroups", action="store_true", help="jobs are held together by control groups")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    shape = Shape(given.nodes, given.gpus, accounting=given.accounting, cgroups=given.cgroups)
    _remove_folders_of_the_dead()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        with SlurmCluster(folder, shape) as cluster:
            shell = shlex.join(cluster.network.nodes[cluster.nodes[0]].enter(["bash"]))
            logs = cluster.layout.log("*")
            print(USE.format(shape=cluster.shape, conf=cluster.layout.conf, shell=shell, logs=logs), flush=True)
            signal.pause()
    except KeyboardInterrupt:
        print("The cluster is gone.", file=sys.stderr)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _remove_folders_of_the_dead() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX).partition("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
