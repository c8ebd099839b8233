"""The table of options fits the job, the schema fits both, and precedence holds for any mix of layers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.cli.init import SCRIPT_TEMPLATE
from allranks.cli.schema import job_schema
from allranks.job.load import load_job
from allranks.job.options import LOG_LEVEL_PATH, OPTIONS
from allranks.job.sources import GivenValue, Layer, ValueSource, merge, nested
from allranks.job.spec import Job
from allranks.job.yaml import dump_yaml


def test_every_option_is_a_field_and_every_spelling_is_its_own() -> None:
    data = Job(script="t").model_dump()
    for option in OPTIONS:
        section, _, key = option.path.rpartition(".")
        assert option.path == LOG_LEVEL_PATH or key in (data[section] if section else data), option.path
    spellings = [flag for option in OPTIONS for flag in option.flags]
    variables = [name for option in OPTIONS for name in option.variables]
    paths = [option.path for option in OPTIONS]
    for words in (spellings, variables, paths):
        assert len(words) == len(set(words))


ESTABLISHED = {
    "NPROC_PER_NODE": ("launch.nproc_per_node", "3", 3),
    "BACKEND": ("launch.backend", "gloo", "gloo"),
    "CONDA_ENV": ("environment.conda", "my-env", "my-env"),
    "MASTER_ADDR": ("launch.master_addr", "node01", "node01"),
    "MASTER_PORT": ("launch.master_port", "29400", 29400),
}


@pytest.mark.parametrize("name", ESTABLISHED)
def test_an_established_variable_gives_its_value(name: str, tmp_path: Path) -> None:
    path, given, value = ESTABLISHED[name]
    loaded = load_job(None, flags={"script": "t"}, environ={name: given}, cwd=tmp_path)
    expected = Job(script="t").model_dump()
    section, _, key = path.rpartition(".")
    (expected[section] if section else expected)[key] = value
    assert loaded.job.model_dump() == expected
    sources = {where: source for where, source in loaded.sources.items() if source.kind == "environment"}
    assert sources == {path: ValueSource("environment", name)}


def test_an_option_knows_its_variable() -> None:
    option = next(option for option in OPTIONS if option.path == "launch.nproc_per_node")
    assert not option.is_flag
    assert option.variables == ("ALLRANKS_NPROC_PER_NODE", "NPROC_PER_NODE")


def test_the_table_imports_nothing_heavy() -> None:
    code = "import sys, allranks.job.options; print({'pydantic', 'ruamel', 'click', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


VALUES = {
    "launch.max_restarts": st.integers(0, 9),
    "launch.stop_timeout": st.integers(0, 9),
    "launch.nproc_per_node": st.integers(1, 9),
    "scheduler.account": st.sampled_from(["a", "b", "c"]),
    "runs.folder": st.sampled_from(["/a", "/b"]),
}
LAYER = st.fixed_dictionaries({}, optional=VALUES)


@settings(max_examples=60)
@given(flags=LAYER, environ=LAYER, file=LAYER, cluster=LAYER)
def test_the_strongest_layer_counts(
    flags: dict[str, object], environ: dict[str, object], file: dict[str, object], cluster: dict[str, object]
) -> None:
    by_path = {option.path: option for option in OPTIONS}
    variables = {by_path[path].variables[0]: str(value) for path, value in environ.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (
            ("job.yaml", {"script": "t", "cluster": "c", **_tree(file)}),
            ("clusters.yaml", {}),
        ):
            text = dump_yaml(data or {"c": {"kind": "local", **_tree(cluster)}})
            (Path(folder) / name).write_text(text)
        given_flags = {path: str(value) for path, value in flags.items()}
        loaded = load_job(Path("job.yaml"), flags=given_flags, environ=variables, cwd=Path(folder))
    dumped = loaded.job.model_dump(mode="json")
    layers = [("flag", flags), ("environment", environ), ("job file", file), ("cluster file", cluster)]
    for path in VALUES:
        section, key = path.split(".")
        default = Job(script="t").model_dump(mode="json")[section][key]
        kind, value = next(((kind, layer[path]) for kind, layer in layers if path in layer), ("default", default))
        assert (dumped[section][key], loaded.sources[path].kind) == (value, kind)


def _tree(values: dict[str, object]) -> dict[str, object]:
    return nested({path: GivenValue(value, ValueSource("flag", "")) for path, value in values.items()})


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers()), max_size=4))
def test_merging(values: list[dict[str, int]]) -> None:
    layers: list[Layer] = [
        {key: GivenValue(n, ValueSource("flag", key)) for key, n in layer.items()} for layer in values
    ]
    merged = merge(layers)
    assert set(merged) == {key for layer in layers for key in layer}
    for key, setting in merged.items():
        assert setting is next(layer[key] for layer in layers if key in layer)


def test_the_schema_describes_every_field() -> None:
    schema = job_schema()
    json.dumps(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert (schema["title"], schema["additionalProperties"]) == ("allranks job file", False)
    for definition in (schema, *schema["$defs"].values()):
        assert definition["additionalProperties"] is False
        assert all(field["description"] for field in definition["properties"].values())
    assert set(schema["properties"]) == set(Job.model_fields)


@pytest.mark.parametrize(
    ("section", "field", "forms"),
    [
        ("Environment", "setup", [{"type": "array"}, {"type": ["string", "number"]}, {"type": "null"}]),
        ("Resources", "time", [{"type": ["string", "number"]}, {"type": "null"}]),
        ("Launch", "nproc_per_node", [{"type": "integer"}, {}, {"type": "null"}]),
    ],
)
def test_the_schema_takes_the_forms_that_a_job_file_takes(
    section: str, field: str, forms: list[dict[str, object]]
) -> None:
    found = job_schema()["$defs"][section]["properties"][field]["anyOf"]
    assert [{"type": form["type"]} if "type" in form else {} for form in found] == forms


def test_the_script_template_is_python_that_reads_the_context() -> None:
    compile(SCRIPT_TEMPLATE, "train.py", "exec")
    for name in ("ctx.prepare", "ctx.loader", "ctx.checkpoints", "with allranks.init() as ctx:"):
        assert name in SCRIPT_TEMPLATE
