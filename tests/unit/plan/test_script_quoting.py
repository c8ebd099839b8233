"""Nothing that a user supplies is executed: the ranks get the exact values."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allranks.job.spec import Environment
from allranks.plan.plan import Reason
from allranks.plan.script import become, comment, export, node_script

HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a\ntouch pwned\n",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "\\'; touch pwned #",
    "${IFS}&& touch pwned",
    "a\r\ntouch pwned",
    "!! ~ * ? [a-z] {a,b} <(touch pwned)",
    "",
    " ",
    "-rf",
    "été 💥 \u2028touch pwned",
    "\x1b[2J\x07\x7f",
]
# All that a variable or an argument can hold: everything but NUL and what is no Unicode.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


def script(
    *,
    container: tuple[str, ...] = (),
    values: list[str] | None = None,
    command: tuple[str, ...] = (),
    workdir: str = "/",
    run: str = "/run",
    title: str = "a test",
    why: str = "a reason",
    environment: Environment | None = None,
    secrets: tuple[str, ...] = (),
) -> str:
    return node_script(
        title=title,
        workdir=workdir,
        environment=environment or Environment(),
        settings=[Reason(f"V{number}", value, why) for number, value in enumerate(values or [])],
        backend="gloo",
        place=[export("ALLRANKS_RUN_DIR", run)],
        secrets=secrets,
        becomes=become(container, command),
    )


def test_hostile_values_in_variables_and_words(executed, tmp_path: Path):
    words, env, _ = executed(lambda container: script(container=container, values=HOSTILE, command=tuple(HOSTILE)))
    assert words == HOSTILE
    assert [env[f"V{number}"] for number in range(len(HOSTILE))] == HOSTILE
    assert not list(tmp_path.rglob("*pwned*"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(values=st.lists(TEXT, max_size=8), command=st.lists(TEXT, max_size=8), why=TEXT, title=TEXT)
def test_any_text_arrives_as_it_is(executed, values: list[str], command: list[str], why: str, title: str):
    words, env, _ = executed(
        lambda container: script(container=container, values=values, command=tuple(command), why=why, title=title)
    )
    assert words == command
    assert [env[f"V{number}"] for number in range(len(values))] == values


@given(TEXT)
def test_a_comment_is_one_line(text: str):
    assert comment(text).startswith("# ")
    assert not set(comment(text)) & {"\n", "\r", "\0", "\x1b"}


def test_hostile_comments(executed, tmp_path: Path):
    for text in HOSTILE:
        executed(lambda container, text=text: script(container=container, values=["x"], why=text, title=text))
    assert not list(tmp_path.rglob("*pwned*"))


def test_hostile_folders(executed, tmp_path: Path):
    for number, name in enumerate(HOSTILE):
        if not name.strip():
            continue
        folder = tmp_path / str(number) / name
        folder.mkdir(parents=True)
        _, env, cwd = executed(lambda container, f=folder: script(container=container, workdir=str(f), run=str(f)))
        assert (cwd, env["PYTHONPATH"]) == (str(folder), f"{folder}/code")
        _, env, _ = executed(
            lambda container, f=folder: script(container=container, workdir=str(f), run=str(f)),
            {"PYTHONPATH": "/theirs with $(touch pwned)"},
        )
        assert env["PYTHONPATH"] == f"{folder}/code:/theirs with $(touch pwned)"
    assert not list(tmp_path.rglob("pwned"))


def test_hostile_modules_conda_and_venv(executed, tmp_path: Path):
    """Each reaches the function or file that it is meant for as one word."""
    told = tmp_path / "told"
    tell = f"printf '%s\\0' \"$@\" >> '{told}'"
    conda = tmp_path / "conda"
    conda.write_text(f"#!/bin/bash\n[[ $* == 'shell.bash hook' ]] && cat <<'END'\nconda() {{ {tell}; }}\nEND\n")
    conda.chmod(0o755)
    venv = tmp_path / "$(touch pwned)'\n;touch pwned"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("export ACTIVATED=yes\n")
    modules = [text for text in HOSTILE if text]
    environment = Environment(
        setup=[f"module() {{ {tell}; }}"], modules=modules, conda="$(touch pwned)\n;touch pwned", venv=str(venv)
    )
    _, env, _ = executed(
        lambda container: script(container=container, environment=environment), {"CONDA_EXE": str(conda)}
    )
    assert env["ACTIVATED"] == "yes"
    words = told.read_bytes().decode().split("\0")[:-1]
    assert words == ["load", *modules, "activate", "$(touch pwned)\n;touch pwned"]
    assert not list(tmp_path.rglob("pwned"))


def test_setup_lines_are_the_users_own_shell(executed, tmp_path: Path):
    environment = Environment(setup="export A=1\nexport B=$((A + 1))\n", node_setup=["export C=$B$A"])
    _, env, _ = executed(lambda container: script(container=container, environment=environment))
    assert (env["A"], env["B"], env["C"]) == ("1", "2", "21")


def test_values_of_the_job_win_over_what_setup_exports(executed):
    environment = Environment(setup=["export V0=from-setup"])
    _, env, _ = executed(lambda container: script(container=container, environment=environment, values=["job"]))
    assert env["V0"] == "job"


def test_failing_setup_line_is_named(tmp_path: Path):
    path = tmp_path / "node.sh"
    path.write_text(script(environment=Environment(setup=["true", "false"]), command=("touch", "reached")))
    done = subprocess.run(["bash", str(path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    line = path.read_text().splitlines().index("false") + 1
    assert (done.returncode, done.stderr) == (1, f"allranks: false failed with exit code 1 ({path}, line {line})\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.sh"]


def test_secret_that_is_not_set(tmp_path: Path):
    path = tmp_path / "node.sh"
    path.write_text(script(secrets=("MY_TOKEN",), command=("touch", "reached")))
    done = subprocess.run(
        ["bash", str(path)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "MY_TOKEN: set it before you start this script by hand" in done.stderr
    empty = subprocess.run(
        ["bash", str(path)],
        env={"PATH": "/usr/bin:/bin", "MY_TOKEN": ""},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert (empty.returncode, empty.stderr) == (0, b"")
