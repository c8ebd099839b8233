"""Flags, environment, job file and cluster file become one job, and each value knows its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.init import JOB_TEMPLATE
from allranks.errors import JobError
from allranks.job.load import LoadedJob, load_job
from allranks.job.sources import ValueSource

Load = Callable[..., LoadedJob]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def call(text: str | None = None, *, clusters: str | None = None, **given: Any) -> LoadedJob:
        if text is not None:
            (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
        if clusters is not None:
            (tmp_path / "clusters.yaml").write_text(clusters, encoding="utf-8")
        target = Path("job.yaml") if text is not None else None
        flags, environ = given.get("flags", {}), given.get("environ", {})
        return load_job(target, flags=flags, environ=environ, cwd=given.get("cwd", tmp_path))

    return call


def test_a_script_needs_no_job_file(load: Load, tmp_path: Path) -> None:
    loaded = load(flags={"script": "train.py", "args": ("--epochs", "3"), "launch.nproc_per_node": "2"})
    assert (loaded.job.script, loaded.job.args) == ("train.py", ("--epochs", "3"))
    assert loaded.job.launch.nproc_per_node == 2
    assert (loaded.folder, loaded.cluster.kind) == (tmp_path, "local")
    assert loaded.sources["launch.nproc_per_node"] == ValueSource("flag", "--nproc-per-node")
    assert loaded.sources["script"] == ValueSource("flag", "command line")
    assert loaded.sources["launch.backend"] == ValueSource("default", "")


def test_each_layer_wins_over_those_below(load: Load) -> None:
    loaded = load(
        "script: t.py\ncluster: gpu\nlaunch:\n  max_restarts: 3\n  stop_timeout: 3\n  nproc_per_node: 3\n",
        clusters=(
            "gpu:\n  kind: local\n  launch: {max_restarts: 4, stop_timeout: 4, restart_delay: 4, nproc_per_node: 4}\n"
        ),
        environ={"ALLRANKS_MAX_RESTARTS": "2", "NPROC_PER_NODE": "2"},
        flags={"launch.nproc_per_node": "1"},
    )
    launch, sources = loaded.job.launch, loaded.sources
    assert (launch.nproc_per_node, launch.max_restarts) == (1, 2)
    assert (launch.stop_timeout, launch.restart_delay) == (3, 4)
    assert [str(sources[f"launch.{name}"]) for name in ("nproc_per_node", "max_restarts", "stop_timeout")] == [
        "flag --nproc-per-node",
        "environment ALLRANKS_MAX_RESTARTS",
        "job file job.yaml:5",
    ]
    assert str(sources["launch.restart_delay"]) == "cluster file clusters.yaml:3"
    assert str(sources["launch.warm"]) == "default"


def test_variables_merge_name_by_name_and_lists_are_replaced(load: Load) -> None:
    loaded = load(
        "script: t\ncluster: gpu\nenvironment:\n  variables: {A: job, B: job}\n  modules: [one]\n",
        clusters="gpu: {kind: local, environment: {modules: [t, u], variables: {A: site, C: 1.10, D: }}}",
        flags={"environment.variables": ("B=flag=1", "E")},
        environ={"E": "caller"},
    )
    assert loaded.job.environment.variables == {"A": "job", "B": "flag=1", "C": "1.10", "E": "caller"}
    assert loaded.job.environment.modules == ("one",)
    assert str(loaded.sources["environment.variables.B"]) == "flag --env"
    assert str(loaded.sources["environment.variables.C"]) == "cluster file clusters.yaml:1"


@pytest.mark.parametrize(("level", "debug"), [("DEBUG", True), ("debug", True), ("INFO", False), ("odd", False)])
def test_log_level_turns_on_debug_only_at_debug(load: Load, level: str, debug: bool) -> None:
    assert load("script: t", environ={"ALLRANKS_LOG_LEVEL": level}).job.debug is debug
    assert load("script: t", environ={"LOG_LEVEL": level}).job.debug is False  # Of any other program.


def test_a_log_level_flag_must_be_one(load: Load) -> None:
    assert load("script: t", flags={"log_level": "DEBUG"}).sources["debug"] == ValueSource("flag", "--log-level")
    with pytest.raises(JobError, match=r"^--log-level: .*'DEBUGG'"):
        load("script: t", flags={"log_level": "DEBUGG"})


def test_the_users_cluster_file_and_xdg(load: Load, tmp_path: Path) -> None:
    for folder, delay in ((".config", 1), ("xdg", 2)):
        file = tmp_path / "home" / folder / "allranks" / "clusters.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"lab: {{kind: slurm, launch: {{restart_delay: {delay}}}}}\n")
    home = str(tmp_path / "home")
    text = "script: t\ncluster: lab\n"
    assert load(text, environ={"HOME": home}).job.launch.restart_delay == 1
    loaded = load(text, environ={"HOME": home, "XDG_CONFIG_HOME": home + "/xdg"})
    assert (loaded.job.launch.restart_delay, loaded.cluster.kind) == (2, "slurm")
    project = load(text, environ={"HOME": home}, clusters="lab: {kind: local}")
    assert (project.job.launch.restart_delay, project.cluster.kind) == (1.0, "local")


def test_paths_from_the_command_line_start_where_it_was_typed(tmp_path: Path) -> None:
    project, here = tmp_path / 'it\'s a "project"\nof mine', tmp_path / "here"
    project.mkdir()
    here.mkdir()
    (project / "job.yaml").write_text("script: t.py\nworkdir: sub\nruns: {folder: ~/r}\n")
    loaded = load_job(project / "job.yaml", flags={}, environ={"HOME": "/h"}, cwd=here)
    assert (loaded.folder, loaded.job.workdir, loaded.job.runs.folder) == (project, "sub", "/h/r")
    assert loaded.sources["script"].where == f'{tmp_path}/it\'s a "project"\\nof mine/job.yaml:1'
    moved = load_job(project / "job.yaml", flags={"workdir": "w"}, environ={}, cwd=here)
    assert (moved.job.workdir, moved.job.script) == (str(here / "w"), "t.py")
    typed = load_job(None, flags={"workdir": "w", "script": "t.py"}, environ={}, cwd=here)
    assert typed.job.script == str(here / "t.py")


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("~/bin/python -O", ("/home/a b/bin/python", "-O")),
        ("[~/bin/python, ~/x]", ("/home/a b/bin/python", "~/x")),
        ("python3 ~/x", ("python3", "~/x")),
    ],
)
def test_the_interpreter_can_be_one_at_home(load: Load, python: str, words: tuple[str, ...]) -> None:
    loaded = load(f"script: t\nenvironment: {{python: {python}}}\n", environ={"HOME": "/home/a b"})
    assert loaded.job.environment.python == words


def test_other_paths_at_home(load: Load) -> None:
    environment = "environment: {venv: ~/v, conda: ~/c}\nruns: {folder: '~'}\nworkdir: ~/w\n"
    job = load(f"script: ~/t.py\n{environment}", environ={"HOME": "/h"}).job
    assert (job.script, job.workdir, job.runs.folder) == ("/h/t.py", "/h/w", "/h")
    assert (job.environment.venv, job.environment.conda) == ("/h/v", "/h/c")
    assert load("binary: ~/p", environ={"HOME": "/h"}).job.binary == "/h/p"
    root = Path("~root").expanduser()
    assert load("script: t\nenvironment: {venv: ~root/v}", environ={"HOME": "/h"}).job.environment.venv == f"{root}/v"
    kept = load("script: '~no-such-user-here/t'", environ={"HOME": "/h"}).job
    assert kept.script == "~no-such-user-here/t"


def test_a_target_on_the_command_line_replaces_the_job_files(load: Load) -> None:
    loaded = load("script: t.py\n", flags={"module": "pkg.train"})
    assert (loaded.job.script, loaded.job.module) == (None, "pkg.train")
    assert loaded.sources["module"] == ValueSource("flag", "--module")


def test_variables_of_the_run_around_are_no_wishes(load: Load) -> None:
    around = {"MASTER_PORT": "29500", "MASTER_ADDR": "h", "ALLRANKS_BACKEND": "gloo"}
    assert load("script: t", environ=around).job.launch.master_port == 29500
    inside = load("script: t", environ={**around, "ALLRANKS_RUN_ID": "r"}).job.launch
    assert (inside.master_port, inside.master_addr, inside.backend) == (None, None, None)


def test_flags_without_values(load: Load) -> None:
    loaded = load("script: t", flags={"launch.warm": False, "debug": True, "scheduler.exclusive": None})
    assert (loaded.job.launch.warm, loaded.job.debug, loaded.job.scheduler.exclusive) == (False, True, False)
    assert loaded.sources["launch.warm"] == ValueSource("flag", "--no-warm")
    assert load("script: t", environ={"ALLRANKS_WARM": "0"}).job.launch.warm is False


def test_texts_are_what_they_look_like(load: Load) -> None:
    loaded = load(
        "script: t\nname: 007\nargs: [--lr, 1e-3, 1_0]\n"
        "resources: {time: 48:00:00, memory: 200GB, nodes: 2:4}\n"
        "environment: {conda: 3.10, variables: {DAY: 2024-01-01, YES: yes}}\n"
        "scheduler:\n  include: gpu[01,03],gpu07\n  directives: |\n    --a\n\n    --b c\n"
    )
    assert (loaded.job.name, loaded.job.args) == ("007", ("--lr", "1e-3", "1_0"))
    assert (loaded.job.resources.time, loaded.job.resources.memory) == (172800, 200 * 1024**3)
    assert (loaded.job.resources.nodes, loaded.job.environment.conda) == ((2, 4), "3.10")
    assert loaded.job.environment.variables == {"DAY": "2024-01-01", "YES": "yes"}
    assert loaded.job.scheduler.include == ("gpu[01,03]", "gpu07")
    assert loaded.job.scheduler.directives == ("--a", "--b c")


def test_anchors_aliases_and_merges(load: Load) -> None:
    loaded = load("script: t\nargs: &a [x]\nenvironment:\n  modules: *a\nlaunch:\n  <<: {max_restarts: 2}\n")
    assert (loaded.job.environment.modules, loaded.job.launch.max_restarts) == (("x",), 2)


def test_null_means_not_given(load: Load) -> None:
    loaded = load("script: t\nresources:\nlaunch: {backend: , max_restarts: ~}\nenvironment: null\n")
    assert loaded.job.launch.max_restarts == 0
    assert loaded.sources["launch.max_restarts"] == ValueSource("default", "")


def test_every_leaf_has_a_source(load: Load) -> None:
    loaded = load("script: t\nenvironment: {variables: {a.b: 1}}".replace("a.b", "A_B"))
    data = loaded.job.model_dump(mode="json")
    names = {f"{s}.{f}" for s, v in data.items() if isinstance(v, dict) for f in v} - {"environment.variables"}
    top = {name for name, value in data.items() if not isinstance(value, dict)}
    assert set(loaded.sources) == names | top | {"environment.variables.A_B"}


def test_the_template_loads(load: Load) -> None:
    loaded = load(JOB_TEMPLATE)
    assert (loaded.job.script, loaded.job.args) == ("train.py", ("--epochs", "3"))
    lines = JOB_TEMPLATE.splitlines()
    keys = [line[2:] for line in lines if line.startswith("# ") and (line[2:3] == " " or line.rstrip().endswith(":"))]
    whole = load("script: t\n" + "\n".join(keys) + "\n")
    assert whole.job.resources.time == 172800
    assert whole.job.scheduler.account == "my-project"


def test_a_section_that_has_a_short_form(load: Load) -> None:
    loaded = load("script: t.py\nsync: rsync\ncluster: lab\n", clusters="lab: {kind: ssh, sync: {exclude: /data/}}\n")
    assert (loaded.job.sync.method, loaded.job.sync.exclude) == ("rsync", ("/data/",))
    assert str(loaded.sources["sync.method"]) == "job file job.yaml:2"
    with pytest.raises(JobError, match=r"^job\.yaml:1: sync "):
        load("{script: t.py, sync: [rsync]}\n")
    with pytest.raises(JobError, match=r"sync\.method"):
        load("script: t.py\nsync: rsink\n")
