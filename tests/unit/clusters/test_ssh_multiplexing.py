"""Who is asked about connections that are kept, and how often."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from allranks.clusters.ssh.transport import kept_options

SSH = shutil.which("ssh")


@pytest.mark.skipif(not SSH, reason="there is no ssh")
def test_ssh_is_asked_once_for_each_environment() -> None:
    with tempfile.TemporaryDirectory() as name:  # Short: the path of a socket has 108 bytes at most.
        asked, config, wrapper = (Path(name, file) for file in ("asked", "config", "ssh"))
        config.write_text("")
        wrapper.write_text(f'#!/bin/sh\necho "$WHO" >>{asked}\nexec {SSH} -F {config} "$@"\n')
        wrapper.chmod(0o755)
        for who in ("one", "one", "two", "one"):
            found = kept_options({"PATH": f"{name}:/usr/bin:/bin", "WHO": who, "XDG_RUNTIME_DIR": name})
            assert found[:2] == ("-oControlMaster=auto", f"-oControlPath={name}/allranks-ssh/%C")
        assert asked.read_text().split() == ["one", "two"]
