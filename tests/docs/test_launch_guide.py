"""What the launch guide shows for this machine does what it says; clusters are in ``tests/cluster``."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest

from launch_guide import PAGE, Way, arguments, typed, ways

#: Each rank writes its numbers, its arguments, and variables backwards: no log has a secret. It imports no torch.
SCRIPT = """\
import json, os, sys
numbers = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
given = {name: os.environ.get(name, "")[::-1] for name in json.load(open("names.json"))}
os.write(1, ("rank " + json.dumps([numbers, sys.argv[1:], given]) + "\\n").encode())
"""
CONDA = """\
#!/bin/sh
[ "$*" = "shell.bash hook" ] && echo 'conda() { export CONDA_DEFAULT_ENV="$2" CUDA_SEEN="$CUDA_HOME"; }'
"""
MODULE = 'module() { [ "$1 $2" = "load cuda/12.4" ] && export CUDA_HOME=/opt/cuda-12.4; }\n'
KEY = "not-a-real-key-of-anyone"
#: What each way gives all ranks beside their numbers: arguments, and variables.
GIVEN: dict[str, tuple[list[str], dict[str, str]]] = {
    "torchrun": (["--lr", "0.1"], {}),
    "accelerate launch, or mpirun": ([], {}),
    "torch.distributed.launch": (["--local-rank={}"], {}),
    "conda and modules": ([], {"CONDA_DEFAULT_ENV": "my-env", "CUDA_SEEN": "/opt/cuda-12.4"}),
    "Weights & Biases": ([], {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}),
    "gloo, to debug": ([], {"ALLRANKS_BACKEND": "gloo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
}
HERE = ways("This machine")


@pytest.fixture
def here(allranks: Any) -> Any:
    """Give the command in a directory with the script."""
    allranks.script(SCRIPT)
    allranks.script("[]", "names.json")
    return allranks


def written(text: str) -> list[Any]:
    """Return what the ranks have written, by rank."""
    return sorted(json.loads(found) for found in re.findall(r"rank (\[.*\])$", text, re.MULTILINE))


def promised(way: Way, options: list[str], variables: dict[str, str]) -> list[Any]:
    """Return what the ranks must write."""
    (count,) = way.counts
    backwards = {name: value[::-1] for name, value in variables.items()}
    return [[[rank, rank, count], [word.format(rank) for word in options], backwards] for rank in range(count)]


def test_the_page_has_what_people_type() -> None:
    before = " ".join(re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    here = ("torchrun", "torch.distributed.launch", "accelerate launch", "mpirun", "nohup", "conda", "module", "WANDB_")
    nodes = ("ssh ", "pdsh ", "sbatch ", "srun ", "salloc ", "qsub ", "qrsh ", "c10d", "$PBS_NODEFILE", "$PE_HOSTFILE")
    assert [word for word in (*here, *nodes) if word not in before] == []


@pytest.mark.parametrize("heading", GIVEN)
def test_a_line_for_this_machine(here: Any, heading: str) -> None:
    """conda and module are stand-ins of a line, which do to a shell what the real ones do."""
    here.script(json.dumps([*GIVEN[heading][1]]), "names.json")
    here.script(CONDA, "conda").chmod(0o755)
    (here.folder / "init").mkdir()
    here.script(MODULE, "init/bash")
    here.env.update(CONDA_EXE=f"{here.folder}/conda", MODULESHOME=str(here.folder), WANDB_API_KEY=KEY)
    assert written(typed(here, HERE[heading])) == promised(HERE[heading], *GIVEN[heading])
    found = subprocess.run(["grep", "-rl", KEY, str(here.folder)], capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_a_run_that_is_left_alone_is_followed(here: Any) -> None:
    way = HERE["nohup, screen, tmux"]
    start, follow = map(arguments, way.lines)
    assert here(*start).rc == 0
    assert written(here(*follow).stdout) == promised(way, [], {})


@pytest.mark.usefixtures("checked")
def test_what_tests_the_installation(here: Any) -> None:
    """It takes more than 10 s on a slow machine: the self-test imports torch and trains."""
    way = HERE["A script that tests the installation"]
    checked, tested = (here(*arguments(line)) for line in way.lines)
    assert (checked.rc, tested.rc) == (0, 0), checked.stderr + tested.stderr
    assert [here.record(run)["world_size"] for run in here.runs()] == [2]
    assert {*HERE} == {*GIVEN, "nohup, screen, tmux", "A script that tests the installation"}
