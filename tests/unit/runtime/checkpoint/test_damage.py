"""Every file of the newest checkpoint, truncated, bit-flipped or gone: it is named, and the one before is taken."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.record.checkpoints import problems
from allranks.runtime.checkpoint import directory

FILES = ["checkpoint.json", "rank-0.json", "rank-0.data", "objects.pt", "config.json"]


@pytest.fixture
def folder(loop, tmp_path):
    made = loop(background=False, config={"a": 1})
    for _ in range(2):
        made.train(1)
        made.checkpoints.save()
    return tmp_path / "checkpoints"


def flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "empty"])
def test_a_damaged_file_is_named_and_the_checkpoint_skipped(folder, loop, capfd, name, damage):
    path = folder / "step-000000002" / name
    size = path.stat().st_size
    if damage == "flip":
        flip(path, size // 2, 3)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[: size // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    made = loop(keep=1, background=False)
    assert made.checkpoints.resumed.step == 1
    told = capfd.readouterr().err
    assert "step-000000002 is corrupt and is skipped" in told
    assert name in told
    made.train(1)
    made.checkpoints.save()
    assert made.checkpoints.wait()
    assert not list(problems(folder / "step-000000002"))
    assert [path.name for path in sorted(folder.glob("step-*"))] == ["step-000000002"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_flipped_bit_is_found(folder, name, where, bit):
    path = folder / "step-000000002" / name
    place = int(where * path.stat().st_size)
    flip(path, place, bit)
    found = list(problems(path.parent))
    flip(path, place, bit)
    assert found
    assert name in found[0]
    assert not list(problems(path.parent))


def test_the_part_is_named(folder, monkeypatch):
    flip(folder / "step-000000002" / "rank-0.data", 100, 0)
    assert list(problems(folder / "step-000000002")) == ["rank-0.data: the checksum of part 1 of 1 does not fit"]


def test_shares_find_what_all_find(folder):
    flip(folder / "step-000000002" / "rank-0.data", 100, 0)
    found = [list(problems(folder / "step-000000002", share=share, shares=3)) for share in range(3)]
    assert sorted(map(len, found)) == [0, 0, 1]


def test_none_whole_begins_anew_and_says_so(folder, loop, capfd):
    for path in folder.glob("step-*/objects.pt"):
        path.unlink()
    assert loop().checkpoints.resumed is None
    assert "is complete: training starts from the beginning" in capfd.readouterr().err


def test_what_is_left_of_a_save_goes_with_the_next_and_only_our_own(folder, loop):
    job = directory.job_id()
    old = [
        folder / directory.temporary_name(9, f"{job}-12345678-1.1"),
        folder / directory.temporary_name(8, directory.owner(job, 7)),
    ]
    foreign = folder / directory.temporary_name(9, "abcdabcd-12345678-1.1")
    alive = folder / directory.temporary_name(9, directory.owner(job, 1).rpartition("-")[0] + "-1.1")
    for path in (*old, foreign, alive):
        path.mkdir()
    loop()
    assert not any(path.exists() for path in old)
    assert foreign.exists()
    assert alive.exists()


def test_a_checkpoint_cut_off_in_being_replaced_gets_its_name_back(folder, loop):
    aside = directory.temporary_name(2, directory.owner(directory.job_id(), 3)).replace(".tmp-", ".old-")
    (folder / "step-000000002").rename(folder / aside)
    assert loop().checkpoints.resumed.step == 2


def test_checkpoints_of_another_job_are_left_alone(folder, loop, monkeypatch, capfd):
    monkeypatch.setenv("ALLRANKS_RUN_ID", "one")
    one = loop(keep=1, background=False)
    monkeypatch.setenv("ALLRANKS_RUN_ID", "two")
    two = loop(keep=1, background=False)
    two.train(4)
    two.checkpoints.save()
    one.train(1)
    one.checkpoints.save()
    assert {path.name for path in folder.glob("step-*")} == {"step-000000003", "step-000000006"}
    assert "another job saves to" in capfd.readouterr().err


def test_what_another_job_left_on_this_host_goes_when_its_process_is_gone(folder, loop):
    mark = directory.owner("abcdabcd", 1).rpartition("-")[0]
    gone, alive = (folder / directory.temporary_name(9, f"{mark}-{process}.1") for process in (2**30, 1))
    for path in (gone, alive):
        path.mkdir()
    loop()
    assert not gone.exists()
    assert alive.exists()


@pytest.mark.parametrize("mark", ["abcdabcd-12345678-1.1", None])
def test_a_replaced_checkpoint_of_another_job_gets_its_name_back(folder, loop, mark):
    mark = mark or directory.owner("abcdabcd", 1).rpartition("-")[0] + f"-{2**30}.1"
    (folder / "step-000000002").rename(folder / directory.temporary_name(2, mark).replace(".tmp-", ".old-"))
    assert loop().checkpoints.resumed.step == 2


def test_a_half_folder_of_another_host_is_left_alone(folder, loop):
    path = folder / ".step-000000009.old-abcdabcd-12345678-1.1"
    path.mkdir()
    loop()
    assert path.exists()
