"""Variables, and checks of a site's own, on machines over SSH: each that is wrong on one machine names it."""

from __future__ import annotations

import json
from typing import Any

#: As a site would write one, put wrong on one machine.
FANS = '#!/bin/sh\necho "fan 3 of $(hostname)"\necho call the operators\n[ "$(hostname)" != gpu03 ] || exit 2\n'


def test_what_is_set_wrong_on_one_machine_and_what_its_own_check_says(ssh: Any) -> None:
    wrong = {"gpu01": "NCCL_SOCKET_IFNAM=eth0", "gpu02": "NCCL_ALGO=Ring", "gpu03": "NCCL_DEBUG=INFO"}
    lines = [f'if [ "$(hostname)" = {host} ]; then export {setting}; fi' for host, setting in wrong.items()]
    lines.append('if [ "$(hostname)" != gpu04 ]; then export FABRIC=1; fi')
    (ssh.folder / "site").mkdir()
    (ssh.folder / "site" / "fans").write_text(FANS)
    (ssh.folder / "site" / "fans").chmod(0o755)
    job = {
        "binary": "true",
        "environment": {"node_setup": lines},
        "checks": {"folder": "site", "variables": ["FABRIC", "HOME"]},
    }
    ssh.job(json.dumps(job))
    names = "variables,debug,site-variables,same-variables,threads,fans"
    done = ssh("check", "job.yaml", "--nodes", "gpu01,gpu02,gpu03,gpu04", "--json", "--only", names)
    assert done.rc == 3, done.stderr
    found = [each for each in json.loads(done.stdout)["checks"] if each["grade"] in ("WARN", "FAIL")]
    assert [(each["grade"], each["check"], each["host"], each["what"]) for each in found] == [
        ("WARN", "variables", "gpu01", "NCCL_SOCKET_IFNAM is not known"),
        (
            "WARN",
            "debug",
            "gpu03",
            "NCCL_DEBUG=INFO: each rank writes many lines at its start, among which others are not seen",
        ),
        ("FAIL", "site-variables", "gpu04", "not set: FABRIC"),
        ("WARN", "same-variables", "gpu02", "NCCL_ALGO is Ring, and not set on the others"),
        ("WARN", "same-variables", "gpu03", "NCCL_DEBUG is INFO, and not set on the others"),
        ("WARN", "same-variables", "gpu01", "NCCL_SOCKET_IFNAM is eth0, and not set on the others"),
        ("FAIL", "fans", "gpu03", "fan 3 of gpu03"),
    ]
