"""What a verdict on a run says by where the run was."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.diagnosis.sources import of_run
from allranks.runs.record import Record, Run
from allranks.runs.status import State, Status


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("local", "correct the path: a relative one starts from the ranks' working directory, workdir (--workdir)"),
        ("ssh", "the path must be there on every node: a shared disk, or an absolute path"),
    ],
)
def test_a_file_that_is_missing_on_this_machine_is_not_asked_for_on_every_node(
    tmp_path: Path, kind: str, fix: str
) -> None:
    log = tmp_path / "attempts" / "000" / "node-000" / "rank-0.err"
    log.parent.mkdir(parents=True)
    log.write_text("FileNotFoundError: [Errno 2] No such file or directory: 'data/a.txt'\n")
    record = Record(
        id="a",
        name="a",
        cluster=kind,
        kind=kind,
        world_size=1,
        nnodes=1,
        host="here",
        status=Status(State.FAILED, "rank 0 exited with code 1", rank=0),
        stop_timeout=10,
        file_mode=0o600,
    )
    verdict = of_run(Run(tmp_path, record))
    assert verdict is not None
    assert (verdict.id, verdict.fix) == ("file-not-found", fix)
