"""``module`` is found wherever a site keeps the file that defines it, and its absence is told in our words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from allranks.job.spec import Environment
from allranks.plan.script import node_script

SITE = [path for path in ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh") if Path(path).exists()]
#: As real ones are: it minds neither unset variables nor commands that fail.
INIT = "false\ncase $- in *i*) : ;; esac\nmodule() { echo $0: module of '{}' \"$*\"; }\nfalse\n"


def run(folder: Path, environment: Environment, **environ: str) -> subprocess.CompletedProcess[str]:
    path = folder / "node.sh"
    becomes = ["exec echo the agent"]
    path.write_text(
        node_script(
            title="a test",
            workdir=str(folder),
            environment=environment,
            settings=[],
            backend="gloo",
            becomes=becomes,
        )
    )
    env = {"PATH": "/usr/bin:/bin", **environ}
    return subprocess.run(["bash", path.name], cwd=folder, env=env, capture_output=True, text=True, check=False)


def init_file(folder: Path) -> str:
    (folder / "init").mkdir(parents=True)
    (folder / "init" / "bash").write_text(INIT.replace("{}", folder.name))
    return str(folder)


@pytest.mark.parametrize("variable", ["LMOD_PKG", "MODULESHOME"])
def test_the_file_of_the_callers_installation_defines_it(tmp_path: Path, variable: str):
    home = init_file(tmp_path / "lmod 8 $(touch pwned)")
    done = run(tmp_path, Environment(modules=["cuda/12.4", "gcc 13"]), **{variable: home})
    said = "node.sh: module of lmod 8 $(touch pwned) load cuda/12.4 gcc 13\nthe agent\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert not list(tmp_path.rglob("pwned"))


def test_lmod_comes_before_what_it_replaced(tmp_path: Path):
    homes = {"LMOD_PKG": init_file(tmp_path / "lmod"), "MODULESHOME": init_file(tmp_path / "tcl")}
    done = run(tmp_path, Environment(modules=["gcc"]), **homes)
    assert done.stdout == "node.sh: module of lmod load gcc\nthe agent\n"


def test_one_that_is_there_already_stays(tmp_path: Path):
    environment = Environment(setup=["module() { echo mine $*; }"], modules=["gcc"])
    done = run(tmp_path, environment, LMOD_PKG=init_file(tmp_path / "lmod"))
    assert (done.returncode, done.stdout) == (0, "mine load gcc\nthe agent\n")


@pytest.mark.skipif(bool(SITE), reason="this machine has environment modules")
@pytest.mark.parametrize("environ", [{}, {"LMOD_PKG": "/no/such"}, {"MODULESHOME": ""}])
def test_without_any_nothing_starts(tmp_path: Path, environ: dict[str, str]):
    done = run(tmp_path, Environment(modules=["gcc"]), **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        'allranks: environment.modules: there is no command "module" here, and no file that defines it in '
        "$LMOD_PKG/init, $MODULESHOME/init or /etc/profile.d; environment.setup can define it\n"
    )
