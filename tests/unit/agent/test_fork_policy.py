"""When ranks may be forked from a process that has imported torch, and why not."""

from __future__ import annotations

import pytest

from allranks.agent.workers import fork_policy
from node_orders import NODE

SETS = {
    "os.environ['OMP_NUM_THREADS'] = '2'": "OMP_NUM_THREADS",
    'os.environ[ "MKL_NUM_THREADS" ]= str(n)': "MKL_NUM_THREADS",
    "environ.setdefault('TORCH_LOGS', '+dynamo')": "TORCH_LOGS",
    "os.putenv('LD_PRELOAD', x)": "LD_PRELOAD",
    "os.environ.update({'A': '1', 'KMP_AFFINITY': 'x'})": "KMP_AFFINITY",
    "os.environ.update(\n    OMP_NUM_THREADS='1',\n)": "OMP_NUM_THREADS",
    "os.environ |= {'PYTORCH_CUDA_ALLOC_CONF': 'x'}": "PYTORCH_CUDA_ALLOC_CONF",
    "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'": "TORCH_DISTRIBUTED_DEBUG",
    "os.environ['PYTHONHASHSEED'] = '0'": "PYTHONHASHSEED",
}
HARMLESS = [
    "n = os.environ['OMP_NUM_THREADS']",
    "if os.environ['OMP_NUM_THREADS'] == '1': pass",
    "os.environ.get('OMP_NUM_THREADS', '1')",
    "os.environ['NCCL_DEBUG'] = 'INFO'",
    "os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '1'",
    "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
    "os.environ['MY_OMP_NUM_THREADS'] = '0'",
    "os.environ.update({'A': '1'})\nPYTHON = {'LD_PRELOAD': 1}",
]


def _why(tmp_path, source, name="train.py"):
    path = tmp_path / name
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return fork_policy.why_plain(NODE._replace(target=str(path)))


@pytest.mark.parametrize("source", SETS)
def test_a_script_that_sets_what_torch_reads_early_starts_plainly(tmp_path, source):
    why = f"train.py sets {SETS[source]}, which is read while torch is imported"
    assert _why(tmp_path, f"import os\n{source}\nimport torch\n") == why


@pytest.mark.parametrize("source", HARMLESS)
def test_other_scripts_are_forked(tmp_path, source):
    assert _why(tmp_path, f"import os\n{source}\nimport torch\n") is None


@pytest.mark.parametrize("source", [b"\xff\xfe", b"# coding: nonsense\n", b"x = '\0'\n"])
def test_what_python_would_not_read_is_left_to_python(tmp_path, source):
    assert _why(tmp_path, source) == "train.py cannot be read as Python source"


def test_archives_are_left_to_python(tmp_path):
    assert _why(tmp_path, b"PK", "train.pyz") == "train.pyz is not a plain source file"
    assert fork_policy.why_plain(NODE._replace(target=str(tmp_path))) == f"{tmp_path.name} is not a plain source file"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "binary"}, "the job runs a program, not Python"),
        ({"warm": False}, "launch.warm is false"),
        ({"python_options": ("-O", "-X", "dev")}, "the interpreter has options: -O -X dev"),
        ({"kind": "module", "target": "pkg.train"}, None),
    ],
)
def test_the_job_says_how_ranks_start(changes, why):
    assert fork_policy.why_plain(NODE._replace(**changes)) == why


@pytest.mark.parametrize("name", ["COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"])
def test_coverage_starts_with_the_interpreter(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, ".coveragerc")
    assert _why(tmp_path, "") == f"{name} is set: coverage starts with the interpreter"


def _needs_torch(tmp_path, source, **changes):
    path = tmp_path / "train.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return fork_policy.needs_torch(NODE._replace(target=str(path), **changes))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "import os, sys, xml.etree.ElementTree as tree\nfrom concurrent.futures import wait",
        "from __future__ import annotations\ndef f():\n    import json",
        "pattern = '\\d'  # A warning of the interpreter's is not ours to give.",
    ],
)
def test_a_script_of_the_standard_library_alone_needs_no_torch(tmp_path, source):
    assert not _needs_torch(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "def f():\n    from torch.nn import Module",
        "import os, numpy",
        "import allranks",
        "from . import model",
        "from .os import model",
        "import model",
        "import importlib\nimportlib.import_module(name)",
        "from runpy import run_path",
        "__import__(name)",
        "exec(open('other.py').read())",
        "os.execvp('torchrun', ['torchrun', 'train.py'])",
        "this is no Python",
        b"\xff\xfe",
        "-" * 100_000 + "1",
    ],
)
def test_any_other_script_may_need_it(tmp_path, source):
    assert _needs_torch(tmp_path, source)


@pytest.mark.parametrize(
    ("changes", "needs"),
    [({"kind": "binary"}, False), ({"kind": "module", "target": "json.tool"}, True), ({"target": "/nowhere"}, True)],
)
def test_what_is_no_script(changes, needs):
    assert fork_policy.needs_torch(NODE._replace(**changes)) == needs


def test_that_there_are_several_nodes_changes_nothing(tmp_path):
    assert not _needs_torch(tmp_path, "import os", nnodes=2)
    assert _needs_torch(tmp_path, "import torch", nnodes=2)


@pytest.mark.parametrize(
    ("source", "kind", "has_gpu", "expected"),
    [
        ("import torch\nopt = torch.optim.Adam([])\n", "script", False, True),
        ("import torch\nopt = torch.optim.Adam([])\n", "script", True, False),
        ("import torch\nopt = torch.optim.Adam([])\n", "module", False, False),
        ("import torch\n", "script", False, False),
        ("import torch\0optim", "script", False, False),
    ],
)
def test_what_an_optimizer_imports_is_expected_without_a_gpu(tmp_path, monkeypatch, source, kind, has_gpu, expected):
    (tmp_path / "train.py").write_text(source)
    device = tmp_path / "device"
    device.touch() if has_gpu else None
    monkeypatch.setattr(fork_policy, "_GPU_DEVICES", (device,))
    node = NODE._replace(kind=kind, target=str(tmp_path / "train.py"))
    assert fork_policy.makes_optimizers(node) is expected


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("import torch", "write allranks.init() or torch.distributed.init_process_group()"),
        ("from lightning import Trainer", 'write Trainer(devices=N, strategy="ddp"), with N the ranks of a node'),
        ("  import pytorch_lightning as pl", 'write Trainer(devices=N, strategy="ddp"), with N the ranks of a node'),
        ("import numpy", None),
        ("print('hello')", None),
    ],
)
def test_how_a_script_that_uses_torch_forms_a_process_group(tmp_path, source, advice):
    path = tmp_path / "train.py"
    path.write_text(source)
    assert fork_policy.group_advice(NODE._replace(target=str(path))) == advice
    assert fork_policy.group_advice(NODE._replace(target=str(path), kind="binary")) is None
