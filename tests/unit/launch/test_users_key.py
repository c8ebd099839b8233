"""The key that nodes which are started one by one have in common: the user's own."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from allranks.errors import LaunchError
from allranks.launch.submit import key_from_users


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    first = key_from_users("train at gpu01, port 29500", environ)
    file = tmp_path / ".config/allranks/key"
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert key_from_users("train at gpu01, port 29500", environ) == first
    assert key_from_users("train at gpu01, port 29501", environ) != first
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    assert bytes.fromhex(file.read_text()) != first


def test_of_nodes_that_make_it_at_the_same_time_all_get_the_same(tmp_path: Path) -> None:
    for number in range(20):
        environ = {"XDG_CONFIG_HOME": str(tmp_path / str(number))}
        with ThreadPoolExecutor(4) as pool:
            assert len({*pool.map(lambda _, given=environ: key_from_users("here", given), range(4))}) == 1


def test_another_file_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    environ = {"ALLRANKS_KEY_FILE": str(file), "HOME": "/nowhere"}
    with pytest.raises(LaunchError, match=f"cannot read the key {file}"):
        key_from_users("here", environ)
    file.write_text("00" * 32)
    assert len(key_from_users("here", environ)) == 32
    file.write_text("00" * 31)
    with pytest.raises(LaunchError) as caught:
        key_from_users("here", environ)
    assert (caught.value.what, caught.value.why) == (f"{file} holds no key", "a key is 64 hexadecimal digits")


def test_without_a_home_there_is_no_place_for_it() -> None:
    with pytest.raises(LaunchError) as caught:
        key_from_users("here", {})
    assert caught.value.why == "HOME is not set"
