"""Which recorder plays which command, and the program that is each of these commands in the sandbox."""

from __future__ import annotations

import json
import os
import sys

from allranks.convert.recorder.answers import QUIET, UNUSED, getent, hostname, nproc, nvidia_smi, quiet, unused, which
from allranks.convert.recorder.common import BINS, FACTS, HERE, LAUNCHERS, NO_FILE, PARTS, Part, play, text_of
from allranks.convert.recorder.remote import pdsh, ssh
from allranks.convert.recorder.schedulers import mpirun, on_a_host, pbsdsh, scontrol, srun
from allranks.convert.recorder.torch_launchers import by_name, python
from allranks.convert.recorder.wrappers import CONDAS, CONTAINERS, RUNNERS, WRAPPERS, within, wrapper

COMMANDS: dict[str, Part] = {
    **dict.fromkeys(QUIET, quiet),
    **dict.fromkeys(UNUSED, unused),
    **dict.fromkeys(LAUNCHERS, by_name),
    **dict.fromkeys(WRAPPERS, wrapper),
    **dict.fromkeys((*CONTAINERS, *CONDAS, *RUNNERS), within),
    **dict.fromkeys(("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra", "orterun"), mpirun),
    **{"srun": srun, "ssh": ssh, "rsh": ssh, "pdsh": pdsh, "clush": pdsh, "pbsdsh": pbsdsh, "scontrol": scontrol},
    **dict.fromkeys(("pbs_tmrsh", "blaunch", "qrsh"), on_a_host),
    **{"hostname": hostname, "getent": getent, "nvidia-smi": nvidia_smi, "nproc": nproc, "which": which},
    "python": python,
}
PARTS.update(COMMANDS)


def main() -> int:
    """Play the command that this process was started as, or that follows ``--as``; return its exit code."""
    vars(FACTS).update(json.loads(text_of("facts.json", HERE)))
    words = sys.argv[2:] if sys.argv[1:2] == ["--as"] else sys.argv
    if os.path.dirname(words[0]) in BINS:  # The shell found it on PATH; where is known again from that.
        words = [os.path.basename(words[0]), *words[1:]]
    try:
        return play(words, dict(os.environ), os.getcwd())
    except FileNotFoundError as error:
        print(f"{os.path.basename(words[0])}: {NO_FILE} {error.filename}", file=sys.stderr)
        return 1
