"""The page of the Python API has all that `import allranks` gives."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from types import ModuleType

import pytest
from doc_pages import ROOT

import allranks
from allranks.errors import AllranksError
from allranks.runtime.context import Context
from allranks.runtime.exchange import CpuGroup
from allranks.runtime.progress import Progress

PAGE = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^##+ `(\S+)`$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def python_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_api", ROOT / "docs" / "python_api.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["python_api"] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_public_name():
    assert {"allranks.init" if name == "init" else name for name in allranks.__all__} - {"__version__"} <= {*HEADINGS}


@pytest.mark.parametrize("cls", [Context, Progress, CpuGroup, AllranksError], ids=lambda cls: cls.__name__)
def test_the_page_has_every_public_member(cls: type, python_api: ModuleType):
    (shown,) = (each for each in python_api.CLASSES if each.name == cls.__name__)
    section = PAGE.partition(f"\n## `{cls.__name__}`\n")[2].partition("\n## ")[0]
    attributes = re.findall(r"^- `(\w+)`", section.partition("\n### ")[0], re.MULTILINE)
    members = [name.partition(".")[2] for name in HEADINGS if name.startswith(f"{cls.__name__}.")]
    names = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
    public = {name for name in names if not name.startswith("_") and not hasattr(Exception, name)}
    assert public <= {*attributes, *members, *shown.internal.split()}
    assert {*members, *shown.internal.split()} <= names


def test_a_signature_on_the_page_is_that_of_the_function():
    shown = re.search(r"\nctx\.evaluation_loader\((.*?)\) -> EvaluationLoader\n", PAGE, re.DOTALL)
    assert shown is not None
    taken = inspect.signature(Context.evaluation_loader).parameters.values()
    assert re.findall(r"^    (\w+):", shown[1], re.MULTILINE) == [each.name for each in taken if each.name != "ctx"]
    assert [line for line in shown[1].splitlines() if " = " not in line] == [
        "", "    dataset: Any,", "    *,", "    batch_size: int,"
    ]  # fmt: skip


def test_roles_become_links(python_api: ModuleType):
    assert "as for [`loader`](#contextloader)" in PAGE
    assert not re.search(r":(meth|func|class|attr|data):|(?<!`)``(?!`)", PAGE)
    anchors = {re.sub(r"[^\w-]", "", name.lower()) for name in HEADINGS}
    assert {*re.findall(r"\]\(#([^)]+)\)", PAGE)} <= anchors


def test_a_docstring_that_misses_an_argument_is_refused(python_api: ModuleType):
    node = python_api.ast.parse('def f(a, *, b=1):\n    """Do it.\n\n    Args:\n        a: one.\n    """').body[0]
    with pytest.raises(ValueError, match=r"the docstring of f describes \['a'\], and it takes \['a', 'b'\]"):
        list(python_api._Writer(frozenset()).function(node, "f", "f", "", "##"))
