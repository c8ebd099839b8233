"""Secrets are in no record, source or message; plain data survives being written as YAML."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.errors import JobError
from allranks.job.load import load_job
from allranks.job.spec import Environment, Job
from allranks.job.variables import redacted, secret_names
from allranks.job.yaml import dump_yaml
from allranks.job.yaml_reader import parse_yaml

NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in ("UID", "EUID", "PPID", "ALLRANKS")
)
SECRET_NAMES = st.builds(str.__add__, NAMES, st.sampled_from(["_KEY", "_TOKEN", "_SECRET", "PASSWORD", "_token"]))
#: Any job's keys and defaults: hypothesis tries words of the source, and one of these hides nothing.
ANY_JOB = dump_yaml(redacted(Job(script="t")))
SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=8, max_size=20).filter(
    lambda text: text not in f"<secret>{ANY_JOB}" and "\\x" not in repr(text) and not Path(text).exists()
)
TEXTS = st.text(st.characters(exclude_characters="\0"), max_size=20)


def load_text(text: str, **environ: str) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(text, encoding="utf-8", newline="")
        return load_job(Path("job.yaml"), flags={}, environ=environ, cwd=Path(folder)).job


@settings(max_examples=60)
@given(name=SECRET_NAMES, secret=SECRETS)
def test_a_secret_is_in_no_dump_and_no_source(name: str, secret: str) -> None:
    flags = {"script": "t", "environment.variables": (f"{name}={secret}", f"URL=a{secret}b")}
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_job(None, flags=flags, environ={}, cwd=Path(folder))
    assert loaded.job.environment.variables == {name: secret, "URL": f"a{secret}b"}
    data = redacted(loaded.job)
    assert data["environment"]["variables"] == {name: "<secret>", "URL": "<secret>"}
    sources = [str(source) for source in loaded.sources.values()]
    assert not any(secret in text for text in [json.dumps(data, ensure_ascii=False), *sources])


@settings(max_examples=60)
@given(name=SECRET_NAMES, secret=st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=12, max_size=20))
def test_a_secret_is_in_no_error(name: str, secret: str) -> None:
    text = (
        f"script: t\nlaunch: {{backend: {secret}}}\nenvironment:\n  setup: export {name}={secret}\n"
        f"  variables: {{{name}: {secret}, X{name}: [{secret}]}}\nresources: {{time: {secret}, nodes: x}}\n"
    )
    with pytest.raises(JobError) as caught:
        load_text(text)
    assert secret not in str(caught.value)
    assert f"gives {name} a secret" in str(caught.value)


@settings(max_examples=60)
@given(variables=st.dictionaries(NAMES, TEXTS, max_size=3), args=st.lists(TEXTS, max_size=4), secret=SECRETS)
def test_a_recorded_job_can_be_loaded_again(variables: dict[str, str], args: list[str], secret: str) -> None:
    plain = {f"{name}_": value for name, value in variables.items()}
    given = {**plain, "A_TOKEN": secret, "A_URL": f"https://me:{secret}@host"}
    job = Job(script="t", args=tuple(args), environment=Environment(variables=given))
    if any(secret in text or "<secret>" in text for text in args):
        return
    environ = {name: given[name] for name in secret_names(given)}
    assert load_text(dump_yaml(redacted(job)), **environ) == job


@pytest.mark.parametrize("secret", ["x" * 200, 'it\'s a "secret" \\ of mine', "12345678.50"])
def test_secrets_that_look_different_when_shown(secret: str) -> None:
    tree = {"script": "t", "launch": {"backend": secret}, "resources": {"time": f" {secret} "}}
    with pytest.raises(JobError) as caught:
        load_text(dump_yaml({**tree, "environment": {"variables": {"A_KEY": secret}}}))
    errors = str(caught.value).split("\nerror: ")
    assert [each.partition(": ")[0] for each in errors] == ["job.yaml:3"] * 2 + ["job.yaml:5"] * 2
    assert (secret in str(caught.value), "'<secret>'" in errors[1], "' <secret> '" in errors[3]) == (False, True, True)


def test_a_recorded_secret_must_be_in_the_environment() -> None:
    with pytest.raises(JobError) as caught:
        load_text("script: t\nenvironment:\n  variables:\n    HF_TOKEN: <secret>\n")
    assert (str(caught.value).startswith("job.yaml:4: HF_TOKEN "), "export HF_TOKEN" in str(caught.value)) == (
        True,
        True,
    )


def test_a_variable_that_holds_a_secret_is_recorded_and_taken_up_as_a_whole() -> None:
    text = "script: t\nenvironment: {variables: {HF_TOKEN: <secret>, URL: <secret>}}\n"
    both = {"HF_TOKEN": "hf_0123456789", "URL": "https://u:hf_0123456789@h"}
    job = load_text(text, **both)
    assert job.environment.variables == both
    assert redacted(job)["environment"]["variables"] == {"HF_TOKEN": "<secret>", "URL": "<secret>"}
    with pytest.raises(JobError, match=r"^job.yaml:2: URL is not set"):
        load_text(text, HF_TOKEN="hf_0123456789")
    with pytest.raises(JobError, match=r"^job.yaml:2: URL cannot be <secret>"):
        load_text(text, HF_TOKEN="another_one", URL=both["URL"])


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("environment: {variables: {URL: 'https://u:<secret>@h'}}", "environment.variables.URL"),
        ("environment: {variables: {HF_TOKEN: 'hf_<secret>'}}", "environment.variables.HF_TOKEN"),
        ("environment: {setup: 'curl -u <secret> h'}", "environment.setup"),
        ("args: [--key, <secret>]", "args"),
    ],
)
def test_no_rank_gets_the_words_that_stand_for_a_secret(line: str, place: str) -> None:
    with pytest.raises(JobError, match=rf"^job.yaml:2: {place} .*<secret>"):
        load_text(f"script: t\n{line}\n", HF_TOKEN="hf_0123456789", URL="x")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | TEXTS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(max_size=8), PLAIN, min_size=1, max_size=4))
def test_plain_data_survives_being_written(data: dict[str, object]) -> None:
    assert parse_yaml(dump_yaml(data), "x") == as_read(data)


def as_read(value: object) -> object:
    """Return plain data as it is read again: numbers as they are written."""
    if isinstance(value, dict):
        return {key: as_read(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_read(item) for item in value]
    return value if value is None or isinstance(value, bool | str) else json.dumps(value)


def test_yaml_is_written_to_be_read() -> None:
    data = {
        "name": "mnist",
        "time": "48:00:00",
        "no": "yes",
        "list": ["a", [1, {"b": 2.5}], {}],
        "none": None,
    }
    assert dump_yaml(data) == (
        'name: mnist\ntime: "48:00:00"\n"no": "yes"\nlist:\n  - a\n  - - 1\n    - b: 2.5\n  - {}\nnone: null\n'
    )
