"""What is said of a job's script, imports, configuration and versions, from what nodes tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import found, seen_of

from allranks.checks.model import Finding, Grade
from allranks.checks.topics.job import named_files, named_folders, pairs, why_no_config

PYTHON = {"python": "3.11.2", "executable": "/env/bin/python"}
TORCH = {"version": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3"}


def _grades(findings: list[Finding]) -> list[tuple[Grade, str, str]]:
    return [(each.grade, each.host, each.what) for each in findings]


def _script(**more: Any) -> dict[str, Any]:
    return {
        "script": {"error": None, "digest": "a", "missing": [], "imports": 3, "alters_path": False, **more},
        "host": PYTHON,
    }


def test_a_script_that_one_node_does_not_see() -> None:
    seen = seen_of({"gpu01": _script(), "gpu02": {"script": {"error": "there is no /x/train.py"}}})
    good, bad = found("script", seen)
    assert (good.grade, good.host) == (Grade.PASS, "gpu01")
    assert (bad.grade, bad.host, bad.what) == (Grade.FAIL, "gpu02", "there is no /x/train.py")


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("local", "it was looked for in / and in /env/bin/python: correct the name, or --workdir DIR that has it"),
        ("ssh", "it must be at the same path on all nodes; --sync rsync copies it over SSH"),
    ],
)
def test_a_module_that_is_missing_on_this_machine_has_nothing_to_be_copied(kind: str, fix: str) -> None:
    seen = seen_of({"here": _script(error="there is no module nosuch")}, {"binary": None, "module": "nosuch"})
    (bad,) = found("script", replace(seen, plan=replace(seen.plan, kind=kind)))
    assert (bad.what, bad.fix) == ("there is no module nosuch", fix)


def test_a_module_that_is_spelled_nearly_so(tmp_path: Path) -> None:
    for name in ("train.py", "pkg/tools.py", "pkg/main/__main__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    fixes = {"trian": "train", "pkg.tool": "pkg.tools", "pkg.mian": "pkg.main"}
    for module, meant in fixes.items():
        seen = seen_of({"here": _script(error=f"there is no module {module}")}, {"binary": None, "module": module})
        (bad,) = found("script", replace(seen, plan=replace(seen.plan, workdir=str(tmp_path))))
        assert bad.fix == f"did you mean -m {meant}?"


def _lacking(*names: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "file": "/x/train.py", "line": line, "near": None, **more} for line, name in enumerate(names)
    ]


ELSE = ", or environment.venv, .conda or .modules that have it"


def test_an_import_that_is_missing_names_its_line() -> None:
    (bad,) = found("imports", seen_of({"gpu01": _script(missing=_lacking("a.b", "a.c", "d", "e"))}))
    assert bad.what == "not found: a.b (train.py:0), a.c (train.py:1) and d (train.py:2) and 1 more"
    assert bad.fix == f"install what has a, d and e{ELSE}"
    assert bad.grade is Grade.FAIL
    (bad,) = found("imports", seen_of({"gpu01": _script(missing=_lacking("torch", "torch.utils.data"))}))
    assert bad.what == "not found: torch (train.py:0)"


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        (_lacking("cv2", "yaml"), f"/env/bin/python -m pip install opencv-python-headless PyYAML{ELSE}"),
        (_lacking("PIL.Image", "b"), f"/env/bin/python -m pip install pillow and install what has b{ELSE}"),
        (
            _lacking("datasets.mine", near="/x"),
            "datasets is in /x, which is not on Python's path: environment.variables.PYTHONPATH: /x",
        ),
        (
            _lacking("src.net", "src.loss"),
            "src looks like code of the job's own: copy it there, or environment.variables.PYTHONPATH",
        ),
    ],
)
def test_a_stranger_s_package_is_not_installed(missing: list[dict[str, Any]], fix: str) -> None:
    (bad,) = found("imports", seen_of({"gpu01": _script(missing=missing)}))
    assert bad.fix == fix


def test_what_another_node_has_is_taken_from_there() -> None:
    missing = _lacking("einops", "nosuch")
    lacks_a_source = _script(missing=_lacking("own"), digest="b")
    seen = seen_of(
        {"gpu0": lacks_a_source, "gpu1": _script(missing=missing), "gpu2": {}, "gpu3": _script(missing=missing[1:])}
    )
    fixes = [each.fix for each in found("imports", seen) if each.grade is Grade.FAIL]
    assert fixes == [
        f"install what has own{ELSE}",
        f"einops is on gpu3: install the same, or copy it; install what has nosuch{ELSE}",
        f"install what has nosuch{ELSE}",
    ]


def test_an_import_that_the_script_may_find_as_it_runs_is_no_failure() -> None:
    missing = _lacking("layers", line=3)
    (bad,) = found("imports", seen_of({"gpu01": _script(missing=missing, alters_path=True)}))
    assert bad.grade is Grade.WARN
    told = "; the job alters where modules are found, and may find them as it runs"
    assert bad.what == f"not found: layers (train.py:3){told}"


def test_a_call_that_rank_0_makes_alone_is_noted_where_there_are_others() -> None:
    lone = [{"call": "checkpoints.save()", "file": "/x/train.py", "line": 40}]
    facts = {"gpu01": _script(lone=lone), "gpu02": _script()}
    assert [each.grade for each in found("one-rank", seen_of(facts))] == [Grade.PASS] * 2
    bad, good = found("one-rank", seen_of(facts, {"launch": {"nproc_per_node": 2}}))
    assert (bad.grade, bad.host, good.grade) == (Grade.WARN, "gpu01", Grade.PASS)
    assert bad.what == "only rank 0 calls checkpoints.save() (train.py:40), and would wait there for the others"


def test_what_was_not_set_up_is_not_judged() -> None:
    missing = _lacking("a")
    seen = seen_of({"gpu01": {**_script(missing=missing), "torch": None}}, is_prepared=False)
    for name in ("imports", "versions"):
        assert [each.grade for each in found(name, seen)] == [Grade.SKIP]


def test_a_script_that_differs_on_one_node() -> None:
    facts = {f"gpu{number}": _script(digest="b" if number == 3 else "a") for number in range(1, 5)}
    (bad,) = found("same-script", seen_of(facts))
    assert (bad.grade, bad.host) == (Grade.WARN, "gpu3")
    assert [each.grade for each in found("same-script", seen_of({"gpu1": _script()}))] == [Grade.SKIP]


def _versions(backend: str, **odd: Any) -> list[tuple[Grade, str, str]]:
    facts = {f"gpu{number}": {"host": PYTHON, "torch": TORCH} for number in range(1, 4)}
    facts["gpu2"] = {"host": {**PYTHON, "python": odd.pop("python", "3.11.2")}, "torch": {**TORCH, **odd}}
    seen = seen_of(facts, {"launch": {"backend": "gloo"}})
    from dataclasses import replace

    return _grades(found("versions", replace(seen, plan=replace(seen.plan, backend=backend))))


def test_versions_that_differ_name_the_odd_node() -> None:
    same = "Python 3.11.2, torch 2.13.0+cu128, CUDA 12.8, NCCL 2.27.3"
    assert _versions("nccl") == [(Grade.PASS, "", same)]
    assert _versions("nccl", version="2.4.0") == [(Grade.FAIL, "gpu2", "torch 2.4.0, and 2.13.0+cu128 on the others")]
    assert _versions("nccl", nccl="2.20.5") == [(Grade.FAIL, "gpu2", "nccl 2.20.5, and 2.27.3 on the others")]
    assert _versions("nccl", cuda="12.6") == [(Grade.WARN, "gpu2", "cuda 12.6, and 12.8 on the others")]
    assert _versions("gloo", python="3.12.1") == [(Grade.WARN, "gpu2", "python 3.12, and 3.11 on the others")]


def test_versions_that_may_differ() -> None:
    assert [grade for grade, *_ in _versions("gloo", version="2.13.0+cpu", cuda=None, nccl=None)] == [Grade.PASS]
    assert [grade for grade, *_ in _versions("gloo", python="3.11.9")] == [Grade.PASS]


def test_no_torch_on_one_node() -> None:
    facts = {f"gpu{number}": {"host": PYTHON, "torch": TORCH} for number in range(1, 4)}
    facts["gpu2"] = {"host": PYTHON, "torch": None}
    assert _grades(found("versions", seen_of(facts))) == [
        (Grade.FAIL, "gpu2", "torch missing, and 2.13.0 on the others")
    ]
    nowhere = {"gpu1": {"host": PYTHON, "torch": None}}
    assert _grades(found("versions", seen_of(nowhere))) == [(Grade.PASS, "", "Python 3.11.2, no torch")]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a: 1\nb: [1, 2\n", "line 3: expected ',' or ']', but got '<stream end>'"),
        ("a.yml", "a: !mine {b: 1}\n", None),
        ("a.json", '{"a": 1,}', "Expecting property name enclosed in double quotes: line 1 column 9 (char 8)"),
        ("a.json", '{"a": 1}', None),
        ("a.toml", "a = 1\n", None),
        (
            "a.yaml",
            "a: \x01\n",
            'unacceptable character #x0001: special characters are not allowed in "FILE", position 3',
        ),
        ("a.json", "[" * 100_000, "it is nested too deeply"),
        ("a.json", "[" * (1 << 21), None),
    ],
)
def test_a_configuration_that_cannot_be_parsed(tmp_path: Path, name: str, text: str, why: str | None) -> None:
    (tmp_path / name).write_text(text)
    found = why_no_config(tmp_path / name)
    assert (found and found.replace("<unicode string>", "FILE")) == why


def _config(tmp_path: Path, *args: str, **files: Any) -> list[Finding]:
    job = {"workdir": str(tmp_path), "args": list(args)}
    return found("config", seen_of({"gpu1": {"files": files.get("on_node", {})}}, job))


def test_a_configuration_that_is_named_must_be_there(tmp_path: Path) -> None:
    (bad,) = _config(tmp_path, "--lr", "0.1", "--config", "conf/big.yaml")
    assert (bad.grade, bad.what) == (Grade.FAIL, f"there is no {tmp_path}/conf/big.yaml, which --config names")
    (bad,) = _config(tmp_path, "--deepspeed_config=ds.json")
    assert bad.grade is Grade.FAIL


def test_a_configuration_that_lies_deeper_may_be_meant(tmp_path: Path) -> None:
    (tmp_path / "conf" / "exp").mkdir(parents=True)
    (tmp_path / "conf" / "exp" / "big.yaml").touch()
    (good,) = _config(tmp_path, "--config", "big.yaml")
    assert (good.grade, good.what) == (Grade.PASS, f"{tmp_path}/conf/exp/big.yaml: taken to be what --config means")


def test_a_configuration_in_a_hidden_directory_is_not_meant(tmp_path: Path) -> None:
    (tmp_path / ".old").mkdir()
    (tmp_path / ".old" / "big.yaml").touch()
    (bad,) = _config(tmp_path, "--config", "big.yaml")
    assert (bad.grade, bad.what) == (Grade.FAIL, f"there is no {tmp_path}/big.yaml, which --config names")


def test_json_may_have_comments_in_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{} // of deepspeed")
    (tmp_path / "a.yaml").write_text("[")
    grades = [each.grade for each in _config(tmp_path, "--deepspeed_config", "ds.json", "--config", "a.yaml")]
    assert grades == [Grade.WARN, Grade.FAIL]


def test_a_configuration_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("train.py", "big.yaml"):
        (tmp_path / "elsewhere" / name).touch()
    job = {"binary": None, "script": str(tmp_path / "elsewhere" / "train.py"), "args": ["--config", "big.yaml"]}
    (good,) = found("config", seen_of({"gpu1": {"files": {}}}, job))
    assert (good.grade, good.what) == (Grade.PASS, f"{tmp_path}/elsewhere/big.yaml: taken to be what --config means")


def test_a_configuration_that_a_set_up_may_write(tmp_path: Path) -> None:
    job = {"workdir": str(tmp_path), "args": ["--config", "big.yaml"]}
    (good,) = found("config", seen_of({"gpu1": {"files": {}}}, job, is_prepared=False))
    assert good.grade is Grade.PASS


def test_a_configuration_that_only_the_machines_have(tmp_path: Path) -> None:
    """What lies in the working directory is copied to them; they may have what lies elsewhere."""
    job = {"workdir": str(tmp_path), "args": ["--config", "/data/big.yaml", "--cfg", "here.yaml"]}
    seen = seen_of({"gpu1": {}}, job)
    seen = replace(seen, plan=replace(seen.plan, copied_to="allranks/job"))
    assert [each.grade for each in found("config", seen)] == [Grade.PASS, Grade.FAIL]


@pytest.mark.parametrize("value", ["s3://b/x.yaml", "a.yaml,b.yaml", "$HOME/a.yaml", "~/a.yaml", "conf/*.yaml"])
def test_what_only_the_script_makes_a_path_of_is_no_file(value: str) -> None:
    assert named_files(("--config", value), Path("/w")) == []


def test_data_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert [each.grade for each in _config(tmp_path, "--train-file", "lines.json")] == [Grade.PASS]


def test_what_the_script_may_write_need_not_be_there(tmp_path: Path) -> None:
    assert [each.grade for each in _config(tmp_path, "--metrics", "out.json")] == [Grade.PASS]
    assert [each.grade for each in _config(tmp_path, "--save-config", "out.yaml")] == [Grade.SKIP]
    assert [each.grade for each in _config(tmp_path, "--lr", "0.1")] == [Grade.SKIP]


def test_a_configuration_that_a_node_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    path.write_text("{}")
    (good,) = _config(tmp_path, "--config", "big.json", on_node={str(path): None})
    assert (good.grade, good.what) == (Grade.PASS, f"{path} (--config)")
    (bad,) = _config(tmp_path, "--config", "big.json", on_node={str(path): "No such file or directory"})
    assert (bad.grade, bad.what) == (Grade.FAIL, f"gpu1 cannot read {path}")


def test_the_folder_of_runs_must_be_shared() -> None:
    seen = seen_of({"gpu1": {"shared": "word"}, "gpu2": {"shared": "No such file or directory: /r/w"}}, word="word")
    good, bad = found("shared", seen)
    assert (good.grade, bad.grade, bad.what) == (Grade.PASS, Grade.FAIL, "No such file or directory: /r/w")


def test_options_and_their_values() -> None:
    args = ("a", "--x", "1", "--y=2", "--flag", "--z", "b.yaml", "c")
    assert [*pairs(args)] == [("", "a"), ("--x", "1"), ("--y", "2"), ("--z", "b.yaml"), ("", "c")]
    assert named_files(args, Path("/w")) == [("--z", Path("/w/b.yaml"))]
    folders = ("--checkpoint-dir", "ck", "--output_dir=/o", "--save-every", "3", "--lr", "ck")
    assert named_folders(folders, Path("/w")) == {"--checkpoint-dir": "/w/ck", "--output_dir": "/o"}


@given(st.lists(st.sampled_from(["a", "-b", "--c", "--d=e", "f.yaml"])))
def test_every_value_is_there_once(args: list[str]) -> None:
    values = [word.partition("=")[2] if "=" in word else word for word in args if "=" in word or word[0] != "-"]
    assert [value for _, value in pairs(args)] == values
