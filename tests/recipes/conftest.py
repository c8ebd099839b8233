"""The modules of a recipe, in the tests' own process."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

NAMES = ("data", "model", "train")
#: Runs a script that is asked to stop at the end of its first step, wherever it comes to then.
STOPPED = """
import os, runpy, signal, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import allranks
init = allranks.init

def then_signal(**options):
    ctx = init(**options)
    os.kill(os.getpid(), signal.SIGUSR1)
    return ctx

allranks.init = then_signal
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def recipe(request, monkeypatch):
    """Give the modules of the recipe in the test file's RECIPE by name. Recipes share these names."""
    monkeypatch.syspath_prepend(str(request.module.RECIPE))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]


@pytest.fixture(scope="session")
def stopping(tmp_path_factory):
    """Give a script that runs another one, named first, which is asked to stop at the end of its first step."""
    path = tmp_path_factory.mktemp("stopping") / "stopping.py"
    path.write_text(STOPPED)
    return path
