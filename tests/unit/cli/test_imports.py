"""A login node without torch can plan, follow and cancel; and every verb's help is quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli.main import VERBS

PROGRAM = """\
import json, sys
from allranks.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""


def modules_after(env: dict[str, str], *args: str) -> tuple[int, set[str]]:
    """Return the exit code of a command, and the names of all modules that it imported."""
    command = [sys.executable, "-c", PROGRAM, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    code, names = json.loads(done.stderr.splitlines()[-1])
    return code, {*names}


@pytest.mark.parametrize("verb", [*VERBS, None])
def test_help_imports_nothing_heavy(allranks_env, verb: str | None):
    code, modules = modules_after(allranks_env, *([verb] if verb else []), "--help")
    assert code == 0
    assert not modules & {
        "torch",
        "numpy",
        "pydantic",
        "ruamel",
        "rich",
        "psutil",
        "asyncio",
        "importlib_metadata",
        "tree_sitter",
    }


def test_a_plan_brings_no_other_verb(allranks_env):
    code = (
        "import sys, allranks.cli.plan; print([verb for verb in sys.argv[1:] if f'allranks.cli.{verb}' in sys.modules])"
    )
    command = [sys.executable, "-c", code, *VERBS]
    assert subprocess.run(command, env=allranks_env, capture_output=True, text=True, check=True).stdout == "['plan']\n"


@pytest.mark.parametrize(
    "args", [["status"], ["status", "--json"], ["ps"], ["logs"], ["logs", "-f"], ["cancel"]], ids=" ".join
)
def test_reading_a_run_imports_nothing_heavy(allranks_env, failed_run: Path, args: list[str]):
    code, modules = modules_after(allranks_env, *args, "--runs-folder", str(failed_run.parent))
    assert code == 0
    assert not modules & {"torch", "numpy", "pydantic", "ruamel", "rich"}


def test_plan_and_schema_need_no_torch(allranks_env, tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    for args in (["plan", str(tmp_path / "train.py")], ["schema"]):
        code, modules = modules_after(allranks_env, *args)
        assert code == 0
        assert not modules & {"torch", "numpy"}


def test_plugins_of_pydantic_are_left_to_the_script(allranks_env, tmp_path: Path):
    """logfire has one, which takes a second to load. The script has them, as it has without allranks."""
    script = tmp_path / "train.py"
    script.write_text("import pydantic\nclass Model(pydantic.BaseModel): pass\n")
    plugin = "class Plugin:\n    def new_schema_validator(self, *_): return None, None, None\nplugin = Plugin()\n"
    (tmp_path / "tracing.py").write_text(f"print('loaded')\n{plugin}")
    package = tmp_path / "tracing-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: tracing\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[pydantic]\ntracing = tracing:plugin\n")
    env = {**allranks_env, "PYTHONPATH": str(tmp_path)}
    words = (sys.executable, "-m", "allranks", "run", str(script), "--nproc-per-node", "1", "--no-check")
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[0] loaded\n"), done.stderr


def test_every_verb_has_a_help(allranks):
    for verb in VERBS:
        result = allranks(verb, "-h")
        assert (result.rc, result.stderr) == (0, "")
        assert result.stdout.startswith(f"Usage: allranks {verb} ")


@pytest.mark.parametrize("verb", ["status", "ps"])
def test_reading_runs_that_have_ended_imports_no_compression_and_no_rules(allranks_env, failed_run: Path, verb: str):
    """The start of a command is most of the time that it takes. shutil imports all that compresses."""
    code, modules = modules_after(allranks_env, verb, "--runs-folder", str(failed_run.parent))
    assert code == 0
    assert not {name.partition(".")[0] for name in modules} & {"shutil", "bz2", "lzma", "socket"}
    heavy = {"diagnosis.rules", "clusters.registry", "runs.hangs", "runs.agents", "logs.cause", "record.spec"}
    assert not modules & {f"allranks.{name}" for name in heavy}


@pytest.mark.parametrize("module", ["agent.main", "agent.node", "checks.collect.gather", "checks.collect.machine"])
def test_what_runs_on_nodes_imports_nothing_slow(module: str):
    """A tenth of the time until the first rank starts was dataclasses, which brings inspect, ast and tokenize."""
    code = f"import sys, allranks.{module}; print(sys.modules.keys() & {{'dataclasses', 'inspect', 'statistics'}})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
