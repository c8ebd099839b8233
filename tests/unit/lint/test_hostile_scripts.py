"""Scripts that are made to do harm, or to take long: nothing of them runs, and reading them ends in seconds."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.lint.engine import lint
from allranks.lint.files import LARGEST
from allranks.lint.rules import RULES

#: Seconds of the CPU in which each of these is read on a slow machine; on a usual one it is a tenth of that.
LIMIT = 20

HOSTILE = {
    "endless loop": "#!/bin/bash\nwhile true; do :; done\n",
    "fork bomb": ":(){ :|:& };:\n",
    "function that calls itself": "f() { f; }\nf\n",
    "unclosed quote": "#!/bin/bash\ntorchrun --nproc-per-node=4 'train.py\necho done\n" * 50,
    "unclosed substitution": "x=$(" * 5000,
    "deep substitutions": "echo " + "$(echo " * 3000 + ")" * 3000,
    "deep groups": "{ " * 3000 + "}" * 3000,
    "deep arithmetic": "x=$((" + "(" * 5000 + "1" + ")" * 5000 + "))\n",
    "unclosed arithmetic": "x=" + "(( " * 60000,
    "large power": "x=$((9**9**9**9))\nx=$((999999999999*999999999999*999999999999*999999999999))\n",
    "many nested shells": "bash -c '" * 500 + "'" * 500,
    "value that doubles": "a=xxxxxxxxxxxxxxxx\n" + "a=$a$a\n" * 200 + "torchrun $a train.py\n",
    "array that doubles": "a=(x y)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 200 + 'torchrun "${a[@]}" train.py\n',
    "shells that nest by a variable": "a='bash -c \"$a$a\"'\n" + 'a="$a $a"\n' * 100 + 'bash -c "$a"\n',
    "long line": "torchrun " + "--x " * 60000,
    "many commands": "srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py\n" * 4000,
    "many loops": "for i in 1; do " * 1000 + "done; " * 1000,
    "many variables": "".join(f"VARIABLE_{i}=1\necho $VARIABEL_{i}\n" for i in range(6000)),
    "a directory in many variables": "#SBATCH --nodes=1\na0=$(dirname $0)\n"
    + "".join(f"a{i}=$(cd $a{i - 1}; pwd)\n" for i in range(1, 5000)),
    "a long name of a directory": "#SBATCH --output=logs/a.out\nmkdir $" + "ROOT" * 20000 + "-/logs\n",
    "many directives": "#!/bin/bash\n" + "#SBATCH --nodes=2 --gres=gpu:4 # " * 5000 + "\n",
    "marks of this program": 'srun bash -c "torchrun \ue0000\ue001 \ue00099\ue001"\n',
    "controls": "echo \x1b[2J\x07\u202e\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_a_hostile_script_ends(name: str) -> None:
    began = time.process_time()
    lint("job.sh", HOSTILE[name].encode()[:LARGEST])
    assert time.process_time() - began < LIMIT


def test_nothing_of_a_script_runs(tmp_path: Path, allranks: Any) -> None:
    (allranks.folder / "keep").write_text("kept")
    script = "#!/bin/bash\ntouch ran\nrm -rf *\n$(touch ran)\n`touch ran`\nsource ./other.sh\neval 'touch ran'\n"
    (allranks.folder / "job.sh").write_text(script)
    (allranks.folder / "other.sh").write_text("touch ran\n")
    allranks("lint", ".")
    assert (allranks.folder / "keep").read_text() == "kept"
    assert not (allranks.folder / "ran").exists()


def test_any_bytes_are_read() -> None:
    source = random.Random(21)
    cases = Path(__file__).with_name("cases")
    texts = [path.read_bytes() for path in sorted(cases.glob("*.toml"))]
    for text in texts:
        at = source.randrange(len(text))
        for changed in (text[:at], text[at:], text[:at] + bytes([source.randrange(1, 256)]) + text[at + 1 :]):
            lint("job.sh", changed)


def test_a_file_that_is_too_large_is_not_read(allranks: Any) -> None:
    (allranks.folder / "large.sh").write_bytes(b"#\n" * LARGEST)
    done = allranks("lint", "large.sh")
    assert done.rc == 2
    assert done.stderr == (
        "error: cannot read large.sh as a script\n  why: it is larger than 256 KiB\n"
        "  fix: allranks lint FILE, DIRECTORY or -\n"
    )


def test_what_a_terminal_obeys_is_not_printed(allranks: Any) -> None:
    name = "a\x1b[2Jb.sh"
    (allranks.folder / name).write_text("export NCCL_DEBUG=$'\x1b[2J'INFOO\ntorchrun x\x1b[2Jy train.py --nnodes=2\n")
    done = allranks("lint", name)
    assert "\x1b" not in done.stdout + done.stderr


def test_there_are_rules_enough() -> None:
    assert len(RULES) >= 70
