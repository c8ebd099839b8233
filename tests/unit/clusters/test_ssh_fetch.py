"""What is brought from machines, by a command that may only read the run's folder."""

from __future__ import annotations

from pathlib import Path

from allranks.clusters.ssh_fetch import Fetched


def test_who_may_only_read_a_run_brings_nothing(tmp_path: Path) -> None:
    (tmp_path / "fetching").mkdir()  # It cannot be opened, as a file cannot in somebody else's folder.
    fetched = Fetched(tmp_path, [{"node": 0, "host": "nowhere.invalid"}], "allranks/x", tmp_path)
    fetched.look()
    assert fetched.finish() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["fetching"]
