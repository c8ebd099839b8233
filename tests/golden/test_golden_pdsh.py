"""What pdsh runs on machines beside the scripts for SSH, as it has been read and found good."""

from __future__ import annotations

from pathlib import Path

from golden_files import assert_bash, golden_of
from golden_plans import plan_of

GOLDEN = golden_of("pdsh")
JOB = """\
script: train.py
cluster: pods
resources: {hosts: 'gpu[1-2]', gpus_per_node: 8}
launch: {master_addr: gpu1, master_port: 29400}
"""


def test_files_of_a_plan(tmp_path: Path):
    files = plan_of(tmp_path, JOB, {}, {})
    assert [*files] == ["pdsh.sh", "start.sh", "end.sh", "node.sh", "node.json"]
    GOLDEN.compare("two-pdsh.sh", files["pdsh.sh"])
    assert_bash(files["pdsh.sh"])


def test_all_else_is_as_over_ssh(tmp_path: Path):
    """Also the folder: it is that of a run of the same name."""
    files = plan_of(tmp_path, JOB, {}, {})
    del files["pdsh.sh"]
    assert files == plan_of(tmp_path, JOB.replace("pods", "racks"), {}, {})
