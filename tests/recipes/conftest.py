"""The modules of a recipe, in the tests' own process."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

NAMES = ("data", "model", "train")


@pytest.fixture
def recipe(request, monkeypatch):
    """Give the modules of the recipe in the test file's RECIPE by name. Recipes share these names."""
    monkeypatch.syspath_prepend(str(request.module.RECIPE))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]
