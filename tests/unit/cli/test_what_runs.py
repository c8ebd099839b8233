"""Scripts, modules, programs and directories, unchanged from what torchrun or a shell would start."""

from __future__ import annotations

from pathlib import Path

SUMS = """\
import os
import torch
import torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["LOCAL_WORLD_SIZE"] == "2"
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"]) > 0
dist.init_process_group("gloo", rank=rank, world_size=world)
value = torch.tensor([float(rank + 1)])
dist.all_reduce(value)
print("sum", value.item())
dist.destroy_process_group()
"""


def test_unmodified_torchrun_script(allranks):
    allranks.script(SUMS)
    result = allranks("run", "train.py", "--nproc-per-node", "2")
    assert (result.rc, result.by_rank) == (0, {0: ["sum 3.0"], 1: ["sum 3.0"]})


def test_module(allranks):
    package = allranks.folder / "my" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, __spec__.name, sys.argv[1:])\n")
    result = allranks("run", "-m", "my.package.train", "--", "x")
    assert (result.rc, result.stdout) == (0, "[0] __main__ my.package my.package.train ['x']\n")
    assert allranks.run().name.startswith("train-")


def test_module_that_does_not_exist(allranks, checked):
    result = allranks("run", "-m", "no_such_module")
    assert (result.rc, result.stdout) == (3, "")
    assert result.stderr.startswith("error: script on ")
    assert "there is no module no_such_module" in result.stderr
    result = allranks("run", "-m", "no_such_module", "--no-check")
    assert (result.rc, result.stdout) == (1, "")
    assert "No module named no_such_module" in result.stderr


def test_program(allranks):
    program = allranks.script("#!/bin/bash\nprintf '%s of %s:' $RANK $WORLD_SIZE; printf ' <%s>' \"$@\"; echo\n", "go")
    program.chmod(0o755)
    result = allranks("run", "--binary", "./go", "--nproc-per-node", "2", "--", "a b", "$HOME")
    assert result.rc == 0
    assert sorted(result.stdout.splitlines()) == ["[0] 0 of 2: <a b> <$HOME>", "[1] 1 of 2: <a b> <$HOME>"]


def test_program_on_path(allranks):
    result = allranks("run", "--binary", "printenv", "--", "RANK")
    assert (result.rc, result.stdout) == (0, "[0] 0\n")


def test_folder_with_a_main(allranks):
    folder = allranks.folder / "my app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import helper, sys\nprint(helper.NAME, sys.argv[1:])\n")
    (folder / "helper.py").write_text("NAME = 'helper'\n")
    result = allranks("run", "my app", "--", "1")
    assert (result.rc, result.stdout) == (0, "[0] helper ['1']\n")
    assert allranks.run().name.startswith("my-app-")


def test_imports_beside_the_script(allranks):
    source = allranks.folder / "src"
    source.mkdir()
    (source / "train.py").write_text("import helper\nprint(helper.NAME, __file__)\n")
    (source / "helper.py").write_text("NAME = 'beside'\n")
    result = allranks("run", "src/train.py")
    assert (result.rc, result.stdout) == (0, f"[0] beside {source}/train.py\n")


HOSTILE = ["$(touch pwned)", "`touch pwned`", "; touch pwned", "a\nb; touch pwned", "'\"\\", "", "-- --rank", "*"]
SHOW = """\
import json, os, sys
json.dump([sys.argv[1:], os.environ["NASTY"], os.environ["CALLER"], os.getcwd()], open(os.environ["OUT"], "w"))
"""


def test_hostile_values_from_end_to_end(allranks, tmp_path: Path, weird_tmp_path: Path):
    """Everything that a user can set, set to what a shell would execute."""
    import json

    nasty = "\n".join(HOSTILE)
    workdir = weird_tmp_path / "$(touch pwned)\nwork"
    workdir.mkdir()
    script = weird_tmp_path / "`touch pwned`.py"
    script.write_text(SHOW)
    out = tmp_path / "out.json"
    fields = {
        "script": str(script),
        "args": HOSTILE,
        "workdir": str(workdir),
        "launch": {"interface": nasty},
        "environment": {
            "variables": {"NASTY": nasty, "OUT": str(out)},
            "container": ["env", f"CONTAINER={nasty}"],
        },
        "scheduler": {"partition": nasty, "account": nasty, "directives": [nasty], "output": nasty},
        "resources": {"gpu_type": nasty},
        "runs": {"folder": str(weird_tmp_path / "runs; touch pwned")},
    }
    allranks.job(json.dumps(fields), str(weird_tmp_path / "job.yaml"))
    result = allranks("run", weird_tmp_path / "job.yaml", cwd=weird_tmp_path, CALLER=nasty)
    assert result.rc == 0, result.stderr
    assert json.loads(out.read_text()) == [HOSTILE, nasty, nasty, str(workdir)]
    assert not [path for path in tmp_path.rglob("*") if path.name == "pwned"]
    assert not Path("pwned").exists()
