from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks import contract
from allranks.record.logindex import Growth, LogIndexReader, LogIndexWriter


def writer(folder: Path, *times: float) -> LogIndexWriter:
    left = iter(times)
    made = LogIndexWriter(folder, clock=lambda: next(left))
    made.watch([0, 1])
    return made


def index(folder: Path) -> bytes:
    return (folder / contract.LOG_INDEX).read_bytes()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def test_notes_only_what_grew(tmp_path: Path) -> None:
    index_writer = writer(tmp_path, 1.0, 2.0)
    index_writer.tick()
    append(tmp_path / "rank-0.out", b"abc")
    append(tmp_path / "rank-1.err", b"a")
    index_writer.tick()
    index_writer.tick()
    append(tmp_path / "rank-0.out", b"d")
    index_writer.close()
    assert index(tmp_path) == b"1000 0 o 3\n1000 1 e 1\n2000 0 o 4\n"


def test_mode_and_second_close(tmp_path: Path) -> None:
    index_writer = writer(tmp_path, 1.0)
    append(tmp_path / "rank-0.out", b"abc")
    index_writer.close()
    index_writer.close()
    assert (tmp_path / contract.LOG_INDEX).stat().st_mode & 0o777 == 0o600


def test_full_disk_is_remembered_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_writer = writer(tmp_path, 1.0, 2.0, 3.0)
    append(tmp_path / "rank-0.out", b"abc")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        index_writer.tick()
        assert index_writer.growths == 0
        real = os.pwrite
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:8], 0))
        index_writer.tick()
        assert index_writer.growths == 0
    index_writer.tick()
    assert index_writer.growths == 1
    index_writer.close()
    assert index(tmp_path) == b"2000 0 o?\n3000 0 o 3\n"
    assert list(LogIndexReader(tmp_path, 0).read()) == [Growth(3000, 0, 0, "o", 3)]


def test_a_folder_that_is_gone_does_not_raise(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    index_writer = LogIndexWriter(gone)
    index_writer.watch([0])
    append(gone / "rank-0.out", b"abc")
    (gone / contract.LOG_INDEX).mkdir()
    index_writer.tick()
    assert index_writer.growths == 0
    index_writer.close()


def test_a_new_writer_repairs_a_cut_off_line(tmp_path: Path) -> None:
    (tmp_path / contract.LOG_INDEX).write_bytes(b"1000 0 o 300\n1500 0 o 4")
    append(tmp_path / "rank-0.out", b"x" * 500)
    index_writer = writer(tmp_path, 2.0)
    index_writer.close()
    assert index(tmp_path) == b"1000 0 o 300\n1500 0 o 4?\n2000 0 o 500\n"
    assert [growth.end for growth in LogIndexReader(tmp_path, 0).read()] == [300, 500]


def test_reader_skips_damage_and_waits_for_a_whole_line(tmp_path: Path) -> None:
    reader = LogIndexReader(tmp_path, 2)
    assert list(reader.read()) == []
    path = tmp_path / contract.LOG_INDEX
    path.write_bytes(b"1000 0 o 3\n\x00\xff junk\n\n1 2 3\n1000 0 x 3\n1000 0 o -3\n1001 1 e 5\n1002 0 ")
    assert list(reader.read()) == [Growth(1000, 2, 0, "o", 3), Growth(1001, 2, 1, "e", 5)]
    assert list(reader.read()) == []
    append(path, b"o 9\n")
    assert list(reader.read()) == [Growth(1002, 2, 0, "o", 9)]


def test_reader_never_goes_back_in_time(tmp_path: Path) -> None:
    (tmp_path / contract.LOG_INDEX).write_bytes(b"2000 0 o 3\n1000 0 o 5\n")
    assert [growth.time for growth in LogIndexReader(tmp_path, 0).read()] == [2000, 2000]


def test_reader_marks_a_file_that_shrank(tmp_path: Path) -> None:
    (tmp_path / contract.LOG_INDEX).write_bytes(b"1000 0 o 9\n1000 1 o 9\n2000 0 o 4\n3000 0 o 6\n")
    assert list(LogIndexReader(tmp_path, 0).read()) == [
        Growth(1000, 0, 1, "o", 9),
        Growth(2000, 0, 0, "o", 4, restarted=True),
        Growth(3000, 0, 0, "o", 6),
    ]


def test_reader_reads_an_index_of_many_blocks(tmp_path: Path) -> None:
    lines = [f"{1000 + number} 0 o {number + 1}\n" for number in range(50_000)]
    (tmp_path / contract.LOG_INDEX).write_text("".join(lines))
    assert [growth.end for growth in LogIndexReader(tmp_path, 0).read()] == list(range(1, 50_001))


def test_reader_steps_over_an_endless_line(tmp_path: Path) -> None:
    (tmp_path / contract.LOG_INDEX).write_bytes(b"x" * 1_000_000 + b"\n1000 0 o 3\n")
    assert list(LogIndexReader(tmp_path, 0).read()) == [Growth(1000, 0, 0, "o", 3)]


def test_the_writer_needs_only_the_standard_library() -> None:
    code = (
        "import sys, allranks.record.logindex;"
        "print(*{'pydantic', 'click', 'rich', 'psutil', 'ruamel', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
