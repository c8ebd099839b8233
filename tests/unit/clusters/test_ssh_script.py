"""The script that ends what a run has on a machine, run on this one."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from allranks import contract
from allranks.plan.script import fill
from waiting import PATIENCE

TEMPLATE = contract.installation() / "clusters/ssh/end.sh"


def end_script(run: Path) -> str:
    """Return the script for a run in a directory, whose ranks have 5 s to exit."""
    words = {"title": "end", "run": shlex.quote(str(run)), "silence": "30", "tenths": "250"}
    return fill(TEMPLATE, words)


def test_an_agent_that_starts_while_all_is_being_ended_is_ended_too(tmp_path: Path) -> None:
    """A launcher may be killed when a machine has got its command, and has not started yet."""
    script = tmp_path / "end.sh"
    script.write_text(end_script(tmp_path))
    late = subprocess.Popen(["sh", "-c", f'sleep 0.5; {contract.RUN_DIR}="$1" exec sleep 1000', "sh", str(tmp_path)])
    try:
        assert subprocess.run(["bash", str(script), "END", "0", "0"], timeout=PATIENCE, check=False).returncode == 0
        assert late.wait(1) == -15
    finally:
        late.kill()
        late.wait()


def test_it_tells_whether_an_agent_is_there(tmp_path: Path) -> None:
    script = tmp_path / "end.sh"
    script.write_text(end_script(tmp_path))
    started = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(") ")[2].split()[19]
    looks = [("0", "0"), (str(os.getpid()), started), (str(os.getpid()), "1")]
    codes = [
        subprocess.run(["bash", str(script), "0", *look], timeout=PATIENCE, check=False).returncode for look in looks
    ]
    assert codes == [1, 0, 1]
