"""Checks that a site adds: by a directory of executables, and by a package."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.checks.collect import site
from allranks.checks.collect.gather import ProbeRequest, gather
from allranks.job.load import load_job
from allranks.system.processes import marked
from waiting import wait_for

#: Ends as a plugin of Nagios that has found something.
FANS = "#!/bin/sh\necho 'fan 3 stands still | rpm=0'\necho 'tell the operators'\necho 'room 5'\nexit 2\n"
JOB = "binary: 'true'\nchecks: {folder: site}\n"


def order_of(text: str, **more: Any) -> ProbeRequest:
    return ProbeRequest(("site/it",), executables={"it": base64.b64encode(text.encode()).decode()}, **more)


@pytest.fixture
def folder(allranks: Any) -> Callable[..., Path]:
    """Write executables into the directory ``site`` beside the job file."""

    def write(**files: str) -> Path:
        made: Path = allranks.folder / "site"
        made.mkdir(exist_ok=True)
        for name, text in files.items():
            (made / name).write_text(text)
            (made / name).chmod(0o755)
        return made

    return write


def findings(result: Any, *names: str) -> list[tuple[str, str, str]]:
    checks = json.loads(result.stdout)["checks"]
    return [(each["grade"], each["what"], each["fix"]) for each in checks if each["check"] in names]


def test_an_executable_runs_here_and_in_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FABRIC", "ib")
    found = gather(order_of('#!/bin/sh\necho "$PWD $FABRIC $(cat)"\necho odd >&2\nexit 7\n'))
    assert found == {"facts": {"site/it": {"code": 7, "out": f"{tmp_path} ib \n", "err": "odd\n"}}, "errors": {}}


def test_one_that_cannot_be_started_is_told() -> None:
    found = gather(order_of("#!/not/there\n"))
    assert found["facts"] == {}
    assert found["errors"]["site/it"].startswith("FileNotFoundError: ")


def test_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def left() -> list[int]:
        return marked("LEFT_BY_A_CHECK", str(tmp_path))

    monkeypatch.setenv("LEFT_BY_A_CHECK", str(tmp_path))
    assert site.site(order_of("#!/bin/sh\nsleep 300 &\necho done\n"), "it")["out"] == "done\n"
    monkeypatch.setattr(site, "LIMIT", 0.5)
    late = site.site(order_of("#!/bin/sh\necho started\nsleep 300 & sleep 301\n"), "it")
    assert late == {"code": None, "out": "started\n", "err": ""}
    wait_for("their end: they have been killed, and leave when the kernel gets to it", lambda: not left())


def test_one_that_says_much_goes_on_to_its_end() -> None:
    found = site.site(order_of("#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' x || exit 9\nexit 3\n"), "it")
    assert found == {"code": 3, "out": "x" * 4096, "err": ""}


def test_a_folder_of_executables_is_run_on_the_node(allranks: Any, folder: Callable[..., Path]) -> None:
    made = folder(fans=FANS, dust="#!/bin/sh\necho much >&2; exit 1\n", air="#!/bin/sh\n", gate="#!/bin/sh\nexit 3\n")
    folder(broken="#!/bin/sh\nexit 9\n", notes="fans: see room 5\n")
    (made / "notes").chmod(0o644)
    (made / "notes.d").mkdir()
    (made / ".hidden").write_text("")
    allranks.job(JOB)
    result = allranks("check", "--json")
    assert (result.rc, result.stderr) == (3, "")
    shown = list(dict.fromkeys(each["check"] for each in json.loads(result.stdout)["checks"]))
    assert shown[-6:] == ["air", "broken", "dust", "fans", "gate", "notes"]
    assert not {"notes.d", ".hidden"} & {*shown}
    assert findings(result, "fans") == [("FAIL", "fan 3 stands still", "tell the operators; room 5")]
    assert findings(result, "dust") == [("WARN", "much", "see what it looks at")]
    assert findings(result, "air", "gate") == [
        ("PASS", "good", ""),
        ("SKIP", "it exited with code 3 and printed nothing", ""),
    ]
    assert findings(result, "broken") == [
        ("WARN", "it exited with code 9, not with 0, 1, 2 or 3", "correct it, or --skip it")
    ]
    assert findings(result, "notes") == [("SKIP", f"it is not executable: chmod +x {made}/notes", "")]


def test_one_that_is_left_out_is_not_even_run(allranks: Any, folder: Callable[..., Path]) -> None:
    folder(**{name: f"#!/bin/sh\ntouch {allranks.folder}/{name}.ran\n" for name in ("first", "second")})
    allranks.job("binary: 'true'\nchecks: {folder: site, skip: [shm, first]}\n")
    result = allranks("check", "--json")
    assert findings(result, "first", "shm") == []
    assert findings(result, "second") == [("PASS", "good", "")]
    assert [path.name for path in allranks.folder.glob("*.ran")] == ["second.ran"]
    assert findings(allranks("check", "--json", "--only", "first"), "first") == [("PASS", "good", "")]


def test_a_failure_refuses_the_run_and_a_skipped_one_does_not(
    checked, allranks: Any, folder: Callable[..., Path]
) -> None:
    made = folder(fans=FANS)
    allranks.job(JOB)
    result = allranks("run")
    assert result.rc == 3
    assert "fan 3 stands still" in result.stderr
    assert f"  why: this site checks it: {made}/fans\n  fix: tell the operators; room 5\n" in result.stderr
    allranks.job("binary: 'true'\nchecks: {folder: site, skip: fans}\n")
    assert allranks("run").rc == 0


def test_what_the_job_s_own_set_up_may_put_right_only_warns(
    checked, allranks: Any, folder: Callable[..., Path]
) -> None:
    folder(fabric='#!/bin/sh\n[ "$FABRIC" ] && exit 0\necho no fabric; exit 2\n')
    allranks.job(JOB + "environment: {node_setup: export FABRIC=ib}\n")
    assert findings(allranks("check", "--json"), "fabric") == [("PASS", "good", "")]
    result = allranks("run")
    assert result.rc == 0
    assert "fabric on " in result.stderr
    assert "no fabric" in result.stderr


def test_a_cluster_s_folder_is_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "clusters.yaml").write_text("lab: {kind: local, checks: {folder: site, variables: FABRIC}}\n")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "job.yaml").write_text("binary: 'true'\ncluster: lab\n")
    loaded = load_job(Path("jobs/job.yaml"), flags={}, environ={}, cwd=tmp_path)
    assert (loaded.job.checks.folder, loaded.job.checks.variables) == (str(tmp_path / "site"), ("FABRIC",))
    (jobs / "job.yaml").write_text("binary: 'true'\ncluster: lab\nchecks: {folder: ../site}\n")
    loaded = load_job(Path("jobs/job.yaml"), flags={}, environ={}, cwd=tmp_path)
    assert (loaded.job.checks.folder, loaded.folder) == ("../site", jobs)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("folder: nowhere", "error: the directory of checks cannot be read\n  why: no such file or directory: "),
        ("skip: shn", "error: there is no check 'shn'\n"),
        ("skipp: shm", "unknown key 'skipp' in checks"),
    ],
)
def test_a_wrong_section_is_told(allranks: Any, text: str, told: str) -> None:
    allranks.job(f"binary: 'true'\nchecks: {{{text}}}\n")
    result = allranks("check")
    assert (result.rc, result.stdout) == (2, "")
    assert told in result.stderr


def test_a_name_that_is_taken_is_refused(allranks: Any, folder: Callable[..., Path]) -> None:
    made = folder(shm=FANS)
    allranks.job(JOB)
    result = allranks("check")
    assert result.rc == 2
    assert result.stderr == (
        "error: there are two checks with the name 'shm'\n"
        f"  why: this site checks it: {made}/shm\n  fix: rename that file\n"
    )


PLUGIN = """
from allranks.checks.model import passed, warned
from allranks.checks.registry import on_each_node

@on_each_node("many-cpus", why="this site has large machines", fact="cpus")
def many_cpus(fact, node, seen):
    return warned(f"{fact['all'] > 0} CPUs", fix="buy more") if fact["all"] else passed("enough")
"""


def plugin(folder: Path, module: str) -> str:
    """Install a package with checks in a directory; return what PYTHONPATH must be."""
    (folder / "lab_checks.py").write_text(module)
    told = folder / "lab_checks-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-checks\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[allranks.checks]\nlab = lab_checks\n")
    return str(folder)


def test_a_package_adds_checks_by_entry_point(allranks: Any, tmp_path: Path) -> None:
    allranks.job("binary: 'true'\n")
    result = allranks("check", "--json", "--only", "many-cpus", PYTHONPATH=plugin(tmp_path, PLUGIN))
    assert result.rc == 0
    assert findings(result, "many-cpus") == [("WARN", "True CPUs", "buy more")]
    assert allranks("check", "--only", "many-cpus").rc == 2


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import lab_of_nobody\n", "ModuleNotFoundError: No module named 'lab_of_nobody'"),
        (PLUGIN.replace("many-cpus", "shm"), "ValueError: there are two checks with the name shm"),
    ],
)
def test_a_package_whose_checks_cannot_be_loaded_is_named(allranks: Any, tmp_path: Path, module: str, why: str) -> None:
    result = allranks("check", "--only", "shm", PYTHONPATH=plugin(tmp_path, module))
    assert (result.rc, result.stdout) == (1, "")
    assert result.stderr == (
        "error: the checks of the package lab-checks cannot be loaded\n"
        f"  why: lab_checks: {why}\n"
        f"  fix: reinstall lab-checks, or remove it: {sys.executable} -m pip uninstall lab-checks\n"
    )
