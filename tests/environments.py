"""The environment that tests give to processes: as after a login, in a home of their own."""

from __future__ import annotations

import os
import re
from pathlib import Path

from allranks import contract

#: What a calling shell, a launcher or a scheduler may have set and a test must not inherit.
FOREIGN = re.compile(
    r"""(ALLRANKS_|_ALLRANKS|TORCHELASTIC_|TORCH_|PET_|NCCL_|GLOO_|SLURM_|PBS_|OMPI_|PMI|MASTER_|GROUP_|ROLE_|LOCAL_)
    |(RANK|WORLD_SIZE|NPROC_PER_NODE|BACKEND|LOG_LEVEL|CONDA_ENV|CONDA_PREFIX|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|NO_COLOR|FORCE_COLOR
      |OMP_NUM_THREADS|PYTHONPATH|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE|PYTHONSAFEPATH|COVERAGE_PROCESS_\w+)$""",
    re.VERBOSE,
)
#: As it was before torch, which the tests import, could add to it.
_INHERITED = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}


def clean_environment(home: Path) -> dict[str, str]:
    """Return this process's environment without what a launcher or a shell may have set, and with short waits."""
    own = {contract.WAITS: "0.1", "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "TERM": "dumb"}
    return _INHERITED | own
