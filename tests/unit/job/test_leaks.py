"""A secret that stands in any text but the secret variables is refused, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import JobError
from allranks.job.load import load_job
from allranks.job.options import OPTIONS
from allranks.job.spec import Job
from allranks.job.variables import literal_secret

SECRET = "s3cret-value"


def load(folder: Path, text: str, flags: dict[str, object] | None = None, **environ: str) -> Job:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return load_job(Path("job.yaml"), flags=flags or {}, environ=environ, cwd=folder).job


def error(folder: Path, text: str, flags: dict[str, object] | None = None, **environ: str) -> str:
    with pytest.raises(JobError) as caught:
        load(folder, text, flags, **environ)
    assert caught.value.__context__ is None, "a traceback would show the values"
    return str(caught.value)


def assert_refused(said: str, where: str, name: str, place: str) -> None:
    """It names the variable and the place, not the value, and how to leave the variable out."""
    what, _, fix = said.splitlines()
    assert (what.startswith(f"{where}: "), name in what, what.endswith(f" {place}")) == (True, True, True)
    assert (SECRET in said, name in fix) == (False, True)


PLACES = [
    (f"args: [--token, {SECRET}]", "args"),
    (f"args: --token={SECRET}", "args"),
    ("args: --token s3cret\\-value", "args"),
    (f"workdir: /data/{SECRET}", "workdir"),
    (f"name: a-{SECRET}", "name"),
    (f"environment: {{setup: 'wandb login {SECRET}'}}", "environment.setup"),
    ("environment: {setup: [pwd, \"wandb login s3cret-'value'\"]}", "environment.setup"),
    (f"environment: {{node_setup: ['curl -u me:{SECRET} host']}}", "environment.node_setup"),
    (f"environment: {{container: [docker, run, -e, 'X={SECRET}']}}", "environment.container"),
    (f"environment: {{python: [python, -X, {SECRET}]}}", "environment.python"),
    (f"environment: {{conda: {SECRET}}}", "environment.conda"),
    (f"launch: {{launcher_args: [--x, {SECRET}]}}", "launch.launcher_args"),
    (f"scheduler: {{directives: ['--comment={SECRET}']}}", "scheduler.directives"),
    (f"scheduler: {{account: {SECRET}}}", "scheduler.account"),
    (f"runs: {{folder: runs/{SECRET}}}", "runs.folder"),
]


@pytest.mark.parametrize(("line", "place"), PLACES)
def test_the_value_of_a_jobs_secret_is_refused_everywhere(tmp_path: Path, line: str, place: str) -> None:
    cluster = "local:\n  kind: local\n  environment: {variables: {HF_TOKEN: s3cret-value}}\n"
    (tmp_path / "clusters.yaml").write_text(cluster)
    assert_refused(error(tmp_path, f"script: t\n{line}\n"), "job.yaml:2", "HF_TOKEN", place)


@pytest.mark.parametrize(("line", "place"), PLACES)
def test_the_value_of_a_callers_secret_is_refused_everywhere(tmp_path: Path, line: str, place: str) -> None:
    said = error(tmp_path, f"script: t\n{line}\n", WANDB_API_KEY=SECRET)
    assert "env -u WANDB_API_KEY allranks" in said
    assert_refused(said, "job.yaml:2", "WANDB_API_KEY", place)


def test_a_secret_behind_the_command_is_refused(tmp_path: Path) -> None:
    flags: dict[str, object] = {"args": ("--key", SECRET)}
    said = error(tmp_path, "script: t\n", flags, WANDB_API_KEY=SECRET)
    assert_refused(said, "command line", "WANDB_API_KEY", "args")
    said = error(tmp_path, "name: x\n", {"script": f"{SECRET}.py"}, WANDB_API_KEY=SECRET)
    assert_refused(said, "command line", "WANDB_API_KEY", "script")


@pytest.mark.parametrize("value", ["12345678", "1234_5678", "0x12345678", "12345678.50"])
def test_a_number_can_be_a_secret(tmp_path: Path, value: str) -> None:
    text = f"script: t\nargs: [--pin, {value}]\nenvironment: {{variables: {{PIN_KEY: {value}}}}}\n"
    assert_refused(error(tmp_path, text), "job.yaml:2", "PIN_KEY", "args")
    quoted = f"script: t\nargs: [--pin, '{value}']\nenvironment: {{variables: {{PIN_KEY: {value}}}}}\n"
    assert_refused(error(tmp_path, quoted), "job.yaml:2", "PIN_KEY", "args")


def test_a_secret_of_several_lines(tmp_path: Path) -> None:
    text = 'script: t\nenvironment: {setup: [echo one, "two three"], variables: {MY_KEY: "one\\ntwo three"}}\n'
    assert_refused(error(tmp_path, text), "job.yaml:2", "MY_KEY", "environment.setup")


def test_a_variable_with_a_secret_of_the_job_travels_as_a_secret(tmp_path: Path) -> None:
    text = f"script: t\nenvironment: {{variables: {{URL: 'https://u:{SECRET}@h', HF_TOKEN: {SECRET}}}}}\n"
    assert load(tmp_path, text).environment.variables == {"URL": f"https://u:{SECRET}@h", "HF_TOKEN": SECRET}
    assert load(tmp_path, text, WANDB_API_KEY=SECRET).environment.variables["HF_TOKEN"] == SECRET


def test_a_variable_with_a_secret_of_the_caller_needs_that_one_beside_it(tmp_path: Path) -> None:
    text = f"script: t\nenvironment:\n  variables:\n    URL: https://u:{SECRET}@h\n"
    assert_refused(error(tmp_path, text, HF_TOKEN=SECRET), "job.yaml:4", "HF_TOKEN", "environment.variables.URL")
    job = load(tmp_path, f"{text}    HF_TOKEN: <secret>\n", HF_TOKEN=SECRET)
    assert job.environment.variables == {"URL": f"https://u:{SECRET}@h", "HF_TOKEN": SECRET}
    job = load(tmp_path, text, {"environment.variables": ("HF_TOKEN",)}, HF_TOKEN=SECRET)
    assert job.environment.variables == {"URL": f"https://u:{SECRET}@h", "HF_TOKEN": SECRET}


def test_what_is_no_secret_text(tmp_path: Path) -> None:
    """A short value, the path of a file, and a value of a variable that is not named as a secret."""
    key = tmp_path / "id_of_mine"
    key.touch()
    text = f"script: t\nargs: [--key, {key}, abcdefg, some-words]\n"
    for environ in ({"SSH_KEY": str(key)}, {"XDG_SESSION_TOKEN": str(tmp_path)}, {"MY_KEY": "abcdefg"}):
        assert load(tmp_path, text, **environ).args[1] == str(key)
    assert load(tmp_path, text, EDITOR="some-words", TOKENIZERS="some-words").args[3] == "some-words"
    variables = f"environment: {{variables: {{SSH_KEY: {key}, PIN_KEY: abcdefg}}}}\n"
    assert load(tmp_path, text + variables).environment.variables["SSH_KEY"] == str(key)


def test_a_path_at_home_is_no_secret_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "script: t\nargs: [--key, ~/.ssh/id_of_mine]\n"
    assert_refused(error(tmp_path, text, SSH_KEY="~/.ssh/id_of_mine"), "job.yaml:2", "SSH_KEY", "args")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_of_mine").touch()
    assert load(tmp_path, text, SSH_KEY="~/.ssh/id_of_mine").args == ("--key", "~/.ssh/id_of_mine")


def test_a_secret_of_the_caller_is_in_no_message(tmp_path: Path) -> None:
    secret = "a 'quoted' \\ and long secret " + "x" * 80
    flags = {option.path: secret for option in OPTIONS if option.path != "log_level"}
    flags.pop("environment.variables")
    said = error(tmp_path, "script: t\n", {**flags, "launch.backend": secret}, WANDB_API_KEY=secret)
    assert "quoted" not in said
    assert "xxx" not in said
    assert "WANDB_API_KEY" in said


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("export HF_TOKEN=abc", "HF_TOKEN"),
        ("cd x; HF_TOKEN='a $b' python t.py", "HF_TOKEN"),
        ('export A=1 API_KEY="a b"', "API_KEY"),
        ("setenv DB_PASSWORD abc", "DB_PASSWORD"),
        ("--export=ALL,HF_TOKEN=abc", "HF_TOKEN"),
        ("export HF_TOKEN=$(cat ~/.key)", None),
        ('export HF_TOKEN="$OTHER"', None),
        ("export HF_TOKEN=`pass show hf`", None),
        ("export HF_TOKEN=", None),
        ("unset HF_TOKEN", None),
        ("sort --key=2 file", None),
        ("export TOKENIZERS_PARALLELISM=false", None),
    ],
)
def test_secrets_in_shell_lines(line: str, name: str | None) -> None:
    assert literal_secret(line) == name


def test_an_assignment_is_reported_once(tmp_path: Path) -> None:
    text = f"script: t\nenvironment:\n  setup: export HF_TOKEN={SECRET}\n  variables: {{HF_TOKEN: {SECRET}}}\n"
    said = error(tmp_path, text)
    assert said.startswith("job.yaml:3: environment.setup gives HF_TOKEN ")
    assert (said.count("job.yaml:"), SECRET in said) == (1, False)
