"""What the README and the pages show is true."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest
from doc_pages import PAGES, ROOT, Block, blocks, commands, committed_files, inline_code, typed

from allranks import contract
from allranks.cli.main import VERBS, cli
from allranks.job.load import load_job
from allranks.job.options import OPTIONS, TARGETS
from waiting import PATIENCE

#: Names of clusters in the job files that are shown, and their kinds.
CLUSTERS = {"lab": "slurm", "slurm": "slurm", "pbs": "pbs", "pdsh": "pdsh"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MAKE_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
# Written in parts, so that this file is not found by its own test.
MACHINE_PATH = re.compile(r"(?<![\w.~}>*/-])/(?:wor" + r"k|roo" + r"t)/\w")
REGISTRY = re.compile("|".join(rf"{name}\.{end}" for name, end in (
    ("pypi", "org"), ("pythonhosted", "org"), (r"download\.pytorch", "org"), ("anaconda", "(?:org|com)"),
)))  # fmt: skip


def parse(args: list[str]) -> None:
    """Parse a call of allranks as the command does, and run nothing."""
    top = click.Context(cli, info_name="allranks", **cli.context_settings)
    verb, *rest = args
    command = cli if verb.startswith("-") else cli.get_command(top, verb)
    if command is None:
        raise click.UsageError(f"no such command: {verb}")
    try:
        command.make_context(verb, args if command is cli else rest, parent=None if command is cli else top)
    except click.exceptions.Exit as done:
        assert done.exit_code == 0


def shown_commands() -> list[tuple[str, str]]:
    """Return every call of allranks that a page shows, with its place."""
    in_blocks = [(str(block), line) for block in blocks("sh", "console") for line in typed(block)]
    in_text = [(page.name, code) for page in PAGES for code in inline_code(page) if code.startswith("allranks ")]
    return [(where, line) for where, line in in_blocks + in_text if any(commands(line, "allranks"))]


def test_pages_show_commands():
    assert len(shown_commands()) > 50
    calls = [args for _, line in shown_commands() for args in commands(line, "allranks")]
    assert {args[0] for args in calls} >= set(VERBS)


@pytest.mark.parametrize(("where", "line"), shown_commands())
def test_a_command_that_is_shown_has_such_a_verb_and_flags(where, line, capsys):
    for args in commands(line, "allranks"):
        parse(args)


@pytest.mark.parametrize("line", ["allranks fly", "allranks run --no-such-flag", "id=$(allranks ps --nope)"])
def test_a_command_that_does_not_exist_is_found(line):
    (args,) = commands(line, "allranks")
    with pytest.raises(click.UsageError, match=r"(?i)no such"):
        parse(args)


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_job_file_that_is_shown_loads(block: Block, tmp_path, monkeypatch):
    environ = {"HF_TOKEN": "not a real one", "WANDB_API_KEY": "not a real one"}
    if block.text.startswith("# clusters.yaml"):
        (tmp_path / "clusters.yaml").write_text(block.text)
        load_job(None, flags={"script": "train.py", "cluster": "local"}, environ=environ, cwd=tmp_path)
        return
    (tmp_path / "clusters.yaml").write_text("".join(f"{name}: {{kind: {kind}}}\n" for name, kind in CLUSTERS.items()))
    (tmp_path / "job.yaml").write_text(block.text)
    loaded = load_job(Path("job.yaml"), flags={}, environ=environ, cwd=tmp_path)
    assert any(getattr(loaded.job, target) for target in TARGETS)


def test_every_yaml_block_is_a_job_file_or_a_cluster_file():
    assert len(blocks("yaml")) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if not link.startswith(("https://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_every_page_can_be_reached_from_the_readme():
    seen, new = set(), {ROOT / "README.md"}
    while new:
        seen |= new
        links = {(page, link) for page in new for link in LINK.findall(page.read_text(encoding="utf-8"))}
        new = {(page.parent / link.partition("#")[0]).resolve() for page, link in links if link.endswith(".md")} - seen
    assert {page.resolve() for page in PAGES if "recipes" not in page.parts} <= {page.resolve() for page in seen}


def test_the_readme_is_short_and_its_links_stand_in_four_groups():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    read = LINK.sub(lambda link: link[0].partition("](")[0], re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert len([word for word in read.split() if re.search(r"\w", word)]) <= 600
    assert [line for line in text.split("\n") if len(line) > 120] == []
    groups = text.partition("## Documentation\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*([\w ]+)\*\*: ", groups, re.MULTILINE) == ["Learn", "Run", "Train", "Look up"]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("path", "text"), list(generator().pages()), ids=lambda value: getattr(value, "name", ""))
def test_generated_pages_are_up_to_date(path: Path, text: str):
    assert path.read_text(encoding="utf-8") == text, "run: make docs"


def test_make_targets_that_are_shown_exist():
    targets = set(MAKE_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    calls = [args for block in blocks("sh") for line in typed(block) for args in commands(line, "make")]
    calls += [code.split()[1:] for page in PAGES for code in inline_code(page) if code.startswith("make ")]
    assert calls
    assert {args[0] for args in calls} <= targets


def test_reference_names_every_event_and_every_variable():
    events = (ROOT / "docs/reference/events.md").read_text(encoding="utf-8")
    source = Path(contract.__file__).read_text(encoding="utf-8")
    section = re.split(r"# --- .*\n", source.partition("# --- kinds of events")[2])[0].partition("\n\n")[0]
    kinds = re.findall(r'^\w+: Final = "([a-z-]+)"', section, re.MULTILINE)
    assert len(kinds) > 5
    for kind in kinds:
        assert f"| `{kind}` |" in events
    variables = (ROOT / "docs/reference/environment-variables.md").read_text(encoding="utf-8")
    ours = [contract.RUN_ID, contract.RUN_DIR, contract.ATTEMPT, contract.BACKEND, contract.TERMINAL]
    for name in [*ours, *(variable for option in OPTIONS for variable in option.variables)]:
        assert f"`{name}`" in variables


def test_files_name_neither_this_machine_nor_a_package_registry():
    files = committed_files()
    if not files:
        pytest.skip("no git checkout")
    found = []
    for path in files:
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [
            f"{path.relative_to(ROOT)}: {match[0]}"
            for rule in (MACHINE_PATH, REGISTRY)
            for match in rule.finditer(text)
        ]
    assert not found


def test_the_plans_of_the_tutorial_can_be_typed_in_the_clone(allranks):
    page = ROOT / "docs" / "tutorial.md"
    lines = [line for block in blocks("sh") if block.page == page for line in typed(block)] + inline_code(page)
    plans = [args for line in lines if line.startswith("allranks plan") for args in commands(line, "allranks")]
    assert len(plans) == 2
    for args in plans:
        done = allranks(*args, cwd=ROOT)
        assert (done.rc, "error" in done.stderr) == (0, False)


def shape(text: str) -> list[str]:
    """Return the lines of a session without what differs from machine to machine and from run to run."""
    text = re.sub(r"train-\d{4}-\d{4}(-\d+)?", "RUN", text)
    text = re.sub(r"backend gloo \(.*\)", "backend gloo (WHY)", text)
    text = re.sub(r"allranks: RUN: still .*\n", "", text)  # What it waits for, after 30 s on a slow machine.
    text = re.sub(r"RUN succeeded in .*", "RUN succeeded in TIME", text)  # With minutes there.
    return re.sub(r"\d+(\.\d+)?", "N", text).splitlines()


def test_the_readme_s_five_minutes_go_as_shown(tmp_path, allranks_env):
    """It takes more than 10 s: it trains as the README shows."""
    (session,) = (block for block in blocks("console") if block.page.name == "README.md")
    path = f"{Path(sys.executable).parent}{os.pathsep}{allranks_env['PATH']}"
    env = {**allranks_env, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    folder = tmp_path / "project"
    folder.mkdir()
    told = []
    for line in typed(session):
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        told += [f"$ {line}", *done.stdout.splitlines()]
    assert shape("\n".join(told)) == shape(session.text)
    assert (folder / "runs" / "latest" / "record.json").is_file()
